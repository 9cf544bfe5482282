//! Norms over rows.

use candle_core::{DType, Result, Storage, Tensor};

use super::{RowsShape, check_contiguous, check_tensor, entries_of, program_of, row_strides};
use crate::arguments::{Address, RowStrides};
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, LoadedProgram, Operands, Reading};
use crate::element::Element;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const OP: &str = "norm";

/// The file of the kernels.
const ROOT: &str = "norm.cu";

/// The warps and the columns of a block, and the shared memory of a block that has rows: ROW_NORM_WARPS,
/// ROW_NORM_COLUMNS and ROW_NORM_SHARED in the source.
const WARPS: usize = 8;
const COLUMNS: usize = 128;
const SHARED_BYTES: usize = WARPS * 4;

/// The widest rows that one warp computes.
const WARP_WIDTH: usize = 512;

/// The most parts whose gradients of weights are added up, and the fewest rows of one, unless there is only one part.
const MAX_PARTS: usize = 128;
const PART_ROWS: usize = 16;

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

/// Returns the warps that compute a row.
fn row_warps(shape: RowsShape) -> usize {
    if shape.d <= WARP_WIDTH { 1 } else { WARPS }
}

/// Returns the parts of the rows that share a weight.
fn weight_parts(shape: RowsShape, has_weights_of_heads: bool) -> usize {
    let rows = if has_weights_of_heads { shape.tokens() } else { shape.rows() };
    rows.div_ceil(PART_ROWS).min(MAX_PARTS)
}

/// The argument of the kernels. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct NormArguments {
    inputs: Address,
    weights: Address,
    biases: Address,
    output: Address,

    output_gradient: Address,
    input_gradient: Address,
    means: Address,
    factors: Address,
    weight_gradient_parts: Address,
    bias_gradient_parts: Address,
    weight_gradient: Address,
    bias_gradient: Address,

    input_strides: RowStrides,
    output_gradient_strides: RowStrides,
    weight_head_stride: i64,

    entries: i32,
    tokens: i32,
    heads: i32,
    width: i32,
    parts: i32,

    row_warps: i32,
    subtracts_mean: i32,
    epsilon: f32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for NormArguments {}

