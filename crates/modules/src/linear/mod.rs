//! Linear layers on the CPU kernels.

mod backend;
mod codes;
mod cuda;
mod forward;
mod gated;
mod gpu_codes;
mod kernel_codes;
mod matrix;
mod metal;
mod product;
mod projections;
mod quantized;
mod read;

use std::sync::Arc;

use candle_attention_cuda::CodedWeight;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::{Activation, Linear, VarBuilder};

use crate::base::rowwise::to_vec;
use crate::base::{Dim, Expect, frozen, is_addressable};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::linear::{PackedWeight, WeightShape};
pub(crate) use cuda::ROWS_CASE;
pub use gated::PackedGatedLinear;
use gpu_codes::dequantized;
pub(crate) use gpu_codes::{CODES_CASE, METAL_CODES_CASE};
use matrix::contiguous;
pub(crate) use metal::METAL_LINEAR_CASE;
use product::{choose_instruction_set, kernel_activation, pack, unpack};
pub use projections::{
    AdaptedLinear, ByProjection, IDLE_CALLS, KeysAndValues, LoraMatrices, NamedUpdates, Outputs, PackedProjection,
    Projected, Projection, ProjectionModule, ProjectionModules, Projections, ReplacedRows, UpdatedRows, UpdatesOfCall,
};

const OP: &str = "packed_linear";

/// A linear layer `x Wᵀ + b` whose weight is stored in the order in which the CPU kernels read it: a [`Linear`] for
/// inference and for training.
///
/// On a CPU, for f32, bf16 and f16, the weight is packed once, in its own dtype. Products are summed in f32, the bias
/// is added to the sum, and the output is rounded once. The bits of an output depend on its own row of the input alone,
/// not on the other rows of the batch or the number of threads. The speed of one row is bound by the memory bandwidth,
/// the speed of many rows by the multiply-adds of the processor.
///
/// A weight or bias that is tracked for gradients (a variable, or a tensor computed from variables) is not packed,
/// because training changes variables in place. Each call reads the current values, and each thread packs one block of
/// the weight at a time into its cache. The outputs have the same bits as with a packed weight.
/// [`freeze`](Self::freeze) packs the current values.
///
/// Gradients are products of the same kind: gradients of the input through packed and tracked weights, and gradients of
/// tracked weights and biases. They are summed in f32 for every dtype, with the same bits for any number of threads.
///
/// On CUDA, and on Metal where its kernels run, a product of at most eight rows without gradients, as for a token that
/// is generated, is one kernel with its bias, activation and residual, summed in f32 and rounded once. Otherwise, on
/// other devices and for f64, the layer computes as Candle's [`Linear`]. Quantised weights are stored as codes on a CPU
/// and where such kernels run ([`from_quantized_on`](Self::from_quantized_on), [`from_qtensor`](Self::from_qtensor)).
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
    /// (out,); in f32 with a packed weight.
    bias: Option<Tensor>,
    shape: WeightShape,
    dtype: DType,
    /// The dtype in which [`to_linear`](Self::to_linear) returns weight and bias.
    linear_dtype: DType,
    device: Device,
    activation: Option<Activation>,
    /// Whether the weight has the numbers of codes, which are multiplied by inputs in f32 and in half precision.
    is_quantized: bool,
    /// The input of each column of a packed weight, (in,) in u32; `None` where columns have the order of the inputs.
    input_order: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Weight {
    Packed(Arc<PackedWeight>),
    /// A weight that is tracked for gradients. The CPU kernels read it in each call.
    Tracked {
        weight: Tensor,
        instruction_set: InstructionSet,
    },
    /// A weight that Candle multiplies.
    Plain(Tensor),
    /// A weight of codes on a GPU.
    Codes(Arc<CodedWeight>),
    /// A quantised weight that Candle multiplies.
    Quantized {
        weight: Arc<QTensor>,
        matmul: QMatMul,
    },
}

/// Loads a [`PackedLinear`], as [`candle_nn::linear`](candle_nn::linear()) does: `weight` (out, in) and `bias` (out,)
/// below the prefix of `vb`. A quantised weight of a builder that `weights::open` made keeps its
/// codes.
///
/// # Errors
/// For missing or misshapen tensors.
pub fn packed_linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<PackedLinear> {
    match read::codes_of_builder(in_dim, out_dim, true, &vb)? {
        Some(packed) => Ok(packed),
        None => candle_nn::linear(in_dim, out_dim, vb)?.try_into(),
    }
}

/// Loads a [`PackedLinear`] without a bias, as [`candle_nn::linear_no_bias`](candle_nn::linear_no_bias()) does:
/// `weight` (out, in) below the prefix of `vb`, which keeps its codes as with [`packed_linear`].
///
/// # Errors
/// For a missing or misshapen tensor.
pub fn packed_linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<PackedLinear> {
    match read::codes_of_builder(in_dim, out_dim, false, &vb)? {
        Some(packed) => Ok(packed),
        None => candle_nn::linear_no_bias(in_dim, out_dim, vb)?.try_into(),
    }
}

