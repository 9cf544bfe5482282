//! The options of projections, norms and gates.

use super::{KvSharing, MultiHeadAttentionConfig};
use candle_attention_modules::gate::OutputGate;
use candle_attention_modules::norm::{OutputNorm, QkNorm};

/// Projections and their biases.
impl MultiHeadAttentionConfig {
    /// Sets whether all four projections have biases.
    #[doc(alias = "attention_bias")]
    pub fn with_bias(self, bias: bool) -> Self {
        self.with_qkv_bias(bias).with_out_bias(bias)
    }

    /// Sets whether the query, key and value projections have biases. The default is no.
    pub fn with_qkv_bias(self, bias: bool) -> Self {
        self.with_q_bias(bias).with_k_bias(bias).with_v_bias(bias)
    }

    /// Sets whether the query projection has a bias. The default is no.
    pub fn with_q_bias(mut self, q_bias: bool) -> Self {
        self.q_bias = q_bias;
        self
    }

    /// Sets whether the key projection has a bias. The default is no.
    pub fn with_k_bias(mut self, k_bias: bool) -> Self {
        self.k_bias = k_bias;
        self
    }

    /// Sets whether the value projection has a bias. The default is no.
    pub fn with_v_bias(mut self, v_bias: bool) -> Self {
        self.v_bias = v_bias;
        self
    }

    /// Sets whether the output projection has a bias. The default is no.
    pub fn with_out_bias(mut self, out_bias: bool) -> Self {
        self.out_bias = out_bias;
        self
    }

    /// Sets whether there is an output projection. The default is yes; without one, the output is the concatenation of
    /// the heads' outputs.
    pub fn with_out_proj(mut self, out_proj: bool) -> Self {
        self.out_proj = out_proj;
        self
    }

    /// Sets which keys and values the layer shares. The default is [`KvSharing::None`]: it has one projection for keys
    /// and one for values.
    pub fn with_kv_sharing(mut self, kv_sharing: KvSharing) -> Self {
        self.kv_sharing = kv_sharing;
        self
    }

    /// Sets whether a learned key and value (parameters `bias_k` and `bias_v`) are appended to those of a call, for
    /// every query to attend to: `add_bias_kv` of `torch.nn.MultiheadAttention`. Attention weights then have T_kv + 1
    /// columns. The default is no.
    #[doc(alias = "add_bias_kv")]
    pub fn with_bias_kv(mut self, bias_kv: bool) -> Self {
        self.bias_kv = bias_kv;
        self
    }

    /// Sets the number of learned keys and values of each key head that follow the keys of a call, for every query to
    /// attend to (parameters `mem_k` and `mem_v`, (H_kv, `num_mem_kv`, D)): `num_mem_kv` of x-transformers. They have
    /// neither a norm nor a position. Attention weights then have T_kv + `num_mem_kv` columns; x-transformers has these
    /// columns first, this crate last. The default is 0.
    ///
    /// A call with a cache copies the stored keys and values once, to put the learned ones behind them.
    ///
    /// ```
    /// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_num_mem_kv(2);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
    /// let xs = Tensor::randn(0f32, 1., (1, 5, 64), &Device::Cpu)?;
    /// assert_eq!(mha.forward_with_weights(&xs)?.weights.dims(), [1, 4, 5, 7]);
    /// # Ok(()) }
    /// ```
    #[doc(alias = "mem_k")]
    #[doc(alias = "memory_kv")]
    pub fn with_num_mem_kv(mut self, num_mem_kv: usize) -> Self {
        self.num_mem_kv = num_mem_kv;
        self
    }

    /// Sets whether a key and a value of zeros are appended to those of a call, after the learned ones:
    /// `add_zero_attn` of `torch.nn.MultiheadAttention`, which no checkpoint records. Attention weights then have one
    /// more column. The default is no.
    pub fn with_add_zero_attn(mut self, add_zero_attn: bool) -> Self {
        self.add_zero_attn = add_zero_attn;
        self
    }

