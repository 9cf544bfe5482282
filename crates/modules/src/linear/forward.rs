//! A weight in panels as one of Candle's custom operations, and the same by Candle's own; and two projections of one
//! input, one of which gates the other.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Tensor, WithDType, bail};
use candle_nn::{Activation, Linear};

use super::tracked::{packed_input_gradient, rows_of, with_even_rows};
use super::{Kind, OP, PackedLinear};
use crate::base::rowwise::{Read, read, to_vec, with_float};
use crate::base::{check_memory, executor};
use candle_attention_kernels::linear::{self, Codes, Epilogue, Matrix, PackedWeight, Product, Right, Up};
use candle_attention_kernels::{Element, Tier};

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

    /// Packs codes that stand for f32, and `bias` (out,) on the CPU.
    pub fn of_codes(codes: &Codes, shape: (usize, usize), bias: Option<&Tensor>) -> Result<Self> {
        let tier = choose_tier(None, DType::F32)?;
        Self::with_bias(PackedWeight::from_codes(codes, shape, tier).map_err(kernel_error)?, DType::F32, bias)
    }

    fn with_bias(weight: PackedWeight, dtype: DType, bias: Option<&Tensor>) -> Result<Self> {
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

/// A forward pass to some of the outputs, with what follows in the same pass. Only the product alone has a backward
/// pass.
pub(super) struct Columns {
    pub packed: Arc<Packed>,
    pub columns: Range<usize>,
    pub activation: Option<linear::Activation>,
    /// What the activated outputs are multiplied by: a product of the same input.
    pub up: Option<Arc<Packed>>,
    /// What is added, (.., columns) in the input's dtype.
    pub residual: Option<Tensor>,
}

impl Columns {
    /// The product alone.
    pub fn new(packed: &Arc<Packed>, columns: Range<usize>) -> Self {
        Self { packed: packed.clone(), columns, activation: None, up: None, residual: None }
    }

    /// The product with `xs` (.., in); all was checked.
    pub fn forward(self, xs: &Tensor) -> Result<Tensor> {
        let residual = self.residual.as_ref().map(|residual| contiguous("residual", residual)).transpose()?;
        with_even_rows("input", xs)?.apply_op1(Self { residual, ..self })
    }

    fn run<X: Element + WithDType>(&self, xs: &[X], layout: &Layout) -> Result<Vec<X>> {
        let Packed { weight, bias, .. } = &*self.packed;
        let residual = self.residual.as_ref().map(read);
        let epilogue = Epilogue {
            bias: bias.as_deref(),
            activation: self.activation,
            up: self.up.as_ref().map(|up| Up { weight: &up.weight, bias: up.bias.as_deref() }),
            residual: residual.as_ref().map(Read::contiguous).transpose()?,
        };
        multiply(rows_of(xs, layout)?, Right::Weight(weight, self.columns.clone()), epilogue)
    }
}

impl CustomOp1 for Columns {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ys = with_float!(OP, xs.dtype(), |E| E::to_cpu_storage_owned(self.run(xs.as_slice::<E>()?, layout)?));
        Ok((ys, with_width(layout.dims(), self.columns.len())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        if self.activation.is_some() || self.up.is_some() || self.residual.is_some() {
            bail!("[{OP}] what follows a product in its pass has no gradient")
        }
        packed_input_gradient(gradient, &self.packed.weight, self.columns.clone()).map(Some)
    }
}

/// A product on the threads of brief calls.
pub(super) fn multiply<X: Element>(left: Matrix<X>, right: Right<X>, epilogue: Epilogue<X>) -> Result<Vec<X>> {
    linear::multiply_vec(&Product { left, right, epilogue, executor: executor() }).map_err(kernel_error)
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
pub(super) fn with_width(dims: &[usize], width: usize) -> Shape {
    let mut dims = dims.to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    dims.into()
}

/// The stride between rows, if all dimensions before the last count rows at one distance. Rows of nothing are anywhere.
pub(super) fn row_stride(layout: &Layout) -> Option<usize> {
    if layout.shape().elem_count() == 0 {
        return Some(0);
    }
    let mut counts = layout.dims()[..layout.dims().len() - 1].iter().zip(layout.stride()).filter(|&(&dim, _)| dim != 1);
    let mut pairs = counts.clone().zip(counts.clone().skip(1));
    let is_even = pairs.all(|((_, &outer), (&dim, &inner))| outer == dim * inner);
    is_even.then(|| counts.next_back().map_or(0, |(_, &stride)| stride))
}

/// Candle's own operations, with gradients, on any device.
pub(super) fn plain(linear: &Linear, xs: &Tensor, columns: Range<usize>) -> Result<Tensor> {
    let part = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len())?.to_dtype(xs.dtype());
    let bias = linear.bias().map(part).transpose()?;
    let out = with_width(xs.dims(), columns.len());
    let rows: usize = xs.dims()[..xs.rank() - 1].iter().product();
    if rows == 0 || columns.is_empty() || xs.elem_count() == 0 {
        let zeros = Tensor::zeros(out, xs.dtype(), xs.device())?;
        return match bias {
            Some(bias) => zeros.broadcast_add(&bias),
            None => Ok(zeros),
        };
    }
    // Candle multiplies no vectors.
    let xs = contiguous("input", xs)?.reshape((rows, ()))?;
    Linear::new(part(linear.weight())?, bias).forward(&xs)?.reshape(out)
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
            let (activation, up) = (Some(kernel_activation(activation)?), Some(up.clone()));
            return Columns { activation, up, ..Columns::new(gate, columns) }.forward(xs);
        }
        self.gate.forward(xs)?.mul(&self.up.forward(xs)?)
    }
}
