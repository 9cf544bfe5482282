//! What belongs to the architecture of a gated delta net: its shape and options, and how checkpoints name and pack its
//! parameters.

use std::fmt;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use macro_rules_attribute::apply;
use serde::{Deserialize, Serialize};

use super::OP;
use candle_attention_modules::base::{
    HeadShard, Heads, LINEAR_WEIGHT, Options, Parameter, Rows, Source, Spec, count, has, number, options,
};
use candle_attention_modules::gate::GateActivation;
use candle_attention_modules::linear::ProjectionRows;

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

/// A tensor of a checkpoint: the rows of some of the parts of [`GatedDeltaNetConfig::rows`], one part after the other,
/// or in turn in each of several groups.
pub(super) struct Packed {
    name: &'static str,
    parts: Range<usize>,
    groups: usize,
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
    pub(super) fn projections(self, op: &str, cfg: &GatedDeltaNetConfig) -> Result<Vec<Packed>> {
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
        Ok(match self {
            Self::Separate => {
                Packed::all(1, &[("q_proj", 1), ("k_proj", 1), ("v_proj", 1), (gate, 1), ("b_proj", 1), (decay, 1)])
            }
            Self::ByKeyHead => Packed::all(cfg.num_key_heads(), &[("in_proj_qkvz", 4), ("in_proj_ba", 2)]),
            Self::ByPart => Packed::all(1, &[("in_proj_qkv", 3), ("in_proj_z", 1), ("in_proj_b", 1), ("in_proj_a", 1)]),
        })
    }

    /// The convolutions of queries, keys and values.
    pub(super) fn convolutions(self) -> Vec<Packed> {
        match self {
            Self::Separate => Packed::all(1, &[("q_conv1d", 1), ("k_conv1d", 1), ("v_conv1d", 1)]),
            _ => Packed::all(1, &[("conv1d", 3)]),
        }
    }

    /// The taps (C, 1, K) of queries, keys and values, or this process's of them.
    pub(super) fn read_convolutions(self, cfg: &GatedDeltaNetConfig, source: &Source) -> Result<Parameter> {
        let ([q, k, v, ..], taps) = (cfg.rows(), cfg.conv_kernel());
        // `nn.Conv1d`'s.
        let bound = (taps as f64).sqrt().recip();
        let spec =
            |name, rows| Spec::new(format!("{name}.weight"), [rows, 1, taps], Init::Uniform { lo: -bound, up: bound });
        let (convolutions, third) = (self.convolutions(), v.end.div_ceil(3));
        // transformers 5 saves three convolutions as thirds of all rows, whatever their widths.
        let first = spec(convolutions[0].name, third);
        let are_thirds = convolutions.len() == 3 && source.has(&first.name) && source.read(&first).is_ok();
        let mut whole = Parameter::default();
        for (n, Packed { name, parts, .. }) in convolutions.into_iter().enumerate() {
            source.refuse([format!("{name}.bias")], "the layer has no biases")?;
            let usual = parts.map(|part| cfg.rows()[part].len()).sum();
            let rows = if are_thirds { third.min(v.end.saturating_sub(n * third)) } else { usual };
            whole.extend(source.read(&spec(name, rows))?.into());
        }
        if source.shard() == HeadShard::WHOLE {
            return Ok(whole);
        }
        let whole = whole.tensor()?;
        let own =
            |(part, range)| Parameter::of(whole.clone(), Rows { groups: 1, range }).narrow(own_rows(part, cfg, source));
        [q, k, v].into_iter().enumerate().map(own).collect()
    }
}

impl Packed {
    /// Tensors of so many parts each, one after the other.
    fn all(groups: usize, tensors: &[(&'static str, usize)]) -> Vec<Self> {
        let mut end = 0;
        let tensor = |&(name, parts)| {
            end += parts;
            Self { name, parts: end - parts..end, groups }
        };
        tensors.iter().map(tensor).collect()
    }

    /// The rows of all parts, or this process's.
    pub fn read(all: &[Self], cfg: &GatedDeltaNetConfig, source: &Source) -> Result<Vec<ProjectionRows>> {
        let (rows, mut read) = (cfg.rows(), Vec::new());
        for Self { name, parts, groups } in all {
            source.refuse([format!("{name}.bias")], "the layer has no biases")?;
            let (start, end) = (rows[parts.start].start, rows[parts.end - 1].end);
            let spec = Spec::new(format!("{name}.weight"), [end - start, cfg.embed_dim()], LINEAR_WEIGHT);
            let reads_parts = source.shard() != HeadShard::WHOLE && *groups == 1;
            let whole = if reads_parts { None } else { Some(source.read(&spec)?) };
            for part in parts.clone() {
                let (own, at) = (own_rows(part, cfg, source), rows[part].start - start);
                let weight = match &whole {
                    Some(whole) => {
                        let range = at / groups..(at + rows[part].len()) / groups;
                        Parameter::of(whole.clone(), Rows { groups: *groups, range }).narrow(own)?
                    }
                    None => source.read_part(&spec, 0, at + own.start..at + own.end)?.into(),
                };
                read.push(ProjectionRows { weight, bias: None });
            }
        }
        Ok(read)
    }

    /// The inverse: the tensor, of the rows of all parts.
    pub fn of(&self, all: &[Tensor]) -> Result<(String, Tensor)> {
        let rows = |whole: &Tensor| Rows { groups: self.groups, range: 0..whole.dims()[0] / self.groups };
        let parts: Vec<_> = all[self.parts.clone()].iter().map(|whole| (rows(whole), whole.clone())).collect();
        Ok((format!("{}.weight", self.name), Rows::join(&parts)?.contiguous()?))
    }
}

/// This process's rows of a part; all of what inputs are compressed to.
fn own_rows(part: usize, cfg: &GatedDeltaNetConfig, source: &Source) -> Range<usize> {
    let (rows, heads) = (cfg.rows()[part].len(), if part < 2 { Heads::Key } else { Heads::Query });
    let is_compressed = [None, None, None, cfg.gate_rank(), None, cfg.decay_rank()][part].is_some();
    if is_compressed { 0..rows } else { source.own_range(heads, rows) }
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
