//! Masks of ranges, each of which the kernels compute from numbers, from an entry for each sequence, or from an entry
//! for each query; and boolean masks.

use candle_core::{DType, Device, Result, Tensor};

use super::problem::{DTYPES, Problem, SIZES, Sizes, emulator_runs};
use crate::mask::{AttentionMask, ValidLens};

/// Returns masks of two sequences of `t_q` queries.
fn masks(t_q: usize) -> Vec<AttentionMask> {
    let (none, causal) = (AttentionMask::none, AttentionMask::causal);
    let by_query = |first: usize, step: usize| {
        let of = |start: usize| (0..t_q).map(|i| start + i * step % 7).collect::<Vec<_>>();
        ValidLens::from(vec![of(first), of(first + 3)])
    };
    vec![
        none(),
        causal(),
        AttentionMask::causal_upper_left(),
        AttentionMask::causal_with_offset(5),
        AttentionMask::causal_with_offsets([-3, 20]),
        causal().with_window(4),
        none().with_local_window(2, 3),
        causal().with_chunk(8),
        causal().with_chunk(8).with_starts(vec![3, 16]),
        causal().with_chunk(8).with_starts(vec![8, 16]),
        causal().with_chunk(8).with_starts(by_query(1, 2)),
        none().with_valid_lens(vec![21, 0]),
        causal().with_starts(vec![0, 11]),
        none().with_valid_lens(vec![30, 9]).with_starts(vec![4, 2]),
        AttentionMask::causal_upper_left().with_prefix(vec![9, 2]),
        AttentionMask::causal_upper_left().with_prefix(vec![9, 2]).with_window(6),
        none().with_valid_lens(by_query(5, 3)),
        causal().with_starts(by_query(1, 2)),
        AttentionMask::causal_upper_left().with_prefix(by_query(0, 5)),
        AttentionMask::causal_upper_left().and(&AttentionMask::causal_with_offset(3).with_window(5)),
    ]
}

#[test]
fn cuda_kernels_with_every_mask_of_ranges_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for (n, mask) in masks(SIZES.t_q).into_iter().enumerate() {
        let problem = Problem { with_lse: n % 2 == 0, ..Problem::new(DTYPES[n % 3], mask) };
        problem.check(n as u64)?;
    }
    Ok(())
}

/// Checks calls of one query, which the decode kernel computes, and whose masks have other bounds.
#[test]
fn cuda_kernels_with_one_query_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for (n, mask) in masks(1).into_iter().enumerate() {
        let sizes = Sizes { t_q: 1, ..SIZES };
        Problem { sizes, with_lse: n % 2 == 1, ..Problem::new(DType::BF16, mask) }.check(100 + n as u64)?;
    }
    Ok(())
}

#[test]
fn cuda_kernels_with_boolean_masks_of_any_broadcast_form_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for (n, dims) in [[2, 4, 19, 37], [1, 4, 1, 37], [2, 1, 19, 37], [1, 1, 19, 37]].into_iter().enumerate() {
        let numbers = (0..dims.iter().product::<usize>()).map(|index| u8::from(index * 7 % 11 > 3));
        let keep = Tensor::from_iter(numbers, &Device::Cpu)?.reshape(dims.as_slice())?;
        let mask = if n % 2 == 0 { AttentionMask::causal() } else { AttentionMask::none() };
        Problem::new(DType::F16, mask.with_bool_mask(&keep)).check(200 + n as u64)?;
    }
    Ok(())
}
