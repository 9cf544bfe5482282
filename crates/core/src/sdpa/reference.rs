//! The specification of attention: Candle's own operations, differentiable, on any device.

use std::ops::Range;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, RequestedResults, ScoreModifiers};
use candle_core::{D, DType, Device, Result, Tensor, bail};

use super::call::{Call, MaskedKeys};
use super::dropout::{DropoutDraw, DropoutSource};
use super::listed_mask;
use super::options::OutputLayout;
use super::packed::PackedSequences;
use super::results::Attended;
use super::softmax::{Softmax, constant_like, masked_softmax_and_lse};
use super::statistics::AttentionStatistics;
use crate::mask::PackedRows;
use candle_attention_kernels::flash::{WeightIndex, philox_keeps};
use candle_attention_modules::base::{accumulation_dtype, check_memory, matmul, matmul_ready};

/// Returns the requested results.
pub(super) fn attend(call: &Call, wanted: RequestedResults) -> Result<Attended> {
    if let Some(sequences) = call.sequences()
        && call.attention.dims.t_q > 0
    {
        return attend_sequences(call, sequences, wanted);
    }
    let BatchAttention { output, log_sum_exp, weights } = attend_batch(call, FirstRow::default())?;
    let mut attended = Attended::from(output);
    if wanted.log_sum_exp {
        attended.log_sum_exp = Some(log_sum_exp);
    }
    if let Some(requested) = wanted.statistics {
        let before = before_dropout(call, weights.as_ref())?;
        attended.statistics = Some(AttentionStatistics::from_weights(&before.detach(), requested)?);
    }
    if wanted.weights {
        let after = match weights {
            Some(weights) => weights.after_dropout,
            None => empty_weights(call)?,
        };
        attended.weights = Some(after.to_dtype(call.attention.q.dtype())?);
    }
    Ok(attended)
}

/// Attends in each packed sequence by itself. Packed sequences have no weights (B, H, T_q, T_kv).
fn attend_sequences(packed: &Call, sequences: &PackedSequences, wanted: RequestedResults) -> Result<Attended> {
    let mut outputs = Vec::new();
    let mut log_sum_exps = Vec::new();
    let mut rows_of_weights = Vec::new();
    for (s, PackedRows { queries, keys }) in sequences.rows().enumerate() {
        if queries.is_empty() {
            continue;
        }
        let call = call_of_sequence(packed, sequences, s)?;
        let found = attend_batch(&call, FirstRow { query: queries.start, key: keys.start })?;
        outputs.push(found.output);
        log_sum_exps.push(found.log_sum_exp);
        if wanted.statistics.is_some() {
            let weights = before_dropout(&call, found.weights.as_ref())?;
            rows_of_weights.push(weights.pad_with_zeros(3, keys.start, packed.attention.dims.t_kv - keys.end)?);
        }
    }
    let mut attended = Attended::from(packed.in_output_layout(Tensor::cat(&outputs, 2)?.contiguous()?)?);
    if wanted.log_sum_exp {
        attended.log_sum_exp = Some(Tensor::cat(&log_sum_exps, 2)?.contiguous()?);
    }
    if let Some(requested) = wanted.statistics {
        // (1, H, total_q, total_kv).
        let weights = Tensor::cat(&rows_of_weights, 2)?.contiguous()?;
        attended.statistics = Some(AttentionStatistics::from_weights(&weights.detach(), requested)?);
    }
    Ok(attended)
}

