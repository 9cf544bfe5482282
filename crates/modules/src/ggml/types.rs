//! The table of types.

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Result, Tensor, bail};

use super::blocks::{self, FP4_VALUES, IQ4_VALUES, Unpacked, WHOLE_ZERO};
use super::codebooks::{self, IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES};
use super::{k_quants, plain, ternary};
use crate::base::{CodeValues, GroupNumbers, QuantizedWeight};

const OP: &str = "ggml";

/// The numbers that share the factor of nested scales.
const NUMBERS_OF_FACTOR: usize = 256;

/// A type of the numbers of a tensor in a GGUF file.
#[derive(Debug)]
pub struct GgmlType {
    /// The number of the type in files, as `ggml.h` lists types.
    pub number: u32,
    /// llama.cpp's name.
    pub name: &'static str,
    /// The numbers of a block.
    pub block: usize,
    /// The bytes of a block.
    pub bytes: usize,
    form: GgmlForm,
}

/// The form of the numbers of a type.
#[derive(Debug)]
enum GgmlForm {
    /// Numbers by themselves, which a function converts to f32.
    Plain(fn(&[u8]) -> Vec<f32>),
    /// Blocks of codes and scales.
    Codes(GgmlCodes),
}

#[derive(Debug)]
struct GgmlCodes {
    /// The number of bits of a code.
    bits: usize,
    /// The numbers that share a scale.
    group: usize,
    values: GgmlValues,
    scales: GgmlScales,
    /// Appends a block.
    append: fn(&[u8], &mut Unpacked),
}

/// The number of a code, before it is multiplied by the scale.
#[derive(Debug)]
enum GgmlValues {
    /// The code minus half of all codes.
    Signed,
    /// The code; a minimum, in the form of the scales, is added to its product with the scale.
    Minimums,
    Table([f32; 16]),
}

/// The form of the scales.
#[derive(Debug)]
enum GgmlScales {
    F16,
    F32,
    /// Bytes, for each of which a function returns the scale.
    Bytes(fn(u8) -> f32),
    /// Whole numbers times a factor in f16 for each [`NUMBERS_OF_FACTOR`] numbers.
    Nested,
}

/// The numbers of a tensor.
#[derive(Debug)]
pub enum GgmlNumbers {
    /// Numbers in f32, of a type without codes.
    Plain(Tensor),
    /// Codes and scales.
    Codes(Box<QuantizedWeight>),
}

impl GgmlNumbers {
    /// Returns the numbers in f32, (rows, columns).
    ///
    /// # Errors
    /// If they do not fit in memory.
    pub fn dequantize(&self) -> Result<Tensor> {
        match self {
            Self::Plain(numbers) => Ok(numbers.clone()),
            Self::Codes(weight) => weight.dequantize(),
        }
    }
}

const fn plain_type(number: u32, name: &'static str, bytes: usize, convert: fn(&[u8]) -> Vec<f32>) -> GgmlType {
    GgmlType { number, name, block: 1, bytes, form: GgmlForm::Plain(convert) }
}

/// Returns a type; `block` has its numbers and bytes.
const fn of(number: u32, name: &'static str, block: Block, codes: GgmlCodes) -> GgmlType {
    GgmlType { number, name, block: block.numbers, bytes: block.bytes, form: GgmlForm::Codes(codes) }
}

/// The size of a block.
struct Block {
    numbers: usize,
    bytes: usize,
}

const fn block_of(numbers: usize, bytes: usize) -> Block {
    Block { numbers, bytes }
}

