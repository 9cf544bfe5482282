//! Softmax over the keys that a query sees, and attention over parts of the keys put back together.

use candle_core::{D, Device, Result, Tensor, bail};

use crate::mask::{AttentionMask, EmptyRows, ValidLens};
use candle_attention_modules::base::{Dim, Expect, FLOATS, accumulation_dtype};

/// A softmax over the last dimension that knows of hidden keys, sinks and rows that see nothing.
#[derive(Default)]
pub(crate) struct VisibleSoftmax<'a> {
    /// u8, broadcastable to the scores; 0 hides.
    pub keep: Option<&'a Tensor>,
    /// One more logit a row, broadcastable to (.., T_q, 1), which takes weight but has no column.
    pub sinks: Option<&'a Tensor>,
    pub empty_rows: EmptyRows,
}

impl VisibleSoftmax<'_> {
    /// Scores (.., T_q, T_kv) in f32 or f64, T_kv at least 1, to weights of the same shape and the log-sum-exp
    /// (.., T_q). Differentiable.
    pub(crate) fn apply(&self, scores: &Tensor) -> Result<(Tensor, Tensor)> {
        let scores = match self.keep {
            None => scores.clone(),
            Some(keep) => {
                let hidden = scalar(f64::NEG_INFINITY, scores)?;
                keep.broadcast_as(scores.shape())?.where_cond(scores, &hidden.broadcast_as(scores.shape())?)?
            }
        };
        // The softmax does not change when its row is shifted, so the maximum needs no gradient.
        let row_max = scores.max_keepdim(D::Minus1)?.detach();
        let no_max = row_max.eq(&scalar(f64::NEG_INFINITY, &scores)?.broadcast_as(row_max.shape())?)?;
        let shift = match self.sinks {
            None => row_max,
            Some(sinks) => row_max.broadcast_maximum(&sinks.detach())?,
        };
        // Only a row without any score above -inf has this shift; any finite one keeps -inf - shift from being NaN.
        let lowest = shift.eq(&scalar(f64::NEG_INFINITY, &scores)?.broadcast_as(shift.shape())?)?;
        let shift = lowest.where_cond(&shift.zeros_like()?, &shift)?;

        let exponentials = scores.broadcast_sub(&shift)?.exp()?;
        let mut sum = exponentials.sum_keepdim(D::Minus1)?;
        // Candle's maximum may pass over a NaN, the sum does not: a row that sees one is not empty.
        let empty = no_max.mul(&sum.eq(&sum.zeros_like()?)?)?;
        if let Some(sinks) = self.sinks {
            sum = (sum + sinks.broadcast_sub(&shift)?.exp()?)?;
        }
        // Put aside before the logarithm and the division, whose gradients at 0 are NaN.
        let nothing = sum.eq(&sum.zeros_like()?)?;
        let sum = nothing.where_cond(&sum.ones_like()?, &sum)?;
        let lowest = scalar(f64::NEG_INFINITY, &scores)?.broadcast_as(sum.shape())?;
        let lse = nothing.where_cond(&lowest, &(sum.log()? + &shift)?)?.squeeze(D::Minus1)?;
        let weights = exponentials.broadcast_div(&sum)?;
        let weights = match self.empty_rows {
            EmptyRows::Zero => weights,
            EmptyRows::Uniform => {
                let uniform = scalar(1.0 / scores.dim(D::Minus1)? as f64, &scores)?.broadcast_as(weights.shape())?;
                empty.broadcast_as(weights.shape())?.where_cond(&uniform, &weights)?
            }
        };
        Ok((weights, lse))
    }
}

/// A constant in the dtype and on the device of a tensor; converted on the CPU, since Metal has no f64.
pub(super) fn scalar(value: f64, like: &Tensor) -> Result<Tensor> {
    Tensor::new(value, &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())
}

