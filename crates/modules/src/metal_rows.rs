//! Operations over rows by their Metal kernels, of which nothing is tracked for gradients.

use candle_attention_cuda::Activation;
use candle_attention_metal::{MetalRows, first_use};
use candle_core::{DType, Device, Result, Tensor};

use crate::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use crate::base::rowwise::with_contiguous_rows;
use crate::cuda_gate::{check_shapes, gate_call};

/// The case of values times activated gates.
pub(crate) const METAL_GATE_CASE: FirstUseCase =
    FirstUseCase { operation: "gate on Metal", is_new: true, run: gate_case };

/// Returns the output of a call, unless no kernel runs it, or the kernels of the case failed their check.
pub fn run_checked(call: &MetalRows, case: &FirstUseCase, xs: &Tensor) -> Option<Result<Tensor>> {
    call.plan().ok()?;
    case.check_by(first_use(xs.device()), xs.device(), xs.dtype()).ok()?;
    Some(call.forward())
}

/// Returns `activation(gates) · values` of at most four dimensions, unless no kernel computes it. The gates have the
/// shape of the values, or the last dimension 1.
pub(crate) fn gate(gates: &Tensor, values: &Tensor, activation: Activation) -> Option<Result<Tensor>> {
    if gates.track_op() || values.track_op() {
        return None;
    }
    check_shapes(gates, values).ok()?;
    let call = metal_call(gates, values, activation).ok()?;
    let product = run_checked(&call, &METAL_GATE_CASE, values)?;
    Some(product.and_then(|rows| rows.reshape(values.shape())))
}

fn metal_call(gates: &Tensor, values: &Tensor, activation: Activation) -> Result<MetalRows> {
    gate_call(&with_contiguous_rows(gates)?, &with_contiguous_rows(values)?, activation).map(MetalRows::Gate)
}

/// Computes values times gates of each activation by the kernel and by the CPU.
fn gate_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let gates = case_numbers(&[2, 3, 3, 80], 1, dtype)?;
    let values = case_numbers(&[2, 3, 3, 80], 2, dtype)?;
    let (wide_gates, wide_values) = (gates.to_dtype(DType::F64)?, values.to_dtype(DType::F64)?);
    let (own_gates, own_values) = (gates.to_device(device)?, values.to_device(device)?);
    let mut compared = Vec::new();
    for (name, activation, factors) in [
        ("the values times SiLU", Activation::Silu, wide_gates.silu()?),
        ("the values times GELU", Activation::Gelu, wide_gates.gelu_erf()?),
        ("the values times GELU by tanh", Activation::GeluTanh, wide_gates.gelu()?),
        ("the values times a sigmoid", Activation::Sigmoid, candle_nn::ops::sigmoid(&wide_gates)?),
        ("the values times softplus", Activation::Softplus, wide_gates.exp()?.affine(1.0, 1.0)?.log()?),
    ] {
        let found = metal_call(&own_gates, &own_values, activation)?.forward()?;
        compared.push(ComparedResult { name, found, expected: factors.mul(&wide_values)? });
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use candle_attention_cuda::{NewDevice, SourceFault, on_new_device};
    use candle_attention_metal::{is_available, launches_of_thread};

    use super::*;
    use crate::base::first_use::{CaseError, allowed_error};
    use crate::internal::METAL_CASES;

    /// Returns whether the emulator runs kernels, and prints why not.
    fn emulator_runs() -> bool {
        let outcome = is_available(&Device::Cpu);
        if let Err(reason) = &outcome {
            println!("skipped: {reason}");
        }
        outcome.is_ok()
    }

    #[test]
    fn metal_kernels_over_rows_match_cpu_in_cases_of_first_use() -> Result<()> {
        if !emulator_runs() {
            return Ok(());
        }
        for case in METAL_CASES {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let before = launches_of_thread();
                let CaseError { name, error } = case.largest_error(&Device::Cpu, dtype)?;
                assert!(error <= allowed_error(dtype), "{}, {dtype:?}, {name}: {error:e}", case.operation);
                assert!(launches_of_thread() > before, "{} runs on a kernel", case.operation);
            }
        }
        Ok(())
    }

    #[test]
    fn metal_kernel_over_rows_that_is_wrong_fails_its_check() -> Result<()> {
        if !emulator_runs() {
            return Ok(());
        }
        let folder = tempfile::tempdir()?;
        for (case, file, text, replacement) in [
            (METAL_CASES[0], "norm.metal", "variance + arguments.epsilon", "variance + 1.0f"),
            (METAL_CASES[1], "gate.metal", "gates + c * arguments.gate_column_stride", "gates"),
            (METAL_CASES[2], "linear_pairs.metal", "if (arguments.residuals) y +=", "if (arguments.residuals) y -="),
            (METAL_CASES[3], "linear_codes.metal", "load_global(table + code)", "load_global(table + code / 2)"),
            (METAL_CASES[4], "gated_norm.metal", "gates + c)).value", "gates + c / 2 * 2)).value"),
            (METAL_CASES[3], "code_numbers.cuh", "row * groups + group;", "row * groups + group / 2 * 2;"),
        ] {
            let wrong = NewDevice::new(file, folder.path()).with_fault(SourceFault { file, text, replacement });
            let largest = on_new_device(&wrong, || case.largest_error(&Device::Cpu, DType::F32))?;
            assert!(largest.error > allowed_error(DType::F32), "{file}: {}", largest.error);
        }
        Ok(())
    }
}
