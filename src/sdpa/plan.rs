//! Which backend runs a call, and why.

use std::fmt;

use candle_core::{Result, bail};

use super::Backend;
use super::validate::Call;

/// The backend chosen for a call: never [`Backend::Auto`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// [`Backend::Reference`] or [`Backend::Fused`].
    pub backend: Backend,
    /// Why, in one sentence.
    pub reason: String,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.backend, self.reason)
    }
}

pub(super) fn choose(call: &Call) -> Result<Plan> {
    let reference = |reason: String| Ok(Plan { backend: Backend::Reference, reason });
    if call.options.backend == Backend::Reference {
        return reference("asked for".into());
    }
    let obstacle = fused_obstacle(call);
    if call.options.backend == Backend::Fused {
        bail!("[{}] no fused path: {obstacle}", call.op)
    }
    reference(obstacle)
}

/// What keeps the call from a fused kernel.
fn fused_obstacle(call: &Call) -> String {
    let options = call.options;
    let tracked = [Some(call.q), Some(call.k), Some(call.v), options.alibi_slopes.as_ref(), options.sinks.as_ref()];
    if tracked.into_iter().flatten().any(|tensor| tensor.track_op()) || call.mask.tracks_gradients() {
        return "an input is tracked for gradients, which only the reference path has".into();
    }
    format!("this version has no fused kernel for {:?}", call.q.device().location())
}
