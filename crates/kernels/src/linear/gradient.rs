//! Gradients of a projection.

use std::ops::Range;

use super::left::Left;
use super::matrix::{Matrix, MatrixProduct, multiply};
use super::right::{Right, depth_start};
use super::task::Product;
use super::{Epilogue, PackedWeight, multiplied};
use crate::cpu::{Executor, Tier};
use crate::error::Error;
use crate::linear::ProductKernels;

/// The operands of [`input_gradient`].
#[derive(Clone, Debug)]
pub struct InputGradient<'a, X> {
    /// The weight that inputs were multiplied with, of any element.
    pub weight: &'a PackedWeight,
    /// The outputs that were computed.
    pub columns: Range<usize>,
    /// Their gradient (rows, columns), by rows.
    pub gradient: Matrix<'a, X>,
    /// Runs the call if it is brief; rayon otherwise.
    pub executor: Option<Executor>,
}

/// The gradient of a projection's inputs, (rows, inputs): `gradient · weight`, from the weight as it is packed.
///
/// # Errors
/// [`Error::Shape`] if the columns lie outside of the weight, or the gradient does not fit them or its slice, and
/// [`Error::Memory`] if there is none for the result.
pub fn input_gradient<X: ProductKernels>(operands: &InputGradient<X>) -> Result<Vec<X>, Error> {
    let &InputGradient { weight, ref columns, gradient, executor } = operands;
    if columns.start > columns.end || columns.end > weight.outputs() {
        return Err(Error::Shape(format!("expected columns within {} outputs, found {columns:?}", weight.outputs())));
    }
    if gradient.columns != columns.len() || gradient.is_transposed {
        return Err(Error::Shape(format!("expected rows of {} columns, found {}", columns.len(), gradient.columns)));
    }
    gradient.check("the gradient")?;
    // Without columns nothing is read, wherever they would begin.
    let columns = if columns.is_empty() { 0..0 } else { columns.clone() };
    multiplied(&Product {
        left: Left { matrix: gradient, lead: columns.start - depth_start(columns.start) },
        rights: &[Right::Transposed { weight, first: columns.start, end: columns.end }],
        columns: 0..weight.inputs(),
        epilogue: Epilogue::default(),
        executor,
        tier: weight.tier(),
    })
}

/// The sum of each column, in f32 and rounded once: a bias's gradient.
///
/// # Errors
/// As [`multiply`].
pub fn column_sums<X: ProductKernels>(
    matrix: Matrix<X>,
    tier: Tier,
    executor: Option<Executor>,
) -> Result<Vec<X>, Error> {
    let ones = vec![X::from_f32(1.0); matrix.rows];
    let left = Matrix { data: &ones, rows: 1, columns: matrix.rows, stride: matrix.rows, is_transposed: false };
    multiply(&MatrixProduct { left, right: matrix, bias: None, tier, executor })
}
