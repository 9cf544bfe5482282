//! Weights of codes of 4 and 8 bits, and their packing into panels.

use std::ops::Range;

use half::f16;

use super::weight::{PackedWeight, WeightShape};
use crate::cpu::{CODE_BLOCK, CodeFormat, Format, InstructionSet, NESTED_BLOCK, ScaleFormat};
use crate::error::{Error, check_len};

/// The largest code and the largest whole number of a scale whose product with a factor of 11 bits is exact in f32.
const LARGEST_EXACT_CODE: u8 = 127;
const LARGEST_EXACT_SCALE: u8 = 63;

/// A weight (out, in) whose numbers are `code · scale + minimum`, or `(code - 2^(bits - 1)) · scale` without minimums,
/// with a scale and a minimum for each group of inputs of an output. Products with it have the bits of products with
/// these numbers in f32, for any scales and minimums: zeros of either sign, subnormal, infinite and NaN.
///
/// ```
/// use candle_attention_kernels::{InstructionSet, linear::{Codes, PackedWeight, Scales, WeightShape}};
/// use half::f16;
///
/// // One output of 32 inputs, each of which is (code - 8) / 2.
/// let codes: Vec<u8> = (0..32).map(|input| input % 16).collect();
/// let scales = Scales::F16 { scales: &[f16::from_f32(0.5)], minimums: None };
/// let codes = Codes { bits: 4, codes: &codes, scales };
/// let shape = WeightShape { outputs: 1, inputs: 32 };
/// let weight = PackedWeight::from_codes(&codes, shape, InstructionSet::Scalar)?;
/// assert_eq!(weight.unpack::<f32>()?[..3], [-4.0, -3.5, -3.0]);
/// // A panel of the scalar instruction set has 16 outputs, and memory comes in lines of 64 bytes.
/// assert_eq!(weight.memory(), (16usize * (2 + 16)).next_multiple_of(64));
/// # Ok::<(), candle_attention_kernels::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// The bits of a code in the packed weight, 4 or 8.
    pub bits: usize,
    /// The codes, (out, in), each below 2^bits.
    pub codes: &'a [u8],
    /// The scales, and the minimums if there are any.
    pub scales: Scales<'a>,
}

/// The scales of a weight of codes. Without minimums, codes are on both sides of zero.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// Numbers in f16.
    F16 {
        /// The scale of each block, (out, in / [`CODE_BLOCK`]).
        scales: &'a [f16],
        /// The minimum of each block, (out, in / [`CODE_BLOCK`]).
        minimums: Option<&'a [f16]>,
    },
    /// Whole numbers times factors in f16, as the K-quants of GGUF files have them.
    Nested {
        /// The inputs that share a scale, 16 or 32.
        group: usize,
        /// The scales. Without minimums, 128 is subtracted from each whole number. With minimums, whole numbers are
        /// below 64 and codes below 128, so that their product is exact and a number of the weight is rounded once.
        scales: NestedScales<'a>,
        /// The minimums.
        minimums: Option<NestedScales<'a>>,
    },
}

/// Scales, or minimums, that are whole numbers times factors.
#[derive(Clone, Copy, Debug)]
pub struct NestedScales<'a> {
    /// The factors, (out, in / [`NESTED_BLOCK`]).
    pub factors: &'a [f16],
    /// The whole numbers, (out, in / group).
    pub numbers: &'a [u8],
}

impl PackedWeight {
    /// Packs a weight of codes for products on an instruction set. The weight takes `bits / 8` bytes for each code, 2
    /// bytes for each scale, minimum or factor in f16, and 1 byte for each whole number of nested scales.
    ///
    /// # Errors
    /// [`Error::Shape`] for bits that are neither 4 nor 8, a group that is neither 16 nor 32, inputs that are not whole
    /// blocks, slices that do not have the lengths of the shape, and a code that exceeds its bits;
    /// [`Error::InstructionSet`] and [`Error::Memory`] as [`new`](Self::new).
    pub fn from_codes(codes: &Codes, shape: WeightShape, instruction_set: InstructionSet) -> Result<Self, Error> {
        codes.check(shape)?;
        let WeightShape { outputs, inputs } = shape;
        let format = Format::Codes(codes.format());
        // SAFETY: a task clears its whole panel first.
        unsafe {
            Self::filled_by(format, shape, instruction_set, &|&Self { panel, .. }, index, to| {
                let bytes = format.bytes(inputs) * panel;
                to.cast::<u8>().write_bytes(0, bytes);
                let panel_bytes = std::slice::from_raw_parts_mut(to.cast(), bytes);
                codes.pack_panel(panel_bytes, index * panel..outputs.min((index + 1) * panel), inputs, panel);
            })
        }
    }
}

impl Scales<'_> {
    fn format(&self) -> ScaleFormat {
        match *self {
            Self::F16 { .. } => ScaleFormat::F16,
            Self::Nested { group, .. } => ScaleFormat::Nested { group },
        }
    }

    fn has_minimums(&self) -> bool {
        match self {
            Self::F16 { minimums, .. } => minimums.is_some(),
            Self::Nested { minimums, .. } => minimums.is_some(),
        }
    }

    /// Checks the lengths of the slices for a number of codes.
    fn check(&self, codes: usize) -> Result<(), Error> {
        match self {
            Self::F16 { scales, minimums } => {
                check_len("scales", scales.len(), codes / CODE_BLOCK)?;
                minimums.map_or(Ok(()), |minimums| check_len("minimums", minimums.len(), codes / CODE_BLOCK))
            }
            Self::Nested { group, scales, minimums } => {
                scales.check(["factors of scales", "scales"], *group, codes)?;
                match minimums {
                    Some(minimums) => minimums.check(["factors of minimums", "minimums"], *group, codes),
                    None => Ok(()),
                }
            }
        }
    }
}

