//! Weights of codes with scales, as quantised checkpoints store them, for the CPU kernels.

use std::ops::Range;

use super::kernel_codes::with_kernel_codes;
use super::product::{choose_instruction_set, kernel_error};
use super::{OP, PackedLinear, Weight};
use crate::base::{Dim, Expect, QuantizationFormat, QuantizedWeight, check_memory};
use candle_attention_kernels::linear::{PackedWeight, PanelPacker, WeightShape};
use candle_core::{DType, Device, Error, Result, Tensor};

impl PackedLinear {
    /// Packs a quantised weight, with `bias` (out,) in f32, bf16 or f16, for inputs in f32, bf16 and f16.
    ///
    /// Codes stay codes: of up to 4 bits they take 4, of 5 and 6 bits their own bits with AVX-512 and 8 otherwise, next
    /// to their scales. Products are summed in f32 and rounded to the input's dtype once, with the bits of
    /// [`new`](Self::new) for the [dequantised](QuantizedWeight::dequantize) numbers in f32. Gradients of the input are
    /// products of the same kind.
    ///
    /// The numbers are dequantised to f32 with a bias that is tracked for gradients, and where the kernels would not
    /// have their bits: for groups that are no multiple of 16, and floats of 8 bits that are infinite or NaN.
    ///
    /// # Errors
    /// For a weight whose parts do not fit each other, a bias of another shape or dtype or on another device than the
    /// CPU, and if memory is short.
    pub fn from_quantized(weight: &QuantizedWeight, bias: Option<&Tensor>) -> Result<Self> {
        let &QuantizedWeight { outputs, inputs, .. } = weight;
        let shape = WeightShape { outputs, inputs };
        let wide_bias = match bias {
            Some(bias) => {
                let expect = Expect::one(OP, "bias", bias).shape(&[Dim::Is(outputs)])?;
                expect.float("")?.same_device("the quantised weight", &Device::Cpu)?;
                Some(bias.to_dtype(DType::F32)?)
            }
            None => None,
        };
        let packed = match wide_bias.as_ref().is_some_and(Tensor::track_op) {
            false => pack_quantized(weight, shape)?,
            true => None,
        };
        let linear = match packed {
            Some(packed) => {
                let input_order = match &weight.input_order {
                    Some(order) => Some(Tensor::new(order.as_slice(), &Device::Cpu)?),
                    None => None,
                };
                let own = Weight::Packed(packed.into());
                let linear = Self::from_checked(own, wide_bias.as_ref(), shape, DType::F32, &Device::Cpu)?;
                Self { input_order, ..linear }
            }
            None => {
                check_memory(OP, format_args!("a weight of shape {:?}", (outputs, inputs)), &[outputs, inputs])?;
                Self::new(&weight.dequantize()?, wide_bias.as_ref())?
            }
        };
        Ok(Self { is_quantized: true, ..linear })
    }
}

impl PackedLinear {
    /// Sets the dtype in which rows of a quantised weight, and weight and bias as a [`Linear`](candle_nn::Linear), are
    /// returned. Products have the numbers in f32 all the same.
    pub(super) fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, linear_dtype: dtype, ..self }
    }

    /// Quantises a weight (out, in) in a floating-point dtype on the CPU, and packs it, for inputs in f32, bf16 and
    /// f16: a smaller and for few rows faster layer, without another tool. Outputs have the bits of
    /// [`new`](Self::new) for the quantised numbers, which [`to_linear`](Self::to_linear) returns.
    ///
    /// ```
    /// use candle_attention::{PackedLinear, QuantizationFormat};
    /// use candle_core::{Device, Module, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let weight = Tensor::randn(0f32, 1., (24, 128), &Device::Cpu)?;
    /// let xs = Tensor::randn(0f32, 1., (2, 5, 128), &Device::Cpu)?;
    /// let exact = PackedLinear::new(&weight, None)?.forward(&xs)?;
    /// let formats =
    ///     [QuantizationFormat::Int8, QuantizationFormat::Int4 { group: 64 }, QuantizationFormat::Nf4];
    /// for (format, bound) in formats.into_iter().zip([0.02, 0.3, 0.3]) {
    ///     let ys = PackedLinear::quantize(&weight, format)?.forward(&xs)?;
    ///     let error = ((ys - &exact)?.sqr()?.mean_all()? / exact.sqr()?.mean_all()?)?;
    ///     assert!(error.to_scalar::<f32>()?.sqrt() < bound);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// A layer with a bias is [`QuantizedWeight::quantize`] and [`from_quantized`](Self::from_quantized).
    ///
    /// # Errors
    /// As [`QuantizedWeight::quantize`], for a weight on another device, and if memory is short.
    pub fn quantize(weight: &Tensor, format: QuantizationFormat) -> Result<Self> {
        Expect::one(OP, "weight", weight).same_device("the packed weight", &Device::Cpu)?;
        Self::from_quantized(&QuantizedWeight::quantize(weight, format)?, None)
    }
}

