//! Norms over rows.

use candle_core::{DType, Result, Storage, Tensor};

use super::outline::{self, OneLaunch, RowsCall, Run};
use super::{RowsShape, row_strides};
use crate::attention::InputAddresses;
use crate::ci_programs::CiProgram;
use crate::device::{DeviceBuffer, Grid, KernelArguments, Launch, TensorLocks};
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides};
use crate::kernel_struct::kernel_struct;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

/// The widest rows that one warp computes.
const WARP_WIDTH: usize = 512;

/// The most parts whose gradients of weights are added up, and the fewest rows of one, unless there is only one part.
const MAX_PARTS: usize = 128;
const PART_ROWS: usize = 16;

/// The kernels that add up gradients of weights and biases.
const PARAMETER_GRADIENTS: KernelShape =
    KernelShape { name: "norm_parameter_gradients", threads: ROW_NORM_COLUMNS, shared_bytes: 0 };
const PARAMETER_SUMS: KernelShape =
    KernelShape { name: "norm_sum_parameters", threads: ROW_NORM_COLUMNS, shared_bytes: 0 };

/// `(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias` over rows, or with a mean of 0. The last dimension of all
/// tensors is contiguous.
#[derive(Debug, Clone)]
pub struct NormCall {
    /// (B, T, H, D), f32, bf16 or f16.
    pub xs: Tensor,
    /// (D,), or (H, D) with a weight for each head; contiguous, f32.
    pub weight: Tensor,
    /// As `weight`.
    pub bias: Option<Tensor>,
    /// Whether the mean of a row is subtracted. Without it the variance is the mean square.
    pub subtracts_mean: bool,
    /// The number that is added to the variance.
    pub eps: f64,
}

/// The gradients that a call computes besides that of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormParameterGradients {
    /// The weight and the bias are constants.
    None,
    /// Gradients of the weight, and of the bias if there is one.
    All,
}

/// The gradients of a norm.
#[derive(Debug, Clone)]
pub struct NormGradients {
    /// (B, T, H, D), in the dtype of the inputs.
    pub xs: Tensor,
    /// In the weight's shape, f32; `None` if not requested.
    pub weight: Option<Tensor>,
    /// In the bias's shape, f32; `None` if not requested.
    pub bias: Option<Tensor>,
}

/// Returns the number of warps that compute a row.
fn row_warps(shape: RowsShape) -> usize {
    if shape.d <= WARP_WIDTH { 1 } else { ROW_NORM_WARPS }
}

/// Returns the number of parts of the rows that share a weight.
fn weight_parts(shape: RowsShape, has_weights_of_heads: bool) -> usize {
    let rows = if has_weights_of_heads { shape.tokens() } else { shape.rows() };
    rows.div_ceil(PART_ROWS).min(MAX_PARTS)
}

