//! The choice of the backend that runs a call, and the reason for it.

use std::fmt;

use candle_attention_call::RequestedResults;
use candle_core::{DType, Device, Error, Result, bail};

use super::call::Call;
use super::cpu;
use super::cuda::CudaPath;
use super::dropout::DropoutDraw;
use super::listed::ListedKernel;
use super::metal::MetalPath;
use super::options::Backend;
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
    /// The bytes of device memory that the CUDA kernels of the call allocate besides results: in the forward pass, or
    /// in the backward pass if an input is tracked for gradients and that needs more. `None` for other paths.
    pub scratch_bytes: Option<usize>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.backend, self.reason)
    }
}

impl Plan {
    fn fused(reason: String) -> Self {
        Self { backend: Backend::Fused, reason, scratch_bytes: None }
    }
}

/// The path that runs a call.
pub(crate) enum Choice {
    Reference {
        reason: String,
    },
    Cpu(InstructionSet),
    /// A kernel over listed keys.
    Listed(ListedKernel),
    Cuda(Box<CudaPath>),
    Metal(MetalPath),
}

impl Choice {
    /// Chooses the path of a call.
    ///
    /// # Errors
    /// If [`Backend::Fused`] is requested and no fused path supports the call.
    pub(super) fn new(call: &Call, wanted: RequestedResults) -> Result<Self> {
        if call.backend != Backend::Reference && !call.attention.keys.lists.is_empty() {
            return Self::of_lists(call);
        }
        match Self::fused(call, wanted)? {
            Ok(choice) => Ok(choice),
            Err(reason) if call.backend == Backend::Fused => bail!("[{}] no fused path: {reason}", call.op),
            Err(reason) => Ok(Self::Reference { reason }),
        }
    }

    /// Chooses the path of a call with lists of keys that are not a boolean mask.
    fn of_lists(call: &Call) -> Result<Self> {
        match &call.lists_obstacle {
            None => Ok(Self::Listed(match call.attention.q.device() {
                Device::Cpu => ListedKernel::Cpu(instruction_set(call)?),
                Device::Cuda(_) => ListedKernel::Cuda,
                Device::Metal(_) => ListedKernel::Metal,
            })),
            Some(reason) if call.backend == Backend::Fused => bail!("[{}] no fused path: {reason}", call.op),
            Some(reason) => Ok(Self::Reference { reason: format!("no kernel reads the key lists: {reason}") }),
        }
    }

    /// Returns the kernel that runs a call, with keys in pages in place, or the reason why there is none.
    ///
    /// # Errors
    /// If the processor lacks the requested instruction set.
    pub(super) fn fused(call: &Call, wanted: RequestedResults) -> Result<std::result::Result<Self, String>> {
        if call.backend == Backend::Reference {
            return Ok(Err("requested".into()));
        }
        if let Some(reason) = unsupported_by_fused_paths(call, wanted) {
            return Ok(Err(reason.into()));
        }
        Ok(match call.attention.q.device() {
            Device::Cpu => {
                let pages = call.attention.keys.pages.as_ref();
                match pages.and_then(|_| cpu::reason_to_copy(call, wanted)) {
                    Some(reason) => Err(reason.into()),
                    None => Ok(Self::Cpu(instruction_set(call)?)),
                }
            }
            Device::Cuda(_) => CudaPath::plan(call, wanted).map(|cuda_path| Self::Cuda(Box::new(cuda_path))),
            Device::Metal(_) => MetalPath::plan(call, wanted).map(Self::Metal),
        })
    }

    /// Returns whether a kernel runs the call that reads codes of keys and values.
    pub fn reads_codes(&self) -> bool {
        match self {
            Self::Cpu(_) | Self::Listed(_) | Self::Cuda(_) => true,
            Self::Metal(metal_path) => metal_path.reads_codes(),
            Self::Reference { .. } => false,
        }
    }

    /// Returns the choice in the form that callers read.
    pub(super) fn plan(self) -> Plan {
        match self {
            Self::Reference { reason } => Plan { backend: Backend::Reference, reason, scratch_bytes: None },
            Self::Cpu(instruction_set) => Plan::fused(format!("the CPU kernel, {instruction_set}")),
            Self::Listed(ListedKernel::Cpu(instruction_set)) => {
                Plan::fused(format!("the CPU kernel over the listed keys, {instruction_set}"))
            }
            Self::Listed(ListedKernel::Cuda) => Plan::fused("a CUDA kernel over the listed keys".into()),
            Self::Listed(ListedKernel::Metal) => Plan::fused("a Metal kernel over the listed keys".into()),
            Self::Cuda(cuda_path) => {
                Plan { scratch_bytes: cuda_path.scratch_bytes(), ..Plan::fused(cuda_path.to_string()) }
            }
            Self::Metal(metal_path) => Plan::fused(metal_path.to_string()),
        }
    }
}

/// Returns the instruction set that the CPU kernel uses for a call.
fn instruction_set(call: &Call) -> Result<InstructionSet> {
    InstructionSet::choose(call.instruction_set, call.attention.q.dtype() == DType::BF16)
        .map_err(|error| Error::msg(format!("[{}] {error}", call.op)))
}

/// Returns the reason why no fused path supports a call, if there is one that does not depend on the kernel.
fn unsupported_by_fused_paths(call: &Call, wanted: RequestedResults) -> Option<&'static str> {
    let is_cpu = call.attention.q.device().is_cpu();
    if wanted.weights {
        return Some("fused kernels do not return attention weights");
    }
    if call.dropout.as_ref().is_some_and(DropoutDraw::is_torch) && call.sequences().is_some() {
        return Some("PyTorch's generator draws the dropout of packed sequences one by one");
    }
    if call.fully_masked_rows == FullyMaskedRows::Uniform {
        return Some("`FullyMaskedRows::Uniform` is not supported by fused kernels, which skip masked keys");
    }
    if is_cpu && call.attention.q.dtype() == DType::F64 {
        return Some("the CPU kernel computes in f32, and the inputs are F64");
    }
    if is_cpu && wanted.statistics.is_some() && call.tracks_gradients() {
        return Some("an input is tracked for gradients, which the CPU kernel does not support with statistics");
    }
    if call.attention.kv_scales.is_some() && call.tracks_gradients() {
        return Some("an input is tracked for gradients, which keys and values that are codes do not have");
    }
    None
}
