//! AVX-512: thirty-two registers of sixteen f32, and its bf16 dot products, which multiply a word of two elements and
//! add in one instruction.

use std::arch::x86_64::*;

use crate::cpu::functions::{EXP2, EXP2_MIN, polynomial};
use crate::cpu::kernel::{
    Columns, Kernel, MAX_LANES, TakenBits, Vector, WordHalves, compiled_for, float8_mask, simd_fns,
};
use crate::cpu::panel::PanelProduct;
use crate::cpu::product::multiply_rows;

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// Adds up neighbouring 128-bit quarters of `a`, and then of `b`.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn add_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the processor has AVX-512, by this function's contract.
    unsafe {
        let even = _mm512_shuffle_f32x4(a, b, 0b10_00_10_00);
        _mm512_add_ps(even, _mm512_shuffle_f32x4(a, b, 0b11_01_11_01))
    }
}

/// The number that the lowest 1, 2 or 4 bits of an index are without a sign. A table has an equal entry for each value
/// of the bits above them.
const BITS_OF_ONE: [f32; 16] = numbers_of_bits(1);
const PAIRS: [f32; 16] = numbers_of_bits(2);
const NIBBLES: [f32; 16] = numbers_of_bits(4);

/// The number of a code of 4 bits, where zero is between two codes.
const CENTRED_NIBBLES: [f32; 16] =
    [-7.5, -6.5, -5.5, -4.5, -3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5];

const fn numbers_of_bits(bits: u32) -> [f32; 16] {
    let mut numbers = [0.0; 16];
    let mut index = 0;
    while index < 16 {
        numbers[index] = (index as u32 & ((1 << bits) - 1)) as f32;
        index += 1;
    }
    numbers
}

/// The number that the lowest 1, 2 or 4 bits of an index are in two's complement, as the highest bits of a word.
const SIGNED_BITS: [f32; 16] = signed_numbers_of_bits(1);
const SIGNED_PAIRS: [f32; 16] = signed_numbers_of_bits(2);
const SIGNED_NIBBLES: [f32; 16] = signed_numbers_of_bits(4);

const fn signed_numbers_of_bits(bits: u32) -> [f32; 16] {
    let mut numbers = [0.0; 16];
    let mut index = 0;
    while index < 16 {
        numbers[index] = ((index as u32) << (32 - bits)).cast_signed() as f32;
        index += 1;
    }
    numbers
}

impl Vector for Avx512 {
    const LANES: usize = 16;
    type Mask = __mmask16;
    const HAS_FAST_TABLES: bool = true;

