//! The matrix product that both products of attention and every projection consist of.

use std::marker::PhantomData;

use super::functions::prefetch_bytes;
use super::kernel::{ColumnBlock, Columns, Kernel, Pair, SimdTask, Vector};
use super::panel::{BF16_PAIR, CODE_BLOCK, Format, PanelProduct};

/// Rows of numbers of `BYTES` bytes: words as the kernel multiplies them, or f16.
pub(crate) struct NumberRows<const BYTES: usize>;
/// Rows of words, which are multiplied as they are.
pub(crate) type Words = NumberRows<4>;
/// Rows of f16, which are widened while they are loaded.
pub(crate) type F16Rows = NumberRows<2>;

impl<const BYTES: usize> Columns for NumberRows<BYTES> {
    const BYTES: usize = BYTES;
    const IS_WORDS: bool = BYTES == 4;
    type Loaded<V: Vector> = V;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, _: &ColumnBlock, column: usize) -> V {
        // SAFETY: the panel has a vector of words, or of f16, from this column on.
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
    const STEPS: usize = BF16_PAIR;
    type Loaded<V: Vector> = Pair<V>;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, _: &ColumnBlock, column: usize) -> Pair<V> {
        // SAFETY: the panel has a vector of pairs from this column on.
        unsafe { V::load_pairs(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut Pair<V>) -> V {
        let first = loaded.low;
        loaded.low = loaded.high;
        first
    }
}

/// Blocks of codes of 4 or 8 bits. A block has the scales of a panel in f16, its minimums in f16 if it has any, and
/// then words of the codes of neighbouring steps, the first step in the highest bits.
///
/// With minimums, codes are unsigned, and a number is `code · scale + minimum`, rounded once. Without minimums, codes
/// are in two's complement, and a number is `code · scale`. Both are the numbers that GGUF files define, to the bit.
/// With unsigned codes and `code · scale - middle · scale` instead, an infinite scale would lead to NaN, and a negative
/// scale would lose the sign of a zero.
pub(crate) struct CodeBlocks<const BITS: u32, const HAS_MINIMUMS: bool>;

/// The codes of a vector of columns, the next ones highest, with their scale and minimum.
#[derive(Clone, Copy)]
pub struct LoadedCodes<V> {
    codes: V,
    scale: V,
    /// Read only where blocks have minimums.
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
        // SAFETY: the block has a vector of f16 from this column on, and another one if it has minimums; the panel has
        // a vector of words.
        unsafe {
            let codes = V::load(b.add(column));
            let scale = V::load_f16(scales);
            if HAS_MINIMUMS {
                return LoadedCodes { codes, scale, minimum: V::load_f16(scales.add(block.panel)) };
            }
            // Signed codes are multiplied by 2^(32 - BITS). The powers of two change no digit of the product.
            let scale = scale.mul(V::splat(1.0 / (1u32 << (32 - BITS)) as f32));
            LoadedCodes { codes, scale, minimum: scale }
        }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut LoadedCodes<V>) -> V {
        // SAFETY: the processor has the instruction set of V.
        unsafe {
            if HAS_MINIMUMS {
                let code = loaded.codes.take_bits::<BITS, false>();
                loaded.codes = code.rest;
                return code.number.mul_add(loaded.scale, loaded.minimum);
            }
            let code = loaded.codes.take_bits::<BITS, true>();
            loaded.codes = code.rest;
            code.number.mul(loaded.scale)
        }
    }
}

/// The distance in bytes at which columns that are narrower than words are prefetched; 4 to 12 KB are equally fast. The
/// processor's own prefetching falls behind them. Compared with no prefetching, on a Zen 5, one row times a weight of
/// 4096² in memory takes 0.54 of the time in bf16 and 0.57 in f16 (AVX2: 0.41 and 0.33), and one row times a weight of
/// 1536² in the cache up to 1.14 (`cargo bench --bench linear -- --engines ours`).
const PREFETCH_BYTES: usize = 6 << 10;

/// Computes `C = A B`, or `C = C · factors + A B`.
///
/// # Safety
/// The processor has the instruction set of K, its tiles are configured, and the product's pointers are valid for its
/// sizes.
pub(crate) unsafe fn multiply<K: Kernel>(product: &PanelProduct) {
    // SAFETY: as this function's contract.
    unsafe {
        match product.format {
            _ if const { K::IS_BF16 } => run::<K, Words>(product),
            Format::F32 => run::<K, Words>(product),
            Format::BF16 => run::<K, Bf16Pairs>(product),
            Format::F16 => run::<K, F16Rows>(product),
            Format::Codes { bits: 4, has_minimums: false } => run::<K, CodeBlocks<4, false>>(product),
            Format::Codes { bits: 4, has_minimums: true } => run::<K, CodeBlocks<4, true>>(product),
            Format::Codes { has_minimums: false, .. } => run::<K, CodeBlocks<8, false>>(product),
            Format::Codes { has_minimums: true, .. } => run::<K, CodeBlocks<8, true>>(product),
        }
    }
}

/// Computes a product whose right operand has the format B, in a function that is compiled for the instruction set.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn run<K: Kernel, B: Columns>(product: &PanelProduct) {
    // SAFETY: as this function's contract.
    unsafe { K::run_simd(MultiplyPanel::<B> { product, format: PhantomData }) }
}

/// A product as a task, whose right operand has the format B.
struct MultiplyPanel<'a, B> {
    product: &'a PanelProduct,
    format: PhantomData<B>,
}

