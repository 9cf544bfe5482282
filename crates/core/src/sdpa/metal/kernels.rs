//! The way of a call to Metal: Candle's operation where it is right, and a kernel of this crate otherwise.

use std::fmt;

use candle_attention_call::RequestedResults;
use candle_attention_metal::{MetalAttention, MetalKernel, is_available};
use candle_core::Result;

use super::MetalCall;
use crate::sdpa::call::Call;
use crate::sdpa::kernel_call::{KernelCall, check_results};
use crate::sdpa::kernel_graph::{self, requested_gradients, tracks_gradients};
use crate::sdpa::results::Attended;

/// A call on Metal with what runs it.
pub(crate) enum MetalPath {
    /// Candle's operation.
    Operation(MetalCall),
    /// A kernel of this crate.
    Kernel(Box<MetalKernelCall>),
}

impl fmt::Display for MetalPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation(call) => write!(f, "{call}"),
            Self::Kernel(call) => write!(f, "{call}"),
        }
    }
}

impl MetalPath {
    /// Checks the kernel of the call at its first use on the device. Candle's operation needs no check.
    ///
    /// # Errors
    /// If the check failed, now or earlier: the sentence says why. It has been logged.
    pub fn check_first_use(&self) -> std::result::Result<(), String> {
        match self {
            Self::Operation(_) => Ok(()),
            Self::Kernel(kernel) => kernel.check_first_use(),
        }
    }

    /// Returns what runs a call, or the reasons why nothing but the reference path does.
    pub fn plan(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        let of_operation = match MetalCall::plan(call, wanted) {
            Ok(operation) => return Ok(Self::Operation(operation)),
            Err(reason) => reason,
        };
        match MetalKernelCall::plan(call, wanted) {
            Ok(kernel) => Ok(Self::Kernel(Box::new(kernel))),
            Err(reason) => Err(format!("{of_operation}, and {reason}")),
        }
    }

    /// Returns whether a kernel runs the call, which reads codes of keys and values. Candle's operation reads none.
    pub fn reads_codes(&self) -> bool {
        matches!(self, Self::Kernel(_))
    }

    /// Returns the requested results.
    pub fn attend(self, call: &Call, wanted: RequestedResults) -> Result<Attended> {
        match self {
            Self::Operation(operation) => operation.output(call).map(Attended::from),
            Self::Kernel(kernel) => kernel.attend(wanted),
        }
    }
}

/// A call that a kernel of this crate supports, in the form that it reads.
pub(crate) struct MetalKernelCall {
    pub(super) attention: MetalAttention,
    pub(super) kernel: MetalKernel,
    /// Whether a seed of dropout is still to be drawn.
    draws_seed: bool,
}

impl fmt::Display for MetalKernelCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kernel)?;
        if self.tracks_gradients() { f.write_str(", and the Metal backward kernels") } else { Ok(()) }
    }
}

impl MetalKernelCall {
    /// Returns the call for the kernels, whether or not they have failed a check, or the reason why they do not support
    /// it.
    pub fn unchecked(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        check_results(call, wanted, "the Metal kernels")?;
        is_available(call.attention.q.device()).map_err(|reason| reason.to_string())?;
        let KernelCall { tensors, draws_seed } = KernelCall::new(call)?;
        let attention = MetalAttention::new(tensors).map_err(|reason| reason.to_string())?;
        let kernel = attention.plan().map_err(|reason| reason.to_string())?;
        let kernel_call = Self { attention, kernel, draws_seed };
        if kernel_call.tracks_gradients() {
            let gradients = requested_gradients(kernel_call.attention.call());
            kernel_call.attention.plan_backward(gradients).map_err(|reason| reason.to_string())?;
        }
        Ok(kernel_call)
    }

    /// Returns whether an input is tracked for gradients.
    pub(super) fn tracks_gradients(&self) -> bool {
        tracks_gradients(self.attention.call())
    }

    /// Returns the requested results.
    pub fn attend(self, wanted: RequestedResults) -> Result<Attended> {
        kernel_graph::attend(self.attention, self.draws_seed, wanted)
    }
}
