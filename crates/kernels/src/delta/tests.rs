//! The kernel alone, without tensors, against plain loops: small enough for Miri. `tests/attention/delta` compares
//! every instruction set with the oracle.

mod limits;

use std::ops::Range;

use super::{
    DeltaBackwardProblem, DeltaDecay, DeltaDims, DeltaGradients, DeltaProblem, gated_delta_rule,
    gated_delta_rule_backward,
};
use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use crate::number::Strided;

/// A call whose numbers are contiguous.
#[derive(Clone)]
struct Case {
    dims: DeltaDims,
    sequences: Vec<Range<usize>>,
    inputs: Inputs<f32>,
    has_channels: bool,
    has_beta: bool,
    qk_norm: Option<f32>,
}

/// The numbers of each input, or of the gradients of each.
#[derive(Clone)]
struct Inputs<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    decay: Vec<T>,
    beta: Vec<T>,
    states: Vec<T>,
}

impl<T> Inputs<T> {
    fn all(&self) -> [&Vec<T>; 6] {
        [&self.q, &self.k, &self.v, &self.decay, &self.beta, &self.states]
    }
}

/// The results of a call in plain loops.
struct Results {
    /// (B, T, H, D_v).
    output: Vec<f64>,
    /// (N, H, D_k, D_v).
    states: Vec<f64>,
}

const SCALE: f32 = 0.75;

impl Case {
    fn new(dims: DeltaDims, sequences: Vec<Range<usize>>, has_channels: bool, has_beta: bool) -> Self {
        let DeltaDims { b, t, h, h_q, h_k, h_v, d_k, d_v } = dims;
        let tokens = b * t;
        let decays = tokens * h * if has_channels { d_k } else { 1 };
        let decay = numbers::<f32>(decays, 4).into_iter().enumerate().map(|(n, x)| match n % 11 {
            3 => f32::NEG_INFINITY,
            5 => 0.0,
            _ => x - 1.0,
        });
        let inputs = Inputs {
            q: numbers(tokens * h_q * d_k, 1),
            k: numbers(tokens * h_k * d_k, 2),
            v: numbers(tokens * h_v * d_v, 3),
            decay: decay.collect(),
            beta: numbers::<f32>(tokens * h, 5).iter().map(|x| x + 1.0).collect(),
            states: numbers(sequences.len() * h * d_k * d_v, 6),
        };
        let qk_norm = (d_k % 2 == 0).then_some(1e-3);
        Self { dims, sequences, inputs, has_channels, has_beta, qk_norm }
    }