/// The types that are read, in the order of their numbers. Q8_1 is not among them: no file has it, since llama.cpp
/// has it for inputs of products.
const TYPES: &[GgmlType] = &[
    plain_type(0, "F32", 4, plain::f32s),
    plain_type(1, "F16", 2, plain::f16s),
    of(2, "Q4_0", block_of(32, 18), signed(4, 32, blocks::q4_0)),
    of(3, "Q4_1", block_of(32, 20), with_minimums(4, 32, GgmlScales::F16, blocks::q4_1)),
    of(6, "Q5_0", block_of(32, 22), signed(5, 32, blocks::q5_0)),
    of(7, "Q5_1", block_of(32, 24), with_minimums(5, 32, GgmlScales::F16, blocks::q5_1)),
    of(8, "Q8_0", block_of(32, 34), signed(8, 32, blocks::q8_0)),
    of(10, "Q2_K", block_of(256, 84), with_minimums(2, 16, GgmlScales::Nested, k_quants::q2_k)),
    of(11, "Q3_K", block_of(256, 110), GgmlCodes { scales: GgmlScales::Nested, ..signed(3, 16, k_quants::q3_k) }),
    of(12, "Q4_K", block_of(256, 144), with_minimums(4, 32, GgmlScales::Nested, k_quants::q4_k)),
    of(13, "Q5_K", block_of(256, 176), with_minimums(5, 32, GgmlScales::Nested, k_quants::q5_k)),
    of(14, "Q6_K", block_of(256, 210), GgmlCodes { scales: GgmlScales::Nested, ..signed(6, 16, k_quants::q6_k) }),
    of(15, "Q8_K", block_of(256, 292), GgmlCodes { scales: GgmlScales::F32, ..signed(8, 256, blocks::q8_k) }),
    of(16, "IQ2_XXS", block_of(256, 66), nested_table(32, IQ2_VALUES, codebooks::iq2_xxs)),
    of(17, "IQ2_XS", block_of(256, 74), nested_table(16, IQ2_VALUES, codebooks::iq2_xs)),
    of(18, "IQ3_XXS", block_of(256, 98), nested_table(32, IQ3_XXS_VALUES, codebooks::iq3_xxs)),
    of(19, "IQ1_S", block_of(256, 50), nested_table(32, IQ1_VALUES, codebooks::iq1_s)),
    of(20, "IQ4_NL", block_of(32, 18), table(32, IQ4_VALUES, GgmlScales::F16, blocks::q4_0)),
    of(21, "IQ3_S", block_of(256, 110), nested_table(32, IQ3_S_VALUES, codebooks::iq3_s)),
    of(22, "IQ2_S", block_of(256, 82), nested_table(16, IQ2_VALUES, codebooks::iq2_s)),
    of(23, "IQ4_XS", block_of(256, 136), nested_table(32, IQ4_VALUES, blocks::iq4_xs)),
    plain_type(24, "I8", 1, plain::i8s),
    plain_type(25, "I16", 2, plain::i16s),
    plain_type(26, "I32", 4, plain::i32s),
    plain_type(27, "I64", 8, plain::i64s),
    plain_type(28, "F64", 8, plain::f64s),
    of(29, "IQ1_M", block_of(256, 56), nested_table(16, IQ1_VALUES, codebooks::iq1_m)),
    plain_type(30, "BF16", 2, plain::bf16s),
    of(34, "TQ1_0", block_of(256, 54), signed(4, 256, ternary::tq1_0)),
    of(35, "TQ2_0", block_of(256, 66), signed(4, 256, ternary::tq2_0)),
    of(39, "MXFP4", block_of(32, 17), table(32, FP4_VALUES, GgmlScales::Bytes(blocks::half_of_e8m0), blocks::mxfp4)),
    of(40, "NVFP4", block_of(64, 36), table(16, FP4_VALUES, GgmlScales::Bytes(blocks::half_of_e4m3), blocks::nvfp4)),
    of(41, "Q1_0", block_of(128, 18), signed(4, 128, blocks::q1_0)),
];

/// Returns codes on both sides of 0, with a scale in f16 for each group.
const fn signed(bits: usize, group: usize, append: fn(&[u8], &mut Unpacked)) -> GgmlCodes {
    GgmlCodes { bits, group, values: GgmlValues::Signed, scales: GgmlScales::F16, append }
}

const fn with_minimums(bits: usize, group: usize, scales: GgmlScales, append: fn(&[u8], &mut Unpacked)) -> GgmlCodes {
    GgmlCodes { bits, group, values: GgmlValues::Minimums, scales, append }
}

/// Returns codes of 4 bits by a table.
const fn table(group: usize, values: [f32; 16], scales: GgmlScales, append: fn(&[u8], &mut Unpacked)) -> GgmlCodes {
    GgmlCodes { bits: 4, group, values: GgmlValues::Table(values), scales, append }
}

const fn nested_table(group: usize, values: [f32; 16], append: fn(&[u8], &mut Unpacked)) -> GgmlCodes {
    table(group, values, GgmlScales::Nested, append)
}

