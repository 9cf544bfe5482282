//! How the numbers of a packed weight are stored.

use std::fmt;

use crate::cpu::CODE_BLOCK;
use crate::number::Dtype;

/// How the numbers of a weight are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// As they are. bf16 is stored as pairs of neighbouring inputs, whether the tier multiplies them as they are or
    /// widens them: both take one instruction.
    Elements(Dtype),
    /// As [`CodeBlocks`](crate::cpu::CodeBlocks).
    Codes { bits: usize, has_minimums: bool },
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elements(dtype) => dtype.fmt(f),
            Self::Codes { bits, has_minimums: false } => write!(f, "codes of {bits} bits"),
            Self::Codes { bits, has_minimums: true } => write!(f, "codes of {bits} bits with minimums"),
        }
    }
}

impl Format {
    /// The type that numbers are unpacked as.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Elements(dtype) => dtype,
            Self::Codes { .. } => Dtype::F32,
        }
    }

    /// The inputs that are stored together.
    pub fn step(self) -> usize {
        match self {
            Self::Elements(Dtype::BF16) => 2,
            Self::Elements(_) => 1,
            Self::Codes { .. } => CODE_BLOCK,
        }
    }

    /// The bytes of so many inputs of one output, in whole steps.
    pub fn bytes(self, inputs: usize) -> usize {
        match self {
            Self::Elements(Dtype::F32) => inputs * 4,
            Self::Elements(Dtype::BF16 | Dtype::F16) => inputs * 2,
            Self::Codes { bits, has_minimums } => {
                let scales = size_of::<half::f16>() << u32::from(has_minimums);
                inputs / CODE_BLOCK * (scales + CODE_BLOCK * bits / 8)
            }
        }
    }
}
