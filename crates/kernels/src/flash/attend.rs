//! The forward pass for callers: checks a call and writes its results.

use std::mem::MaybeUninit;

use super::call::{AttentionCall, AttentionOutputs};
use super::dims::AttentionDims;
use super::inputs::{KeysValues, KvMatrix};
use super::kernels::{AttentionKernels, KernelCall};
use super::memory::{no_scratch_memory, unwritten};
use super::options::SoftmaxStats;
use super::problem::{AttentionProblem, KvRows};
use crate::cpu::{InstructionSet, Unwritten};
use crate::error::{Error, check_instruction_set};

/// Computes attention of every query of a call, on the calling thread and on helper threads.
///
/// - `output` receives the attention output: B·H·T_q·D_v elements in the order that the problem names.
/// - `lse` receives the log-sum-exp of each query's scores, (B, H, T_q).
/// - `stats` receives the softmax statistics that [`attend_backward`](super::attend_backward) reads, (B, H, T_q).
///
/// On success every element of all three is initialised.
///
/// # Errors
/// - [`Error::Shape`] if a slice is shorter than the dimensions need, a range ends past the keys, a query attends to a
///   key without an entry in the relative bias, the query heads are no multiple of the key heads, or only one of keys
///   and values has 8 bits.
/// - [`Error::InstructionSet`] if the processor lacks the instruction set.
/// - [`Error::Memory`] if there is no memory for intermediate results.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{self, AttentionDims, AttentionProblem, OutputLayout, ScoreOptions, Strided};
///
/// // One sequence and head: two queries over two keys of width 2, causal.
/// let q = [1.0, 0.0, 0.0, 1.0];
/// let k = [1.0, 0.0, 0.0, 1.0];
/// let v = [1.0, 2.0];
/// let rows = |data, width| Strided { data, strides: [2 * width, 2 * width, width] };
/// let problem = AttentionProblem {
///     dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q: 2, t_kv: 2, d: 2, d_v: 1 },
///     q: rows(&q, 2),
///     k: rows(&k, 2).into(),
///     v: rows(&v, 1).into(),
///     ranges: &[0..1, 0..2],
///     scores: ScoreOptions { scale: 0.5f64.sqrt(), ..Default::default() },
///     output_layout: OutputLayout::Bhtd,
/// };
/// let mut output = Box::new_uninit_slice(2);
/// flash::attend(&problem, InstructionSet::choose(None, false)?, &mut output, None, None)?;
///
/// // The same call, which allocates vectors for the output and the log-sum-exp.
/// let mut lse = Vec::new();
/// let output: Vec<f32> = flash::attend_vec(&problem, InstructionSet::Scalar, Some(&mut lse), None)?;
/// let weight = (0.5f32.sqrt()).exp() / (1.0 + (0.5f32.sqrt()).exp());
/// assert_eq!(output[0], 1.0);
/// assert!((output[1] - (1.0 - weight + 2.0 * weight)).abs() < 1e-6);
/// assert!((lse[1] - (1.0 + (0.5f32.sqrt()).exp()).ln()).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend<E: AttentionKernels>(
    problem: &AttentionProblem<E>,
    instruction_set: InstructionSet,
    output: &mut [MaybeUninit<E>],
    lse: Option<&mut [MaybeUninit<f32>]>,
    stats: Option<&mut [MaybeUninit<SoftmaxStats>]>,
) -> Result<(), Error> {
    let output = output as *mut [MaybeUninit<E>] as *mut [E];
    attend_to(problem, instruction_set, AttentionOutputs { output, lse, stats, statistics: None })
}

/// Computes attention as [`attend`] does, and the statistics of the weights if they are requested.
pub(super) fn attend_to<E: AttentionKernels>(
    problem: &AttentionProblem<E>,
    instruction_set: InstructionSet,
    outputs: AttentionOutputs<E>,
) -> Result<(), Error> {
    check_instruction_set(instruction_set)?;
    let AttentionDims { d, d_v, .. } = problem.dims;
    let call = &AttentionCall::new(problem, outputs)?;
    let kernel_call = match (problem.k, problem.v) {
        (KvRows::Float(k), KvRows::Float(v)) => {
            let k = KvMatrix { rows: k, scales: None, width: d };
            let v = KvMatrix { rows: v, scales: None, width: d_v };
            KernelCall::Float(call, KeysValues { k, v })
        }
        (KvRows::Q8 { codes: k, scales: k_scales }, KvRows::Q8 { codes: v, scales: v_scales }) => {
            let k = KvMatrix { rows: k, scales: Some(k_scales), width: d };
            let v = KvMatrix { rows: v, scales: Some(v_scales), width: d_v };
            KernelCall::Q8(call, KeysValues { k, v })
        }
        _ => return Err(Error::Shape("expected keys and values that are both floats or both of 8 bits".into())),
    };
    if call.inputs.dims.queries() == 0 {
        return Ok(());
    }
    E::run(kernel_call, instruction_set).ok_or_else(no_scratch_memory)
}

/// Computes attention as [`attend`] does, and returns the attention output in a vector, in large pages if it is large.
/// The elements of `lse` and `stats` are replaced.
///
/// # Errors
/// As [`attend`], and [`Error::Memory`] if there is no memory for the results.
pub fn attend_vec<E: AttentionKernels>(
    problem: &AttentionProblem<E>,
    instruction_set: InstructionSet,
    lse: Option<&mut Vec<f32>>,
    stats: Option<&mut Vec<SoftmaxStats>>,
) -> Result<Vec<E>, Error> {
    let AttentionDims { b, h, t_q, d_v, .. } = problem.dims;
    problem.output_len()?;
    let mut output = unwritten("an attention output", &[b, h, t_q, d_v])?;
    let mut new_lse = match lse {
        Some(_) => Some(unwritten("a log-sum-exp", &[b, h, t_q])?),
        None => None,
    };
    let mut new_stats = match stats {
        Some(_) => Some(unwritten("softmax statistics", &[b, h, t_q])?),
        None => None,
    };
    let lse_to = new_lse.as_mut().map(Unwritten::elements);
    let stats_to = new_stats.as_mut().map(Unwritten::elements);
    attend(problem, instruction_set, output.elements(), lse_to, stats_to)?;
    // SAFETY: `attend` initialised every element of all three.
    unsafe {
        if let Some(lse) = lse
            && let Some(new_lse) = new_lse
        {
            *lse = new_lse.into_vec();
        }
        if let Some(stats) = stats
            && let Some(new_stats) = new_stats
        {
            *stats = new_stats.into_vec();
        }
        Ok(output.into_vec())
    }
}
