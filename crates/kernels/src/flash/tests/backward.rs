//! Gradients against central differences of plain loops in f64.

use half::{bf16, f16};

use super::case::{Case, Data, Exact, FOR_BACKWARD, dims};
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

impl<E: Element + Into<f32>> Factors<E> {
    fn loss(&self, case: &Case, data: &Data<f64>) -> f64 {
        let Exact { output, lse } = case.exact(data);
        let mut sum = 0.0;
        for (x, &factor) in output.iter().zip(&self.output) {
            sum += x * f64::from(factor.into());
        }
        for (x, &factor) in lse.iter().zip(&self.lse).filter(|(x, _)| x.is_finite()) {
            sum += x * f64::from(factor);
        }
        sum
    }
}

/// An input of a call that has a gradient.
#[derive(Debug, Clone, Copy)]
enum Input {
    Q,
    K,
    V,
    Bias,
    Slopes,
    Sinks,
}

/// An entry of a gradient, by central differences.
struct Probe {
    input: Input,
    entry: usize,
    gradient: f64,
}

impl Input {
    /// Returns the number of entries.
    fn len(self, data: &Data<f64>) -> usize {
        match self {
            Self::Q => data.q.len(),
            Self::K => data.k.len(),
            Self::V => data.v.len(),
            Self::Bias => data.bias.len(),
            Self::Slopes => data.slopes.len(),
            Self::Sinks => data.sinks.len(),
        }
    }

    /// Adds a step to an entry.
    fn add(self, data: &mut Data<f64>, entry: usize, step: f64) {
        match self {
            Self::Q => data.q[entry] += step,
            Self::K => data.k[entry] += step,
            Self::V => data.v[entry] += step,
            Self::Bias => data.bias[entry] += step as f32,
            Self::Slopes => data.slopes[entry] += step as f32,
            Self::Sinks => data.sinks[entry] += step as f32,
        }
    }

    /// Returns the gradient, which was requested.
    fn gradient<E: Element + Into<f32>>(self, gradients: &AttentionGradients<E>) -> Vec<f64> {
        let elements =
            |numbers: &Option<Vec<E>>| -> Vec<f64> { numbers.iter().flatten().map(|&x| f64::from(x.into())).collect() };
        let floats = |numbers: &Option<Vec<f32>>| numbers.iter().flatten().map(|&x| f64::from(x)).collect();
        match self {
            Self::Q => elements(&gradients.q),
            Self::K => elements(&gradients.k),
            Self::V => elements(&gradients.v),
            Self::Bias => floats(&gradients.bias),
            Self::Slopes => floats(&gradients.alibi_slopes),
            Self::Sinks => floats(&gradients.sinks),
        }
    }
}

/// Computes some entries of each gradient by central differences.
fn central_differences<E: Element + Into<f32>>(case: &Case, factors: &Factors<E>) -> Vec<Probe> {
    // A power of two, which f32 stores exactly.
    const STEP: f64 = 1.0 / 1024.0;
    let data = case.data::<E>().widened(false);
    let inputs = [Input::Q, Input::K, Input::V, Input::Bias, Input::Slopes, Input::Sinks];
    let mut probes = Vec::new();
    for &input in if case.has_modifiers { &inputs[..] } else { &inputs[..3] } {
        let loss_at = |entry: usize, step: f64| {
            let mut moved = data.clone();
            input.add(&mut moved, entry, step);
            factors.loss(case, &moved)
        };
        let len = input.len(&data);
        let count = len.min(6);
        for probe in 0..count {
            let entry = probe * len / count;
            // A bias of f32 is rounded once more where it is moved.
            let gradient = (loss_at(entry, STEP) - loss_at(entry, -STEP)) / (2.0 * STEP);
            probes.push(Probe { input, entry, gradient });
        }
    }
    probes
}

/// Checks that the gradients differ from the expected ones by less than `most` times the largest entry of the gradient.
fn check<E: Element + Into<f32>>(case: &Case, instruction_sets: &[InstructionSet], most: f64) {
    let AttentionDims { b, h, t_q, d_v, .. } = case.dims;
    let factors = Factors::<E> { output: numbers(b * h * t_q * d_v, 7), lse: numbers(b * h * t_q, 8) };
    let expected = central_differences(case, &factors);
    for &instruction_set in instruction_sets {
        let gradients = backward(case, &case.data::<E>(), instruction_set, &factors, OutputLayout::Bhtd);
        for &Probe { input, entry, gradient } in &expected {
            let found = input.gradient(&gradients);
            assert!(found.iter().all(|x| x.is_finite()), "{instruction_set}, {case}, {input:?}: {found:?}");
            let largest = found.iter().fold(1e-3, |so_far: f64, x| so_far.max(x.abs()));
            let difference = (found[entry] - gradient).abs() / largest;
            assert!(difference < most, "{instruction_set}, {case}, {input:?} {entry}: off by {difference:e}");
        }
    }
}

#[test]
fn backward_with_causal_softcap_alibi_sinks_dropout_matches_central_differences() {
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
