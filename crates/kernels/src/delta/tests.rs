//! The kernel alone, without tensors, beside plain loops: small enough for Miri. `tests/attention/delta` holds every
//! instruction set to the oracle.

use std::ops::Range;

use super::{BackwardProblem, Decay, Dims, Gradients, Problem, gated_delta_rule, gated_delta_rule_backward};
use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use crate::number::Strided;

/// A call, whose numbers are contiguous.
#[derive(Clone)]
struct Case {
    dims: Dims,
    sequences: Vec<Range<usize>>,
    /// q, k, v, decay, beta and states.
    inputs: [Vec<f32>; 6],
    has_channels: bool,
    has_beta: bool,
    qk_norm: Option<f32>,
}

const SCALE: f32 = 0.75;

impl Case {
    fn new(dims: Dims, sequences: Vec<Range<usize>>, has_channels: bool, has_beta: bool) -> Self {
        let Dims { b, t, h, h_q, h_k, h_v, d_k, d_v } = dims;
        let tokens = b * t;
        let decays = tokens * h * if has_channels { d_k } else { 1 };
        let decay = numbers::<f32>(decays, 4).into_iter().enumerate().map(|(n, x)| match n % 11 {
            3 => f32::NEG_INFINITY,
            5 => 0.0,
            _ => x - 1.0,
        });
        let inputs = [
            numbers(tokens * h_q * d_k, 1),
            numbers(tokens * h_k * d_k, 2),
            numbers(tokens * h_v * d_v, 3),
            decay.collect(),
            numbers::<f32>(tokens * h, 5).iter().map(|x| x + 1.0).collect(),
            numbers(sequences.len() * h * d_k * d_v, 6),
        ];
        let qk_norm = (d_k % 2 == 0).then_some(1e-3);
        Self { dims, sequences, inputs, has_channels, has_beta, qk_norm }
    }

    fn problem(&self) -> Problem<'_, f32> {
        let Dims { t, h, h_q, h_k, h_v, d_k, d_v, .. } = self.dims;
        let [q, k, v, decay, beta, states] = &self.inputs;
        let rows = |data, h: usize, width: usize| Strided { data, strides: [h * t * width, t * width, width] };
        Problem {
            dims: self.dims,
            q: rows(q, h_q, d_k),
            k: rows(k, h_k, d_k),
            v: rows(v, h_v, d_v),
            decay: Some(match self.has_channels {
                true => Decay::Channels(rows(decay, h, d_k)),
                false => Decay::Heads(rows(decay, h, 1)),
            }),
            beta: self.has_beta.then(|| rows(beta, h, 1)),
            states: Some(states),
            sequences: &self.sequences,
            scale: SCALE,
            qk_norm: self.qk_norm,
            executor: None,
        }
    }

    /// The context (B, T, H, D_v) and the states, one token after the other, with the inputs moved so far.
    fn oracle(&self, moved: &[Vec<f64>; 6], by: f64) -> [Vec<f64>; 2] {
        let Dims { b, t, h, h_q, h_k, h_v, d_k, d_v } = self.dims;
        let wide = |n: usize| {
            let inputs = self.inputs[n].iter().zip(&moved[n]);
            inputs.map(|(&x, moved)| f64::from(x) + moved * by).collect::<Vec<_>>()
        };
        let [q, k, v, decay, beta, mut states] = [0, 1, 2, 3, 4, 5].map(wide);
        let normed = |row: &[f64]| {
            let sum: f64 = row.iter().map(|x| x * x).sum();
            let factor = self.qk_norm.map_or(1.0, |eps| 1.0 / (sum + f64::from(eps)).sqrt());
            row.iter().map(|x| x * factor).collect::<Vec<_>>()
        };
        let mut context = vec![0.0; b * t * h * d_v];
        for (n, range) in self.sequences.iter().enumerate() {
            for (head, token) in (0..h).flat_map(|head| range.clone().map(move |token| (head, token))) {
                let row = |heads: usize| (token / t * heads + head * heads / h) * t + token % t;
                let (q, k) = (normed(&q[row(h_q) * d_k..][..d_k]), normed(&k[row(h_k) * d_k..][..d_k]));
                let state = &mut states[(n * h + head) * d_k * d_v..][..d_k * d_v];
                for (d, x) in state.iter_mut().enumerate() {
                    let at = if self.has_channels { row(h) * d_k + d / d_v } else { row(h) };
                    *x *= decay[at].exp();
                }
                for column in 0..d_v {
                    let read = |state: &[f64], row: &[f64]| -> f64 {
                        row.iter().enumerate().map(|(d, x)| x * state[d * d_v + column]).sum()
                    };
                    let mut update = v[row(h_v) * d_v + column];
                    if self.has_beta {
                        update = (update - read(state, &k)) * beta[row(h)];
                    }
                    for (d, x) in k.iter().enumerate() {
                        state[d * d_v + column] += x * update;
                    }
                    context[(token * h + head) * d_v + column] = read(state, &q) * f64::from(SCALE);
                }
            }
        }
        [context, states]
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let dims = |b, t, heads: [usize; 4], d_k, d_v| {
        let [h, h_q, h_k, h_v] = heads;
        Dims { b, t, h, h_q, h_k, h_v, d_k, d_v }
    };
    let shapes = [
        (dims(1, 1, [2, 1, 1, 2], 4, 9), vec![0..1]),
        (dims(2, 3, [2, 2, 1, 2], 5, 8), vec![0..3, 3..6]),
        (dims(1, 70, [1; 4], 6, 33), vec![0..1, 1..1, 1..66, 66..70]),
        (dims(2, 17, [4, 4, 2, 1], 3, 3), vec![0..17, 17..34]),
        (dims(1, 1, [1; 4], 20, 128), vec![0..1]),
    ];
    let kinds = [(false, true), (true, true), (false, false), (true, false)];
    shapes.into_iter().flat_map(move |(dims, sequences)| {
        kinds.map(|(has_channels, has_beta)| Case::new(dims, sequences.clone(), has_channels, has_beta))
    })
}