/// Packs a weight; `None` if no format of the kernels has its numbers to the bit.
pub(super) fn pack_quantized(weight: &QuantizedWeight, shape: WeightShape) -> Result<Option<PackedWeight>> {
    let instruction_set = choose_instruction_set(None, DType::F32)?;
    with_kernel_codes(weight, |codes| PackedWeight::from_codes(codes, shape, instruction_set).map_err(kernel_error))
}

/// Packs a weight from ranges of outputs, which `read` returns on any thread, each once or twice; `None` if no format
/// of the kernels has its numbers to the bit. A large weight is read and packed some outputs at a time.
pub(super) fn pack_parts(
    shape: WeightShape,
    read: impl Fn(Range<usize>) -> Result<QuantizedWeight> + Sync,
) -> Result<Option<PackedWeight>> {
    let instruction_set = choose_instruction_set(None, DType::F32)?;
    let pack_panel = |outputs: Range<usize>, packer: PanelPacker| -> std::result::Result<bool, PackError> {
        let part = read(outputs).map_err(PackError)?;
        Ok(with_kernel_codes(&part, |codes| packer.pack(codes))?)
    };
    match PackedWeight::from_panels::<PackError>(shape, instruction_set, &pack_panel) {
        Ok(Some(packed)) => Ok(Some(packed)),
        Ok(None) => pack_quantized(&read(0..shape.outputs)?, shape),
        Err(PackError(error)) => Err(error),
    }
}

/// An error of reading or of packing.
struct PackError(Error);

impl From<candle_attention_kernels::Error> for PackError {
    fn from(error: candle_attention_kernels::Error) -> Self {
        Self(kernel_error(error))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Module, Var};
    use half::{bf16, f16};

    use super::*;
    use crate::base::{CodeValues, Float8, GroupNumbers};

    /// Draws whole numbers from a linear congruential generator.
    struct Draws(u64);

    impl Draws {
        fn bits(&mut self) -> u32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as u32
        }

        fn bytes(&mut self, count: usize, below: u32) -> Vec<u8> {
            (0..count).map(|_| (self.bits() % below) as u8).collect()
        }

        /// Draws numbers between -1 and 1.
        fn fractions(&mut self, count: usize) -> Vec<f32> {
            (0..count).map(|_| (self.bits() % 4001) as f32 / 2000.0 - 1.0).collect()
        }

        fn f16(&mut self, count: usize) -> Vec<f16> {
            self.fractions(count).into_iter().map(f16::from_f32).collect()
        }

        fn bf16(&mut self, count: usize) -> Vec<bf16> {
            self.fractions(count).into_iter().map(bf16::from_f32).collect()
        }

