//! NEON, which every 64-bit Arm processor has: thirty-two registers of four f32, and its bf16 dot products.

use std::arch::aarch64::*;
use std::arch::asm;

use super::neon_tile::{self, ByLane};
use crate::cpu::kernel::{Kernel, compiled_for};
use crate::cpu::product::{MulAdd, multiply};
use crate::cpu::vector::{EXP2_MIN, EXP2_ROUND, MAX_LANES, Vector, exp2_fraction, simd_fns};

#[derive(Clone, Copy)]
pub(crate) struct Neon(float32x4_t);

/// Rows `r` and `r + 1`, then `r` and `r + 2` trade places.
///
/// # Safety
/// As [`Vector::transpose`].
#[inline(always)]
unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    // SAFETY: as this function's contract.
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

    simd_fns! {
        fn splat(x: f32) -> Self { Self(vdupq_n_f32(x)) }
        fn load(from: *const f32) -> Self { Self(vld1q_f32(from)) }
        fn store(self, to: *mut f32) { vst1q_f32(to, self.0) }
        fn load_bf16(from: *const u16) -> Self { Self(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from)))) }
        fn load_u8(from: *const u8) -> Self {
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            Self(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))))
        }
        fn load_pairs(from: *const f32) -> (Self, Self) {
            let words = vld1q_u32(from.cast());
            let upper = vandq_u32(words, vdupq_n_u32(0xffff_0000));
            (Self(vreinterpretq_f32_u32(vshlq_n_u32::<16>(words))), Self(vreinterpretq_f32_u32(upper)))
        }
        fn take_bits<const BITS: u32>(self) -> (Self, Self) {
            let words = vreinterpretq_u32_f32(self.0);
            let lowest = vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32((1 << BITS) - 1)));
            (Self(lowest), Self(vreinterpretq_f32_u32(vshlq_u32(words, vdupq_n_s32(-(BITS as i32))))))
        }
        fn load_f16(from: *const u16) -> Self { Self(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))) }
        fn store_bf16(self, to: *mut u16) {
            let bits = vreinterpretq_u32_f32(self.0);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let is_number = vceqq_f32(self.0, self.0);
            vst1_u16(to, vshrn_n_u32::<16>(vbslq_u32(is_number, rounded, quiet)));
        }
        fn store_f16(self, to: *mut u16) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(self.0))) }

        fn add(self, other: Self) -> Self { Self(vaddq_f32(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Self(vsubq_f32(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Self(vmulq_f32(self.0, other.0)) }
        fn div(self, other: Self) -> Self { Self(vdivq_f32(self.0, other.0)) }
        fn mul_add(self, factor: Self, addend: Self) -> Self { Self(vfmaq_f32(addend.0, self.0, factor.0)) }
        fn max(self, other: Self) -> Self { Self(vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0)) }
        fn abs(self) -> Self { Self(vabsq_f32(self.0)) }
        fn less_than(self, other: Self) -> Self::Mask { vcltq_f32(self.0, other.0) }
        fn select(mask: Self::Mask, yes: Self, no: Self) -> Self { Self(vbslq_f32(mask, yes.0, no.0)) }
        fn sum(self) -> f32 { vaddvq_f32(self.0) }
        fn sum_each(vectors: &[Self; MAX_LANES]) -> Self {
            let [a, b, c, d, ..] = *vectors;
            Self(vpaddq_f32(vpaddq_f32(a.0, b.0), vpaddq_f32(c.0, d.0)))
        }
        fn exp2(self) -> Self {
            let (round, least) = (vdupq_n_f32(EXP2_ROUND), vdupq_n_f32(EXP2_MIN));
            let shifted = vaddq_f32(vmaxq_f32(self.0, least), round);
            let f = vsubq_f32(self.0, vsubq_f32(shifted, round));
            let whole = vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted)));
            let scaled = vreinterpretq_u32_f32(vmulq_f32(exp2_fraction(Self(f)).0, whole));
            Self(vreinterpretq_f32_u32(vbicq_u32(scaled, vcltq_f32(self.0, least))))
        }
        fn prefetch(at: *const u8) { asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags)) }
        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            transpose(from, from_stride, to, to_stride)
        }
    }
}

impl ByLane for Neon {
    #[inline(always)]
    unsafe fn mul_add_lane<const LANE: i32>(sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t {
        // SAFETY: as this function's contract.
        unsafe { vfmaq_laneq_f32::<LANE>(sum, b, a) }
    }
}

/// There is no kernel of f16 products beside it: `fmlal` multiplies four pairs into f32 as `fmla` does, so all that it
/// would save is the widening of each block, and weights would be rounded to f16 for it.
impl Kernel for Neon {
    type Vector = Self;
    type F32 = Self;
    type Tiles = ();
    const ELEMENTS: usize = 1;
    const ROWS: usize = neon_tile::ROWS;
    const VECTORS: usize = neon_tile::VECTORS;

    unsafe fn configure_tiles() {}

    compiled_for!("neon", |product, B| match B::IS_WORDS {
        true => neon_tile::multiply::<Neon>(product),
        false => multiply::<Neon, B, { neon_tile::ROWS }, { neon_tile::VECTORS }>(product),
    });
}

/// The kernel for pairs of bf16: a word of two elements is multiplied and added in one instruction.
///
/// `bfdot` rounds the two products' sum to odd, and then that sum and what was there: an inexact f32 gets 1 as its last
/// bit. It errs by up to an ulp, in either direction alike, where rounding to nearest errs by half of one; operands of
/// 8 bits err by 2^15 times as much. Subnormal numbers are zeros to it. The rounding would be another one if a program
/// set `FPCR.EBF` where the processor has it; none of this needs either.
///
/// The intrinsics are not stable. `.arch_extension` lets the instructions pass where a build without optimisation
/// leaves a closure outside of the functions that are compiled for the tier.
pub(crate) struct NeonBf16;

impl MulAdd for NeonBf16 {
    type Vector = Neon;

    #[inline(always)]
    unsafe fn mul_add(sum: Neon, a: Neon, b: Neon) -> Neon {
        // SAFETY: the processor has the tier; a splat has its word in every lane, so in lane 0.
        Neon(unsafe { Self::mul_add_lane::<0>(sum.0, b.0, a.0) })
    }
}

impl ByLane for NeonBf16 {
    #[inline(always)]
    unsafe fn mul_add_lane<const LANE: i32>(mut sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t {
        // SAFETY: as this function's contract.
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
    type F32 = Neon;
    type Tiles = ();
    const ELEMENTS: usize = 2;
    const ROWS: usize = neon_tile::ROWS;
    const VECTORS: usize = neon_tile::VECTORS;

    #[inline(always)]
    unsafe fn store_halves(vector: Neon, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe { vector.store_bf16(to.cast()) }
    }

    #[inline(always)]
    unsafe fn store_pairs(low: Neon, high: Neon, to: *mut f32) {
        // SAFETY: the processor has the tier; eight bf16 are four words, which `to` takes.
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

    unsafe fn configure_tiles() {}

    compiled_for!("neon,bf16", |product, B| {
        assert!(B::IS_WORDS, "columns of this kernel are pairs of bf16");
        neon_tile::multiply::<NeonBf16>(product)
    });
}