impl GgmlType {
    /// Finds the type with this number; `None` for one that is not read.
    #[must_use]
    pub fn find(number: u32) -> Option<&'static Self> {
        TYPES.iter().find(|of| of.number == number)
    }

    /// Returns the types that are read, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        TYPES.iter()
    }

    /// Returns a type as errors name it, from its number in a file.
    #[must_use]
    pub fn describe(number: u32) -> String {
        let removed = match number {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            9 => return "type 9 (Q8_1, which llama.cpp has for inputs of products alone)".to_string(),
            _ => {
                return match Self::find(number) {
                    Some(known) => known.name.to_string(),
                    None => format!("type {number}, which is not known"),
                };
            }
        };
        format!("type {number} ({removed}, which llama.cpp removed)")
    }

    /// Returns Candle's name of the type; `None` for one that Candle does not have.
    #[must_use]
    pub fn in_candle(&self) -> Option<GgmlDType> {
        Some(match self.number {
            0 => GgmlDType::F32,
            1 => GgmlDType::F16,
            2 => GgmlDType::Q4_0,
            3 => GgmlDType::Q4_1,
            6 => GgmlDType::Q5_0,
            7 => GgmlDType::Q5_1,
            8 => GgmlDType::Q8_0,
            10 => GgmlDType::Q2K,
            11 => GgmlDType::Q3K,
            12 => GgmlDType::Q4K,
            13 => GgmlDType::Q5K,
            14 => GgmlDType::Q6K,
            15 => GgmlDType::Q8K,
            30 => GgmlDType::BF16,
            _ => return None,
        })
    }

    /// Returns the number of one of Candle's types.
    #[must_use]
    pub fn number_of(dtype: GgmlDType) -> u32 {
        match dtype {
            GgmlDType::F32 => 0,
            GgmlDType::F16 => 1,
            GgmlDType::Q4_0 => 2,
            GgmlDType::Q4_1 => 3,
            GgmlDType::Q5_0 => 6,
            GgmlDType::Q5_1 => 7,
            GgmlDType::Q8_0 => 8,
            GgmlDType::Q8_1 => 9,
            GgmlDType::Q2K => 10,
            GgmlDType::Q3K => 11,
            GgmlDType::Q4K => 12,
            GgmlDType::Q5K => 13,
            GgmlDType::Q6K => 14,
            GgmlDType::Q8K => 15,
            GgmlDType::BF16 => 30,
        }
    }

    /// Returns whether the numbers of the type are codes with scales.
    #[must_use]
    pub fn has_codes(&self) -> bool {
        matches!(self.form, GgmlForm::Codes(_))
    }

    /// Checks that data are the blocks of a number of rows.
    ///
    /// # Errors
    /// For data of another length than the shape says, and for rows that are no whole blocks.
    pub fn check_blocks(&self, data: &[u8], rows: usize, columns: usize) -> Result<()> {
        let blocks = data.len() / self.bytes;
        let is_whole = data.len().is_multiple_of(self.bytes) && columns.is_multiple_of(self.block);
        if !is_whole || Some(blocks * self.block) != rows.checked_mul(columns) {
            bail!("[{OP}] {} bytes of {}, expected the blocks of {rows} rows of {columns}", data.len(), self.name)
        }
        Ok(())
    }

    /// Reads the rows of a tensor, each of which is a sequence of whole blocks.
    ///
    /// # Errors
    /// For data of another length than the shape says, and if memory is short.
    pub fn read(&self, data: &[u8], rows: usize, columns: usize) -> Result<GgmlNumbers> {
        self.check_blocks(data, rows, columns)?;
        match &self.form {
            GgmlForm::Plain(convert) => {
                Tensor::from_vec(convert(data), (rows, columns), &Device::Cpu).map(GgmlNumbers::Plain)
            }
            GgmlForm::Codes(codes) => {
                codes.read(data, self.bytes, rows, columns).map(|weight| GgmlNumbers::Codes(weight.into()))
            }
        }
    }
}

impl GgmlCodes {
    fn read(&self, data: &[u8], block_bytes: usize, outputs: usize, inputs: usize) -> Result<QuantizedWeight> {
        let mut unpacked = Unpacked::default();
        unpacked.codes.reserve(outputs * inputs);
        for block in data.chunks_exact(block_bytes) {
            (self.append)(block, &mut unpacked);
        }
        let Unpacked { codes, halves, singles, bytes, minimum_halves, minimum_bytes } = unpacked;
        let has_minimums = matches!(self.values, GgmlValues::Minimums);
        let nested = |numbers, factors| {
            let middle = if has_minimums { 0 } else { WHOLE_ZERO };
            GroupNumbers::Nested { numbers, middle, factors, groups_of_factor: NUMBERS_OF_FACTOR / self.group }
        };
        let values = match self.values {
            GgmlValues::Signed => CodeValues::Signed,
            GgmlValues::Table(values) => CodeValues::Table(values),
            GgmlValues::Minimums if matches!(self.scales, GgmlScales::Nested) => {
                CodeValues::Minimums(nested(minimum_bytes, minimum_halves))
            }
            GgmlValues::Minimums => CodeValues::Minimums(GroupNumbers::F16(minimum_halves)),
        };
        let scales = match self.scales {
            GgmlScales::F16 => GroupNumbers::F16(halves),
            GgmlScales::F32 => GroupNumbers::F32(singles),
            GgmlScales::Bytes(number) => GroupNumbers::Bytes { bytes, table: (0..=u8::MAX).map(number).collect() },
            GgmlScales::Nested => nested(bytes, halves),
        };
        let weight = QuantizedWeight {
            outputs,
            inputs,
            bits: self.bits,
            codes,
            group: self.group,
            values,
            scales,
            input_order: None,
        };
        weight.checked()
    }
}
