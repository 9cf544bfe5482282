//! The operands of a product, which are copied on their way to the kernel: the left one into words, the right one into
//! panels.

use std::ops::Range;

use super::matrix::{Matrix, Square};
use super::weight::PackedWeight;
use crate::cpu::{
    Format, InstructionSet, Kernel, LeftOperand, MAX_LANES, NextBytes, PanelProduct, RightOperand, Vector,
    multiply_words,
};
use crate::error::{Error, check_instruction_set};
use crate::number::Number;

/// The words of depth of a block. With 48 columns a block of the right operand is 37 KB, which fit the second cache
/// together with the other operands. The sums are read and written once a block. Rounding errors grow with the sum that
/// is added to, so that shorter blocks err less: sums of f32 err as much as MKL's, and blocks of 256 words would err
/// 1.15 times as much.
pub const BLOCK: usize = 192;
/// The words from one copied row to the next. Rows that are a power of two apart would share the sets of the first
/// cache.
pub const BLOCK_ROW: usize = BLOCK + 16;

/// The rows that a task takes at most on a processor with a small second cache. Their copied words take 160 KB.
pub const LEAST_MAX_ROWS: usize = 192;

/// A bound of the zeros that pad the depth of a product.
const MAX_PADDING: usize = 4 * MAX_LANES;

/// The left operand of a product, (rows, depth): columns of zeros, which are not in memory, and then a matrix.
pub struct Left<'a, X> {
    pub matrix: &'a Matrix<'a, X>,
    /// The number of columns of zeros.
    pub leading_zeros: usize,
}

impl<X: Number> Left<'_, X> {
    /// Returns whether a product of `depth` words of depth reads the matrix in place instead of a copy: rows of f32
    /// without padding, which do not share the sets of the first cache.
    pub fn is_in_place<K: Kernel>(&self, depth: usize) -> bool {
        // Rows that are a multiple of these words apart, 4 KB, begin in one set.
        const SETS: usize = 1024;
        let Self { matrix, leading_zeros } = *self;
        let has_words = X::FORMAT == Format::F32 && K::ELEMENTS == 1 && K::MIN_ROWS == 1;
        let is_whole = !matrix.is_transposed && leading_zeros == 0 && depth == matrix.columns;
        has_words && is_whole && !matrix.stride.is_multiple_of(SETS)
    }

    /// Returns the rows from `row` on, beginning with their word `first`, of a matrix that is read in place.
    pub fn rows_in_place<K: Kernel>(&self, row: usize, first: usize) -> LeftOperand {
        let stride = self.matrix.stride;
        let at = self.matrix.data.as_ptr().wrapping_add(row * stride + first).cast();
        LeftOperand { at, group: K::ROWS * stride, row: stride, step: 1 }
    }

    /// Copies the elements of some rows from `first` on to (rows, [`BLOCK_ROW`]) words, with zeros after the last
    /// element and after the last row.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the rows belong to the matrix, and `to` is valid for their number
    /// rounded up to a multiple of `K::MIN_ROWS`, or of a vector where columns are contiguous.
    #[inline(always)]
    pub unsafe fn copy<K: Kernel>(&self, rows: &Range<usize>, first: usize, steps: usize, to: *mut f32) {
        let Self { matrix, leading_zeros } = *self;
        let lanes = K::Vector::LANES;
        // SAFETY: as this method's contract; a copied row has room for whole squares.
        unsafe {
            if !matrix.is_transposed {
                let count = steps * K::ELEMENTS;
                let start = first.saturating_sub(leading_zeros);
                let zeros = leading_zeros.saturating_sub(first).min(count);
                for row in rows.clone() {
                    let row_words = to.add((row - rows.start) * BLOCK_ROW);
                    row_words.write_bytes(0, zeros.div_ceil(K::ELEMENTS));
                    let numbers = row_words.byte_add(zeros * size_of::<f32>() / K::ELEMENTS);
                    matrix.copy_part::<K::Vector>(row, start..start + count - zeros, K::ELEMENTS, numbers);
                }
                let padded = rows.len().next_multiple_of(K::MIN_ROWS);
                to.add(rows.len() * BLOCK_ROW).write_bytes(0, (padded - rows.len()) * BLOCK_ROW);
                return;
            }
            // The rows of `columns` are the matrix's columns, which are contiguous.
            let columns = matrix.t();
            let mut square: Square = [0.0; _];
            for row in rows.clone().step_by(lanes) {
                for step in (0..steps).step_by(lanes) {
                    let square_to = to.add((row - rows.start) * BLOCK_ROW + step);
                    let first_column = (first + step * K::ELEMENTS).wrapping_sub(leading_zeros);
                    if let Some(from) = columns.square_in_place(first_column, row, lanes) {
                        K::Vector::transpose(from, columns.stride, square_to, BLOCK_ROW);
                        continue;
                    }
                    for (at, words) in square.chunks_exact_mut(lanes).take(lanes).enumerate() {
                        let column = first_column.wrapping_add(at * K::ELEMENTS);
                        columns.copy_step::<K>(column, row..rows.end.min(row + lanes), words.as_mut_ptr());
                    }
                    K::Vector::transpose(square.as_ptr(), lanes, square_to, BLOCK_ROW);
                }
            }
        }
    }
}

