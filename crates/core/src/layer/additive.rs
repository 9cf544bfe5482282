//! Additive (Bahdanau) attention.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use crate::mask::AttentionMask;
use crate::sdpa::{AttentionOutput, Call, Outputs, SdpaOptions, run};
use candle_attention_modules::base::{
    Dim, Expect, Options, ParameterReader, check_keys_and_values, check_memory, number, options,
};
use candle_attention_modules::init::TorchSeed;

const OP: &str = "additive_attention";

/// The shape of an [`AdditiveAttention`].
#[apply(options)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct AdditiveAttentionConfig {
    /// The width of the queries.
    #[check(number::size)]
    #[methods(get)]
    query_size: usize,
    /// The width of the keys.
    #[check(number::size)]
    #[methods(get)]
    key_size: usize,
    /// The number of units that scores pass through.
    #[check(number::size)]
    #[methods(get)]
    hidden_size: usize,
    /// The probability with which a weight is dropped in training.
    #[serde(default)]
    #[check(number::probability)]
    dropout: f64,
}

impl AdditiveAttentionConfig {
    /// Queries of width `query_size` against keys of width `key_size`, scored through `hidden_size` units (d2l's
    /// `num_hiddens`).
    pub fn new(query_size: usize, key_size: usize, hidden_size: usize) -> Self {
        Self { query_size, key_size, hidden_size, ..Self::unset() }
    }
}

/// What one call of [`AdditiveAttention`] reads.
#[apply(options)]
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct AdditiveInput<'a> {
    // (B, T_q, query_size), (B, T_kv, key_size) and (B, T_kv, D_v).
    queries_keys_values: [&'a Tensor; 3],
    /// A mask of one head: `keep` and `bias` broadcast to (B, 1, T_q, T_kv).
    mask: Option<&'a AttentionMask>,
    /// Whether dropout happens.
    train: bool,
    /// Draws dropout from PyTorch's generator, see
    /// [`SdpaOptions::with_dropout_seed`](crate::SdpaOptions::with_dropout_seed).
    dropout_seed: Option<&'a TorchSeed>,
}

impl<'a> AdditiveInput<'a> {
    /// Queries (B, T_q, query_size), keys (B, T_kv, key_size) and values (B, T_kv, D_v).
    pub fn new(queries: &'a Tensor, keys: &'a Tensor, values: &'a Tensor) -> Self {
        Self::unset([queries, keys, values])
    }
}

/// Attention whose scores are `w_v · tanh(W_q q + W_k k)`, without a scale (Bahdanau et al.,
/// <https://arxiv.org/abs/1409.0473>). Parameters as in Dive into Deep Learning: `W_k`, `W_q` and `w_v`, no biases.
#[derive(Debug, Clone)]
pub struct AdditiveAttention {
    config: AdditiveAttentionConfig,
    key_proj: Linear,
    query_proj: Linear,
    score_proj: Linear,
}

impl AdditiveAttention {
    /// Reads `W_k.weight` (hidden, key), `W_q.weight` (hidden, query) and `w_v.weight` (1, hidden).
    ///
    /// # Errors
    /// For a size of 0, a dropout that is no probability, and for a missing or misshapen tensor, named with both
    /// shapes.
    pub fn new(cfg: &AdditiveAttentionConfig, vb: VarBuilder) -> Result<Self> {
        cfg.check(OP)?;
        let source = ParameterReader::new(OP, "d2l", vb)?;
        let linear = |name, outputs, inputs| source.linear(name, (outputs, inputs), false, None);
        Ok(Self {
            config: cfg.clone(),
            key_proj: linear("W_k", cfg.hidden_size, cfg.key_size)?,
            query_proj: linear("W_q", cfg.hidden_size, cfg.query_size)?,
            score_proj: linear("w_v", 1, cfg.hidden_size)?,
        })
    }

    /// What the layer was built from.
    pub fn config(&self) -> &AdditiveAttentionConfig {
        &self.config
    }

