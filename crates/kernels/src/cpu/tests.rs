//! Tests of single operations on every instruction set of this processor.

mod conversions;
mod elementary;
#[cfg(all(unix, not(miri)))]
mod fork;
mod products;

use super::{InstructionSet, Kernel, SimdTask, dispatch_bf16, dispatch_f32};
use crate::number::Number;

/// Returns numbers between -1 and 1 that look random.
pub(crate) fn numbers<E: Number>(count: usize, salt: u64) -> Vec<E> {
    let number = |n: u64| ((n + 1).wrapping_mul(salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) >> 40) as f32;
    (0..count as u64).map(|n| E::from_f32(number(n) / (1 << 23) as f32 - 1.0)).collect()
}

/// Runs the task on the kernels of every instruction set of this processor. The instruction set on which it fails is
/// the last one that was printed.
pub fn on_every_instruction_set<T: SimdTask>(task: impl Fn() -> T) {
    struct Compiled<T>(T);
    impl<T: SimdTask> SimdTask for Compiled<T> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<K: Kernel>(self) {
            // SAFETY: the processor has the instruction set of K; tiles are configured for as long as the task runs.
            unsafe {
                let _tiles = K::configure_tiles();
                self.0.run::<K>();
            }
        }
    }
    for instruction_set in InstructionSet::available() {
        println!("{instruction_set}");
        dispatch_f32(instruction_set, Compiled(task()));
        dispatch_bf16(instruction_set, Compiled(task()));
    }
}

/// Numbers that do not repeat soon, the same in every run (splitmix64).
pub(crate) struct Sequence(pub u64);

impl Sequence {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a whole number from `-most` to `most`.
    pub fn whole(&mut self, most: u64) -> f32 {
        (self.bits() % (2 * most + 1)) as f32 - most as f32
    }

    /// Returns a number from -1 to 1.
    pub fn fraction(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Returns `1 - erf(x)` to 1e-11 of itself: a series near 0, a continued fraction for the tail.
pub(crate) fn erfc(x: f64) -> f64 {
    let square = x * x;
    let root = std::f64::consts::PI.sqrt();
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 3.0 {
        let mut term = x;
        let mut sum = x;
        for n in 1..120 {
            term *= 2.0 * square / f64::from(2 * n + 1);
            sum += term;
        }
        return 1.0 - 2.0 / root * (-square).exp() * sum;
    }
    let fraction = (1..120).rev().fold(x, |below, n| x + f64::from(n) / 2.0 / below);
    (-square).exp() / (root * fraction)
}
