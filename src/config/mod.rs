//! What belongs to the architecture of an attention layer.

mod builders;
mod readers;
mod validate;

use serde::{Deserialize, Serialize};

use crate::{AlibiConfig, QkNorm, RelativeBiasConfig, RopeConfig};

/// The shape and options of a [`MultiHeadAttention`](crate::MultiHeadAttention): everything that belongs to the
/// architecture. What belongs to the data (lengths, padding, bias) is given at the call.
///
/// ```
/// use candle_attention::MultiHeadAttentionConfig;
/// let cfg = MultiHeadAttentionConfig::new(512, 8).with_num_kv_heads(2).with_causal(true).with_qkv_bias(true);
/// assert_eq!((cfg.head_dim(), cfg.out_dim()), (64, 512));
/// ```
///
/// Numbers that do not fit together are found by [`validate`](Self::validate), which every constructor of a layer calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultiHeadAttentionConfig {
    embed_dim: usize,
    num_heads: usize,
    #[serde(default)]
    num_kv_heads: Option<usize>,
    #[serde(default)]
    head_dim: Option<usize>,
    #[serde(default)]
    value_head_dim: Option<usize>,
    #[serde(default)]
    out_dim: Option<usize>,
    #[serde(default)]
    key_size: Option<usize>,
    #[serde(default)]
    value_size: Option<usize>,
    #[serde(default)]
    q_bias: bool,
    #[serde(default)]
    k_bias: bool,
    #[serde(default)]
    v_bias: bool,
    #[serde(default)]
    out_bias: bool,
    #[serde(default = "yes")]
    out_proj: bool,
    #[serde(default)]
    bias_kv: bool,
    #[serde(default)]
    add_zero_attn: bool,
    #[serde(default)]
    causal: bool,
    #[serde(default)]
    context_length: Option<usize>,
    #[serde(default)]
    window: Option<usize>,
    #[serde(default)]
    band: Option<(usize, usize)>,
    #[serde(default)]
    clip_qkv: Option<f64>,
    #[serde(default)]
    softcap: Option<f64>,
    #[serde(default)]
    scale: Option<f64>,
    #[serde(default)]
    sinks: bool,
    #[serde(default)]
    qk_norm: Option<QkNorm>,
    #[serde(default)]
    rope: Option<RopeConfig>,
    #[serde(default)]
    norm_after_rope: bool,
    #[serde(default)]
    alibi: Option<AlibiConfig>,
    #[serde(default)]
    relative_bias: Option<RelativeBiasConfig>,
    #[serde(default)]
    dropout: f64,
}

fn yes() -> bool {
    true
}

impl MultiHeadAttentionConfig {
    /// Self-attention over inputs (B, T, `embed_dim`) with `num_heads` heads, an output projection, no biases, no mask.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: None,
            head_dim: None,
            value_head_dim: None,
            out_dim: None,
            key_size: None,
            value_size: None,
            q_bias: false,
            k_bias: false,
            v_bias: false,
            out_bias: false,
            out_proj: true,
            bias_kv: false,
            add_zero_attn: false,
            causal: false,
            context_length: None,
            window: None,
            band: None,
            clip_qkv: None,
            softcap: None,
            scale: None,
            sinks: false,
            qk_norm: None,
            rope: None,
            norm_after_rope: false,
            alibi: None,
            relative_bias: None,
            dropout: 0.0,
        }
    }
}
