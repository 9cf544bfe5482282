//! Projections by the CPU's own kernels.

mod forward;
mod projections;
mod quantized;

use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Activation, Linear, VarBuilder};

use crate::base::rowwise::to_vec;
use crate::base::{Dim, Expect, FLOATS, check_memory, frozen, is_addressable, part};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::linear::PackedWeight;
pub use forward::PackedGatedLinear;
use forward::{
    After, Factor, as_matrix, choose_instruction_set, contiguous, kernel_activation, pack, plain, product, unpack,
};
pub use projections::{
    ByPlace, PackedProjection, Projected, Projection, ProjectionModule, ProjectionModules, Projections,
};

const OP: &str = "packed_linear";

/// A projection `x Wᵀ + b` that holds its weight in the order in which the CPU reads it: [`Linear`] for inference and
/// for training.
///
/// On a CPU, for f32, bf16 and f16, the weight is packed once and kept as it is, never widened; products are summed in
/// f32, the bias is added to the sum, and the output is rounded once. An output's bits depend on its own row of input
/// alone: not on the other rows of the batch, nor on the number of threads. One row runs at the speed at which memory
/// gives the weight, many at the speed of the processor's multiply-adds.
///
/// A weight or bias that is tracked for gradients - a variable, or what was computed from variables - is not packed,
/// since training changes variables in place: each call reads what they hold then, and the thread that multiplies puts
/// a block of the weight in order in its cache. Outputs have the same bits either way. [`freeze`](Self::freeze) packs
/// what they hold.
///
/// Gradients are products of the same kind: of the input through packed and tracked weights, and of tracked weights and
/// biases, summed in f32 whatever the dtype, with the same bits for any number of threads.
///
/// On another device and for f64 it is Candle's own [`Linear`] under the same name. Weights of GGUF files are packed in
/// their own types ([`from_qtensor`](Self::from_qtensor)).
///
/// ```
/// use candle_attention::PackedLinear;
/// use candle_core::{Device, Module, Tensor};
/// use candle_nn::Linear;
/// # fn main() -> candle_core::Result<()> {
/// let linear = Linear::new(Tensor::randn(0f32, 1., (24, 16), &Device::Cpu)?, None);
/// let packed = PackedLinear::from_linear(&linear)?;
/// let ys = packed.forward(&Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?)?;
/// assert_eq!(ys.dims(), [2, 5, 24]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PackedLinear {
    weight: Weight,
    /// (out,), a copy in f32 beside a packed weight.
    bias: Option<Tensor>,
    /// (out, in).
    shape: (usize, usize),
    dtype: DType,
    /// What gives weight and bias back to the bit.
    linear_dtype: DType,
    device: Device,
    activation: Option<Activation>,
}

#[derive(Debug, Clone)]
enum Weight {
    Packed(Arc<PackedWeight>),
    /// Read in each call: by the CPU's kernels, where it is tracked for gradients, or by Candle's own operations.
    Plain(Tensor, Option<InstructionSet>),
    /// One that Candle multiplies.
    Quantized(Arc<QTensor>, QMatMul),
}

/// [`candle_nn::linear`](candle_nn::linear()), packed: `weight` (out, in) and `bias` (out,) below the builder's prefix.
///
/// # Errors
/// For missing or misshapen tensors.
pub fn packed_linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<PackedLinear> {
    candle_nn::linear(in_dim, out_dim, vb)?.try_into()
}

/// [`candle_nn::linear_no_bias`](candle_nn::linear_no_bias()), packed: `weight` (out, in) below the builder's prefix.
///
/// # Errors
/// For a missing or misshapen tensor.
pub fn packed_linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<PackedLinear> {
    candle_nn::linear_no_bias(in_dim, out_dim, vb)?.try_into()
}

/// [`packed_linear`] or [`packed_linear_no_bias`].
///
/// # Errors
/// As these.
pub fn packed_linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<PackedLinear> {
    if bias { packed_linear(in_dim, out_dim, vb) } else { packed_linear_no_bias(in_dim, out_dim, vb) }
}

impl PackedLinear {
    /// Packs `weight` (out, in) and `bias` (out,) of one dtype and device.
    ///
    /// # Errors
    /// For shapes, dtypes or devices that do not fit, and if memory is short.
    pub fn new(weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        Self::with_instruction_set(weight, bias, None)
    }

