//! Rows of floats as codes: 8 bits by one CUDA kernel or by operations of Candle, with the same bits; other formats by
//! operations of Candle.

use candle_attention_call::KvCodeFormat;
use candle_attention_cuda::QuantizeRowsCall;
use candle_core::{D, DType, Device, Result, Tensor};

use crate::sdpa::{Q4_OFFSET, Q8_ZERO, grouped};
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use candle_attention_modules::base::rowwise::with_contiguous_rows;

/// The case of codes of 8 bits.
pub const QUANTIZE_CASE: FirstUseCase = FirstUseCase { operation: "rows of 8 bits", is_new: false, run: quantize_case };

/// Rows of floats as u8 codes (.., bytes) and f32 scales (.., scales of a row).
#[derive(Debug)]
pub(super) struct QuantizedRows {
    pub codes: Tensor,
    pub scales: Tensor,
}

/// Quantises rows (.., width) of floats to codes of a format whose block divides the width. The scale is such that the
/// largest magnitude of its numbers is the largest one of the format: 127 of 8 bits, 448 of E4M3, and 7.5 of 4 bits.
///
/// A group with a number that is not finite in f32 has a scale of NaN. A group whose scale would be subnormal is all
/// zeros.
pub(super) fn quantize(rows: &Tensor, format: KvCodeFormat) -> Result<QuantizedRows> {
    if format == KvCodeFormat::Q8
        && rows.device().is_cuda()
        && rows.elem_count() > 0
        && let Some(quantized) = by_kernel(rows)?
    {
        return Ok(quantized);
    }
    by_candle(rows, format)
}

/// Quantises rows to 8 bits as [`quantize`] does; `None` if the kernel does not support them.
fn by_kernel(rows: &Tensor) -> Result<Option<QuantizedRows>> {
    let kernel = kernel_call(rows)?;
    if kernel.plan().is_err() || QUANTIZE_CASE.check(rows.device(), rows.dtype()).is_err() {
        return Ok(None);
    }
    run_kernel(&kernel).map(Some)
}

fn kernel_call(rows: &Tensor) -> Result<QuantizeRowsCall> {
    Ok(QuantizeRowsCall { rows: with_contiguous_rows(rows)?.detach() })
}

fn run_kernel(kernel: &QuantizeRowsCall) -> Result<QuantizedRows> {
    let quantized = kernel.forward()?;
    Ok(QuantizedRows { codes: quantized.codes, scales: quantized.scales })
}

/// Quantises rows by the kernel and by the CPU.
fn quantize_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let rows = case_numbers(&[2, 3, 5, 80], 1, dtype)?;
    let kernel = kernel_call(&rows.to_device(device)?)?;
    kernel.plan()?;
    let found = run_kernel(&kernel)?;
    let expected = by_candle(&rows, KvCodeFormat::Q8)?;
    Ok(vec![
        ComparedResult { name: "the codes", found: found.codes, expected: expected.codes },
        ComparedResult { name: "the scales", found: found.scales, expected: expected.scales },
    ])
}