    simd_fns! {
        fn splat(x: f32) -> Self { Self(_mm512_set1_ps(x)) }
        fn load(from: *const f32) -> Self { Self(_mm512_loadu_ps(from)) }
        fn store(self, to: *mut f32) { _mm512_storeu_ps(to, self.0) }
        fn load_bf16(from: *const u16) -> Self {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)))
        }
        fn load_u8(from: *const u8) -> Self {
            Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))))
        }
        fn load_nibbles(from: *const u8, shift: u32) -> Self {
            // A permutation reads the lowest 4 bits of an index.
            let words = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let index = _mm512_srlv_epi32(words, _mm512_set1_epi32(shift.cast_signed()));
            Self(_mm512_permutexvar_ps(index, _mm512_loadu_ps(CENTRED_NIBBLES.as_ptr())))
        }
        fn load_pairs(from: *const f32) -> WordHalves<Self> {
            let words = _mm512_loadu_si512(from.cast());
            let upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            let lower = _mm512_slli_epi32(words, 16);
            WordHalves { low: Self(_mm512_castsi512_ps(lower)), high: Self(_mm512_castsi512_ps(upper)) }
        }
        fn take_bits<const BITS: u32, const IS_SIGNED: bool>(self) -> TakenBits<Self> {
            let words = _mm512_castps_si512(self.0);
            if BITS == 4 {
                // A permutation reads the lowest 4 bits of an index: a table in one instruction.
                let rotated = _mm512_rol_epi32::<4>(words);
                let table = if IS_SIGNED { SIGNED_NIBBLES } else { NIBBLES };
                let numbers = _mm512_permutexvar_ps(rotated, _mm512_loadu_ps(table.as_ptr()));
                return TakenBits { number: Self(numbers), rest: Self(_mm512_castsi512_ps(rotated)) };
            }
            if BITS < 4 {
                let rotated = _mm512_rolv_epi32(words, _mm512_set1_epi32(BITS as i32));
                let table = match (BITS, IS_SIGNED) {
                    (1, true) => SIGNED_BITS.as_ptr(),
                    (1, false) => BITS_OF_ONE.as_ptr(),
                    (_, true) => SIGNED_PAIRS.as_ptr(),
                    (_, false) => PAIRS.as_ptr(),
                };
                let numbers = _mm512_permutexvar_ps(rotated, _mm512_loadu_ps(table));
                return TakenBits { number: Self(numbers), rest: Self(_mm512_castsi512_ps(rotated)) };
            }
            const { assert!(BITS <= 8) };
            let highest = match IS_SIGNED {
                true => _mm512_and_si512(words, _mm512_set1_epi32(-1 << 24)),
                false => _mm512_srli_epi32::<24>(words),
            };
            let rest = _mm512_slli_epi32::<8>(words);
            TakenBits { number: Self(_mm512_cvtepi32_ps(highest)), rest: Self(_mm512_castsi512_ps(rest)) }
        }
        fn load_highest_bytes(from: *const u8) -> Self {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<24>(bytes)))
        }
        fn take_entries(self, table: *const f32) -> TakenBits<Self> {
            let rotated = _mm512_rol_epi32::<4>(_mm512_castps_si512(self.0));
            let numbers = _mm512_permutexvar_ps(rotated, _mm512_loadu_ps(table));
            TakenBits { number: Self(numbers), rest: Self(_mm512_castsi512_ps(rotated)) }
        }
        fn take_float8<const SHIFT: u32>(self) -> TakenBits<Self> {
            let words = _mm512_castps_si512(self.0);
            // Shifted with its sign, and the copies of the sign are masked.
            let mask = _mm512_set1_epi32(float8_mask(SHIFT).cast_signed());
            let number = _mm512_and_si512(_mm512_srai_epi32::<SHIFT>(words), mask);
            let rest = _mm512_slli_epi32::<8>(words);
            TakenBits { number: Self(_mm512_castsi512_ps(number)), rest: Self(_mm512_castsi512_ps(rest)) }
        }
        fn load_f16(from: *const u16) -> Self { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
        fn store_bf16(self, to: *mut u16) {
            // Rounded to nearest even. NaN stays NaN.
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let is_nan = _mm512_cmp_ps_mask(self.0, self.0, _CMP_UNORD_Q);
            let words = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
        }
        fn store_f16(self, to: *mut u16) {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph(self.0, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
        }
        fn store_pairs(self, high: Self, to: *mut f32) {
            const INTERLEAVE: [u16; 32] = {
                let mut order = [0; 32];
                let mut i = 0;
                while i < 16 {
                    (order[2 * i], order[2 * i + 1]) = (i as u16, 16 + i as u16);
                    i += 1;
                }
                order
            };
            // Both types of the transmutation are 512 bits of any content.
            let concatenated = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high.0, self.0));
            let order = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, concatenated));
        }
        fn store_halves(self, to: *mut f32) {
            // As above, 256 bits.
            _mm256_storeu_si256(to.cast(), std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0)));
        }

        fn add(self, other: Self) -> Self { Self(_mm512_add_ps(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Self(_mm512_sub_ps(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Self(_mm512_mul_ps(self.0, other.0)) }
        fn div(self, other: Self) -> Self { Self(_mm512_div_ps(self.0, other.0)) }
        fn mul_add(self, factor: Self, addend: Self) -> Self { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
        fn max(self, other: Self) -> Self { Self(_mm512_max_ps(self.0, other.0)) }
        fn abs(self) -> Self { Self(_mm512_abs_ps(self.0)) }
        fn less_than(self, other: Self) -> Self::Mask { _mm512_cmp_ps_mask(self.0, other.0, _CMP_LT_OQ) }
        fn select(mask: Self::Mask, yes: Self, no: Self) -> Self { Self(_mm512_mask_blend_ps(mask, no.0, yes.0)) }
        fn sum(self) -> f32 { _mm512_reduce_add_ps(self.0) }
        fn sum_each(vectors: &[Self; MAX_LANES]) -> Self {
            // Half as many shuffles as a transposition: vectors are added up as soon as they are brought together. No
            // closures, which would not be compiled for the instruction set.
            let mut pairs = [_mm512_setzero_pd(); 8];
            let mut fours = [_mm512_setzero_ps(); 4];
            for (n, pair) in pairs.iter_mut().enumerate() {
                let a = vectors[2 * n].0;
                let b = vectors[2 * n + 1].0;
                *pair = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
            }
            for (n, four) in fours.iter_mut().enumerate() {
                let a = pairs[2 * n];
                let b = pairs[2 * n + 1];
                let low = _mm512_unpacklo_pd(a, b);
                let high = _mm512_unpackhi_pd(a, b);
                *four = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            }
            Self(add_quarters(add_quarters(fours[0], fours[1]), add_quarters(fours[2], fours[3])))
        }
        fn exp2(self) -> Self {
            // `vreduceps` subtracts the nearest integer (0 for infinities), and `vscalefps` multiplies by a power of
            // two: no instruction is needed to build an exponent.
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(self.0);
            let n = _mm512_sub_ps(self.0, f);
            let stays = _mm512_cmp_ps_mask(self.0, _mm512_set1_ps(EXP2_MIN), _CMP_NLT_UQ);
            Self(_mm512_maskz_scalef_ps(stays, polynomial(Self(f), &EXP2).0, n))
        }
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // Rows r and r + 1, then r and r + 2, trade within 128-bit quarters; then quarters trade places.
            let row = |r: usize| _mm512_loadu_ps(from.add(r * from_stride));
            let mut pairs = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                let a = row(2 * i);
                let b = row(2 * i + 1);
                (pairs[2 * i], pairs[2 * i + 1]) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            // fours[4 q + c] is column c of each quarter for rows 4 q to 4 q + 3.
            let mut fours = [_mm512_setzero_ps(); 16];
            for q in 0..4 {
                for i in 0..2 {
                    let a = pairs[4 * q + i];
                    let b = pairs[4 * q + 2 + i];
                    fours[4 * q + 2 * i] = _mm512_shuffle_ps(a, b, 0b01_00_01_00);
                    fours[4 * q + 2 * i + 1] = _mm512_shuffle_ps(a, b, 0b11_10_11_10);
                }
            }
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0b10_00_10_00);
                let odd = _mm512_shuffle_f32x4(fours[c], fours[4 + c], 0b11_01_11_01);
                let even_below = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0b10_00_10_00);
                let odd_below = _mm512_shuffle_f32x4(fours[8 + c], fours[12 + c], 0b11_01_11_01);
                for (column, above, below) in [(c, even, even_below), (4 + c, odd, odd_below)] {
                    let to = to.add(column * to_stride);
                    _mm512_storeu_ps(to, _mm512_shuffle_f32x4(above, below, 0b10_00_10_00));
                    _mm512_storeu_ps(to.add(8 * to_stride), _mm512_shuffle_f32x4(above, below, 0b11_01_11_01));
                }
            }
        }
    }
}

impl Kernel for Avx512 {
    type Vector = Self;
    const ELEMENTS: usize = 1;
    const ROWS: usize = 8;
    const VECTORS: usize = 3;

    compiled_for!("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");

    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct) {
        // SAFETY: as this method's contract.
        unsafe { multiply_rows::<Self, B>(product, 0) }
    }
}

/// The kernel for pairs of bf16.
pub(crate) struct Avx512Bf16;

impl Kernel for Avx512Bf16 {
    type Vector = Avx512;
    const ELEMENTS: usize = 2;
    const ROWS: usize = 8;
    const VECTORS: usize = 3;

    compiled_for!("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c");

    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct) {
        // SAFETY: as this method's contract.
        unsafe { multiply_rows::<Self, B>(product, 0) }
    }

    #[inline(always)]
    unsafe fn add_product(sum: Avx512, a: Avx512, b: Avx512) -> Avx512 {
        // SAFETY: the processor has the instruction set; both types are 512 bits of any content.
        unsafe {
            let pairs = |words: Avx512| std::mem::transmute::<__m512, __m512bh>(words.0);
            Avx512(_mm512_dpbf16_ps(sum.0, pairs(a), pairs(b)))
        }
    }
}
