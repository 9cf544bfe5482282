//! AVX-512 with bf16 dot products: a word of two elements is multiplied and added in one instruction.

use std::arch::x86_64::*;

use super::avx512::Avx512;
use crate::cpu::kernel::{Job, Kernel, MulAdd, Narrow, Product, multiply};

pub(crate) struct Avx512Bf16;

impl MulAdd for Avx512Bf16 {
    type Vector = Avx512;

    #[inline(always)]
    unsafe fn mul_add(sum: Avx512, a: Avx512, b: Avx512) -> Avx512 {
        // SAFETY: the caller's promise; the two types are 512 bits without meaning of their own.
        unsafe {
            let pairs = |words: Avx512| std::mem::transmute::<__m512, __m512bh>(words.0);
            Avx512(_mm512_dpbf16_ps(sum.0, pairs(a), pairs(b)))
        }
    }
}

/// Two vectors as pairs of bf16, `low` in the lower half of each word.
///
/// # Safety
/// The processor has AVX-512 with BW and BF16; 16 words can be written.
#[inline(always)]
pub(super) unsafe fn store_pairs(low: Avx512, high: Avx512, to: *mut f32) {
    const INTERLEAVE: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 16 {
            (order[2 * i], order[2 * i + 1]) = (i as u16, 16 + i as u16);
            i += 1;
        }
        order
    };
    // SAFETY: the caller's promise; the two types are 512 bits without meaning of their own.
    unsafe {
        let one_after_the_other = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high.0, low.0));
        let order = _mm512_loadu_si512(INTERLEAVE.as_ptr().cast());
        _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(order, one_after_the_other));
    }
}

impl Kernel for Avx512Bf16 {
    type Vector = Avx512;
    const ELEMENTS: usize = 2;
    const ROWS: usize = 8;
    const DEPTH: usize = 1;
    const VECTORS: usize = 3;

    #[inline(always)]
    unsafe fn store_pairs(low: Avx512, high: Avx512, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { store_pairs(low, high, to) }
    }

    unsafe fn vectorize(job: impl Job) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
        unsafe fn compiled(job: impl Job) {
            // SAFETY: the caller's promise.
            unsafe { job.run::<Avx512Bf16>() }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(job) }
    }

    unsafe fn multiply(product: &Product) {
        #[target_feature(enable = "avx512f,avx512bf16")]
        unsafe fn compiled(product: &Product) {
            // SAFETY: the caller's promise.
            unsafe { multiply::<Avx512Bf16, 8, 3>(product) }
        }
        // SAFETY: the caller's promise.
        unsafe { compiled(product) }
    }

    unsafe fn multiply_narrow<B: Narrow>(_: &Product) {
        unreachable!("a word of this tier is two elements")
    }
}
