//! The smallest and largest dimensions.

use super::case::FOR_BACKWARD;
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionBackwardProblem, AttentionCall, AttentionDims, Dropout, DropoutMask, KeysOfQueries, OutputLayout,
    PerInput, RequestedGradients, ScoreModifiers, Strided, View, attend, attend_backward,
};

/// Dimensions that need no memory alone may have a product that overflows: such calls are computed, or refused.
#[test]
fn dimensions_of_any_size_are_computed_or_refused() {
    let most = if cfg!(miri) { [usize::MAX / 4].as_slice() } else { &[1, 20, usize::MAX / 4] };
    let found = [[&[0], most].concat(), vec![0, 1, usize::MAX]].map(|counts| count_computed_and_refused(&counts));
    assert!(found.iter().all(|&(computed, refused)| computed > 0 && refused > 0), "{found:?}");
}

/// Makes calls with every combination of the counts as dimensions, none of which may panic. Returns the number of
/// computed and of refused calls.
fn count_computed_and_refused(counts: &[usize]) -> (usize, usize) {
    let data = [0.5f32; 20];
    let count = |case: usize, n: u32| counts[case / counts.len().pow(n) % counts.len()];
    let mut computed = 0;
    let mut refused = 0;
    for case in 0..counts.len().pow(7) {
        let [b, h, h_kv, t_q, t_kv, d, d_v] = std::array::from_fn(|n| count(case, n as u32));
        let dims = AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v };
        let ranges = vec![0..t_kv.min(3); b.saturating_mul(t_q).min(400)];
        let rows = Strided { data: &data[..], strides: [0; 3] };
        let mask = DropoutMask::KeptBits(View::list(&[255u8; 20]));
        for dropout in [None, Some(Dropout { mask, p: 0.5 })] {
            let bias = Some(Strided { data: &data[..], strides: [0; 4] }.into());
            let scores = ScoreModifiers { dropout, bias, ..Default::default() };
            let all_rows = rows.into();
            let output_layout = OutputLayout::Bhtd;
            let keys = KeysOfQueries { ranges: &ranges, ..Default::default() };
            let (q, k, v) = (all_rows, all_rows, all_rows);
            let forward = AttentionCall { dims, q, k, v, kv_scales: None, pages: None, keys, scores, output_layout };
            let found = attend::<f32>(&forward, InstructionSet::Scalar, FOR_BACKWARD).unwrap_or_default();
            let problem = AttentionBackwardProblem {
                forward,
                output: &found.output,
                softmax_stats: &found.softmax_stats.unwrap_or_default(),
                output_grad: rows,
                lse_grad: None,
            };
            for (of_queries, of_keys) in [(true, false), (false, true), (true, true)] {
                let of = PerInput { q: of_queries, k: of_keys, v: of_keys, bias: of_keys, ..Default::default() };
                let requested = RequestedGradients { layout: output_layout, of };
                match attend_backward(&problem, InstructionSet::Scalar, requested) {
                    Ok(gradients) => {
                        let len = |is_requested: bool, shape: [usize; 4]| {
                            is_requested.then(|| shape.into_iter().product::<usize>())
                        };
                        let found_lens = [&gradients.q, &gradients.k, &gradients.v].map(|x| x.as_ref().map(Vec::len));
                        let expected = [
                            len(of_queries, [b, h, t_q, d]),
                            len(of_keys, [b, h_kv, t_kv, d]),
                            len(of_keys, [b, h_kv, t_kv, d_v]),
                        ];
                        assert_eq!(found_lens, expected, "{dims:?}");
                        computed += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
        }
    }
    (computed, refused)
}

/// Checks strides along dimensions of one entry, and strides of rows without elements.
#[test]
fn unused_strides_of_any_size_are_accepted() {
    let data = [0.5f32; 64];
    for (t, d) in [(1, 2), (1, 0), (3, 0)] {
        for (h, h_kv) in [(1, 1), (40, 1)] {
            let dims = AttentionDims { b: 1, h, h_kv, t_q: t, t_kv: t, d, d_v: d };
            let any = usize::MAX;
            let of_heads = if d == 0 { usize::MAX } else { 0 };
            let rows = Strided { data: &data[..], strides: [any, of_heads, any] };
            let all_rows = rows.into();
            let forward = AttentionCall {
                dims,
                q: all_rows,
                k: all_rows,
                v: all_rows,
                kv_scales: None,
                pages: None,
                keys: KeysOfQueries { ranges: &vec![0..t; t], ..Default::default() },
                scores: ScoreModifiers::default(),
                output_layout: OutputLayout::Bhtd,
            };
            for instruction_set in InstructionSet::available() {
                let found = attend::<f32>(&forward, instruction_set, FOR_BACKWARD).expect("a few rows");
                let output = found.output;
                assert!(output.iter().all(|&x| x == 0.5), "{instruction_set}, {dims:?}: {output:?}");
                let problem = AttentionBackwardProblem {
                    forward,
                    output: &output,
                    softmax_stats: &found.softmax_stats.expect("wanted"),
                    output_grad: rows,
                    lse_grad: None,
                };
                let of = PerInput { q: true, k: true, v: true, ..Default::default() };
                let requested = RequestedGradients { layout: OutputLayout::Bhtd, of };
                let gradients = attend_backward(&problem, instruction_set, requested).expect("a few rows");
                // The gradient of a weight of 1, which does not depend on the query, is zero.
                assert!(gradients.q.into_iter().flatten().all(|x| x == 0.0), "{instruction_set}, {dims:?}");
            }
        }
    }
}
