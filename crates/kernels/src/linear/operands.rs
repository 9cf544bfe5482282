//! The operands of a product on their way to the kernel: the left one into words, the right one into panels.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::weight::PackedWeight;
use crate::cpu::{Format, InstructionSet, Kernel, MAX_LANES, Product as PanelProduct, Vector};
use crate::error::{Error, check_instruction_set};
use crate::number::{Number, Strided, pack_row_pair, widen_row};

/// The words of depth of a block: with 48 columns 37 KB of the right operand, which the second cache holds beside the
/// rest. The sums are read and written once a block. Rounding errors grow with the sum that is being added to, so that
/// shorter blocks err less: sums of f32 err as MKL's do, where blocks of 256 words would by 1.15 times as much.
pub const BLOCK: usize = 192;
/// The words from one copied row to the next: rows a power of two apart would share the same sets of the first cache.
pub const BLOCK_ROW: usize = BLOCK + 16;

/// The most rows of a task: 160 KB of copied words.
pub const MAX_ROWS: usize = 192;

/// More zeros than are added to the depth of any product.
const MAX_PADDING: usize = 4 * MAX_LANES;

/// LANES by LANES words.
pub type Square = [f32; MAX_LANES * MAX_LANES];

/// A matrix (rows, columns) in memory. The element of row r and column c is at `r * stride + c`, or at `c * stride + r`
/// where it is transposed.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, X> {
    /// From the first element on.
    pub data: &'a [X],
    /// The rows.
    pub rows: usize,
    /// The columns.
    pub columns: usize,
    /// The elements from the beginning of one row to the next, or of one column where columns are contiguous.
    pub stride: usize,
    /// Whether columns are contiguous, and not rows.
    pub is_transposed: bool,
}

impl<X> Matrix<'_, X> {
    /// The other way round.
    pub fn t(self) -> Self {
        Self { rows: self.columns, columns: self.rows, is_transposed: !self.is_transposed, ..self }
    }

    /// That it lies within its slice.
    pub(super) fn check(&self, name: &str) -> Result<(), Error> {
        let Self { data, rows, columns, stride, is_transposed } = *self;
        let (lines, width) = if is_transposed { (columns, rows) } else { (rows, columns) };
        Strided { data, strides: [stride] }.check(name, [lines], width)
    }
}

