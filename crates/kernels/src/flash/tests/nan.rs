//! Keys that are NaN.

use super::numbers;
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionCall, AttentionDims, KeysOfQueries, OutputLayout, RequestedResults, ScoreModifiers, Strided, attend,
};

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
            let attend_to = |k: &[f32]| {
                let rows = |data| Strided { data, strides: [0, 0, d] };
                let call = AttentionCall {
                    dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d, d_v: d },
                    q: rows(&q).into(),
                    k: rows(k).into(),
                    v: rows(&v).into(),
                    kv_scales: None,
                    pages: None,
                    keys: KeysOfQueries {
                        ranges: &(1..=t_q).map(|i| 0..t_kv + i - t_q).collect::<Vec<_>>(),
                        ..Default::default()
                    },
                    scores: ScoreModifiers { softcap, ..Default::default() },
                    output_layout: OutputLayout::Bhtd,
                };
                attend::<f32>(&call, instruction_set, RequestedResults::default()).expect("a few rows").output
            };
            let mut k = numbers::<f32>(t_kv * d, 3);
            let finite = attend_to(&k);
            for payload in nans.clone() {
                k[(t_kv - 1) * d] = f32::from_bits(0x7fc0_0000 | payload);
                let found = attend_to(&k);
                let (before, last) = found.split_at((t_q - 1) * d);
                let what = format!("{instruction_set}, {t_q} queries, softcap {softcap:?}, payload {payload}");
                assert!(before.iter().zip(&finite).all(|(x, y)| (x - y).abs() < 1e-6), "{what}: {before:?}");
                assert!(last.iter().all(|x| x.is_nan()), "{what}: {last:?}");
            }
        }
    }
}
