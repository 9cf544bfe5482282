//! The softmax over the keys that a query attends to.

use candle_core::{D, Device, Result, Tensor};

use crate::mask::{AttentionMask, FullyMaskedRows, ValidLens};
use candle_attention_modules::base::{Dim, Expect, accumulation_dtype};

/// The result of a softmax over scores (.., T_q, T_kv).
pub(super) struct Softmax {
    /// (.., T_q, T_kv).
    pub weights: Tensor,
    /// The log-sum-exp of the scores, (.., T_q).
    pub lse: Tensor,
}

/// Computes a softmax over the last dimension of scores (.., T_q, T_kv) in f32 or f64, T_kv at least 1, with masked
/// keys, sinks and fully masked rows. Differentiable.
///
/// `bool_mask` is u8, broadcastable to the scores; 0 masks a key. `sinks` are one more logit for each row,
/// broadcastable to (.., T_q, 1), which takes weight but has no column.
pub(super) fn masked_softmax_and_lse(
    scores: &Tensor,
    bool_mask: Option<&Tensor>,
    sinks: Option<&Tensor>,
    fully_masked_rows: FullyMaskedRows,
) -> Result<Softmax> {
    let scores = match bool_mask {
        None => scores.clone(),
        Some(bool_mask) => {
            bool_mask.broadcast_as(scores.shape())?.where_cond(scores, &constant_like(f64::NEG_INFINITY, scores)?)?
        }
    };
    // The softmax does not change when its row is shifted, so the maximum needs no gradient.
    let row_max = scores.max_keepdim(D::Minus1)?.detach();
    let has_no_max = row_max.eq(f64::NEG_INFINITY)?;
    let largest = match sinks {
        None => row_max,
        Some(sinks) => row_max.broadcast_maximum(&sinks.detach())?,
    };
    // Only a row without any score above -inf has this maximum; any finite shift keeps -inf - shift from being NaN.
    let shift = largest.eq(f64::NEG_INFINITY)?.where_cond(&largest.zeros_like()?, &largest)?;

    let exponentials = scores.broadcast_sub(&shift)?.exp()?;
    let sum_of_keys = exponentials.sum_keepdim(D::Minus1)?;
    // Candle's maximum may pass over a NaN, the sum does not: a row with a NaN is not fully masked.
    let is_fully_masked = has_no_max.mul(&sum_of_keys.eq(0f64)?)?;
    let sum = match sinks {
        None => sum_of_keys,
        Some(sinks) => (sum_of_keys + sinks.broadcast_sub(&shift)?.exp()?)?,
    };
    // A sum of 0 is replaced before the logarithm and the division, whose gradients at 0 are NaN.
    let is_zero = sum.eq(0f64)?;
    let divisor = is_zero.where_cond(&sum.ones_like()?, &sum)?;
    let lse = (divisor.log()? + &shift)?;
    let lse = is_zero.where_cond(&constant_like(f64::NEG_INFINITY, &divisor)?, &lse)?.squeeze(D::Minus1)?;
    let weights = exponentials.broadcast_div(&divisor)?;
    let weights = match fully_masked_rows {
        FullyMaskedRows::Zero => weights,
        FullyMaskedRows::Uniform => {
            let uniform = constant_like(1.0 / scores.dim(D::Minus1)? as f64, &weights)?;
            is_fully_masked.broadcast_as(weights.shape())?.where_cond(&uniform, &weights)?
        }
    };
    Ok(Softmax { weights, lse })
}

/// Returns a constant in the shape and dtype and on the device of a tensor. It is converted on the CPU, since Metal has
/// no f64.
pub(super) fn constant_like(value: f64, like: &Tensor) -> Result<Tensor> {
    Tensor::new(value, &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())?.broadcast_as(like.shape())
}

/// Computes d2l's `masked_softmax`: the softmax over the last dimension of scores (B, T_q, T_kv) without the keys at
/// and past a valid length, which is (B,) for each sequence or (B, T_q) for each query. The result has the shape and
/// dtype of the scores.
///
/// A row whose length is 0 is zeros with [`FullyMaskedRows::Zero`], and 1/T_kv everywhere with
/// [`FullyMaskedRows::Uniform`], as in d2l. Unlike d2l's function this one does not change its input.
///
/// # Errors
/// For scores of another rank or of an integer dtype, and for lengths that do not fit them.
pub fn masked_softmax(
    scores: &Tensor,
    valid_lens: Option<&ValidLens>,
    fully_masked_rows: FullyMaskedRows,
) -> Result<Tensor> {
    let expected = Expect::many("masked_softmax", "scores", scores);
    expected.shape(&["B", "T_q", "T_kv"].map(Dim::Any))?.float("")?;
    let (b, t_q, t_kv) = scores.dims3()?;
    let mask = valid_lens.map_or_else(AttentionMask::none, |lens| AttentionMask::none().with_valid_lens(lens.clone()));
    let bool_mask = mask.combined_bool_mask([b, 1, t_q, t_kv], scores.device())?;
    if scores.elem_count() == 0 {
        return Ok(scores.clone());
    }
    let floats = scores.unsqueeze(1)?.to_dtype(accumulation_dtype(scores.dtype()))?;
    let softmax = masked_softmax_and_lse(&floats, bool_mask.as_ref(), None, fully_masked_rows)?;
    softmax.weights.squeeze(1)?.to_dtype(scores.dtype())
}
