//! What belongs to the architecture of latent attention.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::OP;
use crate::position::{RopeConfig, RopeStyle, score_factor};

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
/// Numbers that do not fit together are found by [`validate`](Self::validate), which the constructor of the layer calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct MultiHeadLatentAttentionConfig {
    embed_dim: usize,
    num_heads: usize,
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    nope_head_dim: usize,
    rope_head_dim: usize,
    value_head_dim: usize,
    #[serde(default)]
    bias: bool,
    rope: RopeConfig,
    scale: Option<f64>,
    #[serde(default = "norm_eps")]
    norm_eps: f64,
    #[serde(default = "yes")]
    causal: bool,
    #[serde(default)]
    dropout: f64,
}

fn norm_eps() -> f64 {
    1e-6
}

fn yes() -> bool {
    true
}

impl MultiHeadLatentAttentionConfig {
    /// A causal layer over inputs (B, T, `embed_dim`) with `num_heads` heads, queries that are not compressed, no biases, and
    /// the widths of DeepSeek-V2: a latent of 512, heads of 128 without and 64 with rotary positions, values of 128. Rotary
    /// positions are interleaved, with the base 10,000.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            q_lora_rank: None,
            kv_lora_rank: 512,
            nope_head_dim: 128,
            rope_head_dim: 64,
            value_head_dim: 128,
            bias: false,
            rope: RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved),
            scale: None,
            norm_eps: norm_eps(),
            causal: true,
            dropout: 0.0,
        }
    }
}

/// Builders: each takes the config and gives it back with one thing changed.
impl MultiHeadLatentAttentionConfig {
    /// Another number of heads, of a part of a layer.
    pub(crate) fn with_num_heads(mut self, num_heads: usize) -> Self {
        self.num_heads = num_heads;
        self
    }

    /// The width that queries are compressed to (`q_lora_rank`); without it one projection makes them.
    pub fn with_q_lora_rank(mut self, rank: usize) -> Self {
        self.q_lora_rank = Some(rank);
        self
    }

    /// The width of the latent that keys and values are computed from (`kv_lora_rank`).
    pub fn with_kv_lora_rank(mut self, rank: usize) -> Self {
        self.kv_lora_rank = rank;
        self
    }

    /// The width of the part of each query and key head that knows no position (`qk_nope_head_dim`).
    pub fn with_nope_head_dim(mut self, width: usize) -> Self {
        self.nope_head_dim = width;
        self
    }

    /// The width of the part of each query head that rotates, and of the one key that all heads share for it
    /// (`qk_rope_head_dim`).
    pub fn with_rope_head_dim(mut self, width: usize) -> Self {
        self.rope_head_dim = width;
        self
    }

    /// D_v, the width of one value head (`v_head_dim`).
    pub fn with_value_head_dim(mut self, width: usize) -> Self {
        self.value_head_dim = width;
        self
    }

    /// Biases on the projections that compress, and on the output projection (`attention_bias`); the other projections have
    /// none.
    pub fn with_bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// The rotary positions, over heads of `rope_head_dim`.
    pub fn with_rope(mut self, rope: RopeConfig) -> Self {
        self.rope = rope;
        self
    }

    /// The factor on the scores, in place of the default of [`scale`](Self::scale).
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// What the norms of the compressed queries and of the latent add to the mean square; 1e-6 unless given.
    pub fn with_norm_eps(mut self, eps: f64) -> Self {
        self.norm_eps = eps;
        self
    }

    /// Whether later keys are hidden; they are unless said otherwise.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// The probability with which a weight is dropped in training.
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }
}

/// Readers, with defaults filled in.
impl MultiHeadLatentAttentionConfig {
    /// E, the width of the layer's input and output.
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// H, the number of heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// The width that queries are compressed to, if they are.
    pub fn q_lora_rank(&self) -> Option<usize> {
        self.q_lora_rank
    }

    /// The width of the latent.
    pub fn kv_lora_rank(&self) -> usize {
        self.kv_lora_rank
    }

    /// The width of the part of a head that knows no position.
    pub fn nope_head_dim(&self) -> usize {
        self.nope_head_dim
    }

    /// The width of the part of a head that rotates.
    pub fn rope_head_dim(&self) -> usize {
        self.rope_head_dim
    }

    /// D, the width of one query and key head: both of its parts.
    pub fn head_dim(&self) -> usize {
        self.nope_head_dim.saturating_add(self.rope_head_dim)
    }

    /// D_v, the width of one value head.
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim
    }

    /// Whether the projections that compress and the output projection have biases.
    pub fn bias(&self) -> bool {
        self.bias
    }

    /// The rotary positions.
    pub fn rope(&self) -> &RopeConfig {
        &self.rope
    }

    /// The factor on the scores: 1/sqrt(D), and with [yarn](crate::RopeScaling::Yarn) scaling that has an `mscale_all_dim`,
    /// times the square of `0.1 · mscale_all_dim · ln(factor) + 1`.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| score_factor(self.rope.scaling()) / (self.head_dim() as f64).sqrt())
    }

    /// What the norms add to the mean square.
    pub fn norm_eps(&self) -> f64 {
        self.norm_eps
    }

    /// Whether later keys are hidden.
    pub fn causal(&self) -> bool {
        self.causal
    }

    /// The probability with which a weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }
}

impl MultiHeadLatentAttentionConfig {
    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("embed_dim", Some(self.embed_dim)),
            ("num_heads", Some(self.num_heads)),
            ("q_lora_rank", self.q_lora_rank),
            ("kv_lora_rank", Some(self.kv_lora_rank)),
            ("nope_head_dim", Some(self.nope_head_dim)),
            ("rope_head_dim", Some(self.rope_head_dim)),
            ("value_head_dim", Some(self.value_head_dim)),
        ];
        for (name, size) in sizes {
            match size {
                Some(0) => bail!("[{OP}] {name} is 0, expected at least 1"),
                // Products of two sizes must fit a tensor's shape.
                Some(size) if size > u32::MAX as usize => {
                    bail!("[{OP}] {name} is {size}, expected at most {}", u32::MAX)
                }
                _ => {}
            }
        }
        let h = self.num_heads;
        let widest = self.head_dim().max(self.nope_head_dim.saturating_add(self.value_head_dim));
        let widest = widest.max(self.kv_lora_rank.saturating_add(self.rope_head_dim));
        if h.saturating_mul(widest) > u32::MAX as usize {
            bail!("[{OP}] num_heads {h} times a width of {widest} is more than {}", u32::MAX)
        }
        if !((self.norm_eps as f32).is_finite() && self.norm_eps >= 0.0) {
            bail!("[{OP}] norm_eps is {}, expected a finite number of zero or more", self.norm_eps)
        }
        if !(0.0..=1.0).contains(&self.dropout) {
            bail!("[{OP}] dropout is {}, expected a probability from 0 to 1", self.dropout)
        }
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            bail!("[{OP}] scale is {scale}, expected a finite number")
        }
        if self.rope.axes().is_some() {
            bail!("[{OP}] rope has several axes, expected one")
        }
        self.rope.validate(self.rope_head_dim)
    }
}
