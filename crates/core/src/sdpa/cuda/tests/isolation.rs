//! NaN and infinities in keys and values, which reach the queries that attend to them and no others.

use candle_attention_call::RequestedResults;
use candle_core::{DType, Device, Result, Tensor};

use super::problem::{SIZES, Sizes, emulator_runs};
use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::options::SdpaOptions;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

/// The key that is not finite.
const SPOILED: usize = 20;

/// Returns keys or values with `special` in one row of each head.
fn spoiled(rows: &Tensor, special: f32) -> Result<Tensor> {
    let (_, _, t, _) = rows.dims4()?;
    let chosen = Tensor::from_iter((0..t).map(|row| u8::from(row == SPOILED)), &Device::Cpu)?;
    let chosen = chosen.reshape((1, 1, t, 1))?.broadcast_as(rows.shape())?;
    chosen.where_cond(&Tensor::full(special, rows.shape(), &Device::Cpu)?.to_dtype(rows.dtype())?, rows)
}

/// Returns the output (B, H, T_q, D_v) of the CUDA kernels, query by query.
fn rows_of_output(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask) -> Result<Vec<Vec<f32>>> {
    let call = Call::new("test", Qkv { q, k, v }, None, mask, &SdpaOptions::default())?;
    let output = CudaPath::plan(&call, RequestedResults::default())
        .map_err(candle_core::Error::msg)?
        .attend(RequestedResults::default())?
        .output;
    Ok(to_vec::<f32>(&output)?.chunks(v.dim(3)?).map(<[f32]>::to_vec).collect())
}

#[test]
fn numbers_that_are_not_finite_reach_only_queries_that_attend_to_them_on_cuda_kernels() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let Sizes { b, h, h_kv, t_kv, d, d_v, .. } = SIZES;
    let masks = [
        AttentionMask::causal(),
        AttentionMask::none().with_valid_lens(vec![SPOILED, t_kv]),
        AttentionMask::none().with_starts(vec![SPOILED + 1, SPOILED]),
        AttentionMask::causal().with_window(3),
    ];
    for dtype in [DType::F32, DType::BF16] {
        let generator = TorchSeed::new(5);
        let draw = |dims: (usize, usize, usize, usize)| generator.randn(dims)?.to_dtype(dtype);
        for t_q in [19, 1] {
            let (q, k, v) = (draw((b, h, t_q, d))?, draw((b, h_kv, t_kv, d))?, draw((b, h_kv, t_kv, d_v))?);
            for (mask, special) in masks.iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]) {
                let expected = rows_of_output(&q, &k, &v, mask)?;
                let found = rows_of_output(&q, &spoiled(&k, special)?, &spoiled(&v, special)?, mask)?;
                let ranges = mask.resolve(b, t_q, t_kv)?;
                for (row, (own, wanted)) in found.iter().zip(&expected).enumerate() {
                    let (sequence, query) = (row / (h * t_q), row % t_q);
                    if ranges.kv_range(sequence, query).contains(&SPOILED) {
                        assert!(own.iter().any(|number| !number.is_finite()), "row {row}, {special}: {mask:?}");
                    } else {
                        assert_eq!(own, wanted, "row {row}, {special} in {dtype:?}: {mask:?}");
                    }
                }
            }
        }
    }
    Ok(())
}
