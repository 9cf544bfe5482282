//! Gradients of a projection.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::left::Left;
use super::matrix::{Matrix, MatrixProduct, multiply};
use super::right::{Right, depth_start};
use super::{Epilogue, PackedWeight, Product, filled};
use crate::cpu::{Executor, SharedPtr, Tier};
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
    let (rows, inputs) = (gradient.rows, weight.inputs());
    if columns.start > columns.end || columns.end > weight.outputs() {
        return Err(Error::Shape(format!("expected columns within {} outputs, found {columns:?}", weight.outputs())));
    }
    if gradient.columns != columns.len() || gradient.is_transposed {
        return Err(Error::Shape(format!("expected rows of {} columns, found {}", columns.len(), gradient.columns)));
    }
    gradient.check("the gradient")?;
    let count = rows.checked_mul(inputs).filter(|&count| count.checked_mul(size_of::<X>()).is_some());
    let count = count.ok_or_else(|| Error::Memory(format!("a gradient of {rows} rows of {inputs}")))?;
    // Without columns nothing is read, wherever they would begin.
    let columns = if columns.is_empty() { 0..0 } else { columns.clone() };
    let fill = |output: &mut [MaybeUninit<X>]| {
        X::multiply(&Product {
            left: Left { matrix: gradient, lead: columns.start - depth_start(columns.start) },
            right: Right::Transposed { weight, first: columns.start, end: columns.end },
            columns: 0..inputs,
            epilogue: Epilogue::default(),
            executor,
            tier: weight.tier(),
            output: SharedPtr(output.as_mut_ptr().cast()),
        });
        Ok(())
    };
    // SAFETY: the product initialises every element.
    unsafe { filled(rows, inputs, count, fill) }
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
