//! Keys and values of 8 bits.

use super::case::{Q8, quantized};
use super::{numbers, on_miri_only_scalar};
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionCall, AttentionDims, KeysOfQueries, KvScales, OutputLayout, RequestedResults, ScoreModifiers, Strided,
    attend,
};

/// Computes a call of 8 bits over heads of 16 numbers, whose last query attends to all keys and each query before it to
/// one key less.
fn attend_q8(instruction_set: InstructionSet, t_q: usize, codes: &[u8], scales: &[f32]) -> Vec<f32> {
    let d = 16;
    let t_kv = scales.len();
    let q: Vec<f32> = numbers(t_q * d, 7);
    let rows = Strided { data: codes, strides: [0, 0, d] }.into();
    let scales = Strided { data: scales, strides: [0, 0, 1] }.into();
    let call = AttentionCall {
        dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d, d_v: d },
        q: Strided { data: &q, strides: [0, 0, d] }.into(),
        k: rows,
        v: rows,
        kv_scales: Some(KvScales { k: scales, v: scales }),
        pages: None,
        keys: KeysOfQueries { ranges: &(1..=t_q).map(|i| 0..t_kv + i - t_q).collect::<Vec<_>>(), ..Default::default() },
        scores: ScoreModifiers::default(),
        output_layout: OutputLayout::Bhtd,
    };
    attend(&call, instruction_set, RequestedResults::default()).expect("a few rows").output
}

/// Uses the scale that a cache stores for a row with a number that is not finite.
#[test]
fn q8_scale_of_nan_reaches_only_queries_that_attend_to_its_key() {
    for instruction_set in InstructionSet::available() {
        for t_q in [2, 10, 40] {
            let Q8 { codes, mut scales, .. } = quantized(50, 16, 3);
            let finite = attend_q8(instruction_set, t_q, &codes, &scales);
            scales[49] = f32::NAN;
            let found = attend_q8(instruction_set, t_q, &codes, &scales);
            let (before, last) = found.split_at((t_q - 1) * 16);
            assert!(
                before.iter().zip(&finite).all(|(x, y)| (x - y).abs() < 1e-6),
                "{instruction_set}, {t_q} queries: {before:?}"
            );
            assert!(last.iter().all(|x| x.is_nan()), "{instruction_set}, {t_q} queries: {last:?}");
        }
    }
}

#[test]
fn q8_results_are_equal_for_any_number_of_threads() {
    let count = if cfg!(miri) { 60 } else { 9000 };
    let Q8 { codes, scales, .. } = quantized(count, 16, 3);
    for instruction_set in on_miri_only_scalar() {
        for t_q in [4, 50] {
            let [one, three] = [1, 3].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| attend_q8(instruction_set, t_q, &codes, &scales))
            });
            assert!(
                one.iter().zip(&three).all(|(x, y)| x.to_bits() == y.to_bits()),
                "{instruction_set}, {t_q} queries"
            );
        }
    }
}
