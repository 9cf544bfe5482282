//! Quantisation of a plain weight.

use candle_core::{DType, Result, Tensor, bail};
use half::f16;

use super::group_numbers::GroupNumbers;
use super::quantized_weight::{CodeValues, QuantizedWeight};
use super::rowwise::to_vec;
use super::{Dim, Expect};

const OP: &str = "quantize";

/// The code of 0, where codes of 8 bits are signed numbers plus this. Magnitudes are below it.
const MIDDLE: f32 = 128.0;
/// The largest code of 4 bits.
const LARGEST: f32 = 15.0;
/// The weights that share a scale in NF4, as bitsandbytes stores it.
const NF4_GROUP: usize = 64;

/// The numbers of NF4: quantiles of the normal distribution, scaled to -1 to 1 (QLoRA,
/// <https://arxiv.org/abs/2305.14314>, appendix E).
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
/// The code of 0 in NF4.
const NF4_ZERO: u8 = 7;

/// A format in which [`PackedLinear::quantize`](crate::linear::PackedLinear::quantize) stores a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantizationFormat {
    /// 8 bits, with a scale for each output: `(code - 128) · scale`, where the largest magnitude of an output has the
    /// code 1 or 255. A number is off by half a scale at most, 1/254 of the largest magnitude.
    Int8,
    /// 4 bits, with a scale and a minimum in f16 for each group of neighbouring inputs: `code · scale + minimum`. A
    /// number is off by half a scale at most, 1/30 of the distance from the least to the largest number of its group,
    /// and by the rounding of the two numbers to f16.
    Int4 {
        /// The number of inputs that share a scale: 32, 64 or 128.
        group: usize,
    },
    /// 4 bits, the nearest of 16 quantiles of the normal distribution times the largest magnitude of 64 neighbouring
    /// inputs: the numbers that bitsandbytes stores. A number is off by 0.152 of that magnitude at most, and by less
    /// the more the numbers are normally distributed.
    Nf4,
}

impl QuantizationFormat {
    /// Returns the neighbouring inputs that share a scale, of a weight with some inputs.
    #[must_use]
    pub fn group(self, inputs: usize) -> usize {
        match self {
            Self::Int8 => inputs.max(1),
            Self::Int4 { group } => group,
            Self::Nf4 => NF4_GROUP,
        }
    }
}

impl QuantizedWeight {
    /// Quantises a weight (out, in) in f32, bf16, f16 or f64. Numbers are rounded to the nearest that the format has.
    ///
    /// # Errors
    /// For another shape or dtype, inputs that are not whole groups, groups that
    /// [`QuantizationFormat::Int4`] does not have, and numbers that are infinite or NaN in f32.
    pub fn quantize(weight: &Tensor, format: QuantizationFormat) -> Result<Self> {
        Expect::one(OP, "weight", weight).shape(&["out", "in"].map(Dim::Any))?.float("")?;
        let (outputs, inputs) = weight.dims2()?;
        let group = format.group(inputs);
        if let QuantizationFormat::Int4 { .. } = format
            && !matches!(group, 32 | 64 | 128)
        {
            bail!("[{OP}] expected groups of 32, 64 or 128 inputs, found {group}")
        }
        if !inputs.is_multiple_of(group) {
            bail!("[{OP}] expected inputs in groups of {group}, found a weight of shape {:?}", (outputs, inputs))
        }
        let numbers: Vec<f32> = to_vec(&weight.detach().to_dtype(DType::F32)?.contiguous()?)?;
        if let Some(at) = numbers.iter().position(|number| !number.is_finite()) {
            bail!("[{OP}] expected finite numbers, found {} in row {} of the weight", numbers[at], at / inputs)
        }
        let mut codes = Vec::with_capacity(numbers.len());
        let groups = numbers.chunks_exact(group);
        let (bits, values, scales) = match format {
            QuantizationFormat::Int8 => (8, CodeValues::Signed, signed(groups, &mut codes)),
            QuantizationFormat::Int4 { .. } => {
                let ScalesAndMinimums { scales, minimums } = ScalesAndMinimums::quantize(groups, &mut codes);
                (4, CodeValues::Minimums(minimums), scales)
            }
            QuantizationFormat::Nf4 => (4, CodeValues::Table(NF4), nf4(groups, &mut codes)),
        };
        Ok(Self { outputs, inputs, bits, codes, group, values, scales, input_order: None })
    }
}

/// Returns the largest magnitude.
fn largest_magnitude(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |largest, number| number.abs().max(largest))
}

