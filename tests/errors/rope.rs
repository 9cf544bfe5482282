//! Inputs and positions that rotary embeddings cannot take.

use candle_attention::{
    AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling,
    RotaryEmbedding, alibi_slopes,
};
use candle_core::{DType, Result, Shape, Tensor, Var};

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

/// Tables for heads of 4 whose first `r` entries are rotated.
fn tables(r: usize, cos: &Tensor, sin: &Tensor) -> Result<RotaryEmbedding> {
    RotaryEmbedding::from_tables(&RopeConfig::new(10_000.0).with_rotary_dim(r), 4, cos, sin)
}

fn table(shape: impl Into<Shape>) -> Result<()> {
    let table = zeros(shape);
    tables(4, &table, &table).map(drop)
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
    "a table without positions" => table(2),
    "a table with a column for each entry" => table((8, 4)),
    "a table of more pairs than are rotated" => tables(2, &zeros((8, 2)), &zeros((8, 2))),
    "cosines and sines of other positions" => tables(4, &zeros((8, 2)), &zeros((7, 2))),
    "sines without positions" => tables(4, &zeros((8, 2)), &zeros(())),
    "integers as sines" => tables(4, &zeros((8, 2)), &of(DType::I64, (8, 2))),
    "a trained table" => tables(4, &zeros((8, 2)), Var::zeros((8, 2), DType::F32, &CPU)?.as_tensor()),
    "a table beyond memory" => {
        let table = zeros((1, 2)).broadcast_as((1 << 50, 2))?;
        tables(4, &table, &table)
    },
    "tables of an odd number of entries" => tables(3, &zeros((8, 2)), &zeros((8, 2))),
    "tables of one axis for several" => {
        RotaryEmbedding::from_tables(&axes(&[1, 1], RopeAxisLayout::Axial), 4, &zeros((8, 2)), &zeros((8, 2)))
    },
    "a position past the tables" => tables(4, &zeros((8, 2)), &zeros((8, 2)))?.apply_from(&zeros((2, 1, 3, 4)), 6),
    "a position in tables of none" => tables(4, &zeros((0, 2)), &zeros((0, 2)))?.apply_from(&zeros((2, 1, 3, 4)), 0),
    "a layer's position past the tables" => {
        let layer = layer(RopeConfig::new(10_000.0))?;
        let table = zeros((2, 4));
        let rotary = RotaryEmbedding::from_tables(&RopeConfig::new(10_000.0), 8, &table, &table)?;
        layer.with_rotary(rotary)?.forward(&zeros((1, 3, 8)))
    },
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
