//! Codes with scales as the right operand of a product.
//!
//! A block of a panel is the scales of its columns, then their minimums or zeros if there are any, and then words of
//! the codes of neighbouring steps, the first step in the highest bits. Where a block has several groups, each kind of
//! number is (groups, panel).

use std::marker::PhantomData;

use super::code_format::{CodeFormat, CodeValues, E4M3_SHIFT, E5M2_SHIFT, Float8, ScaleFormat};
use super::code_scales::{BlockScales, HalfScales, LoadedScales, NestedBlockScales, NumberScales, OffsetKind};
use super::kernel::{ColumnBlock, Columns, TableBytes, Vector, WithColumns};
use super::panel::Format;

/// Runs work with the columns of a format of codes.
///
/// # Safety
/// As [`WithColumns::run`].
#[inline(always)]
pub(super) unsafe fn with_code_columns(format: &CodeFormat, work: impl WithColumns) {
    let is_narrow = format.bits == 4;
    // SAFETY: as this function's contract.
    unsafe {
        match (format.values, format.scales) {
            (CodeValues::Table(_), ScaleFormat::Nested { .. }) => {
                work.run::<CodeBlocks<FromTable, NestedBlockScales>>()
            }
            (CodeValues::Table(_), _) => work.run::<CodeBlocks<FromTable, NumberScales>>(),
            (CodeValues::Bytes(_), ScaleFormat::Nested { .. }) => {
                work.run::<CodeBlocks<FromBytes, NestedBlockScales>>()
            }
            (CodeValues::Bytes(_), _) => work.run::<CodeBlocks<FromBytes, NumberScales>>(),
            (CodeValues::Float8(Float8::E4M3), _) => {
                work.run::<CodeBlocks<FromFloat8<E4M3_SHIFT>, NumberScales>>();
            }
            (CodeValues::Float8(Float8::E5M2), _) => {
                work.run::<CodeBlocks<FromFloat8<E5M2_SHIFT>, NumberScales>>();
            }
            (CodeValues::Zeros, _) if is_narrow => work.run::<CodeBlocks<WithZeros<4>, NumberScales>>(),
            (CodeValues::Zeros, _) => work.run::<CodeBlocks<WithZeros<8>, NumberScales>>(),
            (_, ScaleFormat::F16) => with_linear_codes::<HalfScales>(format, work),
            (_, ScaleFormat::Nested { .. }) => with_linear_codes::<NestedBlockScales>(format, work),
            (_, ScaleFormat::Groups(_)) => with_linear_codes::<NumberScales>(format, work),
        }
    }
}

/// Runs work with codes of 4 or 8 bits, with or without minimums.
///
/// # Safety
/// As [`WithColumns::run`].
#[inline(always)]
unsafe fn with_linear_codes<S: BlockScales>(format: &CodeFormat, work: impl WithColumns) {
    // SAFETY: as this function's contract.
    unsafe {
        match (format.bits, format.values) {
            (5, CodeValues::Minimums) => work.run::<CodeBlocks<SplitBits<1, true>, S>>(),
            (5, _) => work.run::<CodeBlocks<SplitBits<1, false>, S>>(),
            (6, CodeValues::Minimums) => work.run::<CodeBlocks<SplitBits<2, true>, S>>(),
            (6, _) => work.run::<CodeBlocks<SplitBits<2, false>, S>>(),
            (4, CodeValues::Minimums) => work.run::<CodeBlocks<WithMinimums<4>, S>>(),
            (4, _) => work.run::<CodeBlocks<Signed<4>, S>>(),
            (_, CodeValues::Minimums) => work.run::<CodeBlocks<WithMinimums<8>, S>>(),
            (_, _) => work.run::<CodeBlocks<Signed<8>, S>>(),
        }
    }
}

/// The scale of a vector of columns, and what else their numbers are computed from.
#[derive(Clone, Copy)]
pub struct CodeScales<V> {
    scale: V,
    /// The minimum or the zero. Read only where codes have one.
    offset: V,
    /// The table of sixteen f32. Read only where codes have one.
    table: *const f32,
    /// The table of sixteen bytes. Read only where codes have one.
    bytes: *const i8,
}

/// Blocks of codes of the numbers C, with scales in the format S.
pub(crate) struct CodeBlocks<C, S>(PhantomData<(C, S)>);

/// The numbers of codes.
pub(crate) trait CodeNumbers {
    /// The bits of a code.
    const BITS: u32;
    /// The steps that are loaded together: the codes of a word.
    const STEPS: usize = 32 / Self::BITS as usize;
    /// As [`Columns::FAST_TABLES`].
    const FAST_TABLES: Option<bool> = None;
    /// The codes of these steps of a vector of columns.
    type Loaded<V: Vector>: Copy;

    /// Loads the codes of these steps, as [`Columns::load`] does.
    ///
    /// # Safety
    /// As [`Columns::load`].
    unsafe fn load<V: Vector>(b: *const f32, column: usize, panel: usize, scales: &CodeScales<V>) -> Self::Loaded<V>;
    /// The number of a group besides its scale.
    const OFFSET: OffsetKind = OffsetKind::None;

