//! Rotary positions on several axes: time, height and width of what images and videos show.

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::position::END;

/// Which axis turns a pair, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RopeAxisLayout {
    /// Axis after axis, in the one series of frequencies of all pairs: Qwen2-VL, GLM-4V. Tokens of text, which have one
    /// position on all axes, are rotated as without axes.
    Sections,
    /// Axes take turns in that series, and the first has what is left: Qwen3-VL.
    Interleaved,
    /// Axis after axis, each with a series of its own, `base^(-i/n)` for its n pairs: the images of Qwen2-VL, DINOv3.
    Axial,
    /// Axis after axis; the one series of all pairs is dealt out to them in turns: Pixtral.
    AxialDealt,
}

/// Positions on several axes, each of which turns some of a head's pairs.
///
/// ```
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeAxes, RopeAxisLayout, RopeConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// // Heads of 16 have 8 pairs: 4 for rows of an image, 4 for columns.
/// let axes = RopeAxes::new(vec![4, 4], RopeAxisLayout::Axial);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_rope(RopeConfig::new(10_000.0).with_axes(axes));
/// let layer = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// // A token of the whole image, which is not rotated, and 2 x 3 patches.
/// let positions = Tensor::new(&[[0u32, 0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 0, 1, 2]], &Device::Cpu)?;
/// let xs = Tensor::zeros((1, 7, 64), DType::F32, &Device::Cpu)?;
/// let ys = layer.forward_with(AttentionInput::new(&xs).with_axis_positions(&positions))?;
/// # assert_eq!(ys.dims(), [1, 7, 64]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeAxes {
    sections: Vec<usize>,
    layout: RopeAxisLayout,
}

impl RopeAxes {
    /// `sections` has the number of pairs of each axis (`mrope_section`), which are the r/2 of
    /// [`RopeConfig::rotary_dim`](crate::RopeConfig::rotary_dim) together.
    pub fn new(sections: Vec<usize>, layout: RopeAxisLayout) -> Self {
        Self { sections, layout }
    }

    /// The number of pairs of each axis.
    pub fn sections(&self) -> &[usize] {
        &self.sections
    }

    /// Which axis turns a pair.
    pub fn layout(&self) -> RopeAxisLayout {
        self.layout
    }

    /// Whether a token has no angles but by its position on each axis.
    pub(crate) fn is_axial(&self) -> bool {
        matches!(self.layout, RopeAxisLayout::Axial | RopeAxisLayout::AxialDealt)
    }

    pub(super) fn validate(&self, pairs: usize, is_scaled: bool) -> Result<()> {
        let Self { sections, layout } = self;
        let count = sections.len();
        let sum = sections.iter().fold(0usize, |sum, &section| sum.saturating_add(section));
        if count < 2 || sections.contains(&0) || sum != pairs {
            bail!("[rope] axes have {sections:?} pairs, expected two or more numbers whose sum is {pairs}")
        }
        // The last pair of each axis, where they take turns.
        let reaches = |(axis, section): (usize, &usize)| count * (section - 1) + axis < pairs;
        let fits = match layout {
            RopeAxisLayout::Interleaved => sections.iter().enumerate().skip(1).all(reaches),
            RopeAxisLayout::AxialDealt => sections.iter().enumerate().all(reaches),
            RopeAxisLayout::Sections | RopeAxisLayout::Axial => true,
        };
        if !fits {
            bail!("[rope] axes have {sections:?} pairs, which cannot take turns in {pairs}")
        }
        if is_scaled && self.is_axial() {
            bail!("[rope] axes have series of their own, for which no scaling is defined")
        }
        Ok(())
    }

    /// The axis of each pair.
    pub(super) fn axis_of_pairs(&self) -> Vec<usize> {
        let count = self.sections.len();
        if self.layout == RopeAxisLayout::Interleaved {
            let of = |pair: usize| if pair / count < self.sections[pair % count] { pair % count } else { 0 };
            return (0..self.sections.iter().sum()).map(of).collect();
        }
        self.sections.iter().enumerate().flat_map(|(axis, &section)| vec![axis; section]).collect()
    }
}

/// A position on each axis for each token of a call, which need not be a whole number.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AxisPositions {
    /// Axis by axis, and there row by row.
    entries: Vec<f32>,
    axes: usize,
    t: usize,
}

impl AxisPositions {
    /// From a tensor (A, T) or (A, B, T).
    pub(crate) fn from_tensor(positions: &Tensor, axes: usize, b: usize, t: usize) -> Result<Self> {
        if positions.dims() != [axes, t] && positions.dims() != [axes, b, t] {
            bail!(
                "[rope] axis positions have shape {:?}, expected (A, T) = [{axes}, {t}] or (A, B, T) = [{axes}, {b}, {t}]",
                positions.dims()
            )
        }
        // A view of nothing may begin past the end of its buffer, where Candle's copies panic.
        if positions.elem_count() == 0 {
            return Ok(Self { entries: Vec::new(), axes, t });
        }
        let entries = positions.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        if let Some(other) = entries.iter().find(|entry| entry.is_nan() || entry.abs() >= END as f32) {
            bail!("[rope] axis positions hold {other}, expected numbers between ±{END}")
        }
        Ok(Self { entries, axes, t })
    }

    /// T.
    pub(super) fn per_sequence(&self) -> usize {
        self.t
    }

    /// T for all sequences, or B · T.
    pub(super) fn rows(&self) -> usize {
        self.entries.len() / self.axes.max(1)
    }

    pub(super) fn at(&self, axis: usize, row: usize) -> f32 {
        self.entries[axis * self.rows() + row]
    }

    /// The largest position + 1, as whole numbers count.
    pub(super) fn length(&self) -> usize {
        self.entries.iter().map(|&entry| entry.max(0.0) as usize + 1).max().unwrap_or(0)
    }
}
