//! The choice of a format for a weight of codes, and the packing of its panels.

use std::ops::Range;

use super::code_scales::ScaleWriter;
use super::codes::{Codes, NestedScales, Scales, Values};
use super::weight::{PackedWeight, WeightShape};
use crate::cpu::{
    ByteTable, CODE_BLOCK, CodeFormat, CodeTable, CodeValues, Float8, Format, GROUPS_BLOCK, GroupFormat,
    InstructionSet, NESTED_BLOCK, NumberFormat, Offset, ScaleFormat, kernel_layout,
};
use crate::error::{Error, check_instruction_set};

/// The smallest scale that surely stays exact when codes are multiplied by a power of two and scales divided by it.
const LEAST_SCALE: f32 = f32::from_bits((127 - 80) << 23);

/// The bounds of scales, except 0, whose products with codes and zeros are far from overflow and underflow.
const MODERATE: Range<f32> = f32::from_bits((127 - 60) << 23)..f32::from_bits((127 + 60) << 23);

/// The largest zero, and the whole number by which zeros are multiplied to whole numbers, for which the difference of a
/// code and a zero is exact.
const LARGEST_EXACT_ZERO: f32 = 256.0;
const PARTS_OF_ONE: f32 = 65536.0;

/// A word whose bytes are 1.
const BYTES_OF_ONE: u64 = 0x0101_0101_0101_0101;

impl PackedWeight {
    /// Packs a weight of codes for products on an instruction set, or returns `None` where the kernels would not
    /// compute its numbers to the bit: for groups that are no multiple of 16, infinite and NaN floats of 8 bits, and
    /// minimums with scales in f32 on [`InstructionSet::Scalar`], which rounds sums of products twice.
    ///
    /// The weight takes 4 or 8 bits for each code; with AVX-512, signed codes and codes with minimums of 5 or 6 bits
    /// take their own bits. Scales and minimums take 16 bits, or 32 where 16 do not have their digits. Scales in bytes
    /// take 8 bits where they are E4M3 times a factor, zeros take 8 bits where they are whole, and nested scales are
    /// stored as in the file. A scale is stored once for each group of 16, 32 or 64 inputs, and repeated in larger
    /// groups.
    ///
    /// # Errors
    /// [`Error::Shape`] for bits, groups and scales that [`Codes`] does not have, slices whose lengths do not
    /// fit the shape, and a code that exceeds its bits; [`Error::InstructionSet`] and [`Error::Memory`] as
    /// [`new`](Self::new).
    pub fn from_codes(
        codes: &Codes,
        shape: WeightShape,
        instruction_set: InstructionSet,
    ) -> Result<Option<Self>, Error> {
        check_instruction_set(instruction_set)?;
        codes.check(shape)?;
        let Some(packing) = CodePacking::new(codes, shape, instruction_set) else { return Ok(None) };
        let format = Format::Codes(packing.format);
        // SAFETY: a task clears its whole panel first.
        let packed = unsafe {
            Self::filled_by(format, shape, instruction_set, &|&Self { panel, padded, .. }, index, to| {
                let bytes = format.bytes(padded) * panel;
                to.cast::<u8>().write_bytes(0, bytes);
                let panel_bytes = std::slice::from_raw_parts_mut(to.cast(), bytes);
                packing.pack_panel(panel_bytes, index * panel..shape.outputs.min((index + 1) * panel), panel);
            })
        };
        packed.map(Some)
    }
}

/// A weight of codes and the format in which it is packed.
pub(super) struct CodePacking<'a> {
    pub format: CodeFormat,
    codes: &'a [u8],
    inputs: usize,
    /// The number of inputs that share a scale of `scales`.
    group: usize,
    scales: Scales<'a>,
    offsets: Offsets<'a>,
    /// The number that is added to each code.
    added: u8,
    /// The bits that are inverted in each code afterwards.
    inverted: u8,
}

/// The minimums or zeros of a weight.
#[derive(Clone, Copy)]
enum Offsets<'a> {
    None,
    Minimums(Scales<'a>),
    Zeros(&'a [f32]),
    /// One zero, which all groups share.
    Zero(u8),
}

/// The values of codes in the packed weight.
struct PackedValues<'a> {
    values: CodeValues,
    offsets: Offsets<'a>,
    offset: Offset,
}

