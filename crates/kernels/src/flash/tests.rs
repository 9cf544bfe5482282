//! The kernel alone, without tensors: small enough for Miri, which finds what reads or writes out of bounds on the
//! scalar instruction set. `tests/attention/flash` compares every instruction set with the oracle.

use std::ops::Range;

use half::{bf16, f16};

mod backward;
mod nan;
mod relative_bias;
mod shared_biases;
mod sizes;
mod statistics;

use super::{
    Alibi, AttentionDims, AttentionProblem, Dropout, DropoutMask, KvRows, OutputLayout, ScoreOptions, Strided,
    WeightIndex, attend, attend_vec, philox_keeps,
};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use crate::error::Error;

struct Case {
    dims: AttentionDims,
    ranges: Vec<Range<usize>>,
    /// Softcap, ALiBi, bias, keep and sinks, or none of them.
    everything: bool,
    /// Keys and values of 8 bits.
    q8: bool,
    /// The seed of Philox.
    dropout: Option<u64>,
    /// The weights that it keeps.
    kept: Vec<u8>,
}

/// The probability that a weight is dropped.
const P: f64 = 0.3;

/// Codes and scales of rows, and the numbers that they represent.
type Q8 = (Vec<u8>, Vec<f32>, Vec<f64>);

fn quantized(count: usize, width: usize, salt: u64) -> Q8 {
    let codes: Vec<u8> = numbers::<f32>(count * width, salt).iter().map(|x| (x * 127.9 + 128.0) as u8).collect();
    let scales: Vec<f32> = numbers::<f32>(count, salt + 10).iter().map(|x| (x + 1.1) / 128.0).collect();
    let wide = codes.iter().enumerate().map(|(n, &code)| (f64::from(code) - 128.0) * f64::from(scales[n / width]));
    let wide = wide.collect();
    (codes, scales, wide)
}

impl Case {
    fn new(dims: AttentionDims, causal: bool, everything: bool) -> Self {
        let range = |i: usize| 0..if causal { (i + 1 + dims.t_kv).saturating_sub(dims.t_q) } else { dims.t_kv };
        Self {
            ranges: (0..dims.b * dims.t_q).map(|row| range(row % dims.t_q)).collect(),
            dims,
            everything,
            q8: false,
            dropout: None,
            kept: Vec::new(),
        }
    }

    fn with_dropout(mut self, seed: u64) -> Self {
        let AttentionDims { b, h, t_q, t_kv, .. } = self.dims;
        self.dropout = Some(seed);
        self.kept = vec![0; (b * h * t_q * t_kv).div_ceil(8)];
        for at in 0..b * h * t_q * t_kv {
            let weight = WeightIndex {
                b: at / (h * t_q * t_kv),
                head: at / (t_q * t_kv) % h,
                query: at / t_kv % t_q,
                key: at % t_kv,
            };
            self.kept[at / 8] |= u8::from(philox_keeps(seed, P, weight)) << (at % 8);
        }
        self
    }

    fn data<E: Element>(&self) -> Data<E> {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        Data {
            q: numbers(b * h * t_q * d, 1),
            k: numbers(b * h_kv * t_kv * d, 2),
            v: numbers(b * h_kv * t_kv * d_v, 3),
            k_q8: quantized(b * h_kv * t_kv, d, 2),
            v_q8: quantized(b * h_kv * t_kv, d_v, 3),
            bias: numbers(t_q * t_kv, 4),
            keep: (0..t_kv).map(|key| u8::from(key % 5 != 2)).collect(),
            slopes: numbers(h, 5),
            sinks: numbers(h, 6),
            // Each sequence of the batch has different positions.
            positions: (0..b * t_q).map(|row| (row % t_q + t_kv) as f32 - (t_q + row / t_q) as f32).collect(),
        }
    }