    /// [`new`](Self::new) for a chosen instruction set instead of the fastest, for tests and comparisons.
    ///
    /// # Errors
    /// As [`new`](Self::new), if the processor lacks the instruction set, and for an instruction set on another device
    /// or in f64.
    pub fn with_instruction_set(
        weight: &Tensor,
        bias: Option<&Tensor>,
        instruction_set: Option<InstructionSet>,
    ) -> Result<Self> {
        let dtype = weight.dtype();
        Expect::one(OP, "weight", weight).shape(&["out", "in"].map(Dim::Any))?.dtype_of(&FLOATS, "")?;
        if !is_addressable(weight.dims()) {
            bail!("[{OP}] weight has shape {:?}, which is too large to address", weight.dims())
        }
        if let Some(bias) = bias {
            let bias = Expect::one(OP, "bias", bias).shape(&[Dim::Is(weight.dims()[0])])?;
            bias.dtype(dtype, "the weight's")?.same_device("the weight", weight.device())?;
        }
        let own = match instruction_set {
            _ if weight.device().is_cpu() && dtype != DType::F64 => {
                match choose_instruction_set(instruction_set, dtype)? {
                    instruction_set if weight.track_op() || bias.is_some_and(Tensor::track_op) => {
                        Weight::Plain(weight.clone(), Some(instruction_set))
                    }
                    instruction_set => Weight::Packed(pack(weight, instruction_set)?.into()),
                }
            }
            Some(instruction_set) => bail!(
                "[{OP}] a weight in {dtype:?} on {:?} is not packed, expected no instruction set, found {instruction_set}",
                weight.device().location()
            ),
            None => Weight::Plain(weight.clone(), None),
        };
        Self::of(own, bias, weight.dims2()?, dtype, weight.device())
    }

    /// All of which was checked.
    fn of(weight: Weight, bias: Option<&Tensor>, shape: (usize, usize), dtype: DType, device: &Device) -> Result<Self> {
        let linear_dtype = bias.map_or(dtype, Tensor::dtype);
        let bias = match (&weight, bias) {
            (Weight::Packed(_), Some(bias)) => {
                Some(Tensor::from_vec(to_vec::<f32>(&contiguous("bias", bias)?)?, shape.0, device)?)
            }
            _ => bias.cloned(),
        };
        Ok(Self { weight, bias, shape, dtype, linear_dtype, device: device.clone(), activation: None })
    }

