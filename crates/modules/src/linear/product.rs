//! Products on the CPU kernels as operations in Candle's graph, and the same products by Candle's operations.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Error, Module, Result, Shape, Tensor, bail};
use candle_nn::{Activation, Linear};

use super::matrix::{as_left_factor, contiguous, matrix_of};
use super::{OP, backend};
use crate::base::rowwise::{Read, TensorElement, read, with_float};
use crate::base::{gradient_of, matmul_ready, record};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::linear::{self, Matrix, PackedWeight, Product, Right, Up, WeightShape};

/// Returns the instruction set of products with a weight in `dtype`: the one that is given, or the fastest.
pub(super) fn choose_instruction_set(instruction_set: Option<InstructionSet>, dtype: DType) -> Result<InstructionSet> {
    InstructionSet::choose(instruction_set, dtype == DType::BF16).map_err(|error| Error::msg(format!("[{OP}] {error}")))
}

/// Packs a weight (out, in) in f32, bf16 or f16 on the CPU.
pub(super) fn pack(weight: &Tensor, instruction_set: InstructionSet) -> Result<PackedWeight> {
    let weight = contiguous("weight", weight)?;
    let storage = read(&weight);
    let (outputs, inputs) = weight.dims2()?;
    let shape = WeightShape { outputs, inputs };
    with_float!(OP, weight.dtype(), |E| {
        PackedWeight::new(storage.contiguous::<E>()?, shape, instruction_set).map_err(kernel_error)
    })
}

/// Returns the rows of some outputs, or of all, (outputs, in), in the dtype that was packed.
pub(super) fn unpack(weight: &PackedWeight, dtype: DType, outputs: Option<&[usize]>) -> Result<Tensor> {
    let rows = outputs.map_or(weight.outputs(), <[_]>::len);
    with_float!(OP, dtype, |E| {
        let unpacked = match outputs {
            Some(outputs) => weight.unpack_rows::<E>(outputs),
            None => weight.unpack(),
        };
        Tensor::from_vec(unpacked.map_err(kernel_error)?, (rows, weight.inputs()), &Device::Cpu)
    })
}

/// The weight that inputs are multiplied by.
pub(super) enum Factor {
    /// Some outputs of a packed weight.
    Packed { weight: Arc<PackedWeight>, columns: Range<usize> },
    /// A weight (out, in) that is a matrix in memory. It is read when the product runs.
    Matrix { weight: Tensor, instruction_set: InstructionSet },
}

impl Factor {
    fn outputs(&self) -> Result<usize> {
        match self {
            Self::Packed { columns, .. } => Ok(columns.len()),
            Self::Matrix { weight, .. } => weight.dim(0),
        }
    }

    /// Returns the weight if gradients may flow into it.
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Packed { .. } => None,
            Self::Matrix { weight, .. } => Some(weight),
        }
    }

    /// Multiplies inputs (.., in) to outputs (.., out), with an epilogue.
    fn forward<E: TensorElement>(&self, xs: &Tensor, epilogue: linear::Epilogue<E>) -> Result<Vec<E>> {
        let xs = read(xs);
        let left = matrix_of(&xs)?;
        match self {
            Self::Packed { weight, columns } => {
                multiply(left, Right::Weight { weight, outputs: columns.clone() }, epilogue)
            }
            Self::Matrix { weight, instruction_set } => {
                let weight = read(weight);
                multiply(
                    left,
                    Right::Matrix { matrix: matrix_of(&weight)?.t(), instruction_set: *instruction_set },
                    epilogue,
                )
            }
        }
    }

    /// Computes the gradients of inputs (.., in) from the gradients of outputs (.., out).
    fn backward<E: TensorElement>(&self, gradient: &Tensor) -> Result<Vec<E>> {
        let gradient = read(gradient);
        let left = matrix_of(&gradient)?;
        let epilogue = linear::Epilogue::default();
        match self {
            Self::Packed { weight, columns } => {
                multiply(left, Right::Transposed { weight, outputs: columns.clone() }, epilogue)
            }
            Self::Matrix { weight, instruction_set } => {
                let weight = read(weight);
                multiply(
                    left,
                    Right::Matrix { matrix: matrix_of(&weight)?, instruction_set: *instruction_set },
                    epilogue,
                )
            }
        }
    }
}

