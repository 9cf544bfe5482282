//! The formats of weights of codes.

use std::fmt;

use half::{bf16, f16};

/// The inputs that share a scale and a minimum in f16 in the blocks of most GGUF types.
pub const CODE_BLOCK: usize = 32;

/// The inputs of a weight of codes that share the factors of its scales and minimums, where these are whole numbers.
/// The blocks of inputs whose products are summed are a multiple of it.
pub const NESTED_BLOCK: usize = 64;

/// The inputs that are stored together where scales are stored by groups.
pub const GROUPS_BLOCK: usize = 64;

/// The format of a weight of codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CodeFormat {
    /// The number of bits of a stored code: 4, 5, 6 or 8. Codes of 5 and 6 bits are split into their lower 4 bits and
    /// the others.
    pub bits: usize,
    pub values: CodeValues,
    pub scales: ScaleFormat,
}

/// The numbers of stored codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CodeValues {
    /// `code · scale`, with codes in two's complement.
    Signed,
    /// `code · scale + minimum`, rounded once, with codes from 0 on.
    Minimums,
    /// `(code - zero) · scale`, with codes from 0 on.
    Zeros,
    /// `table[code] · scale`, with codes of 4 bits.
    Table(CodeTable),
    /// As [`Table`](Self::Table), where the numbers of the table are bytes times a power of two.
    Bytes(ByteTable),
    /// A float of 8 bits times the scale.
    Float8(Float8),
}

/// The sixteen numbers of a table, as the bits of f32.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CodeTable([u32; 16]);

impl CodeTable {
    pub fn new(numbers: &[f32; 16]) -> Self {
        Self(numbers.map(f32::to_bits))
    }

    pub fn number(&self, code: usize) -> f32 {
        f32::from_bits(self.0[code])
    }

    /// Returns the address of the sixteen f32.
    pub fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }
}

/// The sixteen numbers of a table as signed bytes times one power of two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ByteTable {
    bytes: [i8; 16],
    /// The exponent of the power of two.
    exponent: i8,
}

impl ByteTable {
    /// The largest power of two is 2 to this power, and the smallest one its reciprocal.
    const MOST: i8 = 16;

    /// Returns the table of these numbers; `None` if they are no such bytes, or if one is -0.
    pub fn new(numbers: &[f32; 16]) -> Option<Self> {
        (-Self::MOST..=Self::MOST).rev().find_map(|exponent| {
            let table = Self { bytes: numbers.map(|number| (number / power_of_two(exponent)) as i8), exponent };
            let is_exact = |code: usize| table.number(code).to_bits() == numbers[code].to_bits();
            (0..16).all(is_exact).then_some(table)
        })
    }

    pub fn number(&self, code: usize) -> f32 {
        f32::from(self.bytes[code]) * power_of_two(self.exponent)
    }

    /// Returns the factor of scales, where bytes are taken as the highest 8 bits of words of 32.
    pub fn factor(&self) -> f32 {
        power_of_two(self.exponent - 24)
    }

    /// Returns the address of the sixteen bytes.
    pub fn as_ptr(&self) -> *const i8 {
        self.bytes.as_ptr()
    }
}

/// Returns 2 to a power whose result is a normal number.
fn power_of_two(exponent: i8) -> f32 {
    f32::from_bits(((127 + i32::from(exponent)) as u32) << 23)
}

/// A float of 8 bits with a sign, without infinities and NaN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Float8 {
    /// 4 bits of exponent and 3 of mantissa.
    E4M3,
    /// 5 bits of exponent and 2 of mantissa.
    E5M2,
}

/// The bits by which the exponent of E4M3 is moved down to that of an f32 where its sign is the highest bit of a word.
pub const E4M3_SHIFT: u32 = 4;
/// As [`E4M3_SHIFT`], for E5M2.
pub const E5M2_SHIFT: u32 = 3;

impl Float8 {
    /// Returns the number of a code whose bits were moved to their places in an f32, divided by what these bits are as
    /// an f32: 2 to the power of the difference of the exponents' biases.
    pub const fn factor(self) -> f32 {
        // The biases of the exponents are 7, 15, and 127 in f32.
        let power = match self {
            Self::E4M3 => 127 - 7,
            Self::E5M2 => 127 - 15,
        };
        f32::from_bits((power + 127) << 23)
    }

