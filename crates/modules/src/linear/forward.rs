//! Products by the CPU's kernels as operations in Candle's graph, of a weight in panels and of one that is tracked for
//! gradients, and the same by Candle's own; and two projections of one input, one of which gates the other.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Activation, Linear};

use super::{Kind, OP, PackedLinear};
use crate::base::rowwise::{Element, Read, read, to_vec, with_float};
use crate::base::{check_memory, executor, record};
use candle_attention_kernels::Tier;
use candle_attention_kernels::linear::{self, Epilogue, Matrix, PackedWeight, Product, Right, Up};

/// The instruction set of products with a weight: one in particular, or the fastest.
pub(super) fn choose_tier(tier: Option<Tier>, dtype: DType) -> Result<Tier> {
    Tier::choose(tier, dtype == DType::BF16).map_err(|error| candle_core::Error::msg(format!("[{OP}] {error}")))
}

/// A packed weight and its bias.
pub(super) struct Packed {
    weight: PackedWeight,
    /// Of the weight that was packed.
    pub dtype: DType,
    /// What gives weight and bias back to the bit.
    linear_dtype: DType,
    bias: Option<Vec<f32>>,
}

impl Packed {
    /// Packs `weight` (out, in), in f32, bf16 or f16, and `bias` (out,), on the CPU.
    pub fn new(weight: &Tensor, bias: Option<&Tensor>, tier: Tier) -> Result<Self> {
        let weight = contiguous("weight", weight)?;
        let (storage, shape) = (read(&weight), weight.dims2()?);
        let packed = with_float!(OP, weight.dtype(), |E| {
            PackedWeight::new(storage.contiguous::<E>()?, shape, tier).map_err(kernel_error)
        });
        Self::with_bias(packed?, weight.dtype(), bias)
    }

    /// With `bias` (out,) on the CPU.
    pub fn with_bias(weight: PackedWeight, dtype: DType, bias: Option<&Tensor>) -> Result<Self> {
        let linear_dtype = if bias.is_none_or(|bias| bias.dtype() == dtype) { dtype } else { DType::F32 };
        let bias = bias.map(|bias| to_vec(&contiguous("bias", bias)?)).transpose()?;
        Ok(Self { weight, dtype, linear_dtype, bias })
    }

    pub fn to_linear(&self) -> Result<Linear> {
        let bias = |bias: &Vec<f32>| Tensor::new(bias.as_slice(), &Device::Cpu)?.to_dtype(self.linear_dtype);
        let weight = self.rows(None)?.to_dtype(self.linear_dtype)?;
        Ok(Linear::new(weight, self.bias.as_ref().map(bias).transpose()?))
    }

    /// The rows of some outputs or of all, (outputs, in), in the weight's dtype.
    pub fn rows(&self, outputs: Option<&[usize]>) -> Result<Tensor> {
        let shape = (outputs.map_or(self.weight.outputs(), <[_]>::len), self.weight.inputs());
        with_float!(OP, self.dtype, |E| {
            let rows = match outputs {
                Some(outputs) => self.weight.unpack_rows::<E>(outputs),
                None => self.weight.unpack(),
            };
            Tensor::from_vec(rows.map_err(kernel_error)?, shape, &Device::Cpu)
        })
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.weight.fmt(f)
    }
}

/// What follows a product in its pass, where nothing is tracked for gradients.
#[derive(Default)]
pub(super) struct After<'a> {
    pub activation: Option<linear::Activation>,
    /// What the activated outputs are multiplied by: a product of the same input.
    pub up: Option<&'a Packed>,
    /// What is added, (.., columns) in the input's dtype.
    pub residual: Option<&'a Tensor>,
}

/// The product of `xs` (.., in) with some outputs of a packed weight, and what follows it; all was checked.
pub(super) fn packed(xs: &Tensor, own: &Arc<Packed>, columns: Range<usize>, after: After) -> Result<Tensor> {
    let (xs, shape) = (with_even_rows("input", xs)?, with_width(xs.dims(), columns.len()));
    let residual = after.residual.map(|residual| contiguous("residual", residual)).transpose()?;
    with_float!(OP, xs.dtype(), |E| {
        let residual = residual.as_ref().map(read);
        let epilogue = Epilogue {
            bias: own.bias.as_deref(),
            activation: after.activation,
            up: after.up.map(|up| Up { weight: &up.weight, bias: up.bias.as_deref() }),
            residual: residual.as_ref().map(Read::contiguous).transpose()?,
        };
        let ys: Vec<E> = multiply(&xs, Right::Weight(&own.weight, columns.clone()), epilogue)?;
        let own = own.clone();
        record(OP, &[Some(&xs)], ys, shape, move |_, gradient| {
            let (gradient, right) =
                (with_even_rows("gradient", gradient)?, Right::Transposed(&own.weight, columns.clone()));
            let of_xs: Vec<E> = multiply(&gradient, right, Epilogue::default())?;
            let shape = with_width(gradient.dims(), own.weight.inputs());
            Ok(vec![Some(Tensor::from_vec(of_xs, shape, &Device::Cpu)?)])
        })
    })
}

