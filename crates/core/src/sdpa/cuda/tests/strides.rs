//! Orders in memory of the inputs and of the output.

use candle_core::{DType, Result};

use super::problem::{Order, Problem, SIZES, Sizes, emulator_runs};
use crate::mask::AttentionMask;
use crate::sdpa::options::OutputLayout;

#[test]
fn cuda_kernels_with_strided_inputs_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let orders = [Order::HeadsInRows, Order::SharedKeys, Order::OddRows, Order::ColumnMajor];
    for (n, order) in orders.into_iter().enumerate() {
        let plain = Problem::new(DType::F16, AttentionMask::causal());
        let options = plain.options.clone().with_output_layout(OutputLayout::Bthd);
        Problem { order, options, ..plain.clone() }.check(300 + n as u64)?;
        Problem { order, with_lse: true, ..plain }.check(310 + n as u64)?;
    }
    Ok(())
}

#[test]
fn cuda_kernels_with_values_of_another_width_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let sizes = Sizes { h: 3, h_kv: 1, d: 20, d_v: 7, ..SIZES };
    Problem { sizes, ..Problem::new(DType::F32, AttentionMask::causal()) }.check(320)
}
