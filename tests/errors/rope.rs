//! Inputs and positions that rotary embeddings cannot take.

use candle_attention::{RopeConfig, RotaryEmbedding, alibi_slopes};
use candle_core::{DType, Result, Shape, Tensor};

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

pub const CASES: &[Case] = cases! {
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