/// Appends codes of 8 bits on both sides of zero, and returns the scales.
fn signed<'a>(groups: impl Iterator<Item = &'a [f32]>, codes: &mut Vec<u8>) -> GroupNumbers {
    let mut scales = Vec::new();
    for numbers in groups {
        let scale = largest_magnitude(numbers) / (MIDDLE - 1.0);
        scales.push(scale);
        // A scale of subnormal numbers has few digits, so that quotients may be larger than the middle.
        codes.extend(numbers.iter().map(|number| match scale > 0.0 {
            true => ((number / scale).round() + MIDDLE).clamp(1.0, 2.0 * MIDDLE - 1.0) as u8,
            false => MIDDLE as u8,
        }));
    }
    GroupNumbers::F32(scales)
}

/// The scales and minimums of codes from 0 on.
struct ScalesAndMinimums {
    scales: GroupNumbers,
    minimums: GroupNumbers,
}

impl ScalesAndMinimums {
    /// Appends codes of 4 bits.
    fn quantize<'a>(groups: impl Iterator<Item = &'a [f32]> + Clone, codes: &mut Vec<u8>) -> Self {
        let mut ranges = Vec::new();
        for numbers in groups.clone() {
            let least = numbers.iter().copied().fold(f32::INFINITY, f32::min);
            let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            // Divided first, since the difference of the largest numbers exceeds f32.
            ranges.push(GroupRange { minimum: least, scale: largest / LARGEST - least / LARGEST });
        }
        let fits = |number: f32| f16::from_f32(number).is_finite();
        let is_half = ranges.iter().all(|range| fits(range.minimum) && fits(range.scale));
        if is_half {
            for range in &mut ranges {
                range.minimum = f16::from_f32(range.minimum).to_f32();
                range.scale = f16::from_f32(range.scale).to_f32();
            }
        }
        for (numbers, GroupRange { minimum, scale }) in groups.zip(&ranges) {
            codes.extend(numbers.iter().map(|number| match *scale > 0.0 {
                true => (number / scale - minimum / scale).round().clamp(0.0, LARGEST) as u8,
                false => 0,
            }));
        }
        let numbers = |of: fn(&GroupRange) -> f32| {
            let all = ranges.iter().map(of);
            match is_half {
                true => GroupNumbers::F16(all.map(f16::from_f32).collect()),
                false => GroupNumbers::F32(all.collect()),
            }
        };
        Self { scales: numbers(|range| range.scale), minimums: numbers(|range| range.minimum) }
    }
}

/// The numbers of a group: from the minimum on, in steps of the scale.
struct GroupRange {
    minimum: f32,
    scale: f32,
}

