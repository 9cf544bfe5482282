//! The backward pass of attention (Dao, <https://arxiv.org/abs/2307.08691>): the gradients of everything that the
//! forward pass reads, from its results. Scores are computed again a tile at a time, and are never in memory as a
//! whole.

pub(super) mod call;
mod gradients;
mod memory;
mod output;
mod rows;
pub(super) mod run;
mod step;
mod task;
mod tile_gradient;

use super::call::{AttentionCall, AttentionOutputs};
use super::inputs::{KeysValues, KvMatrix};
use super::kernels::{AttentionKernels, KernelCall};
use super::memory::no_scratch_memory;
use super::problem::KvRows;
use super::relative_bias::RelativeBiasTable;
use crate::cpu::InstructionSet;
use crate::error::{Error, check_instruction_set, check_len};
use crate::number::Strided;
use call::AttentionBackwardCall;
pub use call::AttentionBackwardProblem;
use gradients::GradientMemory;
pub use gradients::{AttentionGradients, RequestedGradients};

/// Computes the gradients of a call of [`attend`](super::attend), on the calling thread and on helper threads.
/// The gradients are the same to the bit for any number of threads, and for any other sequences in the batch.
///
/// The gradient of a fully masked query is zeros. NaN and infinities in keys, values, queries and gradients reach only
/// the queries and keys that attend to each other.
///
/// # Errors
/// As [`attend`](super::attend); [`Error::Shape`] too for a bias of another shape, and for requested gradients of
/// tensors that the call does not have.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{
///     AttentionBackwardProblem, AttentionDims, AttentionProblem, OutputLayout, RequestedGradients, ScoreOptions,
///     Strided, attend_backward, attend_vec,
/// };
///
/// // One query over two keys of width 1, whose values are 0 and 1: the output is the second weight.
/// let q = [1.0];
/// let k = [0.0, 2.0];
/// let v = [0.0, 1.0];
/// let rows = |data| Strided { data, strides: [2, 2, 1] };
/// let forward = AttentionProblem {
///     dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 2, d: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k).into(),
///     v: rows(&v).into(),
///     ranges: &[0..2],
///     scores: ScoreOptions::default(),
///     output_layout: OutputLayout::Bhtd,
/// };
/// let instruction_set = InstructionSet::choose(None, false)?;
/// let mut stats = Vec::new();
/// let output = attend_vec(&forward, instruction_set, None, Some(&mut stats))?;
/// let problem =
///     AttentionBackwardProblem { forward, output: &output, stats: &stats, output_grad: rows(&[1.0]), lse_grad: None };
/// let requested = RequestedGradients { q: true, v: true, ..Default::default() };
/// let gradients = attend_backward(&problem, instruction_set, requested)?;
/// let weight = 1.0 / (1.0 + (-2f32).exp());
/// assert!((gradients.q.unwrap()[0] - 2.0 * weight * (1.0 - weight)).abs() < 1e-6);
/// assert!((gradients.v.unwrap()[1] - weight).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend_backward<E: AttentionKernels>(
    problem: &AttentionBackwardProblem<E>,
    instruction_set: InstructionSet,
    requested: RequestedGradients,
) -> Result<AttentionGradients<E>, Error> {
    check_instruction_set(instruction_set)?;
    let AttentionBackwardProblem { forward, output, stats, output_grad, lse_grad } = *problem;
    let dims = forward.dims;
    let k = KvMatrix { rows: floats(forward.k)?, scales: None, width: dims.d };
    let v = KvMatrix { rows: floats(forward.v)?, scales: None, width: dims.d_v };
    let output = std::ptr::from_ref(output).cast_mut();
    let mut call = AttentionCall::new(&forward, AttentionOutputs { output, lse: None, stats: None, statistics: None })?;
    let table = match forward.scores.relative_bias {
        Some(bias) => Some(RelativeBiasTable::new(bias, &dims).ok_or_else(no_scratch_memory)?),
        None => None,
    };
    call.inputs.relative_bias = table.as_ref();
    check_len("stats", stats.len(), dims.queries())?;
    if let Some(lse_grad) = lse_grad {
        check_len("lse_grad", lse_grad.len(), dims.queries())?;
    }
    output_grad.check("output_grad", [dims.b, dims.h, dims.t_q], dims.d_v)?;
    requested.check(&forward)?;

    let mut memory = GradientMemory::new(&forward, requested)?;
    if dims.queries() == 0 {
        // The other dimensions may be of any size then.
        memory.clear_keys_values();
    } else {
        let to = memory.pointers();
        let backward = AttentionBackwardCall { call, stats, output_grad, lse_grad, requested, to };
        let kernel_call = KernelCall::Backward(&backward, KeysValues { k, v });
        E::run(kernel_call, instruction_set).ok_or_else(no_scratch_memory)?;
    }
    // SAFETY: every element was written.
    Ok(unsafe { memory.into_gradients() })
}

/// Returns keys or values as floats.
fn floats<E>(rows: KvRows<E>) -> Result<Strided<E, 3>, Error> {
    match rows {
        KvRows::Float(floats) => Ok(floats),
        KvRows::Q8 { .. } => Err(Error::Shape("expected keys and values that are floats, found some of 8 bits".into())),
    }
}