/// The right operand of a product, (depth, columns). A packed weight is read in place where the kernel can read its
/// format. Of other operands one block of a panel at a time is copied for all rows of a task, which takes some
/// hundredths of the time of the products.
#[derive(Clone, Debug)]
pub enum Right<'a, X> {
    /// Some outputs of a weight (out, in): its depth is the inputs and its columns are these outputs. The weight may
    /// have any element.
    Weight {
        /// The weight.
        weight: &'a PackedWeight,
        /// The outputs that are computed.
        outputs: Range<usize>,
    },
    /// The transposed weight: its depth is these outputs and its columns are the inputs. The product is the gradient of
    /// the inputs.
    Transposed {
        /// The weight.
        weight: &'a PackedWeight,
        /// The outputs whose gradients are multiplied.
        outputs: Range<usize>,
    },
    /// Elements in memory.
    Matrix {
        /// The elements, (depth, columns).
        matrix: Matrix<'a, X>,
        /// The instruction set that multiplies them.
        instruction_set: InstructionSet,
    },
}

impl<X> Right<'_, X> {
    /// Checks the sizes, and that the processor has the instruction set.
    pub(super) fn check(&self) -> Result<(), Error> {
        check_instruction_set(self.instruction_set())?;
        match self {
            Self::Matrix { matrix, .. } => {
                // With a stride of 0, a small slice is a matrix of any depth, and the depth is padded below.
                if matrix.rows > usize::MAX - MAX_PADDING {
                    return Err(Error::Shape(format!("expected a depth that can be padded, found {}", matrix.rows)));
                }
                matrix.check("the right operand")
            }
            Self::Weight { weight, outputs } | Self::Transposed { weight, outputs } => {
                if outputs.start > outputs.end || outputs.end > weight.outputs() {
                    let all = weight.outputs();
                    return Err(Error::Shape(format!("expected columns within {all} outputs, found {outputs:?}")));
                }
                Ok(())
            }
        }
    }

    /// Returns the instruction set that multiplies the operand.
    pub(super) fn instruction_set(&self) -> InstructionSet {
        match self {
            Self::Weight { weight, .. } | Self::Transposed { weight, .. } => weight.instruction_set(),
            Self::Matrix { instruction_set, .. } => *instruction_set,
        }
    }

    /// Returns whether the product may be one of bf16, on an instruction set that has such products.
    pub(super) fn is_bf16(&self) -> bool {
        match self {
            Self::Weight { weight, .. } | Self::Transposed { weight, .. } => weight.is_bf16(),
            Self::Matrix { .. } => true,
        }
    }

    /// Returns the depth of the operand.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::Weight { weight, .. } => weight.inputs(),
            Self::Transposed { outputs, .. } => outputs.len(),
            Self::Matrix { matrix, .. } => matrix.rows,
        }
    }

    /// Returns the number of columns of the whole operand.
    pub(super) fn all_columns(&self) -> usize {
        match self {
            Self::Weight { weight, .. } => weight.outputs(),
            Self::Transposed { weight, .. } => weight.inputs(),
            Self::Matrix { matrix, .. } => matrix.columns,
        }
    }

    /// Returns the columns that are computed.
    pub(super) fn computed_columns(&self) -> Range<usize> {
        match self {
            Self::Weight { outputs, .. } => outputs.clone(),
            Self::Transposed { .. } | Self::Matrix { .. } => 0..self.all_columns(),
        }
    }

    /// Returns the number of zeros before the depth. Where outputs are the depth, they begin at a multiple of every
    /// vector of pairs.
    pub(super) fn leading_zeros(&self) -> usize {
        match self {
            Self::Transposed { outputs, .. } if !outputs.is_empty() => outputs.start % (2 * MAX_LANES),
            _ => 0,
        }
    }

    /// Returns the number of columns of a panel.
    pub(super) fn panel<K: Kernel>(&self) -> usize {
        match self {
            Self::Weight { weight, .. } => weight.panel,
            Self::Transposed { .. } | Self::Matrix { .. } => K::PANEL,
        }
    }

    /// Returns the columns of the operand that belong to a panel.
    pub(super) fn columns_of<K: Kernel>(&self, panel: usize) -> Range<usize> {
        let width = self.panel::<K>();
        panel * width..self.all_columns().min((panel + 1) * width)
    }

    /// Returns the depth in elements, with the zeros before and after it.
    pub(super) fn padded<K: Kernel>(&self) -> usize {
        match self {
            Self::Weight { weight, .. } => weight.padded,
            Self::Transposed { .. } | Self::Matrix { .. } => {
                let multiple = K::ELEMENTS * K::Vector::LANES.max(K::DEPTH);
                (self.leading_zeros() + self.depth()).next_multiple_of(multiple)
            }
        }
    }

    /// Returns whether a product with `rows` rows reads a copy.
    pub(super) fn is_copied<K: Kernel>(&self, rows: usize) -> bool {
        match self {
            Self::Weight { weight, .. } => weight.is_widened::<K>(rows),
            Self::Transposed { .. } | Self::Matrix { .. } => true,
        }
    }

    /// Returns the bytes that a product reads of some words of a panel's depth, if it reads a packed weight.
    pub(super) fn bytes_at<K: Kernel>(&self, panel: usize, words: Range<usize>) -> NextBytes {
        match self {
            Self::Weight { weight, .. } => weight.bytes_at(panel, words.start * K::ELEMENTS, words.len() * K::ELEMENTS),
            Self::Transposed { .. } | Self::Matrix { .. } => NextBytes::NONE,
        }
    }

    /// Returns the number of bytes that a product reads.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Weight { weight, outputs } | Self::Transposed { weight, outputs } => weight.bytes(outputs.len()),
            Self::Matrix { matrix, .. } => matrix.rows.saturating_mul(matrix.columns).saturating_mul(size_of::<X>()),
        }
    }
}

