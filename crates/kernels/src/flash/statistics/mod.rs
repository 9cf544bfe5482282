//! Statistics of the weights, which the forward pass never stores as a whole.
//!
//! A weight is known when the sum over all keys of its query is. So a task keeps the scores of the few tiles that it
//! works on, T_kv for each of their queries, and reads them a second time: that takes one more exponential for each
//! score, and no product.

pub(super) mod memory;
pub(super) mod observe;
pub(super) mod output;

use super::attend::attend_to;
use super::call::AttentionOutputs;
use super::kernels::AttentionKernels;
use super::memory::unwritten;
use super::problem::AttentionProblem;
use crate::cpu::InstructionSet;
use crate::error::Error;
use output::StatisticsOutput;
pub use output::{MAX_TOP, RequestedStatistics, Statistics};

/// Computes attention as [`attend_vec`](super::attend_vec) does, and statistics of the weights, which are the same for
/// any number of threads. A call takes memory for them and, for each thread, for T_kv scores of each query of a tile
/// or, up to 8 MB, of several tiles, and for T_kv sums of each head of a group.
///
/// # Errors
/// As [`attend`](super::attend), and [`Error::Shape`] for more than [`MAX_TOP`] top keys, for more keys than a u32
/// counts, and for rows and columns outside of the call.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{
///     self, AttentionDims, AttentionProblem, OutputLayout, RequestedStatistics, ScoreOptions, Strided,
/// };
///
/// // One query over three keys of width 1.
/// let q = [1.0];
/// let k = [0.0, 1.0, 0.0];
/// let v = [1.0, 2.0, 3.0];
/// let rows = |data| Strided { data, strides: [3, 3, 1] };
/// let problem = AttentionProblem {
///     dims: AttentionDims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 3, d: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k).into(),
///     v: rows(&v).into(),
///     ranges: &[0..3],
///     scores: ScoreOptions::default(),
///     output_layout: OutputLayout::Bhtd,
/// };
/// let requested = RequestedStatistics { top: 2, ..Default::default() };
/// let (_, statistics) = flash::attend_with_statistics::<f32>(&problem, InstructionSet::Scalar, &requested)?;
/// assert_eq!(statistics.top_keys, [1, 0]);
/// assert!((statistics.key_weight_sums.iter().sum::<f32>() - 1.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend_with_statistics<E: AttentionKernels>(
    problem: &AttentionProblem<E>,
    instruction_set: InstructionSet,
    requested: &RequestedStatistics,
) -> Result<(Vec<E>, Statistics), Error> {
    let count = problem.output_len()?;
    problem.check()?;
    let mut statistics = Statistics::zeros(&problem.dims, requested)?;
    let mut output = unwritten("an attention output", &[count])?;
    let to = std::ptr::slice_from_raw_parts_mut(output.as_mut_ptr(), count);
    let statistics_to = Some(StatisticsOutput::new(&mut statistics, requested));
    let outputs = AttentionOutputs { output: to, lse: None, stats: None, statistics: statistics_to };
    attend_to(problem, instruction_set, outputs)?;
    // SAFETY: `attend_to` initialised every element.
    Ok((unsafe { output.into_vec() }, statistics))
}