    /// Returns the number of a code that is neither infinite nor NaN.
    pub fn number(self, code: u8) -> f32 {
        let shift = match self {
            Self::E4M3 => E4M3_SHIFT,
            Self::E5M2 => E5M2_SHIFT,
        };
        let sign = u32::from(code & 0x80) << 24;
        let magnitude = u32::from(code & 0x7f) << 24 >> shift;
        f32::from_bits(sign | magnitude) * self.factor()
    }

    /// Returns whether a code is neither infinite nor NaN.
    pub fn is_finite(self, code: u8) -> bool {
        match self {
            Self::E4M3 => code & 0x7f != 0x7f,
            Self::E5M2 => code & 0x7f < 0x7c,
        }
    }
}

/// The format of the scales of codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ScaleFormat {
    /// A number in f16 for each [`CODE_BLOCK`] inputs. Minimums, if there are any, are such numbers too.
    F16,
    /// A whole number of 8 bits for each `group` inputs, times a factor in f16 for each [`NESTED_BLOCK`] inputs.
    /// Minimums, if there are any, are such numbers too.
    Nested { group: usize },
    /// Numbers for each group of inputs.
    Groups(GroupFormat),
}

/// The format of scales by groups.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GroupFormat {
    /// The number of inputs that share a stored scale: 16, 32 or 64.
    pub group: usize,
    pub scale: NumberFormat,
    pub offset: Offset,
}

/// The format of the minimum or the zero of a group, which is stored besides its scale.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Offset {
    None,
    /// A minimum, for [`CodeValues::Minimums`].
    Minimum(NumberFormat),
    /// A zero, for [`CodeValues::Zeros`]. For [`CodeValues::Minimums`], the minimum is `-zero · scale`, which is exact.
    Zero(NumberFormat),
}

/// The format of a stored scale, minimum or zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NumberFormat {
    F16,
    BF16,
    F32,
    /// A whole number from 0 to 255.
    U8,
    /// A number in E4M3 times a factor in f32, rounded to f32.
    E4M3 {
        /// The bits of the factor.
        factor: u32,
    },
}

impl NumberFormat {
    /// Returns the bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::U8 | Self::E4M3 { .. } => 1,
        }
    }

    /// Reads a number.
    ///
    /// # Safety
    /// The `index`th number after `from` exists.
    pub unsafe fn read(self, from: *const u8, index: usize) -> f32 {
        // SAFETY: as this function's contract.
        unsafe {
            match self {
                Self::F16 => from.cast::<f16>().add(index).read_unaligned().to_f32(),
                Self::BF16 => from.cast::<bf16>().add(index).read_unaligned().to_f32(),
                Self::F32 => from.cast::<f32>().add(index).read_unaligned(),
                Self::U8 => f32::from(*from.add(index)),
                Self::E4M3 { factor } => Float8::E4M3.number(*from.add(index)) * f32::from_bits(factor),
            }
        }
    }

    /// Returns whether the product of a number with a code of 8 bits is exact in f32.
    pub fn has_exact_products(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::U8)
    }
}

impl GroupFormat {
    /// Returns the number of groups of a block.
    pub fn count(self) -> usize {
        GROUPS_BLOCK / self.group
    }

    /// Returns the number of bytes of the scales of one column of a block, which come before its minimums or zeros.
    pub fn scale_bytes(self) -> usize {
        self.count() * self.scale.bytes()
    }

    /// Returns the number of bytes of one column of a block that come before its codes.
    pub fn bytes_before_codes(self) -> usize {
        match self.offset {
            Offset::None => self.scale_bytes(),
            Offset::Minimum(number) | Offset::Zero(number) => self.scale_bytes() + self.count() * number.bytes(),
        }
    }
}

impl CodeFormat {
    /// Returns the number of inputs that are stored together.
    pub fn block(self) -> usize {
        match self.scales {
            ScaleFormat::F16 => CODE_BLOCK,
            ScaleFormat::Nested { .. } => NESTED_BLOCK,
            ScaleFormat::Groups(_) => GROUPS_BLOCK,
        }
    }

