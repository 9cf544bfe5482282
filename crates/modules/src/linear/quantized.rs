//! Weights in the quantised types of GGUF files.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::codes::pack_parts;
use super::product::{choose_instruction_set, pack};
use super::{OP, PackedLinear, Weight};
use crate::base::{Dim, Expect, QuantizedWeight, check_memory};
use crate::ggml::{GgmlNumbers, GgmlType};
use candle_attention_kernels::linear::{PackedWeight, WeightShape};

impl PackedLinear {
    /// Packs `weight` (out, in) in any type of GGUF files, with `bias` (out,) in f32, for inputs in f32.
    ///
    /// On a CPU, Q8_0 and Q8_K are stored in 8 bits per number, Q4_0, Q4_1, Q2_K, Q3_K and Q4_K in 4, and Q5_0, Q5_1,
    /// Q5_K and Q6_K in their own bits with AVX-512 and in 8 bits otherwise, with their scales and minimums next to
    /// them. They are multiplied in f32, with the bits of [`new`](Self::new) for the dequantised numbers. F32, F16 and
    /// BF16 are packed as they are.
    ///
    /// On CUDA and Metal, where kernels are available, the codes of all types but F32, F16 and BF16, and on Metal but
    /// K-quants, are stored as they are ([`from_quantized_on`](Self::from_quantized_on)). Otherwise, and with a bias
    /// that is tracked for gradients, K-quants are multiplied by Candle's [`QMatMul`], which rounds inputs to 8 bits on
    /// a CPU, and other types are dequantised.
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
        if !is_tracked
            && Self::multiplies_blocks_on(&device, Some(weight.dtype()))
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
        let packed_codes = match kind_of_codes(weight.dtype()) {
            Some(kind) => pack_blocks(kind, &weight.data()?, shape)?,
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

    /// Returns whether products on a GPU read the codes of a type of GGUF files, which is `None` if Candle does not
    /// have it. On Metal, Candle's own product multiplies K-quants.
    pub fn multiplies_blocks_on(device: &Device, dtype: Option<GgmlDType>) -> bool {
        let is_left_to_candle = device.is_metal() && dtype.is_some_and(is_k_quant);
        !device.is_cpu() && !is_left_to_candle && Self::multiplies_codes_on(device)
    }

    /// Packs a weight (out, in) on the CPU from its blocks in a GGUF file, of types that Candle does not have too, with
    /// `bias` (out,) in f32, for inputs in f32, bf16 and f16. Outputs have the bits of
    /// [`from_qtensor`](Self::from_qtensor). Blocks are unpacked some rows at a time, so that a large weight is never in
    /// memory with a byte for each number.
    ///
    /// # Errors
    /// For a type without codes, such as F16, for blocks of another length than the shape says, for a bias of another
    /// shape or dtype or on another device than the CPU, and if memory is short.
    pub fn from_blocks(kind: &GgmlType, blocks: &[u8], shape: (usize, usize), bias: Option<&Tensor>) -> Result<Self> {
        let (outputs, inputs) = shape;
        let own_shape = WeightShape { outputs, inputs };
        if let Some(bias) = bias {
            let bias = Expect::one(OP, "bias", bias).shape(&[Dim::Is(outputs)])?;
            bias.dtype_of(&[DType::F32], "")?.same_device("the quantised weight", &Device::Cpu)?;
        }
        if !kind.has_codes() {
            bail!("[{OP}] expected a type with codes, found {}", kind.name)
        }
        let packed = match bias.is_some_and(Tensor::track_op) {
            false => pack_blocks(kind, blocks, own_shape)?,
            true => None,
        };
        let linear = match packed {
            Some(packed) => {
                Self::from_checked(Weight::Packed(packed.into()), bias, own_shape, DType::F32, &Device::Cpu)?
            }
            None => {
                check_memory(OP, format_args!("a weight of shape {shape:?}"), &[outputs, inputs])?;
                Self::new(&kind.read(blocks, outputs, inputs)?.dequantize()?, bias)?
            }
        };
        Ok(Self { is_quantized: true, ..linear })
    }
}

/// Packs a weight from its blocks in a GGUF file; `None` if no format of the kernels has its numbers to the bit.
fn pack_blocks(kind: &GgmlType, blocks: &[u8], shape: WeightShape) -> Result<Option<PackedWeight>> {
    kind.check_blocks(blocks, shape.outputs, shape.inputs)?;
    let row = blocks.len() / shape.outputs.max(1);
    pack_parts(shape, |rows| match kind.read(&blocks[rows.start * row..rows.end * row], rows.len(), shape.inputs)? {
        GgmlNumbers::Codes(codes) => Ok(*codes),
        GgmlNumbers::Plain(_) => bail!("[{OP}] expected a type with codes, found {}", kind.name),
    })
}

fn is_plain(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}

fn is_k_quant(dtype: GgmlDType) -> bool {
    use GgmlDType::{Q2K, Q3K, Q4K, Q5K, Q6K, Q8K};
    matches!(dtype, Q2K | Q3K | Q4K | Q5K | Q6K | Q8K)
}

/// Returns a type of GGUF files; `None` for a type without codes.
fn kind_of_codes(dtype: GgmlDType) -> Option<&'static GgmlType> {
    if is_plain(dtype) { None } else { GgmlType::find(GgmlType::number_of(dtype)) }
}

