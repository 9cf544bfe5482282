//! Weights in the quantised types of GGUF files.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Result, Tensor, bail};
use half::f16;

use super::forward::{choose_instruction_set, kernel_error, pack};
use super::{OP, PackedLinear, Weight};
use crate::base::{Dim, Expect, check_memory};
use candle_attention_kernels::linear::{CODE_BLOCK, Codes, PackedWeight};

impl PackedLinear {
    /// Packs `weight` (out, in) of any type of GGUF files and `bias` (out,) in f32, for inputs in f32.
    ///
    /// On a CPU Q8_0, Q5_0 and Q5_1 are held in 8 bits a number and Q4_0 and Q4_1 in 4, each with the scales and
    /// minimums of its blocks of 32, 16 bits each: 1.06 to 1.13 bytes a number, and 0.56 or 0.63. They are multiplied
    /// in f32, with the bits that [`new`](Self::new) gives for the dequantised numbers. F32, F16 and BF16 are packed as
    /// they are. K-quants are multiplied by Candle's [`QMatMul`], which rounds inputs
    /// to 8 bits. On other devices all but K-quants are dequantised.
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
    /// let (ys, expected) = (packed.forward(&xs)?, dequantized.forward(&xs)?);
    /// assert_eq!(ys.to_vec3::<f32>()?, expected.to_vec3::<f32>()?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For shapes, dtypes or devices that do not fit, and if memory is short.
    pub fn from_qtensor(weight: QTensor, bias: Option<&Tensor>) -> Result<Self> {
        let Ok(shape) = weight.shape().dims2() else {
            bail!("[{OP}] weight has shape {:?}, expected (out, in)", weight.shape().dims())
        };
        let device = weight.device();
        if let Some(bias) = bias {
            let bias = Expect::one(OP, "bias", bias).shape(&[Dim::Is(shape.0)])?;
            bias.dtype_of(&[DType::F32], "")?.same_device("the quantised weight", &device)?;
        }
        let of = |weight, dtype| Self::of(weight, bias, shape, dtype, &device);
        let dtype = match weight.dtype() {
            GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q4K | GgmlDType::Q5K | GgmlDType::Q6K | GgmlDType::Q8K => {
                let weight = Arc::new(weight);
                return of(Weight::Quantized(weight.clone(), QMatMul::from_arc(weight)?), DType::F32);
            }
            GgmlDType::F16 => DType::F16,
            GgmlDType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        check_memory(OP, format_args!("a weight of shape {shape:?}"), &[shape.0, shape.1])?;
        if !device.is_cpu() || bias.is_some_and(Tensor::track_op) {
            return of(Weight::Plain(weight.dequantize(&device)?, None), DType::F32);
        }
        let packed = match pack_blocks(&weight)? {
            Some(packed) => packed,
            None => pack(&weight.dequantize(&device)?.to_dtype(dtype)?, choose_instruction_set(None, dtype)?)?,
        };
        of(Weight::Packed(packed.into()), dtype)
    }
}

/// The codes of a type whose blocks have 32 numbers: a scale, a minimum of the same 16 bits, the fifth bits, and then
/// the lower bits of the numbers, or all of them. `None` for other types.
fn pack_blocks(weight: &QTensor) -> Result<Option<PackedWeight>> {
    let (bits, has_minimums) = match weight.dtype() {
        GgmlDType::Q4_0 => (4, false),
        GgmlDType::Q4_1 => (4, true),
        GgmlDType::Q5_0 => (5, false),
        GgmlDType::Q5_1 => (5, true),
        GgmlDType::Q8_0 => (8, false),
        _ => return Ok(None),
    };
    let (mut codes, mut scales, mut minimums) = (Vec::new(), Vec::new(), Vec::new());
    let (numbers, factors) = (CODE_BLOCK * bits / 8, if has_minimums { 4 } else { 2 });
    for block in weight.data()?.chunks_exact(factors + numbers) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        scales.push(half(0));
        minimums.extend(has_minimums.then(|| half(2)));
        let (fifth, lower) = block[factors..].split_at(if bits == 5 { 4 } else { 0 });
        // Without a minimum, zero is in the middle of the codes: 16 of 5 bits, and 128 of the 8 that they are held in.
        let middle = if bits == 5 && !has_minimums { 128 - 16 } else { 0 };
        let code = |at: usize| {
            let number = lower[at % 16] >> (at / 16 * 4) & 0xf;
            middle + (fifth.get(at / 8).map_or(0, |byte| byte >> (at % 8) & 1) << 4 | number)
        };
        match bits {
            // Signed bytes.
            8 => codes.extend(lower.iter().map(|code| code ^ 0x80)),
            _ => codes.extend((0..CODE_BLOCK).map(code)),
        }
    }
    let (bits, minimums) = (if bits == 4 { 4 } else { 8 }, has_minimums.then_some(minimums.as_slice()));
    let (codes, instruction_set) =
        (Codes { bits, codes: &codes, scales: &scales, minimums }, choose_instruction_set(None, DType::F32)?);
    PackedWeight::from_codes(&codes, weight.shape().dims2()?, instruction_set).map(Some).map_err(kernel_error)
}
