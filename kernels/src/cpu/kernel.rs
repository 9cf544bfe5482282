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
    /// The rows of a group of A, which a tile takes at once.
    const ROWS: usize;
    /// The rows of A and C come in multiples of this; what is left of a group takes smaller tiles.
    const LEAST_ROWS: usize = 1;
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

    /// The same over a B of narrower elements, which are widened on their way. Only where a word is one element.
    unsafe fn multiply_narrow<N: Narrow>(product: &Product);
}

/// Columns of B in half precision. `Product::b` points to them.
pub(crate) trait Narrow {
    /// The steps of depth that lie together; the depth of a product is a multiple.
    const STEPS: usize;
    /// Whether the columns are f32 as they are.
    const IS_WIDE: bool = false;

    /// The vectors of `STEPS` steps that begin at a column.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> [V; 2];

    /// What lies `STEPS` steps on, in a panel of so many columns.
    fn next(b: *const f32, panel: usize) -> *const f32;
}

/// f32 as it is.
struct Wide;

impl Narrow for Wide {
    const STEPS: usize = 1;
    const IS_WIDE: bool = true;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> [V; 2] {
        // SAFETY: the caller's promise.
        let only = unsafe { V::load(b.add(column)) };
        [only, only]
    }

    #[inline(always)]
    fn next(b: *const f32, panel: usize) -> *const f32 {
        b.wrapping_add(panel)
    }
}

/// Pairs of bf16 of neighbouring steps.
pub(crate) struct Bf16Pairs;

impl Narrow for Bf16Pairs {
    const STEPS: usize = 2;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> [V; 2] {
        // SAFETY: the caller's promise.
        unsafe { V::load_pairs(b.add(column)).into() }
    }

    #[inline(always)]
    fn next(b: *const f32, panel: usize) -> *const f32 {
        b.wrapping_add(panel)
    }
}

/// Rows of f16.
pub(crate) struct F16Rows;

impl Narrow for F16Rows {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> [V; 2] {
        // SAFETY: the caller's promise.
        let only = unsafe { V::load_f16(b.cast::<u16>().add(column)) };
        [only, only]
    }

    #[inline(always)]
    fn next(b: *const f32, panel: usize) -> *const f32 {
        b.cast::<u16>().wrapping_add(panel).cast()
    }
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
/// A is (rows, depth) in groups of [`ROWS`](Kernel::ROWS) rows, the last of which may be short: row r of group g begins at `a + g · a_group + r · a_row`, and
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

    /// Adds the products of `R` rows, whose first word is at `a`, with the columns of B to `sums`. A tier writes its own
    /// where the compiler keeps the sums elsewhere than in registers.
    ///
    /// # Safety
    /// As [`Kernel::multiply`].
    #[inline(always)]
    unsafe fn accumulate<B: Narrow, const R: usize, const N: usize>(
        sums: &mut [[Self::Vector; N]; R],
        product: &Product,
        a: *const f32,
        panel: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe { accumulate::<Self, B, R, N>(sums, product, a, panel) }
    }
}

/// From so many rows on, a step of the depth takes longer than its columns take from memory, and what the processor fetches
/// by itself falls behind: asking for narrow columns made eight rows of f16 1.35 times as fast on a Zen 4, and one row from
/// the cache slower by a tenth (`cargo bench --bench linear -- --engines ours --dtype f16`).
const WORTH_ASKING: usize = 4;

/// The bytes of columns ahead that are asked for; 4 to 12 KB are alike.
const AHEAD: usize = 6 << 10;

/// [`MulAdd::accumulate`] in plain loops.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn accumulate<M: MulAdd + ?Sized, B: Narrow, const R: usize, const N: usize>(
    sums: &mut [[M::Vector; N]; R],
    product: &Product,
    mut a: *const f32,
    panel: usize,
) {
    let mut b = product.b;
    for _ in 0..product.depth / B::STEPS {
        let next = B::next(b, panel);
        // SAFETY: the caller's promise.
        unsafe {
            if !B::IS_WIDE && R >= WORTH_ASKING {
                for line in (0..next.addr() - b.addr()).step_by(64) {
                    M::Vector::prefetch(b.cast::<u8>().wrapping_add(AHEAD + line));
                }
            }
            let mut columns = [[M::Vector::splat(0.0); 2]; N];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = B::load(b, n * M::Vector::LANES);
            }
            for step in 0..B::STEPS {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let word = M::Vector::splat(*a.wrapping_add(r * product.a_row));
                    for (sum, column) in sums.iter_mut().zip(&columns) {
                        *sum = M::mul_add(*sum, word, column[step]);
                    }
                }
                a = a.wrapping_add(product.a_step);
            }
        }
        b = next;
    }
}

