//! Matrices in the form that the kernel multiplies.

use crate::cpu::{Kernel, LeftOperand, MAX_COLUMNS, NextBytes, PanelProduct, RightOperand, Scratch, Vector};

/// A matrix whose columns are divided into panels of the kernel: (panels, rows, panel).
pub(super) struct Panels {
    pub rows: usize,
    columns: usize,
    pub panel: usize,
    pub words: Scratch,
}

impl Panels {
    pub fn new<K: Kernel>(rows: usize, columns: usize) -> Self {
        let words = Scratch::zeros(columns.div_ceil(K::PANEL) * K::PANEL * rows);
        Self { rows, columns, panel: K::PANEL, words }
    }

    /// Returns the number of panels.
    pub fn count(&self) -> usize {
        self.columns.div_ceil(self.panel)
    }

    /// Returns the number of columns of a panel.
    pub fn len(&self, panel: usize) -> usize {
        self.panel.min(self.columns - panel * self.panel)
    }

    /// Returns a matrix of one panel, whose rows are whole vectors that follow each other.
    pub fn single(rows: usize, columns: usize) -> Self {
        Self { rows, columns, panel: columns, words: Scratch::zeros(rows * columns) }
    }

    pub fn at(&self, panel: usize, row: usize) -> *const f32 {
        self.words.as_ptr().wrapping_add((panel * self.rows + row) * self.panel)
    }

    pub fn at_mut(&mut self, panel: usize, row: usize) -> *mut f32 {
        self.words.as_mut_ptr().wrapping_add((panel * self.rows + row) * self.panel)
    }

    /// Copies a matrix, and sets the words beyond the last column to zero.
    ///
    /// # Safety
    /// `from` is valid for the matrix, row after row.
    pub unsafe fn copy_rows_from(&mut self, from: *const f32) {
        let panels = self.count();
        for row in 0..self.rows {
            for panel in 0..panels {
                let to = self.at_mut(panel, row);
                let columns = self.len(panel);
                // SAFETY: as this method's contract.
                unsafe {
                    to.copy_from_nonoverlapping(from.add(row * self.columns + panel * self.panel), columns);
                    to.add(columns).write_bytes(0, self.panel - columns);
                }
            }
        }
    }

    /// Copies the matrix to memory.
    ///
    /// # Safety
    /// `to` is valid for writes of the matrix, row after row.
    pub unsafe fn copy_rows_to(&self, to: *mut f32) {
        let panels = self.count();
        for row in 0..self.rows {
            for panel in 0..panels {
                // SAFETY: as this method's contract.
                unsafe {
                    let columns_to = to.add(row * self.columns + panel * self.panel);
                    columns_to.copy_from_nonoverlapping(self.at(panel, row), self.len(panel));
                }
            }
        }
    }
}

/// Returns a left operand whose rows are `row` words apart, and its columns `step` words.
pub(super) fn left_operand<K: Kernel>(at: *const f32, row: usize, step: usize) -> LeftOperand {
    LeftOperand { at, group: K::ROWS * row, row, step }
}

/// The sizes of a product.
#[derive(Clone, Copy)]
pub(super) struct ProductSizes {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
}

/// Adds the product of `a` and a panel `b` to a panel `c`, or overwrites `c` with it.
///
/// # Safety
/// As [`cpu::multiply_words`](crate::cpu::multiply_words).
#[inline(always)]
pub(super) unsafe fn multiply<K: Kernel>(a: LeftOperand, b: *const f32, c: *mut f32, sizes: ProductSizes, adds: bool) {
    let ProductSizes { rows, depth, columns } = sizes;
    static ONES: [f32; MAX_COLUMNS] = [1.0; MAX_COLUMNS];
    let vectors = columns.div_ceil(K::Vector::LANES);
    let factors = adds.then_some(ONES.as_ptr());
    // SAFETY: as this function's contract.
    unsafe {
        crate::cpu::multiply_words::<K>(&PanelProduct {
            a,
            b: RightOperand::words(b, K::PANEL),
            c,
            rows,
            depth,
            vectors,
            factors,
            next: NextBytes::NONE,
        })
    }
}

/// Writes the rows of one matrix as columns of another, in squares of `LANES` words.
///
/// # Safety
/// The processor has the instruction set of V; the other has the rows and columns, both rounded up to whole vectors.
#[inline(always)]
pub(super) unsafe fn transpose<V: Vector>(from: &Panels, to: &mut Panels) {
    for row in (0..from.rows).step_by(V::LANES) {
        for column in (0..from.columns).step_by(V::LANES) {
            let square = from.at(column / from.panel, row).wrapping_add(column % from.panel);
            let transposed = to.at_mut(row / to.panel, column).wrapping_add(row % to.panel);
            // SAFETY: as this function's contract.
            unsafe { V::transpose(square, from.panel, transposed, to.panel) };
        }
    }
}

/// Runs a block for each vector of a row of panels, with the index of the panel and of the vector's first word in it.
macro_rules! for_each_vector {
    ($panels:expr, $V:ty, |$panel:ident, $at:ident| $body:block) => {
        for $panel in 0..$panels.count() {
            for $at in (0..$panels.len($panel)).step_by(<$V>::LANES) {
                $body
            }
        }
    };
}
pub(super) use for_each_vector;

/// Computes the product `c` of some rows of a matrix `a` with a matrix `b`.
///
/// # Safety
/// The processor has the instruction set of K; `b` has a row for each column of `a`, and `c` has the rows and the
/// columns of `b`.
#[inline(always)]
pub(super) unsafe fn multiply_panels<K: Kernel>(a: &Panels, rows: usize, b: &Panels, c: &mut Panels) {
    for to in 0..b.count() {
        for panel in 0..a.count() {
            let left = left_operand::<K>(a.at(panel, 0), a.panel, 1);
            let sizes = ProductSizes { rows, depth: a.len(panel), columns: b.len(to) };
            // SAFETY: as this function's contract.
            unsafe { multiply::<K>(left, b.at(to, panel * a.panel), c.at_mut(to, 0), sizes, panel > 0) };
        }
    }
}

/// Multiplies each row of a matrix with its factor, and writes the rows to `to`.
///
/// # Safety
/// The processor has the instruction set of V; `from` has the panels of `to`, and may be the same.
#[inline(always)]
pub(super) unsafe fn scale_rows<V: Vector>(from: *const f32, factors: *const f32, to: &mut Panels) {
    for panel in 0..to.count() {
        for row in 0..to.rows {
            // SAFETY: as this function's contract; a panel has whole vectors.
            unsafe {
                let factor = V::splat(*factors.add(row));
                for at in (0..to.len(panel)).step_by(V::LANES) {
                    let word = (panel * to.rows + row) * to.panel + at;
                    V::load(from.add(word)).mul(factor).store(to.words.as_mut_ptr().add(word));
                }
            }
        }
    }
}
