//! Weights in the quantised types of GGUF files.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Result, Tensor, bail};
use half::f16;

use super::k_quants::KQuantCodes;
use super::product::{choose_instruction_set, kernel_error, pack};
use super::{OP, PackedLinear, Weight};
use crate::base::{Dim, Expect, check_memory};
use candle_attention_kernels::linear::{CODE_BLOCK, Codes, PackedWeight, Scales, Values, WeightShape};

impl PackedLinear {
    /// Packs `weight` (out, in) in any type of GGUF files, with `bias` (out,) in f32, for inputs in f32.
    ///
    /// On a CPU, Q8_0, Q5_0, Q5_1, Q5_K and Q6_K are stored in 8 bits per number, Q4_0, Q4_1, Q2_K, Q3_K and Q4_K in 4,
    /// with their scales and minimums: 1.06 to 1.19 bytes per number, and 0.56 to 0.69. They are multiplied in f32,
    /// with the bits of [`new`](Self::new) for the dequantised numbers. F32, F16 and BF16 are packed as they are, and
    /// Q8_K is packed in f32.
    ///
    /// On other devices, and with a bias that is tracked for gradients, K-quants are multiplied by Candle's
    /// [`QMatMul`], which rounds inputs to 8 bits on a CPU, and other types are dequantised.
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
        let is_packed = device.is_cpu() && !bias.is_some_and(Tensor::track_op);
        if !is_packed && is_k_quant(weight.dtype()) {
            let shared = Arc::new(weight);
            let matmul = QMatMul::from_arc(shared.clone())?;
            return build(Weight::Quantized { weight: shared, matmul }, DType::F32);
        }
        check_memory(OP, format_args!("a weight of shape {:?}", (outputs, inputs)), &[outputs, inputs])?;
        if !is_packed {
            return build(Weight::Plain(weight.dequantize(&device)?), DType::F32);
        }
        let packed = match pack_blocks(&weight)? {
            Some(packed) => packed,
            None => pack(&weight.dequantize(&device)?.to_dtype(dtype)?, choose_instruction_set(None, dtype)?)?,
        };
        build(Weight::Packed(packed.into()), dtype)
    }
}

fn is_k_quant(dtype: GgmlDType) -> bool {
    use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8K};
    matches!(dtype, Q2K | Q3K | Q4K | Q5K | Q6K | Q8K)
}

/// The format of a quantised type whose blocks have 32 numbers. A block is a scale and perhaps a minimum, 16 bits each,
/// then perhaps the fifth bits of all numbers, and then their lower bits or all of their bits.
struct BlockFormat {
    /// The number of bits of a number: 4, 5 or 8.
    bits: usize,
    has_minimums: bool,
}

impl BlockFormat {
    fn new(dtype: GgmlDType) -> Option<Self> {
        match dtype {
            GgmlDType::Q4_0 => Some(Self { bits: 4, has_minimums: false }),
            GgmlDType::Q4_1 => Some(Self { bits: 4, has_minimums: true }),
            GgmlDType::Q5_0 => Some(Self { bits: 5, has_minimums: false }),
            GgmlDType::Q5_1 => Some(Self { bits: 5, has_minimums: true }),
            GgmlDType::Q8_0 => Some(Self { bits: 8, has_minimums: false }),
            _ => None,
        }
    }

    /// Returns the number of bytes of scale and minimum.
    fn factor_bytes(&self) -> usize {
        if self.has_minimums { 4 } else { 2 }
    }

    fn block_bytes(&self) -> usize {
        self.factor_bytes() + CODE_BLOCK * self.bits / 8
    }

    /// Appends the codes of a block's numbers.
    fn unpack(&self, numbers: &[u8], codes: &mut Vec<u8>) {
        match self.bits {
            // Signed bytes.
            8 => codes.extend(numbers.iter().map(|number| number ^ 0x80)),
            5 => {
                let (fifth_bits, lower_bits) = numbers.split_at(4);
                codes.extend((0..CODE_BLOCK).map(|n| {
                    let fifth_bit = fifth_bits[n / 8] >> (n % 8) & 1;
                    fifth_bit << 4 | nibble(lower_bits, n)
                }));
            }
            _ => codes.extend((0..CODE_BLOCK).map(|n| nibble(numbers, n))),
        }
    }
}

/// Returns the nth number of a block of 4-bit numbers. The low halves of the 16 bytes come first.
fn nibble(bytes: &[u8], n: usize) -> u8 {
    bytes[n % 16] >> (n / 16 * 4) & 0xf
}

/// Packs a quantised weight in its own type; `None` for types that are not packed.
fn pack_blocks(weight: &QTensor) -> Result<Option<PackedWeight>> {
    if let Some(codes) = KQuantCodes::read(weight.dtype(), &weight.data()?) {
        return pack_codes(&codes.as_codes(), weight);
    }
    let Some(format) = BlockFormat::new(weight.dtype()) else { return Ok(None) };
    let mut codes = Vec::new();
    let mut scales = Vec::new();
    let mut minimums = Vec::new();
    for block in weight.data()?.chunks_exact(format.block_bytes()) {
        scales.push(f16::from_le_bytes([block[0], block[1]]));
        if format.has_minimums {
            minimums.push(f16::from_le_bytes([block[2], block[3]]));
        }
        format.unpack(&block[format.factor_bytes()..], &mut codes);
    }
    let values = if format.has_minimums { Values::Minimums(Scales::F16(&minimums)) } else { Values::Signed };
    let scales = Scales::F16(&scales);
    pack_codes(&Codes { bits: format.bits, codes: &codes, group: CODE_BLOCK, values, scales }, weight)
}

fn pack_codes(codes: &Codes, weight: &QTensor) -> Result<Option<PackedWeight>> {
    let instruction_set = choose_instruction_set(None, DType::F32)?;
    let (outputs, inputs) = weight.shape().dims2()?;
    PackedWeight::from_codes(codes, WeightShape { outputs, inputs }, instruction_set).map_err(kernel_error)
}
