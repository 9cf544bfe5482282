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

use super::inputs::{CheckedCall, output_len, queries};
use super::kernels::{AttentionKernels, KernelTask};
use super::kv_rows::KeysValues;
use super::memory::no_scratch_memory;
use super::pages::PageList;
use super::relative_bias::RelativeBiasTable;
use crate::cpu::InstructionSet;
use crate::error::{Error, check_instruction_set, check_len};
pub use call::AttentionBackwardProblem;
use call::BackwardCall;
use candle_attention_call::RequestedGradients;
pub use gradients::AttentionGradients;
use gradients::{GradientMemory, check_requested};

/// Computes the gradients of a call of [`attend`](super::attend), on the calling thread and on helper threads.
/// The gradients are the same to the bit for any number of threads, and for any other sequences in the batch.
///
/// Keys and values in pages have gradients for the keys of each sequence, (B, H_kv, T_kv, ..): a key that several
/// sequences share, or that a sequence has several times, has several.
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
///     AttentionBackwardProblem, AttentionCall, AttentionDims, KeysOfQueries, OutputLayout, PerInput, RequestedGradients,
///     RequestedResults, ScoreModifiers, Strided, attend, attend_backward,
/// };
///
/// // One query over two keys of width 1, whose values are 0 and 1: the output is the second weight.
/// let q = [1.0];
/// let k = [0.0, 2.0];
/// let v = [0.0, 1.0];
/// let rows = |data| Strided { data, strides: [2, 2, 1] };
/// let forward = AttentionCall {
///     dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 2, d: 1, d_v: 1 },
///     q: rows(&q).into(),
///     k: rows(&k).into(),
///     v: rows(&v).into(),
///     kv_scales: None,
///     pages: None,
///     keys: KeysOfQueries { ranges: &[0..2], ..Default::default() },
///     scores: ScoreModifiers::default(),
///     output_layout: OutputLayout::Bhtd,
/// };
/// let instruction_set = InstructionSet::choose(None, false)?;
/// let requested = RequestedResults { softmax_stats: true, ..Default::default() };
/// let found = attend::<f32>(&forward, instruction_set, requested)?;
/// let softmax_stats = &found.softmax_stats.unwrap();
/// let output_grad = rows(&[1.0]);
/// let problem =
///     AttentionBackwardProblem { forward, output: &found.output, softmax_stats, output_grad, lse_grad: None };
/// let of = PerInput { q: true, v: true, ..Default::default() };
/// let requested = RequestedGradients { layout: OutputLayout::Bhtd, of };
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
    let AttentionBackwardProblem { forward, output, softmax_stats, output_grad, lse_grad } = *problem;
    let dims = forward.dims;
    if forward.kv_scales.is_some() {
        return Err(Error::Shape("expected keys and values that are floats, found codes".into()));
    }
    let q = queries(&forward)?;
    let mut inputs = CheckedCall::new(&forward)?;
    let pages = PageList::new(&forward)?;
    let keys_values = KeysValues::new(&forward, pages.as_ref())?;
    check_len("output", output.len(), output_len(&dims)?)?;
    let table = match inputs.options.relative_bias {
        Some(bias) => Some(RelativeBiasTable::new(bias, &dims).ok_or_else(no_scratch_memory)?),
        None => None,
    };
    inputs.relative_bias = table.as_ref();
    check_len("softmax_stats", softmax_stats.len(), dims.queries())?;
    if let Some(lse_grad) = lse_grad {
        check_len("lse_grad", lse_grad.len(), dims.queries())?;
    }
    output_grad.check("output_grad", [dims.b, dims.h, dims.t_q], dims.d_v)?;
    check_requested(&requested, &forward.scores)?;

    let mut memory = GradientMemory::new(&inputs, requested)?;
    if dims.queries() == 0 {
        // The other dimensions may be of any size then.
        memory.clear_keys_values();
    } else {
        let to = memory.pointers();
        let backward =
            BackwardCall { inputs, q, keys_values, output, softmax_stats, output_grad, lse_grad, requested, to };
        E::run(KernelTask::Backward(&backward), instruction_set).ok_or_else(no_scratch_memory)?;
    }
    // SAFETY: every element was written.
    Ok(unsafe { memory.into_gradients() })
}