    /// Returns a factor of the scales, because codes are taken from words as numbers divided by it: a power of two,
    /// which changes no digit of the product.
    #[inline(always)]
    fn factor(_format: &Format) -> Option<f32> {
        None
    }

    /// Takes the numbers of the highest code of each word.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn take<V: Vector>(loaded: &mut Self::Loaded<V>, scales: &CodeScales<V>) -> V;
}

/// The numbers of codes that follow each other in words.
pub(crate) trait WordCodeNumbers {
    /// As [`CodeNumbers::BITS`].
    const BITS: u32;
    /// As [`CodeNumbers::OFFSET`].
    const OFFSET: OffsetKind = OffsetKind::None;
    /// As [`CodeNumbers::factor`].
    const FACTOR: Option<f32> = None;

    /// Takes the numbers of the highest code of each word.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V;
}

impl<N: WordCodeNumbers> CodeNumbers for N {
    const BITS: u32 = N::BITS;
    const OFFSET: OffsetKind = N::OFFSET;
    type Loaded<V: Vector> = V;

    #[inline(always)]
    fn factor(_: &Format) -> Option<f32> {
        N::FACTOR
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize, _: usize, _: &CodeScales<V>) -> V {
        // SAFETY: the panel has a vector of words from this column on.
        unsafe { V::load(b.add(column)) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe { N::take(loaded, scales) }
    }
}

/// Codes in two's complement, times their scale: the numbers that GGUF files define, to the bit. With codes from 0 on
/// and `code · scale - middle · scale` instead, an infinite scale would lead to NaN, and a negative scale would lose
/// the sign of a zero.
pub(crate) struct Signed<const BITS: u32>;

impl<const BITS: u32> WordCodeNumbers for Signed<BITS> {
    const BITS: u32 = BITS;
    // Codes are multiplied by 2^(32 - BITS).
    const FACTOR: Option<f32> = Some(1.0 / (1u32 << (32 - BITS)) as f32);

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let code = loaded.take_bits::<BITS, true>();
            *loaded = code.rest;
            code.number.mul(scales.scale)
        }
    }
}

/// Codes from 0 on, times their scale, plus their minimum.
pub(crate) struct WithMinimums<const BITS: u32>;

impl<const BITS: u32> WordCodeNumbers for WithMinimums<BITS> {
    const BITS: u32 = BITS;
    const OFFSET: OffsetKind = OffsetKind::Minimum;

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let code = loaded.take_bits::<BITS, false>();
            *loaded = code.rest;
            code.number.mul_add(scales.scale, scales.offset)
        }
    }
}

/// Codes from 0 on minus their zero, times their scale.
pub(crate) struct WithZeros<const BITS: u32>;

impl<const BITS: u32> WordCodeNumbers for WithZeros<BITS> {
    const BITS: u32 = BITS;
    const OFFSET: OffsetKind = OffsetKind::Zero;

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let code = loaded.take_bits::<BITS, false>();
            *loaded = code.rest;
            code.number.sub(scales.offset).mul(scales.scale)
        }
    }
}

/// Codes of 4 bits, whose numbers are entries of a table times their scale.
pub(crate) struct FromTable;

impl WordCodeNumbers for FromTable {
    const BITS: u32 = 4;

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract; a format with a table has sixteen numbers.
        unsafe {
            let code = loaded.take_entries(scales.table);
            *loaded = code.rest;
            code.number.mul(scales.scale)
        }
    }
}

/// Codes of 4 bits, whose numbers are bytes of a table times their scale: eight codes of a word are looked up at once.
pub(crate) struct FromBytes;

/// The bytes of the codes of eight steps for each column of a vector.
#[derive(Clone, Copy)]
pub struct StepBytes<V> {
    /// The bytes of the first of the remaining steps, of the third and so on, the first one in the highest bits of a
    /// word.
    next: V,
    /// The bytes of the other steps.
    after: V,
}

impl CodeNumbers for FromBytes {
    const BITS: u32 = 4;
    const FAST_TABLES: Option<bool> = Some(false);
    type Loaded<V: Vector> = StepBytes<V>;

    #[inline(always)]
    fn factor(format: &Format) -> Option<f32> {
        match format {
            Format::Codes(CodeFormat { values: CodeValues::Bytes(table), .. }) => Some(table.factor()),
            _ => None,
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize, _: usize, scales: &CodeScales<V>) -> StepBytes<V> {
        // SAFETY: the panel has a vector of words from this column on; a format with a table has sixteen bytes.
        unsafe {
            let TableBytes { upper, lower } = V::load(b.add(column)).look_up_bytes(scales.bytes);
            StepBytes { next: upper, after: lower }
        }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut StepBytes<V>, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let byte = loaded.next.take_bits::<8, true>();
            *loaded = StepBytes { next: loaded.after, after: byte.rest };
            byte.number.mul(scales.scale)
        }
    }
}

