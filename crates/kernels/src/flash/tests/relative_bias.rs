//! Relative biases against the same numbers as a bias (B, H, T_q, T_kv), and against plain loops.

use super::*;
use crate::flash::{
    AttentionBackwardProblem, AttentionGradients, RelativeBias, RequestedGradients, RequestedStatistics, SoftmaxStats,
    attend_backward, attend_with_statistics,
};

/// The positions of the queries of a sequence relative to its keys.
#[derive(Clone, Copy)]
enum Origins {
    /// Each diagonal of the scores has an entry.
    Diagonals,
    /// The first and the second half of the queries are sequences whose keys begin one further on than they do, so that
    /// some pairs have no entry.
    Packed,
    /// In no order, some far outside.
    Scattered,
}

struct Biases {
    len: usize,
    of_sequence: usize,
    data: Vec<f32>,
    origins: Vec<i64>,
}

impl Biases {
    fn new(dims: &AttentionDims, origins: Origins, is_shared: bool) -> Self {
        let len = dims.t_q + dims.t_kv - 1;
        let origin = |row: usize| {
            let query = row % dims.t_q;
            let diagonal = (dims.t_q - 1 - query) as i64;
            match origins {
                Origins::Diagonals => diagonal + (row / dims.t_q) as i64,
                Origins::Packed => diagonal - i64::from(query >= dims.t_q / 2),
                Origins::Scattered => [diagonal, -3, i64::MAX, i64::MIN, 2][query * 7 % 5],
            }
        };
        let of_sequence = if is_shared { 0 } else { dims.h * len };
        let data = numbers((if is_shared { 1 } else { dims.b }) * dims.h * len, 9);
        Self { len, of_sequence, data, origins: (0..dims.b * dims.t_q).map(origin).collect() }
    }

    fn bias(&self) -> RelativeBias<'_> {
        let rows = Strided { data: &self.data[..], strides: [self.of_sequence, self.len] };
        RelativeBias { rows, len: self.len, origins: &self.origins }
    }

    /// Removes the keys without an entry from the ranges.
    fn narrow(&self, ranges: &mut [Range<usize>], t_kv: usize) {
        for (range, &origin) in ranges.iter_mut().zip(&self.origins) {
            let key_of = |entry: usize| (entry as i128 - i128::from(origin)).clamp(0, t_kv as i128) as usize;
            *range = range.start.max(key_of(0))..range.end.min(key_of(self.len));
        }
    }

    /// Returns the entry of each score, if it has one.
    fn entries(&self, dims: &AttentionDims) -> Vec<Option<usize>> {
        let AttentionDims { b, h, t_q, t_kv, .. } = *dims;
        let entry = |at: usize| {
            let sequence = at / (h * t_q * t_kv);
            let head = at / (t_q * t_kv) % h;
            let entry = i128::from(self.origins[sequence * t_q + at / t_kv % t_q]) + (at % t_kv) as i128;
            let first = sequence * self.of_sequence + head * self.len;
            (0..self.len as i128).contains(&entry).then(|| first + entry as usize)
        };
        (0..b * h * t_q * t_kv).map(entry).collect()
    }
}

