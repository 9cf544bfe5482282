//! The root mean square norm times an activated gate.

use candle_core::{DType, Result, Storage, Tensor};

use super::activation::Activation;
use super::outline::{self, OneLaunch, RowsCall, Run};
use super::{RowsShape, row_strides};
use crate::attention::InputAddresses;
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch, TensorLocks};
use crate::element::ElementType;
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides};
use crate::kernel_struct::kernel_struct;
use crate::program::{Define, KernelShape};
use crate::unsupported::Unsupported;

/// The largest size of a row, which a warp has in its registers.
const MAX_WIDTH: usize = 1024;

/// The most blocks whose gradients of weights are added up.
const MAX_PARTS: usize = 256;

const SUM: KernelShape = KernelShape { name: "gated_norm_sum_weights", threads: NORM_SUM_THREADS, shared_bytes: 0 };

/// `x / sqrt(mean(x²) + eps) · weight · activation(gate)` over the rows of heads. The last dimension of all tensors is
/// contiguous.
#[derive(Debug, Clone)]
pub struct GatedNormCall {
    /// (B, T, H, D), f32, bf16 or f16.
    pub xs: Tensor,
    /// (B, T, H, D), in the dtype of `xs`.
    pub gate: Tensor,
    /// (D,), or (H, D); contiguous, f32.
    pub weight: Tensor,
    /// The activation of the gate.
    pub activation: Activation,
    /// The number that is added to the mean square.
    pub eps: f64,
}

/// The gradients of a gated norm.
#[derive(Debug, Clone)]
pub struct GatedNormGradients {
    /// (B, T, H, D), in the dtype of the inputs.
    pub xs: Tensor,
    /// (B, T, H, D), in the dtype of the inputs.
    pub gate: Tensor,
    /// In the weight's shape, f32.
    pub weight: Tensor,
}

/// Returns the number of blocks that share the tokens of one head in the backward pass.
fn parts_of(shape: RowsShape) -> usize {
    shape.tokens().div_ceil(NORM_WARPS).min(MAX_PARTS)
}

kernel_struct! {
    /// The only argument of the kernels of the root mean square norm times an activated gate.
    ///
    /// B is `entries`, T is `tokens`, H is `heads` and D is NORM_WIDTH. A pointer that a call does not need is null.
    pub struct GatedNormArguments {
        // ---- tensors ----
        /// (B, T, H, D), elements.
        pub inputs: InputPointer<Elements>,
        /// (B, T, H, D), elements, before the activation.
        pub gates: InputPointer<Elements>,
        /// (D), or (H, D).
        pub weights: InputPointer<f32>,
        /// (B, T, H, D), elements, contiguous.
        pub output: OutputPointer<Elements>,
        // ---- tensors of the backward pass ----
        /// (B, T, H, D), elements.
        pub output_gradient: InputPointer<Elements>,
        /// (B, T, H, D), elements, contiguous.
        pub input_gradient: OutputPointer<Elements>,
        /// (B, T, H, D), elements, contiguous. May be null.
        pub gate_gradient: OutputPointer<Elements>,
        /// (parts, H, D).
        pub weight_gradient_parts: OutputPointer<f32>,
        /// As weights. May be null.
        pub weight_gradient: OutputPointer<f32>,
        // ---- strides, in elements ----
        /// The strides of `inputs`.
        pub input_strides: RowStrides,
        /// The strides of `gates`.
        pub gate_strides: RowStrides,
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
        /// The number of blocks of a head in the backward pass.
        pub parts: i32,
        // ---- options and numbers ----
        /// One of ACTIVATION_SIGMOID, ACTIVATION_SOFTPLUS and ACTIVATION_SILU.
        pub activation: i32,
        /// The number that is added to the mean square.
        pub epsilon: f32,
    }

    /// The number of warps of a block, each of which has a row.
    const NORM_WARPS: usize = 8;
    /// The number of threads of a block of the kernel that adds up the gradients of weights.
    const NORM_SUM_THREADS: usize = 128;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for GatedNormArguments {}

impl RowsCall for GatedNormCall {
    type Arguments = GatedNormArguments;
    type Shape = RowsShape;

    const OPERATION: &'static str = "gated_norm";
    const SOURCE: &'static str = "gated_norm.cu";

    fn elements(&self) -> &Tensor {
        &self.xs
    }

    fn shape(&self) -> std::result::Result<RowsShape, Unsupported> {
        let shape = RowsShape::of(&self.xs)?;
        if shape.d > MAX_WIDTH {
            let dims = self.xs.dims();
            return Err(Unsupported::new(format!("the rows have the shape {dims:?}, which no kernel takes")));
        }
        forward_launch(shape).check()?;
        backward_launch(shape).check()?;
        Ok(shape)
    }

    fn check(&self, shape: RowsShape) -> Result<()> {
        self.check_tensor("the input", &self.xs, &shape.dims(), self.xs.dtype())?;
        self.check_tensor("gate", &self.gate, &shape.dims(), self.xs.dtype())?;
        if self.weight.rank() == 1 {
            self.check_tensor("weight", &self.weight, &[shape.d], DType::F32)?;
        } else {
            self.check_tensor("weight", &self.weight, &[shape.h, shape.d], DType::F32)?;
        }
        self.check_contiguous("weight", &self.weight)
    }

    fn constants(shape: RowsShape) -> Vec<Define> {
        constants(shape.d)
    }
}

impl GatedNormCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the output, (B, T, H, D), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        outline::forward(self)
    }

    /// Computes the gradients of all inputs from the gradient of the output, (B, T, H, D).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor) -> Result<GatedNormGradients> {
        let run = Run::start(self)?;
        let shape = run.shape;
        self.check_tensor("the output's gradient", gradient, &shape.dims(), self.xs.dtype())?;
        let mut of_xs = run.elements(shape.elements())?;
        let mut of_gate = run.elements(shape.elements())?;
        let mut parts = run.allocate(DType::F32, parts_of(shape) * shape.h * shape.d)?;
        let mut of_weight = run.allocate(DType::F32, self.weight.elem_count())?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let mut arguments = self.arguments(shape, &mut operands)?;
        arguments.output_gradient = operands.input("output_gradient", gradient)?;
        arguments.output_gradient_strides = row_strides(gradient);
        arguments.input_gradient = operands.output("input_gradient", &mut of_xs)?;
        arguments.gate_gradient = operands.output("gate_gradient", &mut of_gate)?;
        arguments.weight_gradient_parts = operands.output("weight_gradient_parts", &mut parts)?;
        arguments.weight_gradient = operands.output("weight_gradient", &mut of_weight)?;
        run.launch(&operands, &backward_launch(shape), &arguments)?;
        let grid = Grid::linear(self.weight.elem_count().div_ceil(NORM_SUM_THREADS));
        run.launch(&operands, &Launch::new(SUM, grid), &arguments)?;
        operands.finish();
        Ok(GatedNormGradients {
            xs: of_xs.into_tensor(&shape.dims())?,
            gate: of_gate.into_tensor(&shape.dims())?,
            weight: of_weight.into_tensor(self.weight.shape())?,
        })
    }
}