kernel_struct! {
    /// The only argument of the kernels of norms over rows.
    ///
    /// B is `entries`, T is `tokens`, H is `heads` and D is `width`. A pointer that a call does not need is null.
    pub struct NormArguments {
        // ---- tensors ----
        /// (B, T, H, D), elements.
        pub inputs: InputPointer<Elements>,
        /// (D), or (H, D).
        pub weights: InputPointer<f32>,
        /// As weights. May be null.
        pub biases: InputPointer<f32>,
        /// (B, T, H, D), elements, contiguous.
        pub output: OutputPointer<Elements>,
        // ---- tensors of the backward pass ----
        /// (B, T, H, D), elements.
        pub output_gradient: InputPointer<Elements>,
        /// (B, T, H, D), elements, contiguous.
        pub input_gradient: OutputPointer<Elements>,
        /// (B, T, H): the mean of each row, 0 without subtracts_mean.
        pub means: OutputPointer<f32>,
        /// (B, T, H): 1 / sqrt(variance + epsilon).
        pub factors: OutputPointer<f32>,
        /// (parts, number of weights).
        pub weight_gradient_parts: OutputPointer<f32>,
        /// As weight_gradient_parts. May be null.
        pub bias_gradient_parts: OutputPointer<f32>,
        /// As weights.
        pub weight_gradient: OutputPointer<f32>,
        /// As weights. May be null.
        pub bias_gradient: OutputPointer<f32>,
        // ---- strides, in elements ----
        /// The strides of `inputs`.
        pub input_strides: RowStrides,
        /// The strides of `output_gradient`.
        pub output_gradient_strides: RowStrides,
        /// D, or 0 if all heads have the same weights.
        pub weight_head_stride: i64,
        // ---- sizes ----
        /// B, the number of entries of the batch.
        pub entries: i32,
        /// T, the number of tokens of an entry.
        pub tokens: i32,
        /// H, the number of heads.
        pub heads: i32,
        /// D, the number of columns of a row.
        pub width: i32,
        /// The number of groups of rows whose gradients of weights are added up separately.
        pub parts: i32,
        // ---- options and numbers ----
        /// The number of warps that compute a row: 1, or ROW_NORM_WARPS.
        pub row_warps: i32,
        /// 1: the mean of a row is subtracted; 0: its variance is the mean square.
        pub subtracts_mean: i32,
        /// The number that is added to the variance.
        pub epsilon: f32,
    }

    /// The number of warps of a block of the kernels that compute rows.
    const ROW_NORM_WARPS: usize = 8;
    /// The bytes of shared memory of a block of these kernels, for a number of each warp.
    const ROW_NORM_SHARED: usize = ROW_NORM_WARPS * 4;
    /// The number of columns of a block of the kernels that add up gradients of weights and biases.
    const ROW_NORM_COLUMNS: usize = 128;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for NormArguments {}

impl RowsCall for NormCall {
    type Arguments = NormArguments;
    type Shape = RowsShape;

    const OPERATION: &'static str = "norm";
    const SOURCE: &'static str = "norm.cu";

    fn elements(&self) -> &Tensor {
        &self.xs
    }

    fn shape(&self) -> std::result::Result<RowsShape, Unsupported> {
        let shape = RowsShape::of(&self.xs)?;
        row_launch("norm_forward", shape).check()?;
        self.parameter_launch(shape).check()?;
        Ok(shape)
    }

    fn check(&self, shape: RowsShape) -> Result<()> {
        self.check_tensor("the input", &self.xs, &shape.dims(), self.xs.dtype())?;
        let parameter_dims = if self.weight.rank() == 1 { vec![shape.d] } else { vec![shape.h, shape.d] };
        let parameters = [("weight", Some(&self.weight)), ("bias", self.bias.as_ref())];
        for (name, parameter) in parameters {
            let Some(parameter) = parameter else { continue };
            self.check_tensor(name, parameter, &parameter_dims, DType::F32)?;
            self.check_contiguous(name, parameter)?;
        }
        Ok(())
    }
}

impl NormCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Returns the launch of the kernel that adds up gradients of weights and biases of some rows.
    fn parameter_launch(&self, shape: RowsShape) -> Launch {
        let has_weights_of_heads = self.weight.rank() > 1;
        let heads = if has_weights_of_heads { shape.h } else { 1 };
        let grid =
            Grid { x: shape.d.div_ceil(ROW_NORM_COLUMNS), y: weight_parts(shape, has_weights_of_heads), z: heads };
        Launch::new(PARAMETER_GRADIENTS, grid)
    }

    /// Computes the output, (B, T, H, D), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        outline::forward(self)
    }

    /// Computes the gradients from the gradient of the output, (B, T, H, D).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor, wanted: NormParameterGradients) -> Result<NormGradients> {
        let run = Run::start(self)?;
        let shape = run.shape;
        self.check_tensor("the output's gradient", gradient, &shape.dims(), self.xs.dtype())?;
        let count = self.weight.elem_count();
        let wants_weight = wanted == NormParameterGradients::All;
        let wants_bias = wants_weight && self.bias.is_some();
        let parts = weight_parts(shape, self.weight.rank() > 1);
        let mut of_xs = run.elements(shape.elements())?;
        let mut means = run.allocate(DType::F32, shape.rows())?;
        let mut factors = run.allocate(DType::F32, shape.rows())?;
        let mut weight_parts = allocate_if(wants_weight, &run, parts * count)?;
        let mut bias_parts = allocate_if(wants_bias, &run, parts * count)?;
        let mut of_weight = allocate_if(wants_weight, &run, count)?;
        let mut of_bias = allocate_if(wants_bias, &run, count)?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let mut arguments = self.arguments(shape, &mut operands)?;
        arguments.parts = parts as i32;
        arguments.output_gradient = operands.input("output_gradient", gradient)?;
        arguments.output_gradient_strides = row_strides(gradient);
        arguments.input_gradient = operands.output("input_gradient", &mut of_xs)?;
        arguments.means = operands.output("means", &mut means)?;
        arguments.factors = operands.output("factors", &mut factors)?;
        arguments.weight_gradient_parts = operands.optional_output("weight_gradient_parts", weight_parts.as_mut())?;
        arguments.bias_gradient_parts = operands.optional_output("bias_gradient_parts", bias_parts.as_mut())?;
        arguments.weight_gradient = operands.optional_output("weight_gradient", of_weight.as_mut())?;
        arguments.bias_gradient = operands.optional_output("bias_gradient", of_bias.as_mut())?;
        run.launch(&operands, &row_launch("norm_backward", shape), &arguments)?;
        if wants_weight {
            run.launch(&operands, &self.parameter_launch(shape), &arguments)?;
            let sums_grid = Grid::linear(count.div_ceil(ROW_NORM_COLUMNS));
            run.launch(&operands, &Launch::new(PARAMETER_SUMS, sums_grid), &arguments)?;
        }
        operands.finish();
        Ok(NormGradients {
            xs: of_xs.into_tensor(&shape.dims())?,
            weight: of_weight.map(|buffer| buffer.into_tensor(self.weight.shape())).transpose()?,
            bias: of_bias.map(|buffer| buffer.into_tensor(self.weight.shape())).transpose()?,
        })
    }
}

