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
const DECODE: FirstUseCase = FirstUseCase { operation: "attention, decode", is_new: false, run: decode };
const BACKWARD: FirstUseCase = FirstUseCase { operation: "attention, backward", is_new: false, run: backward };

/// The cases of keys and values that are floats, or in a format of codes.
struct ForwardCases {
    forward: FirstUseCase,
    decode: FirstUseCase,
}

const OF_8_BITS: ForwardCases = ForwardCases {
    forward: FirstUseCase {
        operation: "attention over keys of 8 bits, forward",
        is_new: false,
        run: |device, dtype| with_codes(SmallCall::PROMPT, KvCodeFormat::Q8).compare(device, dtype, attend),
    },
    decode: FirstUseCase {
        operation: "attention over keys of 8 bits, decode",
        is_new: false,
        run: |device, dtype| with_codes(SmallCall::TOKEN, KvCodeFormat::Q8).compare(device, dtype, attend),
    },
};
const OF_E4M3: ForwardCases = ForwardCases {
    forward: FirstUseCase {
        operation: "attention over keys of E4M3, forward",
        is_new: true,
        run: |device, dtype| with_codes(SmallCall::PROMPT, KvCodeFormat::E4M3).compare(device, dtype, attend),
    },
    decode: FirstUseCase {
        operation: "attention over keys of E4M3, decode",
        is_new: true,
        run: |device, dtype| with_codes(SmallCall::TOKEN, KvCodeFormat::E4M3).compare(device, dtype, attend),
    },
};
const OF_4_BITS: ForwardCases = ForwardCases {
    forward: FirstUseCase {
        operation: "attention over keys of 4 bits, forward",
        is_new: true,
        run: |device, dtype| with_codes(SmallCall::PROMPT, KvCodeFormat::Q4).compare(device, dtype, attend),
    },
    decode: FirstUseCase {
        operation: "attention over keys of 4 bits, decode",
        is_new: true,
        run: |device, dtype| with_codes(SmallCall::TOKEN, KvCodeFormat::Q4).compare(device, dtype, attend),
    },
};

/// The cases of attention.
pub const ATTENTION_CASES: [FirstUseCase; 9] = [
    FORWARD,
    OF_8_BITS.forward,
    OF_E4M3.forward,
    OF_4_BITS.forward,
    DECODE,
    OF_8_BITS.decode,
    OF_E4M3.decode,
    OF_4_BITS.decode,
    BACKWARD,
];

fn with_codes(call: SmallCall, format: KvCodeFormat) -> SmallCall {
    SmallCall { codes: Some(format), ..call }
}

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
        let ForwardCases { forward, decode } =
            match self.attention.call().kv_scales.as_ref().map(|scales| scales.format) {
                None => ForwardCases { forward: FORWARD, decode: DECODE },
                Some(KvCodeFormat::Q8) => OF_8_BITS,
                Some(KvCodeFormat::E4M3) => OF_E4M3,
                Some(KvCodeFormat::Q4) => OF_4_BITS,
            };
        let of_forward = match self.kernel {
            ForwardKernel::Forward => forward,
            ForwardKernel::Decode { .. } => decode,
        };
        let of_backward = self.tracks_gradients().then_some(BACKWARD);
        std::iter::once(of_forward).chain(of_backward)
    }
}
