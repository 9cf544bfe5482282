//! The fused CUDA kernels: the conversion of a call to the kernels' description, and of their results to tensors.
//!
//! Nothing here waits for the device or reads from it. Tests run the kernels on tensors of the CPU, by the emulator of
//! the package `candle-attention-cuda`.

mod first_use;
#[cfg(test)]
mod tests;

use std::fmt;

use candle_attention_call::{RequestedGradients, RequestedResults};
use candle_attention_cuda::{CudaAttention, ForwardKernel};
use candle_core::Result;

use super::call::Call;
use super::kernel_call::{KernelCall, check_results};
use super::kernel_graph::{self, requested_gradients, tracks_gradients};
use super::results::Attended;
pub use first_use::ATTENTION_CASES;
#[cfg(test)]
pub use tests::emulator_runs;

/// A call that the CUDA kernels support, in the form that they read.
pub(crate) struct CudaPath {
    attention: CudaAttention,
    /// The kernel of the forward pass, for the plan and for the check at first use.
    kernel: ForwardKernel,
    /// Whether a seed of dropout is still to be drawn.
    draws_seed: bool,
}

impl fmt::Display for CudaPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kernel)
    }
}

impl CudaPath {
    /// Returns the call for the kernels, or the reason why they do not run it.
    pub fn plan(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        let cuda_path = Self::unchecked(call, wanted)?;
        cuda_path.check_known_first_use()?;
        Ok(cuda_path)
    }

    /// Returns the call as [`plan`](Self::plan) does, whether or not the kernels have failed a check.
    fn unchecked(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        check_results(call, wanted, "the CUDA kernels")?;
        let KernelCall { tensors, draws_seed } = KernelCall::new(call)?;
        let attention = CudaAttention::new(tensors).map_err(|reason| reason.to_string())?;
        let kernel = attention.plan().map_err(|reason| reason.to_string())?;
        let cuda_path = Self { attention, kernel, draws_seed };
        if cuda_path.tracks_gradients() {
            let gradients = cuda_path.requested_gradients();
            cuda_path.attention.plan_backward(gradients).map_err(|reason| reason.to_string())?;
        }
        Ok(cuda_path)
    }

    /// Returns the most bytes that the forward pass, and the backward pass of inputs that are tracked for gradients,
    /// allocate besides results.
    pub fn scratch_bytes(&self) -> Option<usize> {
        let forward = self.attention.forward_scratch_bytes().ok()?;
        if !self.tracks_gradients() {
            return Some(forward);
        }
        let backward = self.attention.backward_scratch_bytes(self.requested_gradients()).ok()?;
        Some(forward.max(backward))
    }

    /// Returns whether an input is tracked for gradients.
    fn tracks_gradients(&self) -> bool {
        tracks_gradients(self.attention.call())
    }

    /// Returns which gradients a backward pass computes.
    fn requested_gradients(&self) -> RequestedGradients {
        requested_gradients(self.attention.call())
    }

    /// Returns the requested results.
    pub fn attend(self, wanted: RequestedResults) -> Result<Attended> {
        kernel_graph::attend(self.attention, self.draws_seed, wanted)
    }
}