impl<X: Number> Matrix<'_, X> {
    /// A square of f32 of an untransposed matrix where it is, from an entry on, if all of it exists.
    fn square_in_place(&self, row: usize, column: usize, size: usize) -> Option<*const f32> {
        let is_whole = row < self.rows && self.rows - row >= size && column + size <= self.columns;
        let at = self.data.as_ptr().wrapping_add(row.wrapping_mul(self.stride)).wrapping_add(column);
        (is_whole && X::FORMAT == Format::F32).then_some(at.cast())
    }

    /// Some elements of a row of an untransposed matrix as words of so many `elements`, with zeros for what does not
    /// exist.
    ///
    /// # Safety
    /// The processor has the instruction set of V, and `to` takes the words.
    #[inline(always)]
    unsafe fn copy_part<V: Vector>(&self, row: usize, part: Range<usize>, elements: usize, to: *mut f32) {
        let columns = if row < self.rows { self.columns } else { 0 };
        let start = part.start.min(columns);
        let (width, padded) = (part.end.min(columns) - start, part.len());
        let from = self.data.as_ptr().wrapping_add(row.wrapping_mul(self.stride)).wrapping_add(start);
        // SAFETY: as this method's contract; what is read belongs to the matrix.
        unsafe {
            if elements * size_of::<X>() < size_of::<f32>() {
                return widen_row::<X, V>(from, width, to, padded, 1.0);
            }
            // The length is known to the compiler.
            if width == padded && width == V::LANES * elements {
                return V::load(from.cast()).store(to);
            }
            std::ptr::copy_nonoverlapping(from, to.cast(), width);
            to.cast::<X>().add(width).write_bytes(0, padded - width);
        }
    }

    /// The words of one step of the depth for some columns of an untransposed matrix: of one row, or of a pair of rows;
    /// zeros where there are none, and up to a whole vector.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the columns exist, and `to` takes them.
    #[inline(always)]
    unsafe fn copy_step<K: Kernel>(&self, row: usize, columns: Range<usize>, to: *mut f32) {
        let (width, padded) = (columns.len(), columns.len().next_multiple_of(K::Vector::LANES));
        let at = |row: usize| self.data.as_ptr().wrapping_add(row * self.stride + columns.start);
        let from = |row: usize| (row < self.rows).then(|| at(row));
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

    /// A square of words of an untransposed matrix, the other way round: so many `elements` of a row are one word, and
    /// `to` has a vector of rows for each, the words of the next ones `stride` further. What does not exist is zeros.
    ///
    /// # Safety
    /// The processor has the instruction set of V, and `to` takes the square.
    #[inline(always)]
    pub(super) unsafe fn transpose<V: Vector>(&self, at: [usize; 2], elements: usize, to: *mut f32, stride: usize) {
        let ([row, column], lanes) = (at, V::LANES);
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

/// A matrix (rows, depth), behind `lead` columns of zeros that are nowhere in memory.
pub struct Left<'a, X> {
    pub matrix: &'a Matrix<'a, X>,
    pub lead: usize,
}

impl<X: Number> Left<'_, X> {
    /// Copies some rows' elements from `first` on to (rows, [`BLOCK_ROW`]) words, with zeros beyond the last element
    /// and below the last row.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the rows belong to the matrix, and `to` is valid for them as a
    /// multiple of `K::MIN_ROWS`, or of a vector where columns are contiguous.
    #[inline(always)]
    pub unsafe fn copy<K: Kernel>(&self, rows: &Range<usize>, first: usize, steps: usize, to: *mut f32) {
        let (matrix, lead, lanes) = (self.matrix, self.lead, K::Vector::LANES);
        // SAFETY: as this method's contract; a row takes whole squares.
        unsafe {
            if !matrix.is_transposed {
                let (count, start) = (steps * K::ELEMENTS, first.saturating_sub(lead));
                let zeros = lead.saturating_sub(first).min(count);
                for row in rows.clone() {
                    let to = to.add((row - rows.start) * BLOCK_ROW);
                    to.write_bytes(0, zeros.div_ceil(K::ELEMENTS));
                    let to = to.byte_add(zeros * size_of::<f32>() / K::ELEMENTS);
                    matrix.copy_part::<K::Vector>(row, start..start + count - zeros, K::ELEMENTS, to);
                }
                let padded = rows.len().next_multiple_of(K::MIN_ROWS);
                to.add(rows.len() * BLOCK_ROW).write_bytes(0, (padded - rows.len()) * BLOCK_ROW);
                return;
            }
            let (lines, mut square): (_, Square) = (matrix.t(), [0.0; _]);
            for row in rows.clone().step_by(lanes) {
                for step in (0..steps).step_by(lanes) {
                    let to = to.add((row - rows.start) * BLOCK_ROW + step);
                    let first = (first + step * K::ELEMENTS).wrapping_sub(lead);
                    if let Some(from) = lines.square_in_place(first, row, lanes) {
                        K::Vector::transpose(from, lines.stride, to, BLOCK_ROW);
                        continue;
                    }
                    for (at, words) in square.chunks_exact_mut(lanes).take(lanes).enumerate() {
                        let line = first.wrapping_add(at * K::ELEMENTS);
                        lines.copy_step::<K>(line, row..rows.end.min(row + lanes), words.as_mut_ptr());
                    }
                    K::Vector::transpose(square.as_ptr(), lanes, to, BLOCK_ROW);
                }
            }
        }
    }
}