/// Returns the call of one packed sequence.
fn call_of_sequence(packed: &Call, sequences: &PackedSequences, s: usize) -> Result<Call> {
    let queries = sequences.queries(s);
    let keys = sequences.keys(s);
    let t_q = queries.len();
    let t_kv = keys.len();
    let narrowed = |xs: &Tensor, rows: &Range<usize>| xs.narrow(2, rows.start, rows.len());
    let AttentionCall { dims, q, k, v, kv_scales, keys: MaskedKeys { ranges, lists, .. }, scores, .. } =
        &packed.attention;
    let mut scores = scores.clone();
    if let Some(biases) = &mut scores.relative_bias {
        let distances = (t_q + t_kv).saturating_sub(1);
        *biases = biases.narrow(D::Minus1, sequences.most_queries() - t_q, distances)?;
    }
    let lists = lists.iter().map(|listed| listed.of_queries(&queries)).collect();
    listed_mask::with_bool_mask(Call {
        op: packed.op,
        attention: AttentionCall {
            dims: Dims { t_q, t_kv, ..*dims },
            q: narrowed(q, &queries)?,
            k: narrowed(k, &keys)?,
            v: narrowed(v, &keys)?,
            kv_scales: kv_scales.as_ref().map(|scales| scales.try_map(|tensor| narrowed(tensor, &keys))).transpose()?,
            pages: None,
            keys: MaskedKeys { ranges: ranges.of_sequences(packed.op, &[s])?, sequences: None, pages: None, lists },
            scores,
            // The outputs of all sequences are put into the layout together.
            output_layout: OutputLayout::Bhtd,
        },
        fully_masked_rows: packed.fully_masked_rows,
        dropout: packed.dropout.clone(),
        backend: packed.backend,
        instruction_set: packed.instruction_set,
        lists_obstacle: None,
    })
}

/// The numbers of the first query and the first key of a sequence among those of all packed sequences.
#[derive(Clone, Copy, Default)]
struct FirstRow {
    query: usize,
    key: usize,
}

/// The results of attention in a batch.
struct BatchAttention {
    output: Tensor,
    log_sum_exp: Tensor,
    /// `None` if there are no scores.
    weights: Option<AttentionWeights>,
}

/// The attention weights (B, H, T_q, T_kv) in the dtype of the accumulation.
struct AttentionWeights {
    before_dropout: Tensor,
    after_dropout: Tensor,
}

/// Returns the weights before dropout, which are empty for a call without scores.
fn before_dropout(call: &Call, weights: Option<&AttentionWeights>) -> Result<Tensor> {
    match weights {
        Some(weights) => Ok(weights.before_dropout.clone()),
        None => empty_weights(call),
    }
}

/// Returns the weights of a call without scores.
fn empty_weights(call: &Call) -> Result<Tensor> {
    let device = call.attention.q.device();
    if device.is_cuda() {
        bail!("[{}] expected queries and keys on CUDA, where Candle has no empty tensors", call.op)
    }
    Tensor::zeros(&call.score_dims(), accumulation_dtype(call.attention.q.dtype()), device)
}

