//! The kernels err no more than PyTorch does on the same inputs: `precision_attention.json` and
//! `precision_linear.json`, by the scripts of those names.
//!
//! The root mean square is compared case by case. A maximum over some thousands of numbers is luck to a third of its
//! size, so maxima are compared over all cases of a family together: a dtype, and for attention a spread of scores.

use std::collections::BTreeMap;

use attention_oracle::array::checksum;
use attention_oracle::attention::{exact_attention, exact_linear};
use rayon::prelude::*;
use serde::Deserialize;

use crate::*;

/// Returns whether a kernel's error exceeds PyTorch's by more than is allowed, or is NaN. Plain Rust has no fused
/// multiply-add on every target, and rounds a product and a sum where PyTorch rounds once.
fn exceeds(instruction_set: InstructionSet, error: f64, pytorch: f64) -> bool {
    let most = if instruction_set == InstructionSet::Scalar { 1.1 * 2f64.sqrt() } else { 1.1 };
    error.is_nan() || error > most * pytorch
}

#[derive(Deserialize)]
struct Measured {
    cases: Vec<Case>,
}

/// PyTorch's errors in one case, of attention (B, H, T_q, T_kv, D) or of a projection (rows, inputs, outputs).
#[derive(Deserialize)]
struct Case {
    seed: u64,
    shape: Vec<usize>,
    #[serde(default)]
    causal: bool,
    dtype: String,
    #[serde(default)]
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

    /// Draws random tensors of these shapes, bit for bit as the script does.
    fn draw(&self, shapes: [&[usize]; 3], widening: f64) -> Result<[Tensor; 3]> {
        let dtype = DTYPES.into_iter().find(|dtype| dtype.as_str() == self.dtype).expect("a dtype of the scripts");
        let seed = TorchSeed::new(self.seed);
        let first = (seed.randn(shapes[0])? * widening)?.to_dtype(dtype)?;
        let drawn = [first, seed.randn(shapes[1])?.to_dtype(dtype)?, seed.randn(shapes[2])?.to_dtype(dtype)?];
        for (tensor, expected) in drawn.iter().zip(self.checksums) {
            let numbers = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(checksum(&numbers), expected, "{}: other inputs than the script's", self.name());
        }
        Ok(drawn)
    }
}

/// Returns the maximum and the root mean square of the differences.
pub fn errors(got: &Tensor, exact: &[f64]) -> [f64; 2] {
    let got = values(got);
    let differences = || got.iter().zip(exact).map(|(got, exact)| (got - exact).abs());
    let squares: f64 = differences().map(|difference| difference * difference).sum();
    // Unlike f64::max, this keeps a NaN.
    let largest = differences().fold(0.0, |most: f64, difference| if difference <= most { most } else { difference });
    [largest, (squares / exact.len() as f64).sqrt()]
}

/// Compares the errors of every instruction set with PyTorch's; `run` returns a case's exact numbers, and the results
/// of an instruction set.
fn compare(text: &str, run: impl Fn(&Case) -> Result<(Vec<f64>, Vec<(InstructionSet, Tensor)>)> + Sync) -> Result<()> {
    let measured: Measured = serde_json::from_str(text).expect("the file is what it says");
    assert!(measured.cases.len() > 35, "{} cases", measured.cases.len());
    let errors_of = |case| {
        let (exact, results) = run(case)?;
        Ok(results.into_iter().map(|(instruction_set, got)| (instruction_set, errors(&got, &exact))).collect())
    };
    let found: Vec<Vec<_>> = measured.cases.par_iter().map(errors_of).collect::<Result<_>>()?;
    let mut failures = Vec::new();
    // Of an instruction set and of PyTorch in the cases of one dtype and deviation.
    let mut largest: BTreeMap<(&str, u32, InstructionSet), [f64; 2]> = BTreeMap::new();
    for (case, errors) in measured.cases.iter().zip(found) {
        for (instruction_set, [max, rms]) in errors {
            let [of_instruction_set, of_pytorch] =
                largest.entry((&case.dtype, case.widening, instruction_set)).or_default();
            *of_instruction_set = if max <= *of_instruction_set { *of_instruction_set } else { max };
            *of_pytorch = of_pytorch.max(case.max);
            // What rounds nothing has to be exact here too.
            if exceeds(instruction_set, rms, case.rms) {
                failures.push(format!("{instruction_set}: {}: rms {rms:e}, PyTorch's {:e}", case.name(), case.rms));
            }
        }
    }
    for ((dtype, widening, instruction_set), [max, pytorch]) in largest {
        println!(
            "{dtype}, scores of deviation {widening}, {instruction_set}: at most {max:.2e}, PyTorch {pytorch:.2e}"
        );
        if exceeds(instruction_set, max, pytorch) {
            failures.push(format!(
                "{instruction_set}: {dtype}, deviation {widening}: maximum {max:e}, PyTorch's {pytorch:e}"
            ));
        }
    }
    assert!(failures.is_empty(), "{} of the comparisons:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

#[test]
fn attention_error_is_at_most_pytorchs() -> Result<()> {
    compare(include_str!("precision_attention.json"), |case| {
        let [b, h, t_q, t_kv, d] = case.shape[..] else { panic!("{:?} is no shape of attention", case.shape) };
        let [q, k, v] = case.draw([&[b, h, t_q, d], &[b, h, t_kv, d], &[b, h, t_kv, d]], f64::from(case.widening))?;
        let mask = if case.causal { AttentionMask::causal_upper_left() } else { AttentionMask::none() };
        let call = Call::plain(&q, &k, &v, &mask);
        let results = InstructionSet::available()
            .into_iter()
            .map(|instruction_set| Ok((instruction_set, call.on_instruction_set(instruction_set).context()?)));
        let [q, k, v] = [&q, &k, &v].map(values);
        let row = |(n, query): (usize, &[f64])| {
            let keys = if case.causal { n % t_q + 1 } else { t_kv };
            let start = n / t_q * t_kv * d;
            exact_attention(query, &k[start..start + keys * d], &v[start..start + keys * d])
        };
        Ok((q.par_chunks_exact(d).enumerate().flat_map_iter(row).collect(), results.collect::<Result<_>>()?))
    })
}

#[test]
fn linear_error_is_at_most_pytorchs() -> Result<()> {
    compare(include_str!("precision_linear.json"), |case| {
        let [rows, inputs, outputs] = case.shape[..] else { panic!("{:?} is no shape of a product", case.shape) };
        let [xs, weight, bias] = case.draw([&[rows, inputs], &[outputs, inputs], &[outputs]], 1.0)?;
        let run = |instruction_set| {
            Ok((
                instruction_set,
                PackedLinear::with_instruction_set(&weight, Some(&bias), Some(instruction_set))?.forward(&xs)?,
            ))
        };
        let results = InstructionSet::available().into_iter().map(run).collect::<Result<_>>()?;
        let [xs, weight, bias] = [&xs, &weight, &bias].map(values);
        Ok((xs.par_chunks_exact(inputs).flat_map_iter(|row| exact_linear(row, &weight, &bias)).collect(), results))
    })
}
