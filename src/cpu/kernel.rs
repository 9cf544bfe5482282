//! The matrix product that both halves of attention are made of, and what one tier brings to it.

use super::vector::Vector;

/// What a tier does for one type of operand. Matrices are made of 32-bit words: an f32, or a pair of bf16 along the
/// depth of the product, so that one description serves both.
///
/// # Safety
/// Methods may only be called on a processor that has the tier.
pub(crate) trait Kernel {
    type Vector: Vector;
    /// Elements in a word: 1 for f32, 2 for bf16.
    const ELEMENTS: usize;
    /// The rows of A and C come in multiples of this.
    const ROWS: usize;
    /// The words of depth come in multiples of this.
    const DEPTH: usize;
    /// The vectors of a panel's columns, at most [`MOST_VECTORS`].
    const VECTORS: usize;
    /// The columns of a panel.
    const PANEL: usize = Self::VECTORS * <Self::Vector as Vector>::LANES;

    /// The keys that are scored before the next softmax; a multiple of `ROWS`, and of `DEPTH` words.
    const BLOCK: usize = 128;

    /// Two vectors as pairs of bf16, `low` in the lower half of each word. Only where a word is two elements.
    unsafe fn store_pairs(low: Self::Vector, high: Self::Vector, to: *mut f32);

    /// Runs a job compiled for the tier.
    unsafe fn vectorize(job: impl Job);

    /// `C = A B`, or `C = C · factors + A B`.
    unsafe fn multiply(product: &Product);
}

/// Work that is compiled once for each tier. `run` has to be `#[inline(always)]`.
pub(crate) trait Job {
    /// # Safety
    /// The processor has the tier, and the caller is compiled for it.
    unsafe fn run<K: Kernel>(self);
}

/// The most columns that a panel of any kernel has.
pub(crate) const MOST_COLUMNS: usize = 64;

/// One product over a panel of columns. Strides and sizes count words.
///
/// A is (rows, depth) in groups of [`ROWS`](Kernel::ROWS) rows: row r of group g begins at `a + g · a_group + r · a_row`, and
/// its depth follows at steps of `a_step`. B is (depth, panel) and C (rows, panel), both contiguous.
pub(crate) struct Product {
    pub a: *const f32,
    pub a_group: usize,
    pub a_row: usize,
    pub a_step: usize,
    pub b: *const f32,
    pub c: *mut f32,
    pub rows: usize,
    pub depth: usize,
    /// The vectors of the panel that are computed; the columns beyond are left as they are.
    pub vectors: usize,
    /// A factor for each column of what C held, or nothing if C is to be overwritten.
    pub factors: Option<*const f32>,
}

/// How a tier multiplies two words and adds.
pub(crate) trait MulAdd {
    type Vector: Vector;

    /// `sum + a · b`, over both elements of a word where there are two.
    ///
    /// # Safety
    /// As [`Kernel`].
    unsafe fn mul_add(sum: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector;
}

/// [`Kernel::multiply`] by multiply-adds in registers, for panels of up to `VECTORS` vectors.
///
/// A tile of `ROWS × VECTORS` sums stays in registers; each step of the depth loads `VECTORS` vectors of B and broadcasts
/// `ROWS` words of A. Three vectors by eight rows are 24 sums, which hide the latency of two multiply-adds a cycle,
/// with 11 loads for 24 multiply-adds.
///
/// # Safety
/// As [`Kernel`]; the pointers are valid for what [`Product`] says of them; `rows` is a multiple of `ROWS`.
#[inline(always)]
pub(crate) unsafe fn multiply<M: MulAdd, const ROWS: usize, const VECTORS: usize>(product: &Product) {
    for row in (0..product.rows).step_by(ROWS) {
        // SAFETY: the caller's promise; `row + ROWS` rows exist.
        unsafe {
            match product.vectors {
                1 => tile::<M, ROWS, 1>(product, row, VECTORS),
                2 if VECTORS >= 2 => tile::<M, ROWS, 2>(product, row, VECTORS),
                _ => tile::<M, ROWS, VECTORS>(product, row, VECTORS),
            }
        }
    }
}

#[inline(always)]
unsafe fn tile<M: MulAdd, const ROWS: usize, const N: usize>(product: &Product, row: usize, vectors: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = M::Vector::LANES;
        let panel = vectors * lanes;
        let c = product.c.add(row * panel);
        let mut sums = [[M::Vector::splat(0.0); N]; ROWS];
        let mut a = product.a.add(row / ROWS * product.a_group);
        let mut b = product.b;
        for _ in 0..product.depth {
            let mut columns = [M::Vector::splat(0.0); N];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = M::Vector::load(b.add(n * lanes));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let word = M::Vector::splat(*a.add(r * product.a_row));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = M::mul_add(*sum, word, column);
                }
            }
            a = a.wrapping_add(product.a_step);
            b = b.add(panel);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                let at = c.add(r * panel + n * lanes);
                match product.factors {
                    None => sum.store(at),
                    Some(factors) => {
                        M::Vector::load(at).mul_add(M::Vector::load(factors.add(n * lanes)), sum).store(at)
                    }
                }
            }
        }
    }
}
