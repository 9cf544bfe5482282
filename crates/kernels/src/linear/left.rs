//! The left operand of a product on its way into words.

use std::ops::Range;

use super::Matrix;
use crate::cpu::{Kernel, LeftOperand, MAX_LANES, Vector};
use crate::number::{Dtype, Number, pack_row_pair, widen_row};

/// The words of depth of a block: with 48 columns 37 KB of the right operand, which the second cache holds beside the
/// rest. The sums are read and written once a block. Rounding errors grow with the sum that is being added to, so that
/// shorter blocks err less: sums of f32 err as MKL's do, where blocks of 256 words would by 1.15 times as much.
pub const BLOCK: usize = 192;
/// The words from one copied row to the next: rows a power of two apart would share the same sets of the first cache.
pub const BLOCK_ROW: usize = BLOCK + 16;

/// The most rows of a task: 160 KB of copied words.
pub const MAX_ROWS: usize = 192;

/// A matrix (rows, depth), behind `lead` columns of zeros that are nowhere in memory.
#[derive(Clone, Copy)]
pub struct Left<'a, X> {
    pub matrix: Matrix<'a, X>,
    pub lead: usize,
}

impl<X: Number> Left<'_, X> {
    /// The elements of depth.
    pub fn depth(&self) -> usize {
        self.lead + self.matrix.columns
    }

    /// The order in which [`copy`](Self::copy) leaves a block that begins at `at`.
    pub fn operand<K: Kernel>(&self, at: *const f32) -> LeftOperand {
        let (row, step) = if self.matrix.is_transposed && !K::IS_BF16 { (1, K::ROWS) } else { (BLOCK_ROW, 1) };
        LeftOperand { at, group: K::ROWS * BLOCK_ROW, row, step }
    }

    /// Copies some rows' elements from `first` on to (rows, [`BLOCK_ROW`]) words, with zeros beyond the last element
    /// and below the last row.
    ///
    /// # Safety
    /// The processor has the tier of K; the rows belong to the matrix, the block begins within its padded depth, and
    /// `to` is valid for the rows as a multiple of `K::MIN_ROWS`, or of `K::ROWS` where columns are contiguous.
    #[inline(always)]
    pub unsafe fn copy<K: Kernel>(&self, rows: &Range<usize>, first: usize, steps: usize, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            if !self.matrix.is_transposed {
                self.copy_rows::<K>(rows, first, steps, to);
                let (filled, padded) = (rows.len(), rows.len().next_multiple_of(K::MIN_ROWS));
                to.add(filled * BLOCK_ROW).write_bytes(0, (padded - filled) * BLOCK_ROW);
            } else if K::IS_BF16 {
                self.copy_column_pairs::<K>(rows, first, steps, to);
            } else {
                self.copy_columns::<K>(rows, first, steps, to);
            }
        }
    }

    /// # Safety
    /// As [`copy`](Self::copy).
    #[inline(always)]
    unsafe fn copy_rows<K: Kernel>(&self, rows: &Range<usize>, first: usize, steps: usize, to: *mut f32) {
        let (Matrix { data, stride, columns, .. }, count) = (self.matrix, steps * K::ELEMENTS);
        let lead = self.lead.saturating_sub(first).min(count);
        let start = first.saturating_sub(self.lead).min(columns);
        let width = (count - lead).min(columns - start);
        // SAFETY: as this method's contract; words of two elements are pairs of X.
        unsafe {
            for row in rows.clone() {
                let (from, to) = (data.as_ptr().add(row * stride + start), to.add((row - rows.start) * BLOCK_ROW));
                if const { !K::IS_BF16 } {
                    to.write_bytes(0, lead);
                    widen_row::<X, K::Vector>(from, width, to.add(lead), count - lead, 1.0);
                    continue;
                }
                let to: *mut X = to.cast();
                to.write_bytes(0, lead);
                std::ptr::copy_nonoverlapping(from, to.add(lead), width);
                to.add(lead + width).write_bytes(0, count - lead - width);
            }
        }
    }

    /// Words whose rows are contiguous in memory, in groups of `K::ROWS` rows.
    ///
    /// # Safety
    /// As [`copy`](Self::copy).
    #[inline(always)]
    unsafe fn copy_columns<K: Kernel>(&self, rows: &Range<usize>, first: usize, steps: usize, to: *mut f32) {
        let (Matrix { data, stride, columns, .. }, lead) = (self.matrix, self.lead);
        let padded = rows.len().next_multiple_of(K::ROWS);
        let mut wide = [0f32; MAX_ROWS];
        let wide = wide.as_mut_ptr();
        // SAFETY: as this method's contract; a task has at most `MAX_ROWS` rows.
        unsafe {
            for step in 0..steps {
                let mut words = wide.cast_const();
                if (lead..lead + columns).contains(&(first + step)) {
                    let from = data.as_ptr().add((first + step - lead) * stride + rows.start);
                    if const { matches!(X::DTYPE, Dtype::F32) } && padded == rows.len() {
                        words = from.cast();
                    } else {
                        widen_row::<X, K::Vector>(from, rows.len(), wide, padded, 1.0);
                    }
                } else {
                    wide.write_bytes(0, padded);
                }
                for group in 0..padded / K::ROWS {
                    let to = to.add(group * K::ROWS * BLOCK_ROW + step * K::ROWS);
                    std::ptr::copy_nonoverlapping(words.add(group * K::ROWS), to, K::ROWS);
                }
            }
        }
    }

    /// Pairs of bf16 of neighbouring columns whose rows are contiguous in memory, transposed to rows.
    ///
    /// # Safety
    /// As [`copy`](Self::copy); X has 16 bits.
    #[inline(always)]
    unsafe fn copy_column_pairs<K: Kernel>(&self, rows: &Range<usize>, first: usize, steps: usize, to: *mut f32) {
        let (Matrix { data, stride, columns, .. }, lead, lanes) = (self.matrix, self.lead, K::Vector::LANES);
        let (mut pairs, mut words) = ([0f32; MAX_LANES * MAX_LANES], [0f32; MAX_LANES * MAX_LANES]);
        // SAFETY: as this method's contract; the squares hold LANES by LANES words.
        unsafe {
            for row in (0..rows.len()).step_by(lanes) {
                let filled = lanes.min(rows.len() - row);
                for step in (0..steps).step_by(lanes) {
                    for at in 0..lanes {
                        let column = |half: usize| {
                            let column = (first + 2 * (step + at) + half).checked_sub(lead)?;
                            (column < columns).then(|| data.as_ptr().add(column * stride + rows.start + row))
                        };
                        pack_row_pair(column(0), column(1), filled, pairs.as_mut_ptr().add(at * lanes), lanes);
                    }
                    K::Vector::transpose(pairs.as_ptr(), lanes, words.as_mut_ptr(), lanes);
                    let kept = filled.next_multiple_of(K::MIN_ROWS);
                    for (index, words) in words.chunks_exact(lanes).take(kept).enumerate() {
                        K::Vector::load(words.as_ptr()).store(to.add((row + index) * BLOCK_ROW + step));
                    }
                }
            }
        }
    }
}
