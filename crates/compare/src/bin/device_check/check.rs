//! A call on a device, compared with the reference path on the CPU in f64.

use candle_attention::{
    Backend, Plan, plan, scaled_dot_product_attention, scaled_dot_product_attention_with_lse,
    scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor, Var, bail};

use super::case::{Case, Options, Want};
use super::operands::{Operands, Qkv};

pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Returns the largest error allowed, relative to the largest entry. f32: sums of products in any order. f16 and bf16:
/// a fused operation may round the weights to the 11 and 8 bits of the dtype before it multiplies the values, and has
/// to round the output.
pub fn allowed(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 5e-3,
        DType::BF16 => 3e-2,
        _ => 1e-4,
    }
}

/// The outcome of a check.
pub struct Checked {
    /// The largest error, relative to the largest entry.
    pub error: f64,
    /// The plan of the call, if it can be planned.
    pub plan: Option<Plan>,
}

/// Compares a call on a device with the reference path on the CPU in f64.
///
/// # Errors
/// If the call fails, on the device or on the CPU, and if two backward passes over the same numbers differ in a bit.
pub fn check(case: &Case, dtype: DType, device: &Device) -> Result<Checked> {
    let operands = case.operands(dtype)?;
    let expected = run(case, &operands.map(|tensor| tensor.to_dtype(DType::F64))?, Backend::Reference)?;
    let here = operands.map(|tensor| tensor.to_device(device))?;
    // `plan` is about the output alone.
    let mut found_plan = None;
    if case.want == Want::Output {
        let Qkv { q, k, v } = here.views(case.layout)?;
        found_plan = Some(plan(&q, &k, &v, &case.mask(&here)?, &case.options(&here))?);
    }
    let found = run(case, &here, Backend::Auto)?;
    if matches!(case.want, Want::Gradients | Want::GradientsWithLogSumExp) {
        for (first, second) in found.iter().zip(run(case, &here, Backend::Auto)?) {
            if relative_error(first, &second)? != 0.0 {
                bail!("two backward passes over the same numbers differ")
            }
        }
    }
    Ok(Checked { error: largest_error(&found, &expected)?, plan: found_plan })
}

fn run(case: &Case, operands: &Operands, backend: Backend) -> Result<Vec<Tensor>> {
    let with_gradients = matches!(case.want, Want::Gradients | Want::GradientsWithLogSumExp);
    let operands = match with_gradients {
        true => &operands.map(|tensor| Ok(Var::from_tensor(tensor)?.into_inner()))?,
        false => operands,
    };
    let Qkv { q, k, v } = operands.views(case.layout)?;
    let (mask, options) = (case.mask(operands)?, case.options(operands).with_backend(backend));
    match case.want {
        Want::Output => Ok(vec![scaled_dot_product_attention(&q, &k, &v, &mask, &options)?]),
        Want::LogSumExp => {
            let (output, lse) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &options)?;
            Ok(vec![output, lse])
        }
        Want::Weights => {
            let output = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options)?;
            Ok(vec![output.output, output.weights])
        }
        Want::Gradients => {
            let output = scaled_dot_product_attention(&q, &k, &v, &mask, &options)?;
            gradients(&sum_of_squares(case, &output)?, &operands.all())
        }
        Want::GradientsWithLogSumExp => {
            let (output, lse) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &options)?;
            let lse_sum = lse.sum_all()?.to_dtype(output.dtype())?;
            gradients(&(sum_of_squares(case, &output)? + lse_sum)?, &operands.all())
        }
    }
}

/// Returns the sum of the squares of an output. With every option at once, it is divided by 64: the gradients of slopes
/// and biases are sums over many queries, which would otherwise exceed the largest f16, 65504.
fn sum_of_squares(case: &Case, output: &Tensor) -> Result<Tensor> {
    let divisor = if case.options == Options::Everything { 64. } else { 1. };
    output.sqr()?.sum_all()? / divisor
}

/// Returns the gradients of a loss with respect to variables.
pub fn gradients(loss: &Tensor, variables: &[&Tensor]) -> Result<Vec<Tensor>> {
    let found = loss.backward()?;
    let mut gradients = Vec::with_capacity(variables.len());
    for variable in variables {
        let Some(gradient) = found.get(variable) else { bail!("a gradient is missing") };
        gradients.push(gradient.clone());
    }
    Ok(gradients)
}

/// Returns the largest [`relative_error`] of results.
pub fn largest_error(found: &[Tensor], expected: &[Tensor]) -> Result<f64> {
    if found.len() != expected.len() {
        bail!("{} results, expected {}", found.len(), expected.len())
    }
    let mut largest = 0f64;
    for (own, other) in found.iter().zip(expected) {
        largest = largest.max(relative_error(own, other)?);
    }
    Ok(largest)
}

/// Returns the largest difference, relative to the largest finite entry expected. Infinities have to agree. A NaN or
/// another shape is an infinite error.
pub fn relative_error(found: &Tensor, expected: &Tensor) -> Result<f64> {
    if found.dims() != expected.dims() {
        return Ok(f64::INFINITY);
    }
    let numbers =
        |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let pairs = || -> Result<_> { Ok(numbers(found)?.into_iter().zip(numbers(expected)?)) };
    let mut largest = f64::MIN_POSITIVE;
    let mut difference = 0f64;
    for (own, other) in pairs()? {
        if other.is_finite() {
            largest = largest.max(other.abs());
        }
        if own != other {
            let gap = (own - other).abs();
            difference = difference.max(if gap.is_nan() { f64::INFINITY } else { gap });
        }
    }
    Ok(difference / largest)
}
