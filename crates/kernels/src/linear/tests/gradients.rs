//! Products of matrices in either order, and gradients through packed weights.

use half::{bf16, f16};

use super::code_kinds::{CodeKind, OwnCodes};
use super::{instruction_sets, numbers, rows_of, weight_shape};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::cpu::tests::Sequence;
use crate::error::Error;
use crate::linear::{Epilogue, Matrix, PackedWeight, Product, Right, multiply_vec};

/// The sizes of a product.
struct Sizes {
    rows: usize,
    depth: usize,
    columns: usize,
}

/// Returns sizes at the edges of vectors, panels and blocks.
fn sizes() -> Vec<Sizes> {
    let mut sizes = vec![[1, 3, 2], [3, 18, 17], [2, 0, 3], [0, 2, 2], [2, 2, 0]];
    if !cfg!(miri) {
        sizes.extend([[17, 33, 49], [9, 513, 97], [193, 40, 50], [200, 385, 8], [50, 400, 145]]);
    }
    sizes.into_iter().map(|[rows, depth, columns]| Sizes { rows, depth, columns }).collect()
}

/// Returns a matrix over `data` in one of both orders, with a gap after each line.
fn matrix<X>(data: &[X], rows: usize, columns: usize, is_transposed: bool) -> Matrix<'_, X> {
    let stride = if is_transposed { rows } else { columns } + 3;
    Matrix { data, rows, columns, stride, is_transposed }
}

fn at<X: Element + Into<f32>>(matrix: &Matrix<X>, row: usize, column: usize) -> f64 {
    let index = if matrix.is_transposed { column * matrix.stride + row } else { row * matrix.stride + column };
    let number: f32 = matrix.data[index].into();
    f64::from(number)
}

fn with_bias<'a, X>(left: Matrix<'a, X>, right: Right<'a, X>, bias: Option<&'a [f32]>) -> Product<'a, X> {
    Product { left, right, epilogue: Epilogue { bias, ..Default::default() } }
}

/// Returns the largest difference from plain loops in f64, relative to the sum of the magnitudes.
fn difference<A, B, C>(found: &[C], left: &Matrix<A>, right: &Matrix<B>, bias: Option<&[f32]>) -> f64
where
    A: Element + Into<f32>,
    B: Element + Into<f32>,
    C: Element + Into<f32>,
{
    assert_eq!(found.len(), left.rows * right.columns);
    let mut most = 0f64;
    for (n, &element) in found.iter().enumerate() {
        let row = n / right.columns;
        let column = n % right.columns;
        let mut sum = bias.map_or(0.0, |bias| f64::from(bias[column]));
        let mut size = sum.abs();
        for depth in 0..left.columns {
            let term = at(left, row, depth) * at(right, depth, column);
            sum += term;
            size += term.abs();
        }
        let number: f32 = element.into();
        let off = (f64::from(number) - sum).abs();
        most = most.max(if off == 0.0 { 0.0 } else { off / size });
    }
    most
}

fn check_orders<X: Element + Into<f32>>(instruction_set: InstructionSet, most: f64) {
    for Sizes { rows, depth, columns } in sizes() {
        let data = |lines: usize, width: usize, salt| numbers::<X>(lines.max(width) * (lines.max(width) + 3), salt);
        let a = data(rows, depth, 1);
        let b = data(depth, columns, 2);
        let bias = super::numbers::<f32>(columns, 3);
        for order in 0..4 {
            let left = matrix(&a, rows, depth, order % 2 == 1);
            let right = matrix(&b, depth, columns, order / 2 == 1);
            let order_bias = (order > 0).then_some(&bias[..]);
            let product = with_bias(left, Right::Matrix { matrix: right, instruction_set }, order_bias);
            let found = multiply_vec(&product).expect("memory");
            let off = difference(&found, &left, &right, order_bias);
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

/// Checks columns that begin and end anywhere. The other columns are not finite, and must not be read.
fn check_input_gradient<W: Element + Into<f32>, X: Element + Into<f32>>(instruction_set: InstructionSet, most: f64) {
    for Sizes { rows, depth: outputs, columns: inputs } in sizes() {
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

/// Checks that rows without elements are not read, for any stride.
#[test]
fn linear_gradient_of_no_columns_is_zeros() {
    fn check<X: Element + Into<f32>>(instruction_set: InstructionSet) {
        let rows = 3;
        let outputs = 40;
        let inputs = 5;
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

/// Checks the gradient that trains adapters of a weight of codes.
#[test]
fn packed_codes_gradient_matches_f32_weight() {
    let rows = if cfg!(miri) { 1 } else { 9 };
    let outputs = if cfg!(miri) { 3 } else { 53 };
    let inputs = if cfg!(miri) { 64 } else { 128 };
    let shape = weight_shape(outputs, inputs);
    let data = numbers::<f32>(rows * (outputs + 3), 3);
    for instruction_set in instruction_sets() {
        for kind in CodeKind::all(inputs) {
            let own = OwnCodes::new(kind, shape, &mut Sequence(1), &|sequence| sequence.fraction());
            let packed = PackedWeight::from_codes(&own.as_codes(), shape, instruction_set).expect("memory");
            let Some(packed) = packed else { continue };
            let gradient = matrix(&data, rows, outputs, false);
            let product = with_bias(gradient, Right::Transposed { weight: &packed, outputs: 0..outputs }, None);
            let found = multiply_vec(&product).expect("memory");
            let weight = own.numbers();
            let right = Matrix { data: &weight, rows: outputs, columns: inputs, stride: inputs, is_transposed: false };
            let off = difference(&found, &gradient, &right, None);
            assert!(off < 1e-6, "{instruction_set}: {kind:?} is off by {off:e}");
        }
    }
}

/// Checks that training and inference have the same numbers.
#[test]
fn packed_weight_has_bits_of_plain_weight() {
    fn check<X: Element + PartialEq + std::fmt::Debug>(instruction_set: InstructionSet) {
        let rows = if cfg!(miri) { 2 } else { 37 };
        let inputs = if cfg!(miri) { 5 } else { 411 };
        let outputs = if cfg!(miri) { 18 } else { 101 };
        let xs = numbers::<X>(rows * inputs, 1);
        let weight = numbers::<X>(outputs * inputs, 2);
        let bias = numbers::<f32>(outputs, 3);
        let packed = PackedWeight::new(&weight, weight_shape(outputs, inputs), instruction_set).expect("memory");
        // The transposed left operand has the same bits too.
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
    let rows = if cfg!(miri) { 5 } else { 3000 };
    let columns = if cfg!(miri) { 3 } else { 50 };
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
