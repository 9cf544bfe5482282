//! Values times an activated gate.

use candle_core::{Result, Storage, Tensor};

use super::activation::Activation;
use super::outline::{self, OneLaunch, RowsCall, Run};
use super::{RowsShape, row_strides};
use crate::attention::InputAddresses;
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch, TensorLocks};
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides};
use crate::kernel_struct::kernel_struct;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

/// The number of columns of a warp in a row whose gate is as wide.
const COLUMNS: usize = 256;

const FORWARD: KernelShape = KernelShape { name: "gate_forward", threads: GATE_WARPS * 32, shared_bytes: 0 };
const BACKWARD: KernelShape = KernelShape { name: "gate_backward", threads: GATE_WARPS * 32, shared_bytes: 0 };

/// `activation(gate) · value`, computed in f32 and rounded once. The last dimension of all tensors is contiguous.
#[derive(Debug, Clone)]
pub struct GateCall {
    /// (B, T, H, D), or (B, T, H, 1) with a number for each row, in the dtype of `values`; before the activation.
    pub gates: Tensor,
    /// (B, T, H, D), f32, bf16 or f16.
    pub values: Tensor,
    /// The activation of the gate.
    pub activation: Activation,
}

/// The gradients of a gate and of the values that it multiplies.
#[derive(Debug, Clone)]
pub struct GateGradients {
    /// In the shape and the dtype of the gates.
    pub gates: Tensor,
    /// In the shape and the dtype of the values.
    pub values: Tensor,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct GateShape {
    values: RowsShape,
    /// D, or 1.
    gate_width: usize,
}

impl GateShape {
    fn gate_dims(self) -> [usize; 4] {
        RowsShape { d: self.gate_width, ..self.values }.dims()
    }

    /// Returns the number of columns of a warp.
    fn columns(self) -> usize {
        let width = self.values.d;
        if self.gate_width == width { COLUMNS.min(width) } else { width }
    }
}

kernel_struct! {
    /// The only argument of the kernels of gates.
    ///
    /// B is `entries`, T is `tokens`, H is `heads` and D is `width`. G is D, or 1 if one number of the gate multiplies
    /// a row.
    pub struct GateArguments {
        // ---- tensors ----
        /// (B, T, H, G), elements, before the activation.
        pub gates: InputPointer<Elements>,
        /// (B, T, H, D), elements.
        pub values: InputPointer<Elements>,
        /// (B, T, H, D), elements, contiguous.
        pub output: OutputPointer<Elements>,
        // ---- tensors of the backward pass ----
        /// (B, T, H, D), elements.
        pub output_gradient: InputPointer<Elements>,
        /// (B, T, H, G), elements, contiguous.
        pub gate_gradient: OutputPointer<Elements>,
        /// (B, T, H, D), elements, contiguous.
        pub value_gradient: OutputPointer<Elements>,
        // ---- strides, in elements ----
        /// The strides of `gates`.
        pub gate_strides: RowStrides,
        /// The strides of `values`.
        pub value_strides: RowStrides,
        /// The strides of `output_gradient`.
        pub output_gradient_strides: RowStrides,
        /// 1, or 0 if G is 1.
        pub gate_column_stride: i64,
        // ---- sizes ----
        /// B, the number of entries of the batch.
        pub entries: i32,
        /// T, the number of tokens of an entry.
        pub tokens: i32,
        /// H, the number of heads.
        pub heads: i32,
        /// D, the number of columns of a row.
        pub width: i32,
        /// The number of columns of a warp; all of a row if G is 1.
        pub columns: i32,
        // ---- options ----
        /// The number of the activation: one of the constants in activations.cuh.
        pub activation: i32,
    }

    /// The number of warps of a block.
    const GATE_WARPS: usize = 4;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for GateArguments {}

impl RowsCall for GateCall {
    type Arguments = GateArguments;
    type Shape = GateShape;

    const OPERATION: &'static str = "gate";
    const SOURCE: &'static str = "gate.cu";

    fn elements(&self) -> &Tensor {
        &self.values
    }

    fn shape(&self) -> std::result::Result<GateShape, Unsupported> {
        let values = RowsShape::of(&self.values)?;
        let gate_width = if self.gates.dims().last() == Some(&1) { 1 } else { values.d };
        let shape = GateShape { values, gate_width };
        launch(FORWARD, shape).check()?;
        Ok(shape)
    }

    fn check(&self, shape: GateShape) -> Result<()> {
        self.check_tensor("the values", &self.values, &shape.values.dims(), self.values.dtype())?;
        self.check_tensor("the gate", &self.gates, &shape.gate_dims(), self.values.dtype())
    }
}

impl GateCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the output, (B, T, H, D), contiguous, in the dtype of the values.
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
    pub fn backward(&self, gradient: &Tensor) -> Result<GateGradients> {
        let run = Run::start(self)?;
        let GateShape { values, gate_width } = run.shape;
        self.check_tensor("the output's gradient", gradient, &values.dims(), self.values.dtype())?;
        let mut of_gates = run.elements(values.rows() * gate_width)?;
        let mut of_values = run.elements(values.elements())?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let mut arguments = self.arguments(run.shape, &mut operands)?;
        arguments.output_gradient = operands.input("output_gradient", gradient)?;
        arguments.output_gradient_strides = row_strides(gradient);
        arguments.gate_gradient = operands.output("gate_gradient", &mut of_gates)?;
        arguments.value_gradient = operands.output("value_gradient", &mut of_values)?;
        run.launch(&operands, &launch(BACKWARD, run.shape), &arguments)?;
        operands.finish();
        Ok(GateGradients {
            gates: of_gates.into_tensor(&run.shape.gate_dims())?,
            values: of_values.into_tensor(&values.dims())?,
        })
    }
}

impl OneLaunch for GateCall {
    fn forward_launch(shape: GateShape) -> Launch {
        launch(FORWARD, shape)
    }

    fn output_dims(&self, shape: GateShape) -> Vec<usize> {
        shape.values.dims().to_vec()
    }

    fn arguments<'t>(&'t self, shape: GateShape, operands: &mut impl InputAddresses<'t>) -> Result<GateArguments> {
        Ok(GateArguments {
            gates: operands.input("gates", &self.gates)?,
            values: operands.input("values", &self.values)?,
            gate_strides: row_strides(&self.gates),
            value_strides: row_strides(&self.values),
            gate_column_stride: if shape.gate_width == shape.values.d { 1 } else { 0 },
            entries: shape.values.b as i32,
            tokens: shape.values.t as i32,
            heads: shape.values.h as i32,
            width: shape.values.d as i32,
            columns: shape.columns() as i32,
            activation: self.activation.code(),
            ..GateArguments::default()
        })
    }

    fn set_output(arguments: &mut GateArguments, output: OutputPointer<Elements>) {
        arguments.output = output;
    }
}

/// Returns the launch of a kernel.
fn launch(kernel: KernelShape, shape: GateShape) -> Launch {
    let grid = Grid { x: shape.values.rows().div_ceil(GATE_WARPS), y: shape.values.d.div_ceil(shape.columns()), z: 1 };
    Launch::new(kernel, grid)
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CiProgram> {
    outline::entries_of::<GateCall>("gate", &[FORWARD, BACKWARD])
}
