//! The kernel alone, without tensors: small enough for Miri, which finds what reads or writes out of bounds on the scalar
//! tier. `tests/flash` holds every tier to the oracle.

use std::ops::Range;

use half::{bf16, f16};

use super::{Alibi, Dims, Output, OutputOrder, Problem, Scores, Strided, run};
use crate::Scalar;
use crate::cpu::{Element, Tier};

/// Numbers between -1 and 1 in no order.
fn numbers<E: Element>(count: usize, salt: u64) -> Vec<E> {
    let number = |n: u64| ((n + 1).wrapping_mul(salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) >> 40) as f32;
    (0..count as u64).map(|n| E::from_f32(number(n) / (1 << 23) as f32 - 1.0)).collect()
}

struct Case {
    dims: Dims,
    ranges: Vec<Range<usize>>,
    /// Softcap, ALiBi, bias, keep and sinks, or none of them.
    everything: bool,
}

impl Case {
    fn new(dims: Dims, causal: bool, everything: bool) -> Self {
        let range = |i: usize| 0..if causal { (i + 1 + dims.t_kv).saturating_sub(dims.t_q) } else { dims.t_kv };
        Self { ranges: (0..dims.b * dims.t_q).map(|row| range(row % dims.t_q)).collect(), dims, everything }
    }

    /// The largest difference between the kernel and plain loops in f64, on one tier.
    fn difference<E: Scalar + Into<f32>>(&self, tier: Tier) -> f64 {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let (q, k, v) = (
            numbers::<E>(b * h * t_q * d, 1),
            numbers::<E>(b * h_kv * t_kv * d, 2),
            numbers::<E>(b * h_kv * t_kv * d_v, 3),
        );
        let (bias, keep): (Vec<f32>, Vec<u8>) =
            (numbers(t_q * t_kv, 4), (0..t_kv).map(|key| u8::from(key % 5 != 2)).collect());
        let (slopes, sinks): (Vec<f32>, Vec<f32>) = (numbers(h, 5), numbers(h, 6));
        // The sequences of a batch stand at positions of their own.
        let positions: Vec<f32> =
            (0..b * t_q).map(|row| (row % t_q + t_kv) as f32 - (t_q + row / t_q) as f32).collect();
        let rows = |data, heads, t, width| -> Strided<E, 3> {
            let whole =
                Strided::new(data, 0, [heads * t * width, t * width, width, 1], [b, heads, t, width]).expect("it fits");
            whole.first_of_last()
        };
        let full = [b, h, t_q, t_kv];
        let mut lse = vec![0f32; b * h * t_q];
        let everything = self.everything;
        let scores = Scores {
            scale: 0.7,
            softcap: everything.then_some(2.0),
            alibi: everything.then_some(Alibi { slopes: &slopes, positions: &positions }),
            bias: everything.then(|| Strided::new(&bias, 0, [0, 0, t_kv, 1], full).expect("it fits")),
            keep: everything.then(|| Strided::new(&keep, 0, [0, 0, 0, 1], full).expect("it fits")),
            sinks: everything.then_some(&sinks),
        };
        let output = Output::new(OutputOrder::Bhtd, Some(lse.as_mut_ptr()));
        let (q_rows, k_rows) = (rows(&q, h, t_q, d), rows(&k, h_kv, t_kv, d));
        let problem = Problem {
            dims: self.dims,
            q: q_rows,
            k: k_rows,
            v: rows(&v, h_kv, t_kv, d_v),
            ranges: &self.ranges,
            scores,
            output,
        };
        let context = run(problem, tier).expect("a few rows");

        let number = |x: E| f64::from(x.into());
        let mut largest = 0f64;
        for row in 0..b * h * t_q {
            let (batch, head, i) = (row / (h * t_q), row / t_q % h, row % t_q);
            let key_row = |key: usize| (batch * h_kv + head / (h / h_kv)) * t_kv + key;
            let range = self.ranges[batch * t_q + i].clone();
            let seen: Vec<usize> = range.filter(|&key| !everything || keep[key] == 1).collect();
            let score = |key: usize| {
                let products = (0..d).map(|n| number(q[row * d + n]) * number(k[key_row(key) * d + n]));
                let score = 0.7 * products.sum::<f64>();
                if !everything {
                    return score;
                }
                let distance = f64::from((positions[batch * t_q + i] - key as f32).abs());
                2.0 * (score / 2.0).tanh() - f64::from(slopes[head]) * distance + f64::from(bias[i * t_kv + key])
            };
            let sink = if everything { f64::from(sinks[head]).exp() } else { 0.0 };
            let sum: f64 = seen.iter().map(|&key| score(key).exp()).sum::<f64>() + sink;
            for n in 0..d_v {
                let mixed: f64 = seen.iter().map(|&key| score(key).exp() * number(v[key_row(key) * d_v + n])).sum();
                let expected = if sum == 0.0 { 0.0 } else { mixed / sum };
                largest = largest.max((number(context[row * d_v + n]) - expected).abs());
            }
            let difference = f64::from(lse[row]) - sum.ln();
            largest = if lse[row] == sum.ln() as f32 { largest } else { largest.max(difference.abs()) };
        }
        largest
    }
}

fn dims(h: usize, t_q: usize, t_kv: usize, d: usize, d_v: usize) -> Dims {
    Dims { b: 2, h, h_kv: h.div_ceil(2), t_q, t_kv, d, d_v }
}

#[test]
fn every_tier_gives_the_numbers_of_plain_loops() {
    let shapes =
        [dims(2, 1, 3, 3, 2), dims(2, 9, 3, 2, 3), dims(1, 3, 2, 8, 1), dims(2, 11, 13, 9, 4), dims(4, 5, 131, 5, 3)];
    let (tiers, shapes) = match cfg!(miri) {
        // Interpreted, a call takes seconds: one that decodes and one that fills a tile in part.
        true => (vec![Tier::Scalar], &shapes[..2]),
        false => (Tier::available(), &shapes[..]),
    };
    for tier in tiers {
        for &dims in shapes {
            for (causal, everything) in [(false, false), (true, false), (true, true)] {
                let case = Case::new(dims, causal, everything);
                let name = format!("{tier}, {dims:?}, causal {causal}, everything {everything}");
                let differences =
                    [case.difference::<f32>(tier), case.difference::<bf16>(tier), case.difference::<f16>(tier)];
                for (difference, most) in differences.into_iter().zip([2e-5, 2e-2, 2e-3]) {
                    assert!(difference < most, "{name}: off by {difference:e}, more than {most:e}");
                }
            }
        }
    }
}