impl<X: Number> Right<'_, X> {
    /// Computes a product with the `product.depth` words of a panel's depth that begin at the element `first`. Where
    /// the operand [`is_copied`](Self::is_copied), `copy` is valid for `product.depth` rows of
    /// [`K::PANEL`](Kernel::PANEL) words.
    ///
    /// # Safety
    /// As [`multiply_words`] except for B; the panel exists; the words lie within the padded depth, and begin at a
    /// multiple of [`BLOCK`] words.
    #[inline(always)]
    pub(super) unsafe fn multiply<K: Kernel>(
        &self,
        panel: usize,
        first: usize,
        copy: *mut f32,
        mut product: PanelProduct,
    ) {
        let steps = product.depth;
        debug_assert!(steps <= BLOCK);
        // SAFETY: as this method's contract.
        unsafe {
            match self {
                Self::Weight { weight, .. } => return weight.multiply::<K>(panel, first, copy, product),
                Self::Matrix { matrix, .. } if !matrix.is_transposed => {
                    let columns = self.columns_of::<K>(panel);
                    for at in 0..steps {
                        let row = first + at * K::ELEMENTS;
                        matrix.prefetch_step::<K>(row, columns.end);
                        matrix.copy_step::<K>(row, columns.clone(), copy.add(at * K::PANEL));
                    }
                }
                Self::Matrix { .. } | Self::Transposed { .. } => {
                    let columns = self.columns_of::<K>(panel);
                    for at in (0..steps).step_by(K::Vector::LANES) {
                        for column in columns.clone().step_by(K::Vector::LANES) {
                            let to = copy.add(at * K::PANEL + column % K::PANEL);
                            self.transpose::<K>(first + at * K::ELEMENTS, column, to);
                        }
                    }
                }
            }
            product.b = RightOperand::words(copy, K::PANEL);
            multiply_words::<K>(&product);
        }
    }

    /// Copies a square of words, from an element of the depth and a column on, of an operand whose depth is contiguous.
    /// The rows of the copy are a panel apart.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the column exists, both are multiples of a vector of words, and `to`
    /// is valid for the square.
    #[inline(always)]
    unsafe fn transpose<K: Kernel>(&self, first: usize, column: usize, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            match self {
                Self::Matrix { matrix, .. } => {
                    matrix.t().transpose::<K::Vector>(column, first, K::ELEMENTS, to, K::PANEL);
                }
                Self::Weight { weight, outputs } | Self::Transposed { weight, outputs } => {
                    let first_output = outputs.start - self.leading_zeros() + first;
                    transpose_outputs::<K>(weight, outputs, first_output, column, to);
                }
            }
        }
    }
}

