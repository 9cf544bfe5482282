//! Statistics of the weights, which the forward pass never has as a whole.
//!
//! A weight is known when the sum over all keys of its query is. So a task keeps the scores of the few tiles that it
//! works on, T_kv for each of their queries, and goes over them a second time: that takes one more exponential for each
//! score, and no product.

mod observe;

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use super::problem::Outputs;
use super::{AttentionKernels, Dims, Problem, attend_to, zeros};
use crate::cpu::{InstructionSet, SharedPtr, Unwritten};
use crate::error::Error;
pub(in crate::flash) use observe::{Observe, kept_scores};

/// The most keys that [`StatisticsOptions::top`] may ask for: queries keep a sorted list of them.
pub const MAX_TOP: usize = 32;

/// What [`attend_with_statistics`] is to find out besides entropies and sums.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatisticsOptions {
    /// How many of a query's largest weights, at most [`MAX_TOP`].
    pub top: usize,
    /// The queries whose weights are wanted as they are.
    pub rows: Range<usize>,
    /// The keys whose weights are.
    pub columns: Range<usize>,
}

/// Statistics of the weights before dropout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statistics {
    /// The keys with the largest weights of each query, the largest first, of equal scores the lower key:
    /// (B, H, T_q, k), where k is the smaller of [`StatisticsOptions::top`] and T_kv. Keys of weight 0 come last, the
    /// lowest first.
    pub top_keys: Vec<u32>,
    /// Their weights.
    pub top_weights: Vec<f32>,
    /// `-Σ w ln w` of each query, (B, H, T_q).
    pub entropy: Vec<f32>,
    /// The sum over the queries of the weight that a key has, (B, H, T_kv).
    pub key_weight_sums: Vec<f32>,
    /// The weights that were asked for, (B, H, rows, columns).
    pub weights: Vec<f32>,
}

impl Statistics {
    /// Zeros for a call.
    fn zeros(dims: &Dims, options: &StatisticsOptions) -> Result<Self, Error> {
        let Dims { b, h, t_q, t_kv, .. } = *dims;
        let StatisticsOptions { top, rows, columns } = options;
        for (what, wanted, most) in [("rows", rows, t_q), ("columns", columns, t_kv)] {
            if wanted.start > wanted.end || wanted.end > most {
                return Err(Error::Shape(format!("expected {what} within 0..{most}, found {wanted:?}")));
            }
        }
        if *top > MAX_TOP {
            return Err(Error::Shape(format!("expected at most {MAX_TOP} top keys, found {top}")));
        }
        if u32::try_from(t_kv).is_err() {
            return Err(Error::Shape(format!("expected at most {} keys, found {t_kv}", u32::MAX)));
        }
        let (top, weights) = ([b, h, t_q, (*top).min(t_kv)], [b, h, rows.len(), columns.len()]);
        Ok(Self {
            top_keys: zeros("statistics", &top)?,
            top_weights: zeros("statistics", &top)?,
            entropy: zeros("statistics", &[b, h, t_q])?,
            key_weight_sums: zeros("statistics", &[b, h, t_kv])?,
            weights: zeros("statistics", &weights)?,
        })
    }
}

/// Where the statistics of a call go. Each task writes those of its own queries, and the tasks of a head take turns at
/// what its keys receive.
pub(super) struct StatisticsOutput<'a> {
    options: &'a StatisticsOptions,
    top_keys: SharedPtr<u32>,
    top_weights: SharedPtr<f32>,
    entropy: SharedPtr<f32>,
    key_weight_sums: SharedPtr<f32>,
    weights: SharedPtr<f32>,
    /// Set where there is no memory for scores.
    pub is_short: AtomicBool,
}

/// [`attend_vec`](super::attend_vec) that also returns statistics of the weights. They are the same for any number of
/// threads. A call takes memory for them, and for each thread for T_kv scores of each query of a tile or, up to 8 MB,
/// of several, and as many sums for each head of a group.
///
/// # Errors
/// As [`attend`](super::attend), and [`Error::Shape`] for more than [`MAX_TOP`] top keys, for more keys than a u32
/// counts, and for rows and columns that are not those of the call.
///
/// ```
/// use candle_attention_kernels::InstructionSet;
/// use candle_attention_kernels::flash::{self, Dims, OutputLayout, Problem, ScoreOptions, StatisticsOptions, Strided};
///
/// // One query over three keys of width 1.
/// let (q, k, v) = ([1.0], [0.0, 1.0, 0.0], [1.0, 2.0, 3.0]);
/// let rows = |data| Strided { data, strides: [3, 3, 1] };
/// let problem = Problem {
///     dims: Dims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 3, d: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k).into(),
///     v: rows(&v).into(),
///     ranges: &[0..3],
///     scores: ScoreOptions::default(),
///     output_layout: OutputLayout::Bhtd,
///     executor: None,
/// };
/// let options = StatisticsOptions { top: 2, ..Default::default() };
/// let (_, statistics) = flash::attend_with_statistics::<f32>(&problem, InstructionSet::Scalar, &options)?;
/// assert_eq!(statistics.top_keys, [1, 0]);
/// assert!((statistics.key_weight_sums.iter().sum::<f32>() - 1.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend_with_statistics<E: AttentionKernels>(
    problem: &Problem<E>,
    instruction_set: InstructionSet,
    options: &StatisticsOptions,
) -> Result<(Vec<E>, Statistics), Error> {
    problem.check()?;
    let count = problem.context_len()?;
    let mut found = Statistics::zeros(&problem.dims, options)?;
    let output = StatisticsOutput {
        options,
        top_keys: SharedPtr(found.top_keys.as_mut_ptr()),
        top_weights: SharedPtr(found.top_weights.as_mut_ptr()),
        entropy: SharedPtr(found.entropy.as_mut_ptr()),
        key_weight_sums: SharedPtr(found.key_weight_sums.as_mut_ptr()),
        weights: SharedPtr(found.weights.as_mut_ptr()),
        is_short: AtomicBool::new(false),
    };
    let mut context =
        Unwritten::new(&[count]).ok_or_else(|| Error::Memory(format!("a context of {count} elements")))?;
    let to = std::ptr::slice_from_raw_parts_mut(context.as_mut_ptr(), count);
    attend_to(problem, instruction_set, Outputs { context: to, lse: None, stats: None, statistics: Some(output) })?;
    // SAFETY: `attend_to` initialised every element.
    Ok((unsafe { context.written() }, found))
}