    fn problem<'a, E>(&'a self, data: &'a Data<E>) -> AttentionProblem<'a, E> {
        let AttentionDims { h, h_kv, t_q, t_kv, d, d_v, .. } = self.dims;
        let everything = self.everything;
        let scores = ScoreOptions {
            scale: 0.7,
            softcap: everything.then_some(2.0),
            alibi: everything.then_some(Alibi { slopes: &data.slopes, positions: &data.positions }),
            relative_bias: None,
            bias: everything.then_some(Strided { data: &data.bias, strides: [0, 0, t_kv, 1] }),
            keep: everything.then_some(Strided { data: &data.keep, strides: [0, 0, 0, 1] }),
            sinks: everything.then_some(&data.sinks),
            dropout: self.dropout.map(|seed| {
                let mask = if everything { DropoutMask::Kept(&self.kept) } else { DropoutMask::Philox(seed) };
                Dropout { mask, p: P }
            }),
        };
        let kv_rows = |floats: &'a [E], codes: &'a Q8, width: usize| match self.q8 {
            true => KvRows::Q8 {
                codes: Strided { data: &codes.0, strides: [h_kv * t_kv * width, t_kv * width, width] },
                scales: Strided { data: &codes.1, strides: [h_kv * t_kv, t_kv, 1] },
            },
            false => Strided { data: floats, strides: [h_kv * t_kv * width, t_kv * width, width] }.into(),
        };
        AttentionProblem {
            dims: self.dims,
            q: Strided { data: &data.q, strides: [h * t_q * d, t_q * d, d] },
            k: kv_rows(&data.k, &data.k_q8, d),
            v: kv_rows(&data.v, &data.v_q8, d_v),
            ranges: &self.ranges,
            scores,
            output_layout: OutputLayout::Bhtd,
        }
    }

    /// Returns the sequence, the head and the query of a row among B·H·T_q rows.
    fn row(&self, row: usize) -> [usize; 3] {
        let AttentionDims { h, t_q, .. } = self.dims;
        [row / (h * t_q), row / t_q % h, row % t_q]
    }

    /// Computes the weights of a row before dropout, T_kv of them, and the log-sum-exp, in plain loops.
    fn weights(&self, data: &Data<f64>, row: usize) -> (Vec<f64>, f64) {
        let AttentionDims { h, h_kv, t_q, t_kv, d, .. } = self.dims;
        let [batch, head, i] = self.row(row);
        let range = &self.ranges[batch * t_q + i];
        let score = |key: usize| {
            if !range.contains(&key) || self.everything && data.keep[key] == 0 {
                return f64::NEG_INFINITY;
            }
            let key_row = (batch * h_kv + head / (h / h_kv)) * t_kv + key;
            let products = (0..d).map(|n| data.q[row * d + n] * data.k[key_row * d + n]);
            let score = 0.7 * products.sum::<f64>();
            if !self.everything {
                return score;
            }
            let distance = f64::from((data.positions[batch * t_q + i] - key as f32).abs());
            2.0 * (score / 2.0).tanh() - f64::from(data.slopes[head]) * distance + f64::from(data.bias[i * t_kv + key])
        };
        let powers: Vec<f64> = (0..t_kv).map(|key| score(key).exp()).collect();
        let sink = if self.everything { f64::from(data.sinks[head]).exp() } else { 0.0 };
        let sum = powers.iter().sum::<f64>() + sink;
        (powers.into_iter().map(|power| if sum == 0.0 { 0.0 } else { power / sum }).collect(), sum.ln())
    }

    /// Computes the output and the log-sum-exp, in plain loops.
    fn exact(&self, data: &Data<f64>) -> (Vec<f64>, Vec<f64>) {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d_v, .. } = self.dims;
        let (mut output, mut lse) = (Vec::new(), Vec::new());
        for row in 0..b * h * t_q {
            let [batch, head, i] = self.row(row);
            let (weights, of_row) = self.weights(data, row);
            let kept = |key: usize| match self.dropout {
                Some(seed) if !philox_keeps(seed, P, WeightIndex { b: batch, head, query: i, key }) => 0.0,
                Some(_) => 1.0 / (1.0 - P),
                None => 1.0,
            };
            for n in 0..d_v {
                let value = |key: usize| data.v[((batch * h_kv + head / (h / h_kv)) * t_kv + key) * d_v + n];
                let mixed = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
                output.push(mixed.map(|(key, weight)| weight * kept(key) * value(key)).sum());
            }
            lse.push(of_row);
        }
        (output, lse)
    }

    /// Returns the largest difference between the kernel and plain loops in f64, on one instruction set.
    fn difference<E: Element + Into<f32>>(&self, instruction_set: InstructionSet) -> f64 {
        let data = self.data::<E>();
        let mut lse = Vec::new();
        let output = attend_vec(&self.problem(&data), instruction_set, Some(&mut lse), None).expect("a few rows");
        let (exact_output, exact_lse) = self.exact(&data.clone().widened(self.q8));
        let difference =
            |(x, exact): (f64, f64)| if x == exact || exact == f64::NEG_INFINITY { 0.0 } else { (x - exact).abs() };
        assert!(lse.iter().zip(&exact_lse).all(|(x, exact)| exact.is_finite() || f64::from(*x) == *exact));
        let outputs = output.into_iter().map(|x| f64::from(x.into())).zip(exact_output);
        outputs.chain(lse.into_iter().map(f64::from).zip(exact_lse)).map(difference).fold(0.0, f64::max)
    }
}

