//! The cases that check kernels at their first use.

use candle_core::{DType, Device, Result};

use crate::base::first_use::{CaseError, allowed_error};
use crate::internal::FIRST_USE_CASES;

#[test]
fn first_use_cases_of_norms_gates_and_linear_layers_pass_on_the_emulator() -> Result<()> {
    if let Err(reason) = candle_attention_cuda::is_available(&Device::Cpu) {
        println!("skipped: {reason}");
        return Ok(());
    }
    for case in FIRST_USE_CASES {
        let CaseError { name, error } = case.largest_error(&Device::Cpu, DType::BF16)?;
        let allowed = allowed_error(DType::BF16);
        assert!(error <= allowed / 2.0, "{}: {name} is off by {error:e}, of {allowed:e}", case.operation);
    }
    Ok(())
}
