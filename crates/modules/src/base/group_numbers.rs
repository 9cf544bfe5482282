//! Numbers of the groups of a weight of codes: scales, zeros and minimums.

use std::ops::Range;

use candle_core::{Result, bail};
use half::{bf16, f16};

/// The operation in the texts of errors.
pub(super) const OP: &str = "quantized_weight";

/// A number for each group of each output, (out, in / group).
#[derive(Debug, Clone, PartialEq)]
pub enum GroupNumbers {
    /// Numbers in f16.
    F16(Vec<f16>),
    /// Numbers in bf16.
    BF16(Vec<bf16>),
    /// Numbers in f32.
    F32(Vec<f32>),
    /// Whole numbers from 0 to 255.
    Whole(Vec<u8>),
    /// Bytes that are places in a table of 256 numbers.
    Bytes {
        /// The bytes.
        bytes: Vec<u8>,
        /// The number of each byte.
        table: Vec<f32>,
    },
    /// Whole numbers times factors that several groups share: `factor · (number - middle)`.
    Nested {
        /// The whole numbers.
        numbers: Vec<u8>,
        /// The whole number whose meaning is 0.
        middle: u8,
        /// The factors, (out, in / group / groups_of_factor).
        factors: Vec<f16>,
        /// The number of neighbouring groups that share a factor.
        groups_of_factor: usize,
    },
}

impl GroupNumbers {
    /// Returns the number of groups.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F16(numbers) => numbers.len(),
            Self::BF16(numbers) => numbers.len(),
            Self::F32(numbers) => numbers.len(),
            Self::Whole(numbers) | Self::Bytes { bytes: numbers, .. } | Self::Nested { numbers, .. } => numbers.len(),
        }
    }

    /// Returns whether there are no groups.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of a group in f32.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn get(&self, group: usize) -> f32 {
        match self {
            Self::F16(numbers) => numbers[group].to_f32(),
            Self::BF16(numbers) => numbers[group].to_f32(),
            Self::F32(numbers) => numbers[group],
            Self::Whole(numbers) => numbers[group].into(),
            Self::Bytes { bytes, table } => table[usize::from(bytes[group])],
            Self::Nested { numbers, middle, factors, groups_of_factor } => {
                factors[group / groups_of_factor].to_f32() * (f32::from(numbers[group]) - f32::from(*middle))
            }
        }
    }

    /// Checks that there are `groups` numbers, and the tables and factors that belong to them.
    pub(super) fn check(&self, what: &str, groups: usize, groups_of_row: usize) -> Result<()> {
        if self.len() != groups {
            bail!("[{OP}] expected {groups} {what}, found {}", self.len())
        }
        match self {
            Self::Bytes { table, .. } if table.len() != 256 => {
                bail!("[{OP}] expected a table of 256 {what}, found {}", table.len())
            }
            Self::Nested { factors, groups_of_factor, .. } => {
                if *groups_of_factor == 0 || !groups_of_row.is_multiple_of(*groups_of_factor) {
                    bail!(
                        "[{OP}] expected factors of {what} for a part of the {groups_of_row} groups of a row, found \
                         one for {groups_of_factor}"
                    )
                }
                if factors.len() != groups / groups_of_factor {
                    bail!("[{OP}] expected {} factors of {what}, found {}", groups / groups_of_factor, factors.len())
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns the numbers of some groups, in a new order. With factors, whole runs of groups that share a factor.
    pub(super) fn select(&self, runs: &[Range<usize>]) -> Self {
        fn of<T: Clone>(numbers: &[T], runs: &[Range<usize>]) -> Vec<T> {
            let mut selected = Vec::with_capacity(runs.iter().map(Range::len).sum());
            for run in runs {
                selected.extend_from_slice(&numbers[run.clone()]);
            }
            selected
        }
        match self {
            Self::F16(numbers) => Self::F16(of(numbers, runs)),
            Self::BF16(numbers) => Self::BF16(of(numbers, runs)),
            Self::F32(numbers) => Self::F32(of(numbers, runs)),
            Self::Whole(numbers) => Self::Whole(of(numbers, runs)),
            Self::Bytes { bytes, table } => Self::Bytes { bytes: of(bytes, runs), table: table.clone() },
            Self::Nested { numbers, middle, factors, groups_of_factor } => {
                let per = *groups_of_factor;
                let of_factors: Vec<_> = runs.iter().map(|run| run.start / per..run.end / per).collect();
                Self::Nested {
                    numbers: of(numbers, runs),
                    middle: *middle,
                    factors: of(factors, &of_factors),
                    groups_of_factor: per,
                }
            }
        }
    }

    /// Appends the numbers of `next`. Returns false where they are of another kind.
    pub(super) fn append(&mut self, next: &Self) -> bool {
        match (self, next) {
            (Self::F16(own), Self::F16(other)) => own.extend_from_slice(other),
            (Self::BF16(own), Self::BF16(other)) => own.extend_from_slice(other),
            (Self::F32(own), Self::F32(other)) => own.extend_from_slice(other),
            (Self::Whole(own), Self::Whole(other)) => own.extend_from_slice(other),
            (Self::Bytes { bytes, table }, Self::Bytes { bytes: other, table: other_table }) => {
                if table != other_table {
                    return false;
                }
                bytes.extend_from_slice(other);
            }
            (
                Self::Nested { numbers, middle, factors, groups_of_factor },
                Self::Nested {
                    numbers: other,
                    middle: other_middle,
                    factors: other_factors,
                    groups_of_factor: other_per,
                },
            ) => {
                if middle != other_middle || groups_of_factor != other_per {
                    return false;
                }
                numbers.extend_from_slice(other);
                factors.extend_from_slice(other_factors);
            }
            _ => return false,
        }
        true
    }
}
