//! AVX-512: thirty-two registers of sixteen f32.

use std::arch::x86_64::*;

use crate::cpu::kernel::{Job, Kernel, MulAdd, Narrow, Product, multiply, multiply_columns};
use crate::cpu::vector::{EXP2_LEAST, Vector, exp2_fraction};

#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(super) __m512);

/// Sixteen bf16 of sixteen f32, in the lower half of each 32-bit lane: rounded to nearest even, NaN kept a NaN.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn bf16_words(x: __m512) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16)
    }
}

impl Vector for Avx512 {
    const LANES: usize = 16;
    type Mask = __mmask16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller's promise, as in every method here.
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see `splat`.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: see `splat`.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)))
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: see `splat`.
        unsafe {
            let words = _mm512_loadu_si512(from.cast());
            let upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (Self(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))), Self(_mm512_castsi512_ps(upper)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: see `splat`.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(bf16_words(self.0))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: see `splat`.
        unsafe {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph(self.0, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_abs_ps(self.0)) }
    }
    #[inline(always)]
    unsafe fn less_than(self, other: Self) -> Self::Mask {
        // SAFETY: see `splat`.
        unsafe { _mm512_cmp_ps_mask(self.0, other.0, _CMP_LT_OQ) }
    }
    #[inline(always)]
    unsafe fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        // SAFETY: see `splat`.
        unsafe { Self(_mm512_mask_blend_ps(mask, no.0, yes.0)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see `splat`.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: see `splat`.
        unsafe {
            // `vreduceps` leaves what is beyond the nearest integer, 0 for infinities, and `vscalefps` multiplies by the
            // power of two: of ten instructions none builds an exponent by hand.
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(self.0);
            let n = _mm512_sub_ps(self.0, f);
            let stays = _mm512_cmp_ps_mask(self.0, _mm512_set1_ps(EXP2_LEAST), _CMP_NLT_UQ);
            Self(_mm512_maskz_scalef_ps(stays, exp2_fraction(Self(f)).0, n))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: see `splat`; a prefetch of an address that is not valid does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: see `splat`.
        unsafe {
            // Rows r and r + 1, then r and r + 2, trade within 128-bit quarters; then quarters trade places.
            let row = |r: usize| _mm512_loadu_ps(from.add(r * from_stride));
            let mut pairs = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                let (a, b) = (row(2 * i), row(2 * i + 1));
                (pairs[2 * i], pairs[2 * i + 1]) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            // fours[4 q + c] holds column c of each quarter for rows 4 q to 4 q + 3.
            let mut fours = [_mm512_setzero_ps(); 16];
            for q in 0..4 {
                for i in 0..2 {
                    let (a, b) = (pairs[4 * q + i], pairs[4 * q + 2 + i]);
                    fours[4 * q + 2 * i] = _mm512_shuffle_ps(a, b, 0b01_00_01_00);
                    fours[4 * q + 2 * i + 1] = _mm512_shuffle_ps(a, b, 0b11_10_11_10);
                }
            }
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0b10_00_10_00);
                let odd = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0b11_01_11_01);
                let even_below = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0b10_00_10_00);
                let odd_below = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0b11_01_11_01);
                let store = |column: usize, a, b, order: bool| {
                    let whole = if order {
                        _mm512_shuffle_f32x4(a, b, 0b11_01_11_01)
                    } else {
                        _mm512_shuffle_f32x4(a, b, 0b10_00_10_00)
                    };
                    _mm512_storeu_ps(to.add(column * to_stride), whole);
                };
                store(c, even, even_below, false);
                store(4 + c, odd, odd_below, false);
                store(8 + c, even, even_below, true);
                store(12 + c, odd, odd_below, true);
            }
        }
    }
}

impl MulAdd for Avx512 {
    type Vector = Self;

    #[inline(always)]
    unsafe fn mul_add(sum: Self, a: Self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Vector::mul_add(a, b, sum) }
    }
}

impl Kernel for Avx512 {
    type Vector = Self;
    const ELEMENTS: usize = 1;
    const ROWS: usize = 8;
    const DEPTH: usize = 1;
    const VECTORS: usize = 3;

    unsafe fn store_pairs(_: Self::Vector, _: Self::Vector, _: *mut f32) {
        unreachable!("a word of this tier is one element")
    }

    unsafe fn vectorize(job: impl Job) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn compiled(job: impl Job) {
            // SAFETY: the caller's promise.
            unsafe { job.run::<Avx512>() }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(job) }
    }

    unsafe fn multiply(product: &Product) {
        #[target_feature(enable = "avx512f")]
        unsafe fn compiled(product: &Product) {
            // SAFETY: the caller's promise.
            unsafe { multiply::<Avx512, 8, 3>(product) }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(product) }
    }

    unsafe fn multiply_narrow<B: Narrow>(product: &Product) {
        #[target_feature(enable = "avx512f")]
        unsafe fn compiled<B: Narrow>(product: &Product) {
            // SAFETY: the caller's promise.
            unsafe { multiply_columns::<Avx512, B, 8, 3>(product) }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled::<B>(product) }
    }
}
