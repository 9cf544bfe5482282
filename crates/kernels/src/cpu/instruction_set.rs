//! Instruction sets: which of them the processor has, and which one a call uses.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use super::detection;

/// An instruction set that the CPU kernels are compiled for.
///
/// The best one that the processor has is chosen once. `CANDLE_ATTENTION_CPU=avx2` in the environment chooses another
/// for the whole process, and a caller may choose one for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum InstructionSet {
    /// Plain Rust, on every processor.
    Scalar,
    /// Arm's 128-bit vectors.
    Neon,
    /// NEON with bf16 dot products.
    NeonBf16,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with bf16 dot products.
    Avx512Bf16,
    /// Tile matrix products in bf16, together with AVX-512. The operating system has to permit them.
    Amx,
}

/// The environment variable that chooses an instruction set for the process.
const VARIABLE: &str = "CANDLE_ATTENTION_CPU";

impl InstructionSet {
    /// The instruction sets of all processors, the slowest first.
    pub const ALL: [Self; 7] =
        [Self::Scalar, Self::Neon, Self::NeonBf16, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Returns the instruction sets of this processor, the slowest first. [`InstructionSet::Scalar`] is always among
    /// them.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|instruction_set| instruction_set.is_available()).collect()
    }

    /// Returns whether this processor has the instruction set.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => detection::has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => detection::has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => detection::has_avx512_bf16(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => detection::has_amx(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => detection::has_neon(),
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => detection::has_neon_bf16(),
            _ => false,
        }
    }

    /// Returns the instruction set for a call: `requested` if it is given, otherwise the environment's, otherwise the
    /// fastest for products over bf16 or over other types.
    ///
    /// # Errors
    /// If this processor lacks the instruction set, or the environment names no instruction set.
    pub fn choose(requested: Option<Self>, is_bf16: bool) -> Result<Self, UnsupportedInstructionSet> {
        if let Some(requested) = requested {
            requested.check_available()?;
            return Ok(requested);
        }
        static FROM_ENVIRONMENT: OnceLock<Result<Option<InstructionSet>, UnsupportedInstructionSet>> = OnceLock::new();
        match FROM_ENVIRONMENT.get_or_init(from_environment) {
            Ok(Some(instruction_set)) => Ok(*instruction_set),
            Ok(None) => Ok(Self::fastest(is_bf16)),
            Err(error) => Err(error.clone()),
        }
    }

    /// Checks that this processor has the instruction set.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn check_available(self) -> Result<(), UnsupportedInstructionSet> {
        if !self.is_available() {
            return Err(UnsupportedInstructionSet::Unavailable(self));
        }
        Ok(())
    }

    /// Returns the fastest instruction set of this processor.
    fn fastest(is_bf16: bool) -> Self {
        // Once: a virtual machine answers the question for its processor by a trap, and the projections of a token ask
        // each time.
        static FOR_BF16: OnceLock<InstructionSet> = OnceLock::new();
        static FOR_OTHERS: OnceLock<InstructionSet> = OnceLock::new();
        let fastest = if is_bf16 { &FOR_BF16 } else { &FOR_OTHERS };
        *fastest.get_or_init(|| {
            let is_worth_it = |instruction_set: &Self| instruction_set.is_worth_it(is_bf16);
            Self::available().into_iter().rfind(is_worth_it).unwrap_or(Self::Scalar)
        })
    }

    /// Returns whether the instruction set is faster than the ones before it in [`ALL`](Self::ALL).
    fn is_worth_it(self, is_bf16: bool) -> bool {
        match self {
            // For other types they are NEON and AVX-512.
            Self::NeonBf16 | Self::Avx512Bf16 | Self::Amx if !is_bf16 => false,
            Self::Avx512Bf16 => !detection::has_slow_dot_products(),
            _ => true,
        }
    }
}

/// Returns the instruction set that the environment names.
///
/// # Errors
/// If the environment names an instruction set that does not exist or that this processor lacks.
fn from_environment() -> Result<Option<InstructionSet>, UnsupportedInstructionSet> {
    let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else { return Ok(None) };
    let name = value.to_string_lossy();
    match name.parse::<InstructionSet>() {
        Ok(instruction_set) if instruction_set.is_available() => Ok(Some(instruction_set)),
        Ok(instruction_set) => {
            Err(UnsupportedInstructionSet::Environment(format!("is {instruction_set}, which this processor lacks")))
        }
        Err(_) => Err(UnsupportedInstructionSet::Environment(format!("is {name:?}, which is no instruction set"))),
    }
}

/// The reason why a call has no instruction set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnsupportedInstructionSet {
    /// This processor lacks the instruction set.
    Unavailable(InstructionSet),
    /// No instruction set has this name.
    Unknown(String),
    /// The value of `CANDLE_ATTENTION_CPU` is not usable, for this reason.
    Environment(String),
}

impl fmt::Display for UnsupportedInstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = names(&InstructionSet::available());
        match self {
            Self::Unavailable(instruction_set) => {
                write!(f, "this processor lacks the instruction set {instruction_set}, expected one of {available}")
            }
            Self::Unknown(name) => {
                write!(f, "{name:?} is no instruction set, expected one of {}", names(&InstructionSet::ALL))
            }
            Self::Environment(reason) => write!(f, "{VARIABLE} {reason}, expected one of {available}"),
        }
    }
}

impl std::error::Error for UnsupportedInstructionSet {}

fn names(instruction_sets: &[InstructionSet]) -> String {
    instruction_sets.iter().map(InstructionSet::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

impl FromStr for InstructionSet {
    type Err = UnsupportedInstructionSet;

    fn from_str(name: &str) -> Result<Self, UnsupportedInstructionSet> {
        let known = Self::ALL.into_iter().find(|instruction_set| instruction_set.to_string() == name);
        known.ok_or_else(|| UnsupportedInstructionSet::Unknown(name.into()))
    }
}