    /// Returns the number of inputs that share a stored scale.
    pub fn group(self) -> usize {
        match self.scales {
            ScaleFormat::F16 => CODE_BLOCK,
            ScaleFormat::Nested { group } | ScaleFormat::Groups(GroupFormat { group, .. }) => group,
        }
    }

    /// Returns the number of bytes of one column of a block that come before its codes.
    pub fn bytes_before_codes(self) -> usize {
        let kinds = if self.values == CodeValues::Minimums { 2 } else { 1 };
        match self.scales {
            ScaleFormat::F16 => kinds * size_of::<f16>(),
            ScaleFormat::Nested { group } => kinds * (size_of::<f16>() + NESTED_BLOCK / group),
            ScaleFormat::Groups(groups) => groups.bytes_before_codes(),
        }
    }
}

impl fmt::Display for CodeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "codes of {} bits", self.bits)?;
        f.write_str(match self.values {
            CodeValues::Signed => "",
            CodeValues::Minimums => " with minimums",
            CodeValues::Zeros => " with zeros",
            CodeValues::Table(_) | CodeValues::Bytes(_) => " in a table",
            CodeValues::Float8(Float8::E4M3) => " in E4M3",
            CodeValues::Float8(Float8::E5M2) => " in E5M2",
        })?;
        match self.scales {
            ScaleFormat::F16 => Ok(()),
            ScaleFormat::Nested { group } => write!(f, ", a scale of 8 bits for each {group}"),
            ScaleFormat::Groups(GroupFormat { group, scale, .. }) => {
                write!(f, ", a scale of {} bits for each {group}", 8 * scale.bytes())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ByteTable, Float8};

    /// Computes the number of a code from its parts.
    fn from_parts(code: u8, mantissa_bits: u32, bias: i32) -> f64 {
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let exponent = i32::from((code & 0x7f) >> mantissa_bits);
        let magnitude = match exponent {
            0 => mantissa * 2f64.powi(1 - bias),
            _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
        };
        if code >= 128 { -magnitude } else { magnitude }
    }

    #[test]
    fn float8_number_of_each_code_matches_its_parts() {
        for code in 0..=255 {
            for (format, mantissa_bits, bias) in [(Float8::E4M3, 3, 7), (Float8::E5M2, 2, 15)] {
                let expected = from_parts(code, mantissa_bits, bias);
                if format.is_finite(code) {
                    let found = f64::from(format.number(code));
                    assert_eq!(found.to_bits(), expected.to_bits(), "{format:?} {code}");
                } else {
                    let largest = if format == Float8::E4M3 { 448.0 } else { 57344.0 };
                    assert!(expected.abs() > largest, "{format:?} {code}");
                }
            }
        }
    }

    #[test]
    fn byte_table_has_numbers_that_are_bytes_times_a_power_of_two() {
        let e2m1 = [0., 0.5, 1., 1.5, 2., 3., 4., 6., 0., -0.5, -1., -1.5, -2., -3., -4., -6.];
        for power in [2f32.powi(-13), 1.0, 2f32.powi(12)] {
            let numbers = e2m1.map(|x| x * power);
            let table = ByteTable::new(&numbers).expect("numbers of four bits");
            assert!((0..16).all(|code| table.number(code).to_bits() == numbers[code].to_bits()), "{power}");
            // A byte is taken as the highest bits of a word.
            let byte = f32::from(table.bytes[7]) * 2f32.powi(24);
            assert_eq!(byte * table.factor(), numbers[7]);
        }
        let with = |code: usize, number: f32| {
            let mut numbers = e2m1;
            numbers[code] = number;
            ByteTable::new(&numbers).is_some()
        };
        assert!(with(8, 0.0) && with(7, 63.5) && with(7, -64.0));
        // The sign of a zero, more than a byte, and numbers that are none.
        for number in [-0.0, 64.0, 0.1, 2f32.powi(-30), f32::INFINITY, f32::NAN] {
            assert!(!with(8, number), "{number}");
        }
    }
}
