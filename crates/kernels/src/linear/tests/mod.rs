//! Tests of the kernels alone, without tensors. They are small enough for Miri, which finds reads and writes out of
//! bounds on the scalar instruction set. `tests/attention/linear` compares every instruction set with f64.

mod code_kinds;
mod codes;
mod errors;
mod gradients;

use std::ops::Range;

use half::{bf16, f16};

use super::{Activation, Epilogue, Matrix, PackedWeight, Product, Right, Up, WeightShape, multiply_vec};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::cpu::tests::{erfc, numbers};

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    columns: Range<usize>,
    /// Elements of the input between one row and the next.
    gap: usize,
    bias: bool,
}

impl Case {
    /// Returns the largest difference between a product and plain loops in f64, relative to the sum of the magnitudes.
    fn difference<W: Element + PartialEq + Into<f32>, X: Element + Into<f32>>(
        &self,
        instruction_set: InstructionSet,
    ) -> f64 {
        let Self { rows, inputs, outputs, ref columns, gap, bias } = *self;
        let weight: Vec<W> = numbers(outputs * inputs, 1);
        let xs_row = inputs + gap;
        let xs: Vec<X> = numbers((rows * xs_row).saturating_sub(gap), 2);
        let bias: Option<Vec<f32>> = bias.then(|| numbers(outputs, 3));
        let packed = PackedWeight::new(&weight, weight_shape(outputs, inputs), instruction_set).expect("memory");
        assert!(
            packed.unpack::<W>().expect("memory") == weight,
            "{instruction_set}: {self:?} is not unpacked as it was"
        );
        let left = Matrix { data: &xs[..], rows, columns: inputs, stride: xs_row, is_transposed: false };
        let right = Right::Weight { weight: &packed, outputs: columns.clone() };
        let epilogue = Epilogue { bias: bias.as_deref(), ..Default::default() };
        let out = multiply_vec(&Product { left, right, epilogue }).expect("memory");
        assert_eq!(out.len(), rows * columns.len());
        let number = |x: f32| f64::from(x);
        let entry = |(at, &found): (usize, &X)| {
            let row = at / columns.len();
            let column = columns.start + at % columns.len();
            let terms = (0..inputs)
                .map(|input| number(xs[row * xs_row + input].into()) * number(weight[column * inputs + input].into()));
            let bias = bias.as_ref().map_or(0.0, |bias| number(bias[column]));
            let mut sum = bias;
            let mut size = bias.abs();
            for term in terms {
                sum += term;
                size += term.abs();
            }
            let difference = (number(found.into()) - sum).abs();
            if difference == 0.0 { 0.0 } else { difference / size }
        };
        out.iter().enumerate().map(entry).fold(0.0, f64::max)
    }
}

/// Returns the instruction sets of tests.
fn instruction_sets() -> Vec<InstructionSet> {
    // Interpreted, a product takes seconds.
    if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() }
}

fn weight_shape(outputs: usize, inputs: usize) -> WeightShape {
    WeightShape { outputs, inputs }
}

/// Returns a matrix of contiguous rows.
fn rows_of<X>(data: &[X], columns: usize) -> Matrix<'_, X> {
    Matrix { data, rows: data.len() / columns, columns, stride: columns, is_transposed: false }
}

fn case(rows: usize, inputs: usize, outputs: usize) -> Case {
    Case { rows, inputs, outputs, columns: 0..outputs, gap: rows % 3, bias: outputs.is_multiple_of(2) }
}

#[test]
fn linear_product_on_each_instruction_set_matches_plain_loops() {
    let mut cases = vec![case(1, 3, 2), case(3, 18, 17), Case { columns: 1..18, ..case(2, 5, 19) }, case(2, 0, 3)];
    if !cfg!(miri) {
        cases.extend([
            case(0, 4, 4),
            case(3, 4, 0),
            case(17, 33, 49),
            case(5, 513, 97),
            case(8, 1700, 5),
            case(193, 40, 50),
            // In rounds that share a copy, but in f32, which is read in place.
            case(1000, 40, 50),
            // Rows that share the sets of a cache are copied.
            case(999, 1024, 5),
        ]);
        cases.push(Case { columns: 47..97, ..case(20, 257, 100) });
    }
    for instruction_set in instruction_sets() {
        for case in &cases {
            for (difference, most) in [
                (case.difference::<f32, f32>(instruction_set), 1e-6),
                (case.difference::<bf16, bf16>(instruction_set), 4e-3),
                (case.difference::<f16, f16>(instruction_set), 5e-4),
                (case.difference::<bf16, f32>(instruction_set), 1e-6),
                (case.difference::<f16, f32>(instruction_set), 1e-6),
            ] {
                assert!(difference < most, "{instruction_set}: {case:?} is off by {difference:e}, more than {most:e}");
            }
        }
    }
}

