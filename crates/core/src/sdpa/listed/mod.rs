//! Attention to lists of keys on a CPU. The rows of the listed keys are copied, for some queries at a time, and the
//! fused kernel attends to the copies: time and memory depend on the listed keys alone.

mod graph;
mod part;
mod rows;

use candle_attention_call::{AttentionDims as Dims, RequestedResults};
use candle_core::{DType, Result, Tensor};

use super::call::Call;
use super::options::Backend;
use super::results::Attended;
use super::{cpu, gather, listed_mask};
use crate::mask::{FullyMaskedRows, ListedKeys};
use candle_attention_kernels::InstructionSet;
use part::parts_of;

/// The estimated time of copying a key and its value, where one query row that attends to a key takes 1.
const COPY: usize = 24;

/// The estimated time of reading a key and its value in place, likewise.
const READ: usize = 8;

/// Returns a call in the form that its path reads: with lists that it reads as lists, or with a boolean mask in their
/// place, and with keys and values of pages in one piece where no path reads their listed rows.
pub(super) fn readable(mut call: Call, wanted: RequestedResults) -> Result<Call> {
    if call.attention.keys.lists.is_empty() {
        return Ok(call);
    }
    call.lists_obstacle = obstacle(&call, wanted)?;
    if call.lists_obstacle.is_none() {
        return Ok(call);
    }
    if call.sequences().is_some() {
        // The reference path makes a boolean mask for each sequence.
        return gather::with_keys_in_one_piece(call);
    }
    listed_mask::with_bool_mask(call)
}

/// Returns the reason why no path reads the listed keys alone, if there is one.
fn obstacle(call: &Call, wanted: RequestedResults) -> Result<Option<&'static str>> {
    let Dims { b, t_q, t_kv, d_v, .. } = call.attention.dims;
    let scores = &call.attention.scores;
    let [listed] = call.attention.keys.lists.as_slice() else {
        return Ok(Some("there are several"));
    };
    if call.backend == Backend::Reference {
        return Ok(Some("the reference path was requested"));
    }
    if !call.attention.q.device().is_cpu() {
        return Ok(Some("only the CPU reads listed keys alone"));
    }
    if call.attention.q.dtype() == DType::F64 {
        return Ok(Some("the CPU kernel computes in f32, and the inputs are F64"));
    }
    if wanted.weights || wanted.statistics.is_some() {
        return Ok(Some("weights or statistics of all keys were requested"));
    }
    if call.dropout.is_some() {
        return Ok(Some("dropout is drawn for all keys"));
    }
    if call.fully_masked_rows == FullyMaskedRows::Uniform {
        return Ok(Some("fully masked rows are uniform over all keys"));
    }
    if scores.depends_on_keys() {
        return Ok(Some("the call has a bias or a boolean mask"));
    }
    if call.attention.kv_scales.is_some() && call.tracks_gradients() {
        return Ok(Some("an input is tracked for gradients, which keys and values of 8 bits do not have"));
    }
    if [b, t_q, t_kv, d_v].contains(&0) {
        return Ok(Some("the call has no scores"));
    }
    if call.sequences().is_none() && !pays(call, listed)? {
        return Ok(Some("copies of the listed keys are estimated to take longer than reading all keys"));
    }
    Ok(None)
}

/// Returns whether copies of the listed keys are estimated to take less time than reading all keys.
fn pays(call: &Call, listed: &ListedKeys) -> Result<bool> {
    let Dims { b, t_q, t_kv, .. } = call.attention.dims;
    let group = call.attention.dims.group();
    let copies = t_q.div_ceil(listed.query_block()).saturating_mul(COPY);
    let rows = t_q.saturating_mul(group);
    let of_lists = b.saturating_mul(listed.most_keys(t_kv).saturating_mul(rows.saturating_add(copies)));
    let mut of_all = b.saturating_mul(t_kv.saturating_mul(READ));
    for keys in &call.rows()?.keys {
        of_all = of_all.saturating_add(keys.len().saturating_mul(group));
    }
    Ok(of_lists <= of_all)
}

/// Attends to the listed keys alone.
pub(super) fn attend(call: Call, instruction_set: InstructionSet, wanted: RequestedResults) -> Result<Attended> {
    let with_lse = wanted.log_sum_exp || call.tracks_gradients();
    let found = forward(&call, instruction_set, with_lse)?;
    let results = graph::record_results(call, instruction_set, found)?;
    Ok(Attended { log_sum_exp: results.log_sum_exp.filter(|_| wanted.log_sum_exp), ..results })
}

/// The results without gradients.
struct ListedResults {
    /// (B, H, T_q, D_v), contiguous in the call's layout.
    output: Tensor,
    /// (B, H, T_q), if it was requested or the backward pass needs it.
    log_sum_exp: Option<Tensor>,
}

/// Computes the output, and the log-sum-exp on request, part by part.
fn forward(call: &Call, instruction_set: InstructionSet, with_lse: bool) -> Result<ListedResults> {
    let mut outputs = Vec::new();
    let mut log_sum_exps = Vec::new();
    let wanted = RequestedResults { log_sum_exp: with_lse, ..RequestedResults::default() };
    for part in parts_of(call)? {
        let part = part?;
        let found = cpu::attend(part.call(call, &part.tensors(call)?)?, instruction_set, wanted)?;
        outputs.push(part.in_order(&found.output)?);
        if let Some(log_sum_exp) = found.log_sum_exp {
            log_sum_exps.push(part.in_order(&log_sum_exp.unsqueeze(3)?)?);
        }
    }
    let output = call.in_output_layout(whole(call, &outputs)?)?;
    let log_sum_exp = if with_lse { Some(whole(call, &log_sum_exps)?.squeeze(3)?) } else { None };
    Ok(ListedResults { output, log_sum_exp })
}

/// Returns the rows (1, H, queries, X) of all parts as (B, H, T_q, X).
fn whole(call: &Call, parts: &[Tensor]) -> Result<Tensor> {
    let Dims { b, h, t_q, .. } = call.attention.dims;
    // All queries of a batch entry come before the queries of the next.
    let rows = Tensor::cat(parts, 2)?;
    let width = rows.dim(3)?;
    rows.reshape((h, b, t_q, width))?.transpose(0, 1)?.contiguous()
}
