//! The merging of attention over parts of the keys.

use candle_core::{D, Result, Tensor, bail};

use super::softmax::{Softmax, masked_softmax_and_lse};
use crate::mask::FullyMaskedRows;
use candle_attention_modules::base::{Dim, Expect, accumulation_dtype, sum_of_terms};

/// Merges attention over disjoint parts of the keys into attention over all of them, exactly.
///
/// Each part is an attention output (B, H, T_q, D_v) and the log-sum-exp (B, H, T_q) of its scores, as returned by
/// [`scaled_dot_product_attention_with_lse`](crate::scaled_dot_product_attention_with_lse). The result is the same pair
/// for all keys, with the output in the dtype of the first part. A part in which a query is fully masked (`-inf`) adds
/// nothing for that query, even if its output is NaN, and its gradients are zero. Pass sinks to one part only, since
/// each part's sum counts its own.
///
/// # Errors
/// For no parts, and for parts whose shapes, dtypes or devices differ.
#[doc(alias("ring_attention", "cascade_attention"))]
pub fn merge_attention(parts: &[(Tensor, Tensor)]) -> Result<(Tensor, Tensor)> {
    const OP: &str = "merge_attention";
    let Some((first, first_lse)) = parts.first() else { bail!("[{OP}] expected at least one part, found none") };
    Expect::one(OP, "the output", first).shape(&["B", "H", "T_q", "D_v"].map(Dim::Any))?.float("")?;
    Expect::one(OP, "the log-sum-exp", first_lse).float("")?;
    for (i, (output, lse)) in parts.iter().enumerate() {
        let name = format!("the output of part {i}");
        let found = Expect::one(OP, &name, output).sizes(first.dims())?;
        found.dtype(first.dtype(), "the first part's")?.same_device("the first part", first.device())?;
        let name_of_lse = format!("the log-sum-exp of part {i}");
        let checked = Expect::one(OP, &name_of_lse, lse).sizes(&first.dims()[..3])?;
        checked.dtype(first_lse.dtype(), "the first part's")?.same_device("the first part", first.device())?;
    }
    if first_lse.elem_count() == 0 {
        return Ok((first.clone(), first_lse.clone()));
    }
    let dtype = accumulation_dtype(first.dtype());
    let lses = parts.iter().map(|(_, lse)| lse.to_dtype(dtype)?.unsqueeze(D::Minus1)).collect::<Result<Vec<_>>>()?;
    // The weights (.., parts) of the parts are the softmax of their log-sum-exps.
    let Softmax { weights, lse } =
        masked_softmax_and_lse(&Tensor::cat(&lses, D::Minus1)?, None, None, FullyMaskedRows::Zero)?;
    let lse = lse.to_dtype(first_lse.dtype())?;
    if first.elem_count() == 0 {
        return Ok((first.clone(), lse));
    }
    let weighted = |i: usize| {
        let output = parts[i].0.to_dtype(dtype)?;
        // Not a product with a weight of 0 alone, which is NaN for an output of NaN or infinity.
        let is_empty = lses[i].eq(f64::NEG_INFINITY)?.broadcast_as(output.shape())?;
        is_empty.where_cond(&output.zeros_like()?, &output)?.broadcast_mul(&weights.narrow(3, i, 1)?)
    };
    let merged = sum_of_terms(0..parts.len(), &weighted)?;
    Ok((merged.to_dtype(first.dtype())?, lse))
}
