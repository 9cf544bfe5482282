//! The formats of the right operand of a product: words, pairs of bf16, f16, and codes with scales.

use super::code_columns::with_code_columns;
use super::kernel::{ColumnBlock, Columns, Vector, WithColumns, WordHalves};
use super::panel::{BF16_PAIR, Format};

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
            Format::Codes(ref format) => with_code_columns(format, work),
        }
    }
}

/// Runs work with the columns of a format that is none of codes.
///
/// # Safety
/// As [`WithColumns::run`].
#[inline(always)]
pub(crate) unsafe fn with_number_columns(format: Format, work: impl WithColumns) {
    // SAFETY: as this function's contract.
    unsafe {
        match format {
            Format::BF16 => work.run::<Bf16Pairs>(),
            Format::F16 => work.run::<F16Rows>(),
            Format::F32 | Format::Codes(_) => work.run::<Words>(),
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
    unsafe fn load<V: Vector>(b: *const f32, column: usize, _: usize, (): &()) -> V {
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
    const HAS_ANY_PANEL: bool = true;
    type Scales<V: Vector> = ();
    type Loaded<V: Vector> = WordHalves<V>;

    #[inline(always)]
    unsafe fn scales<V: Vector>(_: &ColumnBlock, _: usize, _: usize) {}

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize, _: usize, (): &()) -> WordHalves<V> {
        // SAFETY: the panel has a vector of pairs from this column on.
        unsafe { V::load_pairs(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut WordHalves<V>, (): &()) -> V {
        let first = loaded.low;
        loaded.low = loaded.high;
        first
    }
}