    /// Packs a [`Linear`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_linear(linear: &Linear) -> Result<Self> {
        Self::new(linear.weight(), linear.bias())
    }

    /// The same with an activation of its outputs, which is computed while they are in a cache, in f32, before they are
    /// rounded: [`Gelu`](Activation::Gelu) (erf), [`NewGelu`](Activation::NewGelu) and
    /// [`GeluPytorchTanh`](Activation::GeluPytorchTanh), [`Silu`](Activation::Silu), [`Swish`](Activation::Swish) and
    /// [`Relu`](Activation::Relu), to 5e-7 of the number that they are applied to. For an input that is tracked for
    /// gradients it is Candle's own operation.
    ///
    /// ```
    /// use candle_attention::PackedLinear;
    /// use candle_core::{Device, Module, Tensor};
    /// use candle_nn::{Activation, Linear};
    /// # fn main() -> candle_core::Result<()> {
    /// let up = Linear::new(Tensor::randn(0f32, 1., (64, 16), &Device::Cpu)?, None);
    /// let down = Linear::new(Tensor::randn(0f32, 1., (16, 64), &Device::Cpu)?, None);
    /// let packed_up = PackedLinear::from_linear(&up)?.with_activation(Activation::Gelu)?;
    /// let packed_down = PackedLinear::from_linear(&down)?;
    ///
    /// let xs = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// let ys = packed_down.forward_with_residual(&packed_up.forward(&xs)?, &xs)?;
    ///
    /// let expected = (down.forward(&up.forward(&xs)?.gelu_erf()?)? + &xs)?;
    /// let difference = (ys - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    /// assert!(difference < 1e-3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For any other activation.
    pub fn with_activation(self, activation: Activation) -> Result<Self> {
        kernel_activation(activation)?;
        Ok(Self { activation: Some(activation), ..self })
    }

    /// The activation of its outputs.
    pub fn activation(&self) -> Option<Activation> {
        self.activation
    }

    /// The same with what variables hold now, packed, and nothing tracked for gradients: for inference after training.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let Weight::Plain(weight, instruction_set) = &self.weight else { return Ok(self.clone()) };
        let bias = self.bias.as_ref().map(frozen).transpose()?;
        let packed = Self::with_instruction_set(&frozen(weight)?, bias.as_ref(), *instruction_set)?;
        Ok(Self { activation: self.activation, ..packed })
    }

    /// The projection as a [`Linear`] again, to the bit; its activation is no part of that. One of a quantised weight
    /// is in f32.
    ///
    /// # Errors
    /// If memory is short.
    pub fn to_linear(&self) -> Result<Linear> {
        let weight = match &self.weight {
            Weight::Packed(weight) => unpack(weight, self.dtype, None)?,
            Weight::Plain(weight, _) => weight.clone(),
            Weight::Quantized(weight, _) => weight.dequantize(&self.device)?,
        };
        let own = |tensor: &Tensor| tensor.to_dtype(self.linear_dtype);
        Ok(Linear::new(own(&weight)?, self.bias.as_ref().map(own).transpose()?))
    }

    /// Rows of the weight, (out, in), in its dtype: ids (..) in u32 give (.., in). A table of embeddings that is the
    /// weight of a head as well is held once that way.
    ///
    /// ```
    /// use candle_attention::PackedLinear;
    /// use candle_core::{Device, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let head = PackedLinear::new(&Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?, None)?;
    /// let embedded = head.weight_rows(&Tensor::new(&[[2u32, 0]], &Device::Cpu)?)?;
    /// assert_eq!(embedded.to_vec3::<f32>()?, [[[5., 6.], [1., 2.]]]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For ids of another dtype or on another device, and those that are no outputs.
    pub fn weight_rows(&self, ids: &Tensor) -> Result<Tensor> {
        Expect::many(OP, "ids", ids).dtype_of(&[DType::U32], "")?.same_device("the weight", self.device())?;
        let flat: Vec<u32> = to_vec(ids)?;
        if let Some(id) = flat.iter().find(|&&id| id as usize >= self.out_dim()) {
            bail!("[{OP}] id {id} is no row of the weight, expected one below {}", self.out_dim())
        }
        let list = || Tensor::new(flat.as_slice(), self.device());
        let rows = match &self.weight {
            // Candle selects no rows of a view of nothing, which may begin past the end of its buffer.
            _ if flat.len() * self.in_dim() == 0 => {
                Tensor::zeros((flat.len(), self.in_dim()), self.dtype(), self.device())?
            }
            Weight::Packed(weight) => {
                let outputs: Vec<_> = flat.iter().map(|&id| id as usize).collect();
                unpack(weight, self.dtype, Some(&outputs))?
            }
            Weight::Plain(weight, _) => weight.index_select(&list()?, 0)?,
            Weight::Quantized(weight, _) => weight.embedding(&list()?)?,
        };
        rows.reshape([ids.dims(), &[self.in_dim()]].concat())
    }

    /// The width of the output.
    pub fn out_dim(&self) -> usize {
        self.shape.0
    }

    /// The width of the input.
    pub fn in_dim(&self) -> usize {
        self.shape.1
    }

    /// The weight's dtype; f32 of a quantised one.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the weight is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the weight is packed: on a CPU, in a type that is, and not tracked for gradients.
    pub fn is_packed(&self) -> bool {
        matches!(self.weight, Weight::Packed(_))
    }

    /// Some of the outputs only, with the bits that [`forward`](Module::forward) gives them: (.., in) gives
    /// (.., `columns.len()`). Several projections of one input can share a weight that way.
    ///
    /// # Errors
    /// As [`forward`](Module::forward), and for columns beyond the width of the output.
    pub fn forward_columns(&self, xs: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        self.product(xs, columns, None)
    }

    /// [`forward`](Module::forward) plus a residual of the output's shape and dtype, which is added before the sum is
    /// rounded: (.., in) and (.., out) give (.., out). Both may be tracked for gradients.
    ///
    /// # Errors
    /// As [`forward`](Module::forward), and for a residual of another shape, dtype or device than the output's.
    pub fn forward_with_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.product(xs, 0..self.out_dim(), Some(residual))
    }

    /// That there are such columns, and that the input fits the weight.
    fn check(&self, xs: &Tensor, columns: &Range<usize>) -> Result<()> {
        if columns.start > columns.end || columns.end > self.out_dim() {
            bail!("[{OP}] columns {columns:?} were asked for, expected a part of 0..{}", self.out_dim())
        }
        let input = Expect::one(OP, "input", xs).shape(&[Dim::Any(".."), Dim::Is(self.in_dim())])?;
        let input = match self.dtype() {
            dtype @ (DType::BF16 | DType::F16) => {
                input.dtype_of(&[dtype, DType::F32], format_args!(" beside a weight in {dtype:?}"))?
            }
            dtype => input.dtype(dtype, "the weight's")?,
        };
        input.same_device("the weight", self.device())?;
        if !is_addressable(xs.dims()) {
            bail!("[{OP}] input has shape {:?}, which is too large to address", xs.dims())
        }
        let rows: usize = xs.dims()[..xs.rank() - 1].iter().product();
        check_memory(OP, format_args!("an output of {rows} rows of {}", columns.len()), &[rows, columns.len()])
    }

    /// Some of the outputs, with what follows.
    pub fn product(&self, xs: &Tensor, columns: Range<usize>, residual: Option<&Tensor>) -> Result<Tensor> {
        self.check(xs, &columns)?;
        if let Some(residual) = residual {
            let expected = [&xs.dims()[..xs.rank() - 1], &[columns.len()]].concat();
            let residual = Expect::one(OP, "residual", residual).sizes(&expected)?;
            residual.dtype(xs.dtype(), "the input's")?.same_device("the input", xs.device())?;
        }
        let is_tracked = xs.track_op() || residual.is_some_and(Tensor::track_op);
        let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len())?.to_dtype(xs.dtype());
        let bias = || self.bias.as_ref().map(|bias| contiguous("bias", &own(bias)?)).transpose();
        let ys = match &self.weight {
            Weight::Packed(weight) => {
                let (factor, bias) = (Factor::Packed(weight.clone(), columns), self.bias.as_ref());
                if !is_tracked {
                    let activation = self.activation.map(kernel_activation).transpose()?;
                    return product(xs, factor, bias, After { activation, residual, up: None });
                }
                product(xs, factor, bias, After::default())?
            }
            Weight::Plain(weight, Some(instruction_set)) => {
                let factor = Factor::Matrix(as_matrix("weight", &own(weight)?)?, *instruction_set);
                product(xs, factor, bias()?.as_ref(), After::default())?
            }
            // Candle's product has no gradient and takes no input of nothing, and no vector.
            Weight::Quantized(_, of_candle) if !xs.track_op() && xs.elem_count() > 0 => {
                let rows = contiguous("input", xs)?.reshape(((), self.in_dim()))?;
                let ys =
                    of_candle.forward(&rows)?.reshape([&xs.dims()[..xs.rank() - 1], &[self.out_dim()]].concat())?;
                let ys = part(&ys, xs.rank() - 1, columns.clone())?;
                bias()?.map_or(Ok(ys.clone()), |bias| ys.broadcast_add(&bias))?
            }
            _ => plain(&Linear::new(own(self.to_linear()?.weight())?, bias()?), xs)?,
        };
        let ys = if let Some(activation) = self.activation { activation.forward(&ys)? } else { ys };
        match residual {
            Some(residual) => ys + residual,
            None => Ok(ys),
        }
    }
}

/// (.., in) gives (.., out) in the input's dtype, which is the weight's, or f32 over a weight in half precision.
impl Module for PackedLinear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_columns(xs, 0..self.out_dim())
    }
}

impl TryFrom<Linear> for PackedLinear {
    type Error = candle_core::Error;

    fn try_from(linear: Linear) -> Result<Self> {
        Self::from_linear(&linear)
    }
}

impl TryFrom<PackedLinear> for Linear {
    type Error = candle_core::Error;

    fn try_from(packed: PackedLinear) -> Result<Self> {
        packed.to_linear()
    }
}