impl<'a> CodePacking<'a> {
    /// Chooses the format of checked codes, or returns `None` if no format has their numbers to the bit.
    pub fn new(codes: &Codes<'a>, shape: WeightShape, instruction_set: InstructionSet) -> Option<Self> {
        let &Codes { bits, codes: all_codes, group, values, scales } = codes;
        let inputs = shape.inputs;
        let scale = scales.format();
        let PackedValues { values: packed_values, offsets, offset } = match values {
            Values::Signed => signed_values(bits, &scales, scale),
            Values::Zeros(zeros) if zeros.iter().all(|&zero| zero == f32::from(middle(bits))) => {
                signed_values(bits, &scales, scale)
            }
            Values::Zeros(zeros) => values_with_zeros(zeros, &scales, scale),
            Values::Minimums(minimums) => {
                let is_exact = |number: f32| number.abs() < MODERATE.end || !number.is_finite();
                let has_exact_products = scale.has_exact_products() && scales.all(is_exact);
                if !has_exact_products && instruction_set == InstructionSet::Scalar {
                    return None;
                }
                let offset = Offset::Minimum(minimums.wide_format());
                PackedValues { values: CodeValues::Minimums, offsets: Offsets::Minimums(minimums), offset }
            }
            Values::Table(table) => table_values(table, &scales, scale, instruction_set),
            Values::E4M3 => float8_values(Float8::E4M3, all_codes, &scales)?,
            Values::E5M2 => float8_values(Float8::E5M2, all_codes, &scales)?,
        };
        // Other values have no columns of split codes.
        let may_be_split = matches!(packed_values, CodeValues::Signed | CodeValues::Minimums);
        let stored_bits = match bits {
            ..=4 => 4,
            5 | 6 if may_be_split && kernel_layout(instruction_set, false).has_fast_tables => bits,
            _ => 8,
        };
        let format = CodeFormat {
            bits: stored_bits,
            values: packed_values,
            scales: scale_format(&scales, GroupFormat { group: stored_group(group, inputs)?, scale, offset }, values),
        };
        // Inputs that fill up a group have codes of 0, whose products with infinite numbers would be NaN.
        let is_partial = !inputs.is_multiple_of(format.group());
        if is_partial && !(scales.are_finite() && offsets.are_finite()) {
            return None;
        }
        let is_signed = packed_values == CodeValues::Signed;
        Some(Self {
            format,
            codes: all_codes,
            inputs,
            group,
            scales,
            offsets,
            added: if is_signed { middle(stored_bits) - middle(bits) } else { 0 },
            // Codes on both sides of zero become numbers in two's complement.
            inverted: if is_signed { middle(stored_bits) } else { 0 },
        })
    }

    /// Writes some outputs to their panel, which is zeros before.
    pub fn pack_panel(&self, to: &mut [u8], outputs: Range<usize>, panel: usize) {
        let format = &self.format;
        let bits = format.bits;
        let block_len = format.block();
        let blocks = self.inputs.div_ceil(block_len);
        if blocks == 0 {
            return;
        }
        // Inputs that pad the depth of a product come after the blocks.
        let block_bytes = (format.bytes_before_codes() + block_len * bits / 8) * panel;
        for (column, output) in outputs.enumerate() {
            let codes = &self.codes[output * self.inputs..][..self.inputs];
            let blocks_to = to.chunks_exact_mut(block_bytes);
            for (block, (block_codes, block_to)) in codes.chunks(block_len).zip(blocks_to).enumerate() {
                let (scales_to, words_to) = block_to.split_at_mut(format.bytes_before_codes() * panel);
                self.write_scales(output, block, &mut ScaleWriter { to: scales_to, panel, column });
                match bits {
                    4 => self.write_words::<4>(block_codes, words_to, panel, column),
                    5 => self.write_words::<5>(block_codes, words_to, panel, column),
                    6 => self.write_words::<6>(block_codes, words_to, panel, column),
                    _ => self.write_words::<8>(block_codes, words_to, panel, column),
                }
            }
        }
    }

    /// Writes the codes of a block of an output. Codes of 5 and 6 bits have words of their lower bits, each with its
    /// upper bits after it.
    fn write_words<const BITS: usize>(&self, codes: &[u8], to: &mut [u8], panel: usize, column: usize) {
        let upper_bits = const { if BITS == 8 { 0 } else { BITS - 4 } };
        let steps = const { if BITS == 8 { 4 } else { 8 } };
        let rows_to = to.chunks_exact_mut(steps * BITS / 8 * panel);
        for (codes_of_word, row) in codes.chunks(steps).zip(rows_to) {
            let stored = self.stored(codes_of_word);
            let word = if BITS == 8 { (stored >> 32) as u32 } else { lower_bits_of_bytes(stored, 4) as u32 };
            row[column * size_of::<u32>()..][..size_of::<u32>()].copy_from_slice(&word.to_ne_bytes());
            let upper = lower_bits_of_bytes(stored >> 4, upper_bits);
            let uppers = panel * size_of::<u32>();
            match upper_bits {
                1 => row[uppers + column] = upper as u8,
                2 => row[uppers + 2 * column..][..2].copy_from_slice(&(upper as u16).to_ne_bytes()),
                _ => {}
            }
        }
    }