impl<B: Columns> SimdTask for MultiplyPanel<'_, B> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the product is valid for the kernel, by the contract of `multiply`.
        unsafe { K::multiply_columns::<B>(self.product) }
    }
}

/// Adds the products of some rows of A, whose first word is at `a`, with N vectors of the columns of B to the N sums of
/// each row. The number of rows is a constant of the tile.
///
/// # Safety
/// The processor has the instruction set; A has a row of `depth` words for each row of sums from `a` on, and B has
/// `depth` rows of N vectors.
#[inline(always)]
unsafe fn accumulate<K: Kernel, B: Columns, const N: usize>(
    sums: &mut [[K::Vector; N]],
    product: &PanelProduct,
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
                for (n, vector) in loaded.iter_mut().enumerate().skip(1) {
                    *vector = B::load(b, &block, n * K::Vector::LANES);
                }
                for _ in 0..B::STEPS {
                    let mut columns = [K::Vector::splat(0.0); N];
                    for (column, steps) in columns.iter_mut().zip(loaded.iter_mut()) {
                        *column = B::take(steps);
                    }
                    add_products::<K>(sums.as_flattened_mut(), a, product.a.row, &columns);
                    a = a.wrapping_add(product.a.step);
                }
                b = b.wrapping_byte_add(B::BYTES * K::PANEL);
            }
        }
    }
}

/// Adds the product of each word and each vector of `columns` to a sum. The words are `row` words apart, and the sums
/// of a word are neighbours.
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
    for row_sums in sums.chunks_exact_mut(columns.len()) {
        // SAFETY: as this function's contract.
        unsafe {
            let word = K::Vector::splat(*words);
            for (sum, &column) in row_sums.iter_mut().zip(columns) {
                *sum = K::add_product(*sum, word, column);
            }
        }
        words = words.wrapping_add(row);
    }
}

/// Computes the rows of a product from `row` on, which begins a group, by multiply-adds in registers.
///
/// A tile of `ROWS × VECTORS` sums stays in registers; each step of the depth loads `VECTORS` vectors of B and
/// broadcasts `ROWS` words of A. Three vectors by eight rows are 24 sums, which hide the latency of two multiply-adds a
/// cycle, with 11 loads for 24 multiply-adds.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(super) unsafe fn multiply_rows<K: Kernel, B: Columns>(product: &PanelProduct, mut row: usize) {
    let whole = product.rows / K::ROWS * K::ROWS;
    // SAFETY: as this function's contract; the rows of each tile exist.
    unsafe {
        while row < whole {
            let a = product.a.at.add(row / K::ROWS * product.a.group);
            let c = product.c.add(row * K::PANEL);
            match K::ROWS {
                8 => tile_rows::<K, B, 8>(product, a, c),
                4 => tile_rows::<K, B, 4>(product, a, c),
                _ => tile_rows::<K, B, 2>(product, a, c),
            }
            row += K::ROWS;
        }
        let mut a = product.a.at.wrapping_add(whole / K::ROWS * product.a.group);
        let rest = product.rows - whole;
        // The rest is a sum of these powers of two.
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
            row += rows;
            a = a.wrapping_add(rows * product.a.row);
        }
    }
}

/// Computes `R` rows, the first of which begins at `a` and `c`.
///
/// # Safety
/// As [`multiply_rows`]; the rows exist.
#[inline(always)]
unsafe fn tile_rows<K: Kernel, B: Columns, const R: usize>(product: &PanelProduct, a: *const f32, c: *mut f32) {
    // SAFETY: as this function's contract.
    unsafe {
        match product.vectors {
            1 => tile::<K, B, R, 1>(product, a, c),
            3 if const { K::VECTORS >= 3 } => tile::<K, B, R, 3>(product, a, c),
            _ => tile::<K, B, R, 2>(product, a, c),
        }
    }
}

/// Writes the sums of R rows by N vectors to C, or adds C's numbers times the factors to them first.
///
/// # Safety
/// As [`tile_rows`]; the product has N vectors.
#[inline(always)]
unsafe fn tile<K: Kernel, B: Columns, const R: usize, const N: usize>(
    product: &PanelProduct,
    a: *const f32,
    c: *mut f32,
) {
    // SAFETY: as this function's contract.
    unsafe {
        let mut sums = [[K::Vector::splat(0.0); N]; R];
        accumulate::<K, B, N>(&mut sums, product, a);
        write_sums::<K>(sums.as_flattened(), N, product.factors, c);
    }
}

/// Writes the sums of rows of N vectors to C, as [`tile`] says.
///
/// # Safety
/// The processor has the instruction set; C has a row of a panel for each N sums, and the factors are a panel.
#[inline(always)]
unsafe fn write_sums<K: Kernel>(sums: &[K::Vector], vectors: usize, factors: Option<*const f32>, mut c: *mut f32) {
    for row_sums in sums.chunks_exact(vectors) {
        for (n, &sum) in row_sums.iter().enumerate() {
            // SAFETY: as this function's contract.
            unsafe {
                let at = c.add(n * K::Vector::LANES);
                match factors {
                    None => sum.store(at),
                    Some(factors) => {
                        let factor = K::Vector::load(factors.add(n * K::Vector::LANES));
                        K::Vector::load(at).mul_add(factor, sum).store(at);
                    }
                }
            }
        }
        c = c.wrapping_add(K::PANEL);
    }
}
