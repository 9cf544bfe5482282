//! How scores become weights apart from the mask, which backend runs a call, and why.

use std::fmt;
use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use macro_rules_attribute::apply;

use super::validate::Call;
use super::{Attended, StatisticsOptions, cpu, gpu, or_reference, reference};
use crate::mask::FullyMaskedRows;
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::base::options;
use candle_attention_modules::init::TorchSeed;

pub use candle_attention_kernels::flash::OutputLayout;

/// Which implementation runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// The fastest that gives the right numbers for the call; never fails for want of a feature.
    #[default]
    Auto,
    /// Candle's own differentiable operations: the specification, on every device.
    Reference,
    /// A fused kernel, or an error that says why none can run the call.
    Fused,
}

/// Options of [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), built with `with_*`.
#[apply(options)]
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct SdpaOptions {
    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    #[methods(with)]
    pub(crate) scale: Option<f64>,
    /// Bounds the scores to ±`softcap` by `softcap · tanh(score / softcap)`, as Gemma 2 does.
    #[methods(with)]
    pub(crate) softcap: Option<f64>,
    pub(crate) alibi_slopes: Option<Tensor>,
    pub(crate) relative_bias: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) dropout: f64,
    pub(crate) train: bool,
    pub(crate) dropout_seed: Option<TorchSeed>,
    /// Drops the weights that Philox 4×32-7 names for this seed, on every path and with any number of threads: word
    /// `j % 4` of key `seed` and counter `(j / 4, i, h, b)` is of key j and query i of head h in sequence b (of packed
    /// sequences, both counted through all of them, and b is 0). Without a seed, each call draws one.
    #[methods(with)]
    pub(crate) dropout_philox_seed: Option<u64>,
    /// Which implementation runs; [`Backend::Auto`] unless given.
    #[methods(with)]
    pub(crate) backend: Backend,
    /// In which order the context lies in memory; [`OutputLayout::Bhtd`] unless given.
    #[methods(with)]
    pub(crate) output_layout: OutputLayout,
    /// The instruction set of the fused CPU kernel, for tests and comparisons; the fastest unless given. A call fails
    /// if the processor lacks it.
    #[methods(with)]
    pub(crate) instruction_set: Option<InstructionSet>,
}

impl SdpaOptions {
    /// ALiBi: adds `-slope · |query position - key position|` to the scores, a slope for each query head (H,).
    /// See Press et al., <https://arxiv.org/abs/2108.12409>.
    pub fn with_alibi_slopes(self, slopes: &Tensor) -> Self {
        Self { alibi_slopes: Some(slopes.clone()), ..self }
    }

    /// Adds a number for each head and distance of query and key to the scores (T5 and its kin): entry `T_q - 1 + j -
    /// i` of `biases` (H, T_q + T_kv - 1) to the score of query i and key j, or of (B, H, T_q + T_kv - 1) for each
    /// sequence by itself. The entries of a head are the diagonals of its scores, and no tensor (T_q, T_kv) is made of
    /// them on a CPU. Differentiable.
    ///
    /// Of packed sequences, T_q and T_kv are those of the longest, and i and j count in each sequence.
    ///
    /// ```
    /// use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention};
    /// use candle_core::{Device, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let q = Tensor::randn(0f32, 1., (2, 4, 5, 64), &Device::Cpu)?;
    /// let kv = Tensor::randn(0f32, 1., (2, 4, 7, 64), &Device::Cpu)?;
    /// let options = SdpaOptions::default().with_relative_bias(&Tensor::randn(0f32, 1., (4, 5 + 7 - 1),
    /// &Device::Cpu)?); let y = scaled_dot_product_attention(&q, &kv, &kv, &AttentionMask::none(), &options)?;
    /// # assert_eq!(y.dims(), [2, 4, 5, 64]);
    /// # Ok(()) }
    /// ```
    pub fn with_relative_bias(self, biases: &Tensor) -> Self {
        Self { relative_bias: Some(biases.clone()), ..self }
    }

    /// Whether scores get a bias by distance.
    pub fn has_relative_bias(&self) -> bool {
        self.relative_bias.is_some()
    }

