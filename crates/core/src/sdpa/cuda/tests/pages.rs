//! Keys and values in pages, which the kernels read in place.

use candle_attention_call::{KvCodeFormat, KvScales, RequestedResults};
use candle_core::{DType, Result, Tensor};

use super::problem::emulator_runs;
use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::options::{Backend, SdpaOptions};
use crate::sdpa::paged::PagedSequences;
use crate::sdpa::run::run;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

const WITH_LSE: RequestedResults =
    RequestedResults { weights: false, log_sum_exp: true, softmax_stats: false, statistics: None };

const PAGES: usize = 9;
const PAGE_SIZE: usize = 16;
const H: usize = 4;
const H_KV: usize = 2;
const D: usize = 32;

/// Queries and pools: floats, or codes with scales. Pages 0 and 5 are NaN.
struct Pools {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Option<KvScales<Tensor>>,
}

impl Pools {
    fn draw(queries: usize, dtype: DType, codes: Option<KvCodeFormat>) -> Result<Self> {
        let generator = TorchSeed::new(31);
        let unused = Tensor::new(&[0f32, 5.], &candle_core::Device::Cpu)?;
        let with_nan = |pool: Tensor| -> Result<Tensor> {
            let pages = Tensor::arange(0f32, PAGES as f32, pool.device())?.reshape((PAGES, 1))?;
            let is_unused = pages.broadcast_eq(&unused.reshape((1, 2))?)?.max(1)?.reshape((PAGES, 1, 1, 1))?;
            let nan = Tensor::full(f32::NAN, pool.shape(), pool.device())?;
            is_unused.broadcast_as(pool.shape())?.where_cond(&nan, &pool)
        };
        let rows = |width: usize| generator.randn((PAGES, PAGE_SIZE, H_KV, width));
        let q = generator.randn((queries, H, D))?.to_dtype(dtype)?;
        let Some(format) = codes else {
            let floats = || with_nan(rows(D)?)?.to_dtype(dtype);
            return Ok(Self { q, k: floats()?, v: floats()?, scales: None });
        };
        let bytes = || {
            let drawn = (generator.rand((PAGES, PAGE_SIZE, H_KV, format.bytes(D)))? * 255.0)?.to_dtype(DType::U8)?;
            // The code 127 is NaN in E4M3.
            drawn.eq(127u8)?.where_cond(&drawn.zeros_like()?, &drawn)
        };
        let most = match format {
            KvCodeFormat::Q8 => 0.02,
            KvCodeFormat::E4M3 => 0.006,
            KvCodeFormat::Q4 => 0.3,
        };
        let scales = || with_nan((generator.rand((PAGES, PAGE_SIZE, H_KV, 1))? * most)?);
        let scales = Some(KvScales { format, k: scales()?, v: scales()? });
        Ok(Self { q, k: bytes()?, v: bytes()?, scales })
    }

