//! Gradients against the gradients of the oracle.

use half::{bf16, f16};

use super::case::{Case, Data, FOR_BACKWARD, dims};
use super::{numbers, on_miri_only_scalar};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionBackwardProblem, AttentionDims, AttentionGradients, OutputLayout, PerInput, RequestedGradients, Strided,
    attend, attend_backward,
};

/// Runs forward and backward on one instruction set; the gradients of the results are arbitrary numbers.
fn backward<E: Element + Into<f32>>(
    case: &Case,
    data: &Data<E>,
    instruction_set: InstructionSet,
    factors: &Factors<E>,
    layout: OutputLayout,
) -> AttentionGradients<E> {
    let AttentionDims { h, t_q, d_v, .. } = case.dims;
    let forward = case.call(data);
    let found = attend::<E>(&forward, instruction_set, FOR_BACKWARD).expect("a few rows");
    let output = found.output;
    let softmax_stats = &found.softmax_stats.expect("wanted");
    let output_grad = Strided { data: &factors.output[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
    let lse_grad = Some(&factors.lse[..]);
    let problem = AttentionBackwardProblem { forward, output: &output, softmax_stats, output_grad, lse_grad };
    let has_modifiers = case.has_modifiers;
    let requested = RequestedGradients {
        layout,
        of: PerInput {
            q: true,
            k: true,
            v: true,
            bias: has_modifiers,
            relative_bias: false,
            alibi_slopes: has_modifiers,
            sinks: has_modifiers,
        },
    };
    attend_backward(&problem, instruction_set, requested).expect("a few rows")
}

/// The factors of a loss: the sum of the results times these numbers.
struct Factors<E> {
    output: Vec<E>,
    lse: Vec<f32>,
}

/// A gradient with its name.
struct Named {
    name: &'static str,
    numbers: Vec<f64>,
}

/// Computes the gradients with the oracle.
fn exact<E: Element + Into<f32>>(case: &Case, factors: &Factors<E>) -> Vec<Named> {
    let AttentionDims { h, t_q, t_kv, .. } = case.dims;
    let data = case.data::<E>().widened(false);
    let of_output: Vec<f64> = factors.output.iter().map(|&x| f64::from(x.into())).collect();
    let of_lse: Vec<f64> = factors.lse.iter().map(|&x| f64::from(x)).collect();
    let found = case.with_problem(&data, &|_| 0.0, |problem| problem.backward(&of_output, &of_lse));
    // All sequences and heads share the bias (T_q, T_kv).
    let mut bias = vec![0.0; t_q * t_kv];
    let mut slopes = vec![0.0; h];
    for (at, of_score) in found.scores.iter().enumerate() {
        let row = at / (h * t_q * t_kv) * t_q + at / t_kv % t_q;
        bias[at % (t_q * t_kv)] += of_score;
        slopes[at / (t_q * t_kv) % h] -= of_score * f64::from((data.positions[row] - (at % t_kv) as f32).abs());
    }
    let mut named = vec![
        Named { name: "q", numbers: found.q },
        Named { name: "k", numbers: found.k },
        Named { name: "v", numbers: found.v },
    ];
    if case.has_modifiers {
        named.push(Named { name: "bias", numbers: bias });
        named.push(Named { name: "slopes", numbers: slopes });
        named.push(Named { name: "sinks", numbers: found.sinks });
    }
    named
}

/// Returns the requested gradients of the kernel, in the order of [`exact`].
fn found<E: Element + Into<f32>>(gradients: AttentionGradients<E>) -> Vec<Vec<f64>> {
    let AttentionGradients { q, k, v, bias, relative_bias: _, alibi_slopes, sinks } = gradients;
    let elements = [q, k, v].into_iter().flatten();
    let floats = [bias, alibi_slopes, sinks].into_iter().flatten();
    let wide = |numbers: Vec<E>| numbers.into_iter().map(|x| f64::from(x.into())).collect();
    let wide_floats = |numbers: Vec<f32>| numbers.into_iter().map(f64::from).collect();
    elements.map(wide).chain(floats.map(wide_floats)).collect()
}

/// Checks that the gradients differ from the expected ones by less than `most` times the largest entry of the gradient.
fn check<E: Element + Into<f32>>(case: &Case, instruction_sets: &[InstructionSet], most: f64) {
    let AttentionDims { b, h, t_q, d_v, .. } = case.dims;
    let factors = Factors::<E> { output: numbers(b * h * t_q * d_v, 7), lse: numbers(b * h * t_q, 8) };
    let expected = exact(case, &factors);
    for &instruction_set in instruction_sets {
        let gradients = found(backward(case, &case.data::<E>(), instruction_set, &factors, OutputLayout::Bhtd));
        assert_eq!(gradients.len(), expected.len(), "{instruction_set}, {case}");
        for (gradient, Named { name, numbers }) in gradients.iter().zip(&expected) {
            assert_eq!(gradient.len(), numbers.len(), "{instruction_set}, {case}, {name}");
            let largest = numbers.iter().fold(1e-3, |so_far: f64, x| so_far.max(x.abs()));
            for (entry, (own, wanted)) in gradient.iter().zip(numbers).enumerate() {
                let difference = (own - wanted).abs() / largest;
                assert!(difference < most, "{instruction_set}, {case}, {name} {entry}: off by {difference:e}");
            }
        }
    }
}

#[test]
fn backward_with_causal_softcap_alibi_sinks_dropout_matches_oracle() {
    // The last one has several blocks of keys and tiles of queries.
    let shapes =
        [dims(2, 9, 3, 2, 3), dims(2, 1, 3, 3, 2), dims(1, 3, 2, 8, 1), dims(2, 11, 13, 9, 4), dims(2, 50, 270, 17, 5)];
    let instruction_sets = on_miri_only_scalar();
    for &dims in if cfg!(miri) { &shapes[..1] } else { &shapes[..] } {
        for (causal, has_modifiers) in [(false, false), (true, false), (true, true)] {
            let case = Case::new(dims, causal, has_modifiers);
            let case = if causal { case.with_dropout(77 << 33) } else { case };
            check::<f32>(&case, &instruction_sets, 5e-5);
            check::<bf16>(&case, &instruction_sets, 2e-2);
            check::<f16>(&case, &instruction_sets, 3e-3);
        }
    }
}

/// Returns numbers (B, T, heads, width) in the order (B, heads, T, width).
fn heads_first<E: Copy>(numbers: &[E], [b, heads, t, width]: [usize; 4]) -> Vec<E> {
    let mut reordered = Vec::with_capacity(numbers.len());
    for sequence in 0..b {
        for head in 0..heads {
            for position in 0..t {
                let start = ((sequence * t + position) * heads + head) * width;
                reordered.extend_from_slice(&numbers[start..start + width]);
            }
        }
    }
    reordered
}

fn check_layouts<E: Element + Into<f32> + PartialEq + std::fmt::Debug>(case: &Case) {
    let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = case.dims;
    let factors = Factors::<E> { output: numbers(b * h * t_q * d_v, 7), lse: numbers(b * h * t_q, 8) };
    for instruction_set in on_miri_only_scalar() {
        let run = |layout| backward(case, &case.data::<E>(), instruction_set, &factors, layout);
        let expected = run(OutputLayout::Bhtd);
        let found = run(OutputLayout::Bthd);
        let reordered = |gradient: Option<Vec<E>>, shape| gradient.map(|numbers| heads_first(&numbers, shape));
        assert_eq!(reordered(found.q, [b, h, t_q, d]), expected.q, "{instruction_set}, {case}");
        assert_eq!(reordered(found.k, [b, h_kv, t_kv, d]), expected.k, "{instruction_set}, {case}");
        assert_eq!(reordered(found.v, [b, h_kv, t_kv, d_v]), expected.v, "{instruction_set}, {case}");
        assert_eq!(found.bias, expected.bias, "{instruction_set}, {case}");
    }
}

#[test]
fn backward_in_either_layout_has_the_same_gradients() {
    for dims in [dims(2, 9, 3, 2, 3), dims(2, 11, 13, 9, 4)] {
        let case = Case::new(dims, true, true);
        check_layouts::<f32>(&case);
        check_layouts::<bf16>(&case);
        check_layouts::<f16>(&case);
    }
}
