//! Which backend runs a call, and why.

use std::fmt;

use candle_core::{DType, Device, Result, bail};

use super::Backend;
use super::validate::Call;
use crate::EmptyRows;
use crate::cpu::Tier;

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

/// What a caller wants beside the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Context,
    Weights,
    LogSumExp,
}

/// What is going to run.
pub(super) enum Choice {
    Reference { reason: String },
    Cpu(Tier),
}

impl Choice {
    pub(super) fn plan(&self) -> Plan {
        match self {
            Self::Reference { reason } => Plan { backend: Backend::Reference, reason: reason.clone() },
            Self::Cpu(tier) => Plan { backend: Backend::Fused, reason: format!("the CPU kernel, {tier}") },
        }
    }
}

pub(super) fn choose(call: &Call, wanted: Wanted) -> Result<Choice> {
    if call.options.backend == Backend::Reference {
        return Ok(Choice::Reference { reason: "asked for".into() });
    }
    match fused_obstacle(call, wanted) {
        None => Ok(Choice::Cpu(Tier::choose(call.op, call.options.cpu_tier, call.q.dtype())?)),
        Some(obstacle) if call.options.backend == Backend::Fused => bail!("[{}] no fused path: {obstacle}", call.op),
        Some(reason) => Ok(Choice::Reference { reason }),
    }
}

/// What keeps the call from a fused kernel.
fn fused_obstacle(call: &Call, wanted: Wanted) -> Option<String> {
    let options = call.options;
    let tracked = [Some(call.q), Some(call.k), Some(call.v), options.alibi_slopes.as_ref(), options.sinks.as_ref()];
    if tracked.into_iter().flatten().any(|tensor| tensor.track_op()) || call.mask.tracks_gradients() {
        return Some("an input is tracked for gradients, which only the reference path has".into());
    }
    if !matches!(call.q.device(), Device::Cpu) {
        return Some(format!("this version has no fused kernel for {:?}", call.q.device().location()));
    }
    if wanted == Wanted::Weights {
        return Some("the weights are asked for, which a fused kernel never has as a whole".into());
    }
    if call.q.dtype() == DType::F64 {
        return Some("the CPU kernel computes in f32, and the inputs are F64".into());
    }
    if options.train && options.dropout > 0.0 {
        return Some("dropout happens to the weights, which a fused kernel never has as a whole".into());
    }
    if call.mask.empty_rows() == EmptyRows::Uniform {
        return Some(
            "queries that see nothing are to weigh all keys alike, and the CPU kernel skips hidden keys".into(),
        );
    }
    None
}
