//! Instruction sets: which the machine has, which a call uses.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// An instruction set that the CPU kernels are compiled for.
///
/// The best one that the processor has is chosen once; `CANDLE_ATTENTION_CPU=avx2` in the environment chooses another
/// for the whole process, a caller may choose one for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
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
    /// Tile matrix products in bf16, beside AVX-512; the operating system has to grant them.
    Amx,
}

/// The variable that chooses a tier for the process.
const VARIABLE: &str = "CANDLE_ATTENTION_CPU";

impl Tier {
    /// Every tier of every processor, the slowest first.
    pub const ALL: [Self; 7] =
        [Self::Scalar, Self::Neon, Self::NeonBf16, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The tiers that this processor has, the slowest first; [`Tier::Scalar`] is always among them.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|tier| tier.is_available()).collect()
    }

    /// Whether this processor has the tier.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => has_avx512() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512Bf16.is_available() && super::arch::amx::is_granted(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => Self::Neon.is_available() && std::arch::is_aarch64_feature_detected!("bf16"),
            _ => false,
        }
    }

    /// The tier for a call: the one asked for, else the environment's, else the fastest for products over bf16 or over
    /// other types.
    ///
    /// # Errors
    /// If this processor lacks the tier, or the environment names none.
    pub fn choose(asked: Option<Self>, is_bf16: bool) -> Result<Self, TierError> {
        if let Some(tier) = asked {
            return if tier.is_available() { Ok(tier) } else { Err(TierError::Unavailable(tier)) };
        }
        static FROM_ENVIRONMENT: OnceLock<Result<Option<Tier>, TierError>> = OnceLock::new();
        match FROM_ENVIRONMENT.get_or_init(from_environment) {
            Ok(Some(tier)) => Ok(*tier),
            Ok(None) => Ok(Self::fastest(is_bf16)),
            Err(error) => Err(error.clone()),
        }
    }

    fn fastest(is_bf16: bool) -> Self {
        // Once: a virtual machine answers what processor it has by a trap, and the projections of a token ask each
        // time.
        static FASTEST: OnceLock<[Tier; 2]> = OnceLock::new();
        let fastest =
            FASTEST.get_or_init(|| [false, true].map(|is_bf16| Self::fastest_of(&Self::available(), is_bf16)));
        fastest[usize::from(is_bf16)]
    }

    fn fastest_of(available: &[Self], is_bf16: bool) -> Self {
        let worth = |tier: &&Self| match tier {
            // Beside bf16 they are NEON and AVX-512.
            Self::NeonBf16 | Self::Avx512Bf16 | Self::Amx if !is_bf16 => false,
            Self::Avx512Bf16 => !has_slow_dot_products(),
            _ => true,
        };
        available.iter().rev().find(worth).copied().unwrap_or(Self::Scalar)
    }
}

fn from_environment() -> Result<Option<Tier>, TierError> {
    let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else { return Ok(None) };
    let value = value.to_string_lossy();
    match value.parse::<Tier>() {
        Ok(tier) if tier.is_available() => Ok(Some(tier)),
        Ok(tier) => Err(TierError::Environment(format!("is {tier}, which this processor lacks"))),
        Err(_) => Err(TierError::Environment(format!("is {value:?}, which is no CPU tier"))),
    }
}

/// Why there is no tier for a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TierError {
    /// The processor lacks it.
    Unavailable(Tier),
    /// No tier has this name.
    Unknown(String),
    /// What is wrong with `CANDLE_ATTENTION_CPU`.
    Environment(String),
}

impl fmt::Display for TierError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = names(&Tier::available());
        match self {
            Self::Unavailable(tier) => {
                write!(f, "this processor lacks the CPU tier {tier}, expected one of {available}")
            }
            Self::Unknown(name) => write!(f, "{name:?} is no CPU tier, expected one of {}", names(&Tier::ALL)),
            Self::Environment(what) => write!(f, "{VARIABLE} {what}, expected one of {available}"),
        }
    }
}

impl std::error::Error for TierError {}

fn names(tiers: &[Tier]) -> String {
    tiers.iter().map(Tier::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Scalar => "scalar",
            Self::Neon => "neon",
            Self::NeonBf16 => "neonbf16",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        })
    }
}

impl FromStr for Tier {
    type Err = TierError;

    fn from_str(name: &str) -> Result<Self, TierError> {
        let known = Self::ALL.into_iter().find(|tier| tier.to_string() == name);
        known.ok_or_else(|| TierError::Unknown(name.into()))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// What the processor says of itself under `leaf`, the first part of it.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "unsafe in older versions of Rust that are allowed")]
pub(crate) fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::__cpuid_count(leaf, 0) }
}

/// Intel's bf16 dot products take four cycles for what a multiply-add in f32 does in two: 150 GFLOP/s against 284 on
/// two cores of a Xeon (family 6, model 167). AMD's take half of the time.
fn has_slow_dot_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = cpuid(0);
        (leaf.ebx, leaf.edx, leaf.ecx) == (0x756e_6547, 0x4965_6e69, 0x6c65_746e)
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}
