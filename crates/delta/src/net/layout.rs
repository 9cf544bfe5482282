//! How checkpoints name and pack the parameters of a gated delta net.

use std::fmt;
use std::ops::Range;

use candle_core::{Result, bail};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use super::config::GatedDeltaNetConfig;
use super::projections::ConvChannels;
use candle_attention_modules::base::{
    FusedRows, FusedTensor, HeadShard, Heads, LINEAR_WEIGHT, Parameter, ParameterReader, ParameterSpec, QueryHeadOrder,
    StoredDims, has,
};

/// How a checkpoint names and packs the parameters of a [`GatedDeltaNet`](crate::GatedDeltaNet). Each layout has
/// `A_log` and `dt_bias` too.
///
/// | layout | projections | convolutions | norm, output |
/// | --- | --- | --- | --- |
/// | `Separate` | `q_proj`, `k_proj`, `v_proj`, `b_proj`; decays `a_proj`, `f_proj` with one for each channel, or `f_a_proj`, `f_b_proj` with a rank; gate `g_proj`, or `g_a_proj`, `g_b_proj` with a rank | `q_conv1d`, `k_conv1d`, `v_conv1d` | `o_norm`, `o_proj` |
/// | `Qwen3Next` | `in_proj_qkvz`, `in_proj_ba`, their rows grouped by key head, with its value heads | `conv1d` | `norm`, `out_proj` |
/// | `Qwen3_5` | `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` | `conv1d` | `norm`, `out_proj` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeltaLayout {
    /// A tensor for each projection: Kimi Linear, OLMo Hybrid, flash-linear-attention.
    Separate,
    /// Rows of several projections in one tensor, grouped by key head: Qwen3-Next.
    Qwen3Next,
    /// Rows of several projections in one tensor, one projection after the other: Qwen3.5.
    Qwen3_5,
}

impl fmt::Display for DeltaLayout {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Separate => "separate",
            Self::Qwen3Next => "qwen3_next",
            Self::Qwen3_5 => "qwen3_5",
        })
    }
}

/// The names of the norm and of the output projection.
pub(super) struct OutputNames {
    pub norm: &'static str,
    pub projection: &'static str,
}

impl DeltaLayout {
    /// Returns the layout whose projection of queries the builder has, and [`Separate`](Self::Separate) if it has none.
    pub fn detect(vb: &VarBuilder) -> Self {
        if has(vb, "in_proj_qkvz.weight") {
            Self::Qwen3Next
        } else if has(vb, "in_proj_qkv.weight") {
            Self::Qwen3_5
        } else {
            Self::Separate
        }
    }

    /// Returns the names of the norm and of the output projection.
    pub(super) fn output_names(self) -> OutputNames {
        match self {
            Self::Separate => OutputNames { norm: "o_norm", projection: "o_proj" },
            Self::Qwen3Next | Self::Qwen3_5 => OutputNames { norm: "norm", projection: "out_proj" },
        }
    }

    /// Returns the tensors with the weights of the projections of the input.
    ///
    /// # Errors
    /// For a config that the layout has no names for, in the name of the operation `op`.
    pub(super) fn projections(self, op: &str, cfg: &GatedDeltaNetConfig) -> Result<Vec<FusedTensor>> {
        if self != Self::Separate && (cfg.gate_rank().is_some() || cfg.decay_rank().is_some()) {
            bail!(
                "[{op}] the config has gate_rank {:?} and decay_rank {:?}, expected none in layout {self}",
                cfg.gate_rank(),
                cfg.decay_rank()
            )
        }
        let rows = cfg.projection_rows();
        let tensor = |name: &str, groups: usize, parts: &[FusedRows]| {
            fused_tensor(name, groups, parts, &[cfg.embed_dim()], LINEAR_WEIGHT)
        };
        Ok(match self {
            Self::Separate => {
                let gate_name = if cfg.gate_rank().is_some() { "g_a_proj" } else { "g_proj" };
                let decay_name = match (cfg.decay_rank(), cfg.decay_per_channel()) {
                    (Some(_), _) => "f_a_proj",
                    (None, true) => "f_proj",
                    (None, false) => "a_proj",
                };
                vec![
                    tensor("q_proj", 1, &[rows.q]),
                    tensor("k_proj", 1, &[rows.k]),
                    tensor("v_proj", 1, &[rows.v]),
                    tensor(gate_name, 1, &[rows.gate]),
                    tensor("b_proj", 1, &[rows.beta]),
                    tensor(decay_name, 1, &[rows.decay]),
                ]
            }
            Self::Qwen3Next => vec![
                tensor("in_proj_qkvz", cfg.num_key_heads(), &[rows.q, rows.k, rows.v, rows.gate]),
                tensor("in_proj_ba", cfg.num_key_heads(), &[rows.beta, rows.decay]),
            ],
            Self::Qwen3_5 => vec![
                tensor("in_proj_qkv", 1, &[rows.q, rows.k, rows.v]),
                tensor("in_proj_z", 1, &[rows.gate]),
                tensor("in_proj_b", 1, &[rows.beta]),
                tensor("in_proj_a", 1, &[rows.decay]),
            ],
        })
    }