/// [`Kernel::multiply`] by multiply-adds in registers, for panels of up to `VECTORS` vectors.
///
/// A tile of `ROWS × VECTORS` sums stays in registers; each step of the depth loads `VECTORS` vectors of B and broadcasts
/// `ROWS` words of A. Three vectors by eight rows are 24 sums, which hide the latency of two multiply-adds a cycle,
/// with 11 loads for 24 multiply-adds.
///
/// # Safety
/// As [`Kernel`]; the pointers are valid for what [`Product`] says of them.
#[inline(always)]
pub(crate) unsafe fn multiply<M: MulAdd, const ROWS: usize, const VECTORS: usize>(product: &Product) {
    // SAFETY: the caller's promise.
    unsafe { multiply_columns::<M, Wide, ROWS, VECTORS>(product) }
}

/// [`multiply`], and [`Kernel::multiply_narrow`].
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(crate) unsafe fn multiply_columns<M: MulAdd, B: Narrow, const ROWS: usize, const VECTORS: usize>(
    product: &Product,
) {
    let whole = product.rows / ROWS * ROWS;
    for row in (0..whole).step_by(ROWS) {
        // SAFETY: the caller's promise; `row + ROWS` rows exist.
        unsafe { tile_of::<M, B, ROWS, VECTORS>(product, row, product.a.add(row / ROWS * product.a_group)) };
    }
    if whole < product.rows {
        // SAFETY: the caller's promise.
        unsafe { rest_of::<M, B, ROWS, VECTORS>(product) };
    }
}

/// The rows of a product beyond the last whole group, fewer than eight.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
#[cfg_attr(not(target_arch = "aarch64"), expect(dead_code, reason = "the other tiers' tiles are all made here"))]
pub(crate) unsafe fn rest<M: MulAdd, const ROWS: usize, const VECTORS: usize>(product: &Product) {
    // SAFETY: the caller's promise.
    unsafe { rest_of::<M, Wide, ROWS, VECTORS>(product) }
}

#[inline(always)]
unsafe fn rest_of<M: MulAdd, B: Narrow, const ROWS: usize, const VECTORS: usize>(product: &Product) {
    let (mut row, rest) = (product.rows / ROWS * ROWS, product.rows % ROWS);
    let mut a = product.a.wrapping_add(row / ROWS * product.a_group);
    for rows in [4, 2, 1] {
        if rest & rows == 0 {
            continue;
        }
        // SAFETY: the caller's promise; `row + rows` rows exist.
        unsafe {
            match rows {
                4 => tile_of::<M, B, 4, VECTORS>(product, row, a),
                2 => tile_of::<M, B, 2, VECTORS>(product, row, a),
                _ => tile_of::<M, B, 1, VECTORS>(product, row, a),
            }
        }
        (row, a) = (row + rows, a.wrapping_add(rows * product.a_row));
    }
}

#[inline(always)]
unsafe fn tile_of<M: MulAdd, B: Narrow, const R: usize, const VECTORS: usize>(
    product: &Product,
    row: usize,
    a: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match product.vectors {
            1 => tile::<M, B, R, 1>(product, (row, a), VECTORS),
            2 if VECTORS >= 2 => tile::<M, B, R, 2>(product, (row, a), VECTORS),
            _ => tile::<M, B, R, VECTORS>(product, (row, a), VECTORS),
        }
    }
}

/// `R` rows from `row`, whose first word of A is at `a`.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn tile<M: MulAdd, B: Narrow, const R: usize, const N: usize>(
    product: &Product,
    (row, a): (usize, *const f32),
    vectors: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = M::Vector::LANES;
        let panel = vectors * lanes;
        let c = product.c.add(row * panel);
        let mut sums = [[M::Vector::splat(0.0); N]; R];
        M::accumulate::<B, R, N>(&mut sums, product, a, panel);
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
