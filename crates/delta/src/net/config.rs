//! What belongs to the architecture of a gated delta net.

use std::ops::Range;

use candle_core::{Result, bail};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use super::OP;
use candle_attention_modules::base::{Options, number, options};
use candle_attention_modules::gate::GateActivation;

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
    #[serde(default = "head_dim")]
    #[default(head_dim())]
    #[check(number::size)]
    key_head_dim: usize,
    /// D_v, the width of one value head; 128 unless given.
    #[serde(default = "head_dim")]
    #[default(head_dim())]
    #[check(number::size)]
    value_head_dim: usize,
    /// K, the kernel size of the convolutions, 2 or more: a query, key or value is computed from its own token and the
    /// K
    /// - 1 before it; 4 unless given.
    #[serde(default = "conv_kernel")]
    #[default(conv_kernel())]
    #[check(number::size)]
    conv_kernel: usize,
    /// Whether each of the D_k rows of a state has a decay of its own (Kimi Linear); otherwise a head has one decay.
    #[serde(default)]
    decay_per_channel: bool,
    /// The rank of the projection to decays, which is then the product of two (Kimi Linear); one projection of full
    /// rank unless given.
    #[check(number::size)]
    decay_rank: Option<usize>,
    /// A lower bound of the decay's logarithm, below 0. The logarithm is then `bound sigmoid(e^A_log x)` in place of
    /// `-e^A_log softplus(x)`, where x is the projected input plus `dt_bias` (GLM 5, Ling 3).
    #[check(number::finite)]
    decay_lower_bound: Option<f64>,
    /// Whether beta is `2 sigmoid(x)`, from 0 to 2, in place of `sigmoid(x)`, from 0 to 1 (OLMo Hybrid's
    /// `linear_allow_neg_eigval`).
    #[serde(default)]
    doubled_beta: bool,
    /// The activation of the output gate, which multiplies the normalised context; SiLU unless given.
    #[serde(default = "silu")]
    #[default(silu())]
    gate_activation: GateActivation,
    /// The rank of the projection to the output gate, likewise (Kimi Linear); one projection of full rank unless given.
    #[check(number::size)]
    gate_rank: Option<usize>,
    /// The epsilon of the RMS norm of each head's context, added to the mean square; 1e-6 unless given.
    #[serde(default = "norm_eps")]
    #[default(norm_eps())]
    #[check(number::epsilon)]
    norm_eps: f64,
}

fn silu() -> GateActivation {
    GateActivation::Silu
}

fn head_dim() -> usize {
    128
}

fn conv_kernel() -> usize {
    4
}

fn norm_eps() -> f64 {
    1e-6
}

impl GatedDeltaNetConfig {
    /// A layer over inputs (B, T, `embed_dim`) with `num_heads` value heads and as many key heads, D_k and D_v of 128,
    /// convolutions over 4 tokens, one decay for each head, and a gate with SiLU.
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

#[cfg(test)]
mod tests {
    use super::GatedDeltaNetConfig;

    /// What "unless given" says holds for JSON too.
    #[test]
    fn json_without_options_is_the_default() -> Result<(), serde_json::Error> {
        let cfg: GatedDeltaNetConfig = serde_json::from_str(r#"{"embed_dim": 64, "num_heads": 4}"#)?;
        assert_eq!(cfg, GatedDeltaNetConfig::new(64, 4));
        assert_eq!(serde_json::from_str::<GatedDeltaNetConfig>(&serde_json::to_string(&cfg)?)?, cfg);
        Ok(())
    }
}
