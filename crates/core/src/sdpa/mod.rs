//! Scaled dot-product attention: one function for every device, dtype and mask.
//!
//! `softmax(scale · q kᵀ) v`, in this order: scale, softcap, bias (ALiBi, then the mask's), mask, softmax (in f32 for
//! half-precision inputs), dropout, times v. The reference path in [`reference`](self) is the specification; a fused
//! path has to give its numbers.

mod cpu;
mod gpu;
mod keys;
mod plan;
mod reference;
mod rows;
mod softmax;
mod statistics;
mod validate;
mod varlen;

pub use keys::AttentionFunction;
pub use plan::{Backend, OutputOrder, Plan, SdpaOptions};
pub use softmax::{masked_softmax, merge_attention};
pub use statistics::{
    AttentionStatistics, StatisticsOptions, scaled_dot_product_attention_varlen_with_statistics,
    scaled_dot_product_attention_with_statistics,
};
pub use varlen::{PackedSequences, scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse};

pub(crate) use keys::{Keys, OwnKeys, QuantizedKv, uncached};
pub(crate) use plan::Outputs;
pub(crate) use reference::{Dropout, dropout, weighted_values};
pub(crate) use softmax::VisibleSoftmax;

use std::sync::Once;

use candle_core::{Result, Tensor, bail};

use crate::mask::AttentionMask;
use plan::Choice;
use validate::Call;

/// What attention gives when the weights are asked for too.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The attended values: (B, H, T_q, D_v).
    pub context: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv).
    pub weights: Tensor,
}

/// Attends from queries to keys and mixes their values.
///
/// Shapes: q (B, H, T_q, D), k (B, H_kv, T_kv, D), v (B, H_kv, T_kv, D_v) give (B, H, T_q, D_v) in q's dtype, on q's
/// device. H_kv divides H; query head h reads key head `h / (H / H_kv)`. Any strides are accepted. k and v may have a
/// batch of 1 next to a larger B, which is read in place for all of it. As in PyTorch, all three may come without B,
/// (H, T, D), or without B and H, (T, D), and so does the result; masks keep the shape (B, H, T_q, T_kv) that they
/// broadcast to.
///
/// A query that sees no key gets zeros; one whose scores are all -inf, by a bias, counts as such. NaN and infinities in
/// keys and values reach only the queries that see them, in the backward pass too where the CPU's kernel runs; a key
/// that only a bias of -inf suppresses is seen. The fused operations of GPUs, which are other libraries', keep that
/// promise for keys that no query of a sequence sees, and not for those that some of its queries do.
///
/// ```
/// use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (2, 8, 5, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (2, 2, 7, 64), &Device::Cpu)?;
/// let y = scaled_dot_product_attention(&q, &kv, &kv, &AttentionMask::causal(), &SdpaOptions::default())?;
/// assert_eq!(y.dims(), [2, 8, 5, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// For shapes, dtypes or devices that do not fit together, for a mask or an option that does not fit them, and for
/// [`Backend::Fused`] where no fused path can run the call.
pub fn scaled_dot_product_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    Ok(attend(Outputs::Context, [q, k, v], mask, options)?.context)
}

/// [`scaled_dot_product_attention`] that also returns the weights.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_weights(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<AttentionOutput> {
    let (context, weights) = attend(Outputs::Weights, [q, k, v], mask, options)?.with_weights()?;
    Ok(AttentionOutput { context, weights })
}

/// [`scaled_dot_product_attention`] that also returns the log-sum-exp of each query's scores: (B, H, T_q) in f32 (f64
/// for f64 inputs), `-inf` for a query that sees no key. A sink counts as one more score.
///
/// The two together are what [`merge_attention`] needs to put attention over parts of the keys back together. Parts
/// take [`EmptyRows::Zero`](crate::EmptyRows::Zero): whether a row is empty shows only in the whole.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<(Tensor, Tensor)> {
    attend(Outputs::LogSumExp, [q, k, v], mask, options)?.with_lse()
}