/// The tensors of a case.
#[derive(Clone)]
struct Data<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    /// Replaces the keys in a case of 8 bits.
    k_q8: Q8,
    v_q8: Q8,
    bias: Vec<f32>,
    keep: Vec<u8>,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    positions: Vec<f32>,
}

impl<E: Element + Into<f32>> Data<E> {
    fn widened(self, q8: bool) -> Data<f64> {
        let wide = |numbers: Vec<E>| -> Vec<f64> { numbers.into_iter().map(|x| f64::from(x.into())).collect() };
        let kv = |floats: Vec<E>, codes: &Q8| if q8 { codes.2.clone() } else { wide(floats) };
        let Self { q, k, v, k_q8, v_q8, bias, keep, slopes, sinks, positions } = self;
        let (k, v) = (kv(k, &k_q8), kv(v, &v_q8));
        Data { q: wide(q), k, v, k_q8, v_q8, bias, keep, slopes, sinks, positions }
    }
}

fn dims(h: usize, t_q: usize, t_kv: usize, d: usize, d_v: usize) -> AttentionDims {
    AttentionDims { b: 2, h, h_kv: h.div_ceil(2), t_q, t_kv, d, d_v }
}

#[test]
fn forward_with_causal_softcap_alibi_sinks_dropout_matches_plain_loops() {
    let shapes =
        [dims(2, 1, 3, 3, 2), dims(2, 9, 3, 2, 3), dims(1, 3, 2, 8, 1), dims(2, 11, 13, 9, 4), dims(4, 5, 131, 5, 3)];
    let (instruction_sets, shapes) = match cfg!(miri) {
        // Interpreted, a call takes seconds: one that decodes and one that fills a tile in part.
        true => (vec![InstructionSet::Scalar], &shapes[..2]),
        false => (InstructionSet::available(), &shapes[..]),
    };
    for instruction_set in instruction_sets {
        for &dims in shapes {
            let cases = [(false, false), (true, false), (true, true)];
            for ((causal, everything), q8) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
                let case = Case { q8, ..Case::new(dims, causal, everything) };
                let case = if q8 == causal { case.with_dropout(0x1234_5678_9abc) } else { case };
                let name =
                    format!("{instruction_set}, {dims:?}, causal {causal}, everything {everything}, 8 bits {q8}");
                let differences = [
                    case.difference::<f32>(instruction_set),
                    case.difference::<bf16>(instruction_set),
                    case.difference::<f16>(instruction_set),
                ];
                for (difference, most) in differences.into_iter().zip([2e-5, 2e-2, 2e-3]) {
                    assert!(difference < most, "{name}: off by {difference:e}, more than {most:e}");
                }
            }
        }
    }
}