/// The operations that follow a product with a packed weight in the same pass. Nothing is tracked for gradients.
#[derive(Default)]
pub(super) struct ProductEpilogue<'a> {
    pub activation: Option<linear::Activation>,
    /// The product that the activated outputs are multiplied by.
    pub up: Option<UpProduct<'a>>,
    /// The tensor (.., columns) that is added, in the input's dtype.
    pub residual: Option<&'a Tensor>,
}

/// A product of the same input with another packed weight.
pub(super) struct UpProduct<'a> {
    pub weight: &'a PackedWeight,
    /// (out,) in f32.
    pub bias: Option<&'a Tensor>,
}

/// Computes `xs · weightᵀ + bias` and an epilogue of inputs (.., in) that were checked.
///
/// The bias of a packed weight is contiguous, has all outputs and is in f32. The bias of another weight is in the
/// inputs' dtype, as the weight is. Inputs, weight and bias may be tracked for gradients.
pub(super) fn product(xs: &Tensor, factor: Factor, bias: Option<&Tensor>, epilogue: ProductEpilogue) -> Result<Tensor> {
    let xs = as_left_factor("input", xs)?;
    let wide_bias = bias.map(|bias| bias.to_dtype(DType::F32)).transpose()?;
    let residual = epilogue.residual.map(|residual| contiguous("residual", residual)).transpose()?;
    let shape = with_width(xs.dims(), factor.outputs()?);
    let weight = factor.tensor().cloned();
    with_float!(OP, xs.dtype(), |E| {
        let ys = {
            let bias_numbers = wide_bias.as_ref().map(read);
            let residual_numbers = residual.as_ref().map(read);
            let up_bias = epilogue.up.as_ref().and_then(|up| up.bias).map(read);
            let up_bias = up_bias.as_ref().map(Read::contiguous).transpose()?;
            let kernel_epilogue = linear::Epilogue {
                bias: bias_numbers.as_ref().map(Read::contiguous).transpose()?,
                activation: epilogue.activation,
                up: epilogue.up.as_ref().map(|up| Up { weight: up.weight, bias: up_bias }),
                residual: residual_numbers.as_ref().map(Read::contiguous).transpose()?,
            };
            factor.forward::<E>(&xs, kernel_epilogue)?
        };
        let bias_is_tracked = bias.is_some_and(Tensor::track_op);
        let own = xs.clone();
        record(OP, &[Some(&xs), weight.as_ref(), bias], ys, shape, move |_, gradient| {
            let gradients = gradients::<E>(&own, &factor, bias_is_tracked, gradient)?;
            Ok(vec![gradients.xs, gradients.weight, gradients.bias])
        })
    })
}

