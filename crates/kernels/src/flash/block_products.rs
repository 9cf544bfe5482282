//! The products of a packed block with a tile, over the parts of both that attend to each other.

use super::tile::{Overlap, TilePart};
use crate::cpu::{Kernel, LeftOperand, MAX_COLUMNS, NextBytes, PanelProduct, RightOperand, Vector, multiply_words};

/// Computes the product of a block's keys with a tile's queries, (depth, panel), over a part of both; or of its values
/// with the gradients of outputs.
///
/// # Safety
/// The processor has the instruction set of K, whose tiles are configured; the operands are a block and a panel of the
/// depth; the part begins at a whole group of keys.
pub(super) unsafe fn multiply_keys<K: Kernel>(
    overlap: &Overlap,
    part: &TilePart,
    rows: LeftOperand,
    depth: usize,
    columns: *const f32,
    to: *mut f32,
) {
    let column = part.vectors.start * K::Vector::LANES;
    // SAFETY: as this function's contract; a block has `BLOCK` rows, which is a multiple of `ROWS`.
    unsafe {
        multiply_words::<K>(&PanelProduct {
            a: rows.offset((part.keys.start - overlap.block_start) * rows.row),
            b: RightOperand::words(columns.add(column), K::PANEL),
            c: to.add((part.keys.start - overlap.keys.start) * K::PANEL + column),
            rows: part.keys.len().next_multiple_of(K::ROWS),
            depth,
            vectors: part.vectors.len(),
            factors: None,
            next: NextBytes::NONE,
        });
    }
}

/// Adds the product of a block's transposed values, of `rows` rows, with a tile's weights over a part of both; or of
/// its keys with the gradients of scores. The product is summed from zero and added to the previous sums times the
/// factors.
///
/// # Safety
/// The processor has the instruction set of K, whose tiles are configured; the operands are a block with these rows and
/// the weights of a panel; the part begins at a whole step of depth.
pub(super) unsafe fn add_values<K: Kernel>(
    overlap: &Overlap,
    part: &TilePart,
    values: LeftOperand,
    rows: usize,
    weights: *const f32,
    factors: &[f32; MAX_COLUMNS],
    to: *mut f32,
) {
    let column = part.vectors.start * K::Vector::LANES;
    let first_row = (part.keys.start - overlap.keys.start) / K::ELEMENTS;
    // SAFETY: as this function's contract.
    unsafe {
        multiply_words::<K>(&PanelProduct {
            a: values.offset((part.keys.start - overlap.block_start) / K::ELEMENTS * values.step),
            b: RightOperand::words(weights.add(first_row * K::PANEL + column), K::PANEL),
            c: to.add(column),
            rows,
            depth: part.keys.len().div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH),
            vectors: part.vectors.len(),
            factors: Some(factors.as_ptr().add(column)),
            next: NextBytes::NONE,
        });
    }
}
