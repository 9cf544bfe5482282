//! Readers of a config.

use super::MultiHeadAttentionConfig;
use crate::{AlibiConfig, QkNorm, RelativeBiasConfig, RopeConfig};

/// Readers, with what was not given worked out.
impl MultiHeadAttentionConfig {
    /// E, the width of the layer's input.
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// H, the number of query heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// H_kv, the number of key and value heads.
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// D, the width of one query and key head.
    pub fn head_dim(&self) -> usize {
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        self.head_dim.unwrap_or_else(|| out_dim.checked_div(self.num_heads).unwrap_or(0))
    }

    /// D_v, the width of one value head.
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim.unwrap_or_else(|| self.head_dim())
    }

    /// The width of the layer's output.
    pub fn out_dim(&self) -> usize {
        match (self.out_dim, self.out_proj) {
            (Some(out_dim), _) => out_dim,
            (None, true) => self.embed_dim,
            (None, false) => self.num_heads.saturating_mul(self.value_head_dim()),
        }
    }

    /// The width of the keys' input.
    pub fn key_size(&self) -> usize {
        self.key_size.unwrap_or(self.embed_dim)
    }

    /// The width of the values' input.
    pub fn value_size(&self) -> usize {
        self.value_size.unwrap_or_else(|| self.key_size())
    }

    /// Whether the query, key and value projections have biases.
    pub fn qkv_bias(&self) -> [bool; 3] {
        [self.q_bias, self.k_bias, self.v_bias]
    }

    /// Whether the output projection has a bias.
    pub fn out_bias(&self) -> bool {
        self.out_bias
    }

    /// Whether there is an output projection.
    pub fn out_proj(&self) -> bool {
        self.out_proj
    }

    /// Whether a learned key and value are appended.
    pub fn bias_kv(&self) -> bool {
        self.bias_kv
    }

    /// Whether a key and value of zeros are appended.
    pub fn add_zero_attn(&self) -> bool {
        self.add_zero_attn
    }

    /// How many keys and values of its own the layer appends to those of a call.
    pub(crate) fn appended_keys(&self) -> usize {
        usize::from(self.bias_kv) + usize::from(self.add_zero_attn)
    }

    /// Whether later keys are hidden.
    pub fn causal(&self) -> bool {
        self.causal
    }

    /// The most positions that a call may have.
    pub fn context_length(&self) -> Option<usize> {
        self.context_length
    }

    /// The number of keys that a query sees back from its own.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// The numbers of keys that a query sees before its own and after it.
    pub fn band(&self) -> Option<(usize, usize)> {
        self.band
    }

    /// The bound of queries, keys and values.
    pub fn clip_qkv(&self) -> Option<f64> {
        self.clip_qkv
    }

    /// The bound of the scores.
    pub fn softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// The factor on q kᵀ where it is not 1/sqrt(D).
    pub fn scale(&self) -> Option<f64> {
        self.scale
    }

    /// What scores are multiplied by: the [`scale`](Self::scale), or 1 / sqrt(D).
    pub(crate) fn score_scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim() as f64).sqrt())
    }

    /// Whether there are learned attention sinks.
    pub fn sinks(&self) -> bool {
        self.sinks
    }

    /// The normalisation of queries and keys.
    pub fn qk_norm(&self) -> Option<QkNorm> {
        self.qk_norm
    }

    /// The rotary positions of queries and keys.
    pub fn rope(&self) -> Option<&RopeConfig> {
        self.rope.as_ref()
    }

    /// Whether heads are normalised after they were rotated.
    pub fn norm_after_rope(&self) -> bool {
        self.norm_after_rope
    }

    /// ALiBi's biases of the scores.
    pub fn alibi(&self) -> Option<&AlibiConfig> {
        self.alibi.as_ref()
    }

    /// T5's biases of relative positions.
    pub fn relative_bias(&self) -> Option<&RelativeBiasConfig> {
        self.relative_bias.as_ref()
    }

    /// The probability with which a weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }
}
