//! Attention to lists of keys. The fused kernels read the rows of the listed keys where they are
//! stored, as pages of one key each, whose table is the list: time and memory depend on the listed keys alone.
//!
//! Copies of the rows, one after the other, would take a write and a second read of each listed row for each block of
//! queries. A token with 2,048 listed keys of 8 heads of D 128 has 16 MiB of rows in f32, more than a core's caches: in
//! place they are read once, with copies they pass through memory three times, and new memory costs a page fault for
//! each 4 KiB. Many queries gain as well: a query of four heads multiplies a row of 256 numbers four times, in about
//! the time of the copy.

mod graph;
mod part;
mod rows;

use candle_attention_call::{AttentionDims as Dims, RequestedResults};
use candle_core::{DType, Device, Error, Result, Tensor};

use super::call::Call;
use super::cuda::CudaPath;
use super::metal::MetalKernelCall;
use super::options::Backend;
use super::results::Attended;
use super::{cpu, gather, listed_mask};
use crate::mask::{FullyMaskedRows, ListedKeys};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::SoftmaxStats;
use candle_attention_metal::is_available;
use candle_attention_modules::base::rowwise::{TensorElement, with_float};
use part::parts_of;
use rows::ListableRows;

/// The estimated time of reading a listed key and its value, where one query row that attends to a key takes 1.
const READ_LISTED: usize = 16;

/// The estimated time of reading a key and its value in order, likewise.
const READ: usize = 8;

/// Returns a call in the form that its path reads: with lists that it reads as lists, or with a boolean mask in their
/// place, and with keys and values of pages in one piece where no path reads their listed rows.
pub(super) fn readable(mut call: Call, wanted: RequestedResults) -> Result<Call> {
    if call.attention.keys.lists.is_empty() {
        return Ok(call);
    }
    call.lists_obstacle = obstacle(&call, wanted)?;
    if call.lists_obstacle.is_none() { Ok(call) } else { with_all_keys(call) }
}

/// Returns a call in the form of paths that read all keys.
pub(super) fn with_all_keys(call: Call) -> Result<Call> {
    if call.sequences().is_some() {
        // The reference path makes a boolean mask for each sequence.
        return gather::with_keys_in_one_piece(call);
    }
    listed_mask::with_bool_mask(call)
}

/// A kernel that reads listed keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListedKernel {
    Cpu(InstructionSet),
    Cuda,
    Metal,
}

/// Returns the reason why no path reads the listed keys alone, if there is one.
fn obstacle(call: &Call, wanted: RequestedResults) -> Result<Option<String>> {
    let [listed] = call.attention.keys.lists.as_slice() else {
        return Ok(Some("there are several".into()));
    };
    if let Some(reason) = obstacle_of_any_kernel(call, wanted) {
        return Ok(Some(reason.into()));
    }
    match call.attention.q.device() {
        Device::Cpu => {
            if call.attention.q.dtype() == DType::F64 {
                return Ok(Some("the CPU kernel computes in f32, and the inputs are F64".into()));
            }
            if call.sequences().is_none() && !pays(call, listed)? {
                let reason = "reading the listed keys one by one is estimated to take longer than reading all keys";
                return Ok(Some(reason.into()));
            }
            Ok(None)
        }
        Device::Cuda(_) => obstacle_of_gpu(call, listed, wanted, ListedKernel::Cuda),
        Device::Metal(_) => match is_available(call.attention.q.device()) {
            Ok(()) => obstacle_of_gpu(call, listed, wanted, ListedKernel::Metal),
            Err(reason) => Ok(Some(reason.to_string())),
        },
    }
}

