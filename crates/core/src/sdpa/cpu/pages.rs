//! Sequences whose keys and values are in pages, which the kernel reads in place: one call of the kernel for all
//! sequences with the same number of queries, such as those that bring one token.

use std::collections::BTreeMap;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, KvPages, RequestedResults};
use candle_core::{D, Result, Tensor, bail};

use super::super::call::{Call, MaskedKeys};
use super::super::options::OutputLayout;
use super::super::paged::PagedSequences;
use super::super::prepared::prepared;
use super::super::results::Attended;
use super::attend_prepared;
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::base::rowwise::with_float;
use candle_attention_modules::base::{joined_in_order, rows_of};

/// Returns the reason why the CPU kernel does not read the pages of a call in place, if there is one. Gradients,
/// dropout and statistics count keys through all sequences, and are computed from keys in one piece.
pub(in crate::sdpa) fn reason_to_copy(call: &Call, wanted: RequestedResults) -> Option<&'static str> {
    let Dims { t_q, d_v, .. } = call.attention.dims;
    if call.tracks_gradients() {
        return Some("an input is tracked for gradients");
    }
    if call.dropout.is_some() {
        return Some("weights are dropped");
    }
    if wanted.statistics.is_some() {
        return Some("statistics of the weights are requested");
    }
    if t_q == 0 || d_v == 0 {
        return Some("there are no scores");
    }
    None
}

/// Attends to the pages of a call in place.
pub(in crate::sdpa) fn attend_over_pages(
    call: &Call,
    instruction_set: InstructionSet,
    requested: RequestedResults,
) -> Result<Attended> {
    let Some(pages) = &call.attention.keys.pages else { bail!("[{}] the call has no pages", call.op) };
    let paged = PagedCall { call, pages, prepared: prepared(call, (), None)? };
    let mut parts = Vec::new();
    for (t_q, sequences) in sequences_by_queries(pages) {
        let rows: Vec<u32> = sequences.iter().flat_map(|&s| pages.queries(s)).map(|row| row as u32).collect();
        let batch = paged.of_sequences(t_q, &sequences, &rows)?;
        let dtype = call.attention.q.dtype();
        let found = with_float!(call.op, dtype, |E| attend_prepared::<E>(batch, instruction_set, requested))?;
        parts.push(Part { rows, found });
    }
    joined(parts, call)
}

/// Returns the sequences with queries by their number of queries.
fn sequences_by_queries(pages: &PagedSequences) -> BTreeMap<usize, Vec<usize>> {
    let mut by_queries: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for s in 0..pages.len() {
        let queries = pages.queries(s).len();
        if queries > 0 {
            by_queries.entry(queries).or_default().push(s);
        }
    }
    by_queries
}

/// A call over pages, with its tensors as the kernel reads them.
struct PagedCall<'a> {
    call: &'a Call,
    pages: &'a PagedSequences,
    prepared: AttentionCall<Tensor, ()>,
}

impl PagedCall<'_> {
    /// Returns the call of some sequences with `t_q` queries each, as a batch. `rows` are their packed queries.
    fn of_sequences(&self, t_q: usize, sequences: &[usize], rows: &[u32]) -> Result<Call> {
        let AttentionCall { dims, q, k, v, kv_scales, scores, .. } = &self.prepared;
        let call = self.call;
        let b = sequences.len();
        let own_q = rows_of(&q.squeeze(0)?.transpose(0, 1)?, 0, rows)?;
        let page_size = k.dim(2)?;
        let lens = sequences.iter().map(|&s| self.pages.packed().keys(s).len());
        let t_kv = lens.max().unwrap_or(0);
        let mut own_scores = scores.clone();
        if let Some(biases) = &mut own_scores.relative_bias {
            *biases = biases.narrow(D::Minus1, call.most_queries() - t_q, (t_q + t_kv).saturating_sub(1))?;
        }
        let ranges = call.attention.keys.ranges.of_sequences(call.op, sequences)?;
        Ok(Call {
            op: call.op,
            attention: AttentionCall {
                dims: Dims { b, t_q, t_kv, ..*dims },
                q: own_q.reshape((b, t_q, dims.h, dims.d))?.transpose(1, 2)?,
                k: k.clone(),
                v: v.clone(),
                kv_scales: kv_scales.clone(),
                pages: Some(KvPages { table: self.table(sequences, t_kv.div_ceil(page_size))?, page_size }),
                keys: MaskedKeys { ranges, sequences: None, pages: None, lists: Vec::new() },
                scores: own_scores,
                output_layout: OutputLayout::Bthd,
            },
            fully_masked_rows: call.fully_masked_rows,
            dropout: None,
            backend: call.backend,
            instruction_set: call.instruction_set,
            lists_obstacle: None,
        })
    }

    /// Returns the first pages of some sequences, with page 0 past the last page of a sequence: (B, pages).
    fn table(&self, sequences: &[usize], columns: usize) -> Result<Tensor> {
        let mut table = Vec::with_capacity(sequences.len() * columns);
        for &s in sequences {
            let own = self.pages.pages(s);
            table.extend((0..columns).map(|n| own.get(n).copied().unwrap_or(0)));
        }
        Tensor::from_vec(table, (sequences.len(), columns), self.prepared.k.device())
    }
}

/// The results of some sequences, a batch, whose packed queries are `rows`.
struct Part {
    rows: Vec<u32>,
    found: Attended,
}

/// Returns the results of all sequences in the order of the packed queries.
fn joined(parts: Vec<Part>, call: &Call) -> Result<Attended> {
    let Dims { h, d_v, .. } = call.attention.dims;
    let mut rows = Vec::new();
    let mut outputs = Vec::new();
    let mut log_sum_exps = Vec::new();
    for Part { rows: own_rows, found } in parts {
        outputs.push(found.output.transpose(1, 2)?.reshape((own_rows.len(), h, d_v))?);
        if let Some(log_sum_exp) = found.log_sum_exp {
            log_sum_exps.push(log_sum_exp.transpose(1, 2)?.reshape((own_rows.len(), h))?);
        }
        rows.extend(own_rows);
    }
    let mut attended = Attended::from(joined_in_order(&outputs, 0, &rows)?.unsqueeze(0)?.transpose(1, 2)?);
    if !log_sum_exps.is_empty() {
        attended.log_sum_exp = Some(joined_in_order(&log_sum_exps, 0, &rows)?.t()?.contiguous()?.unsqueeze(0)?);
    }
    Ok(attended)
}
