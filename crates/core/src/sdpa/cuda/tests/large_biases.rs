//! Biases next to which a score has no digit left, as rows of padding have: all keys of a row have the same weight.

use candle_attention_call::RequestedResults;
use candle_core::{DType, Device, Result, Tensor, Var};

use super::problem::{Problem, SIZES, Sizes, emulator_runs};
use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::options::SdpaOptions;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

/// Checks for several queries, and for one, whose keys are divided among blocks.
#[test]
fn gradients_with_large_biases_on_cuda_kernels_match_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for (n, value) in [f64::from(f32::MIN), -1e20, 1e20].into_iter().enumerate() {
        let seed = 440 + 10 * n as u64;
        let one_query = Sizes { t_q: 1, t_kv: 300, ..SIZES };
        let plain =
            |dtype| Problem { bias_value: Some(value), with_lse: true, ..Problem::new(dtype, AttentionMask::causal()) };
        Problem { bias: Some([2, 1, 19, 37]), has_sinks: true, ..plain(DType::F32) }.check(seed)?;
        Problem { relative_bias: Some(vec![4, 19 + 37 - 1]), ..plain(DType::BF16) }.check(seed + 1)?;
        Problem { bias: Some([1, 4, 1, 300]), sizes: one_query, ..plain(DType::BF16) }.check(seed + 2)?;
    }
    Ok(())
}

#[test]
fn gradient_of_values_with_equal_large_biases_is_the_mean_over_keys() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let keys = 8;
    for bias in [f32::MIN, -1e9, 1e9] {
        for queries in [1, 19] {
            let q = Tensor::zeros((1, 1, queries, 16), DType::F32, &Device::Cpu)?;
            let k = TorchSeed::new(1).randn((1, 1, keys, 16))?;
            let v = Var::from_tensor(&TorchSeed::new(2).randn((1, 1, keys, 16))?)?;
            let mask = AttentionMask::none().with_bias(&Tensor::full(bias, (queries, keys), &Device::Cpu)?);
            let call = Call::new("test", Qkv { q: &q, k: &k, v: &v }, None, &mask, &SdpaOptions::default())?;
            let output = CudaPath::plan(&call, RequestedResults::default())
                .map_err(candle_core::Error::msg)?
                .attend(RequestedResults::default())?
                .output;
            let gradients = output.sum_all()?.backward()?;
            let gradient = to_vec::<f32>(gradients.get(&v).expect("a gradient"))?;
            let expected = queries as f32 / keys as f32;
            assert!(gradient.iter().all(|own| (own - expected).abs() < 1e-5), "{bias}, {queries}: {gradient:?}");
        }
    }
    Ok(())
}
