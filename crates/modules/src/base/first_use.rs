//! Cases that check kernels at their first use on a device on which nobody has run them: the same operation by the
//! kernels and by the CPU, with small fixed inputs.

use std::sync::Arc;

use candle_attention_device::{CaseFailure, FirstUse, KernelKind};
use candle_core::{DType, Device, Result, Tensor, Var, bail};

/// The dtypes that kernels for GPUs compute in.
pub const KERNEL_DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A case for each dtype of an operation.
#[derive(Debug, Clone, Copy)]
pub struct FirstUseCase {
    /// The computation, for logs and reports.
    pub operation: &'static str,
    /// Whether no GPU has run these kernels yet. Then they are checked on every device.
    pub is_new: bool,
    /// Runs the operation by the kernels of a device, whether or not they passed a check, and by the CPU.
    pub run: fn(&Device, DType) -> Result<Vec<ComparedResult>>,
}

/// A result or a gradient of a case.
#[derive(Debug, Clone)]
pub struct ComparedResult {
    /// The name of the result.
    pub name: &'static str,
    /// The numbers of the kernels.
    pub found: Tensor,
    /// The numbers of the CPU.
    pub expected: Tensor,
}

/// The largest error of a case.
#[derive(Debug, Clone, Copy)]
pub struct CaseError {
    /// The result that has it.
    pub name: &'static str,
    /// The error, as a part of the largest expected number. It is infinite for NaN and for another shape.
    pub error: f64,
}

impl FirstUseCase {
    /// Checks the kernels for a dtype, if nobody has run them on the device: the case runs in the first call of the
    /// first process. A failure is logged once.
    ///
    /// # Errors
    /// If the case failed, now or earlier: the sentence says why.
    pub fn check(&self, device: &Device, dtype: DType) -> std::result::Result<(), String> {
        self.check_by(self.checks_on(device), device, dtype)
    }

    /// Checks the kernels as [`check`](Self::check) does, by the checks of another kind of device than CUDA.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_by(
        &self,
        checks: Option<Arc<FirstUse>>,
        device: &Device,
        dtype: DType,
    ) -> std::result::Result<(), String> {
        let Some(checks) = checks else { return Ok(()) };
        checks.check(self.kind(dtype), || self.outcome(device, dtype)).map_err(|failure| failure.reason)
    }

    /// Checks that the kernels for a dtype have not failed their check. Nothing runs.
    ///
    /// # Errors
    /// If they have.
    pub fn check_known(&self, device: &Device, dtype: DType) -> std::result::Result<(), String> {
        self.check_known_by(self.checks_on(device), dtype)
    }

    /// Checks the kernels as [`check_known`](Self::check_known) does, by the checks of another kind of device.
    ///
    /// # Errors
    /// As [`check_known`](Self::check_known).
    pub fn check_known_by(&self, checks: Option<Arc<FirstUse>>, dtype: DType) -> std::result::Result<(), String> {
        let failure = checks.and_then(|known| known.known_failure(self.kind(dtype)));
        failure.map_or(Ok(()), |known| Err(known.reason))
    }

    /// Runs the case, and returns its largest error.
    ///
    /// # Errors
    /// If it does not run to its end.
    pub fn largest_error(&self, device: &Device, dtype: DType) -> Result<CaseError> {
        let mut largest = CaseError { name: "no result", error: 0.0 };
        for ComparedResult { name, found, expected } in (self.run)(device, dtype)? {
            let error = relative_error(&found, &expected)?;
            // No error is NaN.
            if error >= largest.error {
                largest = CaseError { name, error };
            }
        }
        Ok(largest)
    }

    /// Returns the checks of the device, if the kernels have to be checked there.
    fn checks_on(&self, device: &Device) -> Option<Arc<FirstUse>> {
        let of_device = candle_attention_cuda::first_use(device)?;
        (self.is_new || !of_device.have_run).then_some(of_device.checks)
    }

    fn kind(&self, dtype: DType) -> KernelKind {
        KernelKind { operation: self.operation, element: dtype.as_str() }
    }

    fn outcome(&self, device: &Device, dtype: DType) -> std::result::Result<(), CaseFailure> {
        let allowed = allowed_error(dtype);
        match self.largest_error(device, dtype) {
            Ok(CaseError { error, .. }) if error <= allowed => Ok(()),
            Ok(CaseError { name, error }) => Err(CaseFailure::Differs(format!(
                "{name} is off by {error:.1e} of the largest number, expected at most {allowed:.0e}"
            ))),
            Err(error) => Err(CaseFailure::Stopped(error.to_string().lines().next().unwrap_or_default().into())),
        }
    }
}

/// Returns the largest error that a case allows, as a part of the largest number: f32 sums in any order; with 16 bits,
/// weights and results are rounded.
pub fn allowed_error(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 5e-3,
        DType::BF16 => 3e-2,
        _ => 1e-4,
    }
}