    fn problem(&self) -> DeltaProblem<'_, f32> {
        let DeltaDims { t, h, h_q, h_k, h_v, d_k, d_v, .. } = self.dims;
        let Inputs { q, k, v, decay, beta, states } = &self.inputs;
        let rows = |data, heads: usize, width: usize| Strided { data, strides: [heads * t * width, t * width, width] };
        DeltaProblem {
            dims: self.dims,
            q: rows(q, h_q, d_k),
            k: rows(k, h_k, d_k),
            v: rows(v, h_v, d_v),
            decay: Some(if self.has_channels {
                DeltaDecay::Channels(rows(decay, h, d_k))
            } else {
                DeltaDecay::Heads(rows(decay, h, 1))
            }),
            beta: self.has_beta.then(|| rows(beta, h, 1)),
            states: Some(states),
            sequences: &self.sequences,
            scale: SCALE,
            qk_norm: self.qk_norm,
        }
    }

    /// Returns numbers (B, T, H, D_v) as rows of (B, H, T).
    fn output_rows<'a>(&self, data: &'a [f32]) -> Strided<'a, f32, 3> {
        let DeltaDims { t, h, d_v, .. } = self.dims;
        Strided { data, strides: [t * h * d_v, d_v, h * d_v] }
    }

    /// Returns a zero for each number of the inputs.
    fn no_moves(&self) -> Inputs<f64> {
        let zeros = |input: &[f32]| vec![0.0; input.len()];
        let Inputs { q, k, v, decay, beta, states } = &self.inputs;
        Inputs { q: zeros(q), k: zeros(k), v: zeros(v), decay: zeros(decay), beta: zeros(beta), states: zeros(states) }
    }

    /// Computes one token after the other, with the inputs moved by `by` times `moves`.
    fn recur(&self, moves: &Inputs<f64>, by: f64) -> Results {
        let DeltaDims { b, t, h, h_q, h_k, h_v, d_k, d_v } = self.dims;
        let moved = |input: &[f32], steps: &[f64]| -> Vec<f64> {
            input.iter().zip(steps).map(|(&x, step)| f64::from(x) + step * by).collect()
        };
        let q = moved(&self.inputs.q, &moves.q);
        let k = moved(&self.inputs.k, &moves.k);
        let v = moved(&self.inputs.v, &moves.v);
        let decay = moved(&self.inputs.decay, &moves.decay);
        let beta = moved(&self.inputs.beta, &moves.beta);
        let mut states = moved(&self.inputs.states, &moves.states);
        let normed = |row: &[f64]| {
            let sum: f64 = row.iter().map(|x| x * x).sum();
            let factor = self.qk_norm.map_or(1.0, |eps| 1.0 / (sum + f64::from(eps)).sqrt());
            row.iter().map(|x| x * factor).collect::<Vec<_>>()
        };
        let mut output = vec![0.0; b * t * h * d_v];
        for (n, range) in self.sequences.iter().enumerate() {
            for (head, token) in (0..h).flat_map(|head| range.clone().map(move |token| (head, token))) {
                let row = |heads: usize| (token / t * heads + head * heads / h) * t + token % t;
                let query = normed(&q[row(h_q) * d_k..][..d_k]);
                let key = normed(&k[row(h_k) * d_k..][..d_k]);
                let state = &mut states[(n * h + head) * d_k * d_v..][..d_k * d_v];
                for (d, x) in state.iter_mut().enumerate() {
                    let at = if self.has_channels { row(h) * d_k + d / d_v } else { row(h) };
                    *x *= decay[at].exp();
                }
                for column in 0..d_v {
                    let read = |matrix: &[f64], vector: &[f64]| -> f64 {
                        vector.iter().enumerate().map(|(d, x)| x * matrix[d * d_v + column]).sum()
                    };
                    let mut update = v[row(h_v) * d_v + column];
                    if self.has_beta {
                        update = (update - read(state, &key)) * beta[row(h)];
                    }
                    for (d, x) in key.iter().enumerate() {
                        state[d * d_v + column] += x * update;
                    }
                    output[(token * h + head) * d_v + column] = read(state, &query) * f64::from(SCALE);
                }
            }
        }
        Results { output, states }
    }

    /// Computes the gradients of a loss, with the gradients of heads that share rows added up.
    fn gradients(&self, instruction_set: InstructionSet, output_grad: &[f32], states_grad: &[f32]) -> Inputs<f64> {
        let DeltaDims { b, t, h, h_q, h_k, h_v, d_k, d_v } = self.dims;
        let forward = self.problem();
        let results = gated_delta_rule(&forward, instruction_set, true).expect("a small call");
        let problem = DeltaBackwardProblem {
            forward,
            saved: &results.saved.expect("the call saves"),
            output_grad: self.output_rows(output_grad),
            states_grad: Some(states_grad),
        };
        let gradients = gated_delta_rule_backward(&problem, instruction_set).expect("a small call");
        let summed = |gradient: &[f32], heads: usize, width: usize| {
            let mut sums = vec![0f64; b * heads * t * width];
            for (n, x) in gradient.iter().enumerate() {
                let row = n / width;
                let d = n % width;
                let entry = row / t / h;
                let head = row / t % h * heads / h;
                let token = row % t;
                sums[((entry * heads + head) * t + token) * width + d] += f64::from(*x);
            }
            sums
        };
        Inputs {
            q: summed(&gradients.q, h_q, d_k),
            k: summed(&gradients.k, h_k, d_k),
            v: summed(&gradients.v, h_v, d_v),
            decay: wide(&gradients.decay),
            beta: wide(&gradients.beta),
            states: wide(&gradients.states),
        }
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let dims = |b, t, heads: [usize; 4], d_k, d_v| {
        let [h, h_q, h_k, h_v] = heads;
        DeltaDims { b, t, h, h_q, h_k, h_v, d_k, d_v }
    };
    let shapes = [
        (dims(1, 1, [2, 1, 1, 2], 4, 9), vec![0..1]),
        (dims(2, 3, [2, 2, 1, 2], 5, 8), vec![0..3, 3..6]),
        (dims(1, 70, [1; 4], 6, 33), vec![0..1, 1..1, 1..66, 66..70]),
        (dims(2, 17, [4, 4, 2, 1], 3, 3), vec![0..17, 17..34]),
        (dims(1, 1, [1; 4], 20, 128), vec![0..1]),
    ];
    let kinds = [(false, true), (true, true), (false, false), (true, false)];
    shapes.into_iter().flat_map(move |(shape, sequences)| {
        kinds.map(|(has_channels, has_beta)| Case::new(shape, sequences.clone(), has_channels, has_beta))
    })
}

fn assert_near(found: &[f32], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0f64, |largest, x| largest.max(x.abs()));
    for (n, (&x, &y)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(x) - y).abs();
        assert!(error <= 2e-5 * largest, "{what}, {n}: {x}, expected {y}");
    }
}

/// Returns the sum of the products of two vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn gated_delta_rule_with_each_decay_and_beta_matches_plain_loops() {
    for (n, case) in cases().enumerate() {
        let expected = case.recur(&case.no_moves(), 0.0);
        for instruction_set in InstructionSet::available() {
            let found = gated_delta_rule(&case.problem(), instruction_set, false).expect("a small call");
            let what = format!("case {n}: {:?}, {instruction_set}", case.dims);
            assert_near(&found.output, &expected.output, &format!("output of {what}"));
            assert_near(&found.states, &expected.states, &format!("states of {what}"));
        }
    }
}

