//! Products by the CPU's kernels as operations in Candle's graph, of a weight in panels and of one that is tracked for
//! gradients, and the same by Candle's own; and two projections of one input, one of which gates the other.

use std::ops::{Deref, Range};
use std::sync::Arc;

use candle_core::{D, DType, Device, Layout, Module, Result, Shape, Storage, Tensor, WithDType, bail};
use candle_nn::{Activation, Linear};

use super::{OP, PackedLinear, Weight};
use crate::base::rowwise::{Element, Read, read, with_float};
use crate::base::{check_memory, executor, gradient_of, record};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::linear::{self, Epilogue, Matrix, PackedWeight, Product, Right, Up};

/// The instruction set of products with a weight: one in particular, or the fastest.
pub(super) fn choose_instruction_set(instruction_set: Option<InstructionSet>, dtype: DType) -> Result<InstructionSet> {
    InstructionSet::choose(instruction_set, dtype == DType::BF16)
        .map_err(|error| candle_core::Error::msg(format!("[{OP}] {error}")))
}

/// Puts a weight (out, in), in f32, bf16 or f16 on the CPU, in panels.
pub(super) fn pack(weight: &Tensor, instruction_set: InstructionSet) -> Result<PackedWeight> {
    let weight = contiguous("weight", weight)?;
    let (storage, shape) = (read(&weight), weight.dims2()?);
    with_float!(OP, weight.dtype(), |E| {
        PackedWeight::new(storage.contiguous::<E>()?, shape, instruction_set).map_err(kernel_error)
    })
}

/// The rows of some outputs or of all, (outputs, in), in the dtype that was packed.
pub(super) fn unpack(weight: &PackedWeight, dtype: DType, outputs: Option<&[usize]>) -> Result<Tensor> {
    let shape = (outputs.map_or(weight.outputs(), <[_]>::len), weight.inputs());
    with_float!(OP, dtype, |E| {
        let rows = match outputs {
            Some(outputs) => weight.unpack_rows::<E>(outputs),
            None => weight.unpack(),
        };
        Tensor::from_vec(rows.map_err(kernel_error)?, shape, &Device::Cpu)
    })
}

/// What the CPU's kernels multiply inputs by.
pub(super) enum Factor {
    /// Some outputs of a weight in panels.
    Packed(Arc<PackedWeight>, Range<usize>),
    /// A weight (out, in), a matrix in memory, which is read as it is when this runs.
    Matrix(Tensor, InstructionSet),
}

impl Factor {
    /// Inputs (.., in) to outputs (.., out) and what follows, or the gradients of outputs to those of inputs.
    fn multiply<E: Element>(&self, xs: &Tensor, is_backward: bool, epilogue: Epilogue<E>) -> Result<Vec<E>> {
        let xs = read(xs);
        let left = matrix_of(&xs)?;
        match self {
            Self::Packed(weight, columns) => {
                let right = if is_backward { Right::Transposed } else { Right::Weight };
                multiply(left, right(weight, columns.clone()), epilogue)
            }
            Self::Matrix(weight, instruction_set) => {
                let weight = read(weight);
                let weight = matrix_of(&weight)?;
                multiply(left, Right::Matrix(if is_backward { weight } else { weight.t() }, *instruction_set), epilogue)
            }
        }
    }
}

/// What follows a product with a packed weight in its pass, where nothing is tracked for gradients.
#[derive(Default)]
pub(super) struct After<'a> {
    pub activation: Option<linear::Activation>,
    /// What the activated outputs are multiplied by: the weight of a product of the same input, and its bias in f32.
    pub up: Option<(&'a PackedWeight, Option<&'a Tensor>)>,
    /// What is added, (.., columns) in the input's dtype.
    pub residual: Option<&'a Tensor>,
}