    /// Attention sinks: a logit for each query head (H,) that joins the softmax and takes weight, but has no value
    /// (gpt-oss; Xiao et al., <https://arxiv.org/abs/2309.17453>). The weights of a query then sum to less than one.
    pub fn with_sinks(self, sinks: &Tensor) -> Self {
        Self { sinks: Some(sinks.clone()), ..self }
    }

    /// The same without sinks: of several parts of the keys, attention to one has them.
    pub fn without_sinks(self) -> Self {
        Self { sinks: None, ..self }
    }

    /// Those of some of the heads.
    pub(crate) fn of_heads(&self, heads: &Range<usize>) -> Result<Self> {
        let mut own = self.clone();
        for by_head in [&mut own.alibi_slopes, &mut own.sinks].into_iter().flatten() {
            *by_head = by_head.narrow(0, heads.start, heads.len())?;
        }
        if let Some(biases) = &mut own.relative_bias {
            *biases = biases.narrow(D::Minus2, heads.start, heads.len())?;
        }
        Ok(own)
    }

    /// Those of `t_q` queries and `t_kv` keys, of which the first of each sequence is the one at its start: each its
    /// part of a distance bias.
    pub(crate) fn of_keys(&self, starts: &[usize], t_q: usize, t_kv: usize) -> Result<Self> {
        let Some(biases) = &self.relative_bias else { return Ok(self.clone()) };
        let distances = (t_q + t_kv).saturating_sub(1);
        if starts.iter().all(|&start| start == 0) && biases.dim(D::Minus1)? == distances {
            return Ok(self.clone());
        }
        let part = |(s, &start): (usize, &usize)| {
            let own = if biases.rank() == 3 { biases.get(s)? } else { biases.clone() };
            // No query sees a key behind the end of its sequence.
            let len = distances.min(own.dim(1)? - start);
            own.narrow(1, start, len)?.pad_with_zeros(1, 0, distances - len)
        };
        let parts = starts.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Self { relative_bias: Some(Tensor::stack(&parts, 0)?), ..self.clone() })
    }

    /// Whether weights are dropped.
    pub(super) fn drops(&self) -> bool {
        self.train && self.dropout > 0.0
    }

    /// Whether a seed says which weights are dropped. It counts all heads of a call, which are not to be taken apart.
    pub(crate) fn drops_by_seed(&self) -> bool {
        self.drops() && (self.dropout_seed.is_some() || self.dropout_philox_seed.is_some())
    }

    /// The same without ALiBi, and its slopes.
    pub fn take_alibi_slopes(mut self) -> (Self, Option<Tensor>) {
        let slopes = self.alibi_slopes.take();
        (self, slopes)
    }

    /// Drops weights with probability `p` and divides the others by `1 - p`, if `train` is set.
    pub fn with_dropout(self, p: f64, train: bool) -> Self {
        Self { dropout: p, train, ..self }
    }

    /// Draws the dropout mask from PyTorch's generator instead of the device's, for the same numbers as a PyTorch run.
    /// The next call goes on in the generator's stream. A mask takes a bit a weight, B·H·T_q·T_kv in all; of packed
    /// sequences, the reference path draws it.
    pub fn with_dropout_seed(self, seed: &TorchSeed) -> Self {
        Self { dropout_seed: Some(seed.clone()), ..self }
    }
}

/// The backend chosen for a call: never [`Backend::Auto`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// [`Backend::Reference`] or [`Backend::Fused`].
    pub backend: Backend,
    /// Why, in one sentence.
    pub reason: String,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.backend, self.reason)
    }
}

/// What a caller wants: the context, and one thing beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outputs<'a> {
    Context,
    Weights,
    LogSumExp,
    Statistics(&'a StatisticsOptions),
    /// The path that a call for its context would take, without taking it.
    Plan,
}

impl Outputs<'_> {
    /// The public function that gives them, for errors.
    pub fn op(self, is_packed: bool) -> &'static str {
        match (self, is_packed) {
            (Self::Context, false) => "scaled_dot_product_attention",
            (Self::Plan, _) => "plan",
            (Self::Weights, _) => "scaled_dot_product_attention_with_weights",
            (Self::LogSumExp, false) => "scaled_dot_product_attention_with_lse",
            (Self::Statistics(_), false) => "scaled_dot_product_attention_with_statistics",
            (Self::Context, true) => "scaled_dot_product_attention_varlen",
            (Self::LogSumExp, true) => "scaled_dot_product_attention_varlen_with_lse",
            (Self::Statistics(_), true) => "scaled_dot_product_attention_varlen_with_statistics",
        }
    }

    /// That a call can have them.
    pub(super) fn check(self, call: &Call) -> Result<()> {
        match self {
            Self::Statistics(wanted) => wanted.check(call),
            Self::Weights if call.sequences.is_some() => bail!(
                "[multi_head_attention] weights (B, H, T_q, T_kv) are asked for, which packed sequences do not have"
            ),
            _ => Ok(()),
        }
    }
}

