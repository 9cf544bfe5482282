//! The shape and options of a gated delta net.

use candle_core::{Result, bail};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use candle_attention_modules::base::{Synonym, explain_unknown_field, number, variant};
use candle_attention_modules::gate::GateActivation;

/// The operation in the error texts of the layer.
pub(super) const OP: &str = "gated_delta_net";

/// The shape and options of a [`GatedDeltaNet`](crate::GatedDeltaNet). What belongs to the data (padding, a cache) is
/// passed with the call.
///
/// ```
/// use candle_attention::{GateActivation, GatedDeltaNetConfig};
/// // Qwen3.5 9B.
/// let cfg = GatedDeltaNetConfig::new(4096, 32).with_num_key_heads(16);
/// assert_eq!((cfg.key_head_dim(), cfg.value_head_dim(), cfg.conv_kernel_dim()), (128, 128, 4));
/// // Kimi Linear.
/// let cfg = GatedDeltaNetConfig::new(2304, 32).with_decay_per_channel(true).with_decay_rank(128).with_gate_rank(128);
/// cfg.with_gate_activation(GateActivation::Sigmoid).with_norm_eps(1e-5).validate().expect("the numbers fit together");
/// ```
///
/// The names follow Qwen3-Next's config, whose fields have the prefix `linear_`. [`validate`](Self::validate) finds
/// numbers that do not fit together; the constructors of the layer call it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
#[must_use]
pub struct GatedDeltaNetConfig {
    embed_dim: usize,
    num_value_heads: usize,
    num_key_heads: Option<usize>,
    #[serde(default = "default_head_dim")]
    key_head_dim: usize,
    #[serde(default = "default_head_dim")]
    value_head_dim: usize,
    #[serde(default = "default_conv_kernel_dim")]
    conv_kernel_dim: usize,
    #[serde(default)]
    decay_per_channel: bool,
    decay_rank: Option<usize>,
    decay_lower_bound: Option<f64>,
    #[serde(default)]
    allow_neg_eigval: bool,
    #[serde(default = "default_gate_activation", deserialize_with = "gate_activation")]
    gate_activation: GateActivation,
    gate_rank: Option<usize>,
    #[serde(default = "default_norm_eps")]
    norm_eps: f64,
}

/// The names that other libraries and earlier versions have for the options.
const SYNONYMS: &[Synonym] = &[
    Synonym::of("embed_dim", &["hidden_size", "d_model", "dim"], "`embed_dim`"),
    Synonym::of("num_value_heads", &["num_heads", "linear_num_value_heads", "num_v_heads"], "`num_value_heads`"),
    Synonym::of("num_key_heads", &["linear_num_key_heads", "num_k_heads", "num_kv_heads"], "`num_key_heads`"),
    Synonym::of("key_head_dim", &["linear_key_head_dim", "head_k_dim", "head_dim"], "`key_head_dim`"),
    Synonym::of("value_head_dim", &["linear_value_head_dim", "head_v_dim"], "`value_head_dim`"),
    Synonym::of(
        "conv_kernel_dim",
        &["conv_kernel", "conv_size", "linear_conv_kernel_dim", "short_conv_kernel_size"],
        "`conv_kernel_dim`",
    ),
    Synonym::of("allow_neg_eigval", &["doubled_beta", "linear_allow_neg_eigval"], "`allow_neg_eigval`"),
    Synonym::of("norm_eps", &["rms_norm_eps", "eps"], "`norm_eps`"),
];

// The derived functions are `GatedDeltaNetConfig::serialize` and `deserialize`, because of `remote = "Self"`.

impl Serialize for GatedDeltaNetConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for GatedDeltaNetConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::deserialize(deserializer).map_err(|error| explain_unknown_field(error, SYNONYMS))
    }
}

/// Reads the option `gate_activation`.
fn gate_activation<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<GateActivation, D::Error> {
    variant(value, "gate_activation")
}

fn default_head_dim() -> usize {
    128
}

fn default_conv_kernel_dim() -> usize {
    4
}

fn default_gate_activation() -> GateActivation {
    GateActivation::Silu
}

fn default_norm_eps() -> f64 {
    1e-6
}