impl NormCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.xs.device())?.prepare(&program_of(ROOT, Element::of(self.xs.dtype())?))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.xs.device())?;
        Element::of(self.xs.dtype())?;
        let shape = RowsShape::of(&self.xs)?;
        row_launch("norm_forward", shape).check()?;
        self.parameter_launch(shape).check()
    }

    /// Returns the launch of the kernel that adds up gradients of weights and biases of some rows.
    fn parameter_launch(&self, shape: RowsShape) -> Launch {
        let has_weights_of_heads = self.weight.rank() > 1;
        let heads = if has_weights_of_heads { shape.h } else { 1 };
        let grid = Grid { x: shape.d.div_ceil(COLUMNS), y: weight_parts(shape, has_weights_of_heads), z: heads };
        Launch::new(PARAMETER_GRADIENTS, grid)
    }

    fn checked_shape(&self) -> Result<RowsShape> {
        self.check()?;
        let shape = RowsShape::of(&self.xs)?;
        check_tensor(OP, "the input", &self.xs, &shape.dims(), self.xs.dtype())?;
        let parameter_dims = if self.weight.rank() == 1 { vec![shape.d] } else { vec![shape.h, shape.d] };
        let parameters = [("weight", Some(&self.weight)), ("bias", self.bias.as_ref())];
        for (name, parameter) in parameters {
            let Some(parameter) = parameter else { continue };
            check_tensor(OP, name, parameter, &parameter_dims, DType::F32)?;
            check_contiguous(OP, name, parameter)?;
        }
        Ok(shape)
    }

    fn load(&self, device: &KernelDevice) -> Result<LoadedProgram> {
        Ok(device.load(&program_of(ROOT, Element::of(self.xs.dtype())?))?)
    }

    /// Computes the output, (B, T, H, D), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        let shape = self.checked_shape()?;
        let device = KernelDevice::of(self.xs.device())?;
        let program = self.load(&device)?;
        let mut output = device.uninitialized(self.xs.dtype(), shape.elements())?;
        {
            let readings = Readings::new(self);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.output = operands.write("output", &mut output)?;
            operands.launch(&program, &row_launch("norm_forward", shape), &arguments)?;
        }
        Ok(output.into_storage())
    }

    /// Computes the gradients from the gradient of the output, (B, T, H, D).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor, wanted: NormParameterGradients) -> Result<NormGradients> {
        let shape = self.checked_shape()?;
        check_tensor(OP, "the output's gradient", gradient, &shape.dims(), self.xs.dtype())?;
        let device = KernelDevice::of(self.xs.device())?;
        let program = self.load(&device)?;
        let count = self.weight.elem_count();
        let wants_weight = wanted == NormParameterGradients::All;
        let wants_bias = wants_weight && self.bias.is_some();
        let parts = weight_parts(shape, self.weight.rank() > 1);
        let floats = |is_wanted: bool, len| match is_wanted {
            true => device.uninitialized(DType::F32, len).map(Some),
            false => Ok(None),
        };
        let mut of_xs = device.uninitialized(self.xs.dtype(), shape.elements())?;
        let mut means = device.uninitialized(DType::F32, shape.rows())?;
        let mut factors = device.uninitialized(DType::F32, shape.rows())?;
        let mut weight_parts = floats(wants_weight, parts * count)?;
        let mut bias_parts = floats(wants_bias, parts * count)?;
        let mut of_weight = floats(wants_weight, count)?;
        let mut of_bias = floats(wants_bias, count)?;
        {
            let readings = Readings::new(self);
            let gradient_reading = Reading::new(gradient);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.parts = parts as i32;
            arguments.output_gradient = operands.read("output_gradient", &gradient_reading)?;
            arguments.output_gradient_strides = row_strides(&gradient_reading);
            arguments.input_gradient = operands.write("input_gradient", &mut of_xs)?;
            arguments.means = operands.write("means", &mut means)?;
            arguments.factors = operands.write("factors", &mut factors)?;
            arguments.weight_gradient_parts =
                operands.write_optional("weight_gradient_parts", weight_parts.as_mut())?;
            arguments.bias_gradient_parts = operands.write_optional("bias_gradient_parts", bias_parts.as_mut())?;
            arguments.weight_gradient = operands.write_optional("weight_gradient", of_weight.as_mut())?;
            arguments.bias_gradient = operands.write_optional("bias_gradient", of_bias.as_mut())?;
            operands.launch(&program, &row_launch("norm_backward", shape), &arguments)?;
            if wants_weight {
                operands.launch(&program, &self.parameter_launch(shape), &arguments)?;
                let sums_grid = Grid::linear(count.div_ceil(COLUMNS));
                operands.launch(&program, &Launch::new(PARAMETER_SUMS, sums_grid), &arguments)?;
            }
        }
        Ok(NormGradients {
            xs: of_xs.into_tensor(&shape.dims())?,
            weight: of_weight.map(|buffer| buffer.into_tensor(self.weight.shape())).transpose()?,
            bias: of_bias.map(|buffer| buffer.into_tensor(self.weight.shape())).transpose()?,
        })
    }

    fn arguments<'a>(
        &self,
        shape: RowsShape,
        readings: &'a Readings,
        operands: &mut Operands<'a>,
    ) -> Result<NormArguments> {
        Ok(NormArguments {
            inputs: operands.read("inputs", &readings.xs)?,
            weights: operands.read("weights", &readings.weight)?,
            biases: operands.read_optional("biases", readings.bias.as_ref())?,
            input_strides: row_strides(&readings.xs),
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
}

/// The tensors of a call while launches read them.
struct Readings<'t> {
    xs: Reading<'t>,
    weight: Reading<'t>,
    bias: Option<Reading<'t>>,
}

impl<'t> Readings<'t> {
    fn new(call: &'t NormCall) -> Self {
        Self {
            xs: Reading::new(&call.xs),
            weight: Reading::new(&call.weight),
            bias: call.bias.as_ref().map(Reading::new),
        }
    }
}

/// The kernels that add up gradients of weights and biases.
const PARAMETER_GRADIENTS: KernelShape =
    KernelShape { name: "norm_parameter_gradients", threads: COLUMNS, shared_bytes: 0 };
const PARAMETER_SUMS: KernelShape = KernelShape { name: "norm_sum_parameters", threads: COLUMNS, shared_bytes: 0 };

/// Returns the shape of a kernel that computes rows.
fn row_kernel(name: &'static str) -> KernelShape {
    KernelShape { name, threads: WARPS * 32, shared_bytes: SHARED_BYTES }
}

/// Returns the launch of a kernel that computes rows.
fn row_launch(kernel: &'static str, shape: RowsShape) -> Launch {
    let blocks = shape.rows().div_ceil(WARPS / row_warps(shape));
    Launch::new(row_kernel(kernel), Grid::linear(blocks))
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    let kernels = [row_kernel("norm_forward"), row_kernel("norm_backward"), PARAMETER_GRADIENTS, PARAMETER_SUMS];
    entries_of(ROOT, "norm", &kernels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn norm_arguments_match_the_source() {
        let sizes = source_sizes(&program_of(ROOT, Element::F32));
        assert_same_layout!(
            sizes,
            NormArguments,
            [
                inputs,
                weights,
                biases,
                output,
                output_gradient,
                input_gradient,
                means,
                factors,
                weight_gradient_parts,
                bias_gradient_parts,
                weight_gradient,
                bias_gradient,
                input_strides,
                output_gradient_strides,
                weight_head_stride,
                entries,
                tokens,
                heads,
                width,
                parts,
                row_warps,
                subtracts_mean,
                epsilon
            ]
        );
        assert_eq!(sizes["ROW_NORM_WARPS"], WARPS);
        assert_eq!(sizes["ROW_NORM_COLUMNS"], COLUMNS);
        assert_eq!(sizes["ROW_NORM_SHARED"], SHARED_BYTES);
    }
}