/// `xs · weightᵀ + bias` of inputs (.., in), a weight (out, in) and a bias (out,) of one dtype, each of which may be
/// tracked for gradients. The weight is read as it is when this runs.
pub(super) fn tracked(xs: &Tensor, linear: &Linear, tier: Tier) -> Result<Tensor> {
    let (xs, weight) = (with_even_rows("input", xs)?, linear.weight());
    let weight =
        if matrix::<()>(&[], weight.layout()).is_some() { weight.clone() } else { contiguous("weight", weight)? };
    let bias = linear.bias().map(|bias| contiguous("bias", bias)).transpose()?;
    let shape = with_width(xs.dims(), weight.dim(0)?);
    with_float!(OP, xs.dtype(), |E| {
        // In f32.
        let added: Option<Vec<f32>> = bias.as_ref().map(|bias| to_vec(&bias.detach())).transpose()?;
        let epilogue = Epilogue { bias: added.as_deref(), ..Default::default() };
        let ys = with_matrix(&weight, |weight| multiply::<E>(&xs, Right::Matrix(weight.t(), tier), epilogue))?;
        let own = (xs.clone(), weight.clone(), bias.clone());
        record(OP, &[Some(&xs), Some(&weight), bias.as_ref()], ys, shape, move |_, gradient| {
            let ((xs, weight, bias), gradient) = (&own, flat("gradient", gradient)?);
            let product = |left: &Tensor, right: &Tensor| {
                let shape = (left.dim(0)?, right.dim(1)?);
                let with = |right: Matrix<E>| multiply::<E>(left, Right::Matrix(right, tier), Epilogue::default());
                Tensor::from_vec(with_matrix(right, with)?, shape, &Device::Cpu)
            };
            let of_xs = || product(&gradient, weight)?.reshape(xs.dims());
            // In the order in which the weight is stored.
            let of_weight = || match weight.is_contiguous() {
                true => product(&gradient.t()?, &flat("input", xs)?),
                false => product(&flat("input", xs)?.t()?, &gradient)?.t(),
            };
            let of_bias = || {
                let ones = Tensor::ones((1, gradient.dim(0)?), gradient.dtype(), &Device::Cpu)?;
                product(&ones, &gradient)?.squeeze(0)
            };
            Ok(vec![
                xs.track_op().then(of_xs).transpose()?,
                weight.track_op().then(of_weight).transpose()?,
                bias.as_ref().filter(|bias| bias.track_op()).map(|_| of_bias()).transpose()?,
            ])
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

/// Gives a function the matrix that a tensor is in memory.
fn with_matrix<E: Element, R>(tensor: &Tensor, run: impl FnOnce(Matrix<E>) -> Result<R>) -> Result<R> {
    let own = read(tensor);
    match matrix(own.elements()?, own.layout) {
        Some(matrix) => run(matrix),
        None => bail!("[{OP}] lines of strides {:?} are not contiguous and evenly spaced", own.layout.stride()),
    }
}

/// A product on the threads of brief calls.
fn multiply<E: Element>(left: &Tensor, right: Right<E>, epilogue: Epilogue<E>) -> Result<Vec<E>> {
    with_matrix(left, |left| {
        linear::multiply_vec(&Product { left, right, epilogue, executor: executor() }).map_err(kernel_error)
    })
}

/// Itself, or a copy whose rows are contiguous and at one distance.
fn with_even_rows(what: &str, xs: &Tensor) -> Result<Tensor> {
    let is_even = matrix::<()>(&[], xs.layout()).is_some_and(|rows| !rows.is_transposed);
    if is_even { Ok(xs.clone()) } else { contiguous(what, xs) }
}

/// (.., width) as (rows, width), contiguous.
fn flat(what: &str, xs: &Tensor) -> Result<Tensor> {
    let (width, lead) = (xs.dim(D::Minus1)?, &xs.dims()[..xs.rank() - 1]);
    contiguous(what, xs)?.reshape((lead.iter().product::<usize>(), width))
}

/// Some outputs of a projection, in a dtype.
pub(super) fn outputs(linear: &Linear, columns: &Range<usize>, dtype: DType) -> Result<Linear> {
    let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len())?.to_dtype(dtype);
    Ok(Linear::new(own(linear.weight())?, linear.bias().map(own).transpose()?))
}

/// By Candle's own operations, with gradients, on any device.
pub(super) fn plain(linear: &Linear, xs: &Tensor) -> Result<Tensor> {
    let out = with_width(xs.dims(), linear.weight().dim(0)?);
    if out.elem_count() == 0 || xs.elem_count() == 0 {
        let zeros = Tensor::zeros(out, xs.dtype(), xs.device())?;
        return linear.bias().map_or(Ok(zeros.clone()), |bias| zeros.broadcast_add(bias));
    }
    // Candle multiplies no vectors.
    linear.forward(&flat("input", xs)?)?.reshape(out)
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
        let columns = 0..self.out_dim();
        if let (Kind::Packed(gate), Kind::Packed(up), Some(activation)) =
            (&self.gate.kind, &self.up.kind, self.gate.activation)
            && gate.weight.is_like(&up.weight)
            && !xs.track_op()
        {
            self.gate.check(xs, &columns)?;
            let after = After { activation: Some(kernel_activation(activation)?), up: Some(up), residual: None };
            return packed(xs, gate, columns, after);
        }
        self.gate.forward(xs)?.mul(&self.up.forward(xs)?)
    }
}