/// Checks masks that are the least number of f32 or bf16, as PyTorch's users write them: such biases compare as numbers
/// do, and a row without any other key has the mean as its output.
fn check_extreme_biases<E: Element + Into<f32>>(instruction_set: InstructionSet, t_q: usize, repeats: usize) {
    let bf16_min = bf16::MIN.to_f32();
    // The biases of three keys, the weights that follow, and the largest.
    let cases = [
        ([f32::MIN; 3], [1.0 / 3.0; 3], f32::MIN),
        ([bf16_min; 3], [1.0 / 3.0; 3], bf16_min),
        ([-3.4e38, -3.0e38, -3.4e38], [0.0, 1.0, 0.0], -3.0e38),
        ([0.0, 3e38, 0.0], [0.0, 1.0, 0.0], 3e38),
        ([f32::MAX, f32::MAX, f32::MIN], [0.5, 0.5, 0.0], f32::MAX),
        ([f32::MIN, f32::NEG_INFINITY, f32::MIN], [0.5, 0.0, 0.5], f32::MIN),
        ([f32::MIN, 0.0, 0.0], [0.0, 0.5, 0.5], 0.0),
    ];
    let (t_kv, d) = (3 * repeats, 4);
    let (q, k): (Vec<E>, Vec<E>) = (vec![E::from_f32(0.25); t_q * d], vec![E::from_f32(0.5); t_kv * d]);
    let v: Vec<E> = (0..t_kv).map(|key| E::from_f32([1.0, 2.0, 4.0][key % 3])).collect();
    for (biases, weights, most) in cases {
        let bias: Vec<f32> = biases.repeat(repeats);
        let problem = AttentionProblem {
            dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d, d_v: 1 },
            q: Strided { data: &q, strides: [0, d, d] },
            k: Strided { data: &k, strides: [0, 0, d] }.into(),
            v: Strided { data: &v, strides: [0, 0, 1] }.into(),
            ranges: &vec![0..t_kv; t_q],
            scores: ScoreOptions { bias: Some(Strided { data: &bias, strides: [0, 0, 0, 1] }), ..Default::default() },
            output_layout: OutputLayout::Bhtd,
        };
        let mut lse = Vec::new();
        let output = attend_vec(&problem, instruction_set, Some(&mut lse), None).expect("a few rows");
        let expected_output = weights[0] + 2.0 * weights[1] + 4.0 * weights[2];
        let what = format!("{instruction_set}, {t_q} queries, {t_kv} keys, biases {biases:?}");
        for got in output {
            let got: f32 = got.into();
            assert!((got - expected_output).abs() < 2e-2, "{what}: {got}, expected {expected_output}");
        }
        // The score of 0.5 and the logarithm of the number of keys change the sum only if biases are small.
        let keys = (repeats * weights.iter().filter(|&&weight| weight > 0.0).count()) as f32;
        let expected_lse = most + if most == 0.0 { 0.5 + keys.ln() } else { 0.0 };
        for got in lse {
            assert!(
                (got - expected_lse).abs() <= 3e-7 * expected_lse.abs(),
                "{what}: log-sum-exp {got:e}, expected {expected_lse:e}"
            );
        }
    }
}

#[test]
fn bias_at_the_limits_of_f32_matches_pytorch() {
    let instruction_sets = if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() };
    for instruction_set in instruction_sets {
        // Decoding and tiles, within one part of the keys and over several.
        let shapes = [(1, 1), (9, 1), (3, 2), (40, 50), (1, 500), (17, 500)];
        for &(t_q, repeats) in if cfg!(miri) { &shapes[..2] } else { &shapes[..] } {
            check_extreme_biases::<f32>(instruction_set, t_q, repeats);
            check_extreme_biases::<bf16>(instruction_set, t_q, repeats);
            check_extreme_biases::<f16>(instruction_set, t_q, repeats);
        }
    }
}

/// Returns a valid call of one query, for tests to change.
fn small<'a>(data: &'a [f32], ranges: &'a [Range<usize>]) -> AttentionProblem<'a, f32> {
    let rows = Strided { data, strides: [8, 4, 2] };
    AttentionProblem {
        dims: AttentionDims { b: 1, h: 2, h_kv: 2, t_q: 1, t_kv: 2, d: 2, d_v: 2 },
        q: rows,
        k: rows.into(),
        v: rows.into(),
        ranges,
        scores: ScoreOptions::default(),
        output_layout: OutputLayout::Bhtd,
    }
}