#[test]
fn gated_delta_rule_gradients_match_differences_of_plain_loops() {
    for (n, case) in cases().enumerate() {
        let DeltaDims { b, t, h, d_v, .. } = case.dims;
        // The loss is the sum of the results with these weights.
        let output_weights = numbers(b * t * h * d_v, 7);
        let states_weights = numbers(case.inputs.states.len(), 8);
        let loss = |moves: &Inputs<f64>, by: f64| -> f64 {
            let results = case.recur(moves, by);
            dot(&results.output, &wide(&output_weights)) + dot(&results.states, &wide(&states_weights))
        };
        for instruction_set in InstructionSet::available() {
            let gradients = case.gradients(instruction_set, &output_weights, &states_weights);
            let check = |input: &str, moves: &Inputs<f64>| {
                let step = 1e-4;
                let expected = (loss(moves, step) - loss(moves, -step)) / (2.0 * step);
                let found: f64 = gradients.all().into_iter().zip(moves.all()).map(|(x, y)| dot(x, y)).sum();
                let what = format!("case {n}: {:?}, {instruction_set}, {input}", case.dims);
                assert!((found - expected).abs() < 1e-4 * expected.abs().max(10.0), "{what}: {found}, not {expected}");
            };
            let moves = |input: &[f32]| wide(&numbers(input.len(), 9));
            check("q", &Inputs { q: moves(&case.inputs.q), ..case.no_moves() });
            check("k", &Inputs { k: moves(&case.inputs.k), ..case.no_moves() });
            check("v", &Inputs { v: moves(&case.inputs.v), ..case.no_moves() });
            check("decay", &Inputs { decay: moves(&case.inputs.decay), ..case.no_moves() });
            check("states", &Inputs { states: moves(&case.inputs.states), ..case.no_moves() });
            if case.has_beta {
                check("beta", &Inputs { beta: moves(&case.inputs.beta), ..case.no_moves() });
            }
        }
    }
}

#[test]
fn gated_delta_rule_on_more_threads_has_same_bits() {
    // Few states whose columns are divided, and many whose heads are computed together.
    let dims = |h, t| DeltaDims { b: 1, t, h, h_q: 1, h_k: h, h_v: h, d_k: 64, d_v: 96 };
    for (h, t) in [(1, 300), (16, 130), (16, 1)] {
        // Miri takes minutes for more.
        let tokens = if cfg!(miri) { t.min(3) } else { t };
        let case = Case::new(dims(h, tokens), vec![0..tokens], h > 1, true);
        let with_threads = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a small pool");
            pool.install(|| {
                let forward = case.problem();
                let instruction_set = InstructionSet::choose(None, false).expect("there is an instruction set");
                let results = gated_delta_rule(&forward, instruction_set, true).expect("a small call");
                let problem = DeltaBackwardProblem {
                    forward,
                    saved: &results.saved.expect("the call saves"),
                    output_grad: case.output_rows(&results.output),
                    states_grad: None,
                };
                let gradients = gated_delta_rule_backward(&problem, instruction_set).expect("a small call");
                let numbers = [results.output, results.states, gradients.q, gradients.k, gradients.decay];
                numbers.map(|numbers| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            })
        };
        assert_eq!(with_threads(1), with_threads(5), "{h} heads, {tokens} tokens");
    }
}

#[test]
fn gated_delta_rule_with_infinite_key_changes_only_its_head() {
    // Two heads on one thread, whose scratch buffers they share; a row of values ends within a vector.
    let dims = DeltaDims { b: 1, t: 20, h: 2, h_q: 2, h_k: 2, h_v: 2, d_k: 8, d_v: 9 };
    let case = Case::new(dims, vec![0..20], true, true);
    let mut infinite = case.clone();
    infinite.inputs.k[3] = f32::INFINITY;
    let output_grad = numbers(20 * 2 * 9, 7);
    let second_head = |one: &Case, instruction_set: InstructionSet| {
        let forward = one.problem();
        let results = gated_delta_rule(&forward, instruction_set, true).expect("a small call");
        let problem = DeltaBackwardProblem {
            forward,
            saved: &results.saved.expect("the call saves"),
            output_grad: one.output_rows(&output_grad),
            states_grad: Some(&one.inputs.states),
        };
        let gradients = gated_delta_rule_backward(&problem, instruction_set).expect("a small call");
        let DeltaGradients { q, k, v, decay, beta, states } = gradients;
        [results.states, q, k, v, decay, beta, states].map(|mut all| all.split_off(all.len() / 2))
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a small pool");
    for instruction_set in InstructionSet::available() {
        let found = pool.install(|| second_head(&infinite, instruction_set));
        assert_eq!(found, pool.install(|| second_head(&case, instruction_set)), "{instruction_set}");
    }
}
