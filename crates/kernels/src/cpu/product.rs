//! The matrix product that both products of attention and every projection consist of.

use std::marker::PhantomData;

use super::columns::{Words, with_columns};
use super::functions::prefetch_bytes;
use super::kernel::{ColumnBlock, Columns, Kernel, SimdTask, Vector, WithColumns, is_of_others};
use super::panel::{NextBytes, PanelProduct};

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
        if const { K::IS_BF16 } {
            multiply_words::<K>(product);
        } else {
            with_columns(product.b.format, MultiplyFormat::<K> { product, kernel: PhantomData });
        }
    }
}

/// Computes a product as [`multiply`] does, whose right operand is known to be words of the kernel's elements.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(crate) unsafe fn multiply_words<K: Kernel>(product: &PanelProduct) {
    // SAFETY: as this function's contract.
    unsafe { K::run_simd(MultiplyPanel::<Words> { product, format: PhantomData }) }
}

/// A product that waits for the format of its right operand.
struct MultiplyFormat<'a, K> {
    product: &'a PanelProduct,
    kernel: PhantomData<K>,
}

impl<K: Kernel> WithColumns for MultiplyFormat<'_, K> {
    #[inline(always)]
    unsafe fn run<B: Columns>(self) {
        if const { is_of_others::<B, K::Vector>() } {
            unreachable!("weights have other formats on this instruction set");
        }
        // SAFETY: the product is valid for the kernel, by the contract of `multiply`.
        unsafe { K::run_simd(MultiplyPanel::<B> { product: self.product, format: PhantomData }) }
    }
}

/// A product as a task, whose right operand has the format B.
struct MultiplyPanel<'a, B> {
    product: &'a PanelProduct,
    format: PhantomData<B>,
}

impl<B: Columns> SimdTask for MultiplyPanel<'_, B> {
    type Output = ();

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
        let panel = if const { B::HAS_ANY_PANEL } { product.b.panel } else { K::PANEL };
        let mut b = product.b.at;
        for _ in 0..product.depth / B::BLOCK {
            let block = ColumnBlock { at: b, panel, format: &product.b.format };
            let group = B::group(&block);
            b = B::numbers(&block);
            for group_index in 0..B::BLOCK / group {
                let mut scales = [B::scales(&block, group_index, 0); N];
                for (n, vector) in scales.iter_mut().enumerate().skip(1) {
                    *vector = B::scales(&block, group_index, n * K::Vector::LANES);
                }
                for _ in 0..group / B::STEPS {
                    if const { !B::IS_WORDS } {
                        prefetch_bytes::<K::Vector>(b.cast::<u8>().wrapping_add(PREFETCH_BYTES), B::BYTES * panel);
                    }
                    let mut loaded = [B::load(b, 0, panel, &scales[0]); N];
                    for (n, vector) in loaded.iter_mut().enumerate().skip(1) {
                        *vector = B::load(b, n * K::Vector::LANES, panel, &scales[n]);
                    }
                    for _ in 0..B::STEPS {
                        let mut columns = [K::Vector::splat(0.0); N];
                        for ((column, steps), own) in columns.iter_mut().zip(&mut loaded).zip(&scales) {
                            *column = B::take(steps, own);
                        }
                        add_products::<K>(sums.as_flattened_mut(), a, product.a.row, &columns);
                        a = a.wrapping_add(product.a.step);
                    }
                    b = b.wrapping_byte_add(B::BYTES * panel);
                }
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
    let groups = product.rows.div_ceil(K::ROWS).max(1);
    // SAFETY: as this function's contract; the rows of each tile exist.
    unsafe {
        while row < whole {
            // The next product would wait for its columns, since it takes them all while it computes its first rows.
            let NextBytes { at, count } = product.next.part(row / K::ROWS, groups);
            prefetch_bytes::<K::Vector>(at, count);
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
            _ if const { B::HAS_WHOLE_PANELS && K::VECTORS == 3 } => tile::<K, B, R, 3>(product, a, c),
            _ if const { B::HAS_WHOLE_PANELS } => tile::<K, B, R, 2>(product, a, c),
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
