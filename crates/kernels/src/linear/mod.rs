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
//! They serve a weight that is not packed too ([`multiply`]), since training changes it after each call: a block of a
//! panel is then put in order for the rows of one task. The gradient of the inputs reads a weight the other way round
//! ([`input_gradient`]), that of the weight reads both of its operands the other way round.

mod operands;
mod pack;
mod task;
#[cfg(test)]
mod tests;
mod weight;

pub use crate::cpu::CODE_BLOCK;
pub use pack::Codes;
pub use task::{Activation, Epilogue, Up};
pub use weight::PackedWeight;

use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use crate::cpu::{Executor, Tier, Unwritten};
use crate::error::{Error, check_len, check_tier};
use crate::number::Number;
use operands::{Left, Right, depth_start};
use pack::pack_weight;
use task::{Product, run};
use weight::unpack_rows;

/// An element whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used.
pub trait ProductKernels: Number {
    /// Initialises an output. The product was checked before it was made, and nobody else can make one.
    fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]);
    /// [`PackedWeight::new`].
    ///
    /// # Errors
    /// As there.
    fn pack(rows: &[Self], shape: (usize, usize), tier: Tier) -> Result<PackedWeight, Error>;
    /// [`PackedWeight::unpack_rows`].
    ///
    /// # Errors
    /// As there.
    fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error>;
}

macro_rules! multiply {
    ($($type:ty),*) => {
        $(impl ProductKernels for $type {
            fn multiply(product: &Product<Self>, output: &mut [MaybeUninit<Self>]) {
                run(product, output)
            }

            fn pack(rows: &[Self], shape: (usize, usize), tier: Tier) -> Result<PackedWeight, Error> {
                pack_weight(rows, shape, tier)
            }

            fn unpack_rows(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<Self>, Error> {
                unpack_rows(weight, outputs)
            }
        })*
    };
}

multiply!(f32, bf16, f16);

/// The operands of [`project`]: `xs · weightᵀ` for some of the weight's outputs, and what follows.
#[derive(Clone, Debug)]
pub struct Projection<'a, X> {
    /// The weight, of any element.
    pub weight: &'a PackedWeight,
    /// `rows` rows of the weight's inputs, `xs_row` elements apart.
    pub xs: &'a [X],
    /// The elements from the beginning of one row of `xs` to the next.
    pub xs_row: usize,
    /// The rows of `xs`.
    pub rows: usize,
    /// The outputs that are computed.
    pub columns: Range<usize>,
    /// Bias, activation, gate and residual.
    pub epilogue: Epilogue<'a, X>,
    /// Runs the call if it is brief; rayon otherwise.
    pub executor: Option<Executor>,
}

impl<'a, X> Projection<'a, X> {
    /// The elements of the result.
    ///
    /// # Errors
    /// If the columns lie outside of the weight or a row outside of its slice, if the epilogue does not fit, or if no
    /// memory can hold as many.
    fn output_len(&self) -> Result<usize, Error> {
        let Self { weight, xs, xs_row, rows, ref columns, ref epilogue, .. } = *self;
        let (inputs, outputs) = (weight.inputs(), weight.outputs());
        if columns.start > columns.end || columns.end > outputs {
            return Err(Error::Shape(format!("expected columns within {outputs} outputs, found {columns:?}")));
        }
        let count = output_len::<X>(rows, columns.len())?;
        let end = (rows.saturating_sub(1)).checked_mul(xs_row).and_then(|last| last.checked_add(inputs));
        if count > 0 && end.is_none_or(|end| end > xs.len()) {
            let found = xs.len();
            return Err(Error::Shape(format!(
                "expected {rows} rows of {inputs} elements, {xs_row} apart, found {found} elements"
            )));
        }
        epilogue.check(weight, count)?;
        Ok(count)
    }
}

