//! The choice of the kernels of a call.

use std::fmt;

use candle_core::Device;

use super::call::{AttentionCall, RequestedGradients};
use crate::device::KernelDevice;
use crate::unsupported::Unsupported;

/// The kernel of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Blocks of queries, each of which reads the keys of its head.
    Forward,
    /// Few queries to many keys, which are split over blocks.
    Decode {
        /// The parts of the keys.
        splits: usize,
    },
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward => f.write_str("the CUDA forward kernel"),
            Self::Decode { splits: 1 } => f.write_str("the CUDA decode kernel"),
            Self::Decode { splits } => write!(f, "the CUDA decode kernel with the keys in {splits} parts"),
        }
    }
}

/// The kernels of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardKernel {
    /// One kernel for the gradients of queries, keys and values.
    Fused,
    /// A kernel for the gradients of queries, and one for those of keys and values.
    Separate,
}

impl fmt::Display for BackwardKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fused => "the fused CUDA backward kernel",
            Self::Separate => "two CUDA backward kernels",
        })
    }
}

/// Checks that a device runs kernels: its kind, its compute capability, and that NVRTC is there.
///
/// # Errors
/// If it does not: the sentence says why.
pub fn is_available(device: &Device) -> Result<(), Unsupported> {
    KernelDevice::of(device).map(|_| ())
}

impl AttentionCall {
    /// Returns the kernel of the forward pass. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If no kernel runs the call: the sentence says why.
    pub fn plan(&self) -> Result<Kernel, Unsupported> {
        Err(Unsupported::new("the kernels are not in place yet"))
    }

    /// Returns the kernels of the backward pass.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), and for keys and values of 8 bits, which have no gradients.
    pub fn plan_backward(&self, _wanted: RequestedGradients) -> Result<BackwardKernel, Unsupported> {
        Err(Unsupported::new("the kernels are not in place yet"))
    }
}
