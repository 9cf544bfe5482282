//! Weights of codes of up to 8 bits.

use half::{bf16, f16};

use super::weight::WeightShape;
use crate::cpu::NESTED_BLOCK;
use crate::error::{Error, check_len};

/// The largest code and the largest whole number of a scale whose product with a factor of 11 bits is exact in f32.
const LARGEST_EXACT_CODE: u8 = 127;
const LARGEST_EXACT_SCALE: u8 = 63;

/// A weight (out, in) whose numbers are codes with a scale for each group of inputs of an output. Products with it have
/// the bits of products with these numbers in f32, for any scales and minimums: zeros of either sign, subnormal,
/// infinite and NaN.
///
/// ```
/// use candle_attention_kernels::{InstructionSet, linear::{Codes, PackedWeight, Scales, Values, WeightShape}};
/// use half::f16;
///
/// // One output of 32 inputs, each of which is (code - 8) / 2.
/// let codes: Vec<u8> = (0..32).map(|input| input % 16).collect();
/// let scales = Scales::F16(&[f16::from_f32(0.5)]);
/// let codes = Codes { bits: 4, codes: &codes, group: 32, values: Values::Signed, scales };
/// let shape = WeightShape { outputs: 1, inputs: 32 };
/// let weight = PackedWeight::from_codes(&codes, shape, InstructionSet::Scalar)?.expect("codes that are packed");
/// assert_eq!(weight.unpack::<f32>()?[..3], [-4.0, -3.5, -3.0]);
/// // A panel of the scalar instruction set has 16 outputs, and memory comes in lines of 64 bytes.
/// assert_eq!(weight.memory(), (16usize * (2 + 16)).next_multiple_of(64));
/// # Ok::<(), candle_attention_kernels::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// The number of bits of a code: 2 to 6, or 8.
    pub bits: usize,
    /// The codes, (out, in), each below 2^bits.
    pub codes: &'a [u8],
    /// The number of neighbouring inputs that share a scale. It divides the number of inputs, and equals it where each
    /// output has one scale.
    pub group: usize,
    /// The meaning of a code as a number.
    pub values: Values<'a>,
    /// The scales, (out, in / group).
    pub scales: Scales<'a>,
}

