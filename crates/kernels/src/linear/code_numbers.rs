//! The numbers of codes one by one, as they are defined.

use half::f16;

use crate::cpu::{CodeFormat, CodeValues, GroupFormat, NESTED_BLOCK, NumberFormat, Offset, ScaleFormat};
use crate::number::Number;

/// Computes the numbers of a column of a block of codes of a panel with `panel` columns.
///
/// # Safety
/// The block begins at `block`, and has the column and a code for each of the numbers.
pub(super) unsafe fn unpack_codes<E: Number>(
    block: *const f32,
    panel: usize,
    column: usize,
    format: &CodeFormat,
    numbers: &mut [E],
) {
    let bits = format.bits;
    // SAFETY: the scales and the words of codes lie within the block.
    unsafe {
        let words = block.byte_add(format.bytes_before_codes() * panel).cast::<u32>();
        for (group, group_numbers) in numbers.chunks_mut(format.group()).enumerate() {
            let scale = CodeScale::read(block.cast(), panel, column, format, group);
            for (n, number) in group_numbers.iter_mut().enumerate() {
                let at = group * format.group() + n;
                *number = E::from_f32(scale.number(format, read_code(words, panel, column, bits, at)));
            }
        }
    }
}

/// Reads the code at a step of a column, into the highest bits of a word whose other bits are arbitrary.
///
/// # Safety
/// The words begin at `words`, and have the step and the column.
unsafe fn read_code(words: *const u32, panel: usize, column: usize, bits: usize, at: usize) -> u32 {
    // SAFETY: as this function's contract.
    unsafe {
        if bits == 4 || bits == 8 {
            return *words.add(at * bits / 32 * panel + column) << (at * bits % 32);
        }
        // Eight steps have a word of lower bits and one or two bytes of upper bits.
        let row = words.byte_add(at / 8 * bits * panel);
        let lower = *row.add(column) << (at % 8 * 4) >> 28;
        let uppers = row.add(panel).cast::<u8>();
        let upper = match bits {
            5 => u32::from(*uppers.add(column)) << 24,
            _ => u32::from(uppers.cast::<u16>().add(column).read_unaligned()) << 16,
        };
        let upper_bits = bits - 4;
        upper << (at % 8 * upper_bits) >> (32 - upper_bits) << (32 - upper_bits) | lower << (28 - upper_bits)
    }
}

/// The scale of a group of codes, and their minimum or their zero if they have one.
struct CodeScale {
    scale: f32,
    minimum: f32,
    zero: Option<f32>,
    /// Whether products of codes with the scale may be inexact.
    is_rounded: bool,
}

impl CodeScale {
    /// Reads the scale of a group of codes of a column of a block.
    ///
    /// # Safety
    /// The block begins at `block`, and has the group and the column.
    unsafe fn read(block: *const u8, panel: usize, column: usize, format: &CodeFormat, group: usize) -> Self {
        let has_minimums = format.values == CodeValues::Minimums;
        let kinds = if has_minimums { 2 } else { 1 };
        let halves = block.cast::<f16>();
        // SAFETY: the scales lie within the block.
        unsafe {
            // Minimums are the second kind.
            let half = |kind: usize| match kind < kinds {
                true => (*halves.add(kind * panel + column)).to_f32(),
                false => 0.0,
            };
            match format.scales {
                ScaleFormat::F16 => Self { scale: half(0), minimum: half(1), zero: None, is_rounded: false },
                ScaleFormat::Nested { group: group_len } => {
                    let bytes = halves.add(kinds * panel).cast::<u8>();
                    let at = group * panel + column;
                    let number = f32::from(*bytes.add(at));
                    if !has_minimums {
                        let scale = half(0) * (number - 128.0);
                        return Self { scale, minimum: 0.0, zero: None, is_rounded: false };
                    }
                    let minimum = f32::from(*bytes.add(NESTED_BLOCK / group_len * panel + at));
                    Self { scale: half(0) * number, minimum: half(1) * minimum, zero: None, is_rounded: false }
                }
                ScaleFormat::Groups(groups) => Self::of_group(block, panel, groups, group * panel + column),
            }
        }
    }

    /// Reads the scale at an index of a block whose scales are stored by groups.
    ///
    /// # Safety
    /// The block begins at `block`, and has the index.
    unsafe fn of_group(block: *const u8, panel: usize, groups: GroupFormat, at: usize) -> Self {
        // SAFETY: the numbers lie within the block.
        unsafe {
            let offsets = block.add(groups.scale_bytes() * panel);
            let scale = groups.scale.read(block, at);
            // Products with the largest bf16 exceed f32.
            let is_rounded = groups.scale != NumberFormat::F16;
            match groups.offset {
                Offset::None => Self { scale, minimum: 0.0, zero: None, is_rounded },
                Offset::Minimum(format) => Self { scale, minimum: format.read(offsets, at), zero: None, is_rounded },
                Offset::Zero(format) => Self { scale, minimum: 0.0, zero: Some(format.read(offsets, at)), is_rounded },
            }
        }
    }

    /// Returns the number of a code in the highest bits of a word.
    fn number(&self, format: &CodeFormat, word: u32) -> f32 {
        let shift = 32 - format.bits;
        let code = word >> shift;
        if let Some(zero) = self.zero {
            return (code as f32 - zero) * self.scale;
        }
        match format.values {
            CodeValues::Signed => (word.cast_signed() >> shift) as f32 * self.scale,
            // The product is exact, and a fused product may be a call of a function.
            CodeValues::Minimums if !self.is_rounded => code as f32 * self.scale + self.minimum,
            CodeValues::Minimums => (code as f32).mul_add(self.scale, self.minimum),
            CodeValues::Zeros => code as f32 * self.scale,
            CodeValues::Table(ref table) => table.number(code as usize) * self.scale,
            CodeValues::Bytes(ref table) => table.number(code as usize) * self.scale,
            CodeValues::Float8(float8) => float8.number(code as u8) * self.scale,
        }
    }
}