/// `xs · weightᵀ + bias` of inputs (.., in), and what follows; all was checked. The bias of a packed weight is
/// contiguous, that of all its outputs in f32; another is of the inputs' dtype, as is a weight that is not packed, and
/// both may be tracked for gradients.
pub(super) fn product(xs: &Tensor, factor: Factor, bias: Option<&Tensor>, after: After) -> Result<Tensor> {
    let xs = as_left("input", xs)?;
    let in_f32 = bias.map(|bias| bias.to_dtype(DType::F32)).transpose()?;
    let residual = after.residual.map(|residual| contiguous("residual", residual)).transpose()?;
    let (weight, outputs) = match &factor {
        Factor::Packed(_, columns) => (None, columns.len()),
        Factor::Matrix(weight, _) => (Some(weight.clone()), weight.dim(0)?),
    };
    let shape = with_width(xs.dims(), outputs);
    with_float!(OP, xs.dtype(), |E| {
        let ys = {
            let (added, residual) = (in_f32.as_ref().map(read), residual.as_ref().map(read));
            let of_up = after.up.and_then(|(_, bias)| bias).map(read);
            let of_up = of_up.as_ref().map(Read::contiguous).transpose()?;
            let epilogue = Epilogue {
                bias: added.as_ref().map(Read::contiguous).transpose()?,
                activation: after.activation,
                up: after.up.map(|(weight, _)| Up { weight, bias: of_up }),
                residual: residual.as_ref().map(Read::contiguous).transpose()?,
            };
            factor.multiply::<E>(&xs, false, epilogue)?
        };
        let (own, wants_bias) = (xs.clone(), bias.is_some_and(Tensor::track_op));
        record(OP, &[Some(&xs), weight.as_ref(), bias], ys, shape, move |_, gradient| {
            let gradient = as_left("gradient", gradient)?;
            let of_xs = own.track_op().then(|| factor.multiply::<E>(&gradient, true, Epilogue::default()));
            let of_xs = gradient_of(Some(&own), of_xs.transpose()?)?;
            let Factor::Matrix(weight, instruction_set) = &factor else { return Ok(vec![of_xs]) };
            let product = |left: Matrix<E>, right: Matrix<E>| {
                let product = multiply(left, Right::Matrix(right, *instruction_set), Epilogue::default())?;
                Tensor::from_vec(product, (left.rows, right.columns), &Device::Cpu)
            };
            let (xs, gradient) = (read(&own), read(&gradient));
            let (xs, gradient) = (matrix_of(&xs)?, matrix_of(&gradient)?);
            // In the order in which the weight is stored.
            let of_weight = || match weight.is_contiguous() {
                true => product(gradient.t(), xs),
                false => product(xs.t(), gradient)?.t(),
            };
            let of_bias = wants_bias.then(|| {
                let ones = vec![E::from_f64(1.0); gradient.rows];
                let ones = Matrix { data: &ones, rows: 1, columns: ones.len(), stride: 0, is_transposed: false };
                product(ones, gradient)?.squeeze(0)
            });
            Ok(vec![of_xs, weight.track_op().then(of_weight).transpose()?, of_bias.transpose()?])
        })
    })
}

/// The kernels' activation of this name.
pub(super) fn kernel_activation(activation: Activation) -> Result<linear::Activation> {
    Ok(match activation {
        Activation::Gelu => linear::Activation::Gelu,
        Activation::NewGelu | Activation::GeluPytorchTanh => linear::Activation::GeluTanh,
        Activation::Silu | Activation::Swish => linear::Activation::Silu,
        Activation::Relu => linear::Activation::Relu,
        other => bail!(
            "[{OP}] activation {other:?} does not follow a product, expected Gelu, NewGelu, GeluPytorchTanh, Silu, Swish or Relu"
        ),
    })
}

pub(super) fn kernel_error(error: candle_attention_kernels::Error) -> candle_core::Error {
    candle_core::Error::msg(format!("[{OP}] {error}"))
}

/// Dimensions, the last of which is another.
fn with_width(dims: &[usize], width: usize) -> Shape {
    [&dims[..dims.len() - 1], &[width]].concat().into()
}

/// A tensor (.., columns) as it is in memory, as a matrix, if its rows lie at one distance and either they or its
/// columns are contiguous. One of nothing is anywhere.
fn matrix<'a, E>(data: &'a [E], layout: &Layout) -> Option<Matrix<'a, E>> {
    let (&columns, lead) = layout.dims().split_last()?;
    let mut counts = lead.iter().zip(layout.stride()).filter(|&(&dim, _)| dim != 1);
    let mut pairs = counts.clone().zip(counts.clone().skip(1));
    let is_even = pairs.all(|((_, &outer), (&dim, &inner))| outer == dim * inner);
    let (row, column) = (counts.next_back().map_or(0, |(_, &stride)| stride), layout.stride()[lead.len()]);
    let data = &data[layout.start_offset().min(data.len())..];
    let rows = Matrix { data, rows: lead.iter().product(), columns, stride: row, is_transposed: false };
    match () {
        () if layout.shape().elem_count() == 0 => Some(Matrix { stride: 0, ..rows }),
        () if is_even && (column == 1 || columns == 1) => Some(rows),
        () if is_even && (row == 1 || rows.rows == 1) => Some(Matrix { stride: column, is_transposed: true, ..rows }),
        () => None,
    }
}

/// The matrix that a tensor is in memory.
fn matrix_of<'a, E: Element>(own: &'a Read<'_, impl Deref<Target = Storage>>) -> Result<Matrix<'a, E>> {
    match matrix(own.elements()?, own.layout) {
        Some(matrix) => Ok(matrix),
        None => bail!("[{OP}] lines of strides {:?} are not contiguous and evenly spaced", own.layout.stride()),
    }
}

/// A product on the threads of brief calls.
fn multiply<E: Element>(left: Matrix<E>, right: Right<E>, epilogue: Epilogue<E>) -> Result<Vec<E>> {
    linear::multiply_vec(&Product { left, right, epilogue, executor: executor() }).map_err(kernel_error)
}

/// From how many rows on a transposed left factor is read where it lies: those of the widest vector. Fewer would be
/// gathered one by one in each task.
const TRANSPOSED_ROWS: usize = 16;

