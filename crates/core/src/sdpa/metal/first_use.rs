//! The cases that check the Metal kernels at their first use: no Mac of ours has run them.

use candle_attention_call::RequestedResults;
use candle_attention_metal::{MetalKernel, first_use};
use candle_core::{DType, Device, Error, Result};

use super::kernels::MetalKernelCall;
use crate::sdpa::call::Call;
use crate::sdpa::results::Attended;
use crate::sdpa::small_call::SmallCall;
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase};

const FORWARD: FirstUseCase = FirstUseCase { operation: "attention on Metal, forward", is_new: true, run: forward };
const DECODE: FirstUseCase = FirstUseCase { operation: "attention on Metal, decode", is_new: true, run: decode };

const BACKWARD: FirstUseCase = FirstUseCase { operation: "attention on Metal, backward", is_new: true, run: backward };

/// The cases of the Metal kernels.
pub const METAL_CASES: [FirstUseCase; 3] = [FORWARD, DECODE, BACKWARD];

fn forward(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall::PROMPT.compare(device, dtype, attend)
}

fn decode(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall::TOKEN.compare(device, dtype, attend)
}

fn backward(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall { has_gradients: true, ..SmallCall::PROMPT }.compare(device, dtype, attend)
}

/// Runs a call on the kernels, whether or not they passed a check.
fn attend(call: &Call, wanted: RequestedResults) -> Result<Attended> {
    MetalKernelCall::unchecked(call, wanted).map_err(Error::msg)?.attend(wanted)
}

impl MetalKernelCall {
    /// Returns the call for the kernels, or the reason why they do not run it.
    pub fn plan(call: &Call, wanted: RequestedResults) -> std::result::Result<Self, String> {
        let kernel_call = Self::unchecked(call, wanted)?;
        let q = &call.attention.q;
        let known = first_use(q.device());
        kernel_call.first_use_cases().try_for_each(|case| case.check_known_by(known.clone(), q.dtype()))?;
        Ok(kernel_call)
    }

    /// Checks the kernels of a call: the first call of each kind runs a case.
    ///
    /// # Errors
    /// If the case failed, now or earlier: the sentence says why. It has been logged.
    pub fn check_first_use(&self) -> std::result::Result<(), String> {
        let q = &self.attention.call().q;
        let checks = first_use(q.device());
        self.first_use_cases().try_for_each(|case| case.check_by(checks.clone(), q.device(), q.dtype()))
    }

    /// Returns the cases of the call's kernels.
    fn first_use_cases(&self) -> impl Iterator<Item = FirstUseCase> {
        let of_forward = match self.kernel {
            MetalKernel::Forward => FORWARD,
            MetalKernel::Decode { .. } => DECODE,
        };
        std::iter::once(of_forward).chain(self.is_trained.then_some(BACKWARD))
    }
}
