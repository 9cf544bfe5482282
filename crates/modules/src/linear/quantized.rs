//! Weights in the quantised types of GGUF files.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Result, Tensor, bail};

use super::codes::pack_quantized;
use super::product::{choose_instruction_set, pack};
use super::{OP, PackedLinear, Weight};
use crate::base::{Dim, Expect, QuantizedWeight, check_memory};
use crate::ggml::{GgmlType, Numbers};
use candle_attention_kernels::linear::WeightShape;

impl PackedLinear {
    /// Packs `weight` (out, in) in any type of GGUF files, with `bias` (out,) in f32, for inputs in f32.
    ///
    /// On a CPU, Q8_0 and Q8_K are stored in 8 bits per number, Q4_0, Q4_1, Q2_K, Q3_K and Q4_K in 4, and Q5_0, Q5_1,
    /// Q5_K and Q6_K in their own bits with AVX-512 and in 8 bits otherwise, with their scales and minimums next to
    /// them. They are multiplied in f32, with the bits of [`new`](Self::new) for the dequantised numbers. F32, F16 and
    /// BF16 are packed as they are.
    ///
    /// On CUDA, where kernels are available, the codes of all types but F32, F16 and BF16 are stored as they are
    /// ([`from_quantized_on`](Self::from_quantized_on)). On other devices, and with a bias that is tracked for
    /// gradients, K-quants are multiplied by Candle's [`QMatMul`], which rounds inputs to 8 bits on a CPU, and other
    /// types are dequantised.
    ///
    /// ```
    /// use candle_attention::PackedLinear;
    /// use candle_core::quantized::{GgmlDType, QTensor};
    /// use candle_core::{Device, Module, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let weight = QTensor::quantize(&Tensor::randn(0f32, 1., (24, 64), &Device::Cpu)?, GgmlDType::Q8_0)?;
    /// let dequantized = PackedLinear::new(&weight.dequantize(&Device::Cpu)?, None)?;
    /// let packed = PackedLinear::from_qtensor(weight, None)?;
    ///
    /// let xs = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
    /// let ys = packed.forward(&xs)?;
    /// let expected = dequantized.forward(&xs)?;
    /// assert_eq!(ys.to_vec3::<f32>()?, expected.to_vec3::<f32>()?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For shapes, dtypes or devices that do not fit, and if memory is short.
    pub fn from_qtensor(weight: QTensor, bias: Option<&Tensor>) -> Result<Self> {
        let Ok((outputs, inputs)) = weight.shape().dims2() else {
            bail!("[{OP}] weight has shape {:?}, expected (out, in)", weight.shape().dims())
        };
        let device = weight.device();
        if let Some(bias) = bias {
            let bias = Expect::one(OP, "bias", bias).shape(&[Dim::Is(outputs)])?;
            bias.dtype_of(&[DType::F32], "")?.same_device("the quantised weight", &device)?;
        }
        let shape = WeightShape { outputs, inputs };
        let build = |own, dtype| Self::from_checked(own, bias, shape, dtype, &device);
        let dtype = match weight.dtype() {
            GgmlDType::F16 => DType::F16,
            GgmlDType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        let is_tracked = bias.is_some_and(Tensor::track_op);
        if device.is_cuda()
            && !is_tracked
            && Self::multiplies_codes_on(&device)
            && let Some(codes) = codes_of(&weight, shape)?
        {
            return Self::from_quantized_on(&codes, bias, DType::F32, &device);
        }
        let is_packed = device.is_cpu() && !is_tracked;
        if !is_packed && is_k_quant(weight.dtype()) {
            let shared = Arc::new(weight);
            let matmul = QMatMul::from_arc(shared.clone())?;
            return build(Weight::Quantized { weight: shared, matmul }, DType::F32);
        }
        check_memory(OP, format_args!("a weight of shape {:?}", (outputs, inputs)), &[outputs, inputs])?;
        if !is_packed {
            return build(Weight::Plain(weight.dequantize(&device)?), DType::F32);
        }
        let packed_codes = match codes_of(&weight, shape)? {
            Some(codes) => pack_quantized(&codes, shape)?,
            None => None,
        };
        let packed = match packed_codes {
            Some(packed) => packed,
            None => {
                let numbers = if is_plain(weight.dtype()) {
                    Tensor::from_raw_buffer(&weight.data()?, dtype, &[outputs, inputs], &device)?
                } else {
                    weight.dequantize(&device)?
                };
                drop(weight);
                pack(&numbers, choose_instruction_set(None, dtype)?)?
            }
        };
        build(Weight::Packed(packed.into()), dtype)
    }
}

fn is_plain(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}

fn is_k_quant(dtype: GgmlDType) -> bool {
    use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8K};
    matches!(dtype, Q2K | Q3K | Q4K | Q5K | Q6K | Q8K)
}

/// Returns the codes of a quantised weight; `None` for a type without codes.
fn codes_of(weight: &QTensor, shape: WeightShape) -> Result<Option<Box<QuantizedWeight>>> {
    if is_plain(weight.dtype()) {
        return Ok(None);
    }
    let Some(kind) = GgmlType::find(GgmlType::number_of(weight.dtype())) else { return Ok(None) };
    match kind.read(&weight.data()?, shape.outputs, shape.inputs)? {
        Numbers::Codes(codes) => Ok(Some(codes)),
        Numbers::Plain(_) => Ok(None),
    }
}