fn by_candle(rows: &Tensor, format: KvCodeFormat) -> Result<QuantizedRows> {
    let rows = rows.to_dtype(DType::F32)?.contiguous()?;
    let of_row = |last: usize| [&rows.dims()[..rows.rank() - 1], &[last]].concat();
    let width = rows.dim(D::Minus1)?;
    let groups = format.scales(width);
    if rows.elem_count() == 0 {
        return Ok(QuantizedRows {
            codes: Tensor::zeros(of_row(format.bytes(width)), DType::U8, rows.device())?,
            scales: Tensor::zeros(of_row(groups), DType::F32, rows.device())?,
        });
    }
    let rows = grouped(&rows, groups)?;
    let largest = match format {
        KvCodeFormat::Q8 => 127.0,
        KvCodeFormat::E4M3 => E4M3_MOST,
        KvCodeFormat::Q4 => Q4_OFFSET,
    };
    // A maximum may ignore NaN. x - x is 0 for finite x and NaN otherwise, so a sum of it makes the scale NaN.
    let residue = rows.sub(&rows)?.sum_keepdim(D::Minus1)?;
    let scales = ((rows.abs()?.max_keepdim(D::Minus1)? / largest)? + residue)?;
    let is_normal = scales.ge(f32::MIN_POSITIVE)?.to_dtype(DType::F32)?;
    let scales = scales.mul(&is_normal)?;
    let divisors = (&scales + scales.eq(0f32)?.to_dtype(DType::F32)?)?;
    let multiples = rows.broadcast_mul(&scales.ne(0f32)?.to_dtype(DType::F32)?)?.broadcast_div(&divisors)?;
    // The conversion to u8 rounds towards zero.
    let codes = match format {
        KvCodeFormat::Q8 => (multiples + (Q8_ZERO + 0.5))?.to_dtype(DType::U8)?,
        KvCodeFormat::E4M3 => e4m3_codes(&multiples)?,
        KvCodeFormat::Q4 => code_pairs(&(multiples + (Q4_OFFSET + 0.5))?.to_dtype(DType::U8)?, format)?,
    };
    Ok(QuantizedRows { codes: codes.reshape(of_row(format.bytes(width)))?, scales: scales.reshape(of_row(groups))? })
}

/// Returns two codes of 4 bits in each byte: of numbers that are half a block apart.
fn code_pairs(codes: &Tensor, format: KvCodeFormat) -> Result<Tensor> {
    let blocks = codes.reshape(((), 2, format.block() / 2))?;
    let low = blocks.narrow(1, 0, 1)?.to_dtype(DType::F32)?;
    let high = blocks.narrow(1, 1, 1)?.to_dtype(DType::F32)?;
    (low + (high * 16.0)?)?.to_dtype(DType::U8)
}

/// The largest number of E4M3.
const E4M3_MOST: f64 = 448.0;

