//! The formats of weights of codes, which kernels are compiled for.

use candle_core::DType;

use super::coded_weight::{CodedNumbers, CodedValues, CodedWeight, columns_of_chunk};
use crate::program::Define;

/// The constants of programs for weights of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CodeConstants {
    pub(super) bits: usize,
    pub(super) values: ValueKind,
    /// The number of columns of a group; 0 for all columns of a row.
    pub(super) group: usize,
    pub(super) scales: NumbersFormat,
    /// The zeros or minimums.
    pub(super) offsets: Option<NumbersFormat>,
}

/// The meaning of a code as a number: the constants VALUES_.. of `code_numbers.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueKind {
    Signed = 0,
    Zeros = 1,
    Minimums = 2,
    Table = 3,
    E4M3 = 4,
    E5M2 = 5,
}

/// The kind of the numbers of groups: the constants NUMBERS_.. of `code_numbers.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NumberKind {
    F16 = 0,
    Bf16 = 1,
    F32 = 2,
    Whole = 3,
    Bytes = 4,
    Nested = 5,
}

/// The format of the numbers of groups: of scales, zeros or minimums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NumbersFormat {
    pub(super) kind: NumberKind,
    /// The number of groups that share a factor of nested numbers; 1 for other numbers.
    pub(super) nest: usize,
}

impl CodeConstants {
    pub(super) fn of(weight: &CodedWeight) -> Self {
        let values = match weight.values() {
            CodedValues::Signed => ValueKind::Signed,
            CodedValues::Zeros(_) => ValueKind::Zeros,
            CodedValues::Minimums(_) => ValueKind::Minimums,
            CodedValues::Table(_) => ValueKind::Table,
            CodedValues::E4M3 => ValueKind::E4M3,
            CodedValues::E5M2 => ValueKind::E5M2,
        };
        Self {
            bits: weight.bits(),
            values,
            group: if weight.groups() == 1 { 0 } else { weight.group() },
            scales: NumbersFormat::of(weight.scales()),
            offsets: weight.offsets().map(NumbersFormat::of),
        }
    }

    /// Returns the number of columns of a chunk, whose codes a lane loads at once: CODE_CHUNK in the source.
    pub(super) fn chunk(&self) -> usize {
        columns_of_chunk(self.bits)
    }

    pub(super) fn defines(&self) -> Vec<Define> {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let offsets = self.offsets.unwrap_or(NumbersFormat::plain(NumberKind::F16));
        vec![
            define("CODE_BITS", self.bits),
            define("CODE_VALUES", self.values as usize),
            define("CODE_GROUP", self.group),
            define("SCALE_NUMBERS", self.scales.kind as usize),
            define("SCALE_NEST", self.scales.nest),
            define("OFFSET_NUMBERS", offsets.kind as usize),
            define("OFFSET_NEST", offsets.nest),
        ]
    }
}

impl NumbersFormat {
    fn of(numbers: &CodedNumbers) -> Self {
        match numbers {
            CodedNumbers::Floats(floats) => Self::plain(match floats.dtype() {
                DType::F16 => NumberKind::F16,
                DType::BF16 => NumberKind::Bf16,
                _ => NumberKind::F32,
            }),
            CodedNumbers::Whole(_) => Self::plain(NumberKind::Whole),
            CodedNumbers::Bytes { .. } => Self::plain(NumberKind::Bytes),
            CodedNumbers::Nested { numbers, factors, .. } => {
                Self { kind: NumberKind::Nested, nest: numbers.dims()[1] / factors.dims()[1] }
            }
        }
    }

    pub(super) fn plain(kind: NumberKind) -> Self {
        Self { kind, nest: 1 }
    }
}
