//! The specification: attention in Candle's own operations, differentiable, on any device; its softmax, over the keys
//! that a query sees; and attention over parts of the keys put back together.

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor, bail};

use super::validate::{Call, Dims};
use super::{Attended, AttentionStatistics, OutputLayout, Outputs, PackedSequences, SdpaOptions};
use crate::mask::{AttentionMask, FullyMaskedRows, ValidLens};
use candle_attention_kernels::flash::{WeightIndex, philox_keeps};
use candle_attention_modules::base::{Dim, Expect, FLOATS, accumulation_dtype, check_memory, sum_of_terms};

/// The context, the log-sum-exp, and what is wanted beside.
pub(super) fn attend(call: &Call, outputs: Outputs) -> Result<Attended> {
    let mut attended = match &call.sequences {
        None => attend_batch(call, outputs, [0; 2])?,
        Some(sequences) => attend_sequences(call, sequences, outputs)?,
    };
    match (outputs, attended.weights.take()) {
        (Outputs::Statistics(wanted), Some(weights)) => {
            attended.statistics = Some(AttentionStatistics::of_weights(&weights.detach(), wanted)?);
        }
        (_, weights) => attended.weights = weights.map(|weights| weights.to_dtype(call.q.dtype())).transpose()?,
    }
    Ok(attended)
}