/// A matrix (depth, columns). A weight in panels is read in place where it can be; of everything else a block of a
/// panel at a time is copied, for all rows of a task, which is some hundredths of their products.
#[derive(Clone, Debug)]
pub enum Right<'a, X> {
    /// Some outputs of a weight (out, in), of any element: (in, columns).
    Weight(&'a PackedWeight, Range<usize>),
    /// The same the other way round, (columns, in), which gives the gradient of the weight's inputs.
    Transposed(&'a PackedWeight, Range<usize>),
    /// Elements in memory, and what multiplies them.
    Matrix(Matrix<'a, X>, InstructionSet),
}

impl<X> Right<'_, X> {
    /// That it is what it says.
    pub(super) fn check(&self) -> Result<(), Error> {
        check_instruction_set(self.instruction_set())?;
        match self {
            Self::Matrix(matrix, _) => {
                // A line that is repeated has any depth in little memory; zeros are added to it.
                if matrix.rows > usize::MAX - MAX_PADDING {
                    return Err(Error::Shape(format!("expected a depth that can be padded, found {}", matrix.rows)));
                }
                matrix.check("the right operand")
            }
            Self::Weight(weight, columns) | Self::Transposed(weight, columns)
                if columns.start > columns.end || columns.end > weight.outputs() =>
            {
                let outputs = weight.outputs();
                Err(Error::Shape(format!("expected columns within {outputs} outputs, found {columns:?}")))
            }
            _ => Ok(()),
        }
    }

    /// What multiplies it.
    pub(super) fn instruction_set(&self) -> InstructionSet {
        match self {
            Self::Weight(weight, _) | Self::Transposed(weight, _) => weight.instruction_set(),
            Self::Matrix(_, instruction_set) => *instruction_set,
        }
    }

    /// Whether an instruction set that has products of bf16 takes them.
    pub(super) fn is_bf16(&self) -> bool {
        match self {
            Self::Weight(weight, _) | Self::Transposed(weight, _) => weight.is_bf16(),
            Self::Matrix(..) => true,
        }
    }

    /// The depth, and the columns of the whole operand.
    pub(super) fn shape(&self) -> (usize, usize) {
        match self {
            Self::Weight(weight, _) => (weight.inputs(), weight.outputs()),
            Self::Transposed(weight, outputs) => (outputs.len(), weight.inputs()),
            Self::Matrix(matrix, _) => (matrix.rows, matrix.columns),
        }
    }

    /// The columns that are computed.
    pub(super) fn wanted(&self) -> Range<usize> {
        if let Self::Weight(_, columns) = self { columns.clone() } else { 0..self.shape().1 }
    }

    /// The elements of depth before the first one that counts: outputs begin with a multiple of every vector of pairs
    /// where they are the depth.
    pub(super) fn lead(&self) -> usize {
        match self {
            Self::Transposed(_, outputs) if !outputs.is_empty() => outputs.start % (2 * MAX_LANES),
            _ => 0,
        }
    }

    /// The columns of a panel.
    pub(super) fn panel<K: Kernel>(&self) -> usize {
        if let Self::Weight(weight, _) = self { weight.panel } else { K::PANEL }
    }

    /// The columns of one of the panels.
    pub(super) fn columns_of<K: Kernel>(&self, panel: usize) -> Range<usize> {
        let width = self.panel::<K>();
        panel * width..self.shape().1.min((panel + 1) * width)
    }

    /// The elements of depth with the zeros around them.
    pub(super) fn padded<K: Kernel>(&self) -> usize {
        match self {
            Self::Weight(weight, _) => weight.padded,
            _ => (self.lead() + self.shape().0).next_multiple_of(K::ELEMENTS * K::Vector::LANES.max(K::DEPTH)),
        }
    }

    /// Whether a product with so many rows reads a copy.
    pub(super) fn is_copied<K: Kernel>(&self, rows: usize) -> bool {
        if let Self::Weight(weight, _) = self { weight.is_widened::<K>(rows) } else { true }
    }

    /// The bytes that a product reads.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Weight(weight, columns) | Self::Transposed(weight, columns) => weight.bytes(columns.len()),
            Self::Matrix(matrix, _) => matrix.rows.saturating_mul(matrix.columns).saturating_mul(size_of::<X>()),
        }
    }
}

