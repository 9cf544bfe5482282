//! The cases that check the Metal kernels at their first use: no Mac of ours has run them.

use candle_attention_call::{KvCodeFormat, RequestedResults};
use candle_attention_metal::{MetalKernel, first_use};
use candle_core::{DType, Device, Error, Result};

use super::kernels::MetalKernelCall;
use crate::sdpa::call::Call;
use crate::sdpa::results::Attended;
use crate::sdpa::small_call::SmallCall;
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase};

const BACKWARD: FirstUseCase = new_case("attention on Metal, backward", |device, dtype| {
    SmallCall { has_gradients: true, ..SmallCall::PROMPT }.compare(device, dtype, attend)
});

/// The cases of the forward pass for keys and values that are stored in one way.
struct StoredCases {
    forward: FirstUseCase,
    decode: FirstUseCase,
}

const OF_FLOATS: StoredCases = StoredCases {
    forward: new_case("attention on Metal, forward", |device, dtype| SmallCall::PROMPT.compare(device, dtype, attend)),
    decode: new_case("attention on Metal, decode", |device, dtype| SmallCall::TOKEN.compare(device, dtype, attend)),
};
const OF_8_BITS: StoredCases = StoredCases {
    forward: new_case("attention on Metal, 8 bits, forward", |device, dtype| {
        with_codes(SmallCall::PROMPT, KvCodeFormat::Q8).compare(device, dtype, attend)
    }),
    decode: new_case("attention on Metal, 8 bits, decode", |device, dtype| {
        with_codes(SmallCall::TOKEN, KvCodeFormat::Q8).compare(device, dtype, attend)
    }),
};
const OF_E4M3: StoredCases = StoredCases {
    forward: new_case("attention on Metal, E4M3, forward", |device, dtype| {
        with_codes(SmallCall::PROMPT, KvCodeFormat::E4M3).compare(device, dtype, attend)
    }),
    decode: new_case("attention on Metal, E4M3, decode", |device, dtype| {
        with_codes(SmallCall::TOKEN, KvCodeFormat::E4M3).compare(device, dtype, attend)
    }),
};
const OF_4_BITS: StoredCases = StoredCases {
    forward: new_case("attention on Metal, 4 bits, forward", |device, dtype| {
        with_codes(SmallCall::PROMPT, KvCodeFormat::Q4).compare(device, dtype, attend)
    }),
    decode: new_case("attention on Metal, 4 bits, decode", |device, dtype| {
        with_codes(SmallCall::TOKEN, KvCodeFormat::Q4).compare(device, dtype, attend)
    }),
};
const IN_PAGES: StoredCases = StoredCases {
    forward: new_case("attention on Metal, pages, forward", |device, dtype| {
        SmallCall { in_pages: true, ..SmallCall::PROMPT }.compare(device, dtype, attend)
    }),
    decode: new_case("attention on Metal, pages, decode", |device, dtype| {
        SmallCall { in_pages: true, ..SmallCall::TOKEN }.compare(device, dtype, attend)
    }),
};

/// The cases of the Metal kernels.
pub const METAL_CASES: [FirstUseCase; 11] = [
    OF_FLOATS.forward,
    OF_FLOATS.decode,
    BACKWARD,
    OF_8_BITS.forward,
    OF_8_BITS.decode,
    OF_E4M3.forward,
    OF_E4M3.decode,
    OF_4_BITS.forward,
    OF_4_BITS.decode,
    IN_PAGES.forward,
    IN_PAGES.decode,
];

/// Returns a case of kernels that no GPU has run.
const fn new_case(operation: &'static str, run: fn(&Device, DType) -> Result<Vec<ComparedResult>>) -> FirstUseCase {
    FirstUseCase { operation, is_new: true, run }
}

fn with_codes(call: SmallCall, format: KvCodeFormat) -> SmallCall {
    SmallCall { codes: Some(format), ..call }
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
        let attention = self.attention.call();
        let of_codes = attention.kv_scales.as_ref().map(|scales| match scales.format {
            KvCodeFormat::Q8 => OF_8_BITS,
            KvCodeFormat::E4M3 => OF_E4M3,
            KvCodeFormat::Q4 => OF_4_BITS,
        });
        let of_pages = attention.pages.is_some().then_some(IN_PAGES);
        let is_plain = of_codes.is_none() && of_pages.is_none();
        let of_floats = is_plain.then_some(OF_FLOATS);
        let kernel = self.kernel;
        let of_forward = [of_floats, of_codes, of_pages].into_iter().flatten().map(move |cases| match kernel {
            MetalKernel::Forward => cases.forward,
            MetalKernel::Decode { .. } => cases.decode,
        });
        of_forward.chain(self.tracks_gradients().then_some(BACKWARD))
    }
}
