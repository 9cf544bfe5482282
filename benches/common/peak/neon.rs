//! Arm's 128-bit vectors.

use std::arch::aarch64::{float32x4_t, vdupq_n_f32, vfmaq_f32};
use std::hint::black_box;

use candle_attention::cpu::InstructionSet;

use super::Loop;

/// Four multiply-adds a cycle with a latency of four cycles keep sixteen in flight.
const SUMS: usize = 16;

pub(super) const FMA: Loop = Loop {
    name: "NEON FMA, f32",
    instruction_set: InstructionSet::Neon,
    bf16: false,
    available: || std::arch::is_aarch64_feature_detected!("neon"),
    flops_per_step: 2.0 * 4.0 * SUMS as f64,
    run: |steps| {
        // SAFETY: `available` says that the processor has NEON, and is asked first.
        unsafe { run(steps) }
    },
};

#[target_feature(enable = "neon")]
fn run(steps: u64) {
    let factor = vdupq_n_f32(black_box(0.999));
    let mut sums: [float32x4_t; SUMS] = [vdupq_n_f32(1.0); SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = vfmaq_f32(factor, *sum, factor);
        }
    }
    black_box(sums);
}