/// The context of a call, and what was wanted beside it.
pub(crate) struct Attended {
    /// (B, H, T_q, D_v) in the dtype of the queries, in the order of the options.
    pub context: Tensor,
    /// (B, H, T_q) in the dtype of the accumulation.
    pub lse: Option<Tensor>,
    /// (B, H, T_q, T_kv).
    pub weights: Option<Tensor>,
    /// (B, H, ..).
    pub statistics: Option<AttentionStatistics>,
}

impl Attended {
    pub fn context(context: Tensor) -> Self {
        Self { context, lse: None, weights: None, statistics: None }
    }

    /// The same after a change of the context, and of each tensor beside it.
    pub fn map(
        self,
        of_context: impl FnOnce(Tensor) -> Result<Tensor>,
        change: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok(Self {
            context: of_context(self.context)?,
            lse: self.lse.map(&change).transpose()?,
            weights: self.weights.map(&change).transpose()?,
            statistics: self.statistics.map(|found| found.map(&change)).transpose()?,
        })
    }

    pub fn with_lse(self) -> Result<(Tensor, Tensor)> {
        beside(self.context, self.lse, "log-sum-exp")
    }

    pub fn with_weights(self) -> Result<(Tensor, Tensor)> {
        beside(self.context, self.weights, "weights")
    }

    pub fn with_statistics(self) -> Result<(Tensor, AttentionStatistics)> {
        beside(self.context, self.statistics, "statistics")
    }
}

fn beside<T>(context: Tensor, found: Option<T>, what: &str) -> Result<(Tensor, T)> {
    match found {
        Some(found) => Ok((context, found)),
        None => bail!("[scaled_dot_product_attention] attention gave no {what}"),
    }
}

/// What is wanted of a batch, in the rank of q.
pub(crate) fn attend(
    outputs: Outputs,
    qkv: [&Tensor; 3],
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Attended> {
    let call = Call::new(outputs.op(false), qkv, mask, options)?;
    let in_rank = |tensor| call.in_rank_of_q(tensor);
    run(&call, outputs)?.map(in_rank, in_rank)
}

/// What is wanted of a call, with all dimensions.
fn run(call: &Call, outputs: Outputs) -> Result<Attended> {
    outputs.check(call)?;
    let reference = || by_reference(call, outputs);
    match plan::choose(call, outputs)? {
        Choice::Reference { .. } => reference(),
        Choice::Cpu(tier) => cpu::attend(call, tier, outputs),
        Choice::Gpu(plan) => or_reference(call, plan.attend(call).map(Attended::context), reference),
    }
}

fn by_reference(call: &Call, outputs: Outputs) -> Result<Attended> {
    let mut attended = reference::attend(call)?;
    let weights = attended.weights.take();
    match outputs {
        Outputs::Context | Outputs::LogSumExp => {}
        Outputs::Weights => attended.weights = Some(reference::present(call, weights)?.to_dtype(call.q.dtype())?),
        Outputs::Statistics(wanted) => {
            attended.statistics = Some(AttentionStatistics::by_reference(call, weights, wanted)?);
        }
    }
    Ok(attended)
}

/// What a GPU's fused operation gave; where it failed and another path was allowed, what the reference path gives.
fn or_reference<T>(call: &Call, fused: Result<T>, reference: impl FnOnce() -> Result<T>) -> Result<T> {
    let Err(cause) = fused else { return fused };
    if call.options.backend == Backend::Fused {
        bail!("[{}] the fused operation failed: {}", call.op, first_line(&cause))
    }
    // Once, since a model would say the same for every layer and token.
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| {
        log::warn!("[{}] the fused operation failed, the reference path runs instead: {}", call.op, first_line(&cause));
    });
    reference().map_err(|error| error.context(format!("after the fused operation failed: {}", first_line(&cause))))
}

/// An error without the backtrace that Candle may append.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().trim().to_string()
}