    fn call(
        &self,
        dtype: DType,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Call> {
        let q = self.q.to_dtype(dtype)?;
        let floats = |pool: &Tensor| if self.scales.is_some() { Ok(pool.clone()) } else { pool.to_dtype(dtype) };
        let (k, v) = (floats(&self.k)?, floats(&self.v)?);
        Call::over_pages("test", Qkv { q: &q, k: &k, v: &v }, self.scales.as_ref(), sequences, mask, options)
    }

    fn check(&self, sequences: &PagedSequences, mask: &AttentionMask, options: &SdpaOptions) -> Result<()> {
        let dtype = self.q.dtype();
        let cuda_path = CudaPath::plan(&self.call(dtype, sequences, mask, options)?, WITH_LSE);
        let found = cuda_path.map_err(candle_core::Error::msg)?.attend(WITH_LSE)?.output_and_log_sum_exp()?;
        let exact_options = options.clone().with_backend(Backend::Reference);
        let exact = run(self.call(DType::F64, sequences, mask, &exact_options)?, WITH_LSE)?;
        let on_cpu = run(self.call(dtype, sequences, mask, options)?, WITH_LSE)?;
        for expected in [exact, on_cpu] {
            let (output, log_sum_exp) = expected.output_and_log_sum_exp()?;
            for (name, own, wanted) in [("output", &found.0, &output), ("log-sum-exp", &found.1, &log_sum_exp)] {
                let (own, wanted) = (to_vec::<f32>(own)?, to_vec::<f32>(wanted)?);
                let finite = wanted.iter().filter(|number| number.is_finite());
                let largest = finite.fold(0.1f32, |largest, number| largest.max(number.abs()));
                let most = largest * if dtype == DType::F32 { 3e-5 } else { 0.02 };
                for (one, other) in own.iter().zip(&wanted) {
                    let is_close = one == other || (one - other).abs() <= most;
                    assert!(is_close, "{name}: {one}, expected {other}, {dtype:?}, {mask:?}");
                }
            }
        }
        Ok(())
    }
}

/// Returns a chunk of a prompt, a token of a sequence that shares its first page, a sequence without queries, one with
/// fewer keys than queries, and one without keys.
fn sequences() -> Result<PagedSequences> {
    let pages = vec![vec![7, 1, 4], vec![7, 2], vec![5], vec![8], vec![]];
    PagedSequences::new(vec![0, 20, 21, 21, 24, 26], vec![40, 23, 9, 2, 0], pages)
}

#[test]
fn cuda_kernels_over_pages_match_reference_and_cpu_kernel() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let options = SdpaOptions::default();
    for codes in [None, Some(KvCodeFormat::Q8), Some(KvCodeFormat::Q4)] {
        let pools = Pools::draw(26, DType::BF16, codes)?;
        for mask in [AttentionMask::none(), AttentionMask::causal(), AttentionMask::causal().with_window(6)] {
            pools.check(&sequences()?, &mask, &options)?;
        }
    }
    Ok(())
}

#[test]
fn cuda_decode_kernel_over_pages_matches_reference_and_reads_no_released_page() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let pools = Pools::draw(3, DType::F32, None)?;
    // Pages before position 16 of the first sequence were released.
    let pages = vec![vec![u32::MAX, 1, 4], vec![7, 2], vec![3]];
    let tokens = PagedSequences::new(vec![0, 1, 2, 3], vec![40, 23, 1], pages)?;
    let tokens = tokens.with_first_positions(vec![16, 0, 0])?;
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], pools.q.device())?;
    let options = SdpaOptions::default().with_softcap(3.0).with_alibi_slopes(&slopes);
    pools.check(&tokens, &AttentionMask::causal().with_window(20), &options)
}

#[test]
fn cuda_plan_over_pages_says_why_pages_are_copied() -> Result<()> {
    let pools = Pools::draw(26, DType::BF16, None)?;
    let (causal, options) = (AttentionMask::causal(), SdpaOptions::default());
    let reason = |call: &Call| CudaPath::plan(call, RequestedResults::default()).err();
    let dropping = options.clone().with_dropout(0.5, true).with_dropout_philox_seed(1);
    let dropping = pools.call(DType::BF16, &sequences()?, &causal, &dropping)?;
    assert_eq!(reason(&dropping).as_deref(), Some("weights are dropped, which is for keys in one piece"));
    let pool = |pages: &Tensor| pages.narrow(1, 0, 12);
    let odd = Pools { k: pool(&pools.k)?, v: pool(&pools.v)?, ..Pools::draw(2, DType::BF16, None)? };
    let tokens = PagedSequences::new(vec![0, 2], vec![20], vec![vec![1, 2]])?;
    let odd = odd.call(DType::BF16, &tokens, &causal, &options)?;
    assert_eq!(reason(&odd).as_deref(), Some("a page has 12 keys, expected a power of two"));
    Ok(())
}