/// Loads a [`PackedLinear`] with or without a bias.
///
/// # Errors
/// As [`packed_linear`] and [`packed_linear_no_bias`].
pub fn packed_linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<PackedLinear> {
    if bias { packed_linear(in_dim, out_dim, vb) } else { packed_linear_no_bias(in_dim, out_dim, vb) }
}

impl PackedLinear {
    /// Packs `weight` (out, in) and `bias` (out,) of one dtype and device.
    ///
    /// # Errors
    /// For shapes, dtypes or devices that do not fit, and if the packed weight cannot be allocated.
    pub fn new(weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        Self::with_instruction_set(weight, bias, None)
    }

    /// Packs a weight for one instruction set instead of the fastest, for tests and comparisons.
    ///
    /// # Errors
    /// As [`new`](Self::new), if the processor lacks the instruction set, and for an instruction set with a weight that
    /// is in f64 or on another device.
    pub fn with_instruction_set(
        weight: &Tensor,
        bias: Option<&Tensor>,
        instruction_set: Option<InstructionSet>,
    ) -> Result<Self> {
        let dtype = weight.dtype();
        Expect::one(OP, "weight", weight).shape(&["out", "in"].map(Dim::Any))?.float("")?;
        if !is_addressable(weight.dims()) {
            bail!("[{OP}] weight has shape {:?}, which is too large to address", weight.dims())
        }
        if let Some(bias) = bias {
            let bias = Expect::one(OP, "bias", bias).shape(&[Dim::Is(weight.dims()[0])])?;
            bias.dtype(dtype, "the weight's")?.same_device("the weight", weight.device())?;
        }
        let own = if weight.device().is_cpu() && dtype != DType::F64 {
            let instruction_set = choose_instruction_set(instruction_set, dtype)?;
            if weight.track_op() || bias.is_some_and(Tensor::track_op) {
                Weight::Tracked { weight: weight.clone(), instruction_set }
            } else {
                Weight::Packed(pack(weight, instruction_set)?.into())
            }
        } else if let Some(instruction_set) = instruction_set {
            bail!(
                "[{OP}] a weight in {dtype:?} on {:?} is not packed, expected no instruction set, found \
                 {instruction_set}",
                weight.device().location()
            )
        } else {
            Weight::Plain(weight.clone())
        };
        let (outputs, inputs) = weight.dims2()?;
        Self::from_checked(own, bias, WeightShape { outputs, inputs }, dtype, weight.device())
    }

    /// Creates a layer from parts that were checked.
    fn from_checked(
        weight: Weight,
        bias: Option<&Tensor>,
        shape: WeightShape,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let linear_dtype = bias.map_or(dtype, Tensor::dtype);
        let bias = match (&weight, bias) {
            (Weight::Packed(_), Some(bias)) => {
                Some(Tensor::from_vec(to_vec::<f32>(&contiguous("bias", bias)?)?, shape.outputs, device)?)
            }
            _ => bias.cloned(),
        };
        let device = device.clone();
        let (activation, is_quantized, input_order) = (None, false, None);
        Ok(Self { weight, bias, shape, dtype, linear_dtype, device, activation, is_quantized, input_order })
    }