/// Floats of 8 bits, times their scale.
pub(crate) struct FromFloat8<const SHIFT: u32>;

impl<const SHIFT: u32> WordCodeNumbers for FromFloat8<SHIFT> {
    const BITS: u32 = 8;
    const FACTOR: Option<f32> = Some(if SHIFT == E4M3_SHIFT { Float8::E4M3.factor() } else { Float8::E5M2.factor() });

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut V, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let code = loaded.take_float8::<SHIFT>();
            *loaded = code.rest;
            code.number.mul(scales.scale)
        }
    }
}

/// Codes of 5 or 6 bits, split into words of their lower 4 bits and the `UPPER` bits above them. The upper bits of the
/// eight codes of a word are one or two bytes.
pub(crate) struct SplitBits<const UPPER: u32, const HAS_MINIMUMS: bool>;

/// The codes of eight steps of depth for each column of a vector, split into their lower and upper bits.
#[derive(Clone, Copy)]
pub struct SplitCodes<V> {
    lower: V,
    /// The upper bits, the first step in the highest bits of a word.
    upper: V,
}

impl<const UPPER: u32, const HAS_MINIMUMS: bool> CodeNumbers for SplitBits<UPPER, HAS_MINIMUMS> {
    const BITS: u32 = 4 + UPPER;
    const STEPS: usize = 8;
    const FAST_TABLES: Option<bool> = Some(true);
    const OFFSET: OffsetKind = if HAS_MINIMUMS { OffsetKind::Minimum } else { OffsetKind::None };
    type Loaded<V: Vector> = SplitCodes<V>;

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize, panel: usize, _: &CodeScales<V>) -> SplitCodes<V> {
        // SAFETY: the panel has a vector of words from this column on, and one of upper bits after its words.
        unsafe {
            let upper = b.add(panel).cast::<u8>().add(column * UPPER as usize);
            SplitCodes {
                lower: V::load(b.add(column)),
                // The bits of a bf16 are the upper half of a word.
                upper: if UPPER == 1 { V::load_highest_bytes(upper) } else { V::load_bf16(upper.cast()) },
            }
        }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut SplitCodes<V>, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let lower = loaded.lower.take_bits::<4, false>();
            loaded.lower = lower.rest;
            if HAS_MINIMUMS {
                let upper = loaded.upper.take_bits::<UPPER, false>();
                loaded.upper = upper.rest;
                let code = upper.number.mul_add(V::splat(16.0), lower.number);
                return code.mul_add(scales.scale, scales.offset);
            }
            // The sign is among the upper bits, which are multiplied by 2^(32 - UPPER).
            let upper = loaded.upper.take_bits::<UPPER, true>();
            loaded.upper = upper.rest;
            let code = upper.number.mul_add(V::splat(16.0 / (1u32 << (32 - UPPER)) as f32), lower.number);
            code.mul(scales.scale)
        }
    }
}

impl<C: CodeNumbers, S: BlockScales> Columns for CodeBlocks<C, S> {
    const STEPS: usize = C::STEPS;
    const BLOCK: usize = S::BLOCK;
    const BYTES: usize = C::STEPS * C::BITS as usize / 8;
    const HAS_WHOLE_PANELS: bool = true;
    const FAST_TABLES: Option<bool> = C::FAST_TABLES;
    type Scales<V: Vector> = CodeScales<V>;
    type Loaded<V: Vector> = C::Loaded<V>;

    #[inline(always)]
    fn numbers(block: &ColumnBlock) -> *const f32 {
        block.at.wrapping_byte_add(S::bytes_before_codes(block, C::OFFSET) * block.panel)
    }

    #[inline(always)]
    fn group(block: &ColumnBlock) -> usize {
        S::group(block, Self::STEPS)
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: &ColumnBlock, group: usize, column: usize) -> CodeScales<V> {
        let mut table = std::ptr::null();
        let mut bytes = std::ptr::null();
        match block.format {
            Format::Codes(CodeFormat { values: CodeValues::Table(own), .. }) => table = own.as_ptr(),
            Format::Codes(CodeFormat { values: CodeValues::Bytes(own), .. }) => bytes = own.as_ptr(),
            _ => {}
        }
        // SAFETY: as this method's contract.
        unsafe {
            let LoadedScales { mut scale, offset } = S::load::<V>(block, group, column, C::OFFSET);
            if let Some(factor) = C::factor(block.format) {
                scale = scale.mul(V::splat(factor));
            }
            CodeScales { scale, offset, table, bytes }
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(b: *const f32, column: usize, panel: usize, scales: &CodeScales<V>) -> C::Loaded<V> {
        // SAFETY: as this method's contract.
        unsafe { C::load(b, column, panel, scales) }
    }

    #[inline(always)]
    unsafe fn take<V: Vector>(loaded: &mut C::Loaded<V>, scales: &CodeScales<V>) -> V {
        // SAFETY: as this method's contract.
        unsafe { C::take(loaded, scales) }
    }
}
