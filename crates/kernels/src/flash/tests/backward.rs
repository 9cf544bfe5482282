//! AttentionGradients against central differences of plain loops in f64.

use super::*;
use crate::flash::{AttentionBackwardProblem, AttentionGradients, RequestedGradients, SoftmaxStats, attend_backward};

/// Runs forward and backward on one instruction set; the gradients of the results are arbitrary numbers.
fn backward<E: Element + Into<f32>>(
    case: &Case,
    data: &Data<E>,
    instruction_set: InstructionSet,
    factors: &Factors<E>,
) -> AttentionGradients<E> {
    let AttentionDims { h, t_q, d_v, .. } = case.dims;
    let (forward, mut stats) = (case.problem(data), Vec::<SoftmaxStats>::new());
    let output = attend_vec(&forward, instruction_set, None, Some(&mut stats)).expect("a few rows");
    let output_grad = Strided { data: &factors.output[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
    let lse_grad = Some(&factors.lse[..]);
    let problem = AttentionBackwardProblem { forward, output: &output, stats: &stats, output_grad, lse_grad };
    let everything = case.everything;
    let bias = everything.then_some([1, 1, t_q, case.dims.t_kv]);
    let requested = RequestedGradients {
        q: true,
        k: true,
        v: true,
        bias,
        relative_bias: false,
        slopes: everything,
        sinks: everything,
    };
    attend_backward(&problem, instruction_set, requested).expect("a few rows")
}

/// The loss is the sum of the results times these.
struct Factors<E> {
    output: Vec<E>,
    lse: Vec<f32>,
}

impl<E: Element + Into<f32>> Factors<E> {
    fn loss(&self, case: &Case, data: &Data<f64>) -> f64 {
        let (output, lse) = case.exact(data);
        let output = output.iter().zip(&self.output).map(|(x, &factor)| x * f64::from(factor.into()));
        let lse = lse.iter().zip(&self.lse).filter(|(x, _)| x.is_finite()).map(|(x, &factor)| x * f64::from(factor));
        output.chain(lse).sum()
    }
}

/// Some entries of each gradient, by central differences: the number of the entry, and the gradient.
type Expected = [Vec<(usize, f64)>; 6];

fn central_differences<E: Element + Into<f32>>(case: &Case, factors: &Factors<E>) -> Expected {
    let data = case.data::<E>().widened(false);
    // A power of two, which f32 keeps.
    const STEP: f64 = 1.0 / 1024.0;
    std::array::from_fn(|which| {
        let loss_at = |n: usize, step: f64| {
            let mut data = data.clone();
            match which {
                0 => data.q[n] += step,
                1 => data.k[n] += step,
                2 => data.v[n] += step,
                3 => data.bias[n] += step as f32,
                4 => data.slopes[n] += step as f32,
                _ => data.sinks[n] += step as f32,
            }
            factors.loss(case, &data)
        };
        let count = [data.q.len(), data.k.len(), data.v.len(), data.bias.len(), data.slopes.len(), data.sinks.len()];
        let (count, probes) = (count[which], count[which].min(6));
        // A bias of f32 is rounded once more where it is moved.
        let difference = |n: usize| (loss_at(n, STEP) - loss_at(n, -STEP)) / (2.0 * STEP);
        let is_there = which < 3 || case.everything;
        (0..if is_there { probes } else { 0 }).map(|probe| probe * count / probes).map(|n| (n, difference(n))).collect()
    })
}

/// Returns the largest difference divided by the largest gradient, for each tensor.
fn differences<E: Element + Into<f32>>(
    case: &Case,
    instruction_set: InstructionSet,
    factors: &Factors<E>,
    expected: &Expected,
) -> [f64; 6] {
    let AttentionGradients { q, k, v, bias, slopes, sinks, .. } =
        backward(case, &case.data::<E>(), instruction_set, factors);
    let wide = |numbers: Option<Vec<E>>| numbers.expect("requested").into_iter().map(|x| f64::from(x.into())).collect();
    let of_f32 = |numbers: Option<Vec<f32>>| numbers.unwrap_or_default().into_iter().map(f64::from).collect();
    let gradients: [Vec<f64>; 6] = [wide(q), wide(k), wide(v), of_f32(bias), of_f32(slopes), of_f32(sinks)];
    std::array::from_fn(|which| {
        let gradient = &gradients[which];
        assert!(gradient.iter().all(|x| x.is_finite()), "{gradient:?}");
        let largest = gradient.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
        expected[which].iter().map(|&(n, expected)| (gradient[n] - expected).abs() / largest).fold(0.0, f64::max)
    })
}

fn check<E: Element + Into<f32>>(case: &Case, instruction_sets: &[InstructionSet], most: f64) {
    let AttentionDims { b, h, t_q, d_v, .. } = case.dims;
    let factors = Factors::<E> { output: numbers(b * h * t_q * d_v, 7), lse: numbers(b * h * t_q, 8) };
    let expected = central_differences(case, &factors);
    for &instruction_set in instruction_sets {
        let differences = differences(case, instruction_set, &factors, &expected);
        let name = format!("{instruction_set}, {:?}, everything {}", case.dims, case.everything);
        assert!(differences.iter().all(|difference| *difference < most), "{name}: {differences:?}");
    }
}

#[test]
fn backward_with_causal_softcap_alibi_sinks_dropout_matches_central_differences() {
    // The last one has several blocks of keys and tiles of queries.
    let shapes =
        [dims(2, 9, 3, 2, 3), dims(2, 1, 3, 3, 2), dims(1, 3, 2, 8, 1), dims(2, 11, 13, 9, 4), dims(2, 50, 270, 17, 5)];
    let (instruction_sets, shapes) = match cfg!(miri) {
        true => (vec![InstructionSet::Scalar], &shapes[..1]),
        false => (InstructionSet::available(), &shapes[..]),
    };
    for &dims in shapes {
        for (causal, everything) in [(false, false), (true, false), (true, true)] {
            let case = Case::new(dims, causal, everything);
            let case = if causal { case.with_dropout(77 << 33) } else { case };
            check::<f32>(&case, &instruction_sets, 5e-5);
            check::<bf16>(&case, &instruction_sets, 2e-2);
            check::<f16>(&case, &instruction_sets, 3e-3);
        }
    }
}
