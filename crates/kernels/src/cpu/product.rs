//! The matrix product that both halves of attention and every projection consist of.

use std::fmt;
use std::marker::PhantomData;

use half::f16;

use super::instruction_set::{Kernel, SimdTask};
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
    /// How B is stored. Words of two elements are always multiplied as they are.
    pub format: Format,
}

/// (rows, depth) in groups of [`ROWS`](super::Kernel::ROWS) rows, the last of which may be short: row r of group g
/// begins at `at + g · group + r · row`, and its depth follows at steps of `step`.
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

/// The inputs of a weight of codes that share a scale and a minimum.
pub const CODE_BLOCK: usize = 32;

/// How the numbers of a panel are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Format {
    F32,
    /// As pairs of neighbouring steps of the depth, whether the instruction set multiplies them as they are or widens
    /// them: both take one instruction.
    BF16,
    F16,
    /// As [`CodeBlocks`].
    Codes {
        bits: usize,
        has_minimums: bool,
    },
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("F32"),
            Self::BF16 => f.write_str("BF16"),
            Self::F16 => f.write_str("F16"),
            Self::Codes { bits, has_minimums: false } => write!(f, "codes of {bits} bits"),
            Self::Codes { bits, has_minimums: true } => write!(f, "codes of {bits} bits with minimums"),
        }
    }
}

impl Format {
    /// The steps of depth that are stored together.
    pub fn step(self) -> usize {
        match self {
            Self::BF16 => Bf16Pairs::BLOCK,
            Self::F32 | Self::F16 => 1,
            Self::Codes { .. } => CODE_BLOCK,
        }
    }

    /// The bytes of the steps of one column that are stored together.
    fn bytes_together(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::BF16 | Self::F16 => self.step() * size_of::<f16>(),
            Self::Codes { bits, has_minimums } => {
                let scales = size_of::<f16>() << u32::from(has_minimums);
                scales + CODE_BLOCK * bits / 8
            }
        }
    }

    /// The bytes of `depth` steps of one column, a multiple of [`step`](Self::step) in a panel that is in memory.
    pub fn bytes(self, depth: usize) -> usize {
        depth / self.step() * self.bytes_together()
    }

    /// [`bytes`](Self::bytes) of a depth of any size, or `None` if a `usize` cannot count them.
    pub fn checked_bytes(self, depth: usize) -> Option<usize> {
        (depth / self.step()).checked_mul(self.bytes_together())
    }
}

/// The steps of depth that share the scales of a panel.
#[derive(Clone, Copy)]
pub struct ColumnBlock {
    /// The first word, of the scales if there are any.
    pub at: *const f32,
    /// The columns of the panel.
    pub panel: usize,
}

/// How the columns of B are stored.
pub trait Columns {
    /// The steps of depth that a register holds.
    const STEPS: usize = 1;
    /// The steps of depth that are stored together; the depth of a product is a multiple.
    const BLOCK: usize = Self::STEPS;
    /// The bytes that these steps take of a column.
    const BYTES: usize = size_of::<f32>();
    /// Whether the columns are words that are multiplied as they are.
    const IS_WORDS: bool = false;

    /// The address of a block's numbers.
    fn numbers(block: &ColumnBlock) -> *const f32 {
        block.at
    }

    /// `STEPS` steps of a vector of columns.
    type Loaded<V: Vector>: Copy;

    /// # Safety
    /// As [`Vector::load`], for `STEPS` steps of the block from a column on.
    unsafe fn load<V: Vector>(b: *const f32, block: &ColumnBlock, column: usize) -> Self::Loaded<V>;

    /// The first of the steps that are left.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn take<V: Vector>(loaded: &mut Self::Loaded<V>) -> V;
}

/// Rows of numbers of so many bytes: words as the kernel multiplies them, or f16.
pub(crate) struct Rows<const BYTES: usize>;
pub(crate) type Words = Rows<4>;
pub(crate) type F16Rows = Rows<2>;

