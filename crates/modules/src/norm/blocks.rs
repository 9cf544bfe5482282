//! The norms between the layers of a model, under candle-nn's names.

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};

use super::cuda::CudaGatedNorm;
use super::metal::gated_norm_on_metal;
use super::{Norm, QkNormKind};
use crate::base::{Dim, Expect, Parameter, ParameterReader, check_memory, number};
use crate::gate::GateActivation;

const RMS: &str = "rms_norm";
const LAYER: &str = "layer_norm";

/// `x / sqrt(mean(x²) + eps) · weight` over the last dimension: [`candle_nn::RmsNorm`] with gradients
/// (<https://arxiv.org/abs/1910.07467>).
///
/// candle-nn's own norm records no gradient for a contiguous input: parameters before it do not train, and there is no
/// error.
///
/// On a CPU, for f32, bf16 and f16, the norm is one pass over the input, of any strides, and one pass backward. Rows
/// are computed in f32 and rounded once. Gradients of weights are summed in f32, with the same bits for any number of
/// threads. On CUDA, for the same dtypes, the norm is one kernel, and the backward pass has three, with the same bits
/// every time. For f64 and on other devices the norm is made of Candle's operations. A weight that is a variable is
/// read in each call.
///
/// ```
/// use candle_attention::rms_norm;
/// use candle_core::{DType, Device, Module, Tensor, Var};
/// use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let norm = rms_norm(16, 1e-6, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("input_layernorm"))?;
///
/// let below = Var::from_tensor(&Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?)?;
/// let gradients = norm.forward(&below)?.sqr()?.sum_all()?.backward()?;
/// assert!(gradients.get(&below).is_some() && gradients.get(norm.weight()).is_some());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RmsNorm(Norm);

/// `(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias` over the last dimension, or without the bias:
/// [`candle_nn::LayerNorm`] with gradients (<https://arxiv.org/abs/1607.06450>).
///
/// candle-nn's own norm records no gradient with a bias and a contiguous input. [`RmsNorm`] says how the norm is
/// computed. On a CPU the mean is subtracted before the variance is computed, so that rows far from zero keep their
/// digits.
///
/// ```
/// use candle_attention::LayerNorm;
/// use candle_core::{Device, Module, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let weight = Tensor::new(&[1f32, 1.], &Device::Cpu)?;
/// let bias = Tensor::new(&[0f32, 5.], &Device::Cpu)?;
/// let norm = LayerNorm::new(weight, bias, 0.0)?;
/// let ys = norm.forward(&Tensor::new(&[[1f32, 3.], [10., 2.]], &Device::Cpu)?)?;
/// assert_eq!(ys.to_vec2::<f32>()?, [[-1., 6.], [1., 4.]]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct LayerNorm(Norm);

/// Loads an [`RmsNorm`], as [`candle_nn::rms_norm`](candle_nn::rms_norm()) does: `weight` (size,), also read as
/// `gamma`, below the prefix of `vb`.
///
/// # Errors
/// For a missing or misshapen tensor, for a bias in the file, and for an `eps` that is negative or not finite.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm(load(RMS, QkNormKind::Rms, size, LayerNormConfig { affine: false, ..eps.into() }, vb)?))
}

/// Loads an [`RmsNorm`] that multiplies by `1 + weight` (Gemma). A new weight is initialised with 0.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_plus_one(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    Ok(RmsNorm(load(RMS, QkNormKind::RmsPlusOne, size, LayerNormConfig { affine: false, ..eps.into() }, vb)?))
}

/// Loads a [`LayerNorm`], as [`candle_nn::layer_norm`](candle_nn::layer_norm()) does: `weight` and `bias` (size,), also
/// read as `gamma` and `beta`, below the prefix of `vb`. The config is candle-nn's, or `eps` alone. `affine` says
/// whether there is a bias. Without `remove_mean` the formula is that of [`RmsNorm`].
///
/// # Errors
/// For missing or misshapen tensors, for a bias in the file that the config denies, and for an `eps` that is negative
/// or not finite.
pub fn layer_norm(size: usize, config: impl Into<LayerNormConfig>, vb: VarBuilder) -> Result<LayerNorm> {
    let config = config.into();
    let kind = if config.remove_mean { QkNormKind::Layer } else { QkNormKind::Rms };
    Ok(LayerNorm(load(LAYER, kind, size, config, vb)?))
}

/// Loads a [`LayerNorm`] without a bias.
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { affine: false, ..eps.into() }, vb)
}

impl RmsNorm {
    /// Creates a norm with `weight` (size,).
    ///
    /// # Errors
    /// For a weight of another rank or of integers, and for an `eps` that is negative or not finite.
    pub fn new(weight: Tensor, eps: f64) -> Result<Self> {
        Ok(Self(checked(RMS, QkNormKind::Rms, eps, weight, None)?))
    }

