//! Keys and values that are codes.

use half::bf16;

use super::case::{Case, CodedRows, coded_rows, dims};
use super::{numbers, on_miri_only_scalar};
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionCall, AttentionDims, KeysOfQueries, KvCodeFormat, KvScales, OutputLayout, RequestedResults,
    ScoreModifiers, Strided, attend,
};

/// Computes a call of codes of 8 bits over heads of 16 numbers, whose last query attends to all keys and each query
/// before it to one key less.
fn attend_codes(instruction_set: InstructionSet, t_q: usize, codes: &[u8], scales: &[f32]) -> Vec<f32> {
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
        kv_scales: Some(KvScales { format: KvCodeFormat::Q8, k: scales, v: scales }),
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
            let CodedRows { codes, mut scales, .. } = coded_rows(KvCodeFormat::Q8, 50, 16, 3);
            let finite = attend_codes(instruction_set, t_q, &codes, &scales);
            scales[49] = f32::NAN;
            let found = attend_codes(instruction_set, t_q, &codes, &scales);
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
    let CodedRows { codes, scales, .. } = coded_rows(KvCodeFormat::Q8, count, 16, 3);
    for instruction_set in on_miri_only_scalar() {
        for t_q in [4, 50] {
            let [one, three] = [1, 3].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| attend_codes(instruction_set, t_q, &codes, &scales))
            });
            assert!(
                one.iter().zip(&three).all(|(x, y)| x.to_bits() == y.to_bits()),
                "{instruction_set}, {t_q} queries"
            );
        }
    }
}

/// Checks widths of one group of numbers and of several, in decoding with each number of rows of a group, and in tiles.
#[test]
fn e4m3_and_4_bits_with_causal_softcap_alibi_sinks_match_plain_loops() {
    let shapes = [
        dims(2, 1, 40, 32, 64),
        dims(1, 1, 70, 128, 96),
        dims(4, 1, 45, 192, 128),
        dims(4, 2, 67, 64, 192),
        dims(4, 3, 31, 160, 32),
        dims(2, 40, 131, 128, 64),
    ];
    // Interpreted, a call takes seconds.
    let used_shapes = if cfg!(miri) { &shapes[..1] } else { &shapes[..] };
    for instruction_set in on_miri_only_scalar() {
        for &dims in used_shapes {
            for codes in [KvCodeFormat::E4M3, KvCodeFormat::Q4] {
                for has_modifiers in [false, true] {
                    let case = Case { codes: Some(codes), ..Case::new(dims, true, has_modifiers) };
                    let differences =
                        [case.difference::<f32>(instruction_set), case.difference::<bf16>(instruction_set)];
                    for (difference, most) in differences.into_iter().zip([2e-5, 2e-2]) {
                        assert!(
                            difference < most,
                            "{instruction_set}, {case}: off by {difference:e}, more than {most:e}"
                        );
                    }
                }
            }
        }
    }
}

/// Changes the scale of the second group of the last key, which only the last query attends to.
#[test]
fn scale_of_nan_of_one_group_of_4_bits_reaches_only_its_key_and_columns() {
    for instruction_set in on_miri_only_scalar() {
        for t_q in [2, 40] {
            let case = Case { codes: Some(KvCodeFormat::Q4), ..Case::new(dims(1, t_q, 50, 32, 128), true, false) };
            let mut data = case.data::<f32>();
            let wanted = RequestedResults::default();
            let finite = attend::<f32>(&case.call(&data), instruction_set, wanted).expect("a few rows").output;
            data.v_codes.scales[2 * 49 + 1] = f32::NAN;
            let found = attend::<f32>(&case.call(&data), instruction_set, wanted).expect("a few rows").output;
            let second_group = (t_q - 1) * 128 + 64..t_q * 128;
            for (n, (x, expected)) in found.iter().zip(&finite).enumerate() {
                let is_right = if second_group.contains(&n) { x.is_nan() } else { (x - expected).abs() < 1e-5 };
                assert!(is_right, "{instruction_set}, {t_q} queries, number {n}: {x}");
            }
        }
    }
}
