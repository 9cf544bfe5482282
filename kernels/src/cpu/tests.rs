//! Every tier of this processor, one operation at a time.

mod conversions;
mod elementary;
mod memory;
mod products;

use super::{ForKernel, Job, Kernel, Tier, on_kernel};

/// Runs the job on every tier of this processor. The tier on which it fails is the last one that was printed.
fn on_every_tier<J: Job>(job: impl Fn() -> J) {
    struct Compiled<J>(J);
    impl<J: Job> ForKernel for Compiled<J> {
        unsafe fn run<K: Kernel>(self) {
            // SAFETY: the caller's promise.
            unsafe { K::vectorize(self.0) }
        }
    }
    for tier in Tier::available() {
        println!("{tier}");
        on_kernel(tier, true, Compiled(job()));
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