/// Multiplies rows with a packed weight, on the executor or on the threads of the current rayon pool: (rows, columns)
/// in `output`. On success every element of it is initialised.
///
/// # Errors
/// [`Error::Shape`] if a slice is shorter than the sizes need, the columns lie outside of the weight, the epilogue does
/// not fit it, or `output` has another length.
///
/// ```
/// use candle_attention_kernels::Tier;
/// use candle_attention_kernels::linear::{self, Activation, Epilogue, PackedWeight, Projection};
///
/// // Three outputs of two inputs.
/// let weight = PackedWeight::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2), Tier::choose(None, false)?)?;
/// let projection = Projection {
///     weight: &weight,
///     xs: &[1.0, 1.0, 2.0, 0.0],
///     xs_row: 2,
///     rows: 2,
///     columns: 0..3,
///     epilogue: Epilogue { bias: Some(&[0.5, 0.0, -20.0]), activation: Some(Activation::Relu), ..Default::default() },
///     executor: None,
/// };
/// assert_eq!(linear::project_vec(&projection)?, [3.5, 7.0, 0.0, 2.5, 6.0, 0.0]);
///
/// let mut output = Box::new_uninit_slice(4);
/// linear::project(&Projection { columns: 1..3, ..projection }, &mut output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn project<X: ProductKernels>(projection: &Projection<X>, output: &mut [MaybeUninit<X>]) -> Result<(), Error> {
    check_len("output", output.len(), projection.output_len()?)?;
    let &Projection { weight, xs, xs_row, rows, ref columns, epilogue, executor } = projection;
    let matrix = Matrix { data: xs, rows, columns: weight.inputs(), stride: xs_row, is_transposed: false };
    let up = epilogue.up.map_or(weight, |up| up.weight);
    let product = Product {
        left: Left { matrix, lead: 0 },
        rights: &[Right::Weight(weight), Right::Weight(up)][..1 + usize::from(epilogue.up.is_some())],
        columns: columns.clone(),
        epilogue,
        executor,
        tier: weight.tier(),
    };
    X::multiply(&product, output);
    Ok(())
}

/// [`project`] into a vector that it allocates, in large pages if it is large.
///
/// # Errors
/// As [`project`], and [`Error::Memory`] if there is none for the output.
pub fn project_vec<X: ProductKernels>(projection: &Projection<X>) -> Result<Vec<X>, Error> {
    let (rows, columns) = (projection.rows, projection.columns.len());
    projection.output_len()?;
    // SAFETY: `project` initialises every element, or fails.
    unsafe { filled(rows, columns, |output| project(projection, output)) }
}

/// The elements of an output.
///
/// # Errors
/// If no memory can hold as many.
fn output_len<X>(rows: usize, columns: usize) -> Result<usize, Error> {
    let count = rows.checked_mul(columns).filter(|&count| count.checked_mul(size_of::<X>()).is_some());
    count.ok_or_else(|| Error::Memory(format!("an output of {rows} rows of {columns}")))
}

/// An output (rows, columns) that `fill` writes.
///
/// # Safety
/// On success `fill` has initialised every element.
unsafe fn filled<X>(
    rows: usize,
    columns: usize,
    fill: impl FnOnce(&mut [MaybeUninit<X>]) -> Result<(), Error>,
) -> Result<Vec<X>, Error> {
    let count = output_len::<X>(rows, columns)?;
    let no_memory = || Error::Memory(format!("an output of {rows} rows of {columns}"));
    let mut output = Unwritten::new(&[count]).ok_or_else(no_memory)?;
    fill(output.elements())?;
    // SAFETY: `fill` initialised them, by this function's contract.
    Ok(unsafe { output.written() })
}

/// The output of a product, (rows, columns).
fn multiplied<X: ProductKernels>(product: &Product<X>) -> Result<Vec<X>, Error> {
    let fill = |output: &mut [MaybeUninit<X>]| {
        X::multiply(product, output);
        Ok(())
    };
    // SAFETY: a product initialises every element.
    unsafe { filled(product.left.matrix.rows, product.columns.len(), fill) }
}

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
/// [`project`] gives for the same numbers in a packed weight.
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