    /// Creates a norm with the factor `1 + weight` (size,), as Gemma stores it. The sum is not rounded to half
    /// precision.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn plus_one(weight: Tensor, eps: f64) -> Result<Self> {
        Ok(Self(checked(RMS, QkNormKind::RmsPlusOne, eps, weight, None)?))
    }

    /// Normalises (B, T, H, size) and multiplies by an activated gate of the same shape and dtype, rounded once.
    ///
    /// # Errors
    /// As [`forward`](Module::forward), and for a gate of another shape, dtype or device than the input.
    pub fn forward_gated(&self, xs: &Tensor, gate: &Tensor, activation: GateActivation) -> Result<Tensor> {
        check(RMS, &self.0, xs)?.shape(&[Dim::Any("B"), Dim::Any("T"), Dim::Any("H"), Dim::Any("size")])?;
        let gate_in = Expect::one(RMS, "gate", gate).sizes(xs.dims())?;
        gate_in.dtype(xs.dtype(), "the input's")?.same_device("the input", xs.device())?;
        let affine = self.0.affine()?;
        if let Some(rows) = self.0.rows(xs, &affine) {
            return rows.apply_gated(xs, &affine.weight, gate, activation);
        }
        if xs.device().is_cuda()
            && let Some(call) = CudaGatedNorm::plan(self.0.row_norm(), xs, &affine.weight, gate, activation)
        {
            return call.run();
        }
        if xs.device().is_metal()
            && let Some(ys) = gated_norm_on_metal(self.0.row_norm(), xs, &affine.weight, gate, activation)
        {
            return ys;
        }
        activation.gate(&self.forward(xs)?, gate)
    }

    /// Returns the weight, (size,), without the one that is added to it.
    pub fn weight(&self) -> &Tensor {
        self.0.weight.first()
    }

    /// Returns the number that is added to the mean square.
    pub fn eps(&self) -> f64 {
        self.0.eps
    }

    /// Returns a copy for inference after training: with the current values of variables, without gradients.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self(self.0.freeze()?))
    }
}

impl LayerNorm {
    /// Creates a norm with `weight` and `bias` (size,) of one dtype and device.
    ///
    /// # Errors
    /// For a weight of another rank or of integers, for a bias of another size, dtype or device, and for an `eps` that
    /// is negative or not finite.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Result<Self> {
        Ok(Self(checked(LAYER, QkNormKind::Layer, eps, weight, Some(bias))?))
    }

    /// Creates a norm with `weight` (size,) and no bias.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Result<Self> {
        Ok(Self(checked(LAYER, QkNormKind::LayerNoBias, eps, weight, None)?))
    }

    /// Returns the weight, (size,).
    pub fn weight(&self) -> &Tensor {
        self.0.weight.first()
    }

    /// Returns the bias, (size,).
    pub fn bias(&self) -> Option<&Tensor> {
        self.0.bias.as_ref().map(Parameter::first)
    }

    /// Returns the number that is added to the variance.
    pub fn eps(&self) -> f64 {
        self.0.eps
    }

    /// Returns a copy for inference after training: with the current values of variables, without gradients.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self(self.0.freeze()?))
    }
}

/// Normalises (.., size) to the same shape and dtype. Inputs are f32, bf16 or f16 with a weight in any of these, or f64
/// with a weight in f64.
impl Module for RmsNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        forward(RMS, &self.0, xs)
    }
}

/// Normalises (.., size) as [`RmsNorm`] does.
impl Module for LayerNorm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        forward(LAYER, &self.0, xs)
    }
}

fn load(op: &'static str, kind: QkNormKind, size: usize, config: LayerNormConfig, vb: VarBuilder) -> Result<Norm> {
    number::epsilon(op, "eps", config.eps)?;
    let source = ParameterReader::new(op, "candle-nn", vb)?;
    Norm::load(kind, config.eps, size, config.affine, &source)
}

fn checked(op: &str, kind: QkNormKind, eps: f64, weight: Tensor, bias: Option<Tensor>) -> Result<Norm> {
    number::epsilon(op, "eps", eps)?;
    Expect::one(op, "weight", &weight).shape(&[Dim::Any("size")])?.float("")?;
    check_memory(op, format_args!("a weight of shape {:?}", weight.dims()), weight.dims())?;
    if let Some(bias) = &bias {
        let bias = Expect::one(op, "bias", bias).shape(&[Dim::Is(weight.dims()[0])])?;
        bias.dtype(weight.dtype(), "the weight's")?.same_device("the weight", weight.device())?;
    }
    Norm::new(kind, eps, weight.into(), bias.map(Parameter::from))
}

/// Checks the shape, dtype and device of an input, and that the output can be allocated.
fn check<'a>(op: &'a str, norm: &Norm, xs: &'a Tensor) -> Result<Expect<'a>> {
    let weight = norm.weight.first();
    let expected =
        if weight.dtype() == DType::F64 { &[DType::F64][..] } else { &[DType::F32, DType::F16, DType::BF16] };
    let input = Expect::one(op, "input", xs).shape(&[Dim::Any(".."), Dim::Is(weight.dims()[0])])?;
    let input = input.dtype_of(expected, format_args!(" with a weight in {:?}", weight.dtype()))?;
    check_memory(op, format_args!("an output of shape {:?}", xs.dims()), xs.dims())?;
    input.same_device("the weight", weight.device())
}

fn forward(op: &str, norm: &Norm, xs: &Tensor) -> Result<Tensor> {
    check(op, norm, xs)?;
    match xs.rank() {
        // All rows in one dimension, which is no copy of a contiguous input.
        rank if rank > 4 || (rank == 4 && xs.is_contiguous()) => {
            norm.forward(&xs.flatten_to(D::Minus2)?)?.reshape(xs.shape())
        }
        _ => norm.forward(xs),
    }
}