/// d2l's `masked_softmax`: softmax over the last dimension of scores (B, T_q, T_kv), leaving out the keys at and past a
/// valid length, given for each sequence (B,) or each query (B, T_q). The result has the shape and dtype of the scores.
///
/// A row whose length is 0 gives zeros with [`EmptyRows::Zero`], and 1/T_kv everywhere with [`EmptyRows::Uniform`], as
/// d2l has it. Unlike d2l's function this one leaves its input as it is.
///
/// # Errors
/// For scores of another rank or of an integer dtype, and for lengths that do not fit them.
pub fn masked_softmax(scores: &Tensor, valid_lens: Option<&ValidLens>, empty_rows: EmptyRows) -> Result<Tensor> {
    let shape = [Dim::Any("B"), Dim::Any("T_q"), Dim::Any("T_kv")];
    Expect::many("masked_softmax", "scores", scores).shape(&shape)?.dtype_of(&FLOATS, "")?;
    let (b, t_q, t_kv) = scores.dims3()?;
    let mask = valid_lens.map_or_else(AttentionMask::none, |lens| AttentionMask::none().with_valid_lens(lens.clone()));
    let keep = mask.keep_tensor((b, 1, t_q, t_kv), scores.device())?;
    if scores.elem_count() == 0 {
        return Ok(scores.clone());
    }
    let softmax = VisibleSoftmax { keep: keep.as_ref(), sinks: None, empty_rows };
    let (weights, _) = softmax.apply(&scores.unsqueeze(1)?.to_dtype(accumulation_dtype(scores.dtype()))?)?;
    weights.squeeze(1)?.to_dtype(scores.dtype())
}

/// Merges attention over disjoint parts of the keys into attention over all of them, exactly.
///
/// Each part is a context (B, H, T_q, D_v) and the log-sum-exp (B, H, T_q) of its scores, as
/// [`scaled_dot_product_attention_with_lse`](crate::scaled_dot_product_attention_with_lse) gives them; the result is
/// the same pair for all keys, the context in the dtype of the first part. A query that saw nothing in a part (`-inf`)
/// takes nothing from it. Sinks belong to one part only, since each part's sum counts its own.
///
/// # Errors
/// For no parts, and for parts whose shapes, dtypes or devices differ.
pub fn merge_attention(parts: &[(Tensor, Tensor)]) -> Result<(Tensor, Tensor)> {
    let Some((first, first_lse)) = parts.first() else {
        bail!("[merge_attention] expected at least one part, found none")
    };
    const OP: &str = "merge_attention";
    let shape = [Dim::Any("B"), Dim::Any("H"), Dim::Any("T_q"), Dim::Any("D_v")];
    Expect::one(OP, "the context", first).shape(&shape)?.dtype_of(&FLOATS, "")?;
    Expect::one(OP, "the log-sum-exp", first_lse).dtype_of(&FLOATS, "")?;
    let context_shape = first.dims().iter().map(|&dim| Dim::Is(dim)).collect::<Vec<_>>();
    for (i, (context, lse)) in parts.iter().enumerate() {
        for (what, tensor, like, shape) in
            [("context", context, first, &context_shape[..]), ("log-sum-exp", lse, first_lse, &context_shape[..3])]
        {
            let name = format!("the {what} of part {i}");
            let part = Expect::one(OP, &name, tensor).shape(shape)?.dtype(like.dtype(), "the first part's")?;
            part.beside("the first part", first.device())?;
        }
    }
    if first_lse.elem_count() == 0 {
        return Ok((first.clone(), first_lse.clone()));
    }
    let dtype = accumulation_dtype(first.dtype());
    let lses = parts.iter().map(|(_, lse)| lse.to_dtype(dtype)?.unsqueeze(D::Minus1)).collect::<Result<Vec<_>>>()?;
    // The shares (.., parts) of the parts in the whole are the softmax of their log-sum-exps.
    let (shares, lse) = VisibleSoftmax::default().apply(&Tensor::cat(&lses, D::Minus1)?)?;
    let lse = lse.to_dtype(first_lse.dtype())?;
    if first.elem_count() == 0 {
        return Ok((first.clone(), lse));
    }
    let mut merged = first.to_dtype(dtype)?.broadcast_mul(&shares.narrow(3, 0, 1)?)?;
    for (i, (context, _)) in parts.iter().enumerate().skip(1) {
        merged = (merged + context.to_dtype(dtype)?.broadcast_mul(&shares.narrow(3, i, 1)?)?)?;
    }
    Ok((merged.to_dtype(first.dtype())?, lse))
}
