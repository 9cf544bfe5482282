//! Builders and readers of a config.

use super::MultiHeadAttentionConfig;
use crate::config::KvSource;
use crate::gate::OutputGate;
use crate::norm::{ContextNorm, QkNorm};
use crate::position::{AlibiConfig, ContentPositions, QueryScaling, RelativeBiasConfig, RopeConfig};
use crate::sdpa::HeadGroups;

/// Builders: each takes the config and gives it back with one thing changed.
impl MultiHeadAttentionConfig {
    /// Grouped-query attention: fewer key and value heads, each shared by `num_heads / num_kv_heads` query heads.
    pub fn with_num_kv_heads(self, num_kv_heads: usize) -> Self {
        Self { num_kv_heads: Some(num_kv_heads), ..self }
    }

    /// Other numbers of query heads and of key and value heads, of one layer of a model or of a part of a layer.
    pub fn with_heads(self, num_heads: usize, num_kv_heads: usize) -> Self {
        Self { num_heads, num_kv_heads: Some(num_kv_heads), ..self }
    }

    /// Which key head a query head reads, where a part of a layer has not as many for each.
    pub(crate) fn with_head_groups(self, head_groups: Option<HeadGroups>) -> Self {
        Self { head_groups, ..self }
    }

    /// D, the width of one query and key head; `out_dim / num_heads` unless given.
    pub fn with_head_dim(self, head_dim: usize) -> Self {
        Self { head_dim: Some(head_dim), ..self }
    }

    /// D_v, the width of one value head; D unless given.
    pub fn with_value_head_dim(self, value_head_dim: usize) -> Self {
        Self { value_head_dim: Some(value_head_dim), ..self }
    }

    /// The width of the layer's output (the book's `d_out`, d2l's `num_hiddens`); `embed_dim` unless given.
    pub fn with_out_dim(self, out_dim: usize) -> Self {
        Self { out_dim: Some(out_dim), ..self }
    }

    /// The width of the keys' input in cross-attention (PyTorch's `kdim`); `embed_dim` unless given.
    pub fn with_key_size(self, key_size: usize) -> Self {
        Self { key_size: Some(key_size), ..self }
    }

    /// The width of the values' input in cross-attention (PyTorch's `vdim`); `key_size` unless given.
    pub fn with_value_size(self, value_size: usize) -> Self {
        Self { value_size: Some(value_size), ..self }
    }

    /// Biases on all four projections.
    pub fn with_bias(self, bias: bool) -> Self {
        self.with_qkv_bias(bias).with_out_bias(bias)
    }

    /// Biases on the query, key and value projections.
    pub fn with_qkv_bias(self, bias: bool) -> Self {
        Self { q_bias: bias, k_bias: bias, v_bias: bias, ..self }
    }

    /// A bias on the query projection.
    pub fn with_q_bias(self, bias: bool) -> Self {
        Self { q_bias: bias, ..self }
    }

    /// A bias on the key projection.
    pub fn with_k_bias(self, bias: bool) -> Self {
        Self { k_bias: bias, ..self }
    }

    /// A bias on the value projection.
    pub fn with_v_bias(self, bias: bool) -> Self {
        Self { v_bias: bias, ..self }
    }

    /// A bias on the output projection.
    pub fn with_out_bias(self, bias: bool) -> Self {
        Self { out_bias: bias, ..self }
    }

    /// Whether there is an output projection; without one the output is the heads' contexts, concatenated.
    pub fn with_out_proj(self, out_proj: bool) -> Self {
        Self { out_proj, ..self }
    }

    /// One more key and value, learned (`bias_k`, `bias_v`), which every query sees: `add_bias_kv` of
    /// `torch.nn.MultiheadAttention`. The weights have T_kv + 1 columns then.
    pub fn with_bias_kv(self, bias_kv: bool) -> Self {
        Self { bias_kv, ..self }
    }

    /// One more key and value, of zeros, after the learned ones, which every query sees: `add_zero_attn` of
    /// `torch.nn.MultiheadAttention`, which no state dict tells. The weights have one more column then.
    pub fn with_add_zero_attn(self, add_zero_attn: bool) -> Self {
        Self { add_zero_attn, ..self }
    }

    /// No query sees a later key; aligned to the end, see [`AttentionMask::causal`](crate::AttentionMask::causal).
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The most positions that a call may have; more are an error.
    pub fn with_context_length(self, context_length: usize) -> Self {
        Self { context_length: Some(context_length), ..self }
    }

    /// The number of keys that a query sees back from its own, see
    /// [`AttentionMask::with_window`](crate::AttentionMask::with_window).
    pub fn with_window(self, window: usize) -> Self {
        Self { window: Some(window), ..self }
    }

    /// A window on both sides: a query sees the keys from `left` before its own to `right` after it, see
    /// [`AttentionMask::with_band`](crate::AttentionMask::with_band). Local attention of encoders (ModernBERT) has as many
    /// on either side.
    pub fn with_band(self, left: usize, right: usize) -> Self {
        Self { band: Some((left, right)), ..self }
    }

