//! Inputs and positions that rotary embeddings cannot take.

use crate::words::Fields;
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("rope", |_, call| {
    let rotary = rotary(call)?;
    let [xs, positions, axis_positions] = call.tensors(["xs", "positions", "axis_positions"])?;
    match (xs, positions, axis_positions) {
        (None, ..) => Ok(accepted(rotary)),
        (Some(xs), Some(positions), _) => rotary.apply(&xs, &positions).map(accepted),
        (Some(xs), None, Some(positions)) => rotary.apply_on_axes(&xs, &positions).map(accepted),
        (Some(xs), None, None) => rotary.apply_from(&xs, call.get("offset")?.unwrap_or(0)).map(accepted),
    }
})];

/// Builds a rotary embedding, from tables if given.
pub fn rotary(of: &Fields) -> Result<RotaryEmbedding> {
    let config = of.need("config")?;
    let head_dim = of.need("head_dim")?;
    match of.tensors(["cos", "sin"])? {
        [Some(cos), Some(sin)] => RotaryEmbedding::from_tables(&config, head_dim, &cos, &sin),
        _ => RotaryEmbedding::new(&config, head_dim),
    }
}
