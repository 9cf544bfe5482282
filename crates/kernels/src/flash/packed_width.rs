//! The sizes of packed matrices.

use crate::cpu::Layout;

/// A width, D or D_v, in packed matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedWidth {
    /// The number of 32-bit words of a row, where the width is the depth of a product, padded to whole steps of depth.
    pub words: usize,
    /// `words`, padded to a multiple of the lanes: matrices are transposed in squares of lanes by lanes.
    pub word_squares: usize,
    /// The number of elements of a row, where the width is the rows of a product, padded to whole groups.
    pub rows: usize,
    /// `rows`, padded to a multiple of the lanes.
    pub row_squares: usize,
}

impl PackedWidth {
    /// Computes the sizes of a width for the layout of a kernel.
    pub fn new(layout: Layout, width: usize) -> Self {
        let words = width.div_ceil(layout.elements).next_multiple_of(layout.depth);
        let rows = width.next_multiple_of(layout.rows);
        Self {
            words,
            word_squares: words.next_multiple_of(layout.lanes),
            rows,
            row_squares: rows.next_multiple_of(layout.lanes),
        }
    }

    /// Returns the number of words that [`pack_columns`](super::pack::pack_columns) writes for a block of rows of this
    /// width.
    pub fn column_words(&self, layout: Layout) -> usize {
        match layout.elements {
            1 => self.rows / layout.rows * column_group(layout),
            elements => layout.block / elements * self.row_squares,
        }
    }

    /// Returns the number of words of staging memory that packing rows of this width takes.
    pub fn staging_words(&self, layout: Layout) -> usize {
        let pairs = if layout.elements == 2 { layout.block / 2 * self.row_squares } else { 0 };
        pairs.max(layout.lanes * self.word_squares.max(self.rows))
    }
}

/// Returns the number of words from one group of packed columns to the next: a cache line more than a block of keys
/// has, since groups a power of two apart would share a set of the first cache, where each row is written to all of
/// them.
pub(super) const fn column_group(layout: Layout) -> usize {
    layout.rows * layout.block + 16
}