/// The backend that [`scaled_dot_product_attention`] would run for these arguments, and why.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn plan(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
    Ok(plan::choose(&Call::new("plan", [q, k, v], mask, options)?, Outputs::Context)?.plan())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Error};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// (H, T, D), (T, D) and a batch of one for k and v, against the call with all four dimensions written out.
    #[test]
    fn missing_dimensions_and_a_shared_batch_are_those_of_the_whole_call() -> Result<()> {
        let draw = |dims: (usize, usize, usize, usize)| Tensor::randn(0f32, 1., dims, &Device::Cpu);
        let mask = AttentionMask::causal();
        for backend in [Backend::Auto, Backend::Reference] {
            for t_q in [1, 5] {
                let options = SdpaOptions::default().with_backend(backend);
                let run = |q: &Tensor, k: &Tensor, v: &Tensor| -> Result<[Tensor; 5]> {
                    let (context, lse) = scaled_dot_product_attention_with_lse(q, k, v, &mask, &options)?;
                    let output = scaled_dot_product_attention_with_weights(q, k, v, &mask, &options)?;
                    let plain = scaled_dot_product_attention(q, k, v, &mask, &options)?;
                    Ok([plain, context, lse, output.context, output.weights])
                };
                let same = |got: [Tensor; 5], expected: [Tensor; 5]| -> Result<()> {
                    for (got, expected) in got.iter().zip(&expected) {
                        assert_eq!(got.dims(), expected.dims());
                        let numbers = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
                        // Copies of keys are multiplied in another order than views.
                        let pairs = numbers(got)?.into_iter().zip(numbers(expected)?);
                        assert!(pairs.into_iter().all(|(got, expected)| (got - expected).abs() < 1e-5));
                    }
                    Ok(())
                };
                let (q, k, v) = (draw((1, 4, t_q, 8))?, draw((1, 2, 7, 8))?, draw((1, 2, 7, 6))?);
                let without = |x: &Tensor| x.squeeze(0);
                let whole = run(&q, &k, &v)?;
                same(
                    run(&without(&q)?, &without(&k)?, &without(&v)?)?,
                    whole.map(|x| without(&x).expect("one batch")),
                )?;

                let head = |x: &Tensor| x.narrow(1, 0, 1);
                let (q1, k1, v1) = (head(&q)?, head(&k)?, head(&v)?);
                let whole = run(&q1, &k1, &v1)?;
                let without = |x: &Tensor| x.squeeze(0)?.squeeze(0);
                same(
                    run(&without(&q1)?, &without(&k1)?, &without(&v1)?)?,
                    whole.map(|x| without(&x).expect("one head")),
                )?;

                let q = draw((3, 4, t_q, 8))?;
                let repeated = |x: &Tensor| x.repeat((3, 1, 1, 1));
                same(run(&q, &k, &v)?, run(&q, &repeated(&k)?, &repeated(&v)?)?)?;
                same(run(&q, &repeated(&k)?, &v)?, run(&q, &repeated(&k)?, &repeated(&v)?)?)?;
            }
        }
        Ok(())
    }

    /// Expanded views hold any number of heads in one number; results do not.
    #[test]
    fn results_that_no_memory_holds_are_errors() -> Result<()> {
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

    /// Counts the warnings of [`or_reference`].
    struct Warnings(AtomicUsize);

    impl log::Log for Warnings {
        fn enabled(&self, metadata: &log::Metadata) -> bool {
            metadata.level() == log::Level::Warn
        }

        fn log(&self, record: &log::Record) {
            let text = record.args().to_string();
            if self.enabled(record.metadata()) && text.contains("the fused operation failed") {
                assert!(text.ends_with("runs instead: DriverError(CUDA_ERROR_OUT_OF_MEMORY)"), "{text}");
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }

        fn flush(&self) {}
    }

    #[test]
    fn an_operation_that_fails_is_named_or_replaced_and_logged_once() -> Result<()> {
        static WARNINGS: Warnings = Warnings(AtomicUsize::new(0));
        log::set_logger(&WARNINGS).expect("no other test has a logger");
        log::set_max_level(log::LevelFilter::Warn);
        let q = Tensor::zeros((1, 1, 2, 8), DType::F32, &Device::Cpu)?;
        let mask = AttentionMask::none();
        let run = |backend, fused: Result<u8>, reference: Result<u8>| {
            let options = SdpaOptions::default().with_backend(backend);
            let call = Call::new("attention", [&q, &q, &q], &mask, &options)?;
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
}