impl<X: Number> Right<'_, X> {
    /// A product with the `product.depth` words of a panel's depth that begin at the element `first`; `copy` takes as
    /// many rows of [`K::PANEL`](Kernel::PANEL) where the operand [`is_copied`](Self::is_copied).
    ///
    /// # Safety
    /// As [`Kernel::multiply`] but for B; the panel exists; the words lie within the padded depth, and begin at a
    /// multiple of [`BLOCK`] words.
    #[inline(always)]
    pub(super) unsafe fn multiply<K: Kernel>(
        &self,
        panel: usize,
        first: usize,
        copy: *mut f32,
        mut product: PanelProduct,
    ) {
        let (columns, steps) = (self.columns_of::<K>(panel), product.depth);
        debug_assert!(steps <= BLOCK);
        // SAFETY: as this method's contract.
        unsafe {
            match self {
                Self::Weight(weight, _) => return weight.multiply::<K>(panel, first, copy, product),
                Self::Matrix(matrix, _) if !matrix.is_transposed => {
                    for at in 0..steps {
                        let to = copy.add(at * K::PANEL);
                        matrix.copy_step::<K>(first + at * K::ELEMENTS, columns.clone(), to);
                    }
                }
                _ => {
                    for at in (0..steps).step_by(K::Vector::LANES) {
                        let first = first + at * K::ELEMENTS;
                        for column in columns.clone().step_by(K::Vector::LANES) {
                            let to = copy.add(at * K::PANEL + column % K::PANEL);
                            self.transpose::<K>(first, column, to);
                        }
                    }
                }
            }
            product.b = copy;
            K::multiply(&product);
        }
    }

    /// A square of words that are contiguous along the depth, from an element of the depth and a column on.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the column exists, both are multiples of a vector of words, and `to`
    /// takes the square, whose rows are a panel apart.
    #[inline(always)]
    unsafe fn transpose<K: Kernel>(&self, first: usize, column: usize, to: *mut f32) {
        let lanes = K::Vector::LANES;
        // SAFETY: as this method's contract; the squares take what is written to them.
        unsafe {
            let (weight, outputs) = match self {
                Self::Matrix(matrix, _) => {
                    return matrix.t().transpose::<K::Vector>([column, first], K::ELEMENTS, to, K::PANEL);
                }
                Self::Weight(weight, outputs) | Self::Transposed(weight, outputs) => (weight, outputs),
            };
            let (mut square, mut pairs): (Square, [f32; 2 * MAX_LANES * MAX_LANES]) = ([0.0; _], [0.0; _]);
            let (rows, stride) = if K::IS_BF16 { (pairs.as_mut_ptr(), lanes) } else { (to, K::PANEL) };
            let first = outputs.start - self.lead() + first;
            for output in (first..first + K::ELEMENTS * lanes).step_by(lanes) {
                let rows = rows.add((output - first) * stride);
                if output < weight.outputs() {
                    let (from, from_stride) = weight.square::<K::Vector>(output, column, &mut square);
                    K::Vector::transpose(from, from_stride, rows, stride);
                }
                for at in (0..lanes).filter(|at| !outputs.contains(&(output + at))) {
                    rows.add(at * stride).write_bytes(0, lanes);
                }
            }
            if K::IS_BF16 {
                for (at, rows) in pairs[..2 * lanes * lanes].chunks_exact(2 * lanes).enumerate() {
                    let (low, high) = (K::Vector::load(rows.as_ptr()), K::Vector::load(rows.as_ptr().add(lanes)));
                    low.store_pairs(high, to.add(at * K::PANEL));
                }
            }
        }
    }
}
