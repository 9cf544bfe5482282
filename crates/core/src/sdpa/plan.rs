//! The choice of the backend that runs a call, and the reason for it.

use std::fmt;

use candle_core::{DType, Device, Error, Result, bail};

use super::call::Call;
use super::cuda::CudaCall;
use super::metal::MetalCall;
use super::options::Backend;
use super::result::ResultKind;
use crate::mask::FullyMaskedRows;
use candle_attention_kernels::InstructionSet;

/// The backend chosen for a call: never [`Backend::Auto`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// [`Backend::Reference`] or [`Backend::Fused`].
    pub backend: Backend,
    /// The reason for the backend, in one sentence.
    pub reason: String,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.backend, self.reason)
    }
}

/// The path that runs a call.
pub(crate) enum Choice {
    Reference { reason: String },
    Cpu(InstructionSet),
    Cuda(Box<CudaCall>),
    Metal(MetalCall),
}

impl Choice {
    /// Chooses the path of a call.
    ///
    /// # Errors
    /// If [`Backend::Fused`] is requested and no fused path supports the call.
    pub(super) fn new(call: &Call, kind: ResultKind) -> Result<Self> {
        if call.options.backend == Backend::Reference {
            return Ok(Self::Reference { reason: "requested".into() });
        }
        let fused = match unsupported_by_fused_paths(call, kind) {
            Some(reason) => Err(reason.into()),
            None => match call.q.device() {
                Device::Cpu => Ok(Self::Cpu(instruction_set(call)?)),
                Device::Cuda(_) => CudaCall::plan(call, kind).map(|cuda_call| Self::Cuda(Box::new(cuda_call))),
                Device::Metal(_) => MetalCall::plan(call, kind).map(Self::Metal),
            },
        };
        match fused {
            Ok(choice) => Ok(choice),
            Err(reason) if call.options.backend == Backend::Fused => bail!("[{}] no fused path: {reason}", call.op),
            Err(reason) => Ok(Self::Reference { reason }),
        }
    }

    /// Returns whether a kernel runs the call that reads keys and values of 8 bits.
    pub fn reads_codes(&self) -> bool {
        matches!(self, Self::Cpu(_) | Self::Cuda(_))
    }

    /// Returns the choice in the form that callers read.
    pub(super) fn plan(self) -> Plan {
        match self {
            Self::Reference { reason } => Plan { backend: Backend::Reference, reason },
            Self::Cpu(instruction_set) => {
                Plan { backend: Backend::Fused, reason: format!("the CPU kernel, {instruction_set}") }
            }
            Self::Cuda(cuda_call) => Plan { backend: Backend::Fused, reason: cuda_call.to_string() },
            Self::Metal(metal_call) => Plan { backend: Backend::Fused, reason: metal_call.to_string() },
        }
    }
}

/// Returns the instruction set that the CPU kernel uses for a call.
fn instruction_set(call: &Call) -> Result<InstructionSet> {
    InstructionSet::choose(call.options.instruction_set, call.q.dtype() == DType::BF16)
        .map_err(|error| Error::msg(format!("[{}] {error}", call.op)))
}

/// Returns the reason why no fused path supports a call, if there is one that does not depend on the kernel.
fn unsupported_by_fused_paths(call: &Call, kind: ResultKind) -> Option<&'static str> {
    let is_cpu = call.q.device().is_cpu();
    if kind == ResultKind::Weights {
        return Some("fused kernels do not return attention weights");
    }
    if call.options.drops() && call.options.dropout_seed.is_some() && call.sequences.is_some() {
        return Some("PyTorch's generator draws the dropout of packed sequences one by one");
    }
    if call.fully_masked_rows == FullyMaskedRows::Uniform {
        return Some("`FullyMaskedRows::Uniform` is not supported by fused kernels, which skip masked keys");
    }
    if is_cpu && call.q.dtype() == DType::F64 {
        return Some("the CPU kernel computes in f32, and the inputs are F64");
    }
    if is_cpu && kind == ResultKind::Statistics && call.tracks_gradients() {
        return Some("an input is tracked for gradients, which the CPU kernel does not support with statistics");
    }
    if call.scales.is_some() && call.tracks_gradients() {
        return Some("an input is tracked for gradients, which keys and values of 8 bits do not have");
    }
    None
}
