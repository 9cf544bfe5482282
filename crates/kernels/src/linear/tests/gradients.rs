//! Products of matrices in either order, and gradients through packed weights.

use half::{bf16, f16};

use super::weight_shape;
use super::{numbers, rows_of};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::error::Error;
use crate::linear::{Codes, Epilogue, Matrix, PackedWeight, Product, Right, multiply_vec};

fn instruction_sets() -> Vec<InstructionSet> {
    // Interpreted, a product takes seconds.
    if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() }
}

/// (rows, depth, columns).
fn sizes() -> Vec<(usize, usize, usize)> {
    let mut sizes = vec![(1, 3, 2), (3, 18, 17), (2, 0, 3), (0, 2, 2), (2, 2, 0)];
    if !cfg!(miri) {
        sizes.extend([(17, 33, 49), (9, 513, 97), (193, 40, 50), (200, 385, 8), (50, 400, 145)]);
    }
    sizes
}

/// A matrix over `data` in one of both orders, with a gap behind each line.
fn matrix<X>(data: &[X], rows: usize, columns: usize, is_transposed: bool) -> Matrix<'_, X> {
    let stride = if is_transposed { rows } else { columns } + 3;
    Matrix { data, rows, columns, stride, is_transposed }
}

fn at<X: Element + Into<f32>>(matrix: &Matrix<X>, row: usize, column: usize) -> f64 {
    let (line, at) = if matrix.is_transposed { (column, row) } else { (row, column) };
    let number: f32 = matrix.data[line * matrix.stride + at].into();
    f64::from(number)
}

fn with_bias<'a, X>(left: Matrix<'a, X>, right: Right<'a, X>, bias: Option<&'a [f32]>) -> Product<'a, X> {
    Product { left, right, epilogue: Epilogue { bias, ..Default::default() }, executor: None }
}

/// The largest difference from plain loops in f64, relative to the sum of the magnitudes.
fn difference<A, B, C>(found: &[C], left: &Matrix<A>, right: &Matrix<B>, bias: Option<&[f32]>) -> f64
where
    A: Element + Into<f32>,
    B: Element + Into<f32>,
    C: Element + Into<f32>,
{
    assert_eq!(found.len(), left.rows * right.columns);
    let mut most = 0f64;
    for (n, &found) in found.iter().enumerate() {
        let (row, column) = (n / right.columns, n % right.columns);
        let bias = bias.map_or(0.0, |bias| f64::from(bias[column]));
        let terms = (0..left.columns).map(|depth| at(left, row, depth) * at(right, depth, column));
        let (sum, size) = terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()));
        let found: f32 = found.into();
        let off = (f64::from(found) - sum).abs();
        most = most.max(if off == 0.0 { 0.0 } else { off / size });
    }
    most
}

fn check_orders<X: Element + Into<f32>>(instruction_set: InstructionSet, most: f64) {
    for (rows, depth, columns) in sizes() {
        let numbers = |lines: usize, width: usize, salt| numbers::<X>(lines.max(width) * (lines.max(width) + 3), salt);
        let (a, b) = (numbers(rows, depth, 1), numbers(depth, columns, 2));
        let bias = super::numbers::<f32>(columns, 3);
        for order in 0..4 {
            let left = matrix(&a, rows, depth, order % 2 == 1);
            let right = matrix(&b, depth, columns, order / 2 == 1);
            let bias = (order > 0).then_some(&bias[..]);
            let found =
                multiply_vec(&with_bias(left, Right::Matrix { matrix: right, instruction_set }, bias)).expect("memory");
            let off = difference(&found, &left, &right, bias);
            assert!(off < most, "{instruction_set}: {rows} {depth} {columns}, order {order}, is off by {off:e}");
        }
    }
}

#[test]
fn linear_gradient_of_matrices_in_either_order_matches_plain_loops() {
    for instruction_set in instruction_sets() {
        check_orders::<f32>(instruction_set, 1e-6);
        check_orders::<bf16>(instruction_set, 4e-3);
        check_orders::<f16>(instruction_set, 5e-4);
    }
}

