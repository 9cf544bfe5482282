//! The types of numbers that the kernels read and write.

use candle_core::DType;

use crate::program::Define;
use crate::unsupported::Unsupported;

/// The type of the tensors of a call and of their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ElementType {
    F16,
    Bf16,
    F32,
}

impl ElementType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    /// Returns the type of a dtype.
    ///
    /// # Errors
    /// For a dtype that the kernels do not compute in.
    pub fn of(dtype: DType) -> Result<Self, Unsupported> {
        match dtype {
            DType::F16 => Ok(Self::F16),
            DType::BF16 => Ok(Self::Bf16),
            DType::F32 => Ok(Self::F32),
            other => {
                Err(Unsupported::new(format!("the kernels compute F16, BF16 and F32, and the inputs are {other:?}")))
            }
        }
    }

    pub fn dtype(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::F32 => DType::F32,
        }
    }

    pub fn bytes(self) -> usize {
        self.dtype().size_in_bytes()
    }

    /// Returns the name of the type in the names of programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Returns the constant of the source that chooses the type.
    pub fn define(self) -> Define {
        let value = match self {
            Self::F16 => 0,
            Self::Bf16 => 1,
            Self::F32 => 2,
        };
        Define { name: "ELEMENT", value }
    }
}
