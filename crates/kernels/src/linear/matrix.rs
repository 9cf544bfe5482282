//! Matrices in memory, and the copies of them that products read.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::cpu::{Format, Kernel, MAX_LANES, Vector, prefetch_bytes};
use crate::error::Error;
use crate::number::{Number, Strided, pack_row_pair, widen_row};

/// A square of `LANES` by `LANES` words.
pub type Square = [f32; MAX_LANES * MAX_LANES];

/// A matrix (rows, columns) in memory. The element of row r and column c is at `r * stride + c`, or at `c * stride + r`
/// where it is transposed.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, X> {
    /// The elements, beginning with that of row 0 and column 0.
    pub data: &'a [X],
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub columns: usize,
    /// The distance between the beginnings of neighbouring rows, or of neighbouring columns where columns are
    /// contiguous.
    pub stride: usize,
    /// Whether columns are contiguous instead of rows.
    pub is_transposed: bool,
}

impl<X> Matrix<'_, X> {
    /// Returns the transposed matrix, over the same elements.
    pub fn t(&self) -> Self {
        Self { rows: self.columns, columns: self.rows, is_transposed: !self.is_transposed, ..*self }
    }

    /// Checks that the slice has every element of the matrix.
    pub(super) fn check(&self, name: &str) -> Result<(), Error> {
        let lines = if self.is_transposed { self.columns } else { self.rows };
        let line_len = if self.is_transposed { self.rows } else { self.columns };
        Strided { data: self.data, strides: [self.stride] }.check(name, [lines], line_len)
    }
}

impl<X: Number> Matrix<'_, X> {
    /// Returns the place of a square of f32 of an untransposed matrix, from an entry on, if the whole square exists.
    pub(super) fn square_in_place(&self, row: usize, column: usize, size: usize) -> Option<*const f32> {
        let is_whole = row < self.rows && self.rows - row >= size && column + size <= self.columns;
        let at = self.data.as_ptr().wrapping_add(row.wrapping_mul(self.stride)).wrapping_add(column);
        (is_whole && X::FORMAT == Format::F32).then_some(at.cast())
    }

    /// Copies some elements of a row of an untransposed matrix as words of `elements` elements each. Elements that do
    /// not exist become zeros.
    ///
    /// # Safety
    /// The processor has the instruction set of V, and `to` is valid for the words.
    #[inline(always)]
    pub(super) unsafe fn copy_part<V: Vector>(&self, row: usize, part: Range<usize>, elements: usize, to: *mut f32) {
        let columns = if row < self.rows { self.columns } else { 0 };
        let start = part.start.min(columns);
        let width = part.end.min(columns) - start;
        let padded = part.len();
        let from = self.data.as_ptr().wrapping_add(row.wrapping_mul(self.stride)).wrapping_add(start);
        // SAFETY: as this method's contract; the elements that are read belong to the matrix.
        unsafe {
            if elements * size_of::<X>() < size_of::<f32>() {
                return widen_row::<X, V>(from, width, to, padded, 1.0);
            }
            // A copy whose length the compiler knows.
            if width == padded && width == V::LANES * elements {
                return V::load(from.cast()).store(to);
            }
            std::ptr::copy_nonoverlapping(from, to.cast(), width);
            to.cast::<X>().add(width).write_bytes(0, padded - width);
        }
    }

    /// Copies the words of one step of the depth for some columns of an untransposed matrix: of one row, or of a pair
    /// of rows. Rows that do not exist become zeros, and zeros follow up to a whole vector.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the columns exist, and `to` is valid for the vectors.
    #[inline(always)]
    pub(super) unsafe fn copy_step<K: Kernel>(&self, row: usize, columns: Range<usize>, to: *mut f32) {
        let width = columns.len();
        let padded = width.next_multiple_of(K::Vector::LANES);
        let from = |line: usize| {
            let at = self.data.as_ptr().wrapping_add(line.wrapping_mul(self.stride)).wrapping_add(columns.start);
            (line < self.rows).then_some(at)
        };
        // SAFETY: as this method's contract; words of two elements are pairs of X.
        unsafe {
            match from(row) {
                low if const { K::IS_BF16 } => pack_row_pair(low, from(row.wrapping_add(1)), width, to, padded),
                Some(row) if width == K::Vector::LANES => X::load::<K::Vector>(row).store(to),
                Some(row) => widen_row::<X, K::Vector>(row, width, to, padded, 1.0),
                None => to.write_bytes(0, padded),
            }
        }
    }

    /// Prefetches what [`copy_step`](Self::copy_step) reads for a panel of columns from `column` on. The rows of a
    /// panel are so far apart that the processor's own prefetching does not follow them: where the next panel is
    /// prefetched, a product of gradients (768, 2,048) and inputs (2,048, 768) in f32 takes 0.92 of the time on a
    /// Zen 3.
    ///
    /// # Safety
    /// The processor has the instruction set of K.
    #[inline(always)]
    pub(super) unsafe fn prefetch_step<K: Kernel>(&self, row: usize, column: usize) {
        for line in row..row + K::ELEMENTS {
            let at = self.data.as_ptr().wrapping_add(line.wrapping_mul(self.stride)).wrapping_add(column);
            // SAFETY: as this method's contract; any address may be prefetched.
            unsafe { prefetch_bytes::<K::Vector>(at.cast(), K::PANEL * size_of::<X>()) };
        }
    }

    /// Transposes a square of words of an untransposed matrix. `elements` elements of a row are one word. `to` gets a
    /// vector of rows for each word, `stride` words apart. Elements that do not exist become zeros.
    ///
    /// # Safety
    /// The processor has the instruction set of V, and `to` is valid for the square.
    #[inline(always)]
    pub(super) unsafe fn transpose<V: Vector>(
        &self,
        row: usize,
        column: usize,
        elements: usize,
        to: *mut f32,
        stride: usize,
    ) {
        let lanes = V::LANES;
        // SAFETY: as this method's contract.
        unsafe {
            if let Some(from) = self.square_in_place(row, column, lanes) {
                return V::transpose(from, self.stride, to, stride);
            }
            let mut square = MaybeUninit::<Square>::uninit();
            let words: *mut f32 = square.as_mut_ptr().cast();
            for at in 0..lanes {
                self.copy_part::<V>(row + at, column..column + lanes * elements, elements, words.add(at * lanes));
            }
            V::transpose(words, lanes, to, stride);
        }
    }
}
