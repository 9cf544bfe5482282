//! Shapes of the function, and its results if a path fails.

use super::run::or_reference;
use super::*;
use crate::mask::AttentionMask;
use candle_core::{DType, Device, Error, Result, Tensor, Var};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Compares (H, T, D), (T, D) and a batch of one for k and v with the call that has all four dimensions.
#[test]
fn sdpa_without_batch_or_heads_matches_the_call_with_all_dimensions() -> Result<()> {
    let draw = |dims: (usize, usize, usize, usize)| Tensor::randn(0f32, 1., dims, &Device::Cpu);
    let mask = AttentionMask::causal();
    for backend in [Backend::Auto, Backend::Reference] {
        for t_q in [1, 5] {
            let options = SdpaOptions::default().with_backend(backend);
            let run = |q: &Tensor, k: &Tensor, v: &Tensor| -> Result<[Tensor; 5]> {
                let (output, lse) = scaled_dot_product_attention_with_lse(q, k, v, &mask, &options)?;
                let found = scaled_dot_product_attention_with_weights(q, k, v, &mask, &options)?;
                let plain = scaled_dot_product_attention(q, k, v, &mask, &options)?;
                Ok([plain, output, lse, found.output, found.weights])
            };
            let same = |calls: [Tensor; 5], others: [Tensor; 5]| -> Result<()> {
                for (got, expected) in calls.iter().zip(&others) {
                    assert_eq!(got.dims(), expected.dims());
                    let numbers = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
                    // Copies of keys are multiplied in another order than views.
                    let pairs = numbers(got)?.into_iter().zip(numbers(expected)?);
                    assert!(pairs.into_iter().all(|(x, y)| (x - y).abs() < 1e-5));
                }
                Ok(())
            };
            let q = draw((1, 4, t_q, 8))?;
            let k = draw((1, 2, 7, 8))?;
            let v = draw((1, 2, 7, 6))?;
            let without = |x: &Tensor| x.squeeze(0);
            let whole = run(&q, &k, &v)?;
            same(run(&without(&q)?, &without(&k)?, &without(&v)?)?, whole.map(|x| without(&x).expect("one batch")))?;

            let head = |x: &Tensor| x.narrow(1, 0, 1);
            let q1 = head(&q)?;
            let k1 = head(&k)?;
            let v1 = head(&v)?;
            let single = run(&q1, &k1, &v1)?;
            let bare = |x: &Tensor| x.squeeze(0)?.squeeze(0);
            same(run(&bare(&q1)?, &bare(&k1)?, &bare(&v1)?)?, single.map(|x| bare(&x).expect("one head")))?;

            let batch = draw((3, 4, t_q, 8))?;
            let repeated = |x: &Tensor| x.repeat((3, 1, 1, 1));
            same(run(&batch, &k, &v)?, run(&batch, &repeated(&k)?, &repeated(&v)?)?)?;
            same(run(&batch, &repeated(&k)?, &v)?, run(&batch, &repeated(&k)?, &repeated(&v)?)?)?;
        }
    }
    Ok(())
}

/// Uses expanded views, which have any number of heads in the memory of one number; results do not.
#[test]
fn results_beyond_memory_are_errors() -> Result<()> {
    let one = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
    let q = one.broadcast_as((1, 1 << 50, 1, 1))?;
    for (t_kv, d_v) in [(1, 0), (0, 0), (0, 1)] {
        let k = Tensor::zeros((1, 1, t_kv, 1), DType::F32, &Device::Cpu)?;
        let v = Tensor::zeros((1, 1, t_kv, d_v), DType::F32, &Device::Cpu)?;
        for backend in [Backend::Auto, Backend::Reference] {
            let options = SdpaOptions::default().with_backend(backend);
            let result = scaled_dot_product_attention_with_lse(&q, &k, &v, &AttentionMask::none(), &options);
            let text = result.expect_err("too large").to_string();
            assert!(text.contains("not fit in memory"), "{text}");
        }
    }
    Ok(())
}

