//! How checkpoints name and pack the parameters of a gated delta net.

use std::fmt;
use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};
use serde::{Deserialize, Serialize};

use super::GatedDeltaNetConfig;
use crate::base::{Heads, Rows, Source, Spec, has};
use crate::linear::{Piece, ProjectionRows};

/// How a checkpoint names and packs the parameters of a [`GatedDeltaNet`](crate::GatedDeltaNet). Those that it has
/// beside the ones of the table are `A_log` and `dt_bias`.
///
/// | layout | projections | convolutions | norm, output |
/// | --- | --- | --- | --- |
/// | separate | `q_proj`, `k_proj`, `v_proj`, `b_proj`; `a_proj`, `f_proj` where channels decay by themselves, or `f_a_proj`, `f_b_proj`; `g_proj`, or `g_a_proj`, `g_b_proj` | `q_conv1d`, `k_conv1d`, `v_conv1d` | `o_norm`, `o_proj` |
/// | by key head | `in_proj_qkvz`, `in_proj_ba`, key head by key head with its value heads | `conv1d` | `norm`, `out_proj` |
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

/// What a projection or a convolution gives: an index of [`GatedDeltaNetConfig::widths`].
type Place = usize;
pub(super) const GATE: Place = 3;
pub(super) const BETA: Place = 4;
pub(super) const DECAY: Place = 5;

/// A tensor of a checkpoint: some of the rows of all places, which stand one after the other, or in turn in each of
/// several groups.
pub(super) struct Packed {
    name: &'static str,
    rows: Range<usize>,
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
        let [q, k, v, of_gate, beta, of_decay] = cfg.widths();
        Ok(match self {
            Self::Separate => {
                let inputs = [("q_proj", q), ("k_proj", k), ("v_proj", v)];
                Packed::in_turn(1, inputs.into_iter().chain([(gate, of_gate), ("b_proj", beta), (decay, of_decay)]))
            }
            Self::ByKeyHead => {
                let inputs = [("in_proj_qkvz", q + k + v + of_gate), ("in_proj_ba", beta + of_decay)];
                Packed::in_turn(cfg.num_key_heads(), inputs)
            }
            Self::ByPart => {
                let inputs = [("in_proj_qkv", q + k + v), ("in_proj_z", of_gate)];
                Packed::in_turn(1, inputs.into_iter().chain([("in_proj_b", beta), ("in_proj_a", of_decay)]))
            }
        })
    }

    /// The convolutions of queries, keys and values.
    pub(super) fn convolutions(self, cfg: &GatedDeltaNetConfig) -> Vec<Packed> {
        let [q, k, v, ..] = cfg.widths();
        match self {
            Self::Separate => Packed::in_turn(1, CONVOLUTIONS.into_iter().zip([q, k, v])),
            _ => Packed::in_turn(1, [("conv1d", q + k + v)]),
        }
    }

    /// The same as the file has them: transformers 5 saves thirds of all rows, whatever they are.
    pub(super) fn stored_convolutions(self, cfg: &GatedDeltaNetConfig, source: &Source) -> Vec<Packed> {
        let ([q, k, v, ..], usual) = (cfg.widths(), self.convolutions(cfg));
        let [name, ..] = CONVOLUTIONS;
        let (rows, third) = (q + k + v, (q + k + v).div_ceil(3));
        let is_like = |rows| source.pp(name).get((rows, 1, cfg.conv_kernel()), "weight", Init::Const(0.0)).is_ok();
        if self != Self::Separate || !source.has(&format!("{name}.weight")) || is_like(q) || !is_like(third) {
            return usual;
        }
        Packed::in_turn(1, CONVOLUTIONS.into_iter().zip([third, third, rows.saturating_sub(2 * third)]))
    }
}

const CONVOLUTIONS: [&str; 3] = ["q_conv1d", "k_conv1d", "v_conv1d"];

impl Packed {
    /// Tensors of so many rows, one after the other.
    fn in_turn(groups: usize, tensors: impl IntoIterator<Item = (&'static str, usize)>) -> Vec<Self> {
        let mut end = 0;
        let tensor = |(name, rows)| {
            end += rows;
            Self { name, rows: end - rows..end, groups }
        };
        tensors.into_iter().map(tensor).collect()
    }

    /// The places of which it has rows: which of their rows, and where those stand in it.
    fn parts(&self, widths: [usize; 6]) -> impl Iterator<Item = (Place, Range<usize>, Rows)> {
        let mut end = 0;
        widths.into_iter().enumerate().filter_map(move |(place, width)| {
            let start = end;
            end += width;
            let (first, last) = (start.max(self.rows.start), end.min(self.rows.end));
            let within = |row: usize| (row - self.rows.start) / self.groups;
            (first < last).then(|| {
                (place, first - start..last - start, Rows { groups: self.groups, range: within(first)..within(last) })
            })
        })
    }

    /// The weight (rows, ..) of each name by place, or this process's rows of it: `inner` is what stands for the dots.
    pub fn read(
        all: &[Self],
        cfg: &GatedDeltaNetConfig,
        inner: &[usize],
        init: Init,
        source: &Source,
    ) -> Result<Vec<ProjectionRows>> {
        let widths = cfg.widths();
        let mut read: Vec<_> = widths.map(|_| ProjectionRows::default()).into();
        for packed in all {
            let Self { name, rows, groups } = packed;
            source.refuse(&format!("{name}.bias"), "the layer has no biases")?;
            let spec = Spec::new(format!("{name}.weight"), [&[rows.len()], inner].concat(), init);
            let whole = if source.is_sharded() && *groups == 1 { None } else { Some(source.read(&spec)?) };
            for (place, own, within) in packed.parts(widths) {
                let of_process =
                    heads_of(place, cfg).map_or(0..widths[place], |heads| source.own_range(heads, widths[place]));
                let piece = match &whole {
                    Some(whole) if source.is_sharded() => Piece::new(whole.clone(), within).narrow(of_process)?,
                    Some(whole) => Piece::new(whole.clone(), within),
                    None => {
                        let row = |row: usize| row.clamp(own.start, own.end) - own.start + within.range.start;
                        let own = row(of_process.start)..row(of_process.end);
                        if own.is_empty() {
                            continue;
                        }
                        Piece::whole(source.read_part(&spec, 0, own)?)
                    }
                };
                read[place].push(piece, false);
            }
        }
        read.retain(|rows| !rows.is_empty());
        Ok(read)
    }

    /// The inverse of [`read`](Self::read): each tensor, of the weights of all places.
    pub fn join(all: &[Self], cfg: &GatedDeltaNetConfig, weights: &[Tensor]) -> Result<Vec<(String, Tensor)>> {
        let join = |packed: &Self| {
            let part = |(place, own, within): (Place, Range<usize>, Rows)| {
                Ok((within, weights[place].narrow(0, own.start, own.len())?))
            };
            let parts = packed.parts(cfg.widths()).map(part).collect::<Result<Vec<_>>>()?;
            let parts: Vec<_> = parts.iter().map(|(rows, weight)| (rows, weight.clone())).collect();
            Ok((format!("{}.weight", packed.name), Rows::join(&parts)?.contiguous()?))
        };
        all.iter().map(join).collect()
    }
}

/// The heads that divide the rows of a place; none of what inputs are compressed to.
fn heads_of(place: Place, cfg: &GatedDeltaNetConfig) -> Option<Heads> {
    match place {
        0 | 1 => Some(Heads::Key),
        GATE if cfg.gate_rank().is_some() => None,
        DECAY if cfg.decay_rank().is_some() => None,
        _ => Some(Heads::Query),
    }
}
