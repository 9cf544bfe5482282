//! Additive (Bahdanau) attention.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use serde::{Deserialize, Serialize};

use crate::mask::AttentionMask;
use crate::sdpa::{AttentionOutput, Call, Qkv, SdpaOptions, attend};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{
    Dim, Expect, OptionalRef, ParameterReader, check_keys_and_values, check_memory, number,
};
use candle_attention_modules::init::TorchSeed;

const OP: &str = "additive_attention";

/// The shape and options of an [`AdditiveAttention`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct AdditiveAttentionConfig {
    query_size: usize,
    key_size: usize,
    hidden_size: usize,
    #[serde(default)]
    dropout: f64,
}

impl AdditiveAttentionConfig {
    /// Makes a config for queries of width `query_size` and keys of width `key_size`, scored with `hidden_size` units
    /// (d2l's `num_hiddens`).
    pub fn new(query_size: usize, key_size: usize, hidden_size: usize) -> Self {
        Self { query_size, key_size, hidden_size, dropout: 0.0 }
    }

    /// Sets the probability with which an attention weight is dropped in training. The default is 0.
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Returns the width of the queries.
    pub fn query_size(&self) -> usize {
        self.query_size
    }

    /// Returns the width of the keys.
    pub fn key_size(&self) -> usize {
        self.key_size
    }

    /// Returns the number of units with which scores are computed.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// Returns the probability with which an attention weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Checks the sizes and the probability.
    ///
    /// # Errors
    /// Names the option, the number found and the number expected.
    pub fn validate(&self) -> Result<()> {
        number::size(OP, "query_size", self.query_size)?;
        number::size(OP, "key_size", self.key_size)?;
        number::size(OP, "hidden_size", self.hidden_size)?;
        number::probability(OP, "dropout", self.dropout)
    }
}

/// The inputs and options of one call of [`AdditiveAttention`].
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
    /// Makes an input of queries (B, T_q, query_size), keys (B, T_kv, key_size) and values (B, T_kv, D_v).
    pub fn new(queries: &'a Tensor, keys: &'a Tensor, values: &'a Tensor) -> Self {
        Self { queries, keys, values, mask: None, train: false, dropout_seed: None }
    }

    /// Adds a mask of one head: boolean mask and bias tensors broadcast to (B, 1, T_q, T_kv).
    pub fn with_mask(mut self, mask: impl OptionalRef<'a, AttentionMask>) -> Self {
        self.mask = mask.into_option();
        self
    }

    /// Sets whether dropout happens. The default is false.
    pub fn with_train(mut self, train: bool) -> Self {
        self.train = train;
        self
    }

    /// Draws dropout from PyTorch's generator, see
    /// [`SdpaOptions::with_dropout_seed`](crate::SdpaOptions::with_dropout_seed).
    pub fn with_dropout_seed(mut self, seed: impl OptionalRef<'a, TorchSeed>) -> Self {
        self.dropout_seed = seed.into_option();
        self
    }
}

