//! The matrix product that both halves of attention and every projection consist of.

use super::vector::{Vector, prefetch_bytes};

/// One product over a panel of columns. Strides and sizes count 32-bit words. B is (depth, panel) and C (rows, panel),
/// both contiguous.
pub struct Product {
    pub a: LeftOperand,
    pub b: *const f32,
    pub c: *mut f32,
    pub rows: usize,
    pub depth: usize,
    /// The vectors of the panel that are computed; the columns beyond are left as they are.
    pub vectors: usize,
    /// A factor for each column of what C held, or nothing if C is to be overwritten.
    pub factors: Option<*const f32>,
    /// Whether B's [`CodeBlocks`] have minimums.
    pub has_minimums: bool,
}

/// (rows, depth) in groups of [`ROWS`](super::Kernel::ROWS) rows, the last of which may be short: row r of group g begins
/// at `at + g · group + r · row`, and its depth follows at steps of `step`.
#[derive(Clone, Copy)]
pub struct LeftOperand {
    pub at: *const f32,
    pub group: usize,
    pub row: usize,
    pub step: usize,
}

impl LeftOperand {
    /// The same rows from another word on.
    #[inline(always)]
    pub fn offset(self, words: usize) -> Self {
        Self { at: self.at.wrapping_add(words), ..self }
    }
}

/// The most columns that a panel of any kernel has.
pub(crate) const MAX_COLUMNS: usize = 64;

/// The steps of depth that share the scales of a panel.
#[derive(Clone, Copy)]
pub struct ColumnBlock {
    /// The first word, of the scales if there are any.
    pub at: *const f32,
    /// The columns of the panel.
    pub panel: usize,
    pub has_minimums: bool,
}

/// How the columns of B are stored. `Product::b` points to them.
pub trait Columns {
    /// The steps of depth that a register holds.
    const STEPS: usize = 1;
    /// The steps of depth that are stored together; the depth of a product is a multiple.
    const BLOCK: usize = Self::STEPS;
    /// Whether the columns are words that are multiplied as they are.
    const IS_WORDS: bool = false;

    /// `STEPS` steps of a vector of columns.
    type Loaded<V: Vector>: Copy;

    /// The address of a block's numbers.
    fn numbers(block: ColumnBlock) -> *const f32 {
        block.at
    }

    /// # Safety
    /// As [`Vector::load`], for `STEPS` steps of the block from a column on.
    unsafe fn load<V: Vector>(b: *const f32, block: ColumnBlock, column: usize) -> Self::Loaded<V>;

    /// The first of the steps that are left.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn take<V: Vector>(loaded: &mut Self::Loaded<V>) -> V;

    /// The address `STEPS` steps on, in a panel of so many columns.
    fn next(b: *const f32, panel: usize) -> *const f32 {
        b.wrapping_add(panel)
    }
}

/// Words as the kernel multiplies them.
pub(crate) struct Words;