/// Returns the reason why no kernel of a GPU reads the listed keys alone, if there is one.
fn obstacle_of_gpu(
    call: &Call,
    listed: &ListedKeys,
    wanted: RequestedResults,
    kernel: ListedKernel,
) -> Result<Option<String>> {
    let Dims { h_kv, t_q, t_kv, .. } = call.attention.dims;
    if call.tracks_gradients() {
        return Ok(Some("an input is tracked for gradients, which the kernels of GPUs do not have for lists".into()));
    }
    if (listed.heads() != 1 && h_kv != 1) || listed.query_block() != 1 {
        return Ok(Some("the kernels of GPUs read one list for each query and all heads".into()));
    }
    // A tile of queries reads all keys once, and each list of a query is read apart.
    if t_q.saturating_mul(listed.most_keys(t_kv)).saturating_mul(2) > t_kv {
        return Ok(Some("the lists of all queries together have more than half of the keys".into()));
    }
    // The parts of a call differ in their sizes alone.
    let Some(part) = parts_of(call)?.next() else { return Ok(None) };
    let part_call = part?.call(call, &ListableRows::new(call)?, kernel)?;
    Ok(match kernel {
        ListedKernel::Metal => MetalKernelCall::plan(&part_call, wanted).err(),
        ListedKernel::Cuda | ListedKernel::Cpu(_) => CudaPath::plan(&part_call, wanted).err(),
    })
}

/// Returns the reason why no kernel of any device reads the listed keys alone, if there is one.
fn obstacle_of_any_kernel(call: &Call, wanted: RequestedResults) -> Option<&'static str> {
    let Dims { b, t_q, t_kv, d_v, .. } = call.attention.dims;
    let scores = &call.attention.scores;
    if call.backend == Backend::Reference {
        return Some("the reference path was requested");
    }
    if wanted.weights || wanted.statistics.is_some() {
        return Some("weights or statistics of all keys were requested");
    }
    if call.dropout.is_some() {
        return Some("dropout is drawn for all keys");
    }
    if call.fully_masked_rows == FullyMaskedRows::Uniform {
        return Some("fully masked rows are uniform over all keys");
    }
    if scores.depends_on_keys() {
        return Some("the call has a bias or a boolean mask");
    }
    if call.attention.kv_scales.is_some() && call.tracks_gradients() {
        return Some("an input is tracked for gradients, which keys and values that are codes do not have");
    }
    if [b, t_q, t_kv, d_v].contains(&0) {
        return Some("the call has no scores");
    }
    // The rows of the longest sequence, or of all pages.
    let rows = match &call.attention.keys.pages {
        Some(_) => call.attention.k.dims()[0].saturating_mul(call.attention.k.dims()[2]),
        None => t_kv,
    };
    if rows >= i32::MAX as usize {
        return Some("the keys are more than the kernels count");
    }
    None
}

/// Returns whether the listed keys are estimated to take less time than reading all keys.
fn pays(call: &Call, listed: &ListedKeys) -> Result<bool> {
    let Dims { b, t_q, t_kv, .. } = call.attention.dims;
    let group = call.attention.dims.group();
    let reads = t_q.div_ceil(listed.query_block()).saturating_mul(READ_LISTED);
    let rows = t_q.saturating_mul(group);
    let of_lists = b.saturating_mul(listed.most_keys(t_kv).saturating_mul(rows.saturating_add(reads)));
    let mut of_all = b.saturating_mul(t_kv.saturating_mul(READ));
    for keys in &call.rows()?.keys {
        of_all = of_all.saturating_add(keys.len().saturating_mul(group));
    }
    Ok(of_lists <= of_all)
}

/// Attends to the listed keys alone.
pub(super) fn attend(call: Call, kernel: ListedKernel, wanted: RequestedResults) -> Result<Attended> {
    let with_lse = wanted.log_sum_exp || call.tracks_gradients();
    let found = forward(&call, kernel, with_lse)?;
    let results = match kernel {
        ListedKernel::Cpu(instruction_set) if call.tracks_gradients() => with_float!(
            call.op,
            call.attention.q.dtype(),
            |E| graph::record_results::<E>(call, instruction_set, found)
        )?,
        _ => Attended { log_sum_exp: found.log_sum_exp, ..found.output.into() },
    };
    Ok(Attended { log_sum_exp: results.log_sum_exp.filter(|_| wanted.log_sum_exp), ..results })
}

/// The results without gradients.
struct ListedResults {
    /// (B, H, T_q, D_v), contiguous in the call's layout.
    output: Tensor,
    /// (B, H, T_q), if it was requested or an input is tracked for gradients.
    log_sum_exp: Option<Tensor>,
    /// The statistics of the softmax of each part, (blocks, H, queries of a block), if an input is tracked.
    softmax_stats: Vec<Vec<SoftmaxStats>>,
}

