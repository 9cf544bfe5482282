//! Linear layers of few rows.

use candle_core::{Result, Storage, Tensor};

use super::activation::Activation;
use super::outline::{self, OneLaunch, RowsCall};
use crate::attention::InputAddresses;
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch};
use crate::element::ElementType;
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer};
use crate::kernel_struct::kernel_struct;
use crate::program::{Define, KernelShape};
use crate::unsupported::Unsupported;

/// The number of bytes that a lane loads at once.
const LOAD_BYTES: usize = 16;

/// The numbers of rows that programs are compiled for.
const ROWS: [usize; 4] = [1, 2, 4, 8];

/// The warps that occupy a large device: the columns of a product are divided until a launch has this number. It is the
/// same for every device, so that all devices add in the same order.
const ENOUGH_WARPS: usize = 4096;

/// The largest width, and the largest number of outputs, so that offsets of columns are an i32.
pub(super) const MAX_SIZE: usize = 1 << 30;

/// `activation(x · Wᵀ + bias) · (x · Uᵀ + up bias) + residual`, for few rows. Sums are in f32. Without the factor the
/// result is rounded once; with it, both products are rounded first, like the results of separate operations.
///
/// A matrix product of cuBLAS reads the weights as fast, but takes longer to launch, and the bias, the activation, the
/// factor and the residual are further launches.
#[derive(Debug, Clone)]
pub struct LinearRowsCall {
    /// (M, K), f32, bf16 or f16; contiguous, with at most [`MAX_ROWS`](Self::MAX_ROWS) rows.
    pub xs: Tensor,
    /// The weight and the bias of the outputs.
    pub linear: LinearParameters,
    /// The activation of the outputs.
    pub activation: Option<Activation>,
    /// The weight and the bias of the factors of the activated outputs.
    pub up: Option<LinearParameters>,
    /// (M, N), contiguous, in the dtype of `xs`.
    pub residual: Option<Tensor>,
}

/// A weight and a bias, in the dtype of the inputs.
#[derive(Debug, Clone)]
pub struct LinearParameters {
    /// (N, K), contiguous.
    pub weight: Tensor,
    /// (N,), contiguous.
    pub bias: Option<Tensor>,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LinearShape {
    rows: usize,
    width: usize,
    outputs: usize,
    /// The number of pairs of products: an output and its factor, or two outputs. A warp computes both of a pair.
    pairs: usize,
    element: ElementType,
}

kernel_struct! {
    /// The only argument of the kernel of linear layers with few rows.
    ///
    /// M is `rows`, K is `width` and N is `outputs`. All tensors are contiguous. A pointer that a call does not need is
    /// null.
    pub struct LinearRowsArguments {
        // ---- tensors, all of elements ----
        /// (M, K).
        pub inputs: InputPointer<Elements>,
        /// (N, K).
        pub weights: InputPointer<Elements>,
        /// (N). May be null.
        pub biases: InputPointer<Elements>,
        /// (N, K): the factors of the activated outputs are another product. May be null.
        pub up_weights: InputPointer<Elements>,
        /// (N). May be null.
        pub up_biases: InputPointer<Elements>,
        /// (M, N), added to the outputs. May be null.
        pub residuals: InputPointer<Elements>,
        /// (M, N).
        pub output: OutputPointer<Elements>,
        // ---- sizes ----
        /// M, the number of rows, from 1 to LINEAR_ROWS.
        pub rows: i32,
        /// K, the number of columns of the inputs.
        pub width: i32,
        /// N, the number of outputs of a row.
        pub outputs: i32,
        /// The number of warps that share the columns of a product: 1, 2, 4 or 8.
        pub product_warps: i32,
        // ---- options ----
        /// Whether rows of inputs and weights begin and end at multiples of 16 bytes.
        pub is_aligned: i32,
        /// One of the constants in activations.cuh, or LINEAR_NO_ACTIVATION.
        pub activation: i32,
    }

    /// The number of warps of a block.
    pub(super) const LINEAR_WARPS: usize = 8;
    /// The activation of outputs that have none.
    pub(super) const LINEAR_NO_ACTIVATION: i32 = -1;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for LinearRowsArguments {}

impl RowsCall for LinearRowsCall {
    type Arguments = LinearRowsArguments;
    type Shape = LinearShape;

    const OPERATION: &'static str = "linear_rows";
    const SOURCE: &'static str = "linear_rows.cu";

    fn elements(&self) -> &Tensor {
        &self.xs
    }

    fn shape(&self) -> std::result::Result<LinearShape, Unsupported> {
        let element = ElementType::of(self.xs.dtype())?;
        let unsupported = |what: &str, tensor: &Tensor| {
            Err(Unsupported::new(format!("{what} has the shape {:?}, which no kernel takes", tensor.dims())))
        };
        let &[rows, width] = self.xs.dims() else { return unsupported("the input", &self.xs) };
        let &[outputs, _] = self.linear.weight.dims() else { return unsupported("the weight", &self.linear.weight) };
        if !(1..=Self::MAX_ROWS).contains(&rows) || !(1..=MAX_SIZE).contains(&width) {
            return unsupported("the input", &self.xs);
        }
        if !(1..=MAX_SIZE).contains(&outputs) {
            return unsupported("the weight", &self.linear.weight);
        }
        let pairs = if self.up.is_some() { outputs } else { outputs.div_ceil(2) };
        Ok(LinearShape { rows, width, outputs, pairs, element })
    }

    fn check(&self, shape: LinearShape) -> Result<()> {
        let LinearShape { rows, width, outputs, .. } = shape;
        let check = |name: &str, tensor: &Tensor, dims: &[usize]| {
            self.check_tensor(name, tensor, dims, self.xs.dtype())?;
            self.check_contiguous(name, tensor)
        };
        check("the input", &self.xs, &[rows, width])?;
        check("the weight", &self.linear.weight, &[outputs, width])?;
        if let Some(bias) = &self.linear.bias {
            check("the bias", bias, &[outputs])?;
        }
        if let Some(up) = &self.up {
            check("the factor's weight", &up.weight, &[outputs, width])?;
            if let Some(bias) = &up.bias {
                check("the factor's bias", bias, &[outputs])?;
            }
        }
        if let Some(residual) = &self.residual {
            check("the residual", residual, &[rows, outputs])?;
        }
        Ok(())
    }

    fn constants(shape: LinearShape) -> Vec<Define> {
        constants(shape.program_rows())
    }
}

impl LinearRowsCall {
    /// The largest number of rows. With more, a product of cuBLAS, on tensor cores, is the better choice.
    pub const MAX_ROWS: usize = ROWS[ROWS.len() - 1];

    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the output, (M, N), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        outline::forward(self)
    }
}

impl OneLaunch for LinearRowsCall {
    fn forward_launch(shape: LinearShape) -> Launch {
        let grid = Grid::linear(shape.pairs.div_ceil(LINEAR_WARPS / shape.product_warps()));
        Launch::new(kernel(shape.program_rows()), grid)
    }