/// As [`as_matrix`], for the left factor of a product.
fn as_left(what: &str, xs: &Tensor) -> Result<Tensor> {
    let is_left = |own: Matrix<()>| !own.is_transposed || own.rows >= TRANSPOSED_ROWS;
    if matrix(&[], xs.layout()).is_some_and(is_left) { Ok(xs.clone()) } else { contiguous(what, xs) }
}

/// Itself, or a copy that is a matrix in memory.
pub(super) fn as_matrix(what: &str, xs: &Tensor) -> Result<Tensor> {
    if matrix::<()>(&[], xs.layout()).is_some() { Ok(xs.clone()) } else { contiguous(what, xs) }
}

/// By Candle's own operations, with gradients, on any device.
pub(super) fn plain(linear: &Linear, xs: &Tensor) -> Result<Tensor> {
    let out = with_width(xs.dims(), linear.weight().dim(0)?);
    if out.elem_count() == 0 || xs.elem_count() == 0 {
        let zeros = Tensor::zeros(out, xs.dtype(), xs.device())?;
        return linear.bias().map_or(Ok(zeros.clone()), |bias| zeros.broadcast_add(bias));
    }
    // Candle multiplies no vectors.
    linear.forward(&contiguous("input", xs)?.reshape(((), xs.dim(D::Minus1)?))?)?.reshape(out)
}

/// Candle ends the program where there is no memory for a copy; this asks first. It copies no view of nothing either,
/// which may begin past the end of its buffer.
pub(super) fn contiguous(what: &str, tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() == 0 {
        return Ok(tensor.clone());
    }
    if !tensor.is_contiguous() {
        check_memory(OP, format_args!("a contiguous copy of the {what} of shape {:?}", tensor.dims()), tensor.dims())?;
    }
    tensor.contiguous()
}

const GATED: &str = "packed_gated_linear";

/// `activation(gate(x)) · up(x)`: the first half of a gated feed-forward layer (SwiGLU, GeGLU), as one pass over `x`.
///
/// Where both are packed, a tile of the gate and the same tile of the other are multiplied out of a cache, in f32, and
/// rounded once. Otherwise, and for an input that is tracked for gradients, it is three operations.
///
/// ```
/// use candle_attention::{PackedGatedLinear, PackedLinear};
/// use candle_core::{Device, Module, Tensor};
/// use candle_nn::{Activation, Linear};
/// # fn main() -> candle_core::Result<()> {
/// let linear = || Ok::<_, candle_core::Error>(Linear::new(Tensor::randn(0f32, 1., (48, 16), &Device::Cpu)?, None));
/// let (gate, up) = (linear()?, linear()?);
/// let both = PackedGatedLinear::new(gate.clone().try_into()?, up.clone().try_into()?, Activation::Silu)?;
///
/// let xs = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let expected = (gate.forward(&xs)?.silu()? * up.forward(&xs)?)?;
/// let difference = (both.forward(&xs)? - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-3);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PackedGatedLinear {
    gate: PackedLinear,
    up: PackedLinear,
}

impl PackedGatedLinear {
    /// Of two projections without activations, of one shape, dtype and device.
    ///
    /// # Errors
    /// For projections that differ or have activations of their own, and for an activation that
    /// [`PackedLinear::with_activation`] does not take.
    pub fn new(gate: PackedLinear, up: PackedLinear, activation: Activation) -> Result<Self> {
        for (name, linear) in [("gate", &gate), ("up", &up)] {
            if let Some(own) = linear.activation() {
                bail!("[{GATED}] {name} has the activation {own:?} of its own, expected none")
            }
        }
        let found =
            |linear: &PackedLinear| (linear.out_dim(), linear.in_dim(), linear.dtype(), linear.device().location());
        if found(&gate) != found(&up) {
            bail!("[{GATED}] up is {:?}, expected the gate's {:?}", found(&up), found(&gate))
        }
        Ok(Self { gate: gate.with_activation(activation)?, up })
    }

    /// The same with what variables hold now, packed, and nothing tracked for gradients.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { gate: self.gate.freeze()?, up: self.up.freeze()? })
    }

    /// The width of the output.
    pub fn out_dim(&self) -> usize {
        self.gate.out_dim()
    }

    /// The width of the input.
    pub fn in_dim(&self) -> usize {
        self.gate.in_dim()
    }
}

/// (.., in) gives (.., out) in the input's dtype, which is the weights', or f32 over weights in half precision.
impl Module for PackedGatedLinear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (Self { gate, up }, columns) = (self, 0..self.out_dim());
        if let (Weight::Packed(weight), Weight::Packed(of_up), Some(activation)) =
            (&gate.weight, &up.weight, gate.activation)
            && weight.is_like(of_up)
            && !xs.track_op()
        {
            gate.check(xs, &columns)?;
            let activation = Some(kernel_activation(activation)?);
            let after = After { activation, up: Some((of_up, up.bias.as_ref())), residual: None };
            return product(xs, Factor::Packed(weight.clone(), columns), gate.bias.as_ref(), after);
        }
        gate.forward(xs)?.mul(&up.forward(xs)?)
    }
}