    /// Returns the tensors with the weights (C, 1, K) of the convolutions of queries, keys and values.
    pub(super) fn convolutions(self, cfg: &GatedDeltaNetConfig) -> Vec<FusedTensor> {
        // The bound of `nn.Conv1d`.
        let bound = (cfg.conv_kernel_dim() as f64).sqrt().recip();
        let init = Init::Uniform { lo: -bound, up: bound };
        let rows = cfg.projection_rows();
        let tensor = |name: &str, parts: &[FusedRows]| fused_tensor(name, 1, parts, &[1, cfg.conv_kernel_dim()], init);
        match self {
            Self::Separate => {
                vec![tensor("q_conv1d", &[rows.q]), tensor("k_conv1d", &[rows.k]), tensor("v_conv1d", &[rows.v])]
            }
            Self::Qwen3Next | Self::Qwen3_5 => vec![tensor("conv1d", &[rows.q, rows.k, rows.v])],
        }
    }

    /// Reads the weights (C, 1, K) of the convolutions, or this rank's channels of them.
    pub(super) fn read_convolutions(self, cfg: &GatedDeltaNetConfig, reader: &ParameterReader) -> Result<Parameter> {
        let tensors = self.convolutions(cfg);
        let channels = cfg.conv_channels();
        // transformers 5 saves three convolutions as thirds of all rows, also where their widths differ.
        let third = channels.count().div_ceil(3);
        let third_spec = |n: usize| {
            let mut spec = tensors[n].spec.clone();
            spec.shape[0] = third.min(channels.count().saturating_sub(n * third));
            spec
        };
        if tensors.len() == 1 || !reader.has(&third_spec(0).name) || reader.read(&third_spec(0)).is_err() {
            let parts = tensors.iter().map(|tensor| tensor.read(reader)).collect::<Result<Vec<_>>>()?;
            return Ok(parts.into_iter().flatten().collect());
        }
        let whole = (0..3).map(|n| Ok(reader.read(&third_spec(n))?.into())).collect::<Result<Parameter>>()?;
        if reader.shard == HeadShard::WHOLE {
            return Ok(whole);
        }
        let whole = Parameter::from(whole.tensor()?);
        let of_rank = |rows: &Range<usize>, heads: Heads| {
            let own = reader.own_range(heads, rows.len());
            whole.clone().narrow(rows.start + own.start..rows.start + own.end)
        };
        let ConvChannels { q, k, v } = &channels;
        [of_rank(q, Heads::Key), of_rank(k, Heads::Key), of_rank(v, Heads::Query)].into_iter().collect()
    }
}

/// Returns the tensor of a checkpoint that has the rows of some projections, one after the other in each of some
/// groups. `width` are the other dimensions of the tensor.
fn fused_tensor(name: &str, groups: usize, parts: &[FusedRows], width: &[usize], init: Init) -> FusedTensor {
    let rows = parts.iter().map(|part| part.count).sum();
    FusedTensor {
        spec: ParameterSpec::new(format!("{name}.weight"), [&[rows], width].concat(), init),
        dims: StoredDims::OutIn,
        groups,
        parts: parts.to_vec(),
        query_heads: QueryHeadOrder::Grouped,
    }
}
