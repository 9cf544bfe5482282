//! What belongs to the architecture of a gated delta net.

use std::ops::Range;

use candle_core::{Result, bail};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use super::OP;
use crate::base::{Options, number, options};
use crate::gate::GateActivation;

/// The shape and options of a [`GatedDeltaNet`](crate::GatedDeltaNet). What belongs to the data (padding, a cache) is
/// given at the call.
///
/// ```
/// use candle_attention::{GateActivation, GatedDeltaNetConfig};
/// // Qwen3.5 9B.
/// let cfg = GatedDeltaNetConfig::new(4096, 32).with_num_key_heads(16);
/// assert_eq!((cfg.key_head_dim(), cfg.value_head_dim(), cfg.conv_kernel()), (128, 128, 4));
/// // Kimi Linear.
/// let cfg = GatedDeltaNetConfig::new(2304, 32).with_decay_per_channel(true).with_decay_rank(128).with_gate_rank(128);
/// cfg.with_gate_activation(GateActivation::Sigmoid).with_norm_eps(1e-5).validate().expect("the numbers fit together");
/// ```
///
/// Numbers that do not fit together are found by [`validate`](Self::validate), which the constructor of the layer
/// calls.
#[apply(options)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[must_use]
pub struct GatedDeltaNetConfig {
    /// E, the width of the layer's input and output.
    #[check(number::size)]
    #[methods(get)]
    embed_dim: usize,
    /// H, the number of value heads, each of which has a state.
    #[check(number::size)]
    #[methods(get)]
    num_heads: usize,
    /// H_k, the number of heads of queries and keys, which divides H; H unless given.
    #[check(number::size)]
    #[methods(with)]
    num_key_heads: Option<usize>,
    /// D_k, the width of one head of queries and keys; 128 unless given.
    #[default(128)]
    #[check(number::size)]
    key_head_dim: usize,
    /// D_v, the width of one value head; 128 unless given.
    #[default(128)]
    #[check(number::size)]
    value_head_dim: usize,
    /// K, the taps of the convolutions: how many tokens, its own included, a query, key or value is made from, two or
    /// more; 4 unless given.
    #[default(4)]
    #[check(number::size)]
    conv_kernel: usize,
    /// Whether each of the D_k rows of a state decays by itself (Kimi Linear), and not the state as a whole.
    #[serde(default)]
    decay_per_channel: bool,
    /// The width that inputs are compressed to before decays are computed (Kimi Linear); without it one projection
    /// makes them.
    #[check(number::size)]
    decay_rank: Option<usize>,
    /// The least logarithm of a decay, below 0, and another formula for it (GLM 5, Ling 3): `bound · sigmoid(e^A_log
    /// x)` in place of `-e^A_log softplus(x)`.
    #[check(number::finite)]
    decay_lower_bound: Option<f64>,
    /// Whether beta is from 0 to 2 and not to 1, so that a state may change its sign (OLMo Hybrid's
    /// `linear_allow_neg_eigval`).
    #[serde(default)]
    doubled_beta: bool,
    /// What the gate's projection becomes before it multiplies the normalised context; SiLU unless given.
    #[serde(default = "silu")]
    #[default(silu())]
    gate_activation: GateActivation,
    /// The width that inputs are compressed to before the gate is computed (Kimi Linear); without it one projection
    /// makes it.
    #[check(number::size)]
    gate_rank: Option<usize>,
    /// What the norm of each head's context adds to the mean square; 1e-6 unless given.
    #[serde(default = "norm_eps")]
    #[default(norm_eps())]
    #[check(number::epsilon)]
    norm_eps: f64,
}

fn silu() -> GateActivation {
    GateActivation::Silu
}

fn norm_eps() -> f64 {
    1e-6
}

impl GatedDeltaNetConfig {
    /// A layer over inputs (B, T, `embed_dim`) with `num_heads` value heads, and the options of Qwen3-Next: as many key
    /// heads, heads of 128, convolutions of 4 taps, one decay for a state, a gate by SiLU.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self { embed_dim, num_heads, ..Self::unset() }
    }

    /// H_k, the number of heads of queries and keys.
    pub fn num_key_heads(&self) -> usize {
        self.num_key_heads.unwrap_or(self.num_heads)
    }

    /// The rows of queries, keys, values, gate, beta and decay in the weights that inputs are projected by, of all
    /// heads; of gate and decay those of what inputs are compressed to, where they are.
    pub(super) fn rows(&self) -> [Range<usize>; 6] {
        let (h, h_k) = (self.num_heads, self.num_key_heads());
        let [keys, values] = [h_k * self.key_head_dim, h * self.value_head_dim];
        let (gate, decay) = (self.gate_rank.unwrap_or(values), self.decay_rank.unwrap_or(self.num_decays()));
        let mut end = 0;
        [keys, keys, values, gate, h, decay].map(|rows| {
            end += rows;
            end - rows..end
        })
    }

    /// How many decays a token has.
    pub(super) fn num_decays(&self) -> usize {
        self.num_heads * if self.decay_per_channel { self.key_head_dim } else { 1 }
    }

    /// The same with so many value heads and key heads.
    pub(super) fn with_heads(&self, h: usize, h_k: usize) -> Self {
        Self { num_heads: h, num_key_heads: self.num_key_heads.map(|_| h_k), ..self.clone() }
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        self.check(OP)?;
        let (h, h_k) = (self.num_heads, self.num_key_heads());
        if !h.is_multiple_of(h_k) {
            bail!("[{OP}] num_key_heads is {h_k}, which does not divide num_heads {h}")
        }
        let widest = self.key_head_dim.max(self.value_head_dim);
        if h.saturating_mul(widest) > u32::MAX as usize {
            bail!("[{OP}] num_heads {h} times a width of {widest} is more than {}", u32::MAX)
        }
        if self.conv_kernel < 2 {
            bail!("[{OP}] conv_kernel is {}, expected at least 2", self.conv_kernel)
        }
        if let Some(bound) = self.decay_lower_bound.filter(|&bound| bound >= 0.0) {
            bail!("[{OP}] decay_lower_bound is {bound:?}, expected a number below 0")
        }
        Ok(())
    }
}