/// The meaning of a code as a number.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// `(code - 2^(bits - 1)) · scale`: codes on both sides of zero.
    Signed,
    /// `(code - zero) · scale`, where the difference and the product are rounded. The zeros, (out, in / group), are
    /// whole numbers or not.
    Zeros(&'a [f32]),
    /// `code · scale + minimum`, rounded once. The minimums, (out, in / group), are nested where the scales are.
    Minimums(Scales<'a>),
    /// `table[code] · scale`, with codes of up to 4 bits.
    Table(&'a [f32; 16]),
    /// Floats of 8 bits with 4 bits of exponent and no infinity (E4M3FN), times their scale.
    E4M3,
    /// Floats of 8 bits with 5 bits of exponent, times their scale.
    E5M2,
}

/// The scales, or the minimums, of a weight of codes.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// Numbers in f16.
    F16(&'a [f16]),
    /// Numbers in bf16.
    BF16(&'a [bf16]),
    /// Numbers in f32.
    F32(&'a [f32]),
    /// Numbers of a table.
    Bytes {
        /// The index of each number.
        bytes: &'a [u8],
        /// The numbers.
        table: &'a [f32; 256],
    },
    /// Whole numbers times factors in f16, as the K-quants of GGUF files have them, for groups of 16 or 32 inputs.
    /// Without minimums, 128 is subtracted from each whole number. With minimums, whole numbers of scales are below 64
    /// and codes below 128, so that their product is exact and a number of the weight is rounded once.
    Nested(NestedScales<'a>),
}

/// Scales, or minimums, that are whole numbers times factors.
#[derive(Clone, Copy, Debug)]
pub struct NestedScales<'a> {
    /// The factors, (out, in / [`NESTED_BLOCK`]).
    pub factors: &'a [f16],
    /// The whole numbers, (out, in / group).
    pub numbers: &'a [u8],
}

impl<'a> Scales<'a> {
    /// Returns the nested scales, if they are nested.
    pub(super) fn nested(&self) -> Option<NestedScales<'a>> {
        match self {
            Self::Nested(nested) => Some(*nested),
            _ => None,
        }
    }

    /// Checks the lengths of the slices for a number of codes in groups.
    fn check(&self, names: &ScaleNames, group: usize, codes: usize) -> Result<(), Error> {
        let groups = codes / group;
        match self {
            Self::F16(numbers) => check_len(names.numbers, numbers.len(), groups),
            Self::BF16(numbers) => check_len(names.numbers, numbers.len(), groups),
            Self::F32(numbers) => check_len(names.numbers, numbers.len(), groups),
            Self::Bytes { bytes, .. } => check_len(names.numbers, bytes.len(), groups),
            Self::Nested(nested) => {
                check_len(names.factors, nested.factors.len(), codes / NESTED_BLOCK)?;
                check_len(names.numbers, nested.numbers.len(), groups)
            }
        }
    }
}

/// The names of scales, or of minimums, in errors.
struct ScaleNames {
    numbers: &'static str,
    factors: &'static str,
}

const SCALES: ScaleNames = ScaleNames { numbers: "scales", factors: "factors of scales" };
const MINIMUMS: ScaleNames = ScaleNames { numbers: "minimums", factors: "factors of minimums" };

impl Codes<'_> {
    /// Checks the bits, the groups, the lengths of the slices and the codes.
    pub(super) fn check(&self, shape: WeightShape) -> Result<(), Error> {
        let &Self { bits, codes, group, values, scales } = self;
        self.check_bits()?;
        if group == 0 || !shape.inputs.is_multiple_of(group) {
            let inputs = shape.inputs;
            return Err(Error::Shape(format!("expected groups that divide {inputs} inputs, found {group}")));
        }
        if scales.nested().is_some() {
            self.check_nested_group(shape)?;
        }
        let count = shape.count()?;
        check_len("codes", codes.len(), count)?;
        scales.check(&SCALES, group, count)?;
        match values {
            Values::Zeros(zeros) => check_len("zeros", zeros.len(), count / group)?,
            Values::Minimums(minimums) => minimums.check(&MINIMUMS, group, count)?,
            Values::Signed | Values::Table(_) | Values::E4M3 | Values::E5M2 => {}
        }
        let largest = codes.iter().copied().max().unwrap_or(0);
        if bits < 8 && largest >> bits > 0 {
            return Err(Error::Shape(format!("expected codes of {bits} bits, found {largest}")));
        }
        if let (Some(scales), Values::Minimums(_)) = (scales.nested(), values) {
            let largest_scale = scales.numbers.iter().copied().max().unwrap_or(0);
            if largest > LARGEST_EXACT_CODE || largest_scale > LARGEST_EXACT_SCALE {
                return Err(Error::Shape(format!(
                    "with minimums, expected codes up to {LARGEST_EXACT_CODE} and scales up to {LARGEST_EXACT_SCALE}, \
                     found {largest} and {largest_scale}"
                )));
            }
        }
        Ok(())
    }

    /// Checks the bits of a code.
    fn check_bits(&self) -> Result<(), Error> {
        let bits = self.bits;
        match self.values {
            Values::Table(_) if bits > 4 => {
                Err(Error::Shape(format!("expected codes of up to 4 bits with a table, found {bits}")))
            }
            Values::E4M3 | Values::E5M2 if bits != 8 => {
                Err(Error::Shape(format!("expected floats of 8 bits, found {bits}")))
            }
            _ if !matches!(bits, 2..=6 | 8) => {
                Err(Error::Shape(format!("expected codes of 2, 3, 4, 5, 6 or 8 bits, found {bits}")))
            }
            _ => Ok(()),
        }
    }

    /// Checks the groups of nested scales, and that minimums are nested with them.
    fn check_nested_group(&self, shape: WeightShape) -> Result<(), Error> {
        let &Self { group, values, .. } = self;
        if group != 16 && group != 32 {
            return Err(Error::Shape(format!("expected groups of 16 or 32 codes, found {group}")));
        }
        if !shape.inputs.is_multiple_of(NESTED_BLOCK) {
            let inputs = shape.inputs;
            return Err(Error::Shape(format!("expected inputs in blocks of {NESTED_BLOCK}, found {inputs}")));
        }
        match values {
            Values::Signed | Values::Table(_) => Ok(()),
            Values::Minimums(minimums) if minimums.nested().is_some() => Ok(()),
            _ => Err(Error::Shape("expected signed codes, a table or nested minimums with nested scales".into())),
        }
    }
}
