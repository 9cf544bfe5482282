//! Products of matrices that are not packed, and the gradients of a projection.

use std::ops::Range;

use super::left::Left;
use super::right::{Right, depth_start};
use super::task::Product;
use super::{Epilogue, PackedWeight, multiplied};
use crate::cpu::{Executor, Tier};
use crate::error::{Error, check_len, check_tier};
use crate::linear::ProductKernels;

/// A matrix (rows, columns) in memory. The element of row r and column c is at `r * stride + c`, or at `c * stride + r`
/// where it is transposed.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, X> {
    /// From the first element on.
    pub data: &'a [X],
    /// The rows.
    pub rows: usize,
    /// The columns.
    pub columns: usize,
    /// The elements from the beginning of one row to the next, or of one column where columns are contiguous.
    pub stride: usize,
    /// Whether columns are contiguous, and not rows.
    pub is_transposed: bool,
}

impl<X> Matrix<'_, X> {
    /// The other way round.
    pub fn t(self) -> Self {
        Self { rows: self.columns, columns: self.rows, is_transposed: !self.is_transposed, ..self }
    }

    /// That it lies within its slice.
    pub(super) fn check(&self, name: &str) -> Result<(), Error> {
        let Self { data, rows, columns, stride, is_transposed } = *self;
        let (lines, width) = if is_transposed { (columns, rows) } else { (rows, columns) };
        let end = lines.saturating_sub(1).checked_mul(stride).and_then(|last| last.checked_add(width));
        if lines > 0 && width > 0 && end.is_none_or(|end| end > data.len()) {
            let found = data.len();
            return Err(Error::Shape(format!(
                "expected {lines} lines of {width} elements, {stride} apart, for {name}, found {found} elements"
            )));
        }
        Ok(())
    }
}

/// The operands of [`multiply`].
#[derive(Clone, Debug)]
pub struct MatrixProduct<'a, X> {
    /// (rows, depth).
    pub left: Matrix<'a, X>,
    /// (depth, columns).
    pub right: Matrix<'a, X>,
    /// One for each column, added to the sums.
    pub bias: Option<&'a [f32]>,
    /// What multiplies.
    pub tier: Tier,
    /// Runs the call if it is brief; rayon otherwise.
    pub executor: Option<Executor>,
}

/// `left · right + bias`, summed in f32 and rounded once: (rows, columns), with the bits that
/// [`project`](super::project) gives for the same numbers in a packed weight.
///
/// # Errors
/// [`Error::Shape`] if the operands do not fit each other, their slices or the bias, [`Error::Tier`] if the processor
/// lacks the tier, [`Error::Memory`] if there is none for the result.
///
/// ```
/// use candle_attention_kernels::Tier;
/// use candle_attention_kernels::linear::{Matrix, MatrixProduct, multiply};
///
/// let xs = Matrix { data: &[1.0, 1.0, 2.0, 0.0], rows: 2, columns: 2, stride: 2, is_transposed: false };
/// // A weight of three outputs and two inputs.
/// let weight = Matrix { data: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows: 3, columns: 2, stride: 2, is_transposed: false };
/// let product = MatrixProduct { left: xs, right: weight.t(), bias: None, tier: Tier::choose(None, false)?, executor: None };
/// assert_eq!(multiply(&product)?, [3.0, 7.0, 11.0, 2.0, 6.0, 10.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn multiply<X: ProductKernels>(product: &MatrixProduct<X>) -> Result<Vec<X>, Error> {
    let &MatrixProduct { left, right, bias, tier, executor } = product;
    check_tier(tier)?;
    left.check("the left operand")?;
    right.check("the right operand")?;
    if left.columns != right.rows {
        return Err(Error::Shape(format!("expected a depth of {}, found {}", left.columns, right.rows)));
    }
    if let Some(bias) = bias {
        check_len("bias", bias.len(), right.columns)?;
    }
    multiplied(&Product {
        left: Left { matrix: left, lead: 0 },
        rights: &[Right::Matrix(right)],
        columns: 0..right.columns,
        epilogue: Epilogue { bias, ..Default::default() },
        executor,
        tier,
    })
}

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
