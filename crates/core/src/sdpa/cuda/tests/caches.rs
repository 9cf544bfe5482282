//! Keys and values that a cache stores as codes.

use candle_attention_call::{KvCodeFormat, KvScales, RequestedResults};
use candle_core::{DType, Result, Tensor};

use super::problem::{SIZES, Sizes, emulator_runs};
use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::options::{Backend, SdpaOptions};
use crate::sdpa::run::run;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

#[test]
fn cuda_kernels_with_caches_of_codes_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    // With 4 bits, two groups of 64 numbers have separate scales. The checks at first use have the same programs.
    check(KvCodeFormat::Q8, 64, 0.02)?;
    check(KvCodeFormat::E4M3, 64, 0.006)?;
    check(KvCodeFormat::Q4, 128, 0.3)
}

/// Checks calls over codes of heads of `d` numbers, with scales of up to `most`.
fn check(format: KvCodeFormat, d: usize, most: f64) -> Result<()> {
    let generator = TorchSeed::new(11);
    let Sizes { b, h, h_kv, t_kv, .. } = SIZES;
    let capacity = t_kv + 11;
    let codes = || {
        let bytes = (generator.rand((b, h_kv, capacity, format.bytes(d)))? * 255.0)?.to_dtype(DType::U8)?;
        // The code 127 is NaN in E4M3.
        let is_nan = bytes.eq(127u8)?;
        is_nan.where_cond(&bytes.zeros_like()?, &bytes)?.narrow(2, 0, t_kv)
    };
    let scales = || (generator.rand((b, h_kv, capacity, format.scales(d)))? * most)?.narrow(2, 0, t_kv);
    let kv_scales = KvScales { format, k: scales()?, v: scales()? };
    let (k, v) = (codes()?, codes()?);
    let padded = AttentionMask::causal().with_valid_lens(vec![t_kv, 9]);
    for (t_q, mask) in [(1, AttentionMask::causal()), (1, padded.clone()), (19, padded)] {
        let q = generator.randn((b, h, t_q, d))?.to_dtype(DType::BF16)?;
        let call = |queries: &Tensor, backend: Backend| {
            let options = SdpaOptions::default().with_backend(backend);
            Call::with_all_dims("test", Qkv { q: queries, k: &k, v: &v }, Some(&kv_scales), None, &mask, &options)
        };
        let cuda_path = CudaPath::plan(&call(&q, Backend::Auto)?, RequestedResults::default());
        let found =
            to_vec::<f32>(&cuda_path.map_err(candle_core::Error::msg)?.attend(RequestedResults::default())?.output)?;
        let exact = to_vec::<f32>(
            &run(call(&q.to_dtype(DType::F64)?, Backend::Reference)?, RequestedResults::default())?.output,
        )?;
        let on_cpu = to_vec::<f32>(&run(call(&q, Backend::Auto)?, RequestedResults::default())?.output)?;
        for expected in [&exact, &on_cpu] {
            let largest = expected.iter().fold(0f32, |largest, number| largest.max(number.abs()));
            let differences = found.iter().zip(expected).map(|(own, wanted)| (own - wanted).abs());
            let difference = differences.fold(0f32, f32::max);
            assert!(difference <= 0.02 * largest, "{difference} of {largest}, {format}, {t_q} queries, {mask:?}");
        }
    }
    Ok(())
}
