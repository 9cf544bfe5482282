//! The memory of a task for statistics.

use crate::cpu::{MAX_LANES, Scratch};
use candle_attention_call::AttentionDims;

/// The number of neighbouring keys whose largest score is found before the largest scores of all keys are: a multiple
/// of the vectors of every instruction set.
pub(in crate::flash) const KEY_GROUP: usize = MAX_LANES;

/// The scores of the tiles of a task until the sums of their weights are known, and the statistics so far.
pub(in crate::flash) struct StatisticsMemory {
    /// The scores of all keys, (panels, T_kv, panel).
    pub scores: Scratch,
    /// The largest score of each group of keys, (groups, panel).
    pub largest: Scratch,
    /// The sums over queries for each key, (group, T_kv).
    pub sums: Scratch,
}

impl StatisticsMemory {
    /// Allocates memory for some panels; `None` if there is not enough.
    pub fn new(dims: &AttentionDims, panels: usize, panel: usize) -> Option<Self> {
        Some(Self {
            scores: Scratch::try_zeros(&[panels, dims.t_kv, panel])?,
            largest: Scratch::try_zeros(&[dims.t_kv.div_ceil(KEY_GROUP), panel])?,
            sums: Scratch::try_zeros(&[dims.group(), dims.t_kv])?,
        })
    }
}
