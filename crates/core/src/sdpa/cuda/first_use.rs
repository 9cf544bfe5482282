//! The cases that check the kernels at their first use on a device on which nobody has run them.

use candle_attention_call::{KvCodeFormat, RequestedResults};
use candle_attention_cuda::ForwardKernel;
use candle_core::{DType, Device, Error, Result};

use super::super::call::Call;
use super::super::results::Attended;
use super::super::small_call::SmallCall;
use super::CudaPath;
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase};

const FORWARD: FirstUseCase = FirstUseCase { operation: "attention, forward", is_new: false, run: forward };
const FORWARD_OVER_CODES: FirstUseCase =
    FirstUseCase { operation: "attention over keys of 8 bits, forward", is_new: false, run: forward_over_codes };
const DECODE: FirstUseCase = FirstUseCase { operation: "attention, decode", is_new: false, run: decode };
const DECODE_OVER_CODES: FirstUseCase =
    FirstUseCase { operation: "attention over keys of 8 bits, decode", is_new: false, run: decode_over_codes };
const BACKWARD: FirstUseCase = FirstUseCase { operation: "attention, backward", is_new: false, run: backward };

/// The cases of attention.
pub const ATTENTION_CASES: [FirstUseCase; 5] = [FORWARD, FORWARD_OVER_CODES, DECODE, DECODE_OVER_CODES, BACKWARD];

fn forward(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall::PROMPT.compare(device, dtype, attend)
}

fn forward_over_codes(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall { codes: Some(KvCodeFormat::Q8), ..SmallCall::PROMPT }.compare(device, dtype, attend)
}

fn decode(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall::TOKEN.compare(device, dtype, attend)
}

fn decode_over_codes(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall { codes: Some(KvCodeFormat::Q8), ..SmallCall::TOKEN }.compare(device, dtype, attend)
}

fn backward(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    SmallCall { has_gradients: true, ..SmallCall::PROMPT }.compare(device, dtype, attend)
}

/// Runs a call on the kernels, whether or not they passed a check.
fn attend(call: &Call, wanted: RequestedResults) -> Result<Attended> {
    CudaPath::unchecked(call, wanted).map_err(Error::msg)?.attend(wanted)
}

impl CudaPath {
    /// Checks the kernels of the call, if nobody has run them on the device: the first call of each kind runs a case.
    ///
    /// # Errors
    /// If a case failed, now or earlier: the sentence says why. It has been logged.
    pub fn check_first_use(&self) -> std::result::Result<(), String> {
        let q = &self.attention.call().q;
        self.first_use_cases().try_for_each(|case| case.check(q.device(), q.dtype()))
    }

    /// Checks that no case of the call's kernels has failed. Nothing runs.
    ///
    /// # Errors
    /// If one has.
    pub(super) fn check_known_first_use(&self) -> std::result::Result<(), String> {
        let q = &self.attention.call().q;
        self.first_use_cases().try_for_each(|case| case.check_known(q.device(), q.dtype()))
    }

    /// Returns the cases of the call's kernels.
    fn first_use_cases(&self) -> impl Iterator<Item = FirstUseCase> {
        let reads_codes = self.attention.call().kv_scales.is_some();
        let of_forward = match (self.kernel, reads_codes) {
            (ForwardKernel::Forward, false) => FORWARD,
            (ForwardKernel::Forward, true) => FORWARD_OVER_CODES,
            (ForwardKernel::Decode { .. }, false) => DECODE,
            (ForwardKernel::Decode { .. }, true) => DECODE_OVER_CODES,
        };
        let of_backward = self.tracks_gradients().then_some(BACKWARD);
        std::iter::once(of_forward).chain(of_backward)
    }
}