/// What is going to run.
pub(crate) enum Choice {
    Reference { reason: String },
    Cpu(InstructionSet),
    Gpu(gpu::Plan),
}

impl Choice {
    /// # Errors
    /// For outputs that the call cannot have, and where a fused path is asked for and none can run the call.
    pub fn of(call: &Call, outputs: Outputs) -> Result<Self> {
        outputs.check(call)?;
        let (options, device, is_tracked) = (&call.options, call.q.device(), call.tracks_gradients());
        let (is_cpu, drops, is_f64) = (device.is_cpu(), options.drops(), call.q.dtype() == DType::F64);
        let (has_seed, is_packed) = (options.dropout_seed.is_some(), call.sequences.is_some());
        let is_uniform = call.fully_masked_rows == FullyMaskedRows::Uniform;
        if options.backend == Backend::Reference {
            return Ok(Self::Reference { reason: "asked for".into() });
        }
        let is_observed = matches!(outputs, Outputs::Statistics(_));
        let obstacles = [
            (outputs == Outputs::Weights, "the weights are asked for, which a fused kernel never has as a whole"),
            (drops && !is_cpu, "dropout happens to the weights, which a fused kernel never has as a whole"),
            (
                drops && has_seed && is_packed,
                "PyTorch's generator draws the dropout of one packed sequence after the other",
            ),
            (is_uniform, "queries that see nothing are to weigh all keys alike, and fused kernels skip hidden keys"),
            (is_cpu && is_f64, "the CPU kernel computes in f32, and the inputs are F64"),
            (
                is_cpu && is_observed && is_tracked,
                "an input is tracked for gradients, which the kernel does not have beside statistics",
            ),
            (
                call.scales.is_some() && is_tracked,
                "an input is tracked for gradients, which keys and values of 8 bits do not have",
            ),
        ];
        let chosen = match (obstacles.into_iter().find(|&(is_there, _)| is_there), device) {
            (Some((_, obstacle)), _) => Err(obstacle.into()),
            (None, Device::Cpu) => Ok(Self::Cpu(
                InstructionSet::choose(options.instruction_set, call.q.dtype() == DType::BF16)
                    .map_err(|error| candle_core::Error::msg(format!("[{}] {error}", call.op)))?,
            )),
            (None, Device::Cuda(_)) => gpu::FLASH_ATTN.plan(call, outputs).map(Self::Gpu),
            (None, Device::Metal(_)) => gpu::METAL.plan(call, outputs).map(Self::Gpu),
        };
        match chosen {
            Err(obstacle) if options.backend == Backend::Fused => bail!("[{}] no fused path: {obstacle}", call.op),
            Err(reason) => Ok(Self::Reference { reason }),
            Ok(choice) => Ok(choice),
        }
    }

    /// What is wanted of the call that this was chosen for.
    pub fn run(self, call: Call, outputs: Outputs) -> Result<Attended> {
        let reference = || reference::attend(&call, outputs);
        match self {
            choice if outputs == Outputs::Plan => {
                Ok(Attended { plan: Some(choice.plan()), ..Attended::context(call.q) })
            }
            Self::Reference { .. } => reference(),
            Self::Cpu(instruction_set) => cpu::attend(call, instruction_set, outputs),
            Self::Gpu(plan) => or_reference(&call, plan.attend(&call).map(Attended::context), reference),
        }
    }

    fn plan(self) -> Plan {
        let fused = |reason: String| Plan { backend: Backend::Fused, reason };
        match self {
            Self::Reference { reason } => Plan { backend: Backend::Reference, reason },
            Self::Cpu(instruction_set) => fused(format!("the CPU kernel, {instruction_set}")),
            Self::Gpu(plan) => fused(plan.to_string()),
        }
    }
}