/// Columns that begin and end anywhere; numbers that are not finite in the others are nobody's.
fn check_input_gradient<W: Element + Into<f32>, X: Element + Into<f32>>(instruction_set: InstructionSet, most: f64) {
    for (rows, outputs, inputs) in sizes() {
        let weight = numbers::<W>(outputs * inputs, 1);
        for columns in [0..outputs, outputs / 3..outputs - outputs / 4, outputs / 2..outputs / 2] {
            let mut around = weight.clone();
            for (n, number) in around.iter_mut().enumerate().filter(|(n, _)| !columns.contains(&(n / inputs))) {
                *number = W::from_f32(if n % 2 == 0 { f32::NAN } else { f32::INFINITY });
            }
            let packed = PackedWeight::new(&around, weight_shape(outputs, inputs), instruction_set).expect("memory");
            let data = numbers::<X>(rows.max(columns.len()) * (rows.max(columns.len()) + 3), 2);
            for is_transposed in [false, true] {
                let gradient = matrix(&data, rows, columns.len(), is_transposed);
                let product =
                    with_bias(gradient, Right::Transposed { weight: &packed, outputs: columns.clone() }, None);
                let found = multiply_vec(&product).expect("memory");
                let right = Matrix {
                    data: &weight[columns.start * inputs..],
                    rows: columns.len(),
                    columns: inputs,
                    stride: inputs,
                    is_transposed: false,
                };
                let off = difference(&found, &gradient, &right, None);
                assert!(
                    off < most,
                    "{instruction_set}: {rows} {outputs} {inputs}, columns {columns:?}, is off by {off:e}"
                );
            }
        }
    }
}

#[test]
fn linear_gradient_of_packed_weight_matches_plain_loops() {
    for instruction_set in instruction_sets() {
        check_input_gradient::<f32, f32>(instruction_set, 1e-6);
        check_input_gradient::<bf16, bf16>(instruction_set, 4e-3);
        check_input_gradient::<f16, f16>(instruction_set, 5e-4);
        check_input_gradient::<bf16, f32>(instruction_set, 1e-6);
        check_input_gradient::<f16, f32>(instruction_set, 1e-6);
    }
}

/// Nothing is read where there is nothing, however far apart its rows would be.
#[test]
fn linear_gradient_of_no_columns_is_zeros() {
    fn check<X: Element + Into<f32>>(instruction_set: InstructionSet) {
        let (rows, outputs, inputs) = (3, 40, 5);
        let packed =
            PackedWeight::new(&numbers::<X>(outputs * inputs, 1), weight_shape(outputs, inputs), instruction_set)
                .expect("memory");
        for (at, stride) in
            [0, 7, 33, 40].into_iter().flat_map(|at| [0, 1 << 20, usize::MAX].map(|stride| (at, stride)))
        {
            let gradient = Matrix { data: &[], rows, columns: 0, stride, is_transposed: false };
            let product = with_bias(gradient, Right::Transposed { weight: &packed, outputs: at..at }, None);
            let found: Vec<X> = multiply_vec(&product).expect("memory");
            let zeros = found.iter().all(|&x| x.into() == 0.0);
            assert!(found.len() == rows * inputs && zeros, "{instruction_set}: from {at}, {stride} apart");
        }
    }
    for instruction_set in instruction_sets() {
        check::<f32>(instruction_set);
        check::<bf16>(instruction_set);
        check::<f16>(instruction_set);
    }
}

/// Adapters are trained over weights of codes too.
#[test]
fn packed_codes_gradient_matches_f32_weight() {
    let (rows, outputs, inputs) = if cfg!(miri) { (1, 3, 32) } else { (9, 53, 96) };
    let numbers_of = |salt| numbers::<f16>(outputs * inputs / 32, salt);
    let (scales, minimums, data) = (numbers_of(1), numbers_of(2), numbers::<f32>(rows * (outputs + 3), 3));
    for instruction_set in instruction_sets() {
        for (bits, minimums) in [(4, None), (4, Some(&minimums[..])), (8, None), (8, Some(&minimums[..]))] {
            let codes: Vec<u8> = (0..outputs * inputs).map(|n| (n * 7 % (1 << bits)) as u8).collect();
            let codes = Codes { bits, codes: &codes, scales: &scales, minimums };
            let packed =
                PackedWeight::from_codes(&codes, weight_shape(outputs, inputs), instruction_set).expect("memory");
            let weight = packed.unpack::<f32>().expect("memory");
            let gradient = matrix(&data, rows, outputs, false);
            let product = with_bias(gradient, Right::Transposed { weight: &packed, outputs: 0..outputs }, None);
            let found = multiply_vec(&product).expect("memory");
            let right = Matrix { data: &weight, rows: outputs, columns: inputs, stride: inputs, is_transposed: false };
            let off = difference(&found, &gradient, &right, None);
            assert!(off < 1e-6, "{instruction_set}: {codes:?} is off by {off:e}");
        }
    }
}