/// Returns the codes of the nearest numbers of E4M3, for numbers up to the largest one.
fn e4m3_codes(numbers: &Tensor) -> Result<Tensor> {
    let magnitudes = numbers.abs()?;
    // Rounded to 4 significant bits: Dekker's product has the other 20 of an f32's bits in the difference.
    let product = (&magnitudes * f64::from((1 << 20) + 1))?;
    let rounded = product.sub(&product.sub(&magnitudes)?)?;
    // Below the least normal number, to multiples of 2^-9: next to 2^14, neighbouring f32 are this far from each other.
    let shift = f64::from(1 << 14);
    let subnormal = ((&magnitudes + shift)? - shift)?;
    let is_normal = magnitudes.ge(f32::powi(2.0, -6))?;
    let rounded = is_normal.where_cond(&rounded, &subnormal)?;
    // The exponent: logarithms of neighbouring numbers differ by more than what is added here.
    let ln_2 = std::f64::consts::LN_2;
    let logarithms = ((rounded.maximum(f32::powi(2.0, -9))?.log()? / ln_2)? + 1e-3)?;
    let exponents = logarithms.floor()?.clamp(-6f32, 8f32)?;
    // A number m · 2^(e - 3) has the code 8 · (e + 6) + m, also where it is subnormal.
    let factors = ((&exponents * -ln_2)? + 3.0 * ln_2)?.exp()?;
    let codes = (((exponents + 6.0)? * 8.0)? + rounded.mul(&factors)?)?;
    let signs = (numbers.lt(0f32)?.to_dtype(DType::F32)? * 128.0)?;
    ((codes + signs)? + 0.5)?.to_dtype(DType::U8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{AttentionCache, AttentionCacheConfig, Padding};
    use crate::mask::AttentionMask;
    use crate::sdpa::{SdpaOptions, emulator_runs};
    use candle_attention_modules::init::TorchSeed;

    /// Quantises rows by the kernel on the emulator.
    fn emulated(rows: &Tensor) -> Result<QuantizedRows> {
        run_kernel(&kernel_call(rows)?)
    }

    /// Compares codes, and the bits of scales. All NaN count as equal: their signs depend on the processor.
    fn assert_same_bits(found: &QuantizedRows, expected: &QuantizedRows, what: &str) -> Result<()> {
        let codes = |rows: &QuantizedRows| rows.codes.flatten_all()?.to_vec1::<u8>();
        let bits = |rows: &QuantizedRows| -> Result<Vec<u32>> {
            let scales = rows.scales.flatten_all()?.to_vec1::<f32>()?;
            Ok(scales.into_iter().map(|scale| if scale.is_nan() { f32::NAN } else { scale }.to_bits()).collect())
        };
        assert_eq!(found.codes.dims(), expected.codes.dims(), "{what}");
        assert_eq!(found.scales.dims(), expected.scales.dims(), "{what}");
        assert_eq!(codes(found)?, codes(expected)?, "{what}");
        assert_eq!(bits(found)?, bits(expected)?, "{what}");
        Ok(())
    }

    #[test]
    fn q8_cuda_kernel_has_the_bits_of_candles_operations() -> Result<()> {
        if !emulator_runs() {
            return Ok(());
        }
        let generator = TorchSeed::new(3);
        let special = [0.0, -0.0, 1e-40, -1.4e-36, 3e38, 65504.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-7];
        for (dtype, width) in [(DType::F32, 13), (DType::BF16, 64), (DType::F16, 80), (DType::BF16, 128)] {
            let (b, t, h) = (2, 9, 3);
            let factors: Vec<f32> = (0..b * t * h).map(|row| 10f32.powi(row as i32 - 27)).collect();
            let factors = Tensor::from_vec(factors, (b, t, h, 1), &Device::Cpu)?;
            let random_rows = generator.randn((b, t, h, width))?.broadcast_mul(&factors)?;
            // Rows of one special number among zeros, then one among random numbers.
            let numbers = Tensor::new(&special, &Device::Cpu)?.reshape((1, special.len(), 1, 1))?;
            let zeros = Tensor::zeros((1, special.len(), 1, width - 1), DType::F32, &Device::Cpu)?;
            let random = generator.randn((1, special.len(), 1, width - 1))?;
            let special_rows =
                Tensor::cat(&[&Tensor::cat(&[&numbers, &zeros], 3)?, &Tensor::cat(&[&random, &numbers], 3)?], 1)?;
            for (name, tokens) in [("random", random_rows), ("special", special_rows)] {
                // As a layer projects them: heads second in memory.
                let rows = tokens.to_dtype(dtype)?.transpose(1, 2)?;
                let what = format!("{name} rows of {width} {dtype:?}");
                assert_same_bits(&emulated(&rows)?, &by_candle(&rows, KvCodeFormat::Q8)?, &what)?;
            }
        }
        Ok(())
    }

    #[test]
    fn q8_cuda_kernel_has_the_bits_of_a_cache_that_the_cpu_filled() -> Result<()> {
        if !emulator_runs() {
            return Ok(());
        }
        let generator = TorchSeed::new(4);
        let (b, h, t, d, d_v) = (2, 3, 8, 64, 13);
        let all_k = generator.randn((b, t, h, d))?.to_dtype(DType::BF16)?.transpose(1, 2)?;
        let all_v = generator.randn((b, t, h, d_v))?.to_dtype(DType::BF16)?.transpose(1, 2)?;
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(16).with_q8())?;
        for (first, count) in [(0, 6), (6, 1), (7, 1)] {
            let (k, v) = (all_k.narrow(2, first, count)?, all_v.narrow(2, first, count)?);
            let new = cache.new_tokens((b, count), Padding::default())?;
            let staged = cache.stage(&new, &k, Some(&v), d_v)?;
            let rows = staged.call.all_rows(&k, &AttentionMask::none(), &SdpaOptions::default())?;
            cache = staged.cache;
            let stored = rows.buffers.codes()?.expect("a cache of 8 bits");
            let end = first + count;
            let stored_keys = QuantizedRows { codes: stored.k, scales: stored.scales.k };
            let stored_values = QuantizedRows { codes: stored.v, scales: stored.scales.v };
            assert_same_bits(&emulated(&all_k.narrow(2, 0, end)?)?, &stored_keys, "keys")?;
            assert_same_bits(&emulated(&all_v.narrow(2, 0, end)?)?, &stored_values, "values")?;
        }
        Ok(())
    }
}