        fn nested(&mut self, groups: usize, per: usize, middle: u8, below: u32) -> GroupNumbers {
            let factors = self.f16(groups / per);
            GroupNumbers::Nested { numbers: self.bytes(groups, below), middle, factors, groups_of_factor: per }
        }
    }

    const OUTPUTS: usize = 37;
    const INPUTS: usize = 256;

    /// Returns a weight of each form of checkpoints, with a name.
    fn weights() -> Vec<(&'static str, QuantizedWeight)> {
        let mut draws = Draws(1);
        let mut all = Vec::new();
        let mut push = |name, bits: usize, group, values, scales, numbers: &mut Draws| {
            let codes = numbers.bytes(OUTPUTS * INPUTS, 1 << bits);
            let (outputs, inputs) = (OUTPUTS, INPUTS);
            all.push((
                name,
                QuantizedWeight { outputs, inputs, bits, codes, group, values, scales, input_order: None },
            ));
        };
        let groups = |group: usize| OUTPUTS * INPUTS / group;
        for bits in [2, 3, 4, 5, 6, 8] {
            let zeros = GroupNumbers::Whole(draws.bytes(groups(128), 1 << bits));
            let scales = GroupNumbers::F16(draws.f16(groups(128)));
            push("gptq", bits, 128, CodeValues::Zeros(zeros), scales, &mut draws);
            let minimums = GroupNumbers::BF16(draws.bf16(groups(64)));
            let bf16_scales = GroupNumbers::BF16(draws.bf16(groups(64)));
            push("mlx", bits, 64, CodeValues::Minimums(minimums), bf16_scales, &mut draws);
        }
        let of_rows = GroupNumbers::F32(draws.fractions(OUTPUTS));
        push("int8", 8, INPUTS, CodeValues::Signed, of_rows, &mut draws);
        let fractional_zeros = GroupNumbers::F32(draws.fractions(groups(64)));
        let f32_scales = GroupNumbers::F32(draws.fractions(groups(64)));
        push("hqq", 4, 64, CodeValues::Zeros(fractional_zeros), f32_scales, &mut draws);
        let table = std::array::from_fn(|n| n as f32 / 7.0 - 1.1);
        let absmax = GroupNumbers::F32(draws.fractions(groups(64)));
        push("nf4", 4, 64, CodeValues::Table(table), absmax, &mut draws);
        let powers = (0..256).map(|byte| 2f64.powi(byte - 127) as f32).collect();
        let bytes = draws.bytes(groups(32), 9).into_iter().map(|byte| byte + 120).collect();
        push("mxfp4", 4, 32, CodeValues::Table(table), GroupNumbers::Bytes { bytes, table: powers }, &mut draws);
        let floats = (0..=255).map(|code| Float8::E4M3.number(code) * 0.013).collect();
        let e4m3_scales = GroupNumbers::Bytes { bytes: draws.bytes(groups(16), 0x7f), table: floats };
        push("nvfp4", 4, 16, CodeValues::Table(table), e4m3_scales, &mut draws);
        let iq4_scales = draws.nested(groups(32), 8, 32, 64);
        push("iq4_xs", 4, 32, CodeValues::Table(table), iq4_scales, &mut draws);
        let q4_scales = draws.nested(groups(32), 8, 0, 64);
        let minimums = CodeValues::Minimums(draws.nested(groups(32), 8, 0, 64));
        push("q4_k", 4, 32, minimums, q4_scales, &mut draws);
        let q6_scales = draws.nested(groups(16), 16, 128, 256);
        push("q6_k", 6, 16, CodeValues::Signed, q6_scales, &mut draws);
        let q3_scales = draws.nested(groups(16), 16, 32, 64);
        push("q3_k", 3, 16, CodeValues::Signed, q3_scales, &mut draws);
        // Without infinities and NaN.
        for float8 in [Float8::E4M3, Float8::E5M2] {
            let codes = draws.bytes(OUTPUTS * INPUTS, 256).into_iter().map(|code| code & 0xbb).collect();
            let scales = GroupNumbers::F32(draws.fractions(groups(128)));
            let (outputs, inputs, values) = (OUTPUTS, INPUTS, CodeValues::Float8(float8));
            let input_order = None;
            all.push((
                "float8",
                QuantizedWeight { outputs, inputs, bits: 8, codes, group: 128, values, scales, input_order },
            ));
        }
        all
    }

    fn bits_of(tensor: &Tensor) -> Result<Vec<u32>> {
        let numbers: Vec<f32> = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(numbers.into_iter().map(f32::to_bits).collect())
    }

    fn inputs(rows: usize) -> Result<Tensor> {
        Tensor::from_vec(Draws(7).fractions(rows * INPUTS), (1, rows, INPUTS), &Device::Cpu)
    }

    #[test]
    fn quantized_weight_of_each_form_has_bits_of_its_dequantised_numbers() -> Result<()> {
        let bias = Tensor::from_vec(Draws(3).fractions(OUTPUTS), OUTPUTS, &Device::Cpu)?;
        for (name, weight) in weights() {
            let weight = weight.checked()?;
            let packed = PackedLinear::from_quantized(&weight, Some(&bias))?;
            let numbers = weight.dequantize()?;
            let plain = PackedLinear::new(&numbers, Some(&bias))?;
            let Weight::Packed(own) = &packed.weight else { panic!("{name} is not packed") };
            assert!(own.has_codes(), "{name} is dequantised");
            assert_eq!(bits_of(packed.to_linear()?.weight())?, bits_of(&numbers)?, "{name}");
            for rows in [1, 20] {
                let xs = inputs(rows)?;
                assert_eq!(bits_of(&packed.forward(&xs)?)?, bits_of(&plain.forward(&xs)?)?, "{name}, {rows} rows");
                // The sum over inputs in half precision is in f32 too.
                for dtype in [DType::BF16, DType::F16] {
                    let halves = xs.to_dtype(dtype)?;
                    let of_halves = packed.clone().with_dtype(dtype);
                    let found = of_halves.forward(&halves)?;
                    assert_eq!(bits_of(&packed.forward(&halves)?)?, bits_of(&found)?);
                    assert_eq!(of_halves.weight_rows(&Tensor::new(&[0u32], &Device::Cpu)?)?.dtype(), dtype);
                    let expected = plain.forward(&halves.to_dtype(DType::F32)?)?.to_dtype(dtype)?;
                    assert_eq!(found.dtype(), dtype);
                    assert_eq!(bits_of(&found)?, bits_of(&expected)?, "{name}, {rows} rows in {dtype:?}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn quantized_weight_of_each_form_has_gradients_of_its_dequantised_numbers() -> Result<()> {
        let xs = Var::from_tensor(&inputs(3)?)?;
        for (name, weight) in weights() {
            let gradient = |linear: &PackedLinear| -> Result<Vec<u32>> {
                let gradients = linear.forward(&xs)?.sqr()?.sum_all()?.backward()?;
                bits_of(gradients.get(&xs).expect("a gradient"))
            };
            let packed = gradient(&PackedLinear::from_quantized(&weight, None)?)?;
            assert_eq!(packed, gradient(&PackedLinear::new(&weight.dequantize()?, None)?)?, "{name}");
        }
        Ok(())
    }

    #[test]
    fn quantized_weight_in_another_order_of_inputs_matches_its_dequantised_numbers() -> Result<()> {
        let order: Vec<u32> = (0..INPUTS as u32).map(|column| column * 77 % INPUTS as u32).collect();
        let (_, weight) = weights().remove(4);
        let weight = QuantizedWeight { input_order: Some(order), ..weight }.checked()?;
        let packed = PackedLinear::from_quantized(&weight, None)?;
        let numbers = weight.dequantize()?;
        let plain = PackedLinear::new(&numbers, None)?;
        let close = |found: &Tensor, expected: &Tensor| -> Result<()> {
            let largest = expected.abs()?.max_all()?.to_scalar::<f32>()?;
            let error = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(error <= 2e-6 * largest, "{error:e} of {largest}");
            Ok(())
        };
        let Weight::Packed(own) = &packed.weight else { panic!("not packed") };
        assert!(own.has_codes() && packed.input_order.is_some());
        assert_eq!(bits_of(packed.to_linear()?.weight())?, bits_of(&numbers)?);
        let ids = Tensor::new(&[3u32, 0, 36], &Device::Cpu)?;
        assert_eq!(bits_of(&packed.weight_rows(&ids)?)?, bits_of(&numbers.index_select(&ids, 0)?)?);
        let xs = Var::from_tensor(&inputs(5)?)?;
        close(&packed.forward(&xs)?, &plain.forward(&xs)?)?;
        close(&packed.forward(&xs.detach())?, &plain.forward(&xs.detach())?)?;
        close(&packed.forward_columns(&xs.detach(), 5..9)?, &plain.forward(&xs.detach())?.narrow(2, 5, 4)?)?;
        let gradient = |linear: &PackedLinear| -> Result<Tensor> {
            let gradients = linear.forward(&xs)?.sqr()?.sum_all()?.backward()?;
            Ok(gradients.get(&xs).expect("a gradient").clone())
        };
        close(&gradient(&packed)?, &gradient(&plain)?)?;
        let gate = |linear: &PackedLinear| {
            crate::linear::PackedGatedLinear::new(linear.clone(), linear.clone(), candle_nn::Activation::Silu)
        };
        close(&gate(&packed)?.forward(&xs.detach())?, &gate(&plain)?.forward(&xs.detach())?)
    }

    #[test]
    fn quantized_weight_that_kernels_would_round_is_dequantised() -> Result<()> {
        let codes = Draws(5).bytes(4 * 48, 255);
        let scales = GroupNumbers::F32(vec![0.5; 8]);
        let (outputs, inputs, values, input_order) = (4, 48, CodeValues::Signed, None);
        let odd = QuantizedWeight { outputs, inputs, bits: 8, codes, group: 24, values, scales, input_order };
        let float8 =
            QuantizedWeight { values: CodeValues::Float8(Float8::E4M3), codes: vec![0x7f; 4 * 48], ..odd.clone() };
        for dtype in [DType::F32, DType::BF16] {
            let xs = Tensor::ones((1, 48), dtype, &Device::Cpu)?;
            let packed = PackedLinear::from_quantized(&odd, None)?;
            assert!(matches!(&packed.weight, Weight::Packed(own) if !own.has_codes()));
            let expected = PackedLinear::new(&odd.dequantize()?, None)?.forward(&xs.to_dtype(DType::F32)?)?;
            assert_eq!(bits_of(&packed.forward(&xs)?)?, bits_of(&expected.to_dtype(dtype)?)?);
            let ys = PackedLinear::from_quantized(&float8, None)?.forward(&xs)?.to_dtype(DType::F32)?;
            assert!(ys.flatten_all()?.to_vec1::<f32>()?.into_iter().all(f32::is_nan));
        }
        Ok(())
    }

    #[test]
    fn quantized_layer_has_bits_of_its_quantised_numbers() -> Result<()> {
        let weight = Tensor::from_vec(Draws(9).fractions(OUTPUTS * INPUTS), (OUTPUTS, INPUTS), &Device::Cpu)?;
        for (format, bytes) in [
            (QuantizationFormat::Int8, 64 + 4),
            (QuantizationFormat::Int4 { group: 32 }, 32 + 8),
            (QuantizationFormat::Int4 { group: 64 }, 32 + 4),
            (QuantizationFormat::Int4 { group: 128 }, 32 + 4),
            (QuantizationFormat::Nf4, 32 + 4),
        ] {
            let packed = PackedLinear::quantize(&weight, format)?;
            let Weight::Packed(own) = &packed.weight else { panic!("{format:?} is not packed") };
            // Outputs fill up panels of at most 64.
            let most = bytes * INPUTS / 64 * OUTPUTS.next_multiple_of(64);
            assert!(own.has_codes() && own.memory() <= most, "{format:?} takes {}", own.memory());
            let numbers = QuantizedWeight::quantize(&weight, format)?.dequantize()?;
            assert_eq!(bits_of(packed.to_linear()?.weight())?, bits_of(&numbers)?, "{format:?}");
            let plain = PackedLinear::new(&numbers, None)?;
            for rows in [1, 20] {
                let xs = inputs(rows)?;
                assert_eq!(bits_of(&packed.forward(&xs)?)?, bits_of(&plain.forward(&xs)?)?, "{format:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn quantized_weight_with_tracked_bias_has_its_gradient() -> Result<()> {
        let (_, weight) = weights().remove(0);
        let bias = Var::zeros(OUTPUTS, DType::F32, &Device::Cpu)?;
        let ys = PackedLinear::from_quantized(&weight, Some(&bias))?.forward(&inputs(2)?)?;
        let gradients = ys.sum_all()?.backward()?;
        assert_eq!(gradients.get(&bias).expect("a gradient").to_vec1::<f32>()?, [2.0; OUTPUTS]);
        Ok(())
    }

    #[test]
    fn quantized_weight_with_parts_that_do_not_fit_is_an_error() -> Result<()> {
        let (_, weight) = weights().remove(0);
        let short = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
        let of_bias = PackedLinear::from_quantized(&weight, Some(&short)).expect_err("3 of 37 entries");
        assert!(of_bias.to_string().contains("[packed_linear] bias has shape [3]"), "{of_bias}");
        let few = QuantizedWeight { codes: vec![0; 5], ..weight };
        let error = PackedLinear::from_quantized(&few, None).expect_err("5 codes");
        assert!(error.to_string().starts_with("[packed_linear] codes has 5 elements, expected 9472"), "{error}");
        Ok(())
    }
}
