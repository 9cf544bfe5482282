//! The tiles of the attention kernels, and the shared memory that they need.
//!
//! The first candidate that fits the device is taken. The order is by speed on an H100; the candidates for devices with
//! less shared memory were not timed. The source gets every size and place from here, as a macro.

mod backward;
mod decode;
mod forward;
mod named;
mod rows;

pub(crate) use backward::{BackwardKernels, BackwardTile, QueryGradient};
pub(crate) use decode::DecodeTile;
pub(crate) use forward::{ForwardLength, ForwardTile};
pub(crate) use named::program_of_options;
pub(crate) use rows::programs_of_every_row;

use crate::arguments::{AttentionArguments, SMALL_BLOCK_THREADS};
use crate::kernel_struct::KernelStruct;
use crate::program::{Define, Program};
use crate::specialization::Specialization;
use crate::unsupported::Unsupported;

/// The warps of these kernels, each of which works on a row.
pub(crate) const SMALL_BLOCK_WARPS: usize = SMALL_BLOCK_THREADS / 32;

/// The kernels that a program has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KernelSet {
    Forward,
    Decode,
    Backward,
}

impl KernelSet {
    /// Returns the value of the set in the macro KERNEL_SET: FORWARD_KERNELS, DECODE_KERNELS or BACKWARD_KERNELS in
    /// the source.
    fn bit(self) -> i64 {
        match self {
            Self::Forward => 1,
            Self::Decode => 2,
            Self::Backward => 4,
        }
    }

    /// Returns the macro of a program with the kernels of some sets.
    fn define(sets: &[Self]) -> Define {
        Define { name: "KERNEL_SET", value: sets.iter().map(|set| set.bit()).sum() }
    }
}

/// The classes of head dimensions for which tiles were timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    /// Up to 64 columns.
    Narrow,
    /// More than 64 columns, up to 128.
    Middle,
    /// More than 128 columns, up to 256.
    Wide,
}

impl Width {
    /// Returns the fewest columns.
    fn least(self) -> usize {
        match self {
            Self::Narrow => 16,
            Self::Middle => 80,
            Self::Wide => 144,
        }
    }

    /// Returns the most columns.
    fn most(self) -> usize {
        match self {
            Self::Narrow => 64,
            Self::Middle => 128,
            Self::Wide => 256,
        }
    }

    fn of(specialization: &Specialization) -> Self {
        match specialization.head_columns().max(specialization.value_columns()) {
            ..=64 => Self::Narrow,
            65..=128 => Self::Middle,
            _ => Self::Wide,
        }
    }
}

/// Returns the program of attention kernels with some constants.
fn program(defines: Vec<Define>) -> Program {
    Program { root: "attention.cu", arguments: AttentionArguments::DEFINITION, defines }
}

/// Returns why no tile of a kernel fits a device.
fn no_tile(kernel: &str, specialization: &Specialization, shared_bytes: usize) -> Unsupported {
    let Specialization { element, head_dim, value_dim, .. } = specialization;
    Unsupported::new(format!(
        "the {kernel} kernel in {:?} with head dimensions {head_dim} and {value_dim} needs more than the {shared_bytes} \
         bytes of shared memory that a block has on this device",
        element.dtype()
    ))
}
