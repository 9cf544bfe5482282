//! Packed sequences.

use candle_core::{DType, Result};

use super::problem::{Problem, SIZES, Sizes, emulator_runs};
use crate::mask::{AttentionMask, ValidLens};
use crate::sdpa::packed::PackedSequences;

/// Returns a call over four sequences, one of them without queries and one without keys.
fn packed(dtype: DType, mask: AttentionMask) -> Result<Problem> {
    let sequences = PackedSequences::from_lens(&[17, 0, 3, 21], &[20, 4, 0, 33])?;
    let sizes = Sizes { b: 1, t_q: 41, t_kv: 57, ..SIZES };
    Ok(Problem { sequences: Some(sequences), sizes, ..Problem::new(dtype, mask) })
}

#[test]
fn cuda_kernels_with_packed_sequences_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let (none, causal) = (AttentionMask::none, AttentionMask::causal);
    let by_query = [17, 0, 3, 21].map(|t_q| (0..t_q).map(|i| i * 5 % 13).collect::<Vec<_>>());
    for (n, mask) in [
        none(),
        causal(),
        AttentionMask::causal_upper_left().with_window(6),
        none().with_valid_lens(vec![12, 1, 1, 30]).with_starts(vec![0, 0, 0, 7]),
        causal().with_valid_lens(ValidLens::from(by_query.to_vec())),
    ]
    .into_iter()
    .enumerate()
    {
        Problem { with_lse: n % 2 == 0, ..packed(DType::BF16, mask)? }.check(500 + n as u64)?;
    }
    Ok(())
}

#[test]
fn cuda_kernels_with_packed_sequences_and_score_modifiers_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let plain = packed(DType::F32, AttentionMask::causal())?;
    let options = plain.options.clone().with_softcap(3.0);
    let relative_bias = Some(vec![4, 21 + 33 - 1]);
    Problem { options, has_slopes: true, relative_bias, has_sinks: true, ..plain }.check(510)
}