#[test]
fn sizes_beyond_a_slice_are_refused() {
    let (data, ranges) = ([1f32; 8], [0..2]);
    let good = small(&data, &ranges);
    assert_eq!(attend_vec(&good, InstructionSet::Scalar, None, None).expect("a good call"), [1.0; 4]);
    let dims = good.dims;
    let short = Strided { data: &data[..7], ..good.q };
    let codes = |count, scales| KvRows::Q8 {
        codes: Strided { data: &[0u8; 8][..count], strides: good.q.strides },
        scales: Strided { data: &data[..scales], strides: [4, 2, 1] },
    };
    let (entries, kept) = ([0f32; 3], [1u8; 3]);
    let scores = good.scores;
    let alibi = |slopes, positions| ScoreOptions { alibi: Some(Alibi { slopes, positions }), ..scores };
    let huge = usize::MAX / 2;
    let cases = [
        (
            AttentionProblem { dims: AttentionDims { h_kv: 0, ..dims }, ..good },
            "expected key heads that divide the 2 query heads, found 0",
        ),
        (
            AttentionProblem { dims: AttentionDims { h: 3, ..dims }, ..good },
            "expected key heads that divide the 3 query heads, found 2",
        ),
        (
            AttentionProblem { k: short.into(), ..good },
            "k of [1, 2, 2] entries of 2 elements with strides [8, 4, 2] ends past the 7 elements of its slice",
        ),
        (
            AttentionProblem { v: Strided { strides: [8, usize::MAX, 2], ..good.q }.into(), ..good },
            "v of [1, 2, 2] entries of 2 elements with strides [8, 18446744073709551615, 2] ends past the 8 elements of its slice",
        ),
        (
            AttentionProblem { k: codes(8, 4), v: codes(7, 4), ..good },
            "v of [1, 2, 2] entries of 2 elements with strides [8, 4, 2] ends past the 7 elements of its slice",
        ),
        (
            AttentionProblem { k: codes(8, 3), v: codes(8, 4), ..good },
            "the scales of k of [1, 2, 2] entries of 1 elements with strides [4, 2, 1] ends past the 3 elements of its slice",
        ),
        (
            AttentionProblem { v: codes(8, 4), ..good },
            "expected keys and values that are both floats or both of 8 bits",
        ),
        (
            AttentionProblem { dims: AttentionDims { t_q: 3, ..dims }, ..good },
            "q of [1, 2, 3] entries of 2 elements with strides [8, 4, 2] ends past the 8 elements of its slice",
        ),
        (AttentionProblem { ranges: &[], ..good }, "ranges has 0 elements, expected 1"),
        (AttentionProblem { ranges: &[0..3], ..good }, "expected ranges within 2 keys, found 0..3"),
        (AttentionProblem { scores: alibi(&[1.0], &[0.0]), ..good }, "slopes has 1 elements, expected 2"),
        (AttentionProblem { scores: alibi(&[1.0, 1.0], &[]), ..good }, "positions has 0 elements, expected 1"),
        (
            AttentionProblem { scores: ScoreOptions { sinks: Some(&[0.0]), ..scores }, ..good },
            "sinks has 1 elements, expected 2",
        ),
        (
            AttentionProblem {
                scores: ScoreOptions { bias: Some(Strided { data: &entries, strides: [0, 2, 2, 1] }), ..scores },
                ..good
            },
            "bias of [1, 2, 1, 2] entries of 1 elements with strides [0, 2, 2, 1] ends past the 3 elements of its slice",
        ),
        (
            AttentionProblem {
                scores: ScoreOptions { keep: Some(Strided { data: &kept, strides: [0, 2, 2, 1] }), ..scores },
                ..good
            },
            "keep of [1, 2, 1, 2] entries of 1 elements with strides [0, 2, 2, 1] ends past the 3 elements of its slice",
        ),
        (
            AttentionProblem { dims: AttentionDims { d_v: huge, ..dims }, ..good },
            "an attention output of [1, 2, 1, 9223372036854775807] does not fit in memory",
        ),
        (
            AttentionProblem {
                dims: AttentionDims { t_kv: usize::MAX, ..dims },
                k: Strided { strides: [0; 3], ..good.q }.into(),
                v: Strided { strides: [0; 3], ..good.q }.into(),
                scores: ScoreOptions { dropout: Some(Dropout { mask: DropoutMask::Kept(&[255]), p: 0.5 }), ..scores },
                ..good
            },
            "a dropout mask of [1, 2, 1, 18446744073709551615] does not fit in memory",
        ),
        // Counts overflow without a byte of output.
        (
            AttentionProblem { dims: AttentionDims { b: huge, d_v: 0, ..dims }, ..good },
            "an attention output of [9223372036854775807, 2, 1, 0] does not fit in memory",
        ),
    ];
    for (problem, expected) in cases {
        for instruction_set in InstructionSet::available() {
            let error = attend_vec(&problem, instruction_set, None, None).expect_err(expected);
            if usize::BITS == 64 {
                assert_eq!(error.to_string(), expected);
            }
        }
    }
}