/// Returns the codes of a quantised weight; `None` for a type without codes.
fn codes_of(weight: &QTensor, shape: WeightShape) -> Result<Option<Box<QuantizedWeight>>> {
    let Some(kind) = kind_of_codes(weight.dtype()) else { return Ok(None) };
    match kind.read(&weight.data()?, shape.outputs, shape.inputs)? {
        GgmlNumbers::Codes(codes) => Ok(Some(codes)),
        GgmlNumbers::Plain(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns blocks whose factors in f16 are finite: no byte of them has all bits of an exponent.
    fn blocks(kind: &GgmlType, count: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8 & 0xbf
        };
        (0..count * kind.bytes).map(|_| byte()).collect()
    }

    #[test]
    fn gguf_blocks_of_large_weight_have_the_numbers_of_the_blocks_at_the_borders_of_parts() -> Result<()> {
        // More than one part of 2^21 codes.
        let (outputs, inputs) = (1100, 2048);
        let outputs_to_read = [0u32, 1, 1022, 1023, 1024, 1025, 1098, 1099];
        let ids = Tensor::new(&outputs_to_read, &Device::Cpu)?;
        for name in ["Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"] {
            let kind = GgmlType::all().find(|kind| kind.name == name).expect("a type that is read");
            let data = blocks(kind, outputs * inputs / kind.block);
            let packed = PackedLinear::from_blocks(kind, &data, (outputs, inputs), None)?;
            let Weight::Packed(own) = &packed.weight else { panic!("{name} is not packed") };
            assert!(own.has_codes(), "{name} is dequantised");
            let rows = packed.weight_rows(&ids)?.to_vec2::<f32>()?;
            let row_bytes = data.len() / outputs;
            for (row, output) in rows.iter().zip(outputs_to_read) {
                let own_blocks = &data[output as usize * row_bytes..][..row_bytes];
                let expected = kind.read(own_blocks, 1, inputs)?.dequantize()?.to_vec2::<f32>()?.remove(0);
                assert!(row.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits())), "{name}: {output}");
            }
        }
        Ok(())
    }

    #[test]
    fn gguf_blocks_that_do_not_fit_the_shape_or_have_no_codes_are_errors() {
        let find = |name| GgmlType::all().find(|kind| kind.name == name).expect("a type that is read");
        let error = PackedLinear::from_blocks(find("Q8_0"), &[0; 33], (1, 32), None).expect_err("33 of 34 bytes");
        let expected = "[ggml] 33 bytes of Q8_0, expected the blocks of 1 rows of 32";
        assert!(error.to_string().starts_with(expected), "{error}");
        let of_floats = PackedLinear::from_blocks(find("F16"), &[0; 64], (1, 32), None).expect_err("no codes");
        assert!(
            of_floats.to_string().starts_with("[packed_linear] expected a type with codes, found F16"),
            "{of_floats}"
        );
        let bias = candle_core::Var::zeros(1, DType::F32, &Device::Cpu).expect("a small tensor");
        let tracked = PackedLinear::from_blocks(find("F16"), &[0; 64], (1, 32), Some(&bias)).expect_err("no codes");
        assert_eq!(tracked.to_string().lines().next(), of_floats.to_string().lines().next());
    }
}
