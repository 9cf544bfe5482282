//! The forward kernel.

use candle_attention_cuda::{
    BoundedKeys, CudaCall, Dropout, DropoutMask, FirstPosition, ForwardKernel, Intervals, OutputLayout, PackedLengths,
    ScoreModifiers,
};
use candle_core::{DType, Result, Tensor};

use super::case::{MANY_QUERIES, Sizes, check_forward, integers, numbers, plan};

/// Checks a call that the forward kernel runs.
fn check(call: &CudaCall) -> Result<()> {
    assert_eq!(plan(call), Ok(ForwardKernel::Forward));
    check_forward(call)?;
    Ok(())
}

/// Returns a call with bounds of keys.
fn with_keys(keys: BoundedKeys<Tensor>) -> Result<CudaCall> {
    Ok(CudaCall { keys, ..MANY_QUERIES.call(DType::F32)? })
}

/// Returns a call with score modifiers.
pub fn with_scores(
    sizes: Sizes,
    change: impl FnOnce(ScoreModifiers<Tensor>) -> Result<ScoreModifiers<Tensor>>,
) -> Result<CudaCall> {
    let call = sizes.call(DType::F32)?;
    Ok(CudaCall { scores: change(call.scores)?, ..call })
}

#[test]
fn plain_call_in_every_dtype_matches_reference() -> Result<()> {
    check(&MANY_QUERIES.call(DType::F32)?)?;
    check(&MANY_QUERIES.call(DType::F16)?)?;
    check(&MANY_QUERIES.call(DType::BF16)?)
}

#[test]
fn rows_that_are_not_aligned_match_reference() -> Result<()> {
    check(&Sizes { d: 21, d_v: 13, ..MANY_QUERIES }.call(DType::F16)?)
}

#[test]
fn causal_mask_with_every_position_matches_reference() -> Result<()> {
    let causal = BoundedKeys { causal: true, ..BoundedKeys::default() };
    check(&with_keys(causal.clone())?)?;
    check(&with_keys(BoundedKeys { first_position: FirstPosition::Same(-3), ..causal.clone() })?)?;
    let each = FirstPosition::Each(integers(&[7, -20])?);
    check(&with_keys(BoundedKeys { first_position: each, ..causal })?)
}

#[test]
fn lengths_starts_and_prefixes_match_reference() -> Result<()> {
    let default = BoundedKeys::default;
    check(&with_keys(BoundedKeys { lengths: Some(integers(&[50, 500])?), ..default() })?)?;
    check(&with_keys(BoundedKeys { starts: Some(integers(&[0, 41])?), ..default() })?)?;
    // The second sequence has no keys at all.
    let (starts, lengths) = (Some(integers(&[3, 41])?), Some(integers(&[60, 41])?));
    check(&with_keys(BoundedKeys { starts, lengths, ..default() })?)?;
    check(&with_keys(BoundedKeys { causal: true, prefixes: Some(integers(&[33, 0])?), ..default() })?)
}

#[test]
fn windows_and_chunks_match_reference() -> Result<()> {
    let default = BoundedKeys::default;
    check(&with_keys(BoundedKeys { causal: true, left: Some(9), ..default() })?)?;
    check(&with_keys(BoundedKeys { left: Some(5), right: Some(usize::MAX), ..default() })?)?;
    check(&with_keys(BoundedKeys { right: Some(4), ..default() })?)?;
    let first_position = FirstPosition::Same(-10);
    check(&with_keys(BoundedKeys { causal: true, chunk: Some(16), first_position, ..default() })?)
}

#[test]
fn intervals_of_queries_match_reference() -> Result<()> {
    let rows = (MANY_QUERIES.b * MANY_QUERIES.t_q) as i32;
    let starts: Vec<i32> = (0..rows).map(|row| row % 17 - 3).collect();
    let ends: Vec<i32> = (0..rows).map(|row| row * 5 % 100).collect();
    let intervals = Intervals { starts: integers(&starts)?, ends: integers(&ends)? };
    check(&with_keys(BoundedKeys { intervals: Some(intervals), ..BoundedKeys::default() })?)
}

/// Returns four packed sequences, one without queries and one without keys.
pub fn packed_call() -> Result<CudaCall> {
    let sizes = Sizes { b: 1, h: 4, h_kv: 2, t_q: 100, t_kv: 130, d: 16, d_v: 32 };
    let packed = PackedLengths {
        cu_seqlens_q: integers(&[0, 70, 70, 80, 100])?,
        cu_seqlens_kv: integers(&[0, 50, 81, 81, 130])?,
        longest_queries: 70,
        longest_keys: 50,
    };
    let keys = BoundedKeys { packed: Some(packed), ..BoundedKeys::default() };
    Ok(CudaCall { keys, output_layout: OutputLayout::Bthd, ..sizes.call(DType::F32)? })
}