impl<const BYTES: usize> Columns for Rows<BYTES> {
    const BYTES: usize = BYTES;
    const IS_WORDS: bool = BYTES == 4;
    type Loaded<V: Vector> = V;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, _: &ColumnBlock, column: usize) -> V {
        // SAFETY: the panel holds a vector of words, or of f16, from this column on.
        unsafe { if Self::IS_WORDS { V::load(b.add(column)) } else { V::load_f16(b.cast::<u16>().add(column)) } }
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
    unsafe fn load<V: Vector>(b: *const f32, _: &ColumnBlock, column: usize) -> (V, V) {
        // SAFETY: the panel holds a vector of pairs from this column on.
        unsafe { V::load_pairs(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut (V, V)) -> V {
        std::mem::replace(&mut loaded.0, loaded.1)
    }
}

/// Blocks of codes of 4 or 8 bits: the scales of a panel in f16, its minimums in f16 if it has any, and then words of
/// the codes of neighbouring steps, the first one highest. With minimums codes are unsigned, and a number is
/// `code · scale + minimum`, rounded once. Without them codes are in two's complement, and a number is `code · scale`.
/// These are the numbers, to the bit, that GGUF files define: of an infinite scale `code · scale - middle · scale` would
/// be NaN, and of a negative scale it would lose the sign of a zero.
pub(crate) struct CodeBlocks<const BITS: u32, const HAS_MINIMUMS: bool>;

/// Codes of a vector of columns, the next ones highest.
#[derive(Clone, Copy)]
pub struct LoadedCodes<V> {
    codes: V,
    scale: V,
    /// Not read where blocks have no minimums.
    minimum: V,
}

impl<const BITS: u32, const HAS_MINIMUMS: bool> Columns for CodeBlocks<BITS, HAS_MINIMUMS> {
    const STEPS: usize = 32 / BITS as usize;
    const BLOCK: usize = CODE_BLOCK;
    type Loaded<V: Vector> = LoadedCodes<V>;

    #[inline(always)]
    fn numbers(block: &ColumnBlock) -> *const f32 {
        block.at.cast::<u16>().wrapping_add(block.panel << u32::from(HAS_MINIMUMS)).cast()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, block: &ColumnBlock, column: usize) -> LoadedCodes<V> {
        let scales = block.at.cast::<u16>().wrapping_add(column);
        // SAFETY: the block holds a vector of f16 from this column on, and another one if it has minimums; the panel
        // holds a vector of words.
        unsafe {
            let scale = V::load_f16(scales);
            let minimum = if HAS_MINIMUMS { V::load_f16(scales.add(block.panel)) } else { scale };
            LoadedCodes { codes: V::load(b.add(column)), scale, minimum }
        }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut LoadedCodes<V>) -> V {
        // SAFETY: the processor has the instruction set of V.
        unsafe {
            if HAS_MINIMUMS {
                let (code, rest) = loaded.codes.take_bits::<BITS, false>();
                loaded.codes = rest;
                return code.mul_add(loaded.scale, loaded.minimum);
            }
            let (code, rest) = loaded.codes.take_bits::<BITS, true>();
            loaded.codes = rest;
            code.mul(loaded.scale)
        }
    }
}

/// How many bytes ahead columns that are narrower than words are prefetched; 4 to 12 KB are alike. The processor's own
/// prefetching falls behind them: one row times 4096² from memory takes 0.54 of the time in bf16 and 0.57 in f16 on a
/// Zen 5 (AVX2: 0.41 and 0.33), and times 1536² from the cache up to 1.14 (`cargo bench --bench linear -- --engines
/// ours`).
const PREFETCH_BYTES: usize = 6 << 10;

/// A product as a task of a kernel, with B stored as its parameter says.
pub(super) struct Multiply<'a, B>(pub &'a Product, pub PhantomData<B>);

impl<B: Columns> SimdTask for Multiply<'_, B> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the product is valid for the kernel, by the contract of `Kernel::multiply`.
        unsafe { K::multiply_columns::<B>(self.0) }
    }
}

/// Adds the products of some rows of A, whose first word is at `a`, with N vectors of the columns of B to the N sums of
/// each row, of which a tile knows how many there are.
///
/// # Safety
/// The processor has the instruction set; A has a row of `depth` words for each row of sums from `a` on, and B as many
/// rows of N vectors.
#[inline(always)]
unsafe fn accumulate<K: Kernel, B: Columns, const N: usize>(
    sums: &mut [[K::Vector; N]],
    product: &Product,
    mut a: *const f32,
) {
    // SAFETY: as this function's contract.
    unsafe {
        if const { B::IS_WORDS } && K::accumulate_words(sums.as_flattened_mut(), product, a) {
            return;
        }
        let mut b = product.b;
        for _ in 0..product.depth / B::BLOCK {
            let block = ColumnBlock { at: b, panel: K::PANEL };
            b = B::numbers(&block);
            for _ in 0..B::BLOCK / B::STEPS {
                if const { !B::IS_WORDS } {
                    prefetch_bytes::<K::Vector>(b.cast::<u8>().wrapping_add(PREFETCH_BYTES), B::BYTES * K::PANEL);
                }
                let mut loaded = [B::load(b, &block, 0); N];
                for (n, loaded) in loaded.iter_mut().enumerate().skip(1) {
                    *loaded = B::load(b, &block, n * K::Vector::LANES);
                }
                for _ in 0..B::STEPS {
                    let mut columns = [K::Vector::splat(0.0); N];
                    for (column, loaded) in columns.iter_mut().zip(loaded.iter_mut()) {
                        *column = B::take(loaded);
                    }
                    add_products::<K>(sums.as_flattened_mut(), a, product.a.row, &columns);
                    a = a.wrapping_add(product.a.step);
                }
                b = b.wrapping_byte_add(B::BYTES * K::PANEL);
            }
        }
    }
}

