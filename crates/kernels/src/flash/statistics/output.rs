//! The statistics that a call computes, and where they are written.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use crate::cpu::SharedPtr;
use crate::error::Error;
use crate::flash::memory::zeros;
use candle_attention_call::{AttentionDims, RequestedStatistics, WeightTile};

/// The largest [`RequestedStatistics::top_keys`]: each query has a sorted list of these keys.
pub const MAX_TOP: usize = 32;

/// Statistics of the weights before dropout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statistics {
    /// The keys with the largest weights of each query, the largest first, for equal scores the lower key first:
    /// (B, H, T_q, k), where k is the smaller of [`RequestedStatistics::top_keys`] and T_kv. Keys of weight 0 come
    /// last, the lowest first.
    pub top_keys: Vec<u32>,
    /// The weights of these keys.
    pub top_weights: Vec<f32>,
    /// `-Σ w ln w` of each query, (B, H, T_q).
    pub entropy: Vec<f32>,
    /// The sum of the weights of each key over the queries, (B, H, T_kv).
    pub key_weight_sums: Vec<f32>,
    /// The requested weights, (B, H, queries, keys).
    pub weights: Vec<f32>,
}

impl Statistics {
    /// Allocates zeros for a call.
    ///
    /// # Errors
    /// If the request does not fit the call, or there is no memory.
    pub(in crate::flash) fn zeros(dims: &AttentionDims, requested: &RequestedStatistics) -> Result<Self, Error> {
        let &AttentionDims { b, h, t_q, t_kv, .. } = dims;
        let RequestedStatistics { top_keys, tile } = requested;
        let mut weights = [b, h, 0, 0];
        if let Some(WeightTile { queries, keys }) = tile {
            check_within("queries", queries, t_q)?;
            check_within("keys", keys, t_kv)?;
            weights = [b, h, queries.len(), keys.len()];
        }
        if *top_keys > MAX_TOP {
            return Err(Error::Shape(format!("expected at most {MAX_TOP} top keys, found {top_keys}")));
        }
        if u32::try_from(t_kv).is_err() {
            return Err(Error::Shape(format!("expected at most {} keys, found {t_kv}", u32::MAX)));
        }
        let top_shape = [b, h, t_q, (*top_keys).min(t_kv)];
        Ok(Self {
            top_keys: zeros("statistics", &top_shape)?,
            top_weights: zeros("statistics", &top_shape)?,
            entropy: zeros("statistics", &[b, h, t_q])?,
            key_weight_sums: zeros("statistics", &[b, h, t_kv])?,
            weights: zeros("statistics", &weights)?,
        })
    }
}

/// Checks that a requested range is within `0..end`.
fn check_within(name: &str, range: &Range<usize>, end: usize) -> Result<(), Error> {
    if range.start > range.end || range.end > end {
        return Err(Error::Shape(format!("expected {name} within 0..{end}, found {range:?}")));
    }
    Ok(())
}

/// The memory for the statistics of a call. No two tasks write the statistics of the same query, and the tasks of a
/// head take turns at the sums of its keys.
pub(in crate::flash) struct StatisticsOutput<'a> {
    pub requested: &'a RequestedStatistics,
    pub top_keys: SharedPtr<u32>,
    pub top_weights: SharedPtr<f32>,
    pub entropy: SharedPtr<f32>,
    pub key_weight_sums: SharedPtr<f32>,
    pub weights: SharedPtr<f32>,
    /// Set if there is no memory for scores.
    pub is_out_of_memory: AtomicBool,
}

impl<'a> StatisticsOutput<'a> {
    /// Prepares to write the requested statistics.
    pub fn new(statistics: &mut Statistics, requested: &'a RequestedStatistics) -> Self {
        Self {
            requested,
            top_keys: SharedPtr(statistics.top_keys.as_mut_ptr()),
            top_weights: SharedPtr(statistics.top_weights.as_mut_ptr()),
            entropy: SharedPtr(statistics.entropy.as_mut_ptr()),
            key_weight_sums: SharedPtr(statistics.key_weight_sums.as_mut_ptr()),
            weights: SharedPtr(statistics.weights.as_mut_ptr()),
            is_out_of_memory: AtomicBool::new(false),
        }
    }
}
