//! The calls that run on CUDA and the reasons why others do not.

use candle_attention_call::{RequestedResults, RequestedStatistics};
use candle_attention_cuda::without_programs;
use candle_core::{DType, Device, Result, Tensor, Var};

use super::problem::emulator_runs;
use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::options::{Backend, SdpaOptions};
use crate::sdpa::plan::Choice;
use crate::sdpa::run::ChosenCall;
use candle_attention_modules::init::TorchSeed;

/// Returns the kernel of a call of one head, or the reason why there is none.
fn plan(t_q: usize, d: usize, dtype: DType, options: &SdpaOptions, wanted: RequestedResults) -> Result<String> {
    let rows = |t: usize| Tensor::zeros((1, 1, t, d), dtype, &Device::Cpu);
    let (q, kv) = (rows(t_q)?, rows(500)?);
    let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, None, &AttentionMask::causal(), options)?;
    Ok(match CudaPath::plan(&call, wanted) {
        Ok(cuda_path) => cuda_path.to_string(),
        Err(reason) => reason,
    })
}

#[test]
fn cuda_plan_names_the_kernel_or_the_reason() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let plain = SdpaOptions::default();
    let output = RequestedResults::default();
    assert_eq!(plan(500, 64, DType::BF16, &plain, output)?, "the CUDA forward kernel");
    assert!(plan(1, 64, DType::F16, &plain, output)?.starts_with("the CUDA decode kernel"));
    assert_eq!(
        plan(500, 64, DType::BF16, &plain, RequestedResults { log_sum_exp: true, ..RequestedResults::default() })?,
        "the CUDA forward kernel"
    );

    let weights = plan(70, 64, DType::BF16, &plain, RequestedResults { weights: true, ..RequestedResults::default() })?;
    assert_eq!(weights, "the CUDA kernels do not return attention weights");
    let statistics = plan(
        70,
        64,
        DType::BF16,
        &plain,
        RequestedResults { statistics: Some(&RequestedStatistics::default()), ..RequestedResults::default() },
    )?;
    assert_eq!(statistics, "the CUDA kernels do not compute statistics of weights");
    assert!(plan(0, 64, DType::BF16, &plain, output)?.contains("no scores"));
    assert!(plan(70, 64, DType::F64, &plain, output)?.contains("F64"));
    assert!(plan(70, 300, DType::F16, &plain, output)?.contains("300"));
    let of_pytorch = plain.with_dropout(0.5, true).with_dropout_seed(&TorchSeed::new(1));
    assert!(plan(70, 64, DType::F16, &of_pytorch, output)?.contains("PyTorch's generator"));
    Ok(())
}

/// Returns the scratch memory of a causal call of two heads of 64.
fn scratch_bytes(t_q: usize, t_kv: usize, is_tracked: bool) -> Result<Option<usize>> {
    let rows = |t: usize| Tensor::zeros((1, 2, t, 64), DType::BF16, &Device::Cpu);
    let (q, kv) = (rows(t_q)?, rows(t_kv)?);
    let q = if is_tracked { Var::from_tensor(&q)?.into_inner() } else { q };
    let options = SdpaOptions::default();
    let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, None, &AttentionMask::causal(), &options)?;
    let cuda_path = CudaPath::plan(&call, RequestedResults::default()).map_err(candle_core::Error::msg)?;
    Ok(Choice::Cuda(Box::new(cuda_path)).plan().scratch_bytes)
}

#[test]
fn cuda_plan_reports_scratch_memory_of_forward_and_backward_passes() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    assert_eq!(scratch_bytes(500, 500, false)?, Some(0));
    // Parts of one query for each of two heads: an output of 64 floats and two numbers.
    let of_parts = scratch_bytes(1, 4096, false)?.expect("a number");
    assert!(of_parts > 0 && of_parts.is_multiple_of(2 * (64 + 2) * 4), "{of_parts}");
    // At least delta and the intervals of queries, and less than a matrix of scores of 4,096 by 4,096.
    let of_gradients = scratch_bytes(4096, 4096, true)?.expect("a number");
    assert!((4096 * 2 * 4 + 4096 * 2 * 4..2 * 4096 * 4096).contains(&of_gradients), "{of_gradients}");
    Ok(())
}

/// Checks that a call whose kernels do not load has the output and the gradients of the reference path.
#[test]
fn call_whose_cuda_kernels_do_not_compile_matches_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let generator = TorchSeed::new(5);
    let q = Var::from_tensor(&generator.randn((1, 2, 3, 16))?)?;
    let (k, v) = (generator.randn((1, 2, 9, 16))?, generator.randn((1, 2, 9, 16))?);
    let options = SdpaOptions::default();
    let call = |own: &SdpaOptions| Call::new("test", Qkv { q: &q, k: &k, v: &v }, None, &AttentionMask::causal(), own);
    let results = |output: Tensor| -> Result<[Vec<f32>; 2]> {
        let gradients = output.sqr()?.sum_all()?.backward()?;
        let of_q = gradients.get(&q).expect("a gradient").flatten_all()?.to_vec1()?;
        Ok([output.flatten_all()?.to_vec1()?, of_q])
    };
    let reference = ChosenCall { choice: Choice::Reference { reason: String::new() }, call: call(&options)? };
    let expected = results(reference.attend(RequestedResults::default())?.output)?;
    let planned = || CudaPath::plan(&call(&options)?, RequestedResults::default()).map_err(candle_core::Error::msg);
    let cuda_path = planned()?;
    without_programs("no memory", || -> Result<()> {
        let failing = ChosenCall { choice: Choice::Cuda(Box::new(cuda_path)), call: call(&options)? };
        assert_eq!(results(failing.attend(RequestedResults::default())?.output)?, expected);
        let reason = planned().err().expect("a reason").to_string();
        assert!(reason.contains("no memory"), "{reason}");
        Ok(())
    })?;
    let choice = Choice::Cuda(Box::new(planned()?));
    let fused = ChosenCall { choice, call: call(&options.with_backend(Backend::Fused))? };
    let error = without_programs("no memory", || fused.attend(RequestedResults::default()));
    assert!(error.expect_err("an error").to_string().contains("no memory"));
    Ok(())
}