impl NestedScales<'_> {
    fn check(&self, [factors, numbers]: [&str; 2], group: usize, codes: usize) -> Result<(), Error> {
        check_len(factors, self.factors.len(), codes / NESTED_BLOCK)?;
        check_len(numbers, self.numbers.len(), codes / group)
    }
}

impl Codes<'_> {
    fn format(&self) -> CodeFormat {
        CodeFormat { bits: self.bits, has_minimums: self.scales.has_minimums(), scales: self.scales.format() }
    }

    /// Checks the bits, the group, the lengths of the slices and the codes.
    fn check(&self, shape: WeightShape) -> Result<(), Error> {
        let &Self { bits, codes, ref scales } = self;
        if bits != 4 && bits != 8 {
            return Err(Error::Shape(format!("expected codes of 4 or 8 bits, found {bits}")));
        }
        if let Scales::Nested { group, .. } = *scales
            && group != 16
            && group != 32
        {
            return Err(Error::Shape(format!("expected groups of 16 or 32 codes, found {group}")));
        }
        let block = self.format().block();
        if !shape.inputs.is_multiple_of(block) {
            return Err(Error::Shape(format!("expected inputs in blocks of {block}, found {}", shape.inputs)));
        }
        let count = shape.count()?;
        check_len("codes", codes.len(), count)?;
        scales.check(count)?;
        let largest = codes.iter().max().copied().unwrap_or(0);
        if bits < 8 && largest >> bits > 0 {
            return Err(Error::Shape(format!("expected codes of {bits} bits, found {largest}")));
        }
        if let Scales::Nested { scales, minimums: Some(_), .. } = scales {
            let largest_scale = scales.numbers.iter().max().copied().unwrap_or(0);
            if largest > LARGEST_EXACT_CODE || largest_scale > LARGEST_EXACT_SCALE {
                return Err(Error::Shape(format!(
                    "with minimums, expected codes up to {LARGEST_EXACT_CODE} and scales up to {LARGEST_EXACT_SCALE}, \
                     found {largest} and {largest_scale}"
                )));
            }
        }
        Ok(())
    }

    /// Writes some outputs to their panel, which is zeros before.
    fn pack_panel(&self, to: &mut [u8], outputs: Range<usize>, inputs: usize, panel: usize) {
        let &Self { bits, codes, ref scales } = self;
        let format = self.format();
        let block_len = format.block();
        let blocks = inputs / block_len;
        let block_bytes = to.len() / blocks;
        // Codes on both sides of zero become numbers in two's complement.
        let sign = if format.has_minimums { 0 } else { 1 << (bits - 1) };
        for (column, output) in outputs.enumerate() {
            for block in 0..blocks {
                let block_to = &mut to[block * block_bytes..][..block_bytes];
                let (scales_to, words_to) = block_to.split_at_mut(format.bytes_before_codes() * panel);
                let mut writer = ScaleWriter { to: scales_to, panel, column };
                scales.write(output * blocks + block, &mut writer);
                let block_codes = &codes[output * inputs + block * block_len..][..block_len];
                for (index, codes_of_word) in block_codes.chunks_exact(32 / bits).enumerate() {
                    // The first code is the highest of the word.
                    let mut word = 0;
                    for &code in codes_of_word {
                        word = word << bits | u32::from(code ^ sign);
                    }
                    let at = (index * panel + column) * size_of::<u32>();
                    words_to[at..at + size_of::<u32>()].copy_from_slice(&word.to_ne_bytes());
                }
            }
        }
    }
}

impl Scales<'_> {
    /// Writes the scales of a block, which counts over all outputs.
    fn write(&self, block: usize, to: &mut ScaleWriter) {
        match *self {
            Self::F16 { scales, minimums } => {
                to.half(scales[block]);
                if let Some(minimums) = minimums {
                    to.half(minimums[block]);
                }
            }
            Self::Nested { group, scales, minimums } => {
                let groups = NESTED_BLOCK / group;
                let both = [Some(scales), minimums];
                for kind in both.iter().flatten() {
                    to.half(kind.factors[block]);
                }
                for kind in both.iter().flatten() {
                    for &number in &kind.numbers[block * groups..][..groups] {
                        to.byte(number);
                    }
                }
            }
        }
    }
}

/// The scales of one column of a block, one row of the panel after another.
struct ScaleWriter<'a> {
    /// The rows that are not written yet.
    to: &'a mut [u8],
    panel: usize,
    column: usize,
}

impl ScaleWriter<'_> {
    fn half(&mut self, number: f16) {
        self.row(&number.to_bits().to_ne_bytes());
    }

    fn byte(&mut self, number: u8) {
        self.row(&[number]);
    }

    /// Writes a number of the next row.
    fn row(&mut self, number: &[u8]) {
        let (row, rest) = std::mem::take(&mut self.to).split_at_mut(number.len() * self.panel);
        row[self.column * number.len()..][..number.len()].copy_from_slice(number);
        self.to = rest;
    }
}