/// Constructor and builders.
impl GatedDeltaNetConfig {
    /// Creates the config of a layer over inputs (B, T, `embed_dim`) with `num_value_heads` heads of values and the
    /// same number of key heads, D_k and D_v of 128, convolutions over 4 tokens, one decay for each head, and an output
    /// gate with SiLU.
    pub fn new(embed_dim: usize, num_value_heads: usize) -> Self {
        Self {
            embed_dim,
            num_value_heads,
            num_key_heads: None,
            key_head_dim: default_head_dim(),
            value_head_dim: default_head_dim(),
            conv_kernel_dim: default_conv_kernel_dim(),
            decay_per_channel: false,
            decay_rank: None,
            decay_lower_bound: None,
            allow_neg_eigval: false,
            gate_activation: default_gate_activation(),
            gate_rank: None,
            norm_eps: default_norm_eps(),
        }
    }

    /// Sets H_k, the number of heads of queries and keys, which divides the number of value heads. It is the number of
    /// value heads by default.
    pub fn with_num_key_heads(mut self, num_key_heads: impl Into<Option<usize>>) -> Self {
        self.num_key_heads = num_key_heads.into();
        self
    }

    /// Sets D_k, the width of one head of queries and keys. It is 128 by default.
    pub fn with_key_head_dim(mut self, key_head_dim: usize) -> Self {
        self.key_head_dim = key_head_dim;
        self
    }

    /// Sets D_v, the width of one value head. It is 128 by default.
    pub fn with_value_head_dim(mut self, value_head_dim: usize) -> Self {
        self.value_head_dim = value_head_dim;
        self
    }

    /// Sets K, the kernel size of the convolutions, 2 or more: a query, key or value is computed from its own token and
    /// the `K - 1` tokens before it. It is 4 by default.
    pub fn with_conv_kernel_dim(mut self, conv_kernel_dim: usize) -> Self {
        self.conv_kernel_dim = conv_kernel_dim;
        self
    }

    /// Sets whether each of the D_k rows of a state has its own decay, as in Kimi Linear. A head has one decay by
    /// default.
    pub fn with_decay_per_channel(mut self, decay_per_channel: bool) -> Self {
        self.decay_per_channel = decay_per_channel;
        self
    }

    /// Sets the rank of the projection to decays, which is then the product of two projections, as in Kimi Linear. It
    /// is one projection of full rank by default.
    pub fn with_decay_rank(mut self, decay_rank: impl Into<Option<usize>>) -> Self {
        self.decay_rank = decay_rank.into();
        self
    }

    /// Sets a lower bound of the decay's logarithm, below 0, as in GLM 5 and Ling 3. The logarithm is then `bound
    /// sigmoid(e^A_log x)` instead of `-e^A_log softplus(x)`, where x is the projected input plus `dt_bias`.
    pub fn with_decay_lower_bound(mut self, decay_lower_bound: impl Into<Option<f64>>) -> Self {
        self.decay_lower_bound = decay_lower_bound.into();
        self
    }

    /// Sets whether beta is `2 sigmoid(x)`, from 0 to 2, instead of `sigmoid(x)`, from 0 to 1: `allow_neg_eigval` of
    /// flash-linear-attention, `linear_allow_neg_eigval` of OLMo Hybrid.
    pub fn with_allow_neg_eigval(mut self, allow_neg_eigval: bool) -> Self {
        self.allow_neg_eigval = allow_neg_eigval;
        self
    }

    /// Sets the activation of the output gate, which multiplies the normalised output of the rule. It is SiLU by
    /// default.
    pub fn with_gate_activation(mut self, gate_activation: GateActivation) -> Self {
        self.gate_activation = gate_activation;
        self
    }

    /// Sets the rank of the projection to the output gate, which is then the product of two projections, as in Kimi
    /// Linear. It is one projection of full rank by default.
    pub fn with_gate_rank(mut self, gate_rank: impl Into<Option<usize>>) -> Self {
        self.gate_rank = gate_rank.into();
        self
    }

    /// Sets the epsilon of the RMS norm of each head's output, which is added to the mean square. It is 1e-6 by
    /// default.
    pub fn with_norm_eps(mut self, norm_eps: f64) -> Self {
        self.norm_eps = norm_eps;
        self
    }
}

/// Getters.
impl GatedDeltaNetConfig {
    /// Returns E, the width of the layer's input and output.
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// Returns H, the number of value heads, each of which has a state.
    pub fn num_value_heads(&self) -> usize {
        self.num_value_heads
    }

