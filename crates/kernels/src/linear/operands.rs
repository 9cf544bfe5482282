//! The operands of a product on their way to the kernel: the left one into words, the right one into panels.

use std::ops::Range;

use super::Matrix;
use super::weight::PackedWeight;
use crate::cpu::{Kernel, LeftOperand, MAX_LANES, Product, Vector, Words};
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

/// A matrix (depth, columns). A weight in panels is read in place where it can be; of everything else a block of a
/// panel at a time is copied, for all rows of a task, which is some hundredths of their products.
#[derive(Clone, Copy)]
pub enum Right<'a, X> {
    /// (in, out) of a weight (out, in).
    Weight(&'a PackedWeight),
    /// Some of the outputs of a weight, by its inputs: the other way round. Its depth begins at [`depth_start`].
    Transposed { weight: &'a PackedWeight, first: usize, end: usize },
    /// Elements in memory.
    Matrix(Matrix<'a, X>),
}

/// LANES by LANES words.
type Square = [f32; MAX_LANES * MAX_LANES];

/// The output with which the depth begins where outputs are the depth: a multiple of every vector of pairs.
pub fn depth_start(first_output: usize) -> usize {
    first_output / (2 * MAX_LANES) * (2 * MAX_LANES)
}

impl<X: Number> Right<'_, X> {
    /// The columns of the whole operand.
    pub fn columns(&self) -> usize {
        match self {
            Self::Weight(weight) => weight.outputs(),
            Self::Transposed { weight, .. } => weight.inputs(),
            Self::Matrix(matrix) => matrix.columns,
        }
    }

    /// The columns of a panel.
    pub fn panel<K: Kernel>(&self) -> usize {
        if let Self::Weight(weight) = self { weight.panel } else { K::PANEL }
    }

    /// The columns of one of the panels.
    pub fn columns_of<K: Kernel>(&self, panel: usize) -> Range<usize> {
        let width = self.panel::<K>();
        panel * width..self.columns().min((panel + 1) * width)
    }

    /// The elements of depth with the zeros at its end.
    pub fn padded<K: Kernel>(&self) -> usize {
        let depth = match *self {
            Self::Weight(weight) => return weight.padded,
            Self::Transposed { first, end, .. } => end - depth_start(first),
            Self::Matrix(matrix) => matrix.rows,
        };
        depth.next_multiple_of(K::ELEMENTS * K::Vector::LANES.max(K::DEPTH))
    }

    /// Whether a product with so many rows reads a copy.
    pub fn is_copied<K: Kernel>(&self, rows: usize) -> bool {
        if let Self::Weight(weight) = self { weight.is_widened::<K>(rows) } else { true }
    }

    /// Whether blocks of codes have minimums.
    pub fn has_minimums(&self) -> bool {
        if let Self::Weight(weight) = self { weight.has_minimums() } else { false }
    }

    /// The bytes that a product with so many columns reads.
    pub fn bytes(&self, columns: usize) -> usize {
        match *self {
            Self::Weight(weight) => weight.bytes(columns),
            Self::Transposed { weight, first, end } => weight.bytes(end - first),
            Self::Matrix(matrix) => matrix.rows * columns * size_of::<X>(),
        }
    }

    /// A product with the `product.depth` words of a panel's depth that begin at the element `first`; `copy` takes as
    /// many rows of [`K::PANEL`](Kernel::PANEL) where the operand [`is_copied`](Self::is_copied).
    ///
    /// # Safety
    /// As [`Kernel::multiply`] but for B; the panel exists; the words lie within the padded depth, and begin at a
    /// multiple of [`BLOCK`] words.
    #[inline(always)]
    pub unsafe fn multiply<K: Kernel>(&self, panel: usize, first: usize, copy: *mut f32, mut product: Product) {
        let (column, steps) = (panel * K::PANEL, product.depth);
        debug_assert!(steps <= BLOCK);
        // SAFETY: as this method's contract.
        unsafe {
            match self {
                Self::Weight(weight) => return weight.multiply::<K>(panel, first, copy, product),
                &Self::Transposed { weight, first: start, end } => {
                    for at in (0..steps).step_by(K::Vector::LANES) {
                        let output = depth_start(start) + first + at * K::ELEMENTS;
                        for column in (column..weight.inputs().min(column + K::PANEL)).step_by(K::Vector::LANES) {
                            let to = copy.add(at * K::PANEL + column % K::PANEL);
                            transpose_weight::<K>(weight, &(start..end), output, column, to);
                        }
                    }
                }
                Self::Matrix(matrix) if matrix.is_transposed => {
                    for column in (column..matrix.columns.min(column + K::PANEL)).step_by(K::Vector::LANES) {
                        for at in (0..steps).step_by(K::Vector::LANES) {
                            let to = copy.add(at * K::PANEL + column % K::PANEL);
                            transpose_rows::<K, X>(matrix, column, first + at * K::ELEMENTS, to);
                        }
                    }
                }
                Self::Matrix(matrix) => {
                    for at in 0..steps {
                        copy_row::<K, X>(matrix, first + at * K::ELEMENTS, column, copy.add(at * K::PANEL));
                    }
                }
            }
            product.b = copy;
            K::multiply::<Words>(&product);
        }
    }
}

/// The words of one step of the depth, for a panel of columns from `column`: one row of a matrix, or a pair of rows.
///
/// # Safety
/// The processor has the tier of K; the column belongs to the matrix, and `to` takes a panel.
#[inline(always)]
unsafe fn copy_row<K: Kernel, X: Number>(matrix: &Matrix<X>, row: usize, column: usize, to: *mut f32) {
    let lanes = K::Vector::LANES;
    let width = K::PANEL.min(matrix.columns - column);
    let from = |row: usize| matrix.data.as_ptr().wrapping_add(row * matrix.stride + column);
    // SAFETY: as this function's contract; rows and columns that are read belong to the matrix.
    unsafe {
        if row >= matrix.rows {
            to.write_bytes(0, K::PANEL);
        } else if const { !K::IS_BF16 } {
            widen_row::<X, K::Vector>(from(row), width, to, width.next_multiple_of(lanes), 1.0);
        } else {
            let high = (row + 1 < matrix.rows).then(|| from(row + 1));
            pack_row_pair(Some(from(row)), high, width, to, width.next_multiple_of(lanes));
        }
    }
}

/// A square of words: the columns from `column` of a matrix whose columns are contiguous, and the depth from `first`.
///
/// # Safety
/// The processor has the tier of K; the column belongs to the matrix, and `to` takes a square, whose rows are a panel
/// apart.
#[inline(always)]
unsafe fn transpose_rows<K: Kernel, X: Number>(matrix: &Matrix<X>, column: usize, first: usize, to: *mut f32) {
    let lanes = K::Vector::LANES;
    let (columns, depth) = (lanes.min(matrix.columns - column), lanes * K::ELEMENTS);
    let width = depth.min(matrix.rows.saturating_sub(first));
    // SAFETY: as this function's contract; what is read belongs to the matrix.
    unsafe {
        let from = matrix.data.as_ptr().wrapping_add(column * matrix.stride + first);
        if const { matches!(X::DTYPE, Dtype::F32) } && (columns, width) == (lanes, depth) {
            return K::Vector::transpose(from.cast(), matrix.stride, to, K::PANEL);
        }
        let mut square: Square = [0.0; _];
        for at in 0..columns {
            let (from, to) = (from.wrapping_add(at * matrix.stride), square.as_mut_ptr().add(at * lanes));
            if const { !K::IS_BF16 } {
                widen_row::<X, K::Vector>(from, width, to, width, 1.0);
            } else if width == depth {
                // The length is known to the compiler.
                std::ptr::copy_nonoverlapping(from, to.cast(), lanes * K::ELEMENTS);
            } else {
                std::ptr::copy_nonoverlapping(from, to.cast(), width);
            }
        }
        K::Vector::transpose(square.as_ptr(), lanes, to, K::PANEL);
    }
}

/// A square of words of a weight the other way round: columns are its inputs from `input`, the depth its outputs from
/// `first`, of which those outside of `outputs` are zeros.
///
/// # Safety
/// The processor has the tier of K; the input and the outputs' panel belong to the weight, `input` and `first` are
/// multiples of a vector of words, and `to` takes a square, whose rows are a panel apart.
#[inline(always)]
unsafe fn transpose_weight<K: Kernel>(
    weight: &PackedWeight,
    outputs: &Range<usize>,
    first: usize,
    input: usize,
    to: *mut f32,
) {
    let lanes = K::Vector::LANES;
    let (mut square, mut pairs): (Square, [f32; 2 * MAX_LANES * MAX_LANES]) = ([0.0; _], [0.0; _]);
    let (rows, stride) = if K::IS_BF16 { (pairs.as_mut_ptr(), lanes) } else { (to, K::PANEL) };
    // SAFETY: as this function's contract; the squares take what is written to them.
    unsafe {
        for output in (first..first + K::ELEMENTS * lanes).step_by(lanes) {
            let rows = rows.add((output - first) * stride);
            if let Some(from) = weight.square_in_place(output, input, lanes) {
                K::Vector::transpose(from, weight.panel, rows, stride);
            } else if output < weight.outputs() {
                let inputs = input..weight.padded.min(input + lanes);
                square[inputs.len() * lanes..].fill(0.0);
                let (panel, column) = (output / weight.panel, output % weight.panel);
                weight.widen::<K::Vector>(panel, column..column + lanes, inputs, square.as_mut_ptr(), lanes);
                K::Vector::transpose(square.as_ptr(), lanes, rows, stride);
            }
            for at in 0..lanes {
                if !outputs.contains(&(output + at)) {
                    rows.add(at * stride).write_bytes(0, lanes);
                }
            }
        }
        if K::IS_BF16 {
            for (at, rows) in pairs[..2 * lanes * lanes].chunks_exact(2 * lanes).enumerate() {
                let (low, high) = (K::Vector::load(rows.as_ptr()), K::Vector::load(rows.as_ptr().add(lanes)));
                K::store_pairs(low, high, to.add(at * K::PANEL));
            }
        }
    }
}
