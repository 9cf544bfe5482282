//! The scales of codes in the blocks of a panel.

use super::code_format::{
    CODE_BLOCK, CodeFormat, E4M3_SHIFT, Float8, GROUPS_BLOCK, GroupFormat, NESTED_BLOCK, NumberFormat, Offset,
    ScaleFormat,
};
use super::kernel::{ColumnBlock, Vector};
use super::panel::Format;

/// A format of the scales of codes.
pub(crate) trait BlockScales {
    /// The steps of depth of a block.
    const BLOCK: usize;

    /// Returns the bytes of one column of a block that come before its codes.
    fn bytes_before_codes(block: &ColumnBlock, offset: OffsetKind) -> usize;

    /// Returns the steps of a block whose scales are loaded together. A word has `steps` of them.
    fn group(block: &ColumnBlock, steps: usize) -> usize;

    /// Loads the scales of a group of steps, and the minimums or zeros if there are any, of a vector of columns from a
    /// column on.
    ///
    /// # Safety
    /// As [`Columns::scales`].
    unsafe fn load<V: Vector>(block: &ColumnBlock, group: usize, column: usize, offset: OffsetKind) -> LoadedScales<V>;
}

/// The scale and the minimum or zero of a vector of columns.
pub(crate) struct LoadedScales<V> {
    pub scale: V,
    /// The scale again where codes have neither minimums nor zeros.
    pub offset: V,
}

/// The kind of number that a group has besides its scale.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OffsetKind {
    None,
    Minimum,
    Zero,
}

/// Scales and minimums in f16, one of each for a block.
pub(crate) struct HalfScales;

impl BlockScales for HalfScales {
    const BLOCK: usize = CODE_BLOCK;

    #[inline(always)]
    fn bytes_before_codes(_: &ColumnBlock, offset: OffsetKind) -> usize {
        if offset == OffsetKind::None { 2 } else { 4 }
    }

    /// Returns the number of steps of one word: the scales are loaded again for each word. Products of one row are
    /// slower if the scales of a block stay in registers.
    #[inline(always)]
    fn group(_: &ColumnBlock, steps: usize) -> usize {
        steps
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: &ColumnBlock, _: usize, column: usize, offset: OffsetKind) -> LoadedScales<V> {
        let scales = block.at.cast::<u16>().wrapping_add(column);
        // SAFETY: the block has a vector of f16 from this column on, and another one if it has minimums.
        unsafe {
            let scale = V::load_f16(scales);
            let has_minimums = offset != OffsetKind::None;
            LoadedScales { scale, offset: if has_minimums { V::load_f16(scales.add(block.panel)) } else { scale } }
        }
    }
}

/// Scales and minimums of 8 bits for groups of 16 or 32 steps. A block has the factors of a panel in f16, the factors
/// of its minimums in f16 if it has any, the scales of a panel in 8 bits for each group, and its minimums in 8 bits for
/// each group if it has any.
///
/// The scale of a group is its factor times its scale of 8 bits, which is unsigned with minimums; without minimums, 128
/// is subtracted first. A product of 11 and 8 bits is exact, and so is the product with a code of 4 or 5 bits.
pub(crate) struct NestedBlockScales;

impl BlockScales for NestedBlockScales {
    const BLOCK: usize = NESTED_BLOCK;

    #[inline(always)]
    fn bytes_before_codes(block: &ColumnBlock, offset: OffsetKind) -> usize {
        let kinds = if offset == OffsetKind::None { 1 } else { 2 };
        kinds * (2 + NESTED_BLOCK / Self::group(block, 0))
    }

    #[inline(always)]
    fn group(block: &ColumnBlock, _: usize) -> usize {
        match block.format {
            Format::Codes(CodeFormat { scales: ScaleFormat::Nested { group: 16 }, .. }) => 16,
            _ => 32,
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: &ColumnBlock, group: usize, column: usize, offset: OffsetKind) -> LoadedScales<V> {
        let kinds = if offset == OffsetKind::None { 1 } else { 2 };
        let factors = block.at.cast::<u16>();
        let scales = factors.wrapping_add(kinds * block.panel).cast::<u8>();
        let at = group * block.panel + column;
        // SAFETY: the block has a vector of factors and of scales from this column on, and others if it has minimums.
        unsafe {
            let factor = V::load_f16(factors.add(column));
            let number = V::load_u8(scales.add(at));
            if offset == OffsetKind::None {
                let scale = factor.mul(number.sub(V::splat(128.0)));
                return LoadedScales { scale, offset: scale };
            }
            let minimums = scales.add(NESTED_BLOCK / Self::group(block, 0) * block.panel);
            let minimum_factor = V::load_f16(factors.add(block.panel + column));
            let minimum = minimum_factor.mul(V::load_u8(minimums.add(at)));
            LoadedScales { scale: factor.mul(number), offset: minimum }
        }
    }
}

/// Scales, and minimums or zeros, for groups of 16, 32 or 64 steps, in formats that are known when the group begins.
pub(crate) struct NumberScales;

impl NumberScales {
    /// Returns the format of a block's scales.
    #[inline(always)]
    fn format(block: &ColumnBlock) -> GroupFormat {
        match block.format {
            Format::Codes(CodeFormat { scales: ScaleFormat::Groups(groups), .. }) => *groups,
            _ => unreachable!("a block of scales by groups has their format"),
        }
    }
}

impl BlockScales for NumberScales {
    const BLOCK: usize = GROUPS_BLOCK;

    #[inline(always)]
    fn bytes_before_codes(block: &ColumnBlock, _: OffsetKind) -> usize {
        Self::format(block).bytes_before_codes()
    }

    #[inline(always)]
    fn group(block: &ColumnBlock, _: usize) -> usize {
        Self::format(block).group
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: &ColumnBlock, group: usize, column: usize, kind: OffsetKind) -> LoadedScales<V> {
        let groups = Self::format(block);
        let scales = block.at.cast::<u8>();
        let at = group * block.panel + column;
        // SAFETY: the block has a vector of scales from this column on, and one of minimums or zeros if it has any.
        unsafe {
            let scale = load_numbers::<V>(groups.scale, scales, at);
            if kind == OffsetKind::None {
                return LoadedScales { scale, offset: scale };
            }
            let offsets = scales.add(groups.scale_bytes() * block.panel);
            let offset = match groups.offset {
                Offset::Minimum(format) => load_numbers(format, offsets, at),
                Offset::Zero(format) => {
                    let zero = load_numbers::<V>(format, offsets, at);
                    if kind == OffsetKind::Minimum { V::splat(0.0).sub(zero.mul(scale)) } else { zero }
                }
                Offset::None => scale,
            };
            LoadedScales { scale, offset }
        }
    }
}

/// Loads a vector of numbers in a format, from the `index`th number after `from` on.
///
/// # Safety
/// As [`Vector::load`].
#[inline(always)]
unsafe fn load_numbers<V: Vector>(format: NumberFormat, from: *const u8, index: usize) -> V {
    // SAFETY: as this function's contract.
    unsafe {
        match format {
            NumberFormat::F16 => V::load_f16(from.cast::<u16>().add(index)),
            NumberFormat::BF16 => V::load_bf16(from.cast::<u16>().add(index)),
            NumberFormat::F32 => V::load(from.cast::<f32>().add(index)),
            NumberFormat::U8 => V::load_u8(from.add(index)),
            NumberFormat::E4M3 { factor } => {
                let number = V::load_highest_bytes(from.add(index)).take_float8::<E4M3_SHIFT>().number;
                number.mul(V::splat(Float8::E4M3.factor())).mul(V::splat(f32::from_bits(factor)))
            }
        }
    }
}