impl Columns for Words {
    const IS_WORDS: bool = true;
    type Loaded<V: Vector> = V;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, _: ColumnBlock, column: usize) -> V {
        // SAFETY: the panel holds a vector of words from this column on.
        unsafe { V::load(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V) -> V {
        *loaded
    }
}

/// Pairs of bf16 of neighbouring steps.
pub(crate) struct Bf16Pairs;

impl Columns for Bf16Pairs {
    const STEPS: usize = 2;
    type Loaded<V: Vector> = (V, V);

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, _: ColumnBlock, column: usize) -> (V, V) {
        // SAFETY: the panel holds a vector of pairs from this column on.
        unsafe { V::load_pairs(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut (V, V)) -> V {
        std::mem::replace(&mut loaded.0, loaded.1)
    }
}

/// Rows of f16.
pub(crate) struct F16Rows;

impl Columns for F16Rows {
    type Loaded<V: Vector> = V;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, _: ColumnBlock, column: usize) -> V {
        // SAFETY: the panel holds a vector of f16 from this column on.
        unsafe { V::load_f16(b.cast::<u16>().add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V) -> V {
        *loaded
    }

    #[inline(always)]
    fn next(b: *const f32, panel: usize) -> *const f32 {
        b.cast::<u16>().wrapping_add(panel).cast()
    }
}

/// The inputs of a weight of codes that share a scale and a minimum.
pub const CODE_BLOCK: usize = 32;

/// Blocks of unsigned codes of 4 or 8 bits: the scales of a panel in f16, its minimums in f16 if there are any, and
/// then words of the codes of neighbouring steps, the first one lowest. A number is `code · scale + minimum`, rounded
/// once, where blocks without minimums have `-2^(BITS - 1) · scale` in their place, for codes on both sides of zero.
pub(crate) struct CodeBlocks<const BITS: u32>;

/// Codes of a vector of columns, the next ones lowest.
#[derive(Clone, Copy)]
pub struct LoadedCodes<V> {
    codes: V,
    scale: V,
    minimum: V,
}

impl<const BITS: u32> Columns for CodeBlocks<BITS> {
    const STEPS: usize = 32 / BITS as usize;
    const BLOCK: usize = CODE_BLOCK;
    type Loaded<V: Vector> = LoadedCodes<V>;

    #[inline(always)]
    fn numbers(block: ColumnBlock) -> *const f32 {
        block.at.cast::<u16>().wrapping_add(block.panel << u32::from(block.has_minimums)).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, block: ColumnBlock, column: usize) -> LoadedCodes<V> {
        let scales = block.at.cast::<u16>().wrapping_add(column);
        // SAFETY: the block holds a vector of f16 from this column on, and another one if it has minimums; the panel
        // holds a vector of words.
        unsafe {
            let scale = V::load_f16(scales);
            let minimum = match block.has_minimums {
                true => V::load_f16(scales.add(block.panel)),
                false => scale.mul(V::splat(-((1 << (BITS - 1)) as f32))),
            };
            LoadedCodes { codes: V::load(b.add(column)), scale, minimum }
        }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut LoadedCodes<V>) -> V {
        // SAFETY: the processor has the tier of V.
        unsafe {
            let code;
            (code, loaded.codes) = loaded.codes.take_bits::<BITS>();
            code.mul_add(loaded.scale, loaded.minimum)
        }
    }
}

/// How a tier multiplies two words and adds.
pub(crate) trait MulAdd {
    type Vector: Vector;

    /// `sum + a · b`, over both elements of a word where there are two.
    ///
    /// # Safety
    /// The processor has the tier.
    unsafe fn mul_add(sum: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Adds the products of `R` rows, whose first word is at `a`, with the columns of B to `sums`. A tier writes its
    /// own where the compiler keeps the sums elsewhere than in registers.
    ///
    /// # Safety
    /// The processor has the tier, and the product's pointers are valid for R rows from `a` on.
    #[inline(always)]
    unsafe fn accumulate<B: Columns, const R: usize, const N: usize>(
        sums: &mut [[Self::Vector; N]; R],
        product: &Product,
        a: *const f32,
        panel: usize,
    ) {
        // SAFETY: as this method's contract.
        unsafe { accumulate::<Self, B, R, N>(sums, product, a, panel) }
    }
}

/// Vectors of f32 multiply and add by themselves.
impl<V: Vector> MulAdd for V {
    type Vector = V;

    #[inline(always)]
    unsafe fn mul_add(sum: V, a: V, b: V) -> V {
        // SAFETY: the processor has the tier, by the contract of `MulAdd`.
        unsafe { Vector::mul_add(a, b, sum) }
    }
}

/// How many bytes ahead columns that are narrower than words are prefetched; 4 to 12 KB are alike. The processor's own
/// prefetching falls behind them: one row times 4096² from memory takes 0.54 of the time in bf16 and 0.57 in f16 on a
/// Zen 5 (AVX2: 0.41 and 0.33), and times 1536² from the cache up to 1.14 (`cargo bench --bench linear -- --engines
/// ours`).
const PREFETCH_BYTES: usize = 6 << 10;

/// [`MulAdd::accumulate`] in plain loops.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn accumulate<M: MulAdd + ?Sized, B: Columns, const R: usize, const N: usize>(
    sums: &mut [[M::Vector; N]; R],
    product: &Product,
    mut a: *const f32,
    panel: usize,
) {
    let mut b = product.b;
    for _ in 0..product.depth / B::BLOCK {
        let block = ColumnBlock { at: b, panel, has_minimums: product.has_minimums };
        b = B::numbers(block);
        for _ in 0..B::BLOCK / B::STEPS {
            let next = B::next(b, panel);
            // SAFETY: the processor has the tier; A has R rows of `depth` words from `a` on, and B as many rows of N
            // vectors.
            unsafe {
                if const { !B::IS_WORDS } {
                    let ahead = b.cast::<u8>().wrapping_add(PREFETCH_BYTES);
                    prefetch_bytes::<M::Vector>(ahead, next.addr() - b.addr());
                }
                let mut loaded = load_columns::<M::Vector, B, N>(b, block);
                for _ in 0..B::STEPS {
                    add_products::<M, R, N>(sums, a, product.a.row, &take_columns::<M::Vector, B, N>(&mut loaded));
                    a = a.wrapping_add(product.a.step);
                }
            }
            b = next;
        }
    }
}

/// Adds the products of R words, `row` words apart, and N vectors to the sums.
///
/// # Safety
/// The processor has the tier, and the words are valid.
#[inline(always)]
pub(crate) unsafe fn add_products<M: MulAdd + ?Sized, const R: usize, const N: usize>(
    sums: &mut [[M::Vector; N]; R],
    mut words: *const f32,
    row: usize,
    columns: &[M::Vector; N],
) {
    for sums in sums.iter_mut() {
        // SAFETY: as this function's contract.
        unsafe {
            let word = M::Vector::splat(*words);
            for (sum, &column) in sums.iter_mut().zip(columns.iter()) {
                *sum = M::mul_add(*sum, word, column);
            }
        }
        words = words.wrapping_add(row);
    }
}

/// `STEPS` steps of N vectors of columns.
///
/// # Safety
/// As [`Columns::load`].
#[inline(always)]
unsafe fn load_columns<V: Vector, B: Columns, const N: usize>(b: *const f32, block: ColumnBlock) -> [B::Loaded<V>; N] {
    // SAFETY: as this function's contract.
    unsafe {
        let mut loaded = [B::load::<V>(b, block, 0); N];
        for (n, loaded) in loaded.iter_mut().enumerate().skip(1) {
            *loaded = B::load(b, block, n * V::LANES);
        }
        loaded
    }
}

/// The first of the steps that are left, of each vector.
///
/// # Safety
/// As [`Columns::take`].
#[inline(always)]
unsafe fn take_columns<V: Vector, B: Columns, const N: usize>(loaded: &mut [B::Loaded<V>; N]) -> [V; N] {
    // SAFETY: as this function's contract.
    unsafe {
        let mut columns = [V::splat(0.0); N];
        for (column, loaded) in columns.iter_mut().zip(loaded.iter_mut()) {
            *column = B::take(loaded);
        }
        columns
    }
}

/// [`Kernel::multiply`](super::Kernel::multiply) by multiply-adds in registers, for panels of up to `VECTORS` vectors.
///
/// A tile of `ROWS × VECTORS` sums stays in registers; each step of the depth loads `VECTORS` vectors of B and
/// broadcasts `ROWS` words of A. Three vectors by eight rows are 24 sums, which hide the latency of two multiply-adds a
/// cycle, with 11 loads for 24 multiply-adds.
///
/// # Safety
/// The processor has the tier, and the product's pointers are valid for its sizes.
#[inline(always)]
pub(crate) unsafe fn multiply<M: MulAdd, B: Columns, const ROWS: usize, const VECTORS: usize>(product: &Product) {
    let whole = product.rows / ROWS * ROWS;
    for row in (0..whole).step_by(ROWS) {
        // SAFETY: as this function's contract; `row + ROWS` rows exist.
        unsafe { tile_rows::<M, B, ROWS, VECTORS>(product, row, product.a.at.add(row / ROWS * product.a.group)) };
    }
    if whole < product.rows {
        // SAFETY: as this function's contract.
        unsafe { remaining_rows::<M, B, ROWS, VECTORS>(product) };
    }
}

/// The rows of a product beyond the last whole group, fewer than eight.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(super) unsafe fn remaining_rows<M: MulAdd, B: Columns, const ROWS: usize, const VECTORS: usize>(product: &Product) {
    let (mut row, rest) = (product.rows / ROWS * ROWS, product.rows % ROWS);
    let mut a = product.a.at.wrapping_add(row / ROWS * product.a.group);
    for rows in [4, 2, 1] {
        if rest & rows == 0 {
            continue;
        }
        // SAFETY: as this function's contract; `row + rows` rows exist.
        unsafe {
            match rows {
                4 if const { ROWS > 4 } => tile_rows::<M, B, 4, VECTORS>(product, row, a),
                2 if const { ROWS > 2 } => tile_rows::<M, B, 2, VECTORS>(product, row, a),
                _ => tile_rows::<M, B, 1, VECTORS>(product, row, a),
            }
        }
        (row, a) = (row + rows, a.wrapping_add(rows * product.a.row));
    }
}

/// `R` rows from `row`, whose first word of A is at `a`.
///
/// # Safety
/// As [`multiply`]; the rows exist.
#[inline(always)]
unsafe fn tile_rows<M: MulAdd, B: Columns, const R: usize, const VECTORS: usize>(
    product: &Product,
    row: usize,
    a: *const f32,
) {
    // SAFETY: as this function's contract.
    unsafe {
        match product.vectors {
            1 => tile::<M, B, R, 1, VECTORS>(product, row, a),
            2 if const { VECTORS > 2 } => tile::<M, B, R, 2, VECTORS>(product, row, a),
            _ => tile::<M, B, R, VECTORS, VECTORS>(product, row, a),
        }
    }
}

/// # Safety
/// As [`tile_rows`]; the product has N vectors.
#[inline(always)]
unsafe fn tile<M: MulAdd, B: Columns, const R: usize, const N: usize, const VECTORS: usize>(
    product: &Product,
    row: usize,
    a: *const f32,
) {
    // SAFETY: the processor has the tier; C has R rows of a panel from `row` on, and the factors a panel.
    unsafe {
        let panel = VECTORS * M::Vector::LANES;
        let c = product.c.add(row * panel);
        let mut sums = [[M::Vector::splat(0.0); N]; R];
        M::accumulate::<B, R, N>(&mut sums, product, a, panel);
        store_sums(&sums, product, c, panel);
    }
}

/// Writes the sums of R rows by N vectors to C, or adds what was there times the factors.
///
/// # Safety
/// The processor has the tier; `c` has R rows of a panel, and the factors N vectors.
#[inline(always)]
unsafe fn store_sums<V: Vector, const R: usize, const N: usize>(
    sums: &[[V; N]; R],
    product: &Product,
    mut c: *mut f32,
    panel: usize,
) {
    for sums in sums.iter() {
        for (n, &sum) in sums.iter().enumerate() {
            // SAFETY: as this function's contract.
            unsafe {
                let at = c.add(n * V::LANES);
                match product.factors {
                    None => sum.store(at),
                    Some(factors) => V::load(at).mul_add(V::load(factors.add(n * V::LANES)), sum).store(at),
                }
            }
        }
        c = c.wrapping_add(panel);
    }
}
