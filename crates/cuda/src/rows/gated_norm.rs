//! The root mean square norm times an activated gate.

use candle_core::{DType, Result, Storage, Tensor};

use super::activation::Activation;
use super::{RowsShape, check_contiguous, check_tensor, row_strides};
use crate::arguments::{Address, RowStrides};
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, LoadedProgram, Operands, Reading};
use crate::element::Element;
use crate::program::{Define, KernelShape, Program};
use crate::unsupported::Unsupported;

const OP: &str = "gated_norm";

/// The largest size of a row, which a warp has in its registers.
const MAX_WIDTH: usize = 1024;

/// The warps of a block: NORM_WARPS in the source.
const WARPS: usize = 8;

/// The most blocks whose gradients of weights are added up.
const MAX_PARTS: usize = 256;

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
    shape.tokens().div_ceil(WARPS).min(MAX_PARTS)
}

/// The argument of the kernels. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct GatedNormArguments {
    inputs: Address,
    gates: Address,
    weights: Address,
    output: Address,

    output_gradient: Address,
    input_gradient: Address,
    gate_gradient: Address,
    weight_gradient_parts: Address,
    weight_gradient: Address,

    input_strides: RowStrides,
    gate_strides: RowStrides,
    output_gradient_strides: RowStrides,
    weight_head_stride: i64,

    entries: i32,
    tokens: i32,
    heads: i32,
    parts: i32,

    activation: i32,
    epsilon: f32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for GatedNormArguments {}

impl GatedNormCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.xs.device())?.prepare(&program(Element::of(self.xs.dtype())?, self.xs.dims()[3]))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.xs.device())?;
        Element::of(self.xs.dtype())?;
        let shape = RowsShape::of(&self.xs)?;
        if shape.d > MAX_WIDTH {
            let dims = self.xs.dims();
            return Err(Unsupported::new(format!("the rows have the shape {dims:?}, which no kernel takes")));
        }
        forward_launch(shape).check()?;
        backward_launch(shape).check()
    }

    fn checked_shape(&self) -> Result<RowsShape> {
        self.check()?;
        let shape = RowsShape::of(&self.xs)?;
        check_tensor(OP, "the input", &self.xs, &shape.dims(), self.xs.dtype())?;
        check_tensor(OP, "gate", &self.gate, &shape.dims(), self.xs.dtype())?;
        if self.weight.rank() == 1 {
            check_tensor(OP, "weight", &self.weight, &[shape.d], DType::F32)?;
        } else {
            check_tensor(OP, "weight", &self.weight, &[shape.h, shape.d], DType::F32)?;
        }
        check_contiguous(OP, "weight", &self.weight)?;
        Ok(shape)
    }

    fn load(&self, device: &KernelDevice, shape: RowsShape) -> Result<LoadedProgram> {
        Ok(device.load(&program(Element::of(self.xs.dtype())?, shape.d))?)
    }

    /// Computes the output, (B, T, H, D), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        let shape = self.checked_shape()?;
        let device = KernelDevice::of(self.xs.device())?;
        let program = self.load(&device, shape)?;
        let mut output = device.uninitialized(self.xs.dtype(), shape.elements())?;
        {
            let readings = Readings::new(self);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.output = operands.write("output", &mut output)?;
            operands.launch(&program, &forward_launch(shape), &arguments)?;
        }
        Ok(output.into_storage())
    }

    /// Computes the gradients of all inputs from the gradient of the output, (B, T, H, D).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor) -> Result<GatedNormGradients> {
        let shape = self.checked_shape()?;
        check_tensor(OP, "the output's gradient", gradient, &shape.dims(), self.xs.dtype())?;
        let device = KernelDevice::of(self.xs.device())?;
        let program = self.load(&device, shape)?;
        let mut of_xs = device.uninitialized(self.xs.dtype(), shape.elements())?;
        let mut of_gate = device.uninitialized(self.xs.dtype(), shape.elements())?;
        let mut parts = device.uninitialized(DType::F32, parts_of(shape) * shape.h * shape.d)?;
        let mut of_weight = device.uninitialized(DType::F32, self.weight.elem_count())?;
        {
            let readings = Readings::new(self);
            let gradient_reading = Reading::new(gradient);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.output_gradient = operands.read("output_gradient", &gradient_reading)?;
            arguments.output_gradient_strides = row_strides(&gradient_reading);
            arguments.input_gradient = operands.write("input_gradient", &mut of_xs)?;
            arguments.gate_gradient = operands.write("gate_gradient", &mut of_gate)?;
            arguments.weight_gradient_parts = operands.write("weight_gradient_parts", &mut parts)?;
            arguments.weight_gradient = operands.write("weight_gradient", &mut of_weight)?;
            operands.launch(&program, &backward_launch(shape), &arguments)?;
            let grid = Grid::linear(self.weight.elem_count().div_ceil(128));
            let sum = Launch { kernel: "gated_norm_sum_weights", grid, threads: 128, shared_bytes: 0 };
            operands.launch(&program, &sum, &arguments)?;
        }
        Ok(GatedNormGradients {
            xs: of_xs.into_tensor(&shape.dims())?,
            gate: of_gate.into_tensor(&shape.dims())?,
            weight: of_weight.into_tensor(self.weight.shape())?,
        })
    }

    fn arguments<'a>(
        &self,
        shape: RowsShape,
        readings: &'a Readings,
        operands: &mut Operands<'a>,
    ) -> Result<GatedNormArguments> {
        Ok(GatedNormArguments {
            inputs: operands.read("inputs", &readings.xs)?,
            gates: operands.read("gates", &readings.gate)?,
            weights: operands.read("weights", &readings.weight)?,
            input_strides: row_strides(&readings.xs),
            gate_strides: row_strides(&readings.gate),
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
}

/// The tensors of a call while launches read them.
struct Readings<'t> {
    xs: Reading<'t>,
    gate: Reading<'t>,
    weight: Reading<'t>,
}

impl<'t> Readings<'t> {
    fn new(call: &'t GatedNormCall) -> Self {
        Self { xs: Reading::new(&call.xs), gate: Reading::new(&call.gate), weight: Reading::new(&call.weight) }
    }
}

/// Returns the program of an element type and a size of rows.
fn program(element: Element, width: usize) -> Program {
    let defines = vec![element.define(), Define { name: "NORM_WIDTH", value: width as i64 }];
    Program { root: "gated_norm.cu", defines }
}

/// Returns the programs of the usual sizes of rows.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    let mut entries = Vec::new();
    for element in Element::ALL {
        for width in [64, 128, 256] {
            let shape = RowsShape { b: 1, t: 1, h: 1, d: width };
            let kernels = vec![
                forward_launch(shape).kernel_shape(),
                backward_launch(shape).kernel_shape(),
                KernelShape { name: "gated_norm_sum_weights", threads: 128, shared_bytes: 0 },
            ];
            let name = format!("gated norm {} d{width}", element.name());
            entries.push(CatalogueEntry::new(&program(element, width), name, width == 128, kernels));
        }
    }
    entries
}