/// Counts the warnings of [`or_reference`] of a test. Other tests may log warnings of other failures.
struct Warnings(AtomicUsize);

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() == log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        let text = record.args().to_string();
        if self.enabled(record.metadata()) && text.ends_with("runs instead: DriverError(CUDA_ERROR_OUT_OF_MEMORY)") {
            assert!(text.starts_with("[attention] the fused operation failed"), "{text}");
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

#[test]
fn gpu_operation_that_fails_is_an_error_or_is_replaced_and_logged_once() -> Result<()> {
    static WARNINGS: Warnings = Warnings(AtomicUsize::new(0));
    log::set_logger(&WARNINGS).expect("no other test has a logger");
    log::set_max_level(log::LevelFilter::Warn);
    let q = Tensor::zeros((1, 1, 2, 8), DType::F32, &Device::Cpu)?;
    let mask = AttentionMask::none();
    let run = |backend, fused: Result<u8>, reference: Result<u8>| {
        let options = SdpaOptions::default().with_backend(backend);
        let call = Call::new("attention", Qkv { q: &q, k: &q, v: &q }, None, &mask, &options)?;
        or_reference(&call, fused, || reference)
    };
    let text = |result: Result<u8>| result.expect_err("both failed").to_string();
    let failed = || Err(Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)\n  backtrace".into()));
    let warnings = || WARNINGS.0.load(Ordering::Relaxed);
    assert_eq!((run(Backend::Auto, Ok(1), Ok(2))?, warnings()), (1, 0));
    for _ in 0..3 {
        assert_eq!((run(Backend::Auto, failed(), Ok(2))?, warnings()), (2, 1));
    }
    let expected = "[attention] the fused operation failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY)";
    assert!(text(run(Backend::Fused, failed(), Ok(2))).starts_with(expected));
    let both = text(run(Backend::Auto, failed(), Err(Error::Msg("the reference path too".into()))));
    assert!(both.contains("after the fused operation failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY)"), "{both}");
    assert!(both.contains("the reference path too"), "{both}");
    assert_eq!(warnings(), 1);
    Ok(())
}

/// Changes variables as an optimiser may, between the backward passes of two losses of one call.
#[test]
fn alibi_and_sinks_gradients_use_the_values_of_the_forward_pass() -> Result<()> {
    let q = Tensor::randn(0f32, 1., (1, 2, 5, 8), &Device::Cpu)?;
    let k = Tensor::randn(0f32, 1., 640, &Device::Cpu)?;
    let k = k.reshape((1, 2, 40, 8))?;
    let gradients = |is_changed: bool| -> Result<Vec<Vec<f32>>> {
        let vars = [q.clone(), Tensor::new(&[0.5f32, 1.], &Device::Cpu)?, Tensor::new(&[0.1f32, -1.], &Device::Cpu)?];
        let [queries, slopes, sinks] = vars.map(|values| Var::from_tensor(&values));
        let queries = queries?;
        let slopes = slopes?;
        let sinks = sinks?;
        let options = SdpaOptions::default().with_alibi_slopes(&slopes).with_sinks(&sinks);
        let context = scaled_dot_product_attention(&queries, &k, &k, &AttentionMask::causal(), &options)?;
        if is_changed {
            slopes.set(&Tensor::new(&[3f32, 4.], &Device::Cpu)?)?;
            sinks.set(&Tensor::new(&[9f32, 9.], &Device::Cpu)?)?;
        }
        let found = context.sqr()?.sum_all()?.backward()?;
        let of = |var: &Var| found.get(var).expect("a gradient").flatten_all()?.to_vec1();
        [&queries, &slopes, &sinks].map(of).into_iter().collect()
    };
    assert_eq!(gradients(true)?, gradients(false)?);
    Ok(())
}