/// Appends codes of NF4, and returns the scales.
fn nf4<'a>(groups: impl Iterator<Item = &'a [f32]>, codes: &mut Vec<u8>) -> GroupNumbers {
    let mut scales = Vec::new();
    let mut bounds = [0.0; 15];
    for (bound, pair) in bounds.iter_mut().zip(NF4.windows(2)) {
        *bound = (pair[0] + pair[1]) / 2.0;
    }
    for numbers in groups {
        let scale = largest_magnitude(numbers);
        scales.push(scale);
        codes.extend(numbers.iter().map(|number| match scale > 0.0 {
            true => {
                let quotient = number / scale;
                bounds.iter().filter(|&&bound| quotient > bound).count() as u8
            }
            false => NF4_ZERO,
        }));
    }
    GroupNumbers::F32(scales)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Returns numbers of several magnitudes, with a row of zeros.
    fn numbers(outputs: usize, inputs: usize) -> Vec<f32> {
        let number = |at: usize| match at / inputs {
            2 => 0.0,
            row => ((at * 7919 % 10007) as f32 / 5003.5 - 0.9) * 10f32.powi(row as i32 - 2),
        };
        (0..outputs * inputs).map(number).collect()
    }

    fn dequantized(numbers: &[f32], inputs: usize, format: QuantizationFormat) -> Result<Vec<f32>> {
        let weight = Tensor::from_slice(numbers, (numbers.len() / inputs, inputs), &Device::Cpu)?;
        let quantized = QuantizedWeight::quantize(&weight, format)?.checked()?;
        quantized.dequantize()?.flatten_all()?.to_vec1()
    }

    #[test]
    fn int8_quantisation_errs_by_half_a_scale() -> Result<()> {
        let exact = numbers(5, 100);
        let found = dequantized(&exact, 100, QuantizationFormat::Int8)?;
        for (row, found_row) in exact.chunks(100).zip(found.chunks(100)) {
            let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            for (x, y) in row.iter().zip(found_row) {
                assert!((x - y).abs() <= largest / 254.0 * 1.000_01, "{x} became {y} beside {largest}");
            }
            assert!(found_row.iter().any(|y| (y.abs() - largest).abs() <= largest * 1e-6), "{largest}");
        }
        Ok(())
    }

    #[test]
    fn int4_quantisation_errs_by_half_a_scale() -> Result<()> {
        for group in [32, 64, 128] {
            let exact = numbers(5, 256);
            let found = dequantized(&exact, 256, QuantizationFormat::Int4 { group })?;
            for (of_group, found_group) in exact.chunks(group).zip(found.chunks(group)) {
                let least = of_group.iter().copied().fold(f32::INFINITY, f32::min);
                let largest = of_group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                // f16 has 11 bits, and 2^-25 is half of its smallest number.
                let rounding = (least.abs().max(largest - least)) / 1024.0 + 15.0 * 2f32.powi(-25);
                for (x, y) in of_group.iter().zip(found_group) {
                    assert!((x - y).abs() <= (largest - least) / 30.0 + rounding, "{x} became {y} in {group}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn int4_quantisation_of_numbers_beyond_f16_has_scales_in_f32() -> Result<()> {
        for factor in [1e5, 1e37] {
            let exact: Vec<f32> = (0..32).map(|n| (n as f32 - 20.0) * factor).collect();
            let found = dequantized(&exact, 32, QuantizationFormat::Int4 { group: 32 })?;
            for (x, y) in exact.iter().zip(found) {
                assert!((x - y).abs() <= 31.0 * factor / 30.0 * 1.000_01, "{x} became {y}");
            }
        }
        Ok(())
    }

    /// Compares with what bitsandbytes 0.50.2 computes: `quantize_4bit(.., blocksize=64, quant_type="nf4")`.
    #[test]
    fn nf4_quantisation_matches_bitsandbytes() -> Result<()> {
        const PACKED: [u8; 64] = [
            4, 193, 110, 41, 243, 176, 93, 23, 226, 159, 60, 5, 209, 142, 42, 244, 193, 110, 24, 227, 176, 93, 23, 226,
            159, 59, 5, 209, 142, 42, 244, 193, 124, 55, 229, 128, 106, 39, 196, 126, 89, 23, 178, 125, 72, 246, 145,
            123, 55, 229, 128, 106, 23, 195, 126, 88, 7, 162, 125, 72, 246, 145, 123, 39,
        ];
        let number = |n: usize| {
            let x = ((n * 37 % 101) as f32 - 50.0) / 16.0;
            if n < 64 { x } else { x * (x.abs() / 3.0) }
        };
        let weight = Tensor::from_vec((0..128).map(number).collect::<Vec<f32>>(), (2, 64), &Device::Cpu)?;
        let quantized = QuantizedWeight::quantize(&weight, QuantizationFormat::Nf4)?;
        let codes: Vec<u8> = PACKED.iter().flat_map(|byte| [byte >> 4, byte & 0xf]).collect();
        assert_eq!(quantized.codes, codes);
        assert_eq!(quantized.scales, GroupNumbers::F32(vec![3.125, 3.255_208_3]));
        let first: Vec<f32> = quantized.dequantize()?.flatten_all()?.to_vec1::<f32>()?[..4].to_vec();
        assert_eq!(first, [-3.125, -0.888_879_3, 1.377_218_2, -2.175_602_4]);
        Ok(())
    }

    #[test]
    fn quantisation_of_zeros_is_zeros() -> Result<()> {
        let formats = [QuantizationFormat::Int8, QuantizationFormat::Int4 { group: 64 }, QuantizationFormat::Nf4];
        for format in formats {
            assert_eq!(dequantized(&[0.0; 128], 64, format)?, [0.0; 128], "{format:?}");
        }
        Ok(())
    }

    #[test]
    fn quantize_with_groups_or_numbers_that_do_not_fit_is_an_error() -> Result<()> {
        let error =
            |weight: &Tensor, format| QuantizedWeight::quantize(weight, format).expect_err("a wrong call").to_string();
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
        let int4 = |group| QuantizationFormat::Int4 { group };
        let infinite = Tensor::new(&[[1f32, 2.0], [f32::INFINITY, 0.0]], &Device::Cpu)?;
        for (weight, format, expected) in [
            (zeros(&[2, 48])?, int4(48), "[quantize] expected groups of 32, 64 or 128 inputs, found 48"),
            (
                zeros(&[2, 48])?,
                QuantizationFormat::Nf4,
                "[quantize] expected inputs in groups of 64, found a weight of shape (2, 48)",
            ),
            (zeros(&[2])?, QuantizationFormat::Int8, "[quantize] weight has shape [2]"),
            (
                infinite,
                QuantizationFormat::Int8,
                "[quantize] expected finite numbers, found inf in row 1 of the weight",
            ),
        ] {
            let found = error(&weight, format);
            assert!(found.starts_with(expected), "{found}");
        }
        Ok(())
    }
}