/// Each sequence by itself. Weights, which are wanted for statistics alone, are (1, H, total_q, total_kv).
fn attend_sequences(packed: &Call, sequences: &PackedSequences, outputs: Outputs) -> Result<Attended> {
    if packed.dims.t_q == 0 {
        return attend_batch(packed, outputs, [0; 2]);
    }
    let (mut contexts, mut lses, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for (s, [queries, keys]) in sequences.parts().enumerate().filter(|(_, [queries, _])| !queries.is_empty()) {
        let (t_q, t_kv) = (queries.len(), keys.len());
        let of = |xs: &Tensor, rows: &Range<usize>| xs.narrow(2, rows.start, rows.len());
        let (first, count) = (sequences.longest()[0] - t_q, (t_q + t_kv).saturating_sub(1));
        let distances = |biases: &Tensor| biases.narrow(D::Minus1, first, count);
        let relative_bias = packed.options.relative_bias.as_ref().map(distances).transpose()?;
        // Contexts are put in order together.
        let call = Call {
            op: packed.op,
            q: of(&packed.q, &queries)?,
            k: of(&packed.k, &keys)?,
            v: of(&packed.v, &keys)?,
            rows: packed.rows.of_sequence(s),
            options: SdpaOptions { relative_bias, output_layout: OutputLayout::Bhtd, ..packed.options.clone() },
            dims: Dims { t_q, t_kv, ..packed.dims },
            fully_masked_rows: packed.fully_masked_rows,
            // Not of packed sequences.
            scales: None,
            keep: None,
            bias: None,
            sequences: None,
        };
        let own = attend_batch(&call, outputs, [queries.start, keys.start])?;
        contexts.push(own.context);
        lses.extend(own.lse);
        let padded = |own: Tensor| own.pad_with_zeros(3, keys.start, packed.dims.t_kv - keys.end);
        weights.extend(own.weights.map(padded).transpose()?);
    }
    let joined = |parts: &[Tensor]| Tensor::cat(parts, 2)?.contiguous();
    let context = packed.in_output_layout(joined(&contexts)?)?;
    let weights = if weights.is_empty() { None } else { Some(joined(&weights)?) };
    Ok(Attended { lse: Some(joined(&lses)?), weights, ..Attended::context(context) })
}

/// With weights in the dtype of the accumulation, where they are wanted: before dropout for statistics. `first` are the
/// numbers of the first query and of the first key among those of all packed sequences.
fn attend_batch(call: &Call, outputs: Outputs, first: [usize; 2]) -> Result<Attended> {
    let Dims { b, h, t_q, t_kv, d_v, .. } = call.dims;
    let scores = call.score_dims();
    check_memory(call.op, format_args!("a tensor of scores {scores:?}"), &scores)?;
    let (device, dtype) = (call.q.device(), accumulation_dtype(call.q.dtype()));
    let keep = call.rows.to_keep(call.keep.clone(), scores, device)?;
    let sinks = |sinks: &Tensor| sinks.to_dtype(dtype)?.reshape((1, h, 1, 1));
    let sinks = call.options.sinks.as_ref().map(sinks).transpose()?;
    let has_weights = matches!(outputs, Outputs::Weights | Outputs::Statistics(_));
    if b == 0 || t_q == 0 || t_kv == 0 {
        if has_weights && device.is_cuda() {
            bail!("[{}] expected queries and keys on CUDA, where Candle has no empty tensors", call.op)
        }
        for shape in [&[b, h, t_q][..], &[b, h, t_q, d_v]] {
            check_memory(call.op, format_args!("a result of {shape:?}"), shape)?;
        }
        let lse = match &sinks {
            Some(sinks) => sinks.squeeze(3)?.broadcast_as((b, h, t_q))?.contiguous()?,
            None => Tensor::full(f32::NEG_INFINITY, (b, h, t_q), device)?.to_dtype(dtype)?,
        };
        let weights = has_weights.then(|| Tensor::zeros(&scores, dtype, device)).transpose()?;
        let context = call.in_output_layout(Tensor::zeros((b, h, t_q, d_v), call.q.dtype(), device)?)?;
        return Ok(Attended { lse: Some(lse), weights, ..Attended::context(context) });
    }

    // Scaling the queries is scaling the scores, over T_q · D numbers and not T_q · T_kv.
    let queries = (call.q.to_dtype(dtype)? * call.scale())?;
    let mut scores = grouped_matmul(&queries, &call.k.to_dtype(dtype)?.t()?)?;
    if let Some(softcap) = call.options.softcap {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    let alibi = call.options.alibi_slopes.as_ref().map(|slopes| alibi_bias(call, &slopes.to_dtype(dtype)?));
    let distances = call.options.relative_bias.as_ref();
    let distances = distances.map(|biases| by_diagonal(&biases.to_dtype(dtype)?, [t_q, t_kv]));
    for term in [alibi.transpose()?, distances.transpose()?, call.bias.clone()].into_iter().flatten() {
        scores = scores.broadcast_add(&term)?;
    }
    let (whole, lse) = visible_softmax(&scores, keep.as_ref(), sinks.as_ref(), call.fully_masked_rows)?;
    let dropped = dropout(&whole, &call.options, first)?;
    let context = weighted_values(&dropped, &call.v.to_dtype(dtype)?, keep.as_ref())?;
    let context = call.in_output_layout(context.to_dtype(call.q.dtype())?)?;
    let weights = if outputs == Outputs::Weights { dropped } else { whole };
    Ok(Attended { lse: Some(lse), weights: has_weights.then_some(weights), ..Attended::context(context) })
}

/// (B, H, T, X) times (B, H_kv, X, Y): the query heads of a group are rows of one product, so that k and v are not
/// repeated.
fn grouped_matmul(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let (b, h, t, x) = lhs.dims4()?;
    let (_, h_kv, _, y) = rhs.dims4()?;
    if y == 0 {
        return Tensor::zeros((b, h, t, y), lhs.dtype(), lhs.device());
    }
    let product = lhs.contiguous()?.reshape((b, h_kv, h / h_kv * t, x))?.matmul(&matmul_ready(rhs)?)?;
    product.reshape((b, h, t, y))
}

/// Candle multiplies row- and column-major matrices in place; anything else is copied.
fn matmul_ready(matrix: &Tensor) -> Result<Tensor> {
    if matrix.is_contiguous() || matrix.t()?.is_contiguous() { Ok(matrix.clone()) } else { matrix.contiguous() }
}

/// `-slope · |query position - key position|`, (B or 1, H, T_q, T_kv).
fn alibi_bias(call: &Call, slopes: &Tensor) -> Result<Tensor> {
    let Dims { b, h, t_q, t_kv, .. } = call.dims;
    let (positions, sequences) = (call.rows.positions()?, &call.rows.sequences);
    let b = if sequences.iter().all(|own| own.position == sequences[0].position) { 1 } else { b };
    let positions = positions.into_iter().take(b * t_q).map(|position| position as f64).collect();
    let queries = Tensor::from_vec(positions, (b, 1, t_q, 1), &Device::Cpu)?.to_dtype(slopes.dtype())?;
    let queries = queries.to_device(slopes.device())?;
    let keys = Tensor::arange(0, t_kv as i64, slopes.device())?.to_dtype(slopes.dtype())?.reshape((1, t_kv))?;
    let distance = queries.broadcast_sub(&keys)?.abs()?;
    slopes.neg()?.reshape((1, h, 1, 1))?.broadcast_mul(&distance)
}

/// Biases (H, T_q + T_kv - 1), or (B, H, T_q + T_kv - 1), as a tensor of the scores, (1 or B, H, T_q, T_kv).
fn by_diagonal(biases: &Tensor, [t_q, t_kv]: [usize; 2]) -> Result<Tensor> {
    let entries = (0..t_q).flat_map(|i| (0..t_kv).map(move |j| (t_q - 1 + j - i) as u32));
    let entries = Tensor::from_iter(entries, biases.device())?;
    let by_pair = biases.contiguous()?.index_select(&entries, biases.rank() - 1)?;
    by_pair.reshape(((), biases.dim(D::Minus2)?, t_q, t_kv))
}

/// Zeroes entries with probability p, by PyTorch's generator, by a seed of Philox or by the device's generator, and
/// divides the others by 1 - p, where weights are dropped. Philox counts from the numbers of the `first` query and key.
fn dropout(weights: &Tensor, options: &SdpaOptions, first: [usize; 2]) -> Result<Tensor> {
    let p = options.dropout;
    if !options.drops() {
        return Ok(weights.clone());
    }
    if p >= 1.0 {
        // Not zeros: what is no number stays none.
        return weights * 0.0;
    }
    // Not Candle's own dropout, which rounds p to f32 and refuses one that becomes 1.
    let keep = match (&options.dropout_seed, options.dropout_philox_seed) {
        (Some(seed), _) => seed.dropout_keep(weights.shape(), p)?.to_device(weights.device())?,
        (None, Some(seed)) => philox_keep(weights, p, seed, first)?,
        (None, None) => Tensor::rand(0f32, 1f32, weights.shape(), weights.device())?.ge(p)?,
    };
    weights.mul(&keep.to_dtype(weights.dtype())?)? / (1.0 - p)
}

/// 1 for the weights (B, H, T_q, T_kv) that Philox keeps.
fn philox_keep(weights: &Tensor, p: f64, seed: u64, [query, key]: [usize; 2]) -> Result<Tensor> {
    let (b, h, t_q, t_kv) = weights.dims4()?;
    let rows = b * h * t_q;
    let of_row = |row: usize| {
        let [b, h, i] = [row / (h * t_q), row / t_q % h, row % t_q];
        let index = move |j| WeightIndex { b, head: h, query: query + i, key: key + j };
        (0..t_kv).map(move |j| u8::from(philox_keeps(seed, p, index(j))))
    };
    let keep: Vec<u8> = (0..rows).flat_map(of_row).collect();
    Tensor::from_vec(keep, weights.shape(), &Device::Cpu)?.to_device(weights.device())
}

/// Weights (B, H, T_q, T_kv) times values (B, H_kv, T_kv, D_v).
///
/// A hidden key has weight zero, but zero times NaN is NaN: values that are not finite are multiplied apart, so that
/// they reach only the queries that see them.
fn weighted_values(weights: &Tensor, v: &Tensor, keep: Option<&Tensor>) -> Result<Tensor> {
    let Some(keep) = keep else { return grouped_matmul(weights, v) };
    // x - x is 0 for finite x and NaN otherwise; reading the sum back is one number.
    let residue = |v: Tensor| v.sub(&v)?.sum_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>();
    if v.elem_count() == 0 || residue(v.detach())? == 0.0 {
        return grouped_matmul(weights, v);
    }
    let finite = v.sub(v)?.eq(0f64)?;
    let mut context = grouped_matmul(weights, &finite.where_cond(v, &v.zeros_like()?)?)?;

    // Uniform rows weigh what they do not see.
    let weighed = weights.ne(0f64)?.to_dtype(v.dtype())?;
    let seen = (keep.broadcast_as(weights.shape())?.to_dtype(v.dtype())? + weighed)?;
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let which = if special.is_nan() { v.ne(v)? } else { v.eq(special)? };
        let reached = grouped_matmul(&seen, &which.to_dtype(v.dtype())?)?;
        let reached = reached.ne(0f64)?;
        context = (&context + reached.where_cond(&constant_like(special, &context)?, &context.zeros_like()?)?)?;
    }
    Ok(context)
}

/// A softmax over the last dimension that knows of hidden keys, sinks and rows that see nothing: scores (.., T_q, T_kv)
/// in f32 or f64, T_kv at least 1, to weights of the same shape and the log-sum-exp (.., T_q). Differentiable.
///
/// `keep` is u8, broadcastable to the scores; 0 hides. `sinks` are one more logit a row, broadcastable to (.., T_q, 1),
/// which takes weight but has no column.
fn visible_softmax(
    scores: &Tensor,
    keep: Option<&Tensor>,
    sinks: Option<&Tensor>,
    fully_masked_rows: FullyMaskedRows,
) -> Result<(Tensor, Tensor)> {
    let scores = match keep {
        None => scores.clone(),
        Some(keep) => {
            keep.broadcast_as(scores.shape())?.where_cond(scores, &constant_like(f64::NEG_INFINITY, scores)?)?
        }
    };
    // The softmax does not change when its row is shifted, so the maximum needs no gradient.
    let row_max = scores.max_keepdim(D::Minus1)?.detach();
    let no_max = row_max.eq(f64::NEG_INFINITY)?;
    let shift = match sinks {
        None => row_max,
        Some(sinks) => row_max.broadcast_maximum(&sinks.detach())?,
    };
    // Only a row without any score above -inf has this shift; any finite one keeps -inf - shift from being NaN.
    let lowest = shift.eq(f64::NEG_INFINITY)?;
    let shift = lowest.where_cond(&shift.zeros_like()?, &shift)?;

    let exponentials = scores.broadcast_sub(&shift)?.exp()?;
    let mut sum = exponentials.sum_keepdim(D::Minus1)?;
    // Candle's maximum may pass over a NaN, the sum does not: a row that sees one is not empty.
    let empty = no_max.mul(&sum.eq(0f64)?)?;
    if let Some(sinks) = sinks {
        sum = (sum + sinks.broadcast_sub(&shift)?.exp()?)?;
    }
    // Put aside before the logarithm and the division, whose gradients at 0 are NaN.
    let nothing = sum.eq(0f64)?;
    let sum = nothing.where_cond(&sum.ones_like()?, &sum)?;
    let lse =
        nothing.where_cond(&constant_like(f64::NEG_INFINITY, &sum)?, &(sum.log()? + &shift)?)?.squeeze(D::Minus1)?;
    let weights = exponentials.broadcast_div(&sum)?;
    let weights = match fully_masked_rows {
        FullyMaskedRows::Zero => weights,
        FullyMaskedRows::Uniform => {
            let uniform = constant_like(1.0 / scores.dim(D::Minus1)? as f64, &weights)?;
            empty.broadcast_as(weights.shape())?.where_cond(&uniform, &weights)?
        }
    };
    Ok((weights, lse))
}

/// A constant in the shape and dtype and on the device of a tensor; converted on the CPU, since Metal has no f64.
fn constant_like(value: f64, like: &Tensor) -> Result<Tensor> {
    Tensor::new(value, &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())?.broadcast_as(like.shape())
}

/// d2l's `masked_softmax`: softmax over the last dimension of scores (B, T_q, T_kv), leaving out the keys at and past a
/// valid length, given for each sequence (B,) or each query (B, T_q). The result has the shape and dtype of the scores.
///
/// A row whose length is 0 gives zeros with [`FullyMaskedRows::Zero`], and 1/T_kv everywhere with [`FullyMaskedRows::Uniform`], as
/// d2l has it. Unlike d2l's function this one leaves its input as it is.
///
/// # Errors
/// For scores of another rank or of an integer dtype, and for lengths that do not fit them.
pub fn masked_softmax(
    scores: &Tensor,
    valid_lens: Option<&ValidLens>,
    fully_masked_rows: FullyMaskedRows,
) -> Result<Tensor> {
    let expected = Expect::many("masked_softmax", "scores", scores);
    expected.shape(&["B", "T_q", "T_kv"].map(Dim::Any))?.dtype_of(&FLOATS, "")?;
    let (b, t_q, t_kv) = scores.dims3()?;
    let mask = valid_lens.map_or_else(AttentionMask::none, |lens| AttentionMask::none().with_valid_lens(lens.clone()));
    let keep = mask.keep_tensor([b, 1, t_q, t_kv], scores.device())?;
    if scores.elem_count() == 0 {
        return Ok(scores.clone());
    }
    let floats = scores.unsqueeze(1)?.to_dtype(accumulation_dtype(scores.dtype()))?;
    let (weights, _) = visible_softmax(&floats, keep.as_ref(), None, fully_masked_rows)?;
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
    Expect::one(OP, "the context", first).shape(&["B", "H", "T_q", "D_v"].map(Dim::Any))?.dtype_of(&FLOATS, "")?;
    Expect::one(OP, "the log-sum-exp", first_lse).dtype_of(&FLOATS, "")?;
    for (i, (context, lse)) in parts.iter().enumerate() {
        for (what, tensor, like, rank) in [("context", context, first, 4), ("log-sum-exp", lse, first_lse, 3)] {
            let name = format!("the {what} of part {i}");
            let part = Expect::one(OP, &name, tensor).sizes(&first.dims()[..rank])?;
            part.dtype(like.dtype(), "the first part's")?.same_device("the first part", first.device())?;
        }
    }
    if first_lse.elem_count() == 0 {
        return Ok((first.clone(), first_lse.clone()));
    }
    let dtype = accumulation_dtype(first.dtype());
    let lses = parts.iter().map(|(_, lse)| lse.to_dtype(dtype)?.unsqueeze(D::Minus1)).collect::<Result<Vec<_>>>()?;
    // The shares (.., parts) of the parts in the whole are the softmax of their log-sum-exps.
    let (shares, lse) = visible_softmax(&Tensor::cat(&lses, D::Minus1)?, None, None, FullyMaskedRows::Zero)?;
    let lse = lse.to_dtype(first_lse.dtype())?;
    if first.elem_count() == 0 {
        return Ok((first.clone(), lse));
    }
    let weighed = |i: usize| parts[i].0.to_dtype(dtype)?.broadcast_mul(&shares.narrow(3, i, 1)?);
    let merged = sum_of_terms(0..parts.len(), &weighed)?;
    Ok((merged.to_dtype(first.dtype())?, lse))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{D, Device};

    #[test]
    fn grouped_product_equals_repeated_heads() -> Result<()> {
        let q = Tensor::randn(0f64, 1., (2, 6, 3, 4), &Device::Cpu)?;
        let k = Tensor::randn(0f64, 1., (2, 2, 5, 4), &Device::Cpu)?;
        let repeated = k.unsqueeze(2)?.broadcast_as((2, 2, 3, 5, 4))?.reshape((2, 6, 5, 4))?;
        let difference = (grouped_matmul(&q, &k.t()?)? - q.matmul(&repeated.t()?)?)?;
        let largest = difference.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f64>()?;
        assert!(largest < 1e-12, "{largest}");
        Ok(())
    }
}