/// Returns the launch of the forward pass.
fn forward_launch(shape: RowsShape) -> Launch {
    let grid = Grid { x: shape.tokens().div_ceil(WARPS), y: shape.h, z: 1 };
    Launch { kernel: "gated_norm_forward", grid, threads: WARPS * 32, shared_bytes: 0 }
}

/// Returns the launch of the backward pass, with a row of gradients of weights for each warp in shared memory.
fn backward_launch(shape: RowsShape) -> Launch {
    Launch {
        kernel: "gated_norm_backward",
        grid: Grid { x: parts_of(shape), y: shape.h, z: 1 },
        threads: WARPS * 32,
        shared_bytes: WARPS * shape.d.next_multiple_of(32) * 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn gated_norm_arguments_match_the_source() {
        let sizes = source_sizes(&program(Element::F32, 75));
        assert_same_layout!(
            sizes,
            GatedNormArguments,
            [
                inputs,
                gates,
                weights,
                output,
                output_gradient,
                input_gradient,
                gate_gradient,
                weight_gradient_parts,
                weight_gradient,
                input_strides,
                gate_strides,
                output_gradient_strides,
                weight_head_stride,
                entries,
                tokens,
                heads,
                parts,
                activation,
                epsilon
            ]
        );
        let launch = backward_launch(RowsShape { b: 1, t: 1, h: 1, d: 75 });
        assert_eq!((sizes["NORM_WARPS"], sizes["NORM_SHARED"]), (WARPS, launch.shared_bytes));
    }
}
