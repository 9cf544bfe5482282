//! Lists of keys as a boolean mask, for paths that read all keys.

use candle_core::Result;

use super::call::Call;
use crate::mask::with_listed_keys;

/// Returns a call of a batch with a boolean mask instead of lists of keys.
pub(super) fn with_bool_mask(mut call: Call) -> Result<Call> {
    let lists = std::mem::take(&mut call.attention.keys.lists);
    let device = call.attention.q.device();
    let own = call.attention.scores.boolean_mask.take();
    call.attention.scores.boolean_mask = with_listed_keys(own, &lists, call.score_dims(), device)?;
    Ok(call)
}
