//! Plain Rust, with the vectors that every processor of the architecture has.

use std::hint::black_box;

use candle_attention::cpu::InstructionSet;

use super::Loop;

/// Enough for the compiler to fill registers, and to hide the latency of a multiplication and an addition.
const SUMS: usize = 32;

pub(super) const MULTIPLY_ADD: Loop = Loop {
    name: "plain multiply and add, f32",
    instruction_set: InstructionSet::Scalar,
    bf16: false,
    available: || true,
    flops_per_step: 2.0 * SUMS as f64,
    run,
};

fn run(steps: u64) {
    let factor = black_box(0.999f32);
    let mut sums = [1f32; SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = *sum * factor + factor;
        }
    }
    black_box(sums);
}
