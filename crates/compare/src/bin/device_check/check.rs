//! A call on a device, compared with the reference path on the CPU in f64.

use candle_attention::{
    AttentionMask, Backend, Plan, SdpaOptions, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor, Var, bail};

use super::case::{Case, Want};

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
/// If the call fails, on the device or on the CPU.
pub fn check(case: &Case, dtype: DType, device: &Device) -> Result<Checked> {
    let buffers = case.buffers(dtype)?;
    let exact = buffers.map(|buffer| buffer.to_dtype(DType::F64))?.views(case.layout)?;
    let reference = case.options(&Device::Cpu)?.with_backend(Backend::Reference);
    let expected = run(case, exact, &case.mask(&Device::Cpu)?, &reference)?;

    let (mask, options) = (case.mask(device)?, case.options(device)?);
    let [q, k, v] = buffers.map(|buffer| buffer.to_device(device))?.views(case.layout)?;
    // `plan` is about the output alone.
    let mut found_plan = None;
    if case.want == Want::Output {
        found_plan = Some(plan(&q, &k, &v, &mask, &options)?);
    }
    let found = run(case, [q, k, v], &mask, &options)?;
    let errors = found.iter().zip(&expected).map(|(found, expected)| relative_error(found, expected));
    let error = errors.collect::<Result<Vec<_>>>()?.into_iter().fold(0.0, f64::max);
    Ok(Checked { error, plan: found_plan })
}

fn run(case: &Case, qkv: [Tensor; 3], mask: &AttentionMask, options: &SdpaOptions) -> Result<Vec<Tensor>> {
    let [q, k, v] = &qkv;
    match case.want {
        Want::Output => Ok(vec![scaled_dot_product_attention(q, k, v, mask, options)?]),
        Want::LogSumExp => {
            let (output, lse) = scaled_dot_product_attention_with_lse(q, k, v, mask, options)?;
            Ok(vec![output, lse])
        }
        Want::Weights => {
            let output = scaled_dot_product_attention_with_weights(q, k, v, mask, options)?;
            Ok(vec![output.output, output.weights])
        }
        Want::Gradients => {
            let vars = [Var::from_tensor(q)?, Var::from_tensor(k)?, Var::from_tensor(v)?];
            let output = scaled_dot_product_attention(&vars[0], &vars[1], &vars[2], mask, options)?;
            let gradients = output.sqr()?.sum_all()?.backward()?;
            let of = |var: &Var| match gradients.get(var) {
                Some(gradient) => Ok(gradient.clone()),
                None => bail!("a gradient is missing"),
            };
            vars.iter().map(of).collect()
        }
    }
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
