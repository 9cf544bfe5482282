//! The gradient of a tensor that tiles add to.

use std::ops::Range;

use crate::cpu::{MAX_LANES, SharedPtr, Vector};
use crate::flash::tile::Tile;
use crate::number::{load_first, store_first};
use candle_attention_call::{AttentionDims, LayoutStrides, QueryRow};

/// A tensor for a gradient, in f32, of rank 4. Each of the first three dimensions is that of (B, H, T_q), or 1.
/// The last dimension is T_kv (or 1) for a bias, the number of entries for a relative bias, and D for queries.
#[derive(Clone, Copy)]
pub(super) struct GradientOutput {
    pub at: SharedPtr<f32>,
    pub strides: [usize; 4],
    /// Whether queries share entries, which are then summed by the task before they are added to the tensor.
    pub is_summed_over_queries: bool,
}

impl GradientOutput {
    /// Describes a contiguous tensor of this shape.
    pub fn new(at: SharedPtr<f32>, shape: [usize; 4]) -> Self {
        let mut strides = [0; 4];
        let mut stride = 1;
        for n in (0..4).rev() {
            strides[n] = if shape[n] == 1 { 0 } else { stride };
            // The stride of an empty tensor may overflow, and is not used.
            stride = usize::wrapping_mul(stride, shape[n]);
        }
        Self { at, strides, is_summed_over_queries: shape[2] == 1 }
    }

    /// Describes the gradient of the queries.
    pub fn of_rows(at: SharedPtr<f32>, strides: LayoutStrides) -> Self {
        Self { at, strides: [strides.sequence, strides.head, strides.position, 1], is_summed_over_queries: false }
    }

    /// Returns whether key heads or sequences share entries.
    pub fn is_shared(&self, dims: &AttentionDims) -> bool {
        (self.strides[0] == 0 && dims.b > 1) || (self.strides[1] == 0 && dims.h_kv > 1)
    }

    /// Returns the last tile that shares entries with a tile: where heads share them, rows of the same query may be in
    /// several tiles.
    pub fn last_sharing(&self, dims: &AttentionDims, tile: &Tile) -> usize {
        let end = tile.rows.end;
        let end = if self.strides[1] == 0 { end.next_multiple_of(dims.group()) } else { end };
        (end - 1) / tile.panel
    }

    /// Returns a pointer to an entry of a row. `last` is its index in the last dimension: a key, an entry of a relative
    /// bias, or an entry of a query.
    #[inline(always)]
    pub fn entry(&self, row: QueryRow, last: usize) -> *mut f32 {
        let [b, h, query, entry] = self.strides;
        self.at.0.wrapping_add(row.b * b + row.head * h + row.query * query + last * entry)
    }

    /// Adds the gradients of a tile (keys, panel) to the entries of some keys.
    ///
    /// # Safety
    /// The processor has the instruction set of V; `gradients` has a row for each key; the tensor has the entries of
    /// the tile's rows, which no other thread uses.
    #[inline(always)]
    pub unsafe fn add<V: Vector>(&self, dims: &AttentionDims, tile: &Tile, keys: Range<usize>, gradients: *const f32) {
        let lanes = V::LANES;
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..tile.vectors {
            let first_row = tile.rows.start + vector * lanes;
            let rows = first_row..tile.rows.end.min(first_row + lanes);
            let mut entries = [std::ptr::null_mut(); MAX_LANES];
            for (entry, row) in entries.iter_mut().zip(rows.clone()) {
                *entry = self.entry(dims.row(tile.kv, row), keys.start);
            }
            for key in (0..keys.len()).step_by(lanes) {
                let filled = lanes.min(keys.len() - key);
                // SAFETY: as this method's contract; panels have a multiple of `lanes` rows.
                unsafe {
                    let from = gradients.add(key * tile.panel + vector * lanes);
                    V::transpose(from, tile.panel, square.as_mut_ptr(), lanes);
                    for (entry, row_gradients) in entries[..rows.len()].iter().zip(square.chunks_exact(lanes)) {
                        let to: *mut f32 = entry.wrapping_add(key * self.strides[3]);
                        if self.strides[3] == 0 {
                            *to += row_gradients[..filled].iter().sum::<f32>();
                        } else {
                            let sum: V = load_first::<f32, _>(to, filled);
                            store_first(sum.add(V::load(row_gradients.as_ptr())), to, filled);
                        }
                    }
                }
            }
        }
    }
}
