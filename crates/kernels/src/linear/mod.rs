//! Products of rows of input with a packed weight, and the products of the backward pass.
//!
//! ```text
//! copy the rows' inputs                                            in blocks of inputs
//! for each chunk of rows and of panels:                        a task
//!     for each block of inputs:
//!         for each panel:  sums = sums + inputs · weight       (rows, panel)
//!     outputs = epilogue(sums)
//! ```
//!
//! The same loops serve one row and thousands. A block of a panel is read once for all rows of a task, so for few rows
//! the weight streams through once, and for many it stays in the second cache while rows pass. The inputs of an output
//! are summed in blocks of one length, from the first to the last, for any number of rows, columns and threads. So the
//! bits of an output depend on its row and its weights alone.
//!
//! The right operand may also be a matrix in memory ([`Right::Matrix`]), for a weight that training changes after each
//! call: a block of a panel is then copied for the rows of one task. The gradient of the inputs reads a transposed
//! weight ([`Right::Transposed`]), and the gradient of the weight reads both of its operands transposed.

mod code_numbers;
mod code_packing;
mod code_panels;
mod code_scales;
mod codes;
mod epilogue;
mod left_copy;
mod matrix;
mod operands;
mod pack;
mod product;
mod split;
mod task;
#[cfg(test)]
mod tests;
mod weight;

pub use crate::cpu::{CODE_BLOCK, NESTED_BLOCK};
pub use code_panels::{PanelPacker, PanelReader};
pub use codes::{Codes, NestedScales, Scales, Values};
pub use epilogue::{Activation, Epilogue, Up};
pub use matrix::Matrix;
pub use operands::Right;
pub use product::Product;
pub use weight::{PackedWeight, WeightShape};

use std::mem::MaybeUninit;

use half::{bf16, f16};

use crate::cpu::{InstructionSet, Unwritten};
use crate::error::Error;
use crate::number::Number;

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used.
pub trait ProductKernels: Number {
    /// Computes a product as [`multiply`] does.
    ///
    /// # Errors
    /// As [`multiply`].
    fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]) -> Result<(), Error>;
    /// Packs a weight as [`PackedWeight::new`] does.
    ///
    /// # Errors
    /// As [`PackedWeight::new`].
    fn pack(rows: &[Self], shape: WeightShape, instruction_set: InstructionSet) -> Result<PackedWeight, Error>;
    /// Unpacks rows of a weight as [`PackedWeight::unpack_rows`] does.
    ///
    /// # Errors
    /// As [`PackedWeight::unpack_rows`].
    fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error>;
}

macro_rules! multiply {
    ($($type:ty),*) => {
        $(impl ProductKernels for $type {
            fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]) -> Result<(), Error> {
                task::run(product, output)
            }

            fn pack(rows: &[Self], shape: WeightShape, instruction_set: InstructionSet) -> Result<PackedWeight, Error> {
                pack::pack_weight(rows, shape, instruction_set)
            }

            fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error> {
                weight::unpack_rows(weight, outputs)
            }
        })*
    };
}

multiply!(f32, bf16, f16);

impl PackedWeight {
    /// Packs `rows`, a contiguous matrix of shape (out, in), for products on an instruction set.
    ///
    /// # Errors
    /// [`Error::Shape`] if `rows` has another length, [`Error::InstructionSet`] if the processor lacks the instruction
    /// set, [`Error::Memory`] if there is no memory for a copy.
    ///
    /// ```
    /// use candle_attention_kernels::InstructionSet;
    /// use candle_attention_kernels::linear::{PackedWeight, WeightShape};
    ///
    /// let shape = WeightShape { outputs: 3, inputs: 2 };
    /// let weight = PackedWeight::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape, InstructionSet::Scalar)?;
    /// assert_eq!((weight.outputs(), weight.inputs()), (3, 2));
    /// assert_eq!(weight.unpack::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), candle_attention_kernels::Error>(())
    /// ```
    pub fn new<E: ProductKernels>(
        rows: &[E],
        shape: WeightShape,
        instruction_set: InstructionSet,
    ) -> Result<Self, Error> {
        E::pack(rows, shape, instruction_set)
    }

    /// Returns the rows that were packed, (out, in). Of codes it returns the numbers in f32.
    ///
    /// # Errors
    /// [`Error::Shape`] if E is not the type that was packed, [`Error::Memory`] if there is no memory for the rows.
    pub fn unpack<E: ProductKernels>(&self) -> Result<Vec<E>, Error> {
        // A weight without inputs may have any number of outputs.
        let outputs = if self.inputs() == 0 { 0 } else { self.outputs() };
        self.unpack_rows(&(0..outputs).collect::<Vec<_>>())
    }

    /// Returns the rows of some outputs, in any order: (`outputs.len()`, in).
    ///
    /// # Errors
    /// As [`unpack`](Self::unpack), and [`Error::Shape`] for an output that the weight does not have.
    pub fn unpack_rows<E: ProductKernels>(&self, outputs: &[usize]) -> Result<Vec<E>, Error> {
        E::unpack_rows(self, outputs)
    }
}

/// Computes a product on the calling thread and on helper threads. On success every element of `output`
/// is initialised. The bits of the result are the same for a packed weight and for the same numbers in memory.
///
/// # Errors
/// [`Error::Shape`] if the sizes of the operands, their slices, the epilogue and `output` do not fit each other, and
/// [`Error::InstructionSet`] if the processor lacks the instruction set.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::linear::{
///     self, Activation, Epilogue, Matrix, PackedWeight, Product, Right, WeightShape,
/// };
///
/// let instruction_set = InstructionSet::choose(None, false)?;
/// let xs = Matrix { data: &[1.0, 1.0, 2.0, 0.0], rows: 2, columns: 2, stride: 2, is_transposed: false };
/// // A weight of three outputs and two inputs.
/// let rows = Matrix { data: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], rows: 3, columns: 2, stride: 2, is_transposed: false };
/// let epilogue =
///     Epilogue { bias: Some(&[0.5, 0.0, -20.0]), activation: Some(Activation::Relu), ..Default::default() };
/// let right = Right::Matrix { matrix: rows.t(), instruction_set };
/// let product = Product { left: xs, right, epilogue };
/// assert_eq!(linear::multiply_vec(&product)?, [3.5, 7.0, 0.0, 2.5, 6.0, 0.0]);
///
/// let weight = PackedWeight::new(rows.data, WeightShape { outputs: 3, inputs: 2 }, instruction_set)?;
/// let right = Right::Weight { weight: &weight, outputs: 1..3 };
/// let mut output = Box::new_uninit_slice(4);
/// linear::multiply(&Product { right, ..product }, &mut output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn multiply<X: ProductKernels>(product: &Product<X>, output: &mut [MaybeUninit<X>]) -> Result<(), Error> {
    X::multiply(product, output)
}

/// Computes a product, as [`multiply`] does, into a new vector, in large pages if it is large.
///
/// # Errors
/// As [`multiply`], and [`Error::Memory`] if there is no memory for the output.
pub fn multiply_vec<X: ProductKernels>(product: &Product<X>) -> Result<Vec<X>, Error> {
    let mut output = Unwritten::new(&[product.check()?]).ok_or_else(|| product.no_memory())?;
    X::multiply(product, output.elements())?;
    // SAFETY: `multiply` initialises every element, or fails.
    Ok(unsafe { output.into_vec() })
}
