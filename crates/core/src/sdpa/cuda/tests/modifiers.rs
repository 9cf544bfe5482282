//! Score modifiers, all together, with gradients into each.

use candle_core::{DType, Device, Result, Tensor};

use super::problem::{Problem, SIZES, Sizes, emulator_runs};
use crate::mask::AttentionMask;

/// Returns a call with every score modifier, with a bias and a relative bias of these dimensions.
fn modified(dtype: DType, mask: AttentionMask, bias: [usize; 4], relative_bias: &[usize]) -> Result<Problem> {
    let keep = Tensor::from_iter((0..19 * 37).map(|index| u8::from(index % 5 != 2)), &Device::Cpu)?;
    let plain = Problem::new(dtype, mask.with_bool_mask(&keep.reshape((19, 37))?));
    let options = plain.options.clone().with_softcap(3.0).with_scale(0.4);
    let modifiers = Problem {
        options,
        bias: Some(bias),
        has_slopes: true,
        relative_bias: Some(relative_bias.to_vec()),
        has_sinks: true,
        ..plain
    };
    Ok(modifiers)
}

#[test]
fn cuda_kernels_with_all_score_modifiers_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let causal = AttentionMask::causal();
    let padded = AttentionMask::none().with_valid_lens(vec![30, 22]).with_starts(vec![3, 0]);
    let offsets = AttentionMask::causal_with_offsets([7, 18]);
    let distances = 19 + 37 - 1;
    modified(DType::F32, causal.clone(), [2, 4, 19, 37], &[4, distances])?.check(400)?;
    modified(DType::F32, padded, [1, 4, 19, 37], &[2, 4, distances])?.check(401)?;
    modified(DType::F32, offsets, [2, 1, 1, 37], &[4, distances])?.check(402)?;
    let with_lse = Problem { with_lse: true, ..modified(DType::F32, causal, [1, 1, 19, 1], &[4, distances])? };
    with_lse.check(403)
}

/// Sinks and scales need no specialisation but for a scale that is not above zero.
#[test]
fn cuda_kernels_with_sinks_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let window = AttentionMask::causal().with_window(5).with_valid_lens(vec![40, 1]);
    let problem = Problem { has_sinks: true, ..Problem::new(DType::BF16, window) };
    Problem { with_lse: true, ..problem.clone() }.check(410)?;
    Problem { sizes: Sizes { t_q: 1, ..SIZES }, ..problem }.check(411)
}

/// Checks a bias in the dtype of the queries, which is read as it is on CUDA.
#[test]
fn cuda_kernels_with_a_bias_in_the_dtype_of_the_queries_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for (n, bias) in [[1, 4, 19, 37], [2, 1, 1, 37]].into_iter().enumerate() {
        let plain = Problem::new(DType::F16, AttentionMask::causal());
        Problem { bias: Some(bias), bias_in_half: true, ..plain }.check(420 + n as u64)?;
    }
    Ok(())
}
