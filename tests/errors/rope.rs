//! Inputs and positions that rotary embeddings cannot take.

use candle_attention::{
    AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling,
    RotaryEmbedding, alibi_slopes,
};
use candle_core::{DType, Result, Shape, Tensor};

use candle_nn::VarBuilder;

use crate::{CPU, Case, of, zeros};

fn rotary() -> Result<RotaryEmbedding> {
    RotaryEmbedding::new(&RopeConfig::new(10_000.0), 4)
}

fn rotate(xs: &Tensor) -> Result<()> {
    rotary()?.apply_from(xs, 0).map(drop)
}

/// Two sequences of three tokens at these positions.
fn at(positions: &Tensor) -> Result<()> {
    rotary()?.apply(&zeros((2, 1, 3, 4)), positions).map(drop)
}

fn at_zeros(shape: impl Into<Shape>) -> Result<()> {
    at(&of(DType::I64, shape))
}

fn axes(sections: &[usize], layout: RopeAxisLayout) -> RopeConfig {
    RopeConfig::new(10_000.0).with_axes(RopeAxes::new(sections.to_vec(), layout))
}

fn layer(rope: RopeConfig) -> Result<MultiHeadAttention> {
    let cfg = MultiHeadAttentionConfig::new(8, 1).with_rope(rope);
    MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))
}

/// Two sequences of three patches at these positions.
fn on_axes(positions: &Tensor) -> Result<()> {
    let xs = zeros((2, 3, 8));
    layer(axes(&[2, 2], RopeAxisLayout::Axial))?
        .forward_with(AttentionInput::new(&xs).with_axis_positions(positions))
        .map(drop)
}

pub const CASES: &[Case] = cases! {
    "one axis" => axes(&[4], RopeAxisLayout::Sections).validate(8),
    "an axis of no pairs" => axes(&[4, 0], RopeAxisLayout::Sections).validate(8),
    "axes of other heads" => axes(&[2, 1, 2], RopeAxisLayout::Interleaved).validate(8),
    "axes beyond counting" => axes(&[usize::MAX, 5], RopeAxisLayout::Axial).validate(8),
    "axes that cannot take turns" => axes(&[1, 3], RopeAxisLayout::Interleaved).validate(8),
    "axes to which one series cannot be dealt" => axes(&[3, 1], RopeAxisLayout::AxialDealt).validate(8),
    "scaled series of axes" => {
        axes(&[2, 2], RopeAxisLayout::Axial).with_scaling(RopeScaling::Linear { factor: 2.0 }).validate(8)
    },
    "patches without positions" => layer(axes(&[2, 2], RopeAxisLayout::Axial))?.forward(&zeros((2, 3, 8))),
    "positions on other axes" => on_axes(&zeros((3, 3))),
    "axis positions of another batch" => on_axes(&zeros((2, 1, 3))),
    "an axis position that is no number" => on_axes(&(zeros((2, 3)) + f64::NAN)?),
    "an axis position that f32 cannot tell from the next" => on_axes(&(zeros((2, 3)) - 2e7)?),
    "axis positions without axes" => {
        let (xs, at) = (zeros((2, 3, 8)), zeros((2, 3)));
        layer(RopeConfig::new(10_000.0))?.forward_with(AttentionInput::new(&xs).with_axis_positions(&at))
    },
    "axis positions of cross-attention" => {
        let (xs, at) = (zeros((2, 3, 8)), zeros((2, 3)));
        let input = AttentionInput::new(&xs).with_key_value(&xs, &xs).with_axis_positions(&at);
        layer(axes(&[2, 2], RopeAxisLayout::Sections))?.forward_with(input)
    },
    "a memory of patches" => {
        let keys = zeros((2, 3, 8));
        layer(axes(&[2, 2], RopeAxisLayout::Axial))?.project_memory(&keys, &keys)
    },
    "tables without axes" => rotary()?.apply_on_axes(&zeros((2, 1, 3, 4)), &zeros((2, 3))),
    "inputs without heads" => rotate(&zeros((2, 3, 4))),
    "wider heads" => rotate(&zeros((2, 1, 3, 6))),
    "integers" => rotate(&of(DType::U32, (2, 1, 3, 4))),
    "positions of another length" => at_zeros(4),
    "positions of another batch" => at_zeros((1, 3)),
    "positions that are no integers" => at(&zeros(3)),
    "a negative position" => at(&Tensor::new(&[0i64, -1, 2], &CPU)?),
    "a position that f32 cannot tell from the next" => at(&Tensor::new(&[0i64, 1, 1 << 24], &CPU)?),
    "inputs too large to address" => rotate(&zeros((1, 1, 1, 4)).broadcast_as((1 << 61, 1, 1, 4))?),
    "slopes of too many heads" => alibi_slopes(usize::MAX),
    "positions beyond counting" => rotary()?.apply_from(&zeros((2, 1, 3, 4)), usize::MAX),
};