/// Adds the products of words, `row` words apart, and vectors to as many sums for each word.
///
/// # Safety
/// The processor has the instruction set, and the words are valid.
#[inline(always)]
pub(crate) unsafe fn add_products<K: Kernel>(
    sums: &mut [K::Vector],
    mut words: *const f32,
    row: usize,
    columns: &[K::Vector],
) {
    for sums in sums.chunks_exact_mut(columns.len()) {
        // SAFETY: as this function's contract.
        unsafe {
            let word = K::Vector::splat(*words);
            for (sum, &column) in sums.iter_mut().zip(columns) {
                *sum = K::add_product(*sum, word, column);
            }
        }
        words = words.wrapping_add(row);
    }
}

/// [`Kernel::multiply`] by multiply-adds in registers, of the rows from one on that begins a group.
///
/// A tile of `ROWS × VECTORS` sums stays in registers; each step of the depth loads `VECTORS` vectors of B and
/// broadcasts `ROWS` words of A. Three vectors by eight rows are 24 sums, which hide the latency of two multiply-adds a
/// cycle, with 11 loads for 24 multiply-adds.
///
/// # Safety
/// As [`Kernel::multiply`].
#[inline(always)]
pub(super) unsafe fn multiply_rows<K: Kernel, B: Columns>(product: &Product, mut row: usize) {
    let whole = product.rows / K::ROWS * K::ROWS;
    // SAFETY: as this function's contract; the rows of each tile exist.
    unsafe {
        while row < whole {
            let (a, c) = (product.a.at.add(row / K::ROWS * product.a.group), product.c.add(row * K::PANEL));
            match K::ROWS {
                8 => tile_rows::<K, B, 8>(product, a, c),
                4 => tile_rows::<K, B, 4>(product, a, c),
                _ => tile_rows::<K, B, 2>(product, a, c),
            }
            row += K::ROWS;
        }
        let (mut a, rest) = (product.a.at.wrapping_add(whole / K::ROWS * product.a.group), product.rows - whole);
        for rows in [4, 2, 1] {
            if rest & rows == 0 {
                continue;
            }
            let c = product.c.add(row * K::PANEL);
            match rows {
                4 if const { K::ROWS > 4 } => tile_rows::<K, B, 4>(product, a, c),
                2 if const { K::ROWS > 2 } => tile_rows::<K, B, 2>(product, a, c),
                _ => tile_rows::<K, B, 1>(product, a, c),
            }
            (row, a) = (row + rows, a.wrapping_add(rows * product.a.row));
        }
    }
}

/// `R` rows, the first of which begins at `a` and `c`.
///
/// # Safety
/// As [`multiply_rows`]; the rows exist.
#[inline(always)]
unsafe fn tile_rows<K: Kernel, B: Columns, const R: usize>(product: &Product, a: *const f32, c: *mut f32) {
    // SAFETY: as this function's contract.
    unsafe {
        match product.vectors {
            1 => tile::<K, B, R, 1>(product, a, c),
            3 if const { K::VECTORS >= 3 } => tile::<K, B, R, 3>(product, a, c),
            _ => tile::<K, B, R, 2>(product, a, c),
        }
    }
}

/// Writes the sums of R rows by N vectors to C, or adds what was there times the factors.
///
/// # Safety
/// As [`tile_rows`]; the product has N vectors.
#[inline(always)]
unsafe fn tile<K: Kernel, B: Columns, const R: usize, const N: usize>(product: &Product, a: *const f32, c: *mut f32) {
    // SAFETY: as this function's contract.
    unsafe {
        let mut sums = [[K::Vector::splat(0.0); N]; R];
        accumulate::<K, B, N>(&mut sums, product, a);
        write_sums::<K>(sums.as_flattened(), N, product.factors, c);
    }
}

/// # Safety
/// The processor has the instruction set; C has a row of a panel for each N sums, and the factors are a panel.
#[inline(always)]
unsafe fn write_sums<K: Kernel>(sums: &[K::Vector], n: usize, factors: Option<*const f32>, mut c: *mut f32) {
    for sums in sums.chunks_exact(n) {
        for (n, &sum) in sums.iter().enumerate() {
            // SAFETY: as this function's contract.
            unsafe {
                let at = c.add(n * K::Vector::LANES);
                match factors {
                    None => sum.store(at),
                    Some(factors) => {
                        let factors = K::Vector::load(factors.add(n * K::Vector::LANES));
                        K::Vector::load(at).mul_add(factors, sum).store(at);
                    }
                }
            }
        }
        c = c.wrapping_add(K::PANEL);
    }
}