fn assert_near(found: &[f32], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0f64, |largest, x| largest.max(x.abs()));
    for (n, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= 2e-5 * largest, "{what}, {n}: {found}, expected {expected}");
    }
}

#[test]
fn every_rule_equals_plain_loops() {
    for (n, case) in cases().enumerate() {
        let [context, states] = case.oracle(&case.inputs.clone().map(|input| vec![0.0; input.len()]), 0.0);
        for instruction_set in InstructionSet::available() {
            let output = gated_delta_rule(&case.problem(), instruction_set, false).expect("a small call");
            let what = format!("case {n}: {:?}, {instruction_set}", case.dims);
            assert_near(&output.context, &context, &format!("context of {what}"));
            assert_near(&output.states, &states, &format!("states of {what}"));
        }
    }
}

/// The sum of the products of two vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn gradients_are_the_differences_of_plain_loops() {
    for (n, case) in cases().enumerate() {
        let Dims { b, t, h, h_q, h_k, h_v, d_k, d_v } = case.dims;
        // The loss is a sum of the results with these weights.
        let weights = [numbers(b * t * h * d_v, 7), numbers(case.inputs[5].len(), 8)];
        let loss = |moved: &[Vec<f64>; 6], by: f64| -> f64 {
            let results = case.oracle(moved, by);
            results.iter().zip(&weights).map(|(result, weights)| dot(result, &wide(weights))).sum()
        };
        for instruction_set in InstructionSet::available() {
            let forward = case.problem();
            let saved =
                gated_delta_rule(&forward, instruction_set, true).expect("a small call").saved.expect("as wanted");
            let context_grad = Strided { data: &weights[0], strides: [t * h * d_v, d_v, h * d_v] };
            let problem = BackwardProblem { forward, saved: &saved, context_grad, states_grad: Some(&weights[1]) };
            let gradients = gated_delta_rule_backward(&problem, instruction_set).expect("a small call");
            // Heads that share rows add up.
            let summed = |gradient: &[f32], heads: usize, width: usize| {
                let mut sums = vec![0f64; b * heads * t * width];
                for (n, x) in gradient.iter().enumerate() {
                    let (row, d) = (n / width, n % width);
                    let [entry, head, token] = [row / t / h, row / t % h * heads / h, row % t];
                    sums[((entry * heads + head) * t + token) * width + d] += f64::from(*x);
                }
                sums
            };
            let found = [
                summed(&gradients.q, h_q, d_k),
                summed(&gradients.k, h_k, d_k),
                summed(&gradients.v, h_v, d_v),
                wide(&gradients.decay),
                wide(&gradients.beta),
                wide(&gradients.states),
            ];
            for input in 0..if case.has_beta { 6 } else { 4 } {
                let mut moved = case.inputs.clone().map(|input| vec![0.0; input.len()]);
                moved[input] = wide(&numbers(case.inputs[input].len(), 9));
                let step = 1e-4;
                let expected = (loss(&moved, step) - loss(&moved, -step)) / (2.0 * step);
                let found = dot(&found[input], &moved[input]);
                let what = format!("case {n}: {:?}, {instruction_set}, input {input}", case.dims);
                assert!((found - expected).abs() < 1e-4 * expected.abs().max(10.0), "{what}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    // Few states whose columns are split, and many whose heads are taken together.
    let dims = |h, t| Dims { b: 1, t, h, h_q: 1, h_k: h, h_v: h, d_k: 64, d_v: 96 };
    for (h, t) in [(1, 300), (16, 130), (16, 1)] {
        // Miri takes minutes for more.
        let t = if cfg!(miri) { t.min(3) } else { t };
        let case = Case::new(dims(h, t), vec![0..t], h > 1, true);
        let with_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a small pool");
            pool.install(|| {
                let (forward, instruction_set) =
                    (case.problem(), InstructionSet::choose(None, false).expect("there is an instruction set"));
                let output = gated_delta_rule(&forward, instruction_set, true).expect("a small call");
                let saved = output.saved.expect("as wanted");
                let context_grad = Strided { data: &output.context, strides: [0, 96, h * 96] };
                let problem = BackwardProblem { forward, saved: &saved, context_grad, states_grad: None };
                let gradients = gated_delta_rule_backward(&problem, instruction_set).expect("a small call");
                let numbers = [output.context.clone(), output.states, gradients.q, gradients.k, gradients.decay];
                numbers.map(|numbers| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            })
        };
        assert_eq!(with_threads(1), with_threads(5), "{h} heads, {t} tokens");
    }
}

#[test]
fn what_is_no_number_stays_in_its_head() {
    // Two heads on one thread, whose workspace they share; a row of values ends within a vector.
    let dims = Dims { b: 1, t: 20, h: 2, h_q: 2, h_k: 2, h_v: 2, d_k: 8, d_v: 9 };
    let case = Case::new(dims, vec![0..20], true, true);
    let mut infinite = case.clone();
    infinite.inputs[1][3] = f32::INFINITY;
    let upstream = numbers(20 * 2 * 9, 7);
    let second_head = |case: &Case, instruction_set: InstructionSet| {
        let forward = case.problem();
        let output = gated_delta_rule(&forward, instruction_set, true).expect("a small call");
        let saved = output.saved.expect("as wanted");
        let context_grad = Strided { data: &upstream, strides: [0, 9, 18] };
        let problem = BackwardProblem { forward, saved: &saved, context_grad, states_grad: Some(&case.inputs[5]) };
        let gradients = gated_delta_rule_backward(&problem, instruction_set).expect("a small call");
        let Gradients { q, k, v, decay, beta, states } = gradients;
        [output.states, q, k, v, decay, beta, states].map(|mut all| all.split_off(all.len() / 2))
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a small pool");
    for instruction_set in InstructionSet::available() {
        pool.install(|| {
            assert_eq!(
                second_head(&infinite, instruction_set),
                second_head(&case, instruction_set),
                "{instruction_set}"
            )
        });
    }
}

/// Dimensions of which none is in memory multiply to more than a number holds: such calls are computed, or errors.
#[test]
fn dimensions_of_any_size_are_computed_or_errors() {
    let data = [0.5f32; 4];
    let counts: &[usize] = if cfg!(miri) { &[0, usize::MAX] } else { &[0, 1, 2, usize::MAX / 4, usize::MAX] };
    let count = |case: usize, n: u32| counts[case / counts.len().pow(n) % counts.len()];
    let (mut computed, mut refused) = (0, 0);
    for case in 0..counts.len().pow(5) {
        let [b, t, h, d_k, d_v] = std::array::from_fn(|n| count(case, n as u32));
        let rows = Strided { data: &data[..], strides: [0; 3] };
        let tokens = b.saturating_mul(t);
        // A call with more tokens than fit in memory, in a row that repeats, would take forever.
        let all = if tokens <= 4 { tokens } else { 1 };
        let (whole, entries) = ([0..all], [0..t.min(4), t.min(4)..all.max(t.min(4))]);
        for sequences in [&[][..], &whole, &entries] {
            let forward = Problem {
                dims: Dims { b, t, h, h_q: h, h_k: h, h_v: h, d_k, d_v },
                q: rows,
                k: rows,
                v: rows,
                decay: (case % 2 == 0).then_some(Decay::Channels(rows)),
                beta: Some(rows),
                states: None,
                sequences,
                scale: 1.0,
                qk_norm: None,
                executor: None,
            };
            let Ok(output) = gated_delta_rule(&forward, InstructionSet::Scalar, true) else {
                refused += 1;
                continue;
            };
            let saved = output.saved.expect("as wanted");
            let problem = BackwardProblem { forward, saved: &saved, context_grad: rows, states_grad: None };
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
