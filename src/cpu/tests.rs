//! Every tier of this processor, one operation at a time.

mod conversions;
mod elementary;
mod products;

use super::arch::{self, scalar::Scalar};
use super::{Job, Kernel, Tier};

/// Runs the job on every tier of this processor. The tier on which it fails is the last one that was printed.
fn on_every_tier<J: Job>(job: impl Fn() -> J) {
    for tier in Tier::available() {
        println!("{tier}");
        // SAFETY: the processor has the tier.
        unsafe {
            match tier {
                Tier::Scalar => Scalar::vectorize(job()),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx2 => arch::x86_64::avx2::Avx2::vectorize(job()),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx512 => arch::x86_64::avx512::Avx512::vectorize(job()),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx512Bf16 => arch::x86_64::avx512bf16::Avx512Bf16::vectorize(job()),
                #[cfg(target_arch = "x86_64")]
                Tier::Amx => arch::x86_64::amx::Amx::vectorize(job()),
                #[cfg(target_arch = "aarch64")]
                Tier::Neon => arch::aarch64::neon::Neon::vectorize(job()),
                #[cfg(target_arch = "aarch64")]
                Tier::NeonBf16 => arch::aarch64::neonbf16::NeonBf16::vectorize(job()),
                _ => unreachable!("tiers of other processors are not available"),
            }
        }
    }
}

/// Numbers that do not repeat soon, the same in every run (splitmix64).
struct Sequence(u64);

impl Sequence {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A whole number from `-most` to `most`.
    fn whole(&mut self, most: u64) -> f32 {
        (self.bits() % (2 * most + 1)) as f32 - most as f32
    }

    /// A number from -1 to 1.
    fn fraction(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