    /// Returns H_k, the number of heads of queries and keys.
    pub fn num_key_heads(&self) -> usize {
        self.num_key_heads.unwrap_or(self.num_value_heads)
    }

    /// Returns D_k, the width of one head of queries and keys.
    pub fn key_head_dim(&self) -> usize {
        self.key_head_dim
    }

    /// Returns D_v, the width of one value head.
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim
    }

    /// Returns K, the kernel size of the convolutions.
    pub fn conv_kernel_dim(&self) -> usize {
        self.conv_kernel_dim
    }

    /// Returns whether each of the D_k rows of a state has its own decay.
    pub fn decay_per_channel(&self) -> bool {
        self.decay_per_channel
    }

    /// Returns the rank of the projection to decays, if it is the product of two projections.
    pub fn decay_rank(&self) -> Option<usize> {
        self.decay_rank
    }

    /// Returns the lower bound of the decay's logarithm, if there is one.
    pub fn decay_lower_bound(&self) -> Option<f64> {
        self.decay_lower_bound
    }

    /// Returns whether beta goes from 0 to 2 instead of 1.
    pub fn allow_neg_eigval(&self) -> bool {
        self.allow_neg_eigval
    }

    /// Returns the activation of the output gate.
    pub fn gate_activation(&self) -> GateActivation {
        self.gate_activation
    }

    /// Returns the rank of the projection to the output gate, if it is the product of two projections.
    pub fn gate_rank(&self) -> Option<usize> {
        self.gate_rank
    }

    /// Returns the epsilon of the RMS norm of each head's output.
    pub fn norm_eps(&self) -> f64 {
        self.norm_eps
    }

    /// Returns the number of decays of a token: one for each head, or for each row of each state.
    #[doc(hidden)]
    pub fn num_decays(&self) -> usize {
        self.num_value_heads * if self.decay_per_channel { self.key_head_dim } else { 1 }
    }

    /// Returns the config of a layer with some of the heads.
    pub(super) fn with_heads(&self, num_value_heads: usize, num_key_heads: usize) -> Self {
        Self { num_value_heads, num_key_heads: self.num_key_heads.map(|_| num_key_heads), ..self.clone() }
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, what was expected and what was found.
    pub fn validate(&self) -> Result<()> {
        number::size(OP, "embed_dim", self.embed_dim)?;
        number::size(OP, "num_value_heads", self.num_value_heads)?;
        number::size(OP, "num_key_heads", self.num_key_heads)?;
        number::size(OP, "key_head_dim", self.key_head_dim)?;
        number::size(OP, "value_head_dim", self.value_head_dim)?;
        number::size(OP, "conv_kernel_dim", self.conv_kernel_dim)?;
        number::size(OP, "decay_rank", self.decay_rank)?;
        number::finite(OP, "decay_lower_bound", self.decay_lower_bound)?;
        number::size(OP, "gate_rank", self.gate_rank)?;
        number::epsilon(OP, "norm_eps", self.norm_eps)?;
        let h = self.num_value_heads;
        let h_k = self.num_key_heads();
        if !h.is_multiple_of(h_k) {
            bail!("[{OP}] num_key_heads is {h_k}, which does not divide num_value_heads {h}")
        }
        let widest = self.key_head_dim.max(self.value_head_dim);
        if h.saturating_mul(widest) > u32::MAX as usize {
            bail!("[{OP}] num_value_heads {h} times a width of {widest} is more than {}", u32::MAX)
        }
        number::expect(OP, "conv_kernel_dim", self.conv_kernel_dim, |taps: usize| taps >= 2, "at least 2")?;
        number::expect(OP, "decay_lower_bound", self.decay_lower_bound, |bound: f64| bound < 0.0, "a number below 0")
    }
}

#[cfg(test)]
mod tests {
    use super::GatedDeltaNetConfig;

    #[test]
    fn config_json_without_options_matches_defaults() -> Result<(), serde_json::Error> {
        let cfg: GatedDeltaNetConfig = serde_json::from_str(r#"{"embed_dim": 64, "num_value_heads": 4}"#)?;
        assert_eq!(cfg, GatedDeltaNetConfig::new(64, 4));
        assert_eq!(serde_json::from_str::<GatedDeltaNetConfig>(&serde_json::to_string(&cfg)?)?, cfg);
        Ok(())
    }
}