/// Training and inference give the same numbers.
#[test]
fn packed_weight_has_bits_of_plain_weight() {
    fn check<X: Element + PartialEq + std::fmt::Debug>(instruction_set: InstructionSet) {
        let (rows, inputs, outputs) = if cfg!(miri) { (2, 5, 18) } else { (37, 411, 101) };
        let (xs, weight) = (numbers::<X>(rows * inputs, 1), numbers::<X>(outputs * inputs, 2));
        let bias = numbers::<f32>(outputs, 3);
        let packed = PackedWeight::new(&weight, weight_shape(outputs, inputs), instruction_set).expect("memory");
        // Columns of the left operand's own are read the other way round, and give the same bits too.
        let columns: Vec<X> = (0..inputs * rows).map(|n| xs[n % rows * inputs + n / rows]).collect();
        let product = |left, right| multiply_vec(&with_bias(left, right, Some(&bias))).expect("memory");
        let expected = product(rows_of(&xs, inputs), Right::Weight { weight: &packed, outputs: 0..outputs });
        let right = Right::Matrix { matrix: rows_of(&weight, inputs).t(), instruction_set };
        assert_eq!(product(rows_of(&xs, inputs), right.clone()), expected, "{instruction_set}");
        assert_eq!(product(rows_of(&columns, rows).t(), right), expected, "{instruction_set}");
        assert_eq!(
            product(rows_of(&columns, rows).t(), Right::Weight { weight: &packed, outputs: 0..outputs }),
            expected,
            "{instruction_set}"
        );
    }
    for instruction_set in instruction_sets() {
        check::<f32>(instruction_set);
        check::<bf16>(instruction_set);
        check::<f16>(instruction_set);
    }
}

#[test]
fn linear_sums_of_bf16_columns_are_in_f32() {
    let (rows, columns) = if cfg!(miri) { (5, 3) } else { (3000, 50) };
    for instruction_set in instruction_sets() {
        let data = vec![bf16::from_f32(1.0 / 128.0); rows * columns];
        let matrix = Matrix { data: &data, rows, columns, stride: columns, is_transposed: false };
        let ones = vec![bf16::from_f32(1.0); rows];
        let left = Matrix { data: &ones, rows: 1, columns: rows, stride: rows, is_transposed: false };
        let sums = multiply_vec(&with_bias(left, Right::Matrix { matrix, instruction_set }, None)).expect("memory");
        assert_eq!(sums, vec![bf16::from_f32(rows as f32 / 128.0); columns], "{instruction_set}");
    }
}

#[test]
fn linear_gradient_with_wrong_sizes_is_an_error() {
    let data = [0f32; 6];
    let matrix = |rows, columns, stride| Matrix { data: &data, rows, columns, stride, is_transposed: false };
    let product = |left, right| {
        multiply_vec(&with_bias(left, Right::Matrix { matrix: right, instruction_set: InstructionSet::Scalar }, None))
            .map(|_| ())
    };
    let shape = |result: Result<(), Error>| matches!(result, Err(Error::Shape(_)));
    assert!(product(matrix(2, 3, 3), matrix(3, 2, 2)).is_ok());
    assert!(shape(product(matrix(2, 3, 3), matrix(2, 3, 3))));
    assert!(shape(product(matrix(2, 3, 4), matrix(3, 2, 2))));
    assert!(shape(product(matrix(2, 3, usize::MAX), matrix(3, 2, 2))));
    let packed = PackedWeight::new(&data, weight_shape(2, 3), InstructionSet::Scalar).expect("memory");
    let gradient = |columns, gradient| {
        multiply_vec(&with_bias(gradient, Right::Transposed { weight: &packed, outputs: columns }, None)).map(|_| ())
    };
    assert!(gradient(0..2, matrix(3, 2, 2)).is_ok());
    assert!(shape(gradient(1..3, matrix(3, 2, 2))));
    assert!(shape(gradient(0..1, matrix(3, 2, 2))));
    assert!(shape(gradient(0..2, matrix(4, 2, 2))));
}