    fn output_dims(&self, shape: LinearShape) -> Vec<usize> {
        vec![shape.rows, shape.outputs]
    }

    fn arguments<'t>(
        &'t self,
        shape: LinearShape,
        operands: &mut impl InputAddresses<'t>,
    ) -> Result<LinearRowsArguments> {
        let up = self.up.as_ref();
        let inputs = operands.input("inputs", &self.xs)?;
        let weights = operands.input("weights", &self.linear.weight)?;
        let up_weights = operands.optional_input("up_weights", up.map(|up| &up.weight))?;
        let row_bytes = (shape.width * shape.element.bytes()) as u64;
        let is_aligned = [inputs.address(), weights.address(), up_weights.address(), row_bytes]
            .iter()
            .all(|bytes| bytes.is_multiple_of(LOAD_BYTES as u64));
        Ok(LinearRowsArguments {
            inputs,
            weights,
            biases: operands.optional_input("biases", self.linear.bias.as_ref())?,
            up_weights,
            up_biases: operands.optional_input("up_biases", up.and_then(|up| up.bias.as_ref()))?,
            residuals: operands.optional_input("residuals", self.residual.as_ref())?,
            rows: shape.rows as i32,
            width: shape.width as i32,
            outputs: shape.outputs as i32,
            product_warps: shape.product_warps() as i32,
            is_aligned: is_aligned.into(),
            activation: self.activation.map_or(LINEAR_NO_ACTIVATION, Activation::code),
            ..LinearRowsArguments::default()
        })
    }

    fn set_output(arguments: &mut LinearRowsArguments, output: OutputPointer<Elements>) {
        arguments.output = output;
    }
}

impl LinearShape {
    /// Returns the number of rows that the program is compiled for.
    fn program_rows(self) -> usize {
        self.rows.next_power_of_two()
    }

    fn product_warps(self) -> usize {
        product_warps(self.pairs, (self.width * self.element.bytes()).div_ceil(LOAD_BYTES))
    }
}

/// Returns the number of warps that share the columns of a product: more than one if there are few products, as long as
/// each lane has one of the `loads` of a row of the weight.
pub(super) fn product_warps(pairs: usize, loads: usize) -> usize {
    let mut warps = 1;
    while warps < LINEAR_WARPS && pairs * warps < ENOUGH_WARPS && 2 * warps * 32 <= loads {
        warps *= 2;
    }
    warps
}

/// Returns the number of bytes of shared memory for the sums of up to `rows` rows, of which each warp has two.
pub(super) fn sums_bytes(rows: usize) -> usize {
    LINEAR_WARPS * 2 * rows * 4
}

/// Returns the constants of the program for at most `rows` rows.
fn constants(rows: usize) -> Vec<Define> {
    vec![Define { name: "LINEAR_ROWS", value: rows as i64 }]
}

/// Returns the kernel of the program for at most `rows` rows.
fn kernel(rows: usize) -> KernelShape {
    KernelShape { name: "linear_rows", threads: LINEAR_WARPS * 32, shared_bytes: sums_bytes(rows) }
}

/// Returns the programs of all element types and numbers of rows.
pub(super) fn entries() -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for element in ElementType::ALL {
        for rows in ROWS {
            let name = format!("linear rows {}, {rows}", element.name());
            let is_quick = rows == 1 || rows == LinearRowsCall::MAX_ROWS;
            let program = outline::program::<LinearRowsCall>(element, constants(rows));
            entries.push(CiProgram::new(&program, name, is_quick, vec![kernel(rows)]));
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_rows_divide_columns_until_warps_occupy_a_device() {
        let warps = |pairs: usize, width: usize| {
            LinearShape { rows: 1, width, outputs: pairs, pairs, element: ElementType::Bf16 }.product_warps()
        };
        assert_eq!(warps(16_000, 2048), 1);
        assert_eq!(warps(1024, 2048), 4);
        assert_eq!(warps(128, 2048), 8);
        assert_eq!(warps(128, 256), 1);
        assert_eq!(warps(1, 1), 1);
    }
}