fn gradients<E: Element>(
    forward: &AttentionProblem<E>,
    instruction_set: InstructionSet,
    requested: RequestedGradients,
) -> (Vec<E>, AttentionGradients<E>) {
    let AttentionDims { b, h, t_q, d_v, .. } = forward.dims;
    let mut stats = Vec::<SoftmaxStats>::new();
    let output = attend_vec(forward, instruction_set, None, Some(&mut stats)).expect("a few rows");
    let factors: Vec<E> = numbers(b * h * t_q * d_v, 20);
    let output_grad = Strided { data: &factors[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
    let problem =
        AttentionBackwardProblem { forward: *forward, output: &output, stats: &stats, output_grad, lse_grad: None };
    let gradients = attend_backward(&problem, instruction_set, requested).expect("a few rows");
    (output, gradients)
}

/// Checks that the results are the same to the bit as with a bias (B, H, T_q, T_kv), and that the gradient of an entry
/// is the sum of the gradients of its scores.
fn check_against_dense_bias<E: Element + Into<f32> + PartialEq + std::fmt::Debug>(
    dims: AttentionDims,
    causal: bool,
    biases: &Biases,
) {
    let mut case = Case::new(dims, causal, false);
    biases.narrow(&mut case.ranges, dims.t_kv);
    let data = case.data::<E>();
    let entries = biases.entries(&dims);
    let dense: Vec<f32> = entries.iter().map(|entry| entry.map_or(0.0, |entry| biases.data[entry])).collect();
    let mut by_distance = case.problem(&data);
    by_distance.scores.relative_bias = Some(biases.bias());
    let mut by_pair = case.problem(&data);
    let strides = [dims.h * dims.t_q * dims.t_kv, dims.t_q * dims.t_kv, dims.t_kv, 1];
    by_pair.scores.bias = Some(Strided { data: &dense, strides });
    let operands = RequestedGradients { q: true, k: true, v: true, ..Default::default() };
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        let (output, found) =
            gradients(&by_distance, instruction_set, RequestedGradients { relative_bias: true, ..operands });
        let full = Some([dims.b, dims.h, dims.t_q, dims.t_kv]);
        let (expected_output, expected) =
            gradients(&by_pair, instruction_set, RequestedGradients { bias: full, ..operands });
        assert_eq!(output, expected_output, "{instruction_set}, {dims:?}");
        assert_eq!((found.q, found.k, found.v), (expected.q, expected.k, expected.v), "{instruction_set}, {dims:?}");
        let mut sums = vec![0f64; biases.data.len()];
        for (entry, gradient) in entries.iter().zip(expected.bias.expect("requested")) {
            if let Some(entry) = entry {
                sums[*entry] += f64::from(gradient);
            }
        }
        for (n, (x, sum)) in found.relative_bias.expect("requested").into_iter().zip(sums).enumerate() {
            assert!((f64::from(x) - sum).abs() < 1e-5, "{instruction_set}, {dims:?}, {n}: {x}, expected {sum}");
        }
    }
}

#[test]
fn relative_bias_matches_dense_bias() {
    let of = |h: usize, h_kv: usize, t_q: usize, t_kv: usize| AttentionDims { b: 2, h, h_kv, t_q, t_kv, d: 5, d_v: 7 };
    let few = [of(2, 1, 3, 9), of(3, 3, 1, 6)];
    let many = [of(2, 2, 40, 150), of(6, 2, 37, 20), of(2, 1, 70, 70)];
    for dims in few.into_iter().chain(many.into_iter().take(if cfg!(miri) { 0 } else { 3 })) {
        for origins in [Origins::Diagonals, Origins::Packed, Origins::Scattered] {
            for is_shared in [true, false] {
                let biases = Biases::new(&dims, origins, is_shared);
                check_against_dense_bias::<f32>(dims, true, &biases);
                check_against_dense_bias::<bf16>(dims, false, &biases);
            }
        }
    }
}

#[test]
fn relative_bias_outside_of_its_slice_is_refused() {
    let case = Case::new(AttentionDims { b: 1, h: 2, h_kv: 2, t_q: 3, t_kv: 4, d: 2, d_v: 2 }, false, false);
    let data = case.data::<f32>();
    let biases = Biases::new(&case.dims, Origins::Diagonals, true);
    let error = |bias: RelativeBias| {
        let mut problem = case.problem(&data);
        problem.scores.relative_bias = Some(bias);
        attend_vec(&problem, InstructionSet::Scalar, None, None).expect_err("too short").to_string()
    };
    let rows = biases.bias().rows;
    let short = Strided { data: &biases.data[1..], ..rows };
    assert!(error(RelativeBias { rows: short, ..biases.bias() }).contains("relative bias of [1, 2] entries"));
    assert!(error(RelativeBias { origins: &[0; 2], ..biases.bias() }).contains("origins"));
    assert_eq!(
        error(RelativeBias { origins: &[2, 1, 3], ..biases.bias() }),
        "query 2 of sequence 0 (origin 3, keys 0..4) reads entries 3..7 of the relative bias, expected entries within 0..6"
    );
    assert_eq!(
        error(RelativeBias { origins: &[2, -1, 0], ..biases.bias() }),
        "query 1 of sequence 0 (origin -1, keys 0..4) reads entries -1..3 of the relative bias, expected entries within 0..6"
    );
    assert!(
        error(RelativeBias { rows: Strided { data: &[], ..rows }, len: 0, ..biases.bias() }).contains("within 0..0")
    );
}

#[test]
fn relative_bias_without_entries_is_accepted_by_fully_masked_queries() {
    for (t_q, data) in [(1, &[][..]), (40, &[1.0; 3])] {
        let dims = AttentionDims { b: 2, h: 4, h_kv: 2, t_q, t_kv: 5, d: 2, d_v: 2 };
        let case = Case { ranges: vec![3..3; 2 * t_q], ..Case::new(dims, false, false) };
        let tensors = case.data::<f32>();
        let mut problem = case.problem(&tensors);
        let origins = vec![i64::MIN; 2 * t_q];
        let rows = Strided { data, strides: [usize::MAX, 7] };
        problem.scores.relative_bias = Some(RelativeBias { rows, len: 0, origins: &origins });
        for instruction_set in InstructionSet::available() {
            let (output, found) = gradients(
                &problem,
                instruction_set,
                RequestedGradients { q: true, relative_bias: true, ..Default::default() },
            );
            assert!(output.iter().all(|&x| x == 0.0), "{instruction_set}");
            assert_eq!(found.relative_bias, Some(Vec::new()), "{instruction_set}");
        }
    }
}

#[test]
fn relative_bias_of_distant_keys_matches_near_keys() {
    // One key, repeated more often than memory has bytes, and enough queries that the keys are not split over tasks.
    let (t_q, t_kv, one) = (150, usize::MAX / 4, [0.5f32]);
    let len = t_q + 2;
    let biases: Vec<f32> = numbers(2 * len, 3);
    let q: Vec<f32> = numbers(2 * t_q, 4);
    let lse_of = |first: usize| {
        let repeated = Strided { data: &one[..], strides: [0; 3] };
        let origins: Vec<_> = (0..t_q).rev().map(|diagonal| diagonal as i64 - first as i64).collect();
        let rows = Strided { data: &biases[..], strides: [0, len] };
        let problem = AttentionProblem {
            dims: AttentionDims { b: 1, h: 2, h_kv: 1, t_q, t_kv, d: 1, d_v: 1 },
            q: Strided { data: &q, strides: [0, t_q, 1] },
            k: repeated.into(),
            v: repeated.into(),
            ranges: &vec![first..first + 3; t_q],
            scores: ScoreOptions {
                relative_bias: Some(RelativeBias { rows, len, origins: &origins }),
                ..Default::default()
            },
            output_layout: OutputLayout::Bhtd,
        };
        let mut lse = Vec::new();
        attend_vec(&problem, InstructionSet::Scalar, Some(&mut lse), None).expect("a few rows");
        lse
    };
    let near = lse_of(0);
    for (n, (far, expected)) in lse_of(t_kv - 3).into_iter().zip(near).enumerate() {
        assert!((far - expected).abs() < 1e-5, "log-sum-exp {n}: {far}, expected {expected}");
    }
}

/// A random generator of test cases (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn choose<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

/// A call with random ranges, origins and number of entries.
struct RandomCall {
    case: Case,
    biases: Biases,
}

impl RandomCall {
    fn new(random: &mut Random) -> Self {
        let h_kv = 1 + random.below(2);
        let h = h_kv * random.choose(&[1, 2, 3, 9]);
        let t_q = random.choose(&[1, 2, 3, 7, 17, 40]);
        let t_kv = random.choose(&[1, 2, 5, 9, 33, 70]);
        let dims = AttentionDims { b: 1 + random.below(2), h, h_kv, t_q, t_kv, d: 3, d_v: 2 };
        let whole = t_q + t_kv - 1;
        let len = match random.below(4) {
            0 => random.below(whole + 1),
            1 => whole + random.below(4),
            _ => whole,
        };
        let is_shared = random.below(2) == 0;
        let of_sequence = if is_shared { 0 } else { h * len };
        let data = numbers(if is_shared { h * len } else { dims.b * h * len }, random.next());
        let origins = Self::origins(random, &dims, len);
        let ranges = Self::ranges(random, &dims, len, &origins);
        let case = Case { ranges, ..Case::new(dims, false, false) };
        Self { case, biases: Biases { len, of_sequence, data, origins } }
    }

    fn origins(random: &mut Random, dims: &AttentionDims, len: usize) -> Vec<i64> {
        let whole = (dims.t_q + dims.t_kv) as i64;
        // Diagonals of the scores, which may begin before the first entry or after the last.
        let shift = match random.below(4) {
            0 => 0,
            1 => random.below(5) as i64 - 2,
            _ => random.below(2 * whole as usize + 1) as i64 - whole,
        };
        let any = random.below(4) == 0;
        let diagonal = |row: usize| (dims.t_q - 1 - row % dims.t_q) as i64 + shift;
        let mut origins: Vec<_> = (0..dims.b * dims.t_q).map(diagonal).collect();
        for origin in origins.iter_mut().filter(|_| any) {
            *origin = match random.below(3) {
                0 => random.choose(&[i64::MIN, i64::MAX, 1 << 62, len as i64, -(dims.t_kv as i64)]),
                1 => random.below(len + 3) as i64 - 1,
                _ => *origin,
            };
        }
        origins
    }

    fn ranges(random: &mut Random, dims: &AttentionDims, len: usize, origins: &[i64]) -> Vec<Range<usize>> {
        // Half of all calls attend to keys with entries only, most others to a few keys without one.
        let outside = random.choose(&[0, 0, 1, 4]);
        let range = |&origin: &i64| {
            if random.below(5) == 0 {
                let start = random.choose(&[0, dims.t_kv, usize::MAX]);
                return start..random.choose(&[0, start]);
            }
            let start = random.below(dims.t_kv);
            let end = start + 1 + random.below(dims.t_kv - start);
            if random.below(4) < outside {
                return start..end;
            }
            let key_of = |entry: usize| (entry as i128 - i128::from(origin)).clamp(0, dims.t_kv as i128) as usize;
            start.max(key_of(0))..end.min(key_of(len))
        };
        origins.iter().map(range).collect()
    }

    /// Returns whether there is an entry for every key that a query attends to.
    fn is_inside(&self) -> bool {
        self.case.ranges.iter().zip(&self.biases.origins).all(|(range, &origin)| {
            range.clone().all(|key| (0..self.biases.len as i128).contains(&(i128::from(origin) + key as i128)))
        })
    }
}

/// The results of plain loops in f64.
struct Plain {
    output: Vec<f64>,
    weights: Vec<f64>,
    /// The gradient of the relative bias for these gradients of the contexts.
    gradient: Vec<f64>,
}

impl Plain {
    fn new(call: &RandomCall, data: &Data<f32>, output_grad: &[f32]) -> Self {
        let RandomCall { case, biases } = call;
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = case.dims;
        let mut plain = Self {
            output: vec![0.0; b * h * t_q * d_v],
            weights: vec![0.0; b * h * t_q * t_kv],
            gradient: vec![0.0; biases.data.len()],
        };
        for row in 0..b * h * t_q {
            let [sequence, head, query] = case.row(row);
            let key_row = |key: usize| (sequence * h_kv + head / (h / h_kv)) * t_kv + key;
            let origin = biases.origins[sequence * t_q + query];
            let entry = |key: usize| {
                sequence * biases.of_sequence + head * biases.len + (i128::from(origin) + key as i128) as usize
            };
            let keys = case.ranges[sequence * t_q + query].clone();
            let weights = &mut plain.weights[row * t_kv..][..t_kv];
            for key in keys.clone() {
                let products = (0..d).map(|n| f64::from(data.q[row * d + n]) * f64::from(data.k[key_row(key) * d + n]));
                weights[key] = (0.7 * products.sum::<f64>() + f64::from(biases.data[entry(key)])).exp();
            }
            let sum: f64 = weights.iter().sum();
            weights.iter_mut().filter(|weight| **weight > 0.0).for_each(|weight| *weight /= sum);
            let value = |key: usize, n: usize| f64::from(data.v[key_row(key) * d_v + n]);
            let grad = |n: usize| f64::from(output_grad[row * d_v + n]);
            let weight_grad = |key: usize| (0..d_v).map(|n| grad(n) * value(key, n)).sum::<f64>();
            let delta: f64 = keys.clone().map(|key| weights[key] * weight_grad(key)).sum();
            for key in keys {
                for n in 0..d_v {
                    plain.output[row * d_v + n] += weights[key] * value(key, n);
                }
                plain.gradient[entry(key)] += weights[key] * (weight_grad(key) - delta);
            }
        }
        plain
    }

    fn key_weight_sums(&self, dims: &AttentionDims) -> Vec<f64> {
        let sum = |at: usize| {
            let (head, key) = (at / dims.t_kv, at % dims.t_kv);
            (0..dims.t_q).map(|query| self.weights[(head * dims.t_q + query) * dims.t_kv + key]).sum()
        };
        (0..dims.b * dims.h * dims.t_kv).map(sum).collect()
    }
}

fn assert_close(what: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (n, (x, exact)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*x) - exact).abs() < 2e-5, "{what}, entry {n}: {x}, expected {exact}");
    }
}

