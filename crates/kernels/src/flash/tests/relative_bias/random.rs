//! Relative biases with random ranges, origins and numbers of entries, against the oracle.

use std::ops::Range;

use attention_oracle::problem::{Gradients, Pair};

use super::{Biases, with_relative_bias};
use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use crate::flash::tests::case::{Case, Data, FOR_BACKWARD};
use crate::flash::tests::on_miri_only_scalar;
use crate::flash::{
    AttentionBackwardProblem, AttentionDims, OutputLayout, PerInput, RequestedGradients, RequestedResults,
    RequestedStatistics, SoftmaxStats, Strided, attend, attend_backward,
};

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

/// The results of the oracle.
struct Exact {
    output: Vec<f64>,
    weights: Vec<f64>,
    /// The gradient of the relative bias for these gradients of the output.
    gradient: Vec<f64>,
}

impl Exact {
    fn new(call: &RandomCall, data: &Data<f32>, output_grad: &[f32]) -> Self {
        let RandomCall { case, biases } = call;
        let AttentionDims { b, h, t_q, t_kv, .. } = case.dims;
        let wide = data.clone().widened(case.codes.is_some());
        let of_output: Vec<f64> = output_grad.iter().map(|x| f64::from(*x)).collect();
        let of_lse = vec![0.0; b * h * t_q];
        let entry = |Pair { b: sequence, head, query, key }: Pair| {
            let origin = biases.origins[sequence * t_q + query];
            sequence * biases.of_sequence + head * biases.len + (i128::from(origin) + key as i128) as usize
        };
        let bias = |pair: Pair| f64::from(biases.data[entry(pair)]);
        let (forward, Gradients { scores, .. }) =
            case.with_problem(&wide, &bias, |problem| (problem.forward(), problem.backward(&of_output, &of_lse)));
        let mut gradient = vec![0.0; biases.data.len()];
        for (at, of_score) in scores.into_iter().enumerate() {
            let (sequence, head, query, key) =
                (at / (h * t_q * t_kv), at / (t_q * t_kv) % h, at / t_kv % t_q, at % t_kv);
            if case.ranges[sequence * t_q + query].contains(&key) {
                gradient[entry(Pair { b: sequence, head, query, key })] += of_score;
            }
        }
        Self { output: forward.output, weights: forward.weights, gradient }
    }

    fn key_weight_sums(&self, dims: &AttentionDims) -> Vec<f64> {
        let sum = |at: usize| {
            let head = at / dims.t_kv;
            let key = at % dims.t_kv;
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
fn relative_bias_with_random_origins_matches_oracle_or_is_refused() {
    let mut random = Random(0x5eed);
    let mut accepted = 0;
    let mut refused = 0;
    let instruction_sets = on_miri_only_scalar();
    for _ in 0..if cfg!(miri) { 6 } else { 600 } {
        let call = RandomCall::new(&mut random);
        let RandomCall { case, biases } = &call;
        let AttentionDims { b, h, t_q, d_v, .. } = case.dims;
        let data = case.data::<f32>();
        let forward = with_relative_bias(case.call(&data), biases.bias());
        let output_grad: Vec<f32> = numbers(b * h * t_q * d_v, 20);
        let backward = |output: &[f32], softmax_stats: &[SoftmaxStats], instruction_set: InstructionSet| {
            let rows = Strided { data: &output_grad[..], strides: [h * t_q * d_v, t_q * d_v, d_v] };
            let problem =
                AttentionBackwardProblem { forward, output, softmax_stats, output_grad: rows, lse_grad: None };
            attend_backward(
                &problem,
                instruction_set,
                RequestedGradients {
                    layout: OutputLayout::Bhtd,
                    of: PerInput { q: true, relative_bias: true, ..Default::default() },
                },
            )
        };
        let options = RequestedStatistics { top_keys: 2, tile: None };
        let with_statistics = RequestedResults { statistics: Some(&options), ..RequestedResults::default() };
        if !call.is_inside() {
            refused += 1;
            let output = vec![0.0; b * h * t_q * d_v];
            let stats = vec![SoftmaxStats::default(); b * h * t_q];
            for &instruction_set in &instruction_sets {
                let errors = [
                    attend::<f32>(&forward, instruction_set, RequestedResults::default()).err(),
                    attend::<f32>(&forward, instruction_set, with_statistics).err(),
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
        let exact = Exact::new(&call, &data, &output_grad);
        for &instruction_set in &instruction_sets {
            let what = |result: &str| {
                let len = biases.len;
                let origins = &biases.origins;
                let ranges = &case.ranges;
                format!(
                    "{result} on {instruction_set}: {:?}, {len} entries, origins {origins:?}, ranges {ranges:?}",
                    case.dims
                )
            };
            let found = attend::<f32>(&forward, instruction_set, FOR_BACKWARD).expect("a few rows");
            let stats = found.softmax_stats.expect("requested");
            assert_close(&what("output"), &found.output, &exact.output);
            let same = attend::<f32>(&forward, instruction_set, with_statistics).expect("a few rows");
            let statistics = same.statistics.expect("requested");
            assert_close(&what("output with statistics"), &same.output, &exact.output);
            assert_close(&what("sums of weights"), &statistics.key_weight_sums, &exact.key_weight_sums(&case.dims));
            let gradients = backward(&found.output, &stats, instruction_set).expect("a few rows");
            assert_close(&what("gradient"), &gradients.relative_bias.expect("requested"), &exact.gradient);
        }
    }
    assert!(accepted > 0 && refused > 0, "{accepted} calls accepted, {refused} refused");
}
