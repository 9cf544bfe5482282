//! Lists of keys, whose rows the kernels read as pages of one key.

use candle_attention_call::RequestedResults;
use candle_core::{DType, Device, Result, Tensor};

use super::problem::emulator_runs;
use crate::mask::{AttentionMask, KeyLists};
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::listed::{self, ListedKernel};
use crate::sdpa::options::{Backend, SdpaOptions};
use crate::sdpa::paged::PagedSequences;
use crate::sdpa::run::run;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

const WITH_LSE: RequestedResults =
    RequestedResults { weights: false, log_sum_exp: true, softmax_stats: false, statistics: None };
const H: usize = 4;
const H_KV: usize = 2;
const D: usize = 16;

/// Checks the CUDA and the Metal kernels on a call with lists against the reference path.
fn check(call: impl Fn(&SdpaOptions) -> Result<Call>, name: &str) -> Result<()> {
    let options = SdpaOptions::default();
    let exact = run(call(&options.clone().with_backend(Backend::Reference))?, WITH_LSE)?.output_and_log_sum_exp()?;
    for kernel in [ListedKernel::Cuda, ListedKernel::Metal] {
        let found = listed::attend(call(&options)?, kernel, WITH_LSE)?.output_and_log_sum_exp()?;
        for (own, wanted) in [(&found.0, &exact.0), (&found.1, &exact.1)] {
            assert_eq!(own.dims(), wanted.dims(), "{kernel:?}, {name}");
            for (one, other) in to_vec::<f32>(own)?.into_iter().zip(to_vec::<f32>(wanted)?) {
                let is_close = one == other || (one - other).abs() <= 3e-5;
                assert!(is_close, "{kernel:?}, {name}: {one}, expected {other}");
            }
        }
    }
    Ok(())
}

#[test]
fn gpu_kernels_over_key_lists_match_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let generator = TorchSeed::new(37);
    let (b, t_kv) = (2, 40);
    let q = generator.randn((b, H, 1, D))?;
    let k = generator.randn((b, H_KV, t_kv, D))?;
    let v = generator.randn((b, H_KV, t_kv, D))?;
    // A key that is listed twice, masked keys, and entries that are none.
    let entries = Tensor::new(&[[[[39i64, 3, -1, 3, 17]]], [[[30, -1, 39, 38, -1]]]], &Device::Cpu)?;
    let listed = AttentionMask::none().with_key_lists(&KeyLists::new(&entries)?);
    for mask in [listed.clone(), listed.and(&AttentionMask::none().with_valid_lens(vec![40, 20]))] {
        check(
            |options| Call::with_all_dims("test", Qkv { q: &q, k: &k, v: &v }, None, None, &mask, options),
            "a batch",
        )?;
    }
    Ok(())
}

#[test]
fn gpu_kernels_over_key_lists_in_pages_match_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let generator = TorchSeed::new(41);
    // Pages of 16 positions, of which the kernels know only rows.
    let pool = || generator.randn((5, 16, H_KV, D));
    let (k_pool, v_pool) = (pool()?, pool()?);
    let q = generator.randn((2, H, D))?.to_dtype(DType::F32)?;
    let sequences = PagedSequences::new(vec![0, 1, 2], vec![40, 17], vec![vec![3, 0, 4], vec![3, 1]])?;
    let entries = Tensor::new(&[[39i64, 20, 16, 0, -1], [16, 15, 2, -1, -1]], &Device::Cpu)?;
    let mask = AttentionMask::causal().with_key_lists(&KeyLists::new(&entries)?);
    let qkv = Qkv { q: &q, k: &k_pool, v: &v_pool };
    check(|options| Call::over_pages("test", qkv, None, &sequences, &mask, options), "pages")
}
