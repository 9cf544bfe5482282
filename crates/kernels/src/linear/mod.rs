//! Rows of input times a packed weight, and the products of a backward pass.
//!
//! ```text
//! for each chunk of rows and of panels:                        a task
//!     for each block of inputs:
//!         copy the rows' inputs                                (rows, block)
//!         for each panel:  sums = sums + inputs · weight       (rows, panel)
//!     outputs = epilogue(sums)
//! ```
//!
//! The same loops serve one row and thousands. A block of a panel is read once for all rows of a task, so for few rows
//! the weight streams through once, and for many it stays in the second cache while rows pass. The inputs of an output
//! are summed in blocks of one length from the first to the last, whatever the rows, the columns and the threads, so
//! its bits depend on its own row and weights alone.
//!
//! They serve a weight that is not packed too ([`Right::Matrix`]), since training changes it after each call: a block
//! of a panel is then put in order for the rows of one task. The gradient of the inputs reads a weight the other way
//! round ([`Right::Transposed`]), that of the weight reads both of its operands the other way round.

mod operands;
mod pack;
mod task;
#[cfg(test)]
mod tests;
mod weight;

pub use crate::cpu::CODE_BLOCK;
pub use operands::{Matrix, Right};
pub use pack::Codes;
pub use task::{Activation, Epilogue, Up};
pub use weight::PackedWeight;

use std::mem::MaybeUninit;

use half::{bf16, f16};

use crate::cpu::{Executor, InstructionSet, Unwritten};
use crate::error::Error;
use crate::number::Number;

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used.
pub trait ProductKernels: Number {
    /// [`multiply`].
    ///
    /// # Errors
    /// As there.
    fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]) -> Result<(), Error>;
    /// [`PackedWeight::new`].
    ///
    /// # Errors
    /// As there.
    fn pack(rows: &[Self], shape: (usize, usize), instruction_set: InstructionSet) -> Result<PackedWeight, Error>;
    /// [`PackedWeight::unpack_rows`].
    ///
    /// # Errors
    /// As there.
    fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error>;
}

macro_rules! multiply {
    ($($type:ty),*) => {
        $(impl ProductKernels for $type {
            fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]) -> Result<(), Error> {
                task::run(product, output)
            }

            fn pack(rows: &[Self], shape: (usize, usize), instruction_set: InstructionSet) -> Result<PackedWeight, Error> {
                pack::pack_weight(rows, shape, instruction_set)
            }

            fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error> {
                weight::unpack_rows(weight, outputs)
            }
        })*
    };
}

multiply!(f32, bf16, f16);

/// `left · right`, and what follows, summed in f32 and rounded once: (rows, columns).
#[derive(Clone, Debug)]
pub struct Product<'a, X> {
    /// (rows, depth).
    pub left: Matrix<'a, X>,
    /// (depth, columns).
    pub right: Right<'a, X>,
    /// Bias, activation, gate and residual.
    pub epilogue: Epilogue<'a, X>,
    /// Runs the call if it is brief; rayon otherwise.
    pub executor: Option<Executor>,
}

impl<X> Product<'_, X> {
    /// The elements of the result of operands that fit each other.
    fn check(&self) -> Result<usize, Error> {
        let Self { left, right, epilogue, .. } = self;
        left.check("the left operand")?;
        right.check()?;
        let (depth, width) = right.shape();
        if left.columns != depth {
            return Err(Error::Shape(format!("expected a depth of {depth}, found {}", left.columns)));
        }
        let count = left.rows.checked_mul(right.wanted().len()).ok_or_else(|| self.no_memory())?;
        epilogue.check(right, width, count)?;
        Ok(count)
    }

    fn no_memory(&self) -> Error {
        Error::Memory(format!("an output of {} rows of {}", self.left.rows, self.right.wanted().len()))
    }
}

/// Multiplies on the executor or on the threads of the current rayon pool. On success every element of `output` is
/// initialised. The bits of the result are the same for a weight in panels and for the same numbers in memory.
///
/// # Errors
/// [`Error::Shape`] if the operands do not fit each other, their slices, what follows or `output`, and
/// [`Error::InstructionSet`] if the processor lacks the instruction set.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::linear::{self, Activation, Epilogue, Matrix, PackedWeight, Product, Right};
///
/// let instruction_set = InstructionSet::choose(None, false)?;
/// let xs = Matrix { data: &[1.0, 1.0, 2.0, 0.0], rows: 2, columns: 2, stride: 2, is_transposed: false };
/// // A weight of three outputs and two inputs.
/// let rows = Matrix { data: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows: 3, columns: 2, stride: 2, is_transposed: false };
/// let epilogue =
///     Epilogue { bias: Some(&[0.5, 0.0, -20.0]), activation: Some(Activation::Relu), ..Default::default() };
/// let product = Product { left: xs, right: Right::Matrix(rows.t(), instruction_set), epilogue, executor: None };
/// assert_eq!(linear::multiply_vec(&product)?, [3.5, 7.0, 0.0, 2.5, 6.0, 0.0]);
///
/// let weight = PackedWeight::new(rows.data, (3, 2), instruction_set)?;
/// let mut output = Box::new_uninit_slice(4);
/// linear::multiply(&Product { right: Right::Weight(&weight, 1..3), ..product }, &mut output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn multiply<X: ProductKernels>(product: &Product<X>, output: &mut [MaybeUninit<X>]) -> Result<(), Error> {
    X::multiply(product, output)
}

/// [`multiply`] into a vector that it allocates, in large pages if it is large.
///
/// # Errors
/// As [`multiply`], and [`Error::Memory`] if there is none for the output.
pub fn multiply_vec<X: ProductKernels>(product: &Product<X>) -> Result<Vec<X>, Error> {
    let mut output = Unwritten::new(&[product.check()?]).ok_or_else(|| product.no_memory())?;
    X::multiply(product, output.elements())?;
    // SAFETY: `multiply` initialises every element, or fails.
    Ok(unsafe { output.written() })
}