#[test]
fn results_of_a_wrong_length_and_missing_instruction_sets_are_refused() {
    let data = [1f32; 8];
    let good = small(&data, &[0..2]);
    let error = |output_len: usize, lse_len: usize| {
        let mut output = Box::new_uninit_slice(output_len);
        let mut lse = Box::new_uninit_slice(lse_len);
        attend(&good, InstructionSet::Scalar, &mut output, Some(&mut lse), None)
            .expect_err("a wrong length")
            .to_string()
    };
    assert_eq!(error(3, 2), "output has 3 elements, expected 4");
    assert_eq!(error(4, 1), "lse has 1 elements, expected 2");
    let missing = InstructionSet::ALL
        .into_iter()
        .find(|instruction_set| !instruction_set.is_available())
        .expect("of another processor");
    assert!(matches!(attend_vec(&good, missing, None, None), Err(Error::InstructionSet(_))));
}

/// Checks empty ranges outside of the keys, and repeated keys whose number is beyond memory.
#[test]
fn empty_ranges_anywhere_are_fully_masked_and_too_many_keys_are_refused() {
    let data = [1f32; 8];
    for range in [usize::MAX..0, 7..7, 2..1] {
        for t_q in [1, 9] {
            let mut problem = small(&data, &[]);
            let ranges = vec![range.clone(); t_q];
            (problem.dims.t_q, problem.ranges, problem.q.strides) = (t_q, &ranges, [0; 3]);
            for instruction_set in InstructionSet::available() {
                let output = attend_vec(&problem, instruction_set, None, None).expect("a fully masked query");
                assert!(output.iter().all(|&x| x == 0.0), "{instruction_set}: {range:?}");
            }
        }
    }
    let mut problem = small(&data, &[]);
    let repeated = Strided { strides: [0; 3], ..problem.q }.into();
    (problem.dims.t_kv, problem.k, problem.v) = (usize::MAX / 4, repeated, repeated);
    let error = attend_vec(&AttentionProblem { ranges: &[0..3], ..problem }, InstructionSet::Scalar, None, None)
        .expect_err("no memory");
    assert_eq!(error.to_string(), "a scratch buffer of attention does not fit in memory");
}

/// Computes a call of 8 bits over heads of 16 numbers, whose last query attends to all keys and each query before it to
/// one key less.
fn attend_q8(instruction_set: InstructionSet, t_q: usize, codes: &[u8], scales: &[f32]) -> Vec<f32> {
    let (d, t_kv) = (16, scales.len());
    let q: Vec<f32> = numbers(t_q * d, 7);
    let rows = KvRows::Q8 {
        codes: Strided { data: codes, strides: [0, 0, d] },
        scales: Strided { data: scales, strides: [0, 0, 1] },
    };
    let problem = AttentionProblem {
        dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q, t_kv, d, d_v: d },
        q: Strided { data: &q, strides: [0, 0, d] },
        k: rows,
        v: rows,
        ranges: &(1..=t_q).map(|i| 0..t_kv + i - t_q).collect::<Vec<_>>(),
        scores: ScoreOptions::default(),
        output_layout: OutputLayout::Bhtd,
    };
    attend_vec(&problem, instruction_set, None, None).expect("a few rows")
}

/// Uses the scale that a cache stores for a row with a number that is not finite.
#[test]
fn q8_scale_of_nan_reaches_only_queries_that_attend_to_its_key() {
    for instruction_set in InstructionSet::available() {
        for t_q in [2, 10, 40] {
            let (codes, mut scales, _) = quantized(50, 16, 3);
            let finite = attend_q8(instruction_set, t_q, &codes, &scales);
            scales[49] = f32::NAN;
            let found = attend_q8(instruction_set, t_q, &codes, &scales);
            let (before, last) = found.split_at((t_q - 1) * 16);
            assert!(
                before.iter().zip(&finite).all(|(x, y)| (x - y).abs() < 1e-6),
                "{instruction_set}, {t_q} queries: {before:?}"
            );
            assert!(last.iter().all(|x| x.is_nan()), "{instruction_set}, {t_q} queries: {last:?}");
        }
    }
}

#[test]
fn q8_results_are_equal_for_any_number_of_threads() {
    let count = if cfg!(miri) { 60 } else { 9000 };
    let (codes, scales, _) = quantized(count, 16, 3);
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for t_q in [4, 50] {
            let [one, three] = [1, 3].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| attend_q8(instruction_set, t_q, &codes, &scales))
            });
            assert!(
                one.iter().zip(&three).all(|(x, y)| x.to_bits() == y.to_bits()),
                "{instruction_set}, {t_q} queries"
            );
        }
    }
}