    /// Packs a [`Linear`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_linear(linear: &Linear) -> Result<Self> {
        Self::new(linear.weight(), linear.bias())
    }

    /// Sets an activation of the outputs. It is computed in f32, while the outputs are in a cache, before they are
    /// rounded: [`Gelu`](Activation::Gelu) (erf), [`NewGelu`](Activation::NewGelu) and
    /// [`GeluPytorchTanh`](Activation::GeluPytorchTanh), [`Silu`](Activation::Silu), [`Swish`](Activation::Swish) and
    /// [`Relu`](Activation::Relu), to 5e-7 of their argument. For an input that is tracked for gradients, Candle
    /// computes the activation.
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

    /// Returns the activation of the outputs.
    pub fn activation(&self) -> Option<Activation> {
        self.activation
    }

    /// Returns a copy for inference after training: with the current values of variables, packed, without gradients.
    ///
    /// # Errors
    /// If the copy cannot be allocated.
    pub fn freeze(&self) -> Result<Self> {
        let bias = self.bias.as_ref().map(frozen).transpose()?;
        let packed = match &self.weight {
            Weight::Packed(_) | Weight::Codes(_) | Weight::Quantized { .. } => return Ok(self.clone()),
            Weight::Tracked { weight, instruction_set } => {
                Self::with_instruction_set(&frozen(weight)?, bias.as_ref(), Some(*instruction_set))?
            }
            Weight::Plain(weight) => Self::new(&frozen(weight)?, bias.as_ref())?,
        };
        Ok(Self { activation: self.activation, is_quantized: self.is_quantized, ..packed })
    }

    /// Returns weight and bias as a [`Linear`], with the bits that were packed and without the activation. A quantised
    /// weight is dequantised to f32.
    ///
    /// # Errors
    /// If the weight cannot be allocated.
    pub fn to_linear(&self) -> Result<Linear> {
        let weight = match &self.weight {
            Weight::Packed(weight) => self.unpacked(weight, None)?,
            Weight::Tracked { weight, .. } | Weight::Plain(weight) => weight.clone(),
            Weight::Codes(weight) => self.to_input_order(dequantized(weight, DType::F32)?)?,
            Weight::Quantized { weight, .. } => weight.dequantize(&self.device)?,
        };
        let own = |tensor: &Tensor| tensor.to_dtype(self.linear_dtype);
        Ok(Linear::new(own(&weight)?, self.bias.as_ref().map(own).transpose()?))
    }

    /// Returns the rows of the weight (out, in) with these ids: from ids (..) in u32 to (.., in) in the weight's dtype.
    /// One copy of a weight can then be both the table of embeddings and the output projection of a language model.
    ///
    /// The ids are on the CPU or on the weight's device. Ids on a GPU are read back for their check, so that the host
    /// waits until the GPU has finished what was launched before; ids on the CPU do not wait.
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
    /// For ids of another dtype, on a device that is neither the CPU nor the weight's, or not below the number of
    /// outputs.
    pub fn weight_rows(&self, ids: &Tensor) -> Result<Tensor> {
        let expect = Expect::many(OP, "ids", ids).dtype_of(&[DType::U32], "")?;
        if !ids.device().is_cpu() {
            expect.same_device("the weight", self.device())?;
        }
        let flat: Vec<u32> = to_vec(ids)?;
        if let Some(id) = flat.iter().find(|&&id| id as usize >= self.out_dim()) {
            bail!("[{OP}] id {id} is out of range, expected one below the number of rows, {}", self.out_dim())
        }
        let shape = [ids.dims(), &[self.in_dim()]].concat();
        if flat.len() * self.in_dim() == 0 {
            // Candle selects no rows of an empty view, which may begin past the end of its buffer.
            return Tensor::zeros(shape, self.dtype(), self.device());
        }
        let rows = match &self.weight {
            Weight::Packed(weight) => {
                let outputs: Vec<_> = flat.iter().map(|&id| id as usize).collect();
                self.unpacked(weight, Some(&outputs))?
            }
            Weight::Tracked { weight, .. } | Weight::Plain(weight) => {
                // Metal misreads a transposed weight.
                weight.contiguous()?.index_select(&Tensor::new(flat.as_slice(), self.device())?, 0)?
            }
            Weight::Codes(weight) => {
                let selected = weight.select_rows(&Tensor::new(flat.as_slice(), self.device())?)?;
                self.to_input_order(dequantized(&selected, self.dtype())?)?
            }
            Weight::Quantized { weight, .. } => weight.embedding(&Tensor::new(flat.as_slice(), self.device())?)?,
        };
        rows.reshape(shape)
    }

    /// Returns the rows of some outputs of the packed weight, or of all, with each column at its input.
    fn unpacked(&self, weight: &PackedWeight, outputs: Option<&[usize]>) -> Result<Tensor> {
        // The numbers of codes are in f32.
        let stored = if self.is_quantized { DType::F32 } else { self.dtype };
        self.to_input_order(unpack(weight, stored, outputs)?.to_dtype(self.dtype)?)
    }

    /// Returns rows (.., in) of the weight with each column at its input.
    fn to_input_order(&self, rows: Tensor) -> Result<Tensor> {
        let Some(order) = &self.input_order else { return Ok(rows) };
        let mut column_of_input = vec![0u32; self.in_dim()];
        for (column, input) in to_vec::<u32>(order)?.into_iter().enumerate() {
            column_of_input[input as usize] = column as u32;
        }
        rows.index_select(&Tensor::new(column_of_input, rows.device())?, 1)
    }

    /// Returns the number of outputs.
    pub fn out_dim(&self) -> usize {
        self.shape.outputs
    }

    /// Returns the number of inputs.
    pub fn in_dim(&self) -> usize {
        self.shape.inputs
    }

    /// Returns the weight's dtype. For a quantised weight it is f32, or the dtype of the layer that it was read for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the weight's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns whether the weight is packed: on a CPU, in f32, bf16, f16 or a quantised type that is packed, and not
    /// tracked for gradients.
    pub fn is_packed(&self) -> bool {
        matches!(self.weight, Weight::Packed(_))
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
