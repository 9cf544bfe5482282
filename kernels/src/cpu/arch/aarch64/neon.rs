//! NEON, which every 64-bit Arm processor has: thirty-two registers of four f32.

use std::arch::aarch64::*;
use std::arch::asm;

use super::tile::{self, ByLane};
use crate::cpu::kernel::{Job, Kernel, MulAdd, Narrow, Product, multiply_columns};
use crate::cpu::vector::{EXP2_LEAST, Vector, exp2_fraction};

#[derive(Clone, Copy)]
pub(crate) struct Neon(pub(super) float32x4_t);

/// Rows `r` and `r + 1`, then `r` and `r + 2` trade places.
///
/// # Safety
/// As [`Vector::transpose`].
#[inline(always)]
unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let row = |r: usize| vld1q_f32(from.add(r * from_stride));
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        let even = |x, y| vreinterpretq_f64_f32(vtrn1q_f32(x, y));
        let odd = |x, y| vreinterpretq_f64_f32(vtrn2q_f32(x, y));
        let (above, below) = ([even(a, b), odd(a, b)], [even(c, d), odd(c, d)]);
        for column in 0..2 {
            let (x, y) = (above[column], below[column]);
            vst1q_f32(to.add(column * to_stride), vreinterpretq_f32_f64(vzip1q_f64(x, y)));
            vst1q_f32(to.add((2 + column) * to_stride), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
        }
    }
}

impl Vector for Neon {
    const LANES: usize = 4;
    type Mask = uint32x4_t;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller's promise, as in every method here.
        unsafe { Self(vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vld1q_f32(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see `splat`.
        unsafe { vst1q_f32(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from)))) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: see `splat`.
        unsafe {
            let words = vld1q_u32(from.cast());
            let upper = vandq_u32(words, vdupq_n_u32(0xffff_0000));
            (Self(vreinterpretq_f32_u32(vshlq_n_u32::<16>(words))), Self(vreinterpretq_f32_u32(upper)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: see `splat`.
        unsafe {
            let bits = vreinterpretq_u32_f32(self.0);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let is_number = vceqq_f32(self.0, self.0);
            vst1_u16(to, vshrn_n_u32::<16>(vbslq_u32(is_number, rounded, quiet)));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: see `splat`; the processor rounds to nearest unless a program says otherwise.
        unsafe { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(self.0))) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vaddq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vsubq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vmulq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vdivq_f32(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vfmaq_f32(addend.0, self.0, factor.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: see `splat`. `fmax` would keep a NaN of either, `fmaxnm` a number of either.
        unsafe { Self(vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vabsq_f32(self.0)) }
    }
    #[inline(always)]
    unsafe fn less_than(self, other: Self) -> Self::Mask {
        // SAFETY: see `splat`.
        unsafe { vcltq_f32(self.0, other.0) }
    }
    #[inline(always)]
    unsafe fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(vbslq_f32(mask, yes.0, no.0)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see `splat`.
        unsafe { vaddvq_f32(self.0) }
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: see `splat`.
        unsafe {
            // Adding 1.5 · 2^23 rounds to an integer, which then stands in the lowest bits.
            let round = vdupq_n_f32(12_582_912.0);
            let least = vdupq_n_f32(EXP2_LEAST);
            let shifted = vaddq_f32(vmaxq_f32(self.0, least), round);
            let f = vsubq_f32(self.0, vsubq_f32(shifted, round));
            let power = vreinterpretq_u32_f32(exp2_fraction(Self(f)).0);
            let scaled = vaddq_u32(power, vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted)));
            let vanishes = vcltq_f32(self.0, least);
            Self(vreinterpretq_f32_u32(vbicq_u32(scaled, vanishes)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: see `splat`; a prefetch of an address that is not valid does nothing. The intrinsic is not stable.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: see `splat`.
        unsafe { transpose(from, from_stride, to, to_stride) }
    }
}

impl MulAdd for Neon {
    type Vector = Self;

    #[inline(always)]
    unsafe fn mul_add(sum: Self, a: Self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Vector::mul_add(a, b, sum) }
    }
}

impl ByLane for Neon {
    #[inline(always)]
    unsafe fn mul_add_lane<const LANE: i32>(sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t {
        // SAFETY: the caller's promise.
        unsafe { vfmaq_laneq_f32::<LANE>(sum, b, a) }
    }
}

/// There is no kernel of f16 products beside it: `fmlal` multiplies four pairs into f32 as `fmla` does, so all that it
/// would save is the widening of each block, and weights would be rounded to f16 for it.
impl Kernel for Neon {
    type Vector = Self;
    const ELEMENTS: usize = 1;
    const ROWS: usize = tile::ROWS;
    const DEPTH: usize = 1;
    const VECTORS: usize = tile::VECTORS;

    unsafe fn store_pairs(_: Self::Vector, _: Self::Vector, _: *mut f32) {
        unreachable!("a word of this tier is one element")
    }

    unsafe fn vectorize(job: impl Job) {
        #[target_feature(enable = "neon")]
        unsafe fn compiled(job: impl Job) {
            // SAFETY: the caller's promise.
            unsafe { job.run::<Neon>() }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(job) }
    }

    unsafe fn multiply(product: &Product) {
        #[target_feature(enable = "neon")]
        unsafe fn compiled(product: &Product) {
            // SAFETY: the caller's promise.
            unsafe { tile::multiply::<Neon>(product) }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(product) }
    }

    unsafe fn multiply_narrow<B: Narrow>(product: &Product) {
        #[target_feature(enable = "neon")]
        unsafe fn compiled<B: Narrow>(product: &Product) {
            // SAFETY: the caller's promise.
            unsafe { multiply_columns::<Neon, B, { tile::ROWS }, { tile::VECTORS }>(product) }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled::<B>(product) }
    }
}
