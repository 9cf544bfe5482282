//! The options of scaled dot-product attention.

use std::ops::Range;

use candle_core::{D, Result, Tensor};

use candle_attention_call::ScoreModifiers;
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::base::{Dim, Expect, OptionalRef, number};
use candle_attention_modules::init::TorchSeed;

pub use candle_attention_call::OutputLayout;

/// An implementation of attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// The fastest backend that returns the right numbers for the call. It never fails for want of a feature.
    #[default]
    Auto,
    /// Candle's own differentiable operations: the specification, on every device.
    Reference,
    /// A fused kernel, or an error that says why none can run the call.
    Fused,
}

/// Options of [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), set by its `with_*` methods. An
/// option that a call may lack takes a value or an `Option`.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct SdpaOptions {
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) alibi_slopes: Option<Tensor>,
    pub(crate) relative_bias: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) dropout: f64,
    pub(crate) train: bool,
    pub(crate) dropout_seed: Option<TorchSeed>,
    pub(crate) dropout_philox_seed: Option<u64>,
    pub(crate) backend: Backend,
    pub(crate) output_layout: OutputLayout,
    pub(crate) instruction_set: Option<InstructionSet>,
}

impl SdpaOptions {
    /// Sets the factor on q kᵀ. The default is 1/sqrt(D).
    #[doc(alias = "softmax_scale")]
    pub fn with_scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Bounds the scores to ±`softcap` by `softcap · tanh(score / softcap)`, as Gemma 2 does: after the scale, and
    /// before biases are added ([`AttentionMask::with_bias`](crate::AttentionMask::with_bias), ALiBi, relative
    /// positions), which are not bounded.
    #[doc(alias = "attn_logit_softcapping")]
    pub fn with_softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Adds ALiBi: `-slope · |query position - key position|`, with a slope for each query head (H,), to the scores.
    /// See Press et al., <https://arxiv.org/abs/2108.12409>.
    pub fn with_alibi_slopes<'a>(mut self, slopes: impl OptionalRef<'a, Tensor>) -> Self {
        self.alibi_slopes = slopes.into_option().cloned();
        self
    }

    /// Adds a relative position bias (T5) to the scores: a number for each head and distance between query and key.
    ///
    /// `biases` is (H, T_q + T_kv - 1), or (B, H, T_q + T_kv - 1) with a row for each sequence. Entry `T_q - 1 + j - i`
    /// is added to the score of query i and key j: the entries of a head are the diagonals of its scores. The fused
    /// kernels of CPUs and CUDA make no tensor (T_q, T_kv) of them. Differentiable.
    ///
    /// For packed sequences, T_q and T_kv are those of the longest sequence, and i and j count within each sequence.
    ///
    /// ```
    /// use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention};
    /// use candle_core::{Device, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let q = Tensor::randn(0f32, 1., (2, 4, 5, 64), &Device::Cpu)?;
    /// let kv = Tensor::randn(0f32, 1., (2, 4, 7, 64), &Device::Cpu)?;
    /// let options = SdpaOptions::default().with_relative_bias(&Tensor::randn(0f32, 1., (4, 5 + 7 - 1), &Device::Cpu)?);
    /// let y = scaled_dot_product_attention(&q, &kv, &kv, &AttentionMask::none(), &options)?;
    /// # assert_eq!(y.dims(), [2, 4, 5, 64]);
    /// # Ok(()) }
    /// ```
    pub fn with_relative_bias<'a>(mut self, biases: impl OptionalRef<'a, Tensor>) -> Self {
        self.relative_bias = biases.into_option().cloned();
        self
    }

    /// Adds attention sinks: a logit for each query head (H,) that joins the softmax and takes weight, but has no value
    /// (gpt-oss; Xiao et al., <https://arxiv.org/abs/2309.17453>). The weights of a query then sum to less than one.
    pub fn with_sinks<'a>(mut self, sinks: impl OptionalRef<'a, Tensor>) -> Self {
        self.sinks = sinks.into_option().cloned();
        self
    }

    /// Sets the probability with which an attention weight is dropped if `train` is set. The others are divided by
    /// `1 - dropout`. The default is 0.
    #[doc(alias = "dropout_p")]
    pub fn with_dropout(mut self, dropout: f64, train: bool) -> Self {
        self.dropout = dropout;
        self.train = train;
        self
    }

    /// Draws the dropout mask from PyTorch's generator instead of the device's, for the same numbers as a PyTorch run.
    ///
    /// The next call continues the generator's stream. A mask takes one bit for each weight, B·H·T_q·T_kv bits in all.
    /// The reference path draws it on GPUs and for packed sequences.
    pub fn with_dropout_seed<'a>(mut self, seed: impl OptionalRef<'a, TorchSeed>) -> Self {
        self.dropout_seed = seed.into_option().cloned();
        self
    }

    /// Seeds a deterministic dropout mask (Philox 4×32-7), which is the same on every backend and for any number of
    /// threads. The default is a seed that the generator of the device draws for each call.
    ///
    /// Whether key j is dropped for query i of head h in sequence b follows from word `j % 4` of the key `seed` and the
    /// counter `(j / 4, i, h, b)`. For packed sequences i and j count through all sequences, and b is 0.
    pub fn with_dropout_philox_seed(mut self, seed: impl Into<Option<u64>>) -> Self {
        self.dropout_philox_seed = seed.into();
        self
    }

    /// Sets the implementation that runs. The default is [`Backend::Auto`].
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Sets the order of the output's dimensions in memory. The default is [`OutputLayout::Bhtd`].
    pub fn with_output_layout(mut self, output_layout: OutputLayout) -> Self {
        self.output_layout = output_layout;
        self
    }

    /// Sets the instruction set of the fused CPU kernel, for tests and comparisons. The default is the fastest. A call
    /// fails if the processor lacks it.
    pub fn with_instruction_set(mut self, instruction_set: impl Into<Option<InstructionSet>>) -> Self {
        self.instruction_set = instruction_set.into();
        self
    }

    /// Returns the options for some of the query heads.
    pub(crate) fn for_heads(&self, heads: &Range<usize>) -> Result<Self> {
        let mut options = self.clone();
        // A new option has to be listed here: it may have an entry for each head.
        let Self {
            scale: _,
            softcap: _,
            alibi_slopes,
            relative_bias,
            sinks,
            dropout: _,
            train: _,
            dropout_seed: _,
            dropout_philox_seed: _,
            backend: _,
            output_layout: _,
            instruction_set: _,
        } = &mut options;
        for by_head in [alibi_slopes, sinks].into_iter().flatten() {
            *by_head = by_head.narrow(0, heads.start, heads.len())?;
        }
        if let Some(biases) = relative_bias {
            *biases = biases.narrow(D::Minus2, heads.start, heads.len())?;
        }
        Ok(options)
    }

    /// Returns the options for `t_q` queries and `t_kv` keys, where the keys of sequence b begin at the key `starts[b]`
    /// of the relative bias.
    pub(crate) fn for_keys_from(&self, starts: &[usize], t_q: usize, t_kv: usize) -> Result<Self> {
        let Some(biases) = &self.relative_bias else { return Ok(self.clone()) };
        let distances = (t_q + t_kv).saturating_sub(1);
        if starts.iter().all(|&start| start == 0) && biases.dim(D::Minus1)? == distances {
            return Ok(self.clone());
        }
        let mut by_sequence = Vec::with_capacity(starts.len());
        for (b, &start) in starts.iter().enumerate() {
            let biases = if biases.rank() == 3 { biases.get(b)? } else { biases.clone() };
            // No query attends to a key after the end of its sequence, so that the rest may be zeros.
            let len = distances.min(biases.dim(1)? - start);
            by_sequence.push(biases.narrow(1, start, len)?.pad_with_zeros(1, 0, distances - len)?);
        }
        Ok(Self { relative_bias: Some(Tensor::stack(&by_sequence, 0)?), ..self.clone() })
    }

    /// Returns the score modifiers of a call with queries of `d` numbers, and with the tensors of its mask. Dropout is
    /// drawn later.
    pub(super) fn modifiers(
        &self,
        d: usize,
        bias: Option<Tensor>,
        boolean_mask: Option<Tensor>,
    ) -> ScoreModifiers<Tensor> {
        ScoreModifiers {
            scale: self.scale.unwrap_or(1.0 / (d as f64).sqrt()),
            softcap: self.softcap,
            alibi_slopes: self.alibi_slopes.clone(),
            relative_bias: self.relative_bias.clone(),
            bias,
            boolean_mask,
            sinks: self.sinks.clone(),
            dropout: None,
        }
    }

    /// Checks the tensors and the dropout of a call with queries (B, H, T_q, D). `distances` is T_q + T_kv - 1 of the
    /// longest sequence.
    pub(super) fn check(&self, op: &str, q: &Tensor, distances: usize) -> Result<()> {
        number::probability(op, "dropout", self.dropout)?;

        let b = Dim::Named("B", q.dim(0)?);
        let h = Dim::Named("H", q.dim(1)?);
        let distances = Dim::Named("T_q + T_kv - 1", distances);
        let check = |name: &str, tensor: &Option<Tensor>, shapes: &[&[Dim]]| -> Result<()> {
            let Some(tensor) = tensor else { return Ok(()) };
            let found = Expect::one(op, name, tensor).same_device("q", q.device())?;
            found.shape_of(shapes)?.float("")?;
            Ok(())
        };
        check("alibi_slopes", &self.alibi_slopes, &[&[h]])?;
        check("sinks", &self.sinks, &[&[h]])?;
        check("relative_bias", &self.relative_bias, &[&[h, distances], &[b, h, distances]])
    }

    /// Returns whether weights are dropped.
    pub(crate) fn drops(&self) -> bool {
        self.train && self.dropout > 0.0
    }

    /// Returns whether a seed determines the dropped weights. A seed counts all heads of a call, so that a call with
    /// one cannot be split by heads.
    pub(crate) fn drops_by_seed(&self) -> bool {
        self.drops() && (self.dropout_seed.is_some() || self.dropout_philox_seed.is_some())
    }
}

/// Returns whether the options have a relative bias.
pub fn has_relative_bias(options: &SdpaOptions) -> bool {
    options.relative_bias.is_some()
}

/// Returns the options without sinks. If attention is computed over several parts of the keys, only one part may have
/// the sinks.
pub fn without_sinks(options: &SdpaOptions) -> SdpaOptions {
    SdpaOptions { sinks: None, ..options.clone() }
}

/// Removes the ALiBi slopes and returns them.
pub fn take_alibi_slopes(options: &mut SdpaOptions) -> Option<Tensor> {
    options.alibi_slopes.take()
}