#[test]
fn packed_sequences_match_reference() -> Result<()> {
    check(&packed_call()?)?;
    let call = packed_call()?;
    let keys = BoundedKeys { causal: true, lengths: Some(integers(&[45, 9, 9, 90])?), ..call.keys.clone() };
    check(&CudaCall { keys, ..call.clone() })?;
    let distances = 70 + 50 - 1;
    let relative_bias = Some(numbers(6, &[1, 4, distances], DType::F32)?);
    check(&CudaCall { scores: ScoreModifiers { relative_bias, ..call.scores }, ..call })
}

#[test]
fn views_are_read_in_place() -> Result<()> {
    let Sizes { b, h, h_kv, t_q, t_kv, d, d_v } = MANY_QUERIES;
    // Queries as a projection returns them, keys of a preallocated cache, and values of one sequence for the batch.
    let q = numbers(1, &[b, t_q, h, d], DType::F32)?.transpose(1, 2)?;
    let k = numbers(2, &[b, h_kv, t_kv + 30, d], DType::F32)?.narrow(2, 8, t_kv)?;
    let v = numbers(3, &[1, h_kv, t_kv, d_v], DType::F32)?.broadcast_as((b, h_kv, t_kv, d_v))?;
    let call = CudaCall { q, k, v, output_layout: OutputLayout::Bthd, ..MANY_QUERIES.call(DType::F32)? };
    check(&call)
}

#[test]
fn softcap_and_sinks_match_reference() -> Result<()> {
    let sinks = Some(numbers(6, &[4], DType::F32)?);
    check(&with_scores(MANY_QUERIES, |scores| Ok(ScoreModifiers { softcap: Some(0.7), sinks, ..scores }))?)
}

#[test]
fn alibi_counts_from_positions_of_a_causal_mask() -> Result<()> {
    let call = with_scores(MANY_QUERIES, |scores| {
        let alibi_slopes = Some((numbers(6, &[4], DType::F32)? * 0.1)?);
        Ok(ScoreModifiers { alibi_slopes, ..scores })
    })?;
    let first_position = FirstPosition::Same(5);
    check(&CudaCall { keys: BoundedKeys { causal: true, first_position, ..BoundedKeys::default() }, ..call })
}

#[test]
fn relative_bias_of_all_sequences_and_of_each_matches_reference() -> Result<()> {
    for sequences in [1, 2] {
        let relative_bias = Some(numbers(6, &[sequences, 4, 159], DType::F32)?);
        check(&with_scores(MANY_QUERIES, |scores| Ok(ScoreModifiers { relative_bias, ..scores }))?)?;
    }
    Ok(())
}

#[test]
fn bias_and_boolean_mask_are_broadcast() -> Result<()> {
    let Sizes { b, h, t_q, t_kv, .. } = MANY_QUERIES;
    for (bias_dims, mask_dims) in [([1, h, t_q, t_kv], [b, 1, 1, t_kv]), ([b, 1, t_q, 1], [1, h, t_q, t_kv])] {
        let bias = Some(numbers(6, &bias_dims, DType::F32)?);
        let boolean_mask = Some(numbers(7, &mask_dims, DType::F32)?.gt(-0.5)?);
        check(&with_scores(MANY_QUERIES, |scores| Ok(ScoreModifiers { bias, boolean_mask, ..scores }))?)?;
    }
    Ok(())
}

#[test]
fn dropout_drops_the_weights_that_cpu_kernels_drop() -> Result<()> {
    let number = 0x1234_5678_9abc_def0u64;
    let halves = Tensor::new(&[number as u32, (number >> 32) as u32], &candle_core::Device::Cpu)?;
    for mask in [DropoutMask::Philox(number), DropoutMask::PhiloxOnDevice(halves)] {
        let dropout = Some(Dropout { p: 0.3, mask });
        check(&with_scores(MANY_QUERIES, |scores| Ok(ScoreModifiers { dropout, ..scores }))?)?;
    }
    Ok(())
}

#[test]
fn scale_below_zero_matches_reference() -> Result<()> {
    check(&with_scores(MANY_QUERIES, |scores| Ok(ScoreModifiers { scale: -0.4, ..scores }))?)
}
