//! The memory of a task for statistics.

use crate::cpu::{MAX_LANES, Scratch};
use crate::flash::dims::AttentionDims;

/// The number of neighbouring keys whose largest score is found before the largest scores of all keys are: a multiple
/// of the vectors of every instruction set.
pub(in crate::flash) const KEY_GROUP: usize = MAX_LANES;

/// Allocates memory for the scores of some panels (panels, T_kv, panel), followed by the largest score of each group of
/// keys (groups, panel) and sums over queries (group, T_kv). `None` if there is no memory.
pub(in crate::flash) fn kept_scores(dims: &AttentionDims, panels: usize, panel: usize) -> Option<Scratch> {
    let sums = dims.group().checked_mul(dims.t_kv)?.div_ceil(panel);
    let scores = panels.checked_mul(dims.t_kv)?;
    Scratch::try_zeros(&[scores.checked_add(dims.t_kv.div_ceil(KEY_GROUP) + sums)?, panel])
}
