//! Dimensions at their ends.

use crate::cpu::InstructionSet;
use crate::flash::{
    BackwardProblem, Dims, Dropout, DropoutMask, OutputLayout, Problem, ScoreOptions, Strided, Wanted, attend,
    attend_backward, attend_vec,
};

/// Dimensions of which none is in memory multiply to more than a number holds: such calls are computed, or errors.
#[test]
fn dimensions_of_any_size_are_computed_or_errors() {
    let most = if cfg!(miri) { [usize::MAX / 4].as_slice() } else { &[1, 20, usize::MAX / 4] };
    let found = [[&[0], most].concat(), vec![0, 1, usize::MAX]].map(|counts| count_computed_and_refused(&counts));
    assert!(found.iter().all(|&(computed, refused)| computed > 0 && refused > 0), "{found:?}");
}

/// Calls with every combination of the counts as dimensions, none of which may panic: how many were computed, and how
/// many were errors.
fn count_computed_and_refused(counts: &[usize]) -> (usize, usize) {
    let data = [0.5f32; 20];
    let count = |case: usize, n: u32| counts[case / counts.len().pow(n) % counts.len()];
    let (mut computed, mut refused) = (0, 0);
    for case in 0..counts.len().pow(7) {
        let [b, h, h_kv, t_q, t_kv, d, d_v] = std::array::from_fn(|n| count(case, n as u32));
        let dims = Dims { b, h, h_kv, t_q, t_kv, d, d_v };
        let ranges = vec![0..t_kv.min(3); b.saturating_mul(t_q).min(400)];
        let rows = Strided { data: &data[..], strides: [0; 3] };
        let mask = DropoutMask::Kept(&[255; 20]);
        for dropout in [None, Some(Dropout { mask, p: 0.5 })] {
            let bias = Some(Strided { data: &data[..], strides: [0; 4] });
            let scores = ScoreOptions { dropout, bias, ..Default::default() };
            let (q, k, v, output_layout) = (rows, rows.into(), rows.into(), OutputLayout::Bhtd);
            let forward = Problem { dims, q, k, v, ranges: &ranges, scores, output_layout, executor: None };
            // Results of a length that is nothing's.
            let (mut none, mut no_lse) = ([], []);
            let _ = attend(&forward, InstructionSet::Scalar, &mut none, Some(&mut no_lse), None);
            let mut stats = Vec::new();
            let context = attend_vec(&forward, InstructionSet::Scalar, None, Some(&mut stats)).unwrap_or_default();
            let problem =
                BackwardProblem { forward, context: &context, stats: &stats, context_grad: rows, lse_grad: None };
            for (q, kv) in [(true, false), (false, true), (true, true)] {
                let bias = kv.then_some([b, h, t_q, t_kv]);
                let wanted = Wanted { q, k: kv, v: kv, bias, ..Default::default() };
                match attend_backward(&problem, InstructionSet::Scalar, wanted) {
                    Ok(gradients) => {
                        let len = |wanted: bool, dims: [usize; 4]| wanted.then(|| dims.into_iter().product::<usize>());
                        let found = [&gradients.q, &gradients.k, &gradients.v].map(|x| x.as_ref().map(Vec::len));
                        let keys = [len(kv, [b, h_kv, t_kv, d]), len(kv, [b, h_kv, t_kv, d_v])];
                        assert_eq!(found, [len(q, [b, h, t_q, d]), keys[0], keys[1]], "{dims:?}");
                        computed += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
        }
    }
    (computed, refused)
}

/// A stride along a dimension of one entry is never used, nor is any stride of rows without elements.
#[test]
fn strides_of_any_size_are_accepted_where_they_are_not_used() {
    let data = [0.5f32; 64];
    for (t, d) in [(1, 2), (1, 0), (3, 0)] {
        for (h, h_kv) in [(1, 1), (40, 1)] {
            let dims = Dims { b: 1, h, h_kv, t_q: t, t_kv: t, d, d_v: d };
            let (any, of_heads) = (usize::MAX, if d == 0 { usize::MAX } else { 0 });
            let rows = Strided { data: &data[..], strides: [any, of_heads, any] };
            let (k, v, ranges) = (rows.into(), rows.into(), vec![0..t; t]);
            let (scores, output_layout) = (ScoreOptions::default(), OutputLayout::Bhtd);
            let forward = Problem { dims, q: rows, k, v, ranges: &ranges, scores, output_layout, executor: None };
            for instruction_set in InstructionSet::available() {
                let mut stats = Vec::new();
                let context = attend_vec(&forward, instruction_set, None, Some(&mut stats)).expect("a few rows");
                assert!(context.iter().all(|&x| x == 0.5), "{instruction_set}, {dims:?}: {context:?}");
                let problem =
                    BackwardProblem { forward, context: &context, stats: &stats, context_grad: rows, lse_grad: None };
                let wanted = Wanted { q: true, k: true, v: true, ..Default::default() };
                let gradients = attend_backward(&problem, instruction_set, wanted).expect("a few rows");
                // Of one key, whose weight is 1 whatever the query is.
                assert!(gradients.q.into_iter().flatten().all(|x| x == 0.0), "{instruction_set}, {dims:?}");
            }
        }
    }
}
