//! What belongs to the architecture of latent attention.

use candle_core::{Result, bail};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use super::OP;
use crate::position::{RopeConfig, RopeStyle, score_factor};
use candle_attention_modules::base::{Options, number, options, yes};

/// The shape and options of a [`MultiHeadLatentAttention`](crate::MultiHeadLatentAttention). What belongs to the data
/// (lengths, padding, a cache) is given at the call.
///
/// ```
/// use candle_attention::MultiHeadLatentAttentionConfig;
/// // DeepSeek-V2-Lite: what is not said is as in the paper.
/// let cfg = MultiHeadLatentAttentionConfig::new(2048, 16);
/// assert_eq!((cfg.kv_lora_rank(), cfg.head_dim(), cfg.value_head_dim()), (512, 192, 128));
/// // A token takes as much of a cache as 2.25 key heads of width 128 and their values, whatever the number of heads.
/// assert_eq!(cfg.kv_lora_rank() + cfg.rope_head_dim(), 576);
/// ```
///
/// Numbers that do not fit together are found by [`validate`](Self::validate), which the constructor of the layer
/// calls.
#[apply(options)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct MultiHeadLatentAttentionConfig {
    /// E, the width of the layer's input and output.
    #[check(number::size)]
    #[methods(get)]
    embed_dim: usize,
    /// H, the number of heads.
    #[check(number::size)]
    #[methods(get)]
    pub(super) num_heads: usize,
    /// The width that queries are compressed to (`q_lora_rank`); without it one projection makes them.
    #[check(number::size)]
    q_lora_rank: Option<usize>,
    /// The width of the latent that keys and values are computed from (`kv_lora_rank`).
    #[default(512)]
    #[check(number::size)]
    kv_lora_rank: usize,
    /// The width of the part of each query and key head that knows no position (`qk_nope_head_dim`).
    #[default(128)]
    #[check(number::size)]
    nope_head_dim: usize,
    /// The width of the part of each query head that rotates, and of the one key that all heads share for it
    /// (`qk_rope_head_dim`).
    #[default(64)]
    #[check(number::size)]
    rope_head_dim: usize,
    /// D_v, the width of one value head (`v_head_dim`).
    #[default(128)]
    #[check(number::size)]
    value_head_dim: usize,
    /// Biases on the projections that compress, and on the output projection (`attention_bias`); the other projections
    /// have none.
    #[serde(default)]
    bias: bool,
    /// The rotary positions, over heads of `rope_head_dim`.
    #[default(RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved))]
    #[methods(with, get_ref)]
    rope: RopeConfig,
    /// Whether queries and shared keys rotate; they do unless said otherwise. Kimi Linear's know no positions.
    #[serde(default = "yes")]
    #[default(true)]
    rotates: bool,
    /// The factor on the scores, in place of the default of [`scale`](Self::scale).
    #[check(number::finite)]
    #[methods(with)]
    scale: Option<f64>,
    /// What the norms of the compressed queries and of the latent add to the mean square; 1e-6 unless given.
    #[serde(default = "norm_eps")]
    #[default(norm_eps())]
    #[check(number::epsilon)]
    norm_eps: f64,
    /// Whether later keys are hidden; they are unless said otherwise.
    #[serde(default = "yes")]
    #[default(true)]
    causal: bool,
    /// The probability with which a weight is dropped in training.
    #[serde(default)]
    #[check(number::probability)]
    dropout: f64,
}

fn norm_eps() -> f64 {
    1e-6
}

impl MultiHeadLatentAttentionConfig {
    /// A causal layer over inputs (B, T, `embed_dim`) with `num_heads` heads, queries that are not compressed, no
    /// biases, and the widths of DeepSeek-V2: a latent of 512, heads of 128 without and 64 with rotary positions,
    /// values of 128. Rotary positions are interleaved, with the base 10,000.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self { embed_dim, num_heads, ..Self::unset() }
    }

    /// D, the width of one query and key head: both of its parts.
    pub fn head_dim(&self) -> usize {
        self.nope_head_dim.saturating_add(self.rope_head_dim)
    }

    /// The factor on the scores: 1/sqrt(D), and with [yarn](crate::RopeScaling::Yarn) scaling that has an
    /// `mscale_all_dim`, times the square of `0.1 · mscale_all_dim · ln(factor) + 1`.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| score_factor(self.rope.scaling()) / (self.head_dim() as f64).sqrt())
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        self.check(OP)?;
        let h = self.num_heads;
        let widest = self.head_dim().max(self.nope_head_dim.saturating_add(self.value_head_dim));
        let widest = widest.max(self.kv_lora_rank.saturating_add(self.rope_head_dim));
        if h.saturating_mul(widest) > u32::MAX as usize {
            bail!("[{OP}] num_heads {h} times a width of {widest} is more than {}", u32::MAX)
        }
        if self.rope.axes().is_some() {
            bail!("[{OP}] rope has several axes, expected one")
        }
        self.rope.validate(self.rope_head_dim)
    }
}