impl OneLaunch for NormCall {
    fn forward_launch(shape: RowsShape) -> Launch {
        row_launch("norm_forward", shape)
    }

    fn output_dims(&self, shape: RowsShape) -> Vec<usize> {
        shape.dims().to_vec()
    }

    fn arguments<'t>(&'t self, shape: RowsShape, operands: &mut impl InputAddresses<'t>) -> Result<NormArguments> {
        Ok(NormArguments {
            inputs: operands.input("inputs", &self.xs)?,
            weights: operands.input("weights", &self.weight)?,
            biases: operands.optional_input("biases", self.bias.as_ref())?,
            input_strides: row_strides(&self.xs),
            weight_head_stride: if self.weight.rank() == 1 { 0 } else { shape.d as i64 },
            entries: shape.b as i32,
            tokens: shape.t as i32,
            heads: shape.h as i32,
            width: shape.d as i32,
            row_warps: row_warps(shape) as i32,
            subtracts_mean: self.subtracts_mean.into(),
            epsilon: self.eps as f32,
            ..NormArguments::default()
        })
    }

    fn set_output(arguments: &mut NormArguments, output: OutputPointer<Elements>) {
        arguments.output = output;
    }
}

/// Allocates floats if `is_wanted`.
fn allocate_if(is_wanted: bool, run: &Run<NormCall>, count: usize) -> Result<Option<DeviceBuffer>> {
    if is_wanted { run.allocate(DType::F32, count).map(Some) } else { Ok(None) }
}

/// Returns the shape of a kernel that computes rows.
fn row_kernel(name: &'static str) -> KernelShape {
    KernelShape { name, threads: ROW_NORM_WARPS * 32, shared_bytes: ROW_NORM_SHARED }
}

/// Returns the launch of a kernel that computes rows.
fn row_launch(kernel: &'static str, shape: RowsShape) -> Launch {
    let blocks = shape.rows().div_ceil(ROW_NORM_WARPS / row_warps(shape));
    Launch::new(row_kernel(kernel), Grid::linear(blocks))
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CiProgram> {
    let kernels = [row_kernel("norm_forward"), row_kernel("norm_backward"), PARAMETER_GRADIENTS, PARAMETER_SUMS];
    outline::entries_of::<NormCall>("norm", &kernels)
}
