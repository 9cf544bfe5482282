//! Scaled dot-product attention: one function for every device, dtype and mask.
//!
//! `softmax(scale · q kᵀ) v`, in this order: scale, softcap, bias (ALiBi, then the mask's), mask, softmax (in f32 for
//! half-precision inputs), dropout, times v. The reference path in [`reference`](self) is the specification; a fused
//! path has to give its numbers.

mod cpu;
mod cuda;
mod merge;
mod metal;
mod options;
mod packed_sequences;
mod plan;
mod reference;
mod rows;
mod softmax;
mod validate;
mod varlen;

pub use merge::merge_attention;
pub use options::{Backend, OutputOrder, SdpaOptions};
pub use packed_sequences::PackedSequences;
pub use plan::Plan;
pub use softmax::masked_softmax;
pub use varlen::{scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse};

pub(crate) use merge::shares_of_parts;
pub(crate) use reference::{Dropout, dropout, weighted_values};
pub(crate) use softmax::{FLOATS, VisibleSoftmax, accumulation_dtype};

use std::sync::Once;

use candle_core::{Result, Tensor, bail};

use crate::AttentionMask;
use plan::{Choice, Wanted};
use validate::{Call, Dims};

/// What attention gives when the weights are asked for too.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// The attended values: (B, H, T_q, D_v) from the function, (B, T_q, out_dim) from a layer.
    pub context: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv).
    pub weights: Tensor,
}

/// Attends from queries to keys and mixes their values.
///
/// Shapes: q (B, H, T_q, D), k (B, H_kv, T_kv, D), v (B, H_kv, T_kv, D_v) give (B, H, T_q, D_v) in q's dtype, on q's
/// device. H_kv divides H; query head h reads key head `h / (H / H_kv)`. Any strides are accepted.
///
/// A query that sees no key gets zeros; one whose scores are all -inf, by a bias, counts as such. NaN and infinities in
/// keys and values reach only the queries that see them, in the forward pass; a key that only a bias of -inf suppresses
/// is seen. The fused operations of GPUs, which are other libraries', keep that promise for keys that no query of a sequence
/// sees, and not for those that some of its queries do.
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
    let call = Call::new("scaled_dot_product_attention", (q, k, v), mask, options)?;
    let reference = || Ok(reference::attend(&call)?.context);
    match plan::choose(&call, None, Wanted::Context)? {
        Choice::Reference { .. } => reference(),
        Choice::Cpu(tier) => cpu::attend(&call, tier, None),
        Choice::FlashAttn(plan) => or_reference(&call, cuda::attend(&call, &plan, cuda::flash_attn), reference),
        Choice::Metal(plan) => or_reference(&call, metal::attend(&call, &plan, metal::sdpa), reference),
    }
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
    Ok(attend_with_weights_and_lse((q, k, v), mask, options)?.0)
}

/// [`scaled_dot_product_attention_with_weights`] that also returns the log-sum-exp, as
/// [`scaled_dot_product_attention_with_lse`] does.
pub(crate) fn attend_with_weights_and_lse(
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<(AttentionOutput, Tensor)> {
    let call = Call::new("scaled_dot_product_attention_with_weights", (q, k, v), mask, options)?;
    plan::choose(&call, None, Wanted::Weights)?;
    let attended = reference::attend(&call)?;
    let output = AttentionOutput { context: attended.context, weights: attended.weights.to_dtype(q.dtype())? };
    Ok((output, attended.lse))
}

/// [`scaled_dot_product_attention`] that also returns the log-sum-exp of each query's scores: (B, H, T_q) in f32 (f64
/// for f64 inputs), `-inf` for a query that sees no key. A sink counts as one more score.
///
/// The two together are what [`merge_attention`] needs to put attention over parts of the keys back together. Parts take
/// [`EmptyRows::Zero`](crate::EmptyRows::Zero): whether a row is empty shows only in the whole.
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
    let call = Call::new("scaled_dot_product_attention_with_lse", (q, k, v), mask, options)?;
    match plan::choose(&call, None, Wanted::LogSumExp)? {
        // The operations of GPUs have no log-sum-exp, and are not chosen for one.
        Choice::Reference { .. } | Choice::FlashAttn(_) | Choice::Metal(_) => {
            let attended = reference::attend(&call)?;
            Ok((attended.context, attended.lse))
        }
        Choice::Cpu(tier) => {
            let mut lse = Vec::new();
            let context = cpu::attend(&call, tier, Some(&mut lse))?;
            let Dims { b, h, t_q, .. } = call.dims;
            Ok((context, Tensor::from_vec(lse, (b, h, t_q), q.device())?))
        }
    }
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
    Ok(plan::choose(&Call::new("plan", (q, k, v), mask, options)?, None, Wanted::Context)?.plan())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Error};

    #[test]
    fn an_operation_that_fails_is_replaced_or_named() -> Result<()> {
        let q = Tensor::zeros((1, 1, 2, 8), DType::F32, &Device::Cpu)?;
        let mask = AttentionMask::none();
        let run = |backend, fused: Result<u8>, reference: Result<u8>| {
            let options = SdpaOptions::default().with_backend(backend);
            let call = Call::new("attention", (&q, &q, &q), &mask, &options)?;
            or_reference(&call, fused, || reference)
        };
        let text = |result: Result<u8>| result.expect_err("both failed").to_string();
        let failed = || Err(Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)\n  backtrace".into()));
        assert_eq!(run(Backend::Auto, Ok(1), Ok(2))?, 1);
        assert_eq!(run(Backend::Auto, failed(), Ok(2))?, 2);
        let expected = "[attention] the fused operation failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY)";
        assert!(text(run(Backend::Fused, failed(), Ok(2))).starts_with(expected));
        let both = text(run(Backend::Auto, failed(), Err(Error::Msg("the reference path too".into()))));
        assert!(both.contains("after the fused operation failed: DriverError(CUDA_ERROR_OUT_OF_MEMORY)"), "{both}");
        assert!(both.contains("the reference path too"), "{both}");
        Ok(())
    }
}
