//! Builders of a config.

use super::MultiHeadAttentionConfig;
use crate::{AlibiConfig, QkNorm, RelativeBiasConfig, RopeConfig};

/// Builders: each takes the config and gives it back with one thing changed.
impl MultiHeadAttentionConfig {
    /// Grouped-query attention: fewer key and value heads, each shared by `num_heads / num_kv_heads` query heads.
    #[must_use]
    pub fn with_num_kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = Some(num_kv_heads);
        self
    }

    /// Other numbers of heads, of a part of a layer.
    pub(crate) fn with_heads(mut self, num_heads: usize, num_kv_heads: usize) -> Self {
        (self.num_heads, self.num_kv_heads) = (num_heads, Some(num_kv_heads));
        self
    }

    /// D, the width of one query and key head; `out_dim / num_heads` unless given.
    #[must_use]
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    /// D_v, the width of one value head; D unless given.
    #[must_use]
    pub fn with_value_head_dim(mut self, value_head_dim: usize) -> Self {
        self.value_head_dim = Some(value_head_dim);
        self
    }

    /// The width of the layer's output (the book's `d_out`, d2l's `num_hiddens`); `embed_dim` unless given.
    #[must_use]
    pub fn with_out_dim(mut self, out_dim: usize) -> Self {
        self.out_dim = Some(out_dim);
        self
    }

    /// The width of the keys' input in cross-attention (PyTorch's `kdim`); `embed_dim` unless given.
    #[must_use]
    pub fn with_key_size(mut self, key_size: usize) -> Self {
        self.key_size = Some(key_size);
        self
    }

    /// The width of the values' input in cross-attention (PyTorch's `vdim`); `key_size` unless given.
    #[must_use]
    pub fn with_value_size(mut self, value_size: usize) -> Self {
        self.value_size = Some(value_size);
        self
    }

    /// Biases on all four projections.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Self {
        self.with_qkv_bias(bias).with_out_bias(bias)
    }

    /// Biases on the query, key and value projections.
    #[must_use]
    pub fn with_qkv_bias(self, bias: bool) -> Self {
        self.with_q_bias(bias).with_k_bias(bias).with_v_bias(bias)
    }

    /// A bias on the query projection.
    #[must_use]
    pub fn with_q_bias(mut self, bias: bool) -> Self {
        self.q_bias = bias;
        self
    }

    /// A bias on the key projection.
    #[must_use]
    pub fn with_k_bias(mut self, bias: bool) -> Self {
        self.k_bias = bias;
        self
    }

    /// A bias on the value projection.
    #[must_use]
    pub fn with_v_bias(mut self, bias: bool) -> Self {
        self.v_bias = bias;
        self
    }

    /// A bias on the output projection.
    #[must_use]
    pub fn with_out_bias(mut self, bias: bool) -> Self {
        self.out_bias = bias;
        self
    }

    /// Whether there is an output projection; without one the heads' contexts stand side by side.
    #[must_use]
    pub fn with_out_proj(mut self, out_proj: bool) -> Self {
        self.out_proj = out_proj;
        self
    }

    /// One more key and value, learned (`bias_k`, `bias_v`), which every query sees: `add_bias_kv` of
    /// `torch.nn.MultiheadAttention`. The weights have T_kv + 1 columns then.
    #[must_use]
    pub fn with_bias_kv(mut self, bias_kv: bool) -> Self {
        self.bias_kv = bias_kv;
        self
    }

    /// One more key and value, of zeros, after the learned ones, which every query sees: `add_zero_attn` of
    /// `torch.nn.MultiheadAttention`, which no state dict tells. The weights have one more column then.
    #[must_use]
    pub fn with_add_zero_attn(mut self, add_zero_attn: bool) -> Self {
        self.add_zero_attn = add_zero_attn;
        self
    }

    /// No query sees a later key; aligned to the end, see [`AttentionMask::causal`](crate::AttentionMask::causal).
    #[must_use]
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// The most positions that a call may have; more are an error.
    #[must_use]
    pub fn with_context_length(mut self, context_length: usize) -> Self {
        self.context_length = Some(context_length);
        self
    }

    /// The number of keys that a query sees back from its own, see
    /// [`AttentionMask::with_window`](crate::AttentionMask::with_window).
    #[must_use]
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// A window on both sides: a query sees the keys from `left` before its own to `right` after it, see
    /// [`AttentionMask::with_band`](crate::AttentionMask::with_band). Local attention of encoders (ModernBERT) has as many
    /// on either side.
    #[must_use]
    pub fn with_band(mut self, left: usize, right: usize) -> Self {
        self.band = Some((left, right));
        self
    }

    /// Bounds queries, keys and values to ±`clip_qkv` as they leave their projections, norms of whole projections
    /// included (MPT, OLMo).
    #[must_use]
    pub fn with_clip_qkv(mut self, clip_qkv: f64) -> Self {
        self.clip_qkv = Some(clip_qkv);
        self
    }

    /// Bounds the scores, see [`SdpaOptions::with_softcap`](crate::SdpaOptions::with_softcap).
    #[must_use]
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    #[must_use]
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Learned attention sinks (parameter `sinks`), see [`SdpaOptions::with_sinks`](crate::SdpaOptions::with_sinks).
    #[must_use]
    pub fn with_sinks(mut self, sinks: bool) -> Self {
        self.sinks = sinks;
        self
    }

    /// Normalises queries and keys before attention.
    #[must_use]
    pub fn with_qk_norm(mut self, qk_norm: QkNorm) -> Self {
        self.qk_norm = Some(qk_norm);
        self
    }

    /// Rotates queries and keys by their positions, after their norms.
    #[must_use]
    pub fn with_rope(mut self, rope: RopeConfig) -> Self {
        self.rope = Some(rope);
        self
    }

    /// Normalises heads after they were rotated, and not before (HunYuan).
    #[must_use]
    pub fn with_norm_after_rope(mut self, norm_after_rope: bool) -> Self {
        self.norm_after_rope = norm_after_rope;
        self
    }

    /// Adds ALiBi's biases to the scores.
    #[must_use]
    pub fn with_alibi(mut self, alibi: AlibiConfig) -> Self {
        self.alibi = Some(alibi);
        self
    }

    /// Adds T5's biases of relative positions to the scores. They belong to the stack of layers: give each layer
    /// [the one](crate::MultiHeadAttention::with_relative_bias).
    #[must_use]
    pub fn with_relative_bias(mut self, relative_bias: RelativeBiasConfig) -> Self {
        self.relative_bias = Some(relative_bias);
        self
    }

    /// The probability with which a weight is dropped in training.
    #[must_use]
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }
}
