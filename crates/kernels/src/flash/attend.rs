//! The forward pass for callers: checks a call, runs it, and returns its results.

use super::call::ForwardCall;
use super::inputs::{CheckedCall, queries};
use super::kernels::{AttentionKernels, KernelTask};
use super::kv_rows::KeysValues;
use super::memory::no_scratch_memory;
use super::pages::PageList;
use super::problem::CpuCall;
use super::results::{AttentionResults, ResultMemory};
use crate::cpu::InstructionSet;
use crate::error::{Error, check_instruction_set};
use candle_attention_call::{KvCodeFormat, RequestedResults};

/// Computes attention of every query of a call, on the calling thread and on helper threads, with the other requested
/// results.
///
/// Statistics of the weights are the same for any number of threads. A call that returns them takes memory for them
/// and, for each thread, for T_kv scores of each query of a tile or, up to 8 MB, of several tiles, and for T_kv sums of
/// each head of a group.
///
/// # Errors
/// - [`Error::Shape`] if a slice is shorter than the dimensions need, a range ends past the keys, a query attends to a
///   key without an entry in the relative bias or in a page that the pools lack, the query heads are no multiple of the
///   key heads, or queries, keys and values have other types than E, where only codes have scales; for more than
///   [`MAX_TOP`](super::MAX_TOP) top keys, for statistics of more keys than a u32 counts, and of queries and keys
///   outside of the call; and if the weights are requested, which are never stored.
/// - [`Error::InstructionSet`] if the processor lacks the instruction set.
/// - [`Error::Memory`] if there is no memory for the results or for intermediate results.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{
///     AttentionCall, AttentionDims, KeysOfQueries, OutputLayout, RequestedResults, RequestedStatistics, ScoreModifiers,
///     Strided, attend,
/// };
///
/// // One sequence and head: two queries over two keys of width 2, causal.
/// let q = [1.0, 0.0, 0.0, 1.0];
/// let k = [1.0, 0.0, 0.0, 1.0];
/// let v = [1.0, 2.0];
/// let rows = |data, width| Strided { data, strides: [2 * width, 2 * width, width] };
/// let call = AttentionCall {
///     dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q: 2, t_kv: 2, d: 2, d_v: 1 },
///     q: rows(&q, 2).into(),
///     k: rows(&k, 2).into(),
///     v: rows(&v, 1).into(),
///     kv_scales: None,
///     pages: None,
///     keys: KeysOfQueries { ranges: &[0..1, 0..2], ..Default::default() },
///     scores: ScoreModifiers { scale: 0.5f64.sqrt(), ..Default::default() },
///     output_layout: OutputLayout::Bhtd,
/// };
/// let requested = RequestedStatistics { top_keys: 1, tile: None };
/// let wanted = RequestedResults { log_sum_exp: true, statistics: Some(&requested), ..RequestedResults::default() };
/// let found = attend::<f32>(&call, InstructionSet::choose(None, false)?, wanted)?;
/// let weight = (0.5f32.sqrt()).exp() / (1.0 + (0.5f32.sqrt()).exp());
/// assert_eq!(found.output[0], 1.0);
/// assert!((found.output[1] - (1.0 - weight + 2.0 * weight)).abs() < 1e-6);
/// assert!((found.log_sum_exp.unwrap()[1] - (1.0 + (0.5f32.sqrt()).exp()).ln()).abs() < 1e-6);
/// assert_eq!(found.statistics.unwrap().top_keys, [0, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend<E: AttentionKernels>(
    call: &CpuCall,
    instruction_set: InstructionSet,
    requested: RequestedResults,
) -> Result<AttentionResults<E>, Error> {
    check_instruction_set(instruction_set)?;
    let q = queries(call)?;
    let inputs = CheckedCall::new(call)?;
    let mut memory = ResultMemory::new(&call.dims, requested)?;
    let forward = &ForwardCall { inputs, q, to: memory.pointers(requested) };
    let pages = PageList::new(call)?;
    let task = match call.kv_scales.map(|scales| scales.format) {
        None => KernelTask::Float(forward, KeysValues::new(call, pages.as_ref())?),
        Some(KvCodeFormat::Q8) => KernelTask::Q8(forward, KeysValues::new(call, pages.as_ref())?),
        Some(KvCodeFormat::E4M3) => KernelTask::E4M3(forward, KeysValues::new(call, pages.as_ref())?),
        Some(KvCodeFormat::Q4) => KernelTask::Q4(forward, KeysValues::new(call, pages.as_ref())?),
    };
    if call.dims.queries() > 0 {
        E::run(task, instruction_set).ok_or_else(no_scratch_memory)?;
    }
    // SAFETY: the kernel initialised every element, and there are none without queries.
    Ok(unsafe { memory.into_results() })
}
