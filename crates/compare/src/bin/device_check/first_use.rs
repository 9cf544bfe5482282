//! The report of the cases that check kernels at their first use on a device, for an issue.

use candle_attention_core::internal::{
    ATTENTION_CASES, METAL_CASES, METAL_ROTATION_CASE, QUANTIZE_CASE, ROTATION_CASE,
};
use candle_attention_cuda::{DeviceChecks, device_name, first_use, kernels_version};
use candle_attention_delta::internal::{CONVOLUTION_CASE, DELTA_BACKWARD_CASE, DELTA_CASE, GATES_CASE};
use candle_attention_modules::base::first_use::{CaseError, FirstUseCase, KERNEL_DTYPES, allowed_error};
use candle_attention_modules::internal::{FIRST_USE_CASES, METAL_CASES as METAL_ROW_CASES};
use candle_core::{DType, Device};

use super::command_line::one_line;

/// Runs every case on a device, prints what came out, and returns whether all passed. A device without kernels has none
/// that could fail.
pub fn report(device: &Device) -> bool {
    let Kernels { version, device: name, checked, cases } = match Kernels::of(device) {
        Ok(kernels) => kernels,
        Err(reason) => {
            println!("no kernels: {reason}");
            return true;
        }
    };
    println!("version: {version}");
    println!("device: {name}");
    println!("system: {}, {}", std::env::consts::OS, std::env::consts::ARCH);
    println!("kernels are checked at their first use: {checked}\n");
    println!("{:42}{:>10}{:>10}{:>10}", "largest error", "f32", "f16", "bf16");
    let mut failures = Vec::new();
    for case in &cases {
        let mut cells = String::new();
        for dtype in KERNEL_DTYPES {
            let outcome = Outcome::of(case, device, dtype);
            cells.push_str(&format!("{:>10}", outcome.cell));
            failures.extend(outcome.failure);
        }
        println!("{:42}{cells}", case.operation);
    }
    println!();
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    let count = cases.len() * KERNEL_DTYPES.len();
    println!("{} cases passed, {} failed", count - failures.len(), failures.len());
    println!("Please paste everything from the version on into an issue of candle-attention.");
    failures.is_empty()
}

/// The result of a case.
struct Outcome {
    /// The entry of the table.
    cell: String,
    /// The fault, if there is one.
    failure: Option<String>,
}

impl Outcome {
    fn of(case: &FirstUseCase, device: &Device, dtype: DType) -> Self {
        let failed = |what: String| Some(format!("{} in {}: {what}", case.operation, dtype.as_str()));
        match case.largest_error(device, dtype) {
            Ok(CaseError { name, error }) => {
                let is_off = error > allowed_error(dtype);
                let failure = if is_off { failed(format!("{name} is off by {error:.1e}")) } else { None };
                Self { cell: format!("{error:.1e}"), failure }
            }
            Err(error) => Self { cell: "error".into(), failure: failed(one_line(&error)) },
        }
    }
}

/// The kernels of a device.
struct Kernels {
    version: String,
    device: String,
    /// Whether the first calls of a program are checked.
    checked: &'static str,
    cases: Vec<FirstUseCase>,
}

impl Kernels {
    /// Returns the kernels of a device, or the reason why there are none.
    fn of(device: &Device) -> Result<Self, String> {
        if device.is_metal() {
            let Some(checks) = candle_attention_metal::first_use(device) else {
                return Err("no Metal kernel is checked in this build and environment".into());
            };
            let (name, version) = (checks.device().to_string(), checks.version().to_string());
            let cases = [METAL_CASES.as_slice(), &METAL_ROW_CASES, &[METAL_ROTATION_CASE]].concat();
            return Ok(Self { version, device: name, checked: "yes, all of them", cases });
        }
        let name = device_name(device).map_err(|reason| reason.to_string())?;
        let checked = match first_use(device) {
            Some(DeviceChecks { have_run: false, .. }) => "yes, nobody has run them on such a device",
            Some(_) => "only new ones, the others have been run on such a device",
            None => "no, the environment turns the checks off",
        };
        let mut cases = ATTENTION_CASES.to_vec();
        cases.extend([DELTA_CASE, DELTA_BACKWARD_CASE, CONVOLUTION_CASE, GATES_CASE, ROTATION_CASE, QUANTIZE_CASE]);
        cases.extend(FIRST_USE_CASES);
        Ok(Self { version: kernels_version(), device: name, checked, cases })
    }
}
