//! How checkpoints name and pack the parameters of a gated delta net.

use std::fmt;
use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use super::GatedDeltaNetConfig;
use candle_attention_modules::base::{Heads, LINEAR_WEIGHT, Rows, Source, Spec, has};
use candle_attention_modules::linear::{Piece, ProjectionRows};

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
    /// For a config that the layout has no names for.
    pub(super) fn projections(self, cfg: &GatedDeltaNetConfig) -> std::result::Result<Vec<Packed>, String> {
        let ranks = [cfg.gate_rank(), cfg.decay_rank()];
        if self != Self::Separate && ranks.iter().any(Option::is_some) {
            return Err(format!(
                "the config has a gate_rank or decay_rank {ranks:?}, for which the layout has no place"
            ));
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
    pub(super) fn read_convolutions(self, cfg: &GatedDeltaNetConfig, source: &Source) -> Result<ProjectionRows> {
        let ([q, k, v, ..], taps) = (cfg.rows(), cfg.conv_kernel());
        // `nn.Conv1d`'s.
        let bound = (taps as f64).sqrt().recip();
        let spec =
            |name, rows| Spec::new(format!("{name}.weight"), [rows, 1, taps], Init::Uniform { lo: -bound, up: bound });
        let (convolutions, third) = (self.convolutions(), v.end.div_ceil(3));
        // transformers 5 saves three convolutions as thirds of all rows, whatever their widths.
        let first = spec(convolutions[0].name, third);
        let are_thirds = convolutions.len() == 3 && source.has(&first.name) && source.read(&first).is_ok();
        let mut whole = ProjectionRows::default();
        for (n, Packed { name, parts, .. }) in convolutions.into_iter().enumerate() {
            source.refuse(&format!("{name}.bias"), "the layer has no biases")?;
            let usual = parts.map(|part| cfg.rows()[part].len()).sum();
            let rows = if are_thirds { third.min(v.end.saturating_sub(n * third)) } else { usual };
            whole.push(Piece::whole(source.read(&spec(name, rows))?), false);
        }
        if !source.is_sharded() {
            return Ok(whole);
        }
        let (whole, mut own) = (ProjectionRows::to_linear(&[&whole])?, ProjectionRows::default());
        for (part, rows) in [q, k, v].into_iter().enumerate() {
            let rows = Piece::new(whole.weight().clone(), Rows { groups: 1, range: rows });
            own.push(rows.narrow(own_rows(part, cfg, source))?, false);
        }
        Ok(own)
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
            source.refuse(&format!("{name}.bias"), "the layer has no biases")?;
            let (start, end) = (rows[parts.start].start, rows[parts.end - 1].end);
            let spec = Spec::new(format!("{name}.weight"), [end - start, cfg.embed_dim()], LINEAR_WEIGHT);
            let reads_parts = source.is_sharded() && *groups == 1;
            let whole = if reads_parts { None } else { Some(source.read(&spec)?) };
            for part in parts.clone() {
                let (own, at) = (own_rows(part, cfg, source), rows[part].start - start);
                let piece = match &whole {
                    Some(whole) => {
                        let range = at / groups..(at + rows[part].len()) / groups;
                        Piece::new(whole.clone(), Rows { groups: *groups, range }).narrow(own)?
                    }
                    None => Piece::whole(source.read_part(&spec, 0, at + own.start..at + own.end)?),
                };
                read.push(ProjectionRows::of(piece));
            }
        }
        Ok(read)
    }

    /// The inverse: the tensor, of the rows of all parts.
    pub fn of(&self, all: &[Tensor]) -> Result<(String, Tensor)> {
        let grouped = |rows: &Tensor| {
            let dims = rows.dims();
            rows.reshape([&[self.groups, dims[0] / self.groups], &dims[1..]].concat())
        };
        let parts = all[self.parts.clone()].iter().map(grouped).collect::<Result<Vec<_>>>()?;
        Ok((format!("{}.weight", self.name), Tensor::cat(&parts, 1)?.flatten(0, 1)?.contiguous()?))
    }
}

/// This process's rows of a part; all of what inputs are compressed to.
fn own_rows(part: usize, cfg: &GatedDeltaNetConfig, source: &Source) -> Range<usize> {
    let (rows, heads) = (cfg.rows()[part].len(), if part < 2 { Heads::Key } else { Heads::Query });
    let is_compressed = [None, None, None, cfg.gate_rank(), None, cfg.decay_rank()][part].is_some();
    if is_compressed { 0..rows } else { source.own_range(heads, rows) }
}
