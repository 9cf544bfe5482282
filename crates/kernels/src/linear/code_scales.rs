//! The scales of codes: the smallest format that has them to the bit, and how they are written to a panel.

use half::{bf16, f16};

use super::codes::{NestedScales, Scales};
use crate::cpu::{Float8, NumberFormat};

/// The code of 1 in E4M3.
const ONE_IN_E4M3: usize = 0x38;

impl Scales<'_> {
    /// Returns a number that is not nested.
    pub(super) fn number(&self, at: usize) -> f32 {
        match self {
            Self::F16(numbers) => numbers[at].to_f32(),
            Self::BF16(numbers) => numbers[at].to_f32(),
            Self::F32(numbers) => numbers[at],
            Self::Bytes { bytes, table } => table[usize::from(bytes[at])],
            Self::Nested(NestedScales { factors, .. }) => factors[at].to_f32(),
        }
    }

    /// Returns whether all numbers, or all factors of nested ones, fulfil a condition.
    pub(super) fn all(&self, condition: impl Fn(f32) -> bool) -> bool {
        match self {
            Self::F16(numbers) => numbers.iter().all(|number| condition(number.to_f32())),
            Self::BF16(numbers) => numbers.iter().all(|number| condition(number.to_f32())),
            Self::F32(numbers) => numbers.iter().all(|&number| condition(number)),
            Self::Bytes { bytes, table } => used_bytes(bytes).all(|byte| condition(table[byte])),
            Self::Nested(NestedScales { factors, .. }) => factors.iter().all(|factor| condition(factor.to_f32())),
        }
    }

    pub(super) fn are_finite(&self) -> bool {
        self.all(f32::is_finite)
    }

    /// Returns the smallest format that has the numbers to the bit. Nested ones have their own.
    pub(super) fn format(&self) -> NumberFormat {
        if let Self::Bytes { bytes, table } = self {
            let factor = table[ONE_IN_E4M3];
            let is_product = |byte: usize| {
                let product = Float8::E4M3.number(byte as u8) * factor;
                Float8::E4M3.is_finite(byte as u8) && product.to_bits() == table[byte].to_bits()
            };
            if used_bytes(bytes).all(is_product) {
                return NumberFormat::E4M3 { factor: factor.to_bits() };
            }
        }
        self.wide_format()
    }

    /// Returns the smallest format of at least 16 bits that has the numbers to the bit.
    pub(super) fn wide_format(&self) -> NumberFormat {
        match self {
            Self::F16(_) | Self::Nested(_) => NumberFormat::F16,
            Self::BF16(_) => NumberFormat::BF16,
            _ if self.all(|number| f16::from_f32(number).to_f32() == number) => NumberFormat::F16,
            _ if self.all(|number| bf16::from_f32(number).to_f32() == number) => NumberFormat::BF16,
            _ => NumberFormat::F32,
        }
    }
}

/// Returns the different bytes.
fn used_bytes(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let mut is_used = [false; 256];
    for &byte in bytes {
        is_used[usize::from(byte)] = true;
    }
    (0..256).filter(move |&byte| is_used[byte])
}

/// The scales of one column of a block, one row of the panel after another.
pub(super) struct ScaleWriter<'a> {
    /// The rows that are not written yet.
    pub to: &'a mut [u8],
    pub panel: usize,
    pub column: usize,
}

impl ScaleWriter<'_> {
    /// Writes a number of the next row in a format that has it to the bit.
    pub fn number(&mut self, format: NumberFormat, numbers: &Scales, at: usize) {
        match format {
            NumberFormat::F16 => self.row(&f16::from_f32(numbers.number(at)).to_ne_bytes()),
            NumberFormat::BF16 => self.row(&bf16::from_f32(numbers.number(at)).to_ne_bytes()),
            NumberFormat::F32 => self.row(&numbers.number(at).to_ne_bytes()),
            NumberFormat::U8 => self.row(&[numbers.number(at) as u8]),
            NumberFormat::E4M3 { .. } => match numbers {
                Scales::Bytes { bytes, .. } => self.row(&[bytes[at]]),
                _ => unreachable!("only scales in bytes have this format"),
            },
        }
    }

    /// Skips the number of the next row, which stays 0.
    pub fn skip(&mut self, format: NumberFormat) {
        self.next_row(format.bytes());
    }

    /// Writes a number of the next row.
    pub fn row(&mut self, number: &[u8]) {
        let column = self.column;
        self.next_row(number.len())[column * number.len()..][..number.len()].copy_from_slice(number);
    }

    /// Returns the next row, of numbers of some bytes.
    fn next_row(&mut self, bytes: usize) -> &mut [u8] {
        let (row, rest) = std::mem::take(&mut self.to).split_at_mut(bytes * self.panel);
        self.to = rest;
        row
    }
}
