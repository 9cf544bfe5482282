//! NEON with bf16 dot products: a word of two elements is multiplied and added in one instruction.
//!
//! `bfdot` rounds the two products' sum to odd, and then that sum and what was there: an inexact f32 gets 1 as its last bit.
//! It errs by up to an ulp, in either direction alike, where rounding to nearest errs by half of one; operands of 8 bits
//! err by 2^15 times as much. Subnormal numbers are zeros to it. The rounding would be another one if a program
//! set `FPCR.EBF` where the processor has it; none of this needs either.
//!
//! The intrinsics are not stable. `.arch_extension` lets the instructions pass where a build without optimisation leaves
//! a closure outside of the functions that are compiled for the tier.

use std::arch::aarch64::*;
use std::arch::asm;

use super::neon::Neon;
use super::tile::{self, ByLane};
use crate::cpu::kernel::{Job, Kernel, MulAdd, Narrow, Product};

pub(crate) struct NeonBf16;

impl MulAdd for NeonBf16 {
    type Vector = Neon;

    #[inline(always)]
    unsafe fn mul_add(sum: Neon, a: Neon, b: Neon) -> Neon {
        // SAFETY: the caller's promise; a splat has its word in every lane.
        Neon(unsafe { Self::mul_add_lane::<0>(sum.0, b.0, a.0) })
    }
}

impl ByLane for NeonBf16 {
    #[inline(always)]
    unsafe fn mul_add_lane<const LANE: i32>(mut sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                ".arch_extension bf16",
                "bfdot {sum:v}.4s, {b:v}.8h, {a:v}.2h[{lane}]",
                sum = inout(vreg) sum,
                b = in(vreg) b,
                a = in(vreg) a,
                lane = const LANE,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

impl Kernel for NeonBf16 {
    type Vector = Neon;
    const ELEMENTS: usize = 2;
    const ROWS: usize = tile::ROWS;
    const DEPTH: usize = 1;
    const VECTORS: usize = tile::VECTORS;

    #[inline(always)]
    unsafe fn store_pairs(low: Neon, high: Neon, to: *mut f32) {
        // SAFETY: the caller's promise; eight bf16 are four words.
        unsafe {
            let mut pairs = low.0;
            asm!(
                ".arch_extension bf16",
                "bfcvtn {low:v}.4h, {low:v}.4s",
                "bfcvtn {high:v}.4h, {high:v}.4s",
                "zip1 {low:v}.8h, {low:v}.8h, {high:v}.8h",
                low = inout(vreg) pairs,
                high = inout(vreg) high.0 => _,
                options(pure, nomem, nostack, preserves_flags),
            );
            vst1q_f32(to, pairs);
        }
    }

    unsafe fn vectorize(job: impl Job) {
        #[target_feature(enable = "neon,bf16")]
        unsafe fn compiled(job: impl Job) {
            // SAFETY: the caller's promise.
            unsafe { job.run::<NeonBf16>() }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(job) }
    }

    unsafe fn multiply(product: &Product) {
        #[target_feature(enable = "neon,bf16")]
        unsafe fn compiled(product: &Product) {
            // SAFETY: the caller's promise.
            unsafe { tile::multiply::<NeonBf16>(product) }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(product) }
    }

    unsafe fn multiply_narrow<B: Narrow>(_: &Product) {
        unreachable!("a word of this tier is two elements")
    }
}
