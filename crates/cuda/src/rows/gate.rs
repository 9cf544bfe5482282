//! Values times an activated gate.

use candle_core::{Result, Storage, Tensor};

use super::activation::Activation;
use super::{RowsShape, check_tensor, entries_of, program_of, row_strides};
use crate::arguments::{Address, RowStrides};
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, LoadedProgram, Operands, Reading};
use crate::element::Element;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const OP: &str = "gate";

/// The file of the kernels.
const ROOT: &str = "gate.cu";

/// The warps of a block: GATE_WARPS in the source.
const WARPS: usize = 4;

/// The columns of a warp in a row whose gate is as wide.
const COLUMNS: usize = 256;

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
struct GateShape {
    values: RowsShape,
    /// D, or 1.
    gate_width: usize,
}

impl GateShape {
    fn gate_dims(self) -> [usize; 4] {
        RowsShape { d: self.gate_width, ..self.values }.dims()
    }

    /// Returns the columns of a warp.
    fn columns(self) -> usize {
        let width = self.values.d;
        if self.gate_width == width { COLUMNS.min(width) } else { width }
    }
}

/// The argument of the kernels. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct GateArguments {
    gates: Address,
    values: Address,
    output: Address,

    output_gradient: Address,
    gate_gradient: Address,
    value_gradient: Address,

    gate_strides: RowStrides,
    value_strides: RowStrides,
    output_gradient_strides: RowStrides,
    gate_column_stride: i64,

    entries: i32,
    tokens: i32,
    heads: i32,
    width: i32,
    columns: i32,

    activation: i32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for GateArguments {}

impl GateCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.values.device())?.prepare(&program_of(ROOT, Element::of(self.values.dtype())?))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.values.device())?;
        Element::of(self.values.dtype())?;
        launch(FORWARD, self.shape()?).check()
    }

    fn shape(&self) -> std::result::Result<GateShape, Unsupported> {
        let values = RowsShape::of(&self.values)?;
        let gate_width = if self.gates.dims().last() == Some(&1) { 1 } else { values.d };
        Ok(GateShape { values, gate_width })
    }

    fn checked_shape(&self) -> Result<GateShape> {
        self.check()?;
        let shape = self.shape()?;
        let values = shape.values;
        check_tensor(OP, "the values", &self.values, &values.dims(), self.values.dtype())?;
        check_tensor(OP, "the gate", &self.gates, &shape.gate_dims(), self.values.dtype())?;
        Ok(shape)
    }

    fn load(&self, device: &KernelDevice) -> Result<LoadedProgram> {
        Ok(device.load(&program_of(ROOT, Element::of(self.values.dtype())?))?)
    }

    /// Computes the output, (B, T, H, D), contiguous, in the dtype of the values.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        let shape = self.checked_shape()?;
        let device = KernelDevice::of(self.values.device())?;
        let program = self.load(&device)?;
        let mut output = device.uninitialized(self.values.dtype(), shape.values.elements())?;
        {
            let readings = Readings::new(self);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.output = operands.write("output", &mut output)?;
            operands.launch(&program, &launch(FORWARD, shape), &arguments)?;
        }
        Ok(output.into_storage())
    }

    /// Computes the gradients from the gradient of the output, (B, T, H, D).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor) -> Result<GateGradients> {
        let shape = self.checked_shape()?;
        let GateShape { values, gate_width } = shape;
        check_tensor(OP, "the output's gradient", gradient, &values.dims(), self.values.dtype())?;
        let device = KernelDevice::of(self.values.device())?;
        let program = self.load(&device)?;
        let mut of_gates = device.uninitialized(self.values.dtype(), values.rows() * gate_width)?;
        let mut of_values = device.uninitialized(self.values.dtype(), values.elements())?;
        {
            let readings = Readings::new(self);
            let gradient_reading = Reading::new(gradient);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.output_gradient = operands.read("output_gradient", &gradient_reading)?;
            arguments.output_gradient_strides = row_strides(&gradient_reading);
            arguments.gate_gradient = operands.write("gate_gradient", &mut of_gates)?;
            arguments.value_gradient = operands.write("value_gradient", &mut of_values)?;
            operands.launch(&program, &launch(BACKWARD, shape), &arguments)?;
        }
        Ok(GateGradients {
            gates: of_gates.into_tensor(&shape.gate_dims())?,
            values: of_values.into_tensor(&values.dims())?,
        })
    }

    fn arguments<'a>(
        &self,
        shape: GateShape,
        readings: &'a Readings,
        operands: &mut Operands<'a>,
    ) -> Result<GateArguments> {
        Ok(GateArguments {
            gates: operands.read("gates", &readings.gates)?,
            values: operands.read("values", &readings.values)?,
            gate_strides: row_strides(&readings.gates),
            value_strides: row_strides(&readings.values),
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
}

/// The tensors of a call while launches read them.
struct Readings<'t> {
    gates: Reading<'t>,
    values: Reading<'t>,
}

impl<'t> Readings<'t> {
    fn new(call: &'t GateCall) -> Self {
        Self { gates: Reading::new(&call.gates), values: Reading::new(&call.values) }
    }
}

const FORWARD: KernelShape = KernelShape { name: "gate_forward", threads: WARPS * 32, shared_bytes: 0 };
const BACKWARD: KernelShape = KernelShape { name: "gate_backward", threads: WARPS * 32, shared_bytes: 0 };

/// Returns the launch of a kernel.
fn launch(kernel: KernelShape, shape: GateShape) -> Launch {
    let grid = Grid { x: shape.values.rows().div_ceil(WARPS), y: shape.values.d.div_ceil(shape.columns()), z: 1 };
    Launch::new(kernel, grid)
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    entries_of(ROOT, "gate", &[FORWARD, BACKWARD])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn gate_arguments_match_the_source() {
        let sizes = source_sizes(&program_of(ROOT, Element::F32));
        assert_same_layout!(
            sizes,
            GateArguments,
            [
                gates,
                values,
                output,
                output_gradient,
                gate_gradient,
                value_gradient,
                gate_strides,
                value_strides,
                output_gradient_strides,
                gate_column_stride,
                entries,
                tokens,
                heads,
                width,
                columns,
                activation
            ]
        );
        assert_eq!(sizes["GATE_WARPS"], WARPS);
    }
}