/// The gradients of a product.
struct OperandGradients {
    xs: Option<Tensor>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

fn gradients<E: TensorElement>(
    xs: &Tensor,
    factor: &Factor,
    bias_is_tracked: bool,
    gradient: &Tensor,
) -> Result<OperandGradients> {
    let gradient = as_left_factor("gradient", gradient)?;
    let xs_numbers = if xs.track_op() { Some(factor.backward::<E>(&gradient)?) } else { None };
    let mut found = OperandGradients { xs: gradient_of(Some(xs), xs_numbers)?, weight: None, bias: None };
    let Factor::Matrix { weight, instruction_set } = factor else { return Ok(found) };
    let xs_storage = read(xs);
    let gradient_storage = read(&gradient);
    let inputs: Matrix<E> = matrix_of(&xs_storage)?;
    let outputs: Matrix<E> = matrix_of(&gradient_storage)?;
    let product = |left: Matrix<E>, right: Matrix<E>| {
        let numbers = multiply(
            left,
            Right::Matrix { matrix: right, instruction_set: *instruction_set },
            linear::Epilogue::default(),
        )?;
        Tensor::from_vec(numbers, (left.rows, right.columns), &Device::Cpu)
    };
    if weight.track_op() {
        // In the order in which the weight is stored.
        let weight_grad =
            if weight.is_contiguous() { product(outputs.t(), inputs)? } else { product(inputs.t(), outputs)?.t()? };
        found.weight = Some(weight_grad);
    }
    if bias_is_tracked {
        let ones = vec![E::from_f64(1.0); outputs.rows];
        let row_of_ones = Matrix { data: &ones, rows: 1, columns: ones.len(), stride: 0, is_transposed: false };
        found.bias = Some(product(row_of_ones, outputs)?.squeeze(0)?);
    }
    Ok(found)
}

/// Returns the kernels' activation for one of candle-nn's.
pub(super) fn kernel_activation(activation: Activation) -> Result<linear::Activation> {
    Ok(match activation {
        Activation::Gelu => linear::Activation::Gelu,
        Activation::NewGelu | Activation::GeluPytorchTanh => linear::Activation::GeluTanh,
        Activation::Silu | Activation::Swish => linear::Activation::Silu,
        Activation::Relu => linear::Activation::Relu,
        other => bail!(
            "[{OP}] activation is {other:?}, expected Gelu, NewGelu, GeluPytorchTanh, Silu, Swish or Relu after a \
             product"
        ),
    })
}

/// Returns the activation of the CUDA kernels for one of candle-nn's; `None` if they do not have it.
pub(super) fn cuda_activation(activation: Activation) -> Option<candle_attention_cuda::Activation> {
    match activation {
        Activation::Gelu => Some(candle_attention_cuda::Activation::Gelu),
        Activation::NewGelu | Activation::GeluPytorchTanh => Some(candle_attention_cuda::Activation::GeluTanh),
        Activation::Silu | Activation::Swish => Some(candle_attention_cuda::Activation::Silu),
        Activation::Relu => Some(candle_attention_cuda::Activation::Relu),
        _ => None,
    }
}

/// Converts an error of the kernels to Candle's.
pub(super) fn kernel_error(error: candle_attention_kernels::Error) -> Error {
    Error::msg(format!("[{OP}] {error}"))
}

/// Returns a shape with another last dimension.
fn with_width(dims: &[usize], width: usize) -> Shape {
    [&dims[..dims.len() - 1], &[width]].concat().into()
}

/// Multiplies on the thread pool of short calls.
fn multiply<E: TensorElement>(left: Matrix<E>, right: Right<E>, epilogue: linear::Epilogue<E>) -> Result<Vec<E>> {
    linear::multiply_vec(&Product { left, right, epilogue }).map_err(kernel_error)
}

/// Computes a linear layer without the CPU kernels, with gradients, on any device.
pub(super) fn plain(linear: &Linear, xs: &Tensor) -> Result<Tensor> {
    let shape = with_width(xs.dims(), linear.weight().dim(0)?);
    if shape.elem_count() == 0 || xs.elem_count() == 0 {
        let zeros = Tensor::zeros(shape, xs.dtype(), xs.device())?;
        return match linear.bias() {
            Some(bias) => zeros.broadcast_add(bias),
            None => Ok(zeros),
        };
    }
    if xs.device().is_cpu() {
        return backend::affine(xs, linear.weight(), linear.bias());
    }
    // Some columns of a transposed weight, for example.
    let weight = matmul_ready(linear.weight())?;
    if !xs.device().is_metal() {
        return backend::affine(xs, &weight, linear.bias());
    }
    // Candle does not multiply vectors.
    let rows = contiguous("input", xs)?.reshape(((), xs.dim(D::Minus1)?))?;
    Linear::new(weight, linear.bias().cloned()).forward(&rows)?.reshape(shape)
}
