//! The formats of weights of codes, which kernels are compiled for.

use candle_core::DType;

use super::coded_weight::{CodedNumbers, CodedValues, CodedWeight, columns_of_chunk};
use crate::program::Define;

/// The constants of programs for weights of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CodeFormat {
    pub(super) bits: usize,
    pub(super) values: Values,
    /// The columns of a group; 0 for all columns of a row.
    pub(super) group: usize,
    pub(super) scales: NumbersFormat,
    /// The zeros or minimums.
    pub(super) offsets: Option<NumbersFormat>,
}

/// The numbers of codes: the constants VALUES_.. of `code_numbers.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    Signed = 0,
    Zeros = 1,
    Minimums = 2,
    Table = 3,
    E4M3 = 4,
    E5M2 = 5,
}

/// The kind of the numbers of groups: the constants NUMBERS_.. of `code_numbers.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    F16 = 0,
    Bf16 = 1,
    F32 = 2,
    Whole = 3,
    Bytes = 4,
    Nested = 5,
}

/// The numbers of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NumbersFormat {
    pub(super) kind: Kind,
    /// The groups that share a factor of nested numbers, and 1 for others.
    pub(super) nest: usize,
}

impl CodeFormat {
    pub(super) fn of(weight: &CodedWeight) -> Self {
        let values = match weight.values() {
            CodedValues::Signed => Values::Signed,
            CodedValues::Zeros(_) => Values::Zeros,
            CodedValues::Minimums(_) => Values::Minimums,
            CodedValues::Table(_) => Values::Table,
            CodedValues::E4M3 => Values::E4M3,
            CodedValues::E5M2 => Values::E5M2,
        };
        Self {
            bits: weight.bits(),
            values,
            group: if weight.groups() == 1 { 0 } else { weight.group() },
            scales: NumbersFormat::of(weight.scales()),
            offsets: weight.offsets().map(NumbersFormat::of),
        }
    }

    /// Returns the columns of a chunk, whose codes a lane loads at once: CODE_CHUNK in the source.
    pub(super) fn chunk(&self) -> usize {
        columns_of_chunk(self.bits)
    }

    pub(super) fn defines(&self) -> Vec<Define> {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let mut defines = vec![
            define("CODE_BITS", self.bits),
            define("CODE_VALUES", self.values as usize),
            define("CODE_GROUP", self.group),
            define("SCALE_NUMBERS", self.scales.kind as usize),
            define("SCALE_NEST", self.scales.nest),
        ];
        if let Some(offsets) = self.offsets {
            defines.push(define("OFFSET_NUMBERS", offsets.kind as usize));
            defines.push(define("OFFSET_NEST", offsets.nest));
        }
        defines
    }
}

impl NumbersFormat {
    fn of(numbers: &CodedNumbers) -> Self {
        match numbers {
            CodedNumbers::Floats(floats) => Self::plain(match floats.dtype() {
                DType::F16 => Kind::F16,
                DType::BF16 => Kind::Bf16,
                _ => Kind::F32,
            }),
            CodedNumbers::Whole(_) => Self::plain(Kind::Whole),
            CodedNumbers::Bytes { .. } => Self::plain(Kind::Bytes),
            CodedNumbers::Nested { numbers, factors, .. } => {
                Self { kind: Kind::Nested, nest: numbers.dims()[1] / factors.dims()[1] }
            }
        }
    }

    pub(super) fn plain(kind: Kind) -> Self {
        Self { kind, nest: 1 }
    }
}