    /// Returns up to 8 codes as they are stored, a byte each, the first of them in the highest byte. Bytes without a
    /// code are 0.
    #[inline(always)]
    fn stored(&self, codes: &[u8]) -> u64 {
        // The sum of a code and the added number is a byte, so that no byte changes the next.
        let stored =
            |bytes: u64| (bytes + u64::from(self.added) * BYTES_OF_ONE) ^ (u64::from(self.inverted) * BYTES_OF_ONE);
        if let Ok(eight) = <[u8; 8]>::try_from(codes) {
            return stored(u64::from_be_bytes(eight));
        }
        if let Ok(four) = <[u8; 4]>::try_from(codes) {
            return stored(u64::from(u32::from_be_bytes(four)) << 32) & !0 << 32;
        }
        let mut bytes = [0; 8];
        bytes[..codes.len()].copy_from_slice(codes);
        let unused = 8 * (8 - codes.len());
        stored(u64::from_be_bytes(bytes)) >> unused << unused
    }

    /// Writes the scales of a block of an output.
    fn write_scales(&self, output: usize, block: usize, to: &mut ScaleWriter) {
        match self.format.scales {
            ScaleFormat::F16 => {
                let at = output * (self.inputs / self.group) + block * CODE_BLOCK / self.group;
                to.number(NumberFormat::F16, &self.scales, at);
                if let Offsets::Minimums(minimums) = &self.offsets {
                    to.number(NumberFormat::F16, minimums, at);
                }
            }
            ScaleFormat::Nested { group } => {
                let block_of_all = output * (self.inputs / NESTED_BLOCK) + block;
                let groups = NESTED_BLOCK / group;
                let minimums = match self.offsets {
                    Offsets::Minimums(minimums) => minimums.nested(),
                    _ => None,
                };
                let both = [self.scales.nested(), minimums];
                for NestedScales { factors, .. } in both.iter().flatten() {
                    to.row(&factors[block_of_all].to_bits().to_ne_bytes());
                }
                for NestedScales { numbers, .. } in both.iter().flatten() {
                    for &number in &numbers[block_of_all * groups..][..groups] {
                        to.row(&[number]);
                    }
                }
            }
            ScaleFormat::Groups(groups) => self.write_groups(output, block, groups, to),
        }
    }

    /// Writes the scales of a block of an output, and then its minimums or zeros, for each stored group.
    fn write_groups(&self, output: usize, block: usize, format: GroupFormat, to: &mut ScaleWriter) {
        let groups_of_output = self.inputs / self.group;
        // Returns the place of a stored group's numbers. Groups after the last input have none.
        let place = |stored: usize| {
            let input = block * GROUPS_BLOCK + stored * format.group;
            (input < self.inputs).then(|| output * groups_of_output + input / self.group)
        };
        for stored in 0..format.count() {
            match place(stored) {
                Some(at) => to.number(format.scale, &self.scales, at),
                None => to.skip(format.scale),
            }
        }
        let (Offset::Minimum(offset) | Offset::Zero(offset)) = format.offset else { return };
        for stored in 0..format.count() {
            match (place(stored), &self.offsets) {
                (Some(at), Offsets::Minimums(minimums)) => to.number(offset, minimums, at),
                (Some(at), Offsets::Zeros(zeros)) => to.number(offset, &Scales::F32(zeros), at),
                (Some(_), &Offsets::Zero(zero)) => to.row(&[zero]),
                (None, _) | (_, Offsets::None) => to.skip(offset),
            }
        }
    }
}

/// Returns the lowest `bits` of each byte, at most 4, one after the other.
#[inline(always)]
fn lower_bits_of_bytes(bytes: u64, bits: usize) -> u64 {
    let ones = |count: usize| (1u64 << count) - 1;
    let gap = 8 - bits;
    let mut joined = bytes & (ones(bits) * BYTES_OF_ONE);
    joined = (joined | joined >> gap) & (ones(2 * bits) * 0x0001_0001_0001_0001);
    joined = (joined | joined >> (2 * gap)) & (ones(4 * bits) * 0x0000_0001_0000_0001);
    (joined | joined >> (4 * gap)) & ones(8 * bits)
}

/// Returns 2^(bits - 1), the code of the number 0 where half of all codes are negative numbers.
fn middle(bits: usize) -> u8 {
    1 << (bits - 1)
}

/// Returns the number of inputs that share a stored scale: the most of 64, 32 and 16 that divide the group, or 64 for a
/// scale of a whole output of another length; `None` for other groups.
fn stored_group(group: usize, inputs: usize) -> Option<usize> {
    let divisor = [64, 32, 16].into_iter().find(|&stored| group.is_multiple_of(stored));
    divisor.or((group == inputs).then_some(GROUPS_BLOCK))
}

