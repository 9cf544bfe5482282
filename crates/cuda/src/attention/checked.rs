//! A call whose tensors fit together.

use candle_attention_call::DropoutMask;
use candle_core::Tensor;

use super::call::CudaCall;
use super::checks::CallSizes;
use crate::unsupported::Unsupported;

/// An attention call whose tensors fit together, for the kernels.
#[derive(Debug, Clone)]
pub struct CudaAttention {
    pub(super) call: CudaCall,
    pub(super) sizes: CallSizes,
}

impl CudaAttention {
    /// Checks a call.
    ///
    /// # Errors
    /// If its tensors do not fit together, or the kernels do not read them: the sentence says why.
    pub fn new(call: CudaCall) -> Result<Self, Unsupported> {
        let sizes = CallSizes::of(&call)?;
        Ok(Self { call, sizes })
    }

    /// Returns the call.
    pub fn call(&self) -> &CudaCall {
        &self.call
    }

    /// Returns the sizes of the call.
    #[doc(hidden)]
    pub fn sizes(&self) -> &CallSizes {
        &self.sizes
    }

    /// Sets the seed of dropout, u32 (2,) on the device, if weights are dropped.
    pub fn set_dropout_seed(&mut self, seed: Tensor) {
        if let Some(dropout) = &mut self.call.scores.dropout {
            dropout.mask = DropoutMask::PhiloxOnDevice(seed);
        }
    }
}