/// Computes a product's epilogue in f64.
fn exact_epilogue(activation: Option<Activation>, sum: f64, up: f64, residual: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let activated = match activation {
        None => sum,
        Some(Activation::Gelu) => 0.5 * sum * erfc(-sum / 2f64.sqrt()),
        Some(Activation::GeluTanh) => {
            0.5 * sum * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (sum + 0.044715 * sum.powi(3))).tanh())
        }
        Some(Activation::Silu) => sum * sigmoid(sum),
        Some(Activation::Relu) => sum.max(0.0),
    };
    activated * up + residual
}

/// Compares every epilogue with the product alone and f64, for some of the columns, at the edges of vectors and panels.
fn check_epilogues<W: Element, X: Element + Into<f32>>(instruction_set: InstructionSet, most: f64) {
    let number = |x: f32| f64::from(x);
    let case = if cfg!(miri) { case(2, 3, 18) } else { case(5, 70, 103) };
    let Case { rows, inputs, outputs, .. } = case;
    let columns = if cfg!(miri) { 1..18 } else { 5..102 };
    let weights = [1, 2].map(|salt| numbers::<W>(outputs * inputs, salt));
    let weights = weights
        .map(|numbers| PackedWeight::new(&numbers, weight_shape(outputs, inputs), instruction_set).expect("memory"));
    let biases = [3, 4].map(|salt| numbers::<f32>(outputs, salt));
    let xs: Vec<X> = numbers(rows * inputs, 5);
    let residual: Vec<X> = numbers(rows * columns.len(), 6);
    let wide_xs: Vec<f32> = xs.iter().map(|&x| x.into()).collect();
    let plain = [0, 1].map(|at| {
        let epilogue = Epilogue { bias: Some(&biases[at][..]), ..Default::default() };
        let left = rows_of(&wide_xs, inputs);
        let right = Right::Weight { weight: &weights[at], outputs: columns.clone() };
        multiply_vec(&Product { left, right, epilogue }).expect("fits")
    });
    let all = [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Relu].map(Some);
    for activation in [None].into_iter().chain(all) {
        for n in 0..4 {
            let is_gated = n % 2 == 1;
            let is_added = n / 2 == 1;
            let epilogue = Epilogue {
                bias: Some(&biases[0][..]),
                activation,
                up: is_gated.then_some(Up { weight: &weights[1], bias: Some(&biases[1]) }),
                residual: is_added.then_some(&residual[..]),
            };
            let left = rows_of(&xs, inputs);
            let right = Right::Weight { weight: &weights[0], outputs: columns.clone() };
            let product = Product { left, right, epilogue };
            for (at, &found) in multiply_vec(&product).expect("fits").iter().enumerate() {
                let up = if is_gated { number(plain[1][at]) } else { 1.0 };
                let added = if is_added { number(residual[at].into()) } else { 0.0 };
                let sum = number(plain[0][at]);
                let found = number(found.into());
                let exact = exact_epilogue(activation, sum, up, added);
                let bound = most * (sum.abs() * up.abs() + up.abs() + added.abs() + 1.0);
                let what = format!("{instruction_set}: {activation:?} of {sum} by {up} and {added}");
                assert!((found - exact).abs() <= bound, "{what} is {found:e}, expected {exact:e} within {bound:e}");
            }
        }
    }
}

#[test]
fn linear_epilogue_on_each_instruction_set_matches_f64() {
    for instruction_set in instruction_sets() {
        check_epilogues::<f32, f32>(instruction_set, 1e-6);
        check_epilogues::<bf16, f32>(instruction_set, 1e-6);
        // Instruction sets that multiply pairs of bf16 sum them in another order.
        check_epilogues::<bf16, bf16>(instruction_set, 5e-3);
        check_epilogues::<f16, f16>(instruction_set, 1e-3);
    }
}
