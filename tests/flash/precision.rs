//! The kernel errs no more than PyTorch does on the same inputs: `precision.json` beside this file, by `precision.py`.
//!
//! The root mean square is compared case by case. A maximum over some thousands of numbers is luck to a third of its
//! size, so maxima are compared over all cases of a dtype and a spread of scores together.

use std::collections::BTreeMap;

use candle_attention::AttentionMask;
use candle_attention::cpu::Tier;
use candle_attention::init::TorchSeed;
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;
use serde::Deserialize;

use crate::common::values;
use crate::fused::Call;

/// How much worse than PyTorch the kernel may be. Plain Rust has no fused multiply-add on every target, and rounds a product
/// and a sum where the others round once.
fn most(tier: Tier) -> f64 {
    if tier == Tier::Scalar { 1.1 * 2f64.sqrt() } else { 1.1 }
}

#[derive(Deserialize)]
struct Measured {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    seed: u64,
    /// B, H, T_q, T_kv, D.
    shape: [usize; 5],
    causal: bool,
    dtype: String,
    widening: u32,
    checksums: [u64; 3],
    max: f64,
    rms: f64,
}

impl Case {
    fn name(&self) -> String {
        let Self { shape, causal, dtype, widening, .. } = self;
        format!("{shape:?}, causal {causal}, {dtype}, scores of deviation {widening}")
    }

    /// q, k and v, bit for bit those of the script.
    fn inputs(&self) -> Result<[Tensor; 3]> {
        let [b, h, t_q, t_kv, d] = self.shape;
        let dtype = match self.dtype.as_str() {
            "f32" => DType::F32,
            "bf16" => DType::BF16,
            "f16" => DType::F16,
            other => panic!("{other} is no dtype of the script"),
        };
        let seed = TorchSeed::new(self.seed);
        let q = (seed.randn((b, h, t_q, d))? * f64::from(self.widening))?.to_dtype(dtype)?;
        let (k, v) = (seed.randn((b, h, t_kv, d))?.to_dtype(dtype)?, seed.randn((b, h, t_kv, d))?.to_dtype(dtype)?);
        let checksums = [checksum(&q)?, checksum(&k)?, checksum(&v)?];
        assert_eq!(checksums, self.checksums, "{}: other inputs than the script's", self.name());
        Ok([q, k, v])
    }
}

/// The context in f64: a few rows of loops, and not the reference path, which takes a minute for all cases.
fn exact(case: &Case, inputs: [&Tensor; 3]) -> Vec<f64> {
    let [_, _, t_q, t_kv, d] = case.shape;
    let [q, k, v] = inputs.map(values);
    let scale = 1.0 / (d as f64).sqrt();
    let row = |(n, query): (usize, &[f64])| {
        let keys = if case.causal { n % t_q + 1 } else { t_kv };
        let start = n / t_q * t_kv * d;
        let of_head = start..start + keys * d;
        let scores: Vec<f64> = k[of_head.clone()].chunks_exact(d).map(|key| scale * dot(query, key)).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut context) = (0.0, vec![0.0; d]);
        for (score, value) in scores.iter().zip(v[of_head].chunks_exact(d)) {
            let weight = (score - largest).exp();
            sum += weight;
            context.iter_mut().zip(value).for_each(|(context, value)| *context += weight * value);
        }
        context.into_iter().map(move |x| x / sum).collect::<Vec<_>>()
    };
    q.par_chunks_exact(d).enumerate().flat_map_iter(row).collect()
}

/// In four sums, since one waits for itself.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    for (x, y) in x.chunks_exact(4).zip(y.chunks_exact(4)) {
        (0..4).for_each(|n| sums[n] += x[n] * y[n]);
    }
    sums.iter().sum()
}

/// NaN exceeds everything.
fn exceeds(tier: Tier, error: f64, pytorch: f64) -> bool {
    error.is_nan() || error > most(tier) * pytorch
}

/// As the script has it.
fn checksum(tensor: &Tensor) -> Result<u64> {
    let numbers = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let terms = numbers.iter().zip(0u64..).map(|(x, n)| u64::from(x.to_bits()).wrapping_mul(2 * n + 1));
    Ok(terms.fold(0, u64::wrapping_add))
}

/// Maximum and root mean square of the differences.
fn errors(got: &Tensor, exact: &[f64]) -> (f64, f64) {
    let got = values(got);
    let differences = || got.iter().zip(exact).map(|(got, exact)| (got - exact).abs());
    let squares: f64 = differences().map(|difference| difference * difference).sum();
    // Unlike f64::max, this keeps a NaN.
    let largest = differences().fold(0.0, |most: f64, difference| if difference <= most { most } else { difference });
    (largest, (squares / exact.len() as f64).sqrt())
}

#[test]
fn the_kernel_errs_no_more_than_pytorch() -> Result<()> {
    let measured: Measured = serde_json::from_str(include_str!("precision.json")).expect("the file is what it says");
    assert!(measured.cases.len() > 150, "{} cases", measured.cases.len());
    let mut failures = Vec::new();
    // PyTorch's largest error and each tier's.
    let mut largest: BTreeMap<(String, u32), (f64, BTreeMap<Tier, f64>)> = BTreeMap::new();
    for case in &measured.cases {
        let [q, k, v] = case.inputs()?;
        let mask = if case.causal { AttentionMask::causal_upper_left() } else { AttentionMask::none() };
        let exact = exact(case, [&q, &k, &v]);
        let family = largest.entry((case.dtype.clone(), case.widening)).or_default();
        family.0 = family.0.max(case.max);
        for tier in Tier::available() {
            let (max, rms) = errors(&Call::plain(&q, &k, &v, &mask).on_tier(tier).context()?, &exact);
            let of_tier = family.1.entry(tier).or_default();
            *of_tier = if max <= *of_tier { *of_tier } else { max };
            // What rounds nothing has to be exact here too.
            if exceeds(tier, rms, case.rms) {
                failures.push(format!("{tier}: {}: rms {rms:e}, PyTorch's {:e}", case.name(), case.rms));
            }
        }
    }
    for ((dtype, widening), (pytorch, tiers)) in largest {
        for (tier, max) in tiers {
            println!("{dtype}, scores of deviation {widening}, {tier}: at most {max:.2e}, PyTorch {pytorch:.2e}");
            if exceeds(tier, max, pytorch) {
                failures.push(format!("{tier}: {dtype}, deviation {widening}: maximum {max:e}, PyTorch's {pytorch:e}"));
            }
        }
    }
    assert!(failures.is_empty(), "{} of the comparisons:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}
