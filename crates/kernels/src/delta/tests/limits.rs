//! Numbers and sizes at the limits of what is computed.

use super::Case;
use crate::cpu::InstructionSet;
use crate::delta::{
    DeltaBackwardProblem, DeltaDecay, DeltaDims, DeltaProblem, gated_delta_rule, gated_delta_rule_backward,
};
use crate::error::Error;
use crate::number::Strided;

/// Finds a decay above the bound in any place, forward and backward, also next to a NaN.
#[test]
fn gated_delta_rule_with_decay_above_bound_is_out_of_range() {
    for has_channels in [false, true] {
        let dims = DeltaDims { b: 1, t: 70, h: 2, h_q: 2, h_k: 2, h_v: 2, d_k: 5, d_v: 3 };
        let case = Case::new(dims, vec![0..70], has_channels, true);
        let output_grad = vec![1.0; 70 * 2 * 3];
        for instruction_set in InstructionSet::available() {
            let results = gated_delta_rule(&case.problem(), instruction_set, true).expect("decays below the bound");
            let saved = results.saved.expect("the call saves");
            let decays = case.inputs.decay.len();
            for place in [0, 1, decays / 2, decays - 1] {
                let mut above = case.clone();
                above.inputs.decay[(place + 1) % decays] = f32::NAN;
                above.inputs.decay[place] = 2.6;
                let expected = Error::Range("decay is 2.6, expected at most 2.5".to_string());
                let forward = gated_delta_rule(&above.problem(), instruction_set, false).map(drop);
                assert_eq!(forward, Err(expected.clone()), "{instruction_set}, {place}");
                let problem = DeltaBackwardProblem {
                    forward: above.problem(),
                    saved: &saved,
                    output_grad: case.output_rows(&output_grad),
                    states_grad: None,
                };
                let backward = gated_delta_rule_backward(&problem, instruction_set).map(drop);
                assert_eq!(backward, Err(expected), "{instruction_set}, {place}, backward");
            }
        }
    }
}

#[test]
fn gated_delta_rule_with_norm_and_scale_beyond_bounds_is_out_of_range() {
    let dims = DeltaDims { b: 1, t: 1, h: 1, h_q: 1, h_k: 1, h_v: 1, d_k: 2, d_v: 1 };
    let case = Case::new(dims, vec![0..1], false, true);
    let instruction_set = InstructionSet::choose(None, false).expect("there is an instruction set");
    let run = |scale: f32, qk_norm: Option<f32>| {
        gated_delta_rule(&DeltaProblem { scale, qk_norm, ..case.problem() }, instruction_set, false).map(drop)
    };
    for scale in [0.0, 1e-15, -1e-15, 1e15] {
        assert_eq!(run(scale, Some(1e-6)), Ok(()), "{scale}");
    }
    for scale in [2e19, -2e19, 1e-23, 9e-16, f32::NAN] {
        assert!(matches!(run(scale, Some(1e-6)), Err(Error::Range(_))), "{scale}");
        assert_eq!(run(scale, None), Ok(()), "{scale} without a norm");
    }
}

/// Multiplies dimensions to more than a number can store, which is possible since rows of stride 0 take no memory. Such
/// calls are computed or return an error.
#[test]
fn gated_delta_rule_with_dimensions_of_any_size_computes_or_returns_error() {
    let data = [0.5f32; 4];
    let counts: &[usize] = if cfg!(miri) { &[0, usize::MAX] } else { &[0, 1, 2, usize::MAX / 4, usize::MAX] };
    let count = |case: usize, n: u32| counts[case / counts.len().pow(n) % counts.len()];
    let mut computed = 0;
    let mut refused = 0;
    for case in 0..counts.len().pow(5) {
        let [b, t, h, d_k, d_v] = std::array::from_fn(|n| count(case, n as u32));
        let rows = Strided { data: &data[..], strides: [0; 3] };
        let tokens = b.saturating_mul(t);
        // A call with more tokens than fit in memory, in a row that repeats, would take forever.
        let all = if tokens <= 4 { tokens } else { 1 };
        let whole = [0..all];
        let entries = [0..t.min(4), t.min(4)..all.max(t.min(4))];
        for sequences in [&[][..], &whole, &entries] {
            let forward = DeltaProblem {
                dims: DeltaDims { b, t, h, h_q: h, h_k: h, h_v: h, d_k, d_v },
                q: rows,
                k: rows,
                v: rows,
                decay: (case % 2 == 0).then_some(DeltaDecay::Channels(rows)),
                beta: Some(rows),
                states: None,
                sequences,
                scale: 1.0,
                qk_norm: None,
            };
            let Ok(results) = gated_delta_rule(&forward, InstructionSet::Scalar, true) else {
                refused += 1;
                continue;
            };
            let saved = results.saved.expect("the call saves");
            let problem = DeltaBackwardProblem { forward, saved: &saved, output_grad: rows, states_grad: None };
            match gated_delta_rule_backward(&problem, InstructionSet::Scalar) {
                Ok(gradients) => {
                    let len = |dims: &[usize]| dims.iter().product::<usize>();
                    let found = [gradients.q, gradients.v, gradients.states].map(|numbers| numbers.len());
                    let n = sequences.len();
                    let expected = [len(&[b, t, h, d_k]), len(&[b, t, h, d_v]), len(&[n, h, d_k, d_v])];
                    assert_eq!(found, expected, "{:?}, {sequences:?}", forward.dims);
                    computed += 1;
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(computed > 0 && refused > 0, "{computed} computed, {refused} refused");
}
