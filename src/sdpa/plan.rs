//! Which backend runs a call, and why.

use std::fmt;

use candle_core::{DType, Device, Result, bail};

use super::validate::Call;
use super::{Backend, PackedSequences, cuda, metal};
use crate::EmptyRows;
use crate::cpu::Tier;

/// The backend chosen for a call: never [`Backend::Auto`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
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

/// What a caller wants next to the context.
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
    FlashAttn(cuda::Plan),
    Metal(metal::Plan),
}

impl Choice {
    pub(super) fn plan(&self) -> Plan {
        let fused = |reason: String| Plan { backend: Backend::Fused, reason };
        match self {
            Self::Reference { reason } => Plan { backend: Backend::Reference, reason: reason.clone() },
            Self::Cpu(tier) => fused(format!("the CPU kernel, {tier}")),
            Self::FlashAttn(plan) => fused(plan.to_string()),
            Self::Metal(plan) => fused(plan.to_string()),
        }
    }
}

/// The choice for a call, over packed sequences if those are given.
pub(super) fn choose(call: &Call, packed: Option<&PackedSequences>, wanted: Wanted) -> Result<Choice> {
    if call.options.backend == Backend::Reference {
        return Ok(Choice::Reference { reason: "asked for".into() });
    }
    let chosen = match (obstacle_of_every_kernel(call, wanted), call.q.device()) {
        (Some(obstacle), _) => Err(obstacle),
        (None, Device::Cpu) if call.q.dtype() == DType::F64 => {
            Err("the CPU kernel computes in f32, and the inputs are F64".into())
        }
        (None, Device::Cpu) => Ok(Choice::Cpu(
            Tier::choose(call.options.cpu_tier, call.q.dtype() == DType::BF16)
                .map_err(|error| candle_core::Error::msg(format!("[{}] {error}", call.op)))?,
        )),
        (None, Device::Cuda(_)) => cuda::decide(call, packed, wanted)?
            .and_then(|plan| cuda::obstacle(call.q.device()).map_or(Ok(Choice::FlashAttn(plan)), Err)),
        (None, Device::Metal(_)) => metal::decide(call, packed, wanted)?.map(Choice::Metal),
    };
    match chosen {
        Ok(choice) => Ok(choice),
        Err(obstacle) if call.options.backend == Backend::Fused => bail!("[{}] no fused path: {obstacle}", call.op),
        Err(reason) => Ok(Choice::Reference { reason }),
    }
}

/// What keeps the call from every fused kernel.
fn obstacle_of_every_kernel(call: &Call, wanted: Wanted) -> Option<String> {
    let options = call.options;
    let tracked = [Some(&call.q), Some(&call.k), Some(&call.v), options.alibi_slopes.as_ref(), options.sinks.as_ref()];
    if tracked.into_iter().flatten().any(|tensor| tensor.track_op()) || call.mask.tracks_gradients() {
        return Some("an input is tracked for gradients, which only the reference path has".into());
    }
    if wanted == Wanted::Weights {
        return Some("the weights are asked for, which a fused kernel never has as a whole".into());
    }
    if options.train && options.dropout > 0.0 {
        return Some("dropout happens to the weights, which a fused kernel never has as a whole".into());
    }
    if call.mask.empty_rows() == EmptyRows::Uniform {
        return Some("queries that see nothing are to weigh all keys alike, and fused kernels skip hidden keys".into());
    }
    None
}