#[test]
fn relative_bias_with_random_origins_matches_plain_loops_or_is_refused() {
    let mut random = Random(0x5eed);
    let (mut accepted, mut refused) = (0, 0);
    let instruction_sets = if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() };
    for _ in 0..if cfg!(miri) { 6 } else { 600 } {
        let call = RandomCall::new(&mut random);
        let RandomCall { case, biases } = &call;
        let AttentionDims { b, h, t_q, d_v, .. } = case.dims;
        let data = case.data::<f32>();
        let mut problem = case.problem(&data);
        problem.scores.relative_bias = Some(biases.bias());
        let output_grad: Vec<f32> = numbers(b * h * t_q * d_v, 20);
        let backward = |output: &[f32], stats: &[SoftmaxStats], instruction_set: InstructionSet| {
            let rows = Strided { data: &output_grad[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
            let problem =
                AttentionBackwardProblem { forward: problem, output, stats, output_grad: rows, lse_grad: None };
            attend_backward(
                &problem,
                instruction_set,
                RequestedGradients { q: true, relative_bias: true, ..Default::default() },
            )
        };
        let options = RequestedStatistics { top: 2, ..Default::default() };
        if !call.is_inside() {
            refused += 1;
            let (output, stats) = (vec![0.0; b * h * t_q * d_v], vec![SoftmaxStats::default(); b * h * t_q]);
            for &instruction_set in &instruction_sets {
                let errors = [
                    attend_vec(&problem, instruction_set, None, None).err(),
                    attend_with_statistics(&problem, instruction_set, &options).err(),
                    backward(&output, &stats, instruction_set).err(),
                ];
                for error in errors {
                    let text = error.expect("an entry outside of the relative bias").to_string();
                    assert!(text.contains("of the relative bias, expected"), "{text}");
                }
            }
            continue;
        }
        accepted += 1;
        let plain = Plain::new(&call, &data, &output_grad);
        for &instruction_set in &instruction_sets {
            let what = |result: &str| {
                let (len, origins, ranges) = (biases.len, &biases.origins, &case.ranges);
                format!(
                    "{result} on {instruction_set}: {:?}, {len} entries, origins {origins:?}, ranges {ranges:?}",
                    case.dims
                )
            };
            let mut stats = Vec::new();
            let output = attend_vec(&problem, instruction_set, None, Some(&mut stats)).expect("a few rows");
            assert_close(&what("output"), &output, &plain.output);
            let (same_output, statistics) =
                attend_with_statistics(&problem, instruction_set, &options).expect("a few rows");
            assert_close(&what("output with statistics"), &same_output, &plain.output);
            assert_close(&what("sums of weights"), &statistics.key_weight_sums, &plain.key_weight_sums(&case.dims));
            let gradients = backward(&output, &stats, instruction_set).expect("a few rows");
            assert_close(&what("gradient"), &gradients.relative_bias.expect("requested"), &plain.gradient);
        }
    }
    assert!(accepted > 0 && refused > 0, "{accepted} calls accepted, {refused} refused");
}