/// Returns the largest difference of two tensors, as a part of the largest expected number.
fn relative_error(found: &Tensor, expected: &Tensor) -> Result<f64> {
    if found.dims() != expected.dims() {
        return Ok(f64::INFINITY);
    }
    let numbers =
        |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let mut largest = f64::MIN_POSITIVE;
    let mut difference = 0f64;
    for (own, other) in numbers(found)?.into_iter().zip(numbers(expected)?) {
        largest = largest.max(other.abs());
        let gap = (own - other).abs();
        difference = difference.max(if gap.is_nan() { f64::INFINITY } else { gap });
    }
    Ok(if difference.is_infinite() { f64::INFINITY } else { difference / largest })
}

/// Returns numbers from -1.5 to 1.5 on the CPU that look random and are the same in every call, rounded to a dtype.
/// Each seed draws different numbers.
pub fn case_numbers(shape: &[usize], seed: u64, dtype: DType) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        // Splitmix64 of Steele, Lea and Flood.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) >> 40
    };
    let count: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..count).map(|_| next() as f32 / (1u64 << 23) as f32 * 1.5 - 1.5).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// A result with the gradients of the inputs of a case, for a loss in which each number has another weight.
pub struct ResultWithGradients<'a> {
    /// The names of the inputs.
    pub names: &'a [&'static str],
    /// The inputs of the kernels.
    pub found: &'a [Var],
    /// Equal inputs on the CPU.
    pub expected: &'a [Var],
}

impl ResultWithGradients<'_> {
    /// Returns the output and the gradients of all inputs for the outputs of both sides.
    ///
    /// # Errors
    /// If an input has no gradient.
    pub fn compare(&self, found: &Tensor, expected: &Tensor) -> Result<Vec<ComparedResult>> {
        let found_gradients = gradients(found, self.found)?;
        let expected_gradients = gradients(expected, self.expected)?;
        let mut compared =
            vec![ComparedResult { name: "the output", found: found.detach(), expected: expected.detach() }];
        for ((&name, own), other) in self.names.iter().zip(found_gradients).zip(expected_gradients) {
            compared.push(ComparedResult { name, found: own, expected: other });
        }
        Ok(compared)
    }
}

/// Returns the gradients of inputs for the sum of the outputs times fixed numbers.
fn gradients(output: &Tensor, inputs: &[Var]) -> Result<Vec<Tensor>> {
    let weights = case_numbers(output.dims(), 99, DType::F32)?.to_device(output.device())?;
    let loss = (output.to_dtype(DType::F32)? * weights)?.sum_all()?;
    let store = loss.backward()?;
    let mut found = Vec::with_capacity(inputs.len());
    for input in inputs {
        let Some(gradient) = store.get(input) else { bail!("an input of the case has no gradient") };
        found.push(gradient.clone());
    }
    Ok(found)
}

/// Returns variables with the numbers of tensors on a device.
///
/// # Errors
/// If memory is short.
pub fn variables_on(device: &Device, tensors: &[Tensor]) -> Result<Vec<Var>> {
    tensors.iter().map(|tensor| Var::from_tensor(&tensor.to_device(device)?)).collect()
}

/// Returns variables with the numbers of tensors in another dtype.
///
/// # Errors
/// If memory is short.
pub fn variables_in(dtype: DType, tensors: &[Tensor]) -> Result<Vec<Var>> {
    tensors.iter().map(|tensor| Var::from_tensor(&tensor.to_dtype(dtype)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(found: &[f32], expected: &[f32]) -> f64 {
        let tensor = |numbers: &[f32]| Tensor::new(numbers, &Device::Cpu).expect("a tensor");
        relative_error(&tensor(found), &tensor(expected)).expect("an error")
    }

    #[test]
    fn first_use_error_is_relative_to_the_largest_number_and_infinite_for_nan() {
        assert_eq!(error_of(&[1.0, -4.0], &[2.0, -4.0]), 0.25);
        assert_eq!(error_of(&[1.0, f32::NAN], &[1.0, 2.0]), f64::INFINITY);
        assert_eq!(error_of(&[1.0], &[f32::INFINITY]), f64::INFINITY);
        assert_eq!(error_of(&[1.0], &[1.0, 2.0]), f64::INFINITY);
        assert_eq!(error_of(&[0.0], &[0.0]), 0.0);
    }

    #[test]
    fn first_use_numbers_are_the_same_in_each_call_and_cover_their_range() -> Result<()> {
        let numbers = |seed| case_numbers(&[2000], seed, DType::F32)?.to_vec1::<f32>();
        assert_eq!(numbers(1)?, numbers(1)?);
        assert_ne!(numbers(1)?, numbers(2)?);
        let sorted = {
            let mut sorted = numbers(3)?;
            sorted.sort_by(f32::total_cmp);
            sorted
        };
        assert!(sorted[0] >= -1.5 && sorted[0] < -1.4 && sorted[1999] <= 1.5 && sorted[1999] > 1.4);
        assert!(sorted[1000].abs() < 0.2);
        Ok(())
    }
}