impl OneLaunch for GatedNormCall {
    fn forward_launch(shape: RowsShape) -> Launch {
        forward_launch(shape)
    }

    fn output_dims(&self, shape: RowsShape) -> Vec<usize> {
        shape.dims().to_vec()
    }

    fn arguments<'t>(&'t self, shape: RowsShape, operands: &mut impl InputAddresses<'t>) -> Result<GatedNormArguments> {
        Ok(GatedNormArguments {
            inputs: operands.input("inputs", &self.xs)?,
            gates: operands.input("gates", &self.gate)?,
            weights: operands.input("weights", &self.weight)?,
            input_strides: row_strides(&self.xs),
            gate_strides: row_strides(&self.gate),
            weight_head_stride: if self.weight.rank() == 1 { 0 } else { shape.d as i64 },
            entries: shape.b as i32,
            tokens: shape.t as i32,
            heads: shape.h as i32,
            parts: parts_of(shape) as i32,
            activation: self.activation.code(),
            epsilon: self.eps as f32,
            ..GatedNormArguments::default()
        })
    }

    fn set_output(arguments: &mut GatedNormArguments, output: OutputPointer<Elements>) {
        arguments.output = output;
    }
}

/// Returns the constants of the program for a size of rows.
fn constants(width: usize) -> Vec<Define> {
    vec![Define { name: "NORM_WIDTH", value: width as i64 }]
}

/// Returns the programs of the usual sizes of rows.
pub(super) fn entries() -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for element in ElementType::ALL {
        for width in [64, 128, 256] {
            let shape = RowsShape { b: 1, t: 1, h: 1, d: width };
            let kernels = vec![forward_launch(shape).kernel_shape(), backward_launch(shape).kernel_shape(), SUM];
            let name = format!("gated norm {} d{width}", element.name());
            let program = outline::program::<GatedNormCall>(element, constants(width));
            entries.push(CiProgram::new(&program, name, width == 128, kernels));
        }
    }
    entries
}

/// Returns the launch of the forward pass.
fn forward_launch(shape: RowsShape) -> Launch {
    let grid = Grid { x: shape.tokens().div_ceil(NORM_WARPS), y: shape.h, z: 1 };
    Launch { kernel: "gated_norm_forward", grid, threads: NORM_WARPS * 32, shared_bytes: 0 }
}

/// Returns the launch of the backward pass, with a row of gradients of weights for each warp in shared memory.
fn backward_launch(shape: RowsShape) -> Launch {
    Launch {
        kernel: "gated_norm_backward",
        grid: Grid { x: parts_of(shape), y: shape.h, z: 1 },
        threads: NORM_WARPS * 32,
        shared_bytes: NORM_WARPS * shape.d.next_multiple_of(32) * 4,
    }
}
