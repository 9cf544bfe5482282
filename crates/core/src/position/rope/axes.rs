//! Rotary positions on several axes: time, height and width in images and videos.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Deserializer, Serialize};

use super::OP;
use crate::position::END;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{Dim, Expect, check_memory, variant};

/// The assignment of pairs of entries to axes, and the frequencies of the pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RopeAxisLayout {
    /// The first section of pairs belongs to the first axis, and so on (`mrope_section` of Qwen2-VL, GLM-4V). All pairs
    /// share one series of frequencies, so that a token of text, with the same position on all axes, is rotated as
    /// without axes.
    Sections,
    /// Pair i belongs to axis i mod A until an axis has all of its pairs, and remaining pairs belong to the first axis
    /// (`mrope_interleaved` of Qwen3-VL). All pairs share one series of frequencies.
    Interleaved,
    /// The first section of pairs belongs to the first axis, and so on. The n pairs of an axis have the frequencies
    /// `base^(-i/n)` (the images of Qwen2-VL, DINOv3).
    Axial,
    /// The first section of pairs belongs to the first axis, and so on. The frequencies of one series for all pairs are
    /// assigned to the axes in turns (Pixtral).
    AxialInterleaved,
    /// Pair i belongs to axis i mod A. The n pairs of an axis have the frequencies `base^(-i/n)` (the images of Kimi
    /// K2.5). All axes have the same number of pairs.
    AxialTurns,
    /// Each axis has a part of the head, with pairs inside of the part: in the style
    /// [`RotateHalf`](crate::RopeStyle::RotateHalf) the two entries of a pair are half of the part apart. The n pairs of
    /// an axis have the frequencies `base^(-i/n)` (the images of Gemma 4). All axes have the same number of pairs.
    AxialParts,
}

/// Several axes on which tokens have positions: time, height and width of M-RoPE, rows and columns of an image. The
/// position on an axis rotates some of a head's pairs.
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
    #[serde(deserialize_with = "axis_layout")]
    layout: RopeAxisLayout,
}

/// Reads the option `layout`.
fn axis_layout<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<RopeAxisLayout, D::Error> {
    variant(value, "layout")
}

impl RopeAxes {
    /// Returns axes with these numbers of pairs (`mrope_section`), whose sum is half of
    /// [`RopeConfig::rotary_dim`](crate::RopeConfig::rotary_dim).
    pub fn new(sections: Vec<usize>, layout: RopeAxisLayout) -> Self {
        Self { sections, layout }
    }

    /// Returns the number of pairs of each axis.
    pub fn sections(&self) -> &[usize] {
        &self.sections
    }

    /// Returns the assignment of pairs to axes.
    pub fn layout(&self) -> RopeAxisLayout {
        self.layout
    }

    /// Returns whether a token needs a position on each axis, since its angles follow from no single position.
    pub(crate) fn is_axial(&self) -> bool {
        match self.layout {
            RopeAxisLayout::Sections | RopeAxisLayout::Interleaved => false,
            RopeAxisLayout::Axial
            | RopeAxisLayout::AxialInterleaved
            | RopeAxisLayout::AxialTurns
            | RopeAxisLayout::AxialParts => true,
        }
    }

    /// Checks the numbers of pairs, whose sum is `pairs`.
    pub(super) fn validate(&self, pairs: usize, is_scaled: bool) -> Result<()> {
        let Self { sections, layout } = self;
        let count = sections.len();
        let sum = sections.iter().fold(0usize, |sum, &section| sum.saturating_add(section));
        if count < 2 || sections.contains(&0) || sum != pairs {
            bail!("[{OP}] axes have {sections:?} pairs, expected two or more numbers whose sum is {pairs}")
        }
        // The last pair of each axis, if the axes take turns.
        let reaches = |(axis, section): (usize, &usize)| count * (section - 1) + axis < pairs;
        let fits = match layout {
            RopeAxisLayout::Interleaved => sections.iter().enumerate().skip(1).all(reaches),
            RopeAxisLayout::AxialInterleaved => sections.iter().enumerate().all(reaches),
            RopeAxisLayout::AxialTurns | RopeAxisLayout::AxialParts => {
                sections.iter().all(|&section| section == sections[0])
            }
            RopeAxisLayout::Sections | RopeAxisLayout::Axial => true,
        };
        if !fits {
            bail!("[{OP}] axes have {sections:?} pairs, which cannot take turns in {pairs}")
        }
        if is_scaled && self.is_axial() {
            bail!("[{OP}] axes have series of their own, for which no scaling is defined")
        }
        Ok(())
    }

    /// Returns positions (A, T) or (A, B, T), which need not be whole numbers, axis by axis and row by row.
    pub(crate) fn positions(&self, positions: &Tensor, b: usize, t: usize) -> Result<Vec<f32>> {
        let a = Dim::Named("A", self.sections.len());
        let b = Dim::Named("B", b);
        let t = Dim::Named("T", t);
        Expect::many(OP, "axis positions", positions).shape_of(&[&[a, t], &[a, b, t]])?;
        let bytes = [positions.dims(), &[size_of::<f32>()]].concat();
        check_memory(OP, format_args!("axis positions of shape {:?}", positions.dims()), &bytes)?;
        let entries = to_vec::<f32>(positions)?;
        if let Some(other) = entries.iter().find(|entry| entry.is_nan() || entry.abs() >= END as f32) {
            bail!("[{OP}] axis positions hold {other}, expected numbers between ±{END}")
        }
        Ok(entries)
    }
}
