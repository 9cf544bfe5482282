//! The formats of the right operand of a product: words, pairs of bf16, f16, and codes with scales.

use std::marker::PhantomData;

use super::kernel::{ColumnBlock, Columns, Pair, Vector};
use super::panel::{BF16_PAIR, CODE_BLOCK, CodeFormat, Format, NESTED_BLOCK, ScaleFormat};

/// Work that is written once and compiled for each format of columns.
pub(crate) trait WithColumns {
    /// Runs the work.
    ///
    /// # Safety
    /// The columns have the format B.
    unsafe fn run<B: Columns>(self);
}

/// Runs work with the columns of a format.
///
/// # Safety
/// As [`WithColumns::run`].
#[inline(always)]
pub(crate) unsafe fn with_columns(format: Format, work: impl WithColumns) {
    // SAFETY: as this function's contract.
    unsafe {
        match format {
            Format::F32 => work.run::<Words>(),
            Format::BF16 => work.run::<Bf16Pairs>(),
            Format::F16 => work.run::<F16Rows>(),
            Format::Codes(CodeFormat { bits, has_minimums, scales: ScaleFormat::F16 }) => {
                with_codes::<HalfScales>(bits, has_minimums, work);
            }
            Format::Codes(CodeFormat { bits, has_minimums, scales: ScaleFormat::Nested { .. } }) => {
                with_codes::<NestedScales>(bits, has_minimums, work);
            }
        }
    }
}

/// Runs work with codes of 4 or 8 bits.
///
/// # Safety
/// As [`WithColumns::run`].
#[inline(always)]
unsafe fn with_codes<S: BlockScales>(bits: usize, has_minimums: bool, work: impl WithColumns) {
    // SAFETY: as this function's contract.
    unsafe {
        match (bits, has_minimums) {
            (4, false) => work.run::<CodeBlocks<4, false, S>>(),
            (4, true) => work.run::<CodeBlocks<4, true, S>>(),
            (_, false) => work.run::<CodeBlocks<8, false, S>>(),
            (_, true) => work.run::<CodeBlocks<8, true, S>>(),
        }
    }
}

/// Rows of numbers of `BYTES` bytes: words as the kernel multiplies them, or f16.
pub(crate) struct NumberRows<const BYTES: usize>;
/// Rows of words, which are multiplied as they are.
pub(crate) type Words = NumberRows<4>;
/// Rows of f16, which are widened while they are loaded.
pub(crate) type F16Rows = NumberRows<2>;

impl<const BYTES: usize> Columns for NumberRows<BYTES> {
    const BYTES: usize = BYTES;
    const IS_WORDS: bool = BYTES == 4;
    type Scales<V: Vector> = ();
    type Loaded<V: Vector> = V;

    #[inline(always)]
    unsafe fn scales<V: Vector>(_: &ColumnBlock, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> V {
        // SAFETY: the panel has a vector of words, or of f16, from this column on.
        unsafe { if Self::IS_WORDS { V::load(b.add(column)) } else { V::load_f16(b.cast::<u16>().add(column)) } }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, (): &()) -> V {
        *loaded
    }
}

/// Pairs of bf16 of neighbouring steps.
pub(crate) struct Bf16Pairs;

impl Columns for Bf16Pairs {
    const STEPS: usize = BF16_PAIR;
    type Scales<V: Vector> = ();
    type Loaded<V: Vector> = Pair<V>;