/// Computes the output, and the log-sum-exp on request, part by part.
fn forward(call: &Call, kernel: ListedKernel, with_lse: bool) -> Result<ListedResults> {
    let stored = ListableRows::new(call)?;
    let mut outputs = Vec::new();
    let mut log_sum_exps = Vec::new();
    let mut softmax_stats = Vec::new();
    let wanted = RequestedResults {
        log_sum_exp: with_lse,
        softmax_stats: call.tracks_gradients(),
        ..RequestedResults::default()
    };
    for part in parts_of(call)? {
        let part = part?;
        let found = part_results(part.call(call, &stored, kernel)?, kernel, wanted)?;
        outputs.push(part.in_order(&found.output)?);
        if let Some(log_sum_exp) = found.log_sum_exp {
            log_sum_exps.push(part.in_order(&log_sum_exp.unsqueeze(3)?)?);
        }
        softmax_stats.extend(found.softmax_stats);
    }
    let output = call.in_output_layout(whole(call, &outputs)?)?;
    let log_sum_exp = if with_lse { Some(whole(call, &log_sum_exps)?.squeeze(3)?) } else { None };
    Ok(ListedResults { output, log_sum_exp, softmax_stats })
}

/// The results of a part, (blocks, H, queries of a block, ..).
struct PartResults {
    output: Tensor,
    log_sum_exp: Option<Tensor>,
    softmax_stats: Option<Vec<SoftmaxStats>>,
}

/// Runs a kernel on the call of a part.
fn part_results(part_call: Call, kernel: ListedKernel, wanted: RequestedResults) -> Result<PartResults> {
    match kernel {
        ListedKernel::Cpu(instruction_set) => {
            let prepared = cpu::prepared_call(part_call, None)?;
            with_float!(prepared.op, prepared.attention.q.dtype(), |E| {
                cpu_results::<E>(&prepared, instruction_set, wanted)
            })
        }
        ListedKernel::Cuda => {
            let cuda_path = CudaPath::plan(&part_call, wanted).map_err(Error::msg)?;
            cuda_path.check_first_use().map_err(Error::msg)?;
            let Attended { output, log_sum_exp, .. } = cuda_path.attend(wanted)?;
            Ok(PartResults { output, log_sum_exp, softmax_stats: None })
        }
        ListedKernel::Metal => {
            let metal_call = MetalKernelCall::plan(&part_call, wanted).map_err(Error::msg)?;
            metal_call.check_first_use().map_err(Error::msg)?;
            let Attended { output, log_sum_exp, .. } = metal_call.attend(wanted)?;
            Ok(PartResults { output, log_sum_exp, softmax_stats: None })
        }
    }
}

/// Runs the CPU kernel on the prepared call of a part.
fn cpu_results<E: TensorElement>(
    call: &Call,
    instruction_set: InstructionSet,
    wanted: RequestedResults,
) -> Result<PartResults> {
    let found = cpu::computed::<E>(call, instruction_set, wanted)?;
    let Dims { b: blocks, h, t_q, d_v, .. } = call.attention.dims;
    let device = call.attention.q.device();
    let log_sum_exp = match found.log_sum_exp {
        Some(numbers) => Some(Tensor::from_vec(numbers, (blocks, h, t_q), device)?),
        None => None,
    };
    let output = Tensor::from_vec(found.output, (blocks, h, t_q, d_v), device)?;
    Ok(PartResults { output, log_sum_exp, softmax_stats: found.softmax_stats })
}

/// Returns the rows (1, H, queries, X) of all parts as (B, H, T_q, X).
fn whole(call: &Call, parts: &[Tensor]) -> Result<Tensor> {
    let Dims { b, h, t_q, .. } = call.attention.dims;
    // All queries of a batch entry come before the queries of the next.
    let rows = Tensor::cat(parts, 2)?;
    let width = rows.dim(3)?;
    rows.reshape((h, b, t_q, width))?.transpose(0, 1)?.contiguous()
}
