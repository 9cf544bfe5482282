//! Lists of keys as a boolean mask, for paths that read all keys.

use candle_core::Result;

use super::call::Call;
use crate::mask::bool_mask_of;

/// Returns a call of a batch with a boolean mask instead of lists of keys.
pub(super) fn with_bool_mask(mut call: Call) -> Result<Call> {
    let lists = std::mem::take(&mut call.attention.keys.lists);
    let device = call.attention.q.device();
    let Some(of_lists) = bool_mask_of(&lists, call.score_dims(), device)? else { return Ok(call) };
    let mask = match &call.attention.scores.boolean_mask {
        Some(own) => own.broadcast_mul(&of_lists)?,
        None => of_lists,
    };
    call.attention.scores.boolean_mask = Some(mask);
    Ok(call)
}