    /// Sets a bound: queries, keys and values are clamped to ±`clip_qkv` after their projections, after norms of whole
    /// projections and before norms of heads (MPT, OLMo). There is none by default.
    pub fn with_clip_qkv(mut self, clip_qkv: impl Into<Option<f64>>) -> Self {
        self.clip_qkv = clip_qkv.into();
        self
    }

    /// Returns whether the query projection has a bias.
    pub fn q_bias(&self) -> bool {
        self.q_bias
    }

    /// Returns whether the key projection has a bias.
    pub fn k_bias(&self) -> bool {
        self.k_bias
    }

    /// Returns whether the value projection has a bias.
    pub fn v_bias(&self) -> bool {
        self.v_bias
    }

    /// Returns whether the output projection has a bias.
    pub fn out_bias(&self) -> bool {
        self.out_bias
    }

    /// Returns whether there is an output projection.
    pub fn out_proj(&self) -> bool {
        self.out_proj
    }

    /// Returns which keys and values the layer shares.
    pub fn kv_sharing(&self) -> KvSharing {
        self.kv_sharing
    }

    /// Returns whether a learned key and value are appended to those of a call.
    pub fn bias_kv(&self) -> bool {
        self.bias_kv
    }

    /// Returns the number of learned keys and values of each key head that follow the keys of a call.
    pub fn num_mem_kv(&self) -> usize {
        self.num_mem_kv
    }

    /// Returns whether a key and a value of zeros are appended to those of a call.
    pub fn add_zero_attn(&self) -> bool {
        self.add_zero_attn
    }

    /// Returns the bound of queries, keys and values.
    pub fn clip_qkv(&self) -> Option<f64> {
        self.clip_qkv
    }

    /// Returns the number of keys and values that the layer appends to those of a call.
    pub(crate) fn appended_keys(&self) -> usize {
        (usize::from(self.bias_kv) + usize::from(self.add_zero_attn)).saturating_add(self.num_mem_kv)
    }
}

/// Norms and gates. There are none by default.
impl MultiHeadAttentionConfig {
    /// Sets the norm of queries and keys before attention.
    #[doc(alias("qk_layernorm", "q_norm", "k_norm"))]
    pub fn with_qk_norm(mut self, qk_norm: impl Into<Option<QkNorm>>) -> Self {
        self.qk_norm = qk_norm.into();
        self
    }

    /// Sets whether heads are normalised after their rotation (HunYuan). The default is no: before it.
    pub fn with_norm_after_rope(mut self, norm_after_rope: bool) -> Self {
        self.norm_after_rope = norm_after_rope;
        self
    }

    /// Sets the epsilon of a norm of each value head: its root mean square, without a weight (Gemma 4).
    pub fn with_value_norm(mut self, eps: impl Into<Option<f64>>) -> Self {
        self.value_norm = eps.into();
        self
    }

    /// Sets the gate by which the heads' outputs are multiplied before the output projection (Qwen3-Next, AFMoE).
    pub fn with_output_gate(mut self, output_gate: impl Into<Option<OutputGate>>) -> Self {
        self.output_gate = output_gate.into();
        self
    }

    /// Sets the norm of the concatenated heads' outputs, after a gate and before the output projection (BitNet,
    /// Kosmos-2).
    pub fn with_output_norm(mut self, output_norm: impl Into<Option<OutputNorm>>) -> Self {
        self.output_norm = output_norm.into();
        self
    }

    /// Returns the norm of queries and keys.
    pub fn qk_norm(&self) -> Option<QkNorm> {
        self.qk_norm
    }

    /// Returns whether heads are normalised after their rotation.
    pub fn norm_after_rope(&self) -> bool {
        self.norm_after_rope
    }

    /// Returns the epsilon of the norm of each value head.
    pub fn value_norm(&self) -> Option<f64> {
        self.value_norm
    }

    /// Returns the gate of the heads' outputs.
    pub fn output_gate(&self) -> Option<OutputGate> {
        self.output_gate
    }

    /// Returns the norm of the concatenated heads' outputs.
    pub fn output_norm(&self) -> Option<OutputNorm> {
        self.output_norm
    }
}