/// Copies a square of words of a transposed weight, from an output and an input on. Outputs outside of `outputs` become
/// zeros.
///
/// # Safety
/// As [`Right::transpose`].
#[inline(always)]
unsafe fn transpose_outputs<K: Kernel>(
    weight: &PackedWeight,
    outputs: &Range<usize>,
    first: usize,
    input: usize,
    to: *mut f32,
) {
    let lanes = K::Vector::LANES;
    let mut square: Square = [0.0; _];
    let mut pairs = [0f32; 2 * MAX_LANES * MAX_LANES];
    // Words of two elements are made of pairs of rows.
    let rows = if K::IS_BF16 { pairs.as_mut_ptr() } else { to };
    let stride = if K::IS_BF16 { lanes } else { K::PANEL };
    // SAFETY: as this function's contract; the squares have room for what is written to them.
    unsafe {
        for output in (first..first + K::ELEMENTS * lanes).step_by(lanes) {
            let square_rows = rows.add((output - first) * stride);
            if output < weight.outputs() {
                let from = weight.square::<K::Vector>(output, input, &mut square);
                K::Vector::transpose(from.at, from.stride, square_rows, stride);
            }
            for at in (0..lanes).filter(|at| !outputs.contains(&(output + at))) {
                square_rows.add(at * stride).write_bytes(0, lanes);
            }
        }
        if K::IS_BF16 {
            for (at, pair) in pairs[..2 * lanes * lanes].chunks_exact(2 * lanes).enumerate() {
                let low = K::Vector::load(pair.as_ptr());
                let high = K::Vector::load(pair.as_ptr().add(lanes));
                low.store_pairs(high, to.add(at * K::PANEL));
            }
        }
    }
}
