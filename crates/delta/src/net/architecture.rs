//! What belongs to the architecture of a gated delta net: its shape and options, and how checkpoints name and pack its
//! parameters.

use std::fmt;
use std::ops::Range;

use candle_core::{Result, bail};
use candle_nn::{Init, VarBuilder};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use super::OP;
use candle_attention_modules::base::{
    FusedRows, FusedTensor, HeadShard, Heads, LINEAR_WEIGHT, Options, Parameter, ParameterReader, ParameterSpec,
    QueryHeadOrder, count, has, number, options,
};
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
    #[serde(default = "count::<128, _>")]
    #[default(128)]
    #[check(number::size)]
    key_head_dim: usize,
    /// D_v, the width of one value head; 128 unless given.
    #[serde(default = "count::<128, _>")]
    #[default(128)]
    #[check(number::size)]
    value_head_dim: usize,
    /// K, the kernel size of the convolutions, 2 or more: a query, key or value is computed from its own token and the
    /// `K - 1` before it; 4 unless given.
    #[serde(default = "count::<4, _>")]
    #[default(4)]
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
    allow_neg_eigval: bool,
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

    /// How many rows queries, keys, values, gate, beta and decay have in the weights that inputs are projected by, of
    /// all heads, and whose heads divide them; of gate and decay those of what inputs are compressed to, if they are.
    pub(super) fn parts(&self) -> [(usize, Option<Heads>); 6] {
        let (h, h_k) = (self.num_heads, self.num_key_heads());
        let (keys, values) = ((h_k * self.key_head_dim, Some(Heads::Key)), h * self.value_head_dim);
        let of = |rank: Option<usize>, rows| rank.map_or((rows, Some(Heads::Query)), |rank| (rank, None));
        [keys, keys, of(None, values), of(self.gate_rank, values), of(None, h), of(self.decay_rank, self.num_decays())]
    }

    /// Tensors of so many of these parts each, one after the other, in groups, with rows of such a width.
    fn joints(&self, groups: usize, tensors: &[(&str, usize)], width: &[usize], init: Init) -> Vec<FusedTensor> {
        let mut parts = self.parts().into_iter();
        let joint = |&(name, count): &(&str, usize)| {
            let parts: Vec<_> = parts.by_ref().take(count).collect();
            let rows = parts.iter().map(|(rows, _)| rows).sum();
            let parts = parts.into_iter().map(|(count, heads)| FusedRows { count, heads }).collect();
            let spec = ParameterSpec::new(format!("{name}.weight"), [&[rows], width].concat(), init);
            FusedTensor { spec, is_transposed: false, groups, parts, query_heads: QueryHeadOrder::Grouped }
        };
        tensors.iter().map(joint).collect()
    }

    /// The channels of queries, keys and values in the convolutions.
    pub(super) fn channels(&self) -> [Range<usize>; 3] {
        let [q, k, v, ..] = self.parts().map(|(rows, _)| rows);
        [0..q, q..q + k, q + k..q + k + v]
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
        number::expect(OP, "conv_kernel", self.conv_kernel, |taps: usize| taps >= 2, "at least 2")?;
        number::expect(OP, "decay_lower_bound", self.decay_lower_bound, |bound: f64| bound < 0.0, "a number below 0")
    }
}

/// How a checkpoint names and packs the parameters of a [`GatedDeltaNet`](crate::GatedDeltaNet). Each layout has
/// `A_log` and `dt_bias` too.
///
/// | layout | projections | convolutions | norm, output |
/// | --- | --- | --- | --- |
/// | separate | `q_proj`, `k_proj`, `v_proj`, `b_proj`; decays `a_proj`, `f_proj` with one for each channel, or `f_a_proj`, `f_b_proj` with a rank; gate `g_proj`, or `g_a_proj`, `g_b_proj` with a rank | `q_conv1d`, `k_conv1d`, `v_conv1d` | `o_norm`, `o_proj` |
/// | by key head | `in_proj_qkvz`, `in_proj_ba`, their rows grouped by key head, with its value heads | `conv1d` | `norm`, `out_proj` |
/// | by part | `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` | `conv1d` | `norm`, `out_proj` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeltaLayout {
    /// Kimi Linear, OLMo Hybrid, flash-linear-attention.
    Separate,
    /// Qwen3-Next.
    ByKeyHead,
    /// Qwen3.5.
    ByPart,
}