/// Attention with scores `w_v · tanh(W_q q + W_k k)`, without a scale (Bahdanau et al.,
/// <https://arxiv.org/abs/1409.0473>). Parameters as in Dive into Deep Learning: `W_k`, `W_q` and `w_v`, no biases.
#[doc(alias = "Bahdanau")]
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
    /// For a size of 0, a dropout that is not a probability, and a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &AdditiveAttentionConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let source = ParameterReader::new(OP, "d2l", vb)?;
        let linear = |name, outputs, inputs| source.linear(name, (outputs, inputs), false, None)?.to_linear();
        Ok(Self {
            config: cfg.clone(),
            key_proj: linear("W_k", cfg.hidden_size, cfg.key_size)?,
            query_proj: linear("W_q", cfg.hidden_size, cfg.query_size)?,
            score_proj: linear("w_v", 1, cfg.hidden_size)?,
        })
    }

    /// Returns the config of the layer.
    pub fn config(&self) -> &AdditiveAttentionConfig {
        &self.config
    }

    /// Attends from queries (B, T_q, query_size) to keys (B, T_kv, key_size) and values (B, T_kv, D_v): an output (B,
    /// T_q, D_v). The mask is that of one head: boolean mask and bias tensors broadcast to (B, 1, T_q, T_kv).
    ///
    /// Computing the scores needs a tensor (B, T_q, T_kv, hidden).
    ///
    /// # Errors
    /// For shapes, dtypes or a mask that do not fit together, and for scores that do not fit in memory.
    pub fn forward(&self, queries: &Tensor, keys: &Tensor, values: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        Ok(self.forward_with(AdditiveInput::new(queries, keys, values).with_mask(mask))?.output)
    }

    /// Computes [`forward`](Self::forward), and returns the weights (B, T_q, T_kv) too.
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

    /// Computes the layer for any input: with a mask, in training, with dropout from PyTorch's generator. Returns the
    /// output (B, T_q, D_v) and the weights (B, T_q, T_kv).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with(&self, input: AdditiveInput) -> Result<AttentionOutput> {
        self.check(&input)?;
        let AdditiveInput { queries, keys, values, .. } = input;
        let (b, t_q, _) = queries.dims3()?;
        let t_kv = keys.dim(1)?;
        let device = queries.device();
        let dtype = queries.dtype();
        let mask = input.mask.cloned().unwrap_or_default();
        mask.resolve(b, t_q, t_kv)?;
        let scores = self.scores(queries, keys)?;
        // The scores are a bias on products of zeros, so that the function does everything else.
        let zeros = |t| Tensor::zeros((b, 1, t, 1), dtype, device);
        let q = zeros(t_q)?;
        let k = zeros(t_kv)?;
        let v = values.unsqueeze(1)?;
        let mut options = SdpaOptions::default().with_dropout(self.config.dropout, input.train);
        options.dropout_seed = input.dropout_seed.cloned();
        let qkv = Qkv { q: &q, k: &k, v: &v };
        let call = Call::with_all_dims(OP, qkv, None, None, &mask.with_bias(&scores), &options)?;
        let wanted = RequestedResults { weights: true, ..RequestedResults::default() };
        let AttentionOutput { output, weights } = attend(call, wanted)?.output_and_weights()?;
        Ok(AttentionOutput { output: output.squeeze(1)?, weights: weights.squeeze(1)? })
    }

    /// Returns the scores (B, 1, T_q, T_kv).
    fn scores(&self, queries: &Tensor, keys: &Tensor) -> Result<Tensor> {
        let (b, t_q, _) = queries.dims3()?;
        let t_kv = keys.dim(1)?;
        if [b, t_q, t_kv].contains(&0) {
            return Tensor::zeros((b, 1, t_q, t_kv), queries.dtype(), queries.device());
        }
        let queries_hidden = self.query_proj.forward(&queries.contiguous()?)?.unsqueeze(2)?;
        let keys_hidden = self.key_proj.forward(&keys.contiguous()?)?.unsqueeze(1)?;
        let hidden = queries_hidden.broadcast_add(&keys_hidden)?.tanh()?;
        self.score_proj.forward(&hidden)?.squeeze(3)?.unsqueeze(1)
    }

    /// Checks the inputs of a call.
    fn check(&self, input: &AdditiveInput) -> Result<()> {
        let &AdditiveInput { queries, keys, values, .. } = input;
        let config = &self.config;
        self.check_tensor("queries", queries, &[Dim::Any("B"), Dim::Any("T_q"), Dim::Is(config.query_size)])?;
        self.check_tensor("keys", keys, &[Dim::Any("B"), Dim::Any("T_kv"), Dim::Is(config.key_size)])?;
        self.check_tensor("values", values, &["B", "T_kv", "D_v"].map(Dim::Any))?;
        let (b, t_q, _) = queries.dims3()?;
        let t_kv = keys.dim(1)?;
        check_keys_and_values(OP, Some(b), keys, values)?;
        let units = config.hidden_size;
        // Four bytes an entry.
        let bytes = [4, b, t_q, t_kv, units];
        let what = format_args!("a score for each of {t_q} queries and {t_kv} keys through {units} units");
        check_memory(OP, what, &bytes)
    }

    fn check_tensor(&self, name: &str, tensor: &Tensor, shape: &[Dim]) -> Result<()> {
        let weight = self.query_proj.weight();
        let found = Expect::many(OP, name, tensor).shape(shape)?;
        found.dtype(weight.dtype(), "the weights'")?.same_device("the weights", weight.device())?;
        Ok(())
    }
}