/// Attends in a batch, step by step as the documentation of the function lists them.
fn attend_batch(call: &Call, first: FirstRow) -> Result<BatchAttention> {
    let Dims { b, h, t_q, t_kv, .. } = call.attention.dims;
    let score_dims = call.score_dims();
    check_memory(call.op, format_args!("a tensor of scores {score_dims:?}"), &score_dims)?;
    let device = call.attention.q.device();
    let dtype = accumulation_dtype(call.attention.q.dtype());
    let ScoreModifiers { scale, softcap, alibi_slopes, relative_bias, bias, boolean_mask, sinks, dropout: _ } =
        &call.attention.scores;
    let bool_mask = call.rows()?.to_bool_mask(boolean_mask.clone(), score_dims, device)?;
    let sinks = match sinks {
        Some(sinks) => Some(sinks.to_dtype(dtype)?.reshape((1, h, 1, 1))?),
        None => None,
    };
    if b == 0 || t_q == 0 || t_kv == 0 {
        return attend_to_nothing(call, sinks.as_ref());
    }

    // Scaling the queries is scaling the scores, with T_q · D products in place of T_q · T_kv.
    let queries = (call.attention.q.to_dtype(dtype)? * *scale)?;
    let [keys, values] = call.float_keys_and_values(dtype)?;
    let mut scores = grouped_matmul(&queries, &keys.t()?)?;
    if let Some(softcap) = *softcap {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    if let Some(slopes) = alibi_slopes {
        scores = scores.broadcast_add(&alibi_bias(call, &slopes.to_dtype(dtype)?)?)?;
    }
    if let Some(biases) = relative_bias {
        scores = scores.broadcast_add(&by_diagonal(&biases.to_dtype(dtype)?, t_q, t_kv)?)?;
    }
    if let Some(bias) = bias {
        scores = scores.broadcast_add(&bias.to_dtype(dtype)?)?;
    }
    let Softmax { weights, lse } =
        masked_softmax_and_lse(&scores, bool_mask.as_ref(), sinks.as_ref(), call.fully_masked_rows)?;
    let after_dropout = match &call.dropout {
        Some(dropout) => dropped(&weights, dropout, first)?,
        None => weights.clone(),
    };
    let output = weighted_values(&after_dropout, &values, bool_mask.as_ref())?;
    let output = call.in_output_layout(output.to_dtype(call.attention.q.dtype())?)?;
    Ok(BatchAttention {
        output,
        log_sum_exp: lse,
        weights: Some(AttentionWeights { before_dropout: weights, after_dropout }),
    })
}

/// Returns the results of a call without scores: zeros, and the log-sum-exp of the sinks alone.
fn attend_to_nothing(call: &Call, sinks: Option<&Tensor>) -> Result<BatchAttention> {
    let Dims { b, h, t_q, d_v, .. } = call.attention.dims;
    let device = call.attention.q.device();
    let dtype = accumulation_dtype(call.attention.q.dtype());
    for shape in [&[b, h, t_q][..], &[b, h, t_q, d_v]] {
        check_memory(call.op, format_args!("a result of {shape:?}"), shape)?;
    }
    let lse = match sinks {
        Some(sinks) => sinks.squeeze(3)?.broadcast_as((b, h, t_q))?.contiguous()?,
        None => Tensor::full(f32::NEG_INFINITY, (b, h, t_q), device)?.to_dtype(dtype)?,
    };
    let output = call.in_output_layout(Tensor::zeros((b, h, t_q, d_v), call.attention.q.dtype(), device)?)?;
    Ok(BatchAttention { output, log_sum_exp: lse, weights: None })
}

/// Multiplies (B, H, T, X) with (B, H_kv, X, Y). The query heads of a group are rows of one product, so that k and v
/// are not repeated.
fn grouped_matmul(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let (b, h, t, x) = lhs.dims4()?;
    let (_, h_kv, _, y) = rhs.dims4()?;
    if y == 0 {
        return Tensor::zeros((b, h, t, y), lhs.dtype(), lhs.device());
    }
    let rows_of_groups = lhs.contiguous()?.reshape((b, h_kv, h / h_kv * t, x))?;
    matmul(&rows_of_groups, &matmul_ready(rhs)?)?.reshape((b, h, t, y))
}

/// Returns the ALiBi bias `-slope · |query position - key position|`, (B or 1, H, T_q, T_kv).
fn alibi_bias(call: &Call, slopes: &Tensor) -> Result<Tensor> {
    let Dims { b, h, t_q, t_kv, .. } = call.attention.dims;
    let rows = call.rows()?;
    let positions = rows.positions()?;
    let sequences = &rows.sequences;
    let are_alike = sequences.iter().all(|sequence| sequence.first_position == sequences[0].first_position);
    let batch = if are_alike { 1 } else { b };
    let positions = positions.into_iter().take(batch * t_q).map(|position| position as f64).collect();
    let queries = Tensor::from_vec(positions, (batch, 1, t_q, 1), &Device::Cpu)?.to_dtype(slopes.dtype())?;
    let queries = queries.to_device(slopes.device())?;
    let keys = Tensor::arange(0, t_kv as i64, slopes.device())?.to_dtype(slopes.dtype())?.reshape((1, t_kv))?;
    let distance = queries.broadcast_sub(&keys)?.abs()?;
    slopes.neg()?.reshape((1, h, 1, 1))?.broadcast_mul(&distance)
}

/// Returns a relative bias (H, T_q + T_kv - 1), or (B, H, T_q + T_kv - 1), in the shape of the scores, (1 or B, H, T_q,
/// T_kv).
fn by_diagonal(biases: &Tensor, t_q: usize, t_kv: usize) -> Result<Tensor> {
    let entries = (0..t_q).flat_map(|i| (0..t_kv).map(move |j| (t_q - 1 + j - i) as u32));
    let entries = Tensor::from_iter(entries, biases.device())?;
    let by_pair = biases.contiguous()?.index_select(&entries, biases.rank() - 1)?;
    by_pair.reshape(((), biases.dim(D::Minus2)?, t_q, t_kv))
}

/// Zeroes weights with probability p and divides the others by 1 - p. Philox counts queries and keys from `first` on.
fn dropped(weights: &Tensor, dropout: &DropoutDraw, first: FirstRow) -> Result<Tensor> {
    let p = dropout.p;
    if p >= 1.0 {
        // Not zeros: a NaN stays NaN.
        return weights * 0.0;
    }
    // Not Candle's own dropout, which rounds p to f32 and refuses one that becomes 1.
    let is_kept = match &dropout.source {
        DropoutSource::Torch(seed) => seed.dropout_keep(weights.shape(), p)?.to_device(weights.device())?,
        DropoutSource::Philox(seed) => kept_by_philox(weights, p, *seed, first)?,
        DropoutSource::Device => Tensor::rand(0f32, 1f32, weights.shape(), weights.device())?.ge(p)?,
    };
    weights.mul(&is_kept.to_dtype(weights.dtype())?)? / (1.0 - p)
}

/// Returns 1 for the weights (B, H, T_q, T_kv) that Philox keeps, and 0 for the others.
fn kept_by_philox(weights: &Tensor, p: f64, seed: u64, first: FirstRow) -> Result<Tensor> {
    let (b, h, t_q, t_kv) = weights.dims4()?;
    let mut is_kept = Vec::with_capacity(weights.elem_count());
    for sequence in 0..b {
        for head in 0..h {
            for i in 0..t_q {
                let index = |j| WeightIndex { b: sequence, head, query: first.query + i, key: first.key + j };
                is_kept.extend((0..t_kv).map(|j| u8::from(philox_keeps(seed, p, index(j)))));
            }
        }
    }
    Tensor::from_vec(is_kept, weights.shape(), &Device::Cpu)?.to_device(weights.device())
}

/// Multiplies weights (B, H, T_q, T_kv) with values (B, H_kv, T_kv, D_v).
///
/// A masked key has weight zero, but zero times NaN is NaN. Values that are not finite are therefore multiplied
/// separately, so that they reach only the queries that attend to them.
fn weighted_values(weights: &Tensor, v: &Tensor, bool_mask: Option<&Tensor>) -> Result<Tensor> {
    let Some(bool_mask) = bool_mask else { return grouped_matmul(weights, v) };
    if v.elem_count() == 0 || are_finite(&v.detach())? {
        return grouped_matmul(weights, v);
    }
    let finite = v.sub(v)?.eq(0f64)?;
    let mut output = grouped_matmul(weights, &finite.where_cond(v, &v.zeros_like()?)?)?;

    // With `FullyMaskedRows::Uniform`, masked keys have weight too.
    let has_weight = weights.ne(0f64)?.to_dtype(v.dtype())?;
    let attended = (bool_mask.broadcast_as(weights.shape())?.to_dtype(v.dtype())? + has_weight)?;
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let which = if special.is_nan() { v.ne(v)? } else { v.eq(special)? };
        let is_reached = grouped_matmul(&attended, &which.to_dtype(v.dtype())?)?.ne(0f64)?;
        output = (&output + is_reached.where_cond(&constant_like(special, &output)?, &output.zeros_like()?)?)?;
    }
    Ok(output)
}

/// Returns whether all entries are finite, by reading back one number.
fn are_finite(v: &Tensor) -> Result<bool> {
    // x - x is 0 for finite x and NaN otherwise.
    let residue = v.sub(v)?.sum_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    Ok(residue == 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{D, Device};

    #[test]
    fn gqa_product_matches_repeated_heads() -> Result<()> {
        let q = Tensor::randn(0f64, 1., (2, 6, 3, 4), &Device::Cpu)?;
        let k = Tensor::randn(0f64, 1., (2, 2, 5, 4), &Device::Cpu)?;
        let repeated = k.unsqueeze(2)?.broadcast_as((2, 2, 3, 5, 4))?.reshape((2, 6, 5, 4))?;
        let difference = (grouped_matmul(&q, &k.t()?)? - q.matmul(&repeated.t()?)?)?;
        let largest = difference.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f64>()?;
        assert!(largest < 1e-12, "{largest}");
        Ok(())
    }
}