    /// Queries (B, T_q, query_size), keys (B, T_kv, key_size) and values (B, T_kv, D_v) give (B, T_q, D_v). The mask is
    /// that of one head: `keep` and `bias` broadcast to (B, 1, T_q, T_kv).
    ///
    /// The scores pass through a tensor (B, T_q, T_kv, hidden).
    ///
    /// # Errors
    /// For shapes, dtypes or a mask that do not fit together, and for scores that do not fit in memory.
    pub fn forward(&self, queries: &Tensor, keys: &Tensor, values: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        Ok(self.forward_with(AdditiveInput::new(queries, keys, values).with_mask(mask))?.output)
    }

    /// [`forward`](Self::forward) as the context (B, T_q, D_v), and the weights (B, T_q, T_kv).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with_weights(
        &self,
        queries: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        mask: &AttentionMask,
    ) -> Result<AttentionOutput> {
        self.forward_with(AdditiveInput::new(queries, keys, values).with_mask(mask))
    }

    /// The layer with a mask, in training, with dropout from PyTorch's generator: the context (B, T_q, D_v) and the
    /// weights (B, T_q, T_kv).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with(&self, input: AdditiveInput) -> Result<AttentionOutput> {
        let [queries, keys, values] = input.queries_keys_values;
        self.check(queries, keys, values)?;
        let ((b, t_q, _), t_kv) = (queries.dims3()?, keys.dim(1)?);
        let (device, dtype) = (queries.device(), queries.dtype());
        let mask = input.mask.cloned().unwrap_or_default();
        mask.resolve(b, t_q, t_kv)?;
        let scores = if [b, t_q, t_kv].contains(&0) {
            Tensor::zeros((b, 1, t_q, t_kv), dtype, device)?
        } else {
            let queries_hidden = self.query_proj.forward(&queries.contiguous()?)?.unsqueeze(2)?;
            let keys_hidden = self.key_proj.forward(&keys.contiguous()?)?.unsqueeze(1)?;
            let hidden = queries_hidden.broadcast_add(&keys_hidden)?.tanh()?;
            self.score_proj.forward(&hidden)?.squeeze(3)?.unsqueeze(1)?
        };
        // The scores are a bias on the products of zeros, so that the function does the rest.
        let zeros = |t| Tensor::zeros((b, 1, t, 1), dtype, device);
        let (q, k, v) = (zeros(t_q)?, zeros(t_kv)?, values.unsqueeze(1)?);
        let mask = mask.with_bias(&scores);
        let options = SdpaOptions::default().with_dropout(self.config.dropout, input.train);
        let options = SdpaOptions { dropout_seed: input.dropout_seed.cloned(), ..options };
        let call = Call::of(OP, [&q, &k, &v], None, None, &mask, &options)?;
        let (context, weights) = run(call, Outputs::Weights)?.with(|found| found.weights.take())?;
        Ok(AttentionOutput { output: context.squeeze(1)?, weights: weights.squeeze(1)? })
    }

    fn check(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<()> {
        let weight = self.query_proj.weight();
        for (name, tensor, shape) in [
            ("queries", queries, [Dim::Any("B"), Dim::Any("T_q"), Dim::Is(self.config.query_size)]),
            ("keys", keys, [Dim::Any("B"), Dim::Any("T_kv"), Dim::Is(self.config.key_size)]),
            ("values", values, ["B", "T_kv", "D_v"].map(Dim::Any)),
        ] {
            let tensor = Expect::many(OP, name, tensor).shape(&shape)?;
            tensor.dtype(weight.dtype(), "the weights'")?.same_device("the weights", weight.device())?;
        }
        let ([b, t_q], t_kv) = ([queries.dims()[0], queries.dims()[1]], keys.dims()[1]);
        check_keys_and_values(OP, Some(b), keys, values)?;
        let units = self.config.hidden_size;
        // Four bytes an entry.
        let bytes = [4, b, t_q, t_kv, units];
        check_memory(
            OP,
            format_args!("a score for each of {t_q} queries and {t_kv} keys through {units} units"),
            &bytes,
        )
    }
}