    /// A query sees keys of its own chunk of so many positions only, see
    /// [`AttentionMask::with_chunk`](crate::AttentionMask::with_chunk) (Llama 4).
    pub fn with_chunk(self, chunk: usize) -> Self {
        Self { chunk: Some(chunk), ..self }
    }

    /// Bounds queries, keys and values to ±`clip_qkv` as they leave their projections, norms of whole projections
    /// included (MPT, OLMo).
    pub fn with_clip_qkv(self, clip_qkv: f64) -> Self {
        Self { clip_qkv: Some(clip_qkv), ..self }
    }

    /// Bounds the scores, see [`SdpaOptions::with_softcap`](crate::SdpaOptions::with_softcap).
    pub fn with_softcap(self, softcap: f64) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Learned attention sinks (parameter `sinks`), see [`SdpaOptions::with_sinks`](crate::SdpaOptions::with_sinks).
    pub fn with_sinks(self, sinks: bool) -> Self {
        Self { sinks, ..self }
    }

    /// Normalises queries and keys before attention.
    pub fn with_qk_norm(self, qk_norm: QkNorm) -> Self {
        Self { qk_norm: Some(qk_norm), ..self }
    }

    /// Rotates queries and keys by their positions, after their norms.
    pub fn with_rope(self, rope: RopeConfig) -> Self {
        Self { rope: Some(rope), ..self }
    }

    /// Normalises heads after they were rotated, and not before (HunYuan).
    pub fn with_norm_after_rope(self, norm_after_rope: bool) -> Self {
        Self { norm_after_rope, ..self }
    }

    /// Normalises each value head by its root mean square, without a weight (Gemma 4); this is the epsilon.
    pub fn with_value_norm(self, eps: f64) -> Self {
        Self { value_norm: Some(eps), ..self }
    }

    /// Multiplies queries by a factor that grows with their positions, after norms and rotation (Llama 4, Ministral 3).
    pub fn with_query_scaling(self, query_scaling: QueryScaling) -> Self {
        Self { query_scaling: Some(query_scaling), ..self }
    }

    /// Adds ALiBi's biases to the scores.
    pub fn with_alibi(self, alibi: AlibiConfig) -> Self {
        Self { alibi: Some(alibi), ..self }
    }

    /// Adds T5's biases of relative positions to the scores. They belong to the stack of layers: give each layer
    /// [the one](crate::MultiHeadAttention::with_relative_bias).
    pub fn with_relative_bias(self, relative_bias: RelativeBiasConfig) -> Self {
        Self { relative_bias: Some(relative_bias), ..self }
    }

    /// Adds terms to the scores that depend on the place of the key from its query and on what one of the two holds.
    pub fn with_content_positions(self, content_positions: ContentPositions) -> Self {
        Self { content_positions: Some(content_positions), ..self }
    }

    /// Multiplies the context by a gate before the output projection (Qwen3-Next, AFMoE).
    pub fn with_output_gate(self, output_gate: OutputGate) -> Self {
        Self { output_gate: Some(output_gate), ..self }
    }

    /// Normalises the context of all heads before the output projection, after a gate (BitNet, Kosmos-2).
    pub fn with_context_norm(self, context_norm: ContextNorm) -> Self {
        Self { context_norm: Some(context_norm), ..self }
    }

    /// Where keys and values come from: projections unless given (Gemma 3n, Gemma 4).
    pub fn with_kv_source(self, kv_source: KvSource) -> Self {
        Self { kv_source, ..self }
    }

    /// The probability with which a weight is dropped in training.
    pub fn with_dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }
}

/// Readers, with defaults filled in.
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

    /// Which key head a query head reads, if not `h / (H / H_kv)`.
    pub(crate) fn head_groups(&self) -> Option<HeadGroups> {
        self.head_groups
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

    /// The number of positions of a chunk, beyond which no query sees.
    pub fn chunk(&self) -> Option<usize> {
        self.chunk
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

    /// The epsilon of the norm of values.
    pub fn value_norm(&self) -> Option<f64> {
        self.value_norm
    }

    /// The factor on queries by their positions.
    pub fn query_scaling(&self) -> Option<QueryScaling> {
        self.query_scaling
    }

    /// ALiBi's biases of the scores.
    pub fn alibi(&self) -> Option<&AlibiConfig> {
        self.alibi.as_ref()
    }

    /// T5's biases of relative positions.
    pub fn relative_bias(&self) -> Option<&RelativeBiasConfig> {
        self.relative_bias.as_ref()
    }

    /// The terms of the scores by relative positions and content.
    pub fn content_positions(&self) -> Option<&ContentPositions> {
        self.content_positions.as_ref()
    }

    /// The gate of the context.
    pub fn output_gate(&self) -> Option<OutputGate> {
        self.output_gate
    }

    /// The norm of the context.
    pub fn context_norm(&self) -> Option<ContextNorm> {
        self.context_norm
    }

    /// Where keys and values come from.
    pub fn kv_source(&self) -> KvSource {
        self.kv_source
    }

    /// The probability with which a weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }
}
