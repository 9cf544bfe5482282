//! From a tier, which is known when the program runs, to the kernel that is compiled for it.

use super::Tier;
use super::arch::{self, scalar::Scalar};
use super::kernel::Kernel;

/// Work that is written once for every kernel.
pub(crate) trait ForKernel {
    /// # Safety
    /// The processor has the kernel's tier.
    unsafe fn run<K: Kernel>(self);
}

/// Runs work on a tier's kernel, over pairs of bf16 if both operands are bf16 and the tier multiplies them.
///
/// # Panics
/// If the processor lacks the tier.
pub(crate) fn on_kernel(tier: Tier, is_bf16: bool, work: impl ForKernel) {
    assert!(tier.is_available(), "the tier was checked");
    // SAFETY: the processor has the tier.
    unsafe {
        match tier {
            Tier::Scalar => work.run::<Scalar>(),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => work.run::<arch::x86_64::avx2::Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Bf16 if is_bf16 => work.run::<arch::x86_64::avx512bf16::Avx512Bf16>(),
            #[cfg(target_arch = "x86_64")]
            Tier::Amx if is_bf16 => work.run::<arch::x86_64::amx::Amx>(),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 | Tier::Avx512Bf16 | Tier::Amx => work.run::<arch::x86_64::avx512::Avx512>(),
            #[cfg(target_arch = "aarch64")]
            Tier::NeonBf16 if is_bf16 => work.run::<arch::aarch64::neonbf16::NeonBf16>(),
            #[cfg(target_arch = "aarch64")]
            Tier::Neon | Tier::NeonBf16 => work.run::<arch::aarch64::neon::Neon>(),
            _ => unreachable!("tiers of other processors are not available"),
        }
    }
}
