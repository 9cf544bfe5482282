//! The description of one product, and its checks.

use super::epilogue::Epilogue;
use super::matrix::Matrix;
use super::operands::Right;
use crate::error::Error;

/// A matrix product with its epilogue, summed in f32 and rounded once: `left · right`, (rows, columns).
#[derive(Clone, Debug)]
pub struct Product<'a, X> {
    /// The left operand, (rows, depth).
    pub left: Matrix<'a, X>,
    /// The right operand, (depth, columns).
    pub right: Right<'a, X>,
    /// Bias, activation, gate and residual.
    pub epilogue: Epilogue<'a, X>,
}

impl<X> Product<'_, X> {
    /// Checks the sizes of all operands, and returns the number of elements of the result.
    pub(super) fn check(&self) -> Result<usize, Error> {
        let Self { left, right, epilogue, .. } = self;
        left.check("the left operand")?;
        right.check()?;
        if left.columns != right.depth() {
            return Err(Error::Shape(format!("expected a depth of {}, found {}", right.depth(), left.columns)));
        }
        let count = left.rows.checked_mul(right.computed_columns().len()).ok_or_else(|| self.no_memory())?;
        epilogue.check(right, count)?;
        Ok(count)
    }

    /// Returns the error of a result that does not fit in memory.
    pub(super) fn no_memory(&self) -> Error {
        Error::Memory(format!("an output of {} rows of {}", self.left.rows, self.right.computed_columns().len()))
    }
}