impl fmt::Display for DeltaLayout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Separate => "separate",
            Self::ByKeyHead => "by key head",
            Self::ByPart => "by part",
        })
    }
}

impl DeltaLayout {
    /// The layout whose projection of queries the builder has; separate where it has none.
    pub fn detect(vb: &VarBuilder) -> Self {
        match () {
            () if has(vb, "in_proj_qkvz.weight") => Self::ByKeyHead,
            () if has(vb, "in_proj_qkv.weight") => Self::ByPart,
            () => Self::Separate,
        }
    }

    /// The norm and the output projection.
    pub(super) fn norm_and_out(self) -> [&'static str; 2] {
        if self == Self::Separate { ["o_norm", "o_proj"] } else { ["norm", "out_proj"] }
    }

    /// What inputs are projected by.
    ///
    /// # Errors
    /// Of the operation `op`, for a config that the layout has no names for.
    pub(super) fn projections(self, op: &str, cfg: &GatedDeltaNetConfig) -> Result<Vec<FusedTensor>> {
        let ranks = [cfg.gate_rank(), cfg.decay_rank()];
        if self != Self::Separate && ranks.iter().any(Option::is_some) {
            bail!(
                "[{op}] the config has a gate_rank or decay_rank {ranks:?}, for which the layout has no place \
                 (layout {self})"
            )
        }
        let gate = if cfg.gate_rank().is_some() { "g_a_proj" } else { "g_proj" };
        let decay = match (cfg.decay_rank(), cfg.decay_per_channel()) {
            (Some(_), _) => "f_a_proj",
            (None, true) => "f_proj",
            (None, false) => "a_proj",
        };
        let joints = |groups, tensors: &[_]| cfg.joints(groups, tensors, &[cfg.embed_dim()], LINEAR_WEIGHT);
        Ok(match self {
            Self::Separate => {
                joints(1, &[("q_proj", 1), ("k_proj", 1), ("v_proj", 1), (gate, 1), ("b_proj", 1), (decay, 1)])
            }
            Self::ByKeyHead => joints(cfg.num_key_heads(), &[("in_proj_qkvz", 4), ("in_proj_ba", 2)]),
            Self::ByPart => joints(1, &[("in_proj_qkv", 3), ("in_proj_z", 1), ("in_proj_b", 1), ("in_proj_a", 1)]),
        })
    }

    /// The convolutions (C, 1, K) of queries, keys and values.
    pub(super) fn convolutions(self, cfg: &GatedDeltaNetConfig) -> Vec<FusedTensor> {
        let tensors: &[_] = match self {
            Self::Separate => &[("q_conv1d", 1), ("k_conv1d", 1), ("v_conv1d", 1)],
            _ => &[("conv1d", 3)],
        };
        // `nn.Conv1d`'s.
        let bound = (cfg.conv_kernel() as f64).sqrt().recip();
        cfg.joints(1, tensors, &[1, cfg.conv_kernel()], Init::Uniform { lo: -bound, up: bound })
    }

    /// The taps (C, 1, K) of queries, keys and values, or this process's of them.
    pub(super) fn read_convolutions(self, cfg: &GatedDeltaNetConfig, source: &ParameterReader) -> Result<Parameter> {
        let (tensors, [q, k, v]) = (self.convolutions(cfg), cfg.channels());
        // transformers 5 saves three convolutions as thirds of all rows, whatever their widths.
        let (rows, third) = (v.end, v.end.div_ceil(3));
        let spec = |n: usize| {
            let mut spec = tensors[n].spec.clone();
            spec.shape[0] = third.min(rows.saturating_sub(n * third));
            spec
        };
        if tensors.len() == 1 || !source.has(&spec(0).name) || source.read(&spec(0)).is_err() {
            let usual = tensors.iter().map(|tensor| tensor.read(source)).collect::<Result<Vec<_>>>()?;
            return Ok(usual.into_iter().flatten().collect());
        }
        let whole = (0..3).map(|n| Ok(source.read(&spec(n))?.into())).collect::<Result<Parameter>>()?;
        if source.shard == HeadShard::WHOLE {
            return Ok(whole);
        }
        let whole = Parameter::from(whole.tensor()?);
        let own = |(channels, heads): (Range<usize>, Heads)| {
            let own = source.own_range(heads, channels.len());
            whole.clone().narrow(channels.start + own.start..channels.start + own.end)
        };
        [(q, Heads::Key), (k, Heads::Key), (v, Heads::Query)].into_iter().map(own).collect()
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
