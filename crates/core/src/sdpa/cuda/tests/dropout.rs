//! Dropout.

use candle_attention_call::RequestedResults;
use candle_core::{DType, Device, Result, Tensor};

use super::problem::{Problem, SIZES, Sizes, emulator_runs};
use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::metal::MetalKernelCall;
use crate::sdpa::options::SdpaOptions;
use crate::sdpa::run::run;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

#[test]
fn cuda_kernels_with_a_dropout_seed_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for (n, p) in [0.1, 0.7].into_iter().enumerate() {
        let plain = Problem::new(DType::F32, AttentionMask::causal());
        let options = plain.options.clone().with_dropout(p, true).with_dropout_philox_seed(u64::MAX / 3 + n as u64);
        Problem { options, ..plain }.check(600 + n as u64)?;
    }
    Ok(())
}

/// Returns the call of a batch whose values are the unit vectors, so that its output is its weights.
fn call_with_unit_values(options: &SdpaOptions) -> Result<Call> {
    let Sizes { b, h, h_kv, t_q, d, .. } = SIZES;
    let generator = TorchSeed::new(7);
    let q = generator.randn((b, h, t_q, d))?;
    let k = generator.randn((b, h_kv, d, d))?;
    let v = Tensor::eye(d, DType::F32, &Device::Cpu)?.broadcast_as((b, h_kv, d, d))?;
    Call::new("test", Qkv { q: &q, k: &k, v: &v }, None, &AttentionMask::none(), options)
}

/// Returns which weights are dropped.
fn dropped(weights: &Tensor) -> Result<Vec<bool>> {
    Ok(to_vec::<f32>(weights)?.into_iter().map(|weight| weight == 0.0).collect())
}

#[test]
fn dropout_seed_drops_the_weights_that_it_drops_on_the_cpu() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let options = SdpaOptions::default().with_dropout(0.3, true);
    let seeded = options.clone().with_dropout_philox_seed(1 << 40 | 5);
    let on_cpu = dropped(&run(call_with_unit_values(&seeded)?, RequestedResults::default())?.output)?;
    let wanted = RequestedResults::default();
    let on_cuda = |chosen: &SdpaOptions| -> Result<Vec<bool>> {
        let cuda_path = CudaPath::plan(&call_with_unit_values(chosen)?, wanted).map_err(candle_core::Error::msg)?;
        dropped(&cuda_path.attend(wanted)?.output)
    };
    let on_metal = |chosen: &SdpaOptions| -> Result<Vec<bool>> {
        let kernel_call = MetalKernelCall::plan(&call_with_unit_values(chosen)?, wanted);
        dropped(&kernel_call.map_err(candle_core::Error::msg)?.attend(wanted)?.output)
    };
    assert!(on_cpu.contains(&true));
    assert_eq!(on_cuda(&seeded)?, on_cpu);
    assert_eq!(on_metal(&seeded)?, on_cpu);

    // Seeds that are drawn for each call differ.
    for on_emulator in [&on_cuda as &dyn Fn(&SdpaOptions) -> Result<Vec<bool>>, &on_metal] {
        let (first, second) = (on_emulator(&options)?, on_emulator(&options)?);
        assert_ne!(first, second);
        let share = first.iter().filter(|is_dropped| **is_dropped).count() as f64 / first.len() as f64;
        assert!((share - 0.3).abs() < 0.05, "{share}");
    }
    Ok(())
}