/// Returns the format of scales.
fn scale_format(scales: &Scales, groups: GroupFormat, values: Values) -> ScaleFormat {
    if scales.nested().is_some() {
        return ScaleFormat::Nested { group: groups.group };
    }
    let has_plain_offset = match (values, groups.offset) {
        (Values::Signed, Offset::None) => true,
        (_, Offset::Minimum(format)) => format == NumberFormat::F16,
        _ => false,
    };
    // The blocks of GGUF files, which are read faster than other groups.
    if groups.group == CODE_BLOCK && groups.scale == NumberFormat::F16 && has_plain_offset {
        return ScaleFormat::F16;
    }
    ScaleFormat::Groups(groups)
}

/// Chooses how signed codes are packed: as signed numbers, or as codes with the zero 2^(bits - 1) where a scale is so
/// small that it would lose digits.
fn signed_values<'a>(bits: usize, scales: &Scales, scale: NumberFormat) -> PackedValues<'a> {
    if stay_exact(scales, scale) {
        return PackedValues { values: CodeValues::Signed, offsets: Offsets::None, offset: Offset::None };
    }
    PackedValues {
        values: CodeValues::Zeros,
        offsets: Offsets::Zero(middle(bits)),
        offset: Offset::Zero(NumberFormat::U8),
    }
}

/// Returns codes of a table: of bytes, where the table has bytes and the instruction set looks these up faster than
/// numbers in f32.
fn table_values<'a>(
    table: &[f32; 16],
    scales: &Scales,
    scale: NumberFormat,
    instruction_set: InstructionSet,
) -> PackedValues<'a> {
    let mut values = CodeValues::Table(CodeTable::new(table));
    let has_fast_tables = kernel_layout(instruction_set, false).has_fast_tables;
    if !has_fast_tables
        && stay_exact(scales, scale)
        && let Some(bytes) = ByteTable::new(table)
    {
        values = CodeValues::Bytes(bytes);
    }
    PackedValues { values, offsets: Offsets::None, offset: Offset::None }
}

/// Returns whether scales keep their digits when they are divided by the factor of codes, up to 2^40.
fn stay_exact(scales: &Scales, scale: NumberFormat) -> bool {
    let is_exact = |number: f32| number == 0.0 || !number.is_finite() || number.abs() >= LEAST_SCALE;
    scales.nested().is_some() || scale == NumberFormat::F16 || scales.all(is_exact)
}

/// Chooses how codes with zeros are packed. Where the difference of code and zero and the product of zero and scale are
/// exact, a number is `code · scale - zero · scale`, rounded once, which takes one operation less for each code than
/// `(code - zero) · scale`.
fn values_with_zeros<'a>(zeros: &'a [f32], scales: &Scales, scale: NumberFormat) -> PackedValues<'a> {
    let is_byte = |zero: f32| zero.fract() == 0.0 && (0.0..=255.0).contains(&zero) && zero.is_sign_positive();
    let format =
        if zeros.iter().all(|&zero| is_byte(zero)) { NumberFormat::U8 } else { Scales::F32(zeros).wide_format() };
    let is_exact_zero = |zero: f32| zero.abs() <= LARGEST_EXACT_ZERO && (zero * PARTS_OF_ONE).fract() == 0.0;
    let is_exact_scale = |number: f32| number == 0.0 || MODERATE.contains(&number.abs());
    let is_exact = scale.has_exact_products()
        && format.has_exact_products()
        && zeros.iter().all(|&zero| is_exact_zero(zero))
        && scales.all(is_exact_scale);
    let values = if is_exact { CodeValues::Minimums } else { CodeValues::Zeros };
    PackedValues { values, offsets: Offsets::Zeros(zeros), offset: Offset::Zero(format) }
}

/// Returns codes that are floats of 8 bits; `None` if one is infinite or NaN, or a scale is too large.
fn float8_values<'a>(float8: Float8, codes: &[u8], scales: &Scales) -> Option<PackedValues<'a>> {
    // The kernels multiply scales by the factor.
    let largest_scale = f32::MAX / float8.factor();
    let is_packed = codes.iter().all(|&code| float8.is_finite(code))
        && scales.all(|scale| !scale.is_finite() || scale.abs() <= largest_scale);
    is_packed.then_some(PackedValues {
        values: CodeValues::Float8(float8),
        offsets: Offsets::None,
        offset: Offset::None,
    })
}

impl Offsets<'_> {
    fn are_finite(&self) -> bool {
        match self {
            Self::None | Self::Zero(_) => true,
            Self::Minimums(minimums) => minimums.are_finite(),
            Self::Zeros(zeros) => zeros.iter().all(|zero| zero.is_finite()),
        }
    }
}