    #[inline(always)]
    unsafe fn scales<V: Vector>(_: &ColumnBlock, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> Pair<V> {
        // SAFETY: the panel has a vector of pairs from this column on.
        unsafe { V::load_pairs(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut Pair<V>, (): &()) -> V {
        let first = loaded.low;
        loaded.low = loaded.high;
        first
    }
}

/// The scale and the minimum of a vector of columns.
#[derive(Clone, Copy)]
pub struct CodeScales<V> {
    scale: V,
    /// Read only where blocks have minimums.
    minimum: V,
}

/// Blocks of codes of 4 or 8 bits, with scales in the format S. A block has the scales of a panel, its minimums if it
/// has any, and then words of the codes of neighbouring steps, the first step in the highest bits.
pub(crate) struct CodeBlocks<const BITS: u32, const HAS_MINIMUMS: bool, S>(PhantomData<S>);

/// A format of the scales of codes.
pub(crate) trait BlockScales {
    /// The steps of depth of a block.
    const BLOCK: usize;

    /// Returns the format of the scales of a block.
    fn format(block: &ColumnBlock) -> ScaleFormat;

    /// Returns the steps of a block whose scales are loaded together. A word has `steps` of them.
    fn group(block: &ColumnBlock, steps: usize) -> usize;

    /// Loads the scales of a group of steps, and the minimums if there are any, of a vector of columns from a column
    /// on.
    ///
    /// # Safety
    /// As [`Columns::scales`].
    unsafe fn load<V: Vector, const HAS_MINIMUMS: bool>(
        block: &ColumnBlock,
        group: usize,
        column: usize,
    ) -> CodeScales<V>;
}

impl<const BITS: u32, const HAS_MINIMUMS: bool, S: BlockScales> Columns for CodeBlocks<BITS, HAS_MINIMUMS, S> {
    const STEPS: usize = 32 / BITS as usize;
    const BLOCK: usize = S::BLOCK;
    type Scales<V: Vector> = CodeScales<V>;
    type Loaded<V: Vector> = V;

    #[inline(always)]
    fn numbers(block: &ColumnBlock) -> *const f32 {
        let format = CodeFormat { bits: BITS as usize, has_minimums: HAS_MINIMUMS, scales: S::format(block) };
        block.at.wrapping_byte_add(format.bytes_before_codes() * block.panel)
    }

    #[inline(always)]
    fn group(block: &ColumnBlock) -> usize {
        S::group(block, Self::STEPS)
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: &ColumnBlock, group: usize, column: usize) -> CodeScales<V> {
        // SAFETY: as this method's contract.
        unsafe {
            let loaded = S::load::<V, HAS_MINIMUMS>(block, group, column);
            if HAS_MINIMUMS {
                return loaded;
            }
            // Signed codes are multiplied by 2^(32 - BITS). The powers of two change no digit of the product.
            CodeScales { scale: loaded.scale.mul(V::splat(1.0 / (1u32 << (32 - BITS)) as f32)), ..loaded }
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize) -> V {
        // SAFETY: the panel has a vector of words from this column on.
        unsafe { V::load(b.add(column)) }
    }

    /// Takes the highest code of each word.
    ///
    /// With minimums, codes are unsigned, and a number is `code · scale + minimum`, rounded once. Without minimums,
    /// codes are in two's complement, and a number is `code · scale`. Both are the numbers that GGUF files define, to
    /// the bit. With unsigned codes and `code · scale - middle · scale` instead, an infinite scale would lead to NaN,
    /// and a negative scale would lose the sign of a zero.
    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: the processor has the instruction set of V.
        unsafe {
            if HAS_MINIMUMS {
                let code = loaded.take_bits::<BITS, false>();
                *loaded = code.rest;
                return code.number.mul_add(scales.scale, scales.minimum);
            }
            let code = loaded.take_bits::<BITS, true>();
            *loaded = code.rest;
            code.number.mul(scales.scale)
        }
    }
}

/// Scales and minimums in f16, one of each for a block.
pub(crate) struct HalfScales;

impl BlockScales for HalfScales {
    const BLOCK: usize = CODE_BLOCK;

    #[inline(always)]
    fn format(_: &ColumnBlock) -> ScaleFormat {
        ScaleFormat::F16
    }

    /// Returns one word, so that its scales are loaded next to it: one row is slower if they stay in registers.
    #[inline(always)]
    fn group(_: &ColumnBlock, steps: usize) -> usize {
        steps
    }

    #[inline(always)]
    unsafe fn load<V: Vector, const HAS_MINIMUMS: bool>(block: &ColumnBlock, _: usize, column: usize) -> CodeScales<V> {
        let scales = block.at.cast::<u16>().wrapping_add(column);
        // SAFETY: the block has a vector of f16 from this column on, and another one if it has minimums.
        unsafe {
            let scale = V::load_f16(scales);
            CodeScales { scale, minimum: if HAS_MINIMUMS { V::load_f16(scales.add(block.panel)) } else { scale } }
        }
    }
}

/// Scales and minimums of 8 bits for groups of 16 or 32 steps. A block has the factors of a panel in f16, the factors
/// of its minimums in f16 if it has any, the scales of a panel in 8 bits for each group, and its minimums in 8 bits for
/// each group if it has any.
///
/// The scale of a group is its factor times its scale of 8 bits, which is unsigned with minimums; without minimums, 128
/// is subtracted first. A product of 11 and 8 bits is exact, and so is the product with a code of 4 or 5 bits.
pub(crate) struct NestedScales;

impl BlockScales for NestedScales {
    const BLOCK: usize = NESTED_BLOCK;

    #[inline(always)]
    fn format(block: &ColumnBlock) -> ScaleFormat {
        ScaleFormat::Nested { group: Self::group(block, 0) }
    }

    #[inline(always)]
    fn group(block: &ColumnBlock, _: usize) -> usize {
        match block.format {
            Format::Codes(CodeFormat { scales: ScaleFormat::Nested { group: 16 }, .. }) => 16,
            _ => 32,
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector, const HAS_MINIMUMS: bool>(
        block: &ColumnBlock,
        group: usize,
        column: usize,
    ) -> CodeScales<V> {
        let kinds = if HAS_MINIMUMS { 2 } else { 1 };
        let factors = block.at.cast::<u16>();
        let scales = factors.wrapping_add(kinds * block.panel).cast::<u8>();
        let at = group * block.panel + column;
        // SAFETY: the block has a vector of factors and of scales from this column on, and others if it has minimums.
        unsafe {
            let factor = V::load_f16(factors.add(column));
            let number = V::load_u8(scales.add(at));
            if HAS_MINIMUMS {
                let minimums = scales.add(NESTED_BLOCK / Self::group(block, 0) * block.panel);
                let minimum_factor = V::load_f16(factors.add(block.panel + column));
                let minimum = minimum_factor.mul(V::load_u8(minimums.add(at)));
                return CodeScales { scale: factor.mul(number), minimum };
            }
            let scale = factor.mul(number.sub(V::splat(128.0)));
            CodeScales { scale, minimum: scale }
        }
    }
}
