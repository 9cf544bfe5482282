//! Keys that are NaN.

use super::numbers;
use crate::cpu::InstructionSet;
use crate::flash::{AttentionDims, AttentionProblem, OutputLayout, ScoreOptions, Strided, attend_vec};

/// Checks every payload of a NaN, with and without a softcap, where rows are decoded and where they fill tiles.
#[test]
fn nan_key_with_softcap_reaches_only_queries_that_attend_to_it() {
    let t_kv = 20;
    let d = 3;
    let nans = if cfg!(miri) { 1..2 } else { 0..512 };
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for (t_q, softcap) in [(2, None), (2, Some(3.0)), (20, None), (20, Some(3.0))] {
            let q = numbers::<f32>(t_q * d, 1);
            let v = numbers::<f32>(t_kv * d, 2);
            let attend = |k: &[f32]| {
                let rows = |data| Strided { data, strides: [0, 0, d] };
                let problem = AttentionProblem {
                    dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d, d_v: d },
                    q: rows(&q),
                    k: rows(k).into(),
                    v: rows(&v).into(),
                    ranges: &(1..=t_q).map(|i| 0..t_kv + i - t_q).collect::<Vec<_>>(),
                    scores: ScoreOptions { softcap, ..Default::default() },
                    output_layout: OutputLayout::Bhtd,
                };
                attend_vec(&problem, instruction_set, None, None).expect("a few rows")
            };
            let mut k = numbers::<f32>(t_kv * d, 3);
            let finite = attend(&k);
            for payload in nans.clone() {
                k[(t_kv - 1) * d] = f32::from_bits(0x7fc0_0000 | payload);
                let found = attend(&k);
                let (before, last) = found.split_at((t_q - 1) * d);
                let what = format!("{instruction_set}, {t_q} queries, softcap {softcap:?}, payload {payload}");
                assert!(before.iter().zip(&finite).all(|(x, y)| (x - y).abs() < 1e-6), "{what}: {before:?}");
                assert!(last.iter().all(|x| x.is_nan()), "{what}: {last:?}");
            }
        }
    }
}
