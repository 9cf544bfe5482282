//! The vectors of x86-64.

use std::arch::x86_64::{
    __m512bh, _mm256_fmadd_ps, _mm256_set1_ps, _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_ps,
};
use std::hint::black_box;

use candle_attention::cpu::InstructionSet;

use super::Loop;

/// Two multiply-adds a cycle with a latency of four cycles, or one of six, keep at most eight in flight; the rest is
/// slack, within the sixteen registers of AVX2.
const SUMS: usize = 12;

pub(super) const AVX2_FMA: Loop = Loop {
    name: "AVX2 FMA, f32",
    instruction_set: InstructionSet::Avx2,
    bf16: false,
    available: || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
    flops_per_step: 2.0 * 8.0 * SUMS as f64,
    run: |steps| {
        // SAFETY: `available` says that the processor has AVX2 and FMA, and is asked first.
        unsafe { avx2_fma(steps) }
    },
};

pub(super) const AVX512_FMA: Loop = Loop {
    name: "AVX-512 FMA, f32",
    instruction_set: InstructionSet::Avx512,
    bf16: false,
    available: || is_x86_feature_detected!("avx512f"),
    flops_per_step: 2.0 * 16.0 * SUMS as f64,
    run: |steps| {
        // SAFETY: `available` says that the processor has AVX-512 F, and is asked first.
        unsafe { avx512_fma(steps) }
    },
};

pub(super) const AVX512_BF16: Loop = Loop {
    name: "AVX-512 vdpbf16ps, bf16",
    instruction_set: InstructionSet::Avx512Bf16,
    bf16: true,
    available: || is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16"),
    flops_per_step: 2.0 * 32.0 * SUMS as f64,
    run: |steps| {
        // SAFETY: `available` says that the processor has AVX-512 F and BF16, and is asked first.
        unsafe { avx512_bf16(steps) }
    },
};

#[target_feature(enable = "avx2,fma")]
fn avx2_fma(steps: u64) {
    let factor = _mm256_set1_ps(black_box(0.999));
    let mut sums = [_mm256_set1_ps(1.0); SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, factor, factor);
        }
    }
    black_box(sums);
}

#[target_feature(enable = "avx512f")]
fn avx512_fma(steps: u64) {
    let factor = _mm512_set1_ps(black_box(0.999));
    let mut sums = [_mm512_set1_ps(1.0); SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, factor, factor);
        }
    }
    black_box(sums);
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn avx512_bf16(steps: u64) {
    let pair: __m512bh = _mm512_cvtne2ps_pbh(_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(-0.25)));
    let mut sums = [_mm512_set1_ps(1.0); SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, pair, pair);
        }
    }
    black_box(sums);
}
