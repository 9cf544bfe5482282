//! Scaled dot-product attention: one function for every device, dtype and mask.
//!
//! `softmax(scale · q kᵀ) v`, in this order: scale, softcap, bias (ALiBi, then the mask's), mask, softmax (in f32 for
//! half-precision inputs), dropout, times v. The reference path in [`reference`](self) is the specification; a fused
//! path has to give its numbers.

mod cpu;
mod merge;
mod options;
mod packed_sequences;
mod plan;
mod reference;
mod softmax;
mod validate;
mod varlen;

pub use merge::merge_attention;
pub use options::{Backend, OutputOrder, SdpaOptions};
pub use packed_sequences::PackedSequences;
pub use plan::Plan;
pub use softmax::masked_softmax;
pub use varlen::{PackedCall, scaled_dot_product_attention_varlen, scaled_dot_product_attention_varlen_with_lse};

pub(crate) use reference::{Dropout, dropout, weighted_values};
pub(crate) use softmax::{FLOATS, VisibleSoftmax, accumulation_dtype};

use candle_core::{Result, Tensor};

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
/// is seen.
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
    match plan::choose(&call, Wanted::Context)? {
        Choice::Reference { .. } => Ok(reference::attend(&call)?.context),
        Choice::Cpu(tier) => Ok(cpu::attend(&call, tier, None)?),
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
    let call = Call::new("scaled_dot_product_attention_with_weights", (q, k, v), mask, options)?;
    plan::choose(&call, Wanted::Weights)?;
    let attended = reference::attend(&call)?;
    Ok(AttentionOutput { context: attended.context, weights: attended.weights.to_dtype(q.dtype())? })
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
    match plan::choose(&call, Wanted::LogSumExp)? {
        Choice::Reference { .. } => {
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

/// The backend that [`scaled_dot_product_attention`] would run for these arguments, and why.
///
/// # Errors
/// As [`scaled_dot_product_attention`].
pub fn plan(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
    Ok(plan::choose(&Call::new("plan", (q, k, v), mask, options)?, Wanted::Context)?.plan())
}
