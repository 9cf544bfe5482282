//! Additive (Bahdanau) attention.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use crate::mask::AttentionMask;
use crate::sdpa::{AttentionOutput, SdpaOptions, dropout, visible_softmax, weighted_values};
use candle_attention_modules::base::{
    Dim, Expect, Options, Source, accumulation_dtype, check_keys_and_values, check_memory, number, options,
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
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct AdditiveInput<'a> {
    queries: &'a Tensor,
    keys: &'a Tensor,
    values: &'a Tensor,
    mask: Option<&'a AttentionMask>,
    train: bool,
    dropout_seed: Option<&'a TorchSeed>,
}

impl<'a> AdditiveInput<'a> {
    /// Queries (B, T_q, query_size), keys (B, T_kv, key_size) and values (B, T_kv, D_v).
    pub fn new(queries: &'a Tensor, keys: &'a Tensor, values: &'a Tensor) -> Self {
        Self { queries, keys, values, mask: None, train: false, dropout_seed: None }
    }

    /// A mask of one head: `keep` and `bias` broadcast to (B, 1, T_q, T_kv).
    pub fn with_mask(self, mask: &'a AttentionMask) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// Whether dropout happens.
    pub fn with_train(self, train: bool) -> Self {
        Self { train, ..self }
    }

    /// Draws dropout from PyTorch's generator, see
    /// [`SdpaOptions::with_dropout_seed`](crate::SdpaOptions::with_dropout_seed).
    pub fn with_dropout_seed(self, seed: &'a TorchSeed) -> Self {
        Self { dropout_seed: Some(seed), ..self }
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
        let source = Source::new(OP, "d2l", vb)?;
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
        Ok(self.forward_with(AdditiveInput::new(queries, keys, values).with_mask(mask))?.context)
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
        let AdditiveInput { queries, keys, values, train, dropout_seed, .. } = input;
        self.check(queries, keys, values)?;
        let ((b, t_q, _), (_, t_kv, d_v)) = (queries.dims3()?, values.dims3()?);
        let (device, dtype) = (queries.device(), accumulation_dtype(queries.dtype()));
        let mask = input.mask.cloned().unwrap_or_default();
        let keep = mask.keep_tensor([b, 1, t_q, t_kv], device)?;
        let bias = mask.bias_tensor([b, 1, t_q, t_kv], dtype, device)?;
        if [b, t_q, t_kv].contains(&0) {
            return Ok(AttentionOutput {
                context: Tensor::zeros((b, t_q, d_v), queries.dtype(), device)?,
                weights: Tensor::zeros((b, t_q, t_kv), queries.dtype(), device)?,
            });
        }
        let queries_hidden = self.query_proj.forward(&queries.contiguous()?)?.unsqueeze(2)?;
        let keys_hidden = self.key_proj.forward(&keys.contiguous()?)?.unsqueeze(1)?;
        let hidden = queries_hidden.broadcast_add(&keys_hidden)?.tanh()?;
        let mut scores = self.score_proj.forward(&hidden)?.squeeze(3)?.unsqueeze(1)?.to_dtype(dtype)?;
        if let Some(bias) = bias {
            scores = scores.broadcast_add(&bias)?;
        }
        let (weights, _) = visible_softmax(&scores, keep.as_ref(), None, mask.empty_rows())?;
        let options = SdpaOptions::default().with_dropout(self.config.dropout, train);
        let options = SdpaOptions { dropout_seed: dropout_seed.cloned(), ..options };
        let weights = dropout(&weights, &options, [0; 2])?;
        let context = weighted_values(&weights, &values.to_dtype(dtype)?.unsqueeze(1)?, keep.as_ref())?;
        let one_head = |tensor: Tensor| tensor.squeeze(1)?.to_dtype(queries.dtype());
        Ok(AttentionOutput { context: one_head(context)?, weights: one_head(weights)? })
    }

    fn check(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<()> {
        let weight = self.query_proj.weight();
        for (name, tensor, shape) in [
            ("queries", queries, [Dim::Any("B"), Dim::Any("T_q"), Dim::Is(self.config.query_size)]),
            ("keys", keys, [Dim::Any("B"), Dim::Any("T_kv"), Dim::Is(self.config.key_size)]),
            ("values", values, ["B", "T_kv", "D_v"].map(Dim::Any)),
        ] {
            let tensor = Expect::many(OP, name, tensor).shape(&shape)?;
            tensor.dtype(weight.dtype(), "the weights'")?.beside("the weights", weight.device())?;
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
