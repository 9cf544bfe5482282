//! A norm times a gate in one pass, against separate operations.

use candle_core::{DType, Device, Result, Tensor, Var};

use crate::gate::GateActivation;
use crate::norm::RmsNorm;
use crate::norm::cuda::CudaGatedNorm;
use crate::norm::passes::RowNorm;

/// Returns the output and the gradients of rows, weight and gate, in f64. Rows and gate are views.
fn run(all: &[Tensor; 4], activation: GateActivation, dtype: DType) -> Result<Vec<Tensor>> {
    let [xs, weight, gate, upstream] = all;
    let variable = |tensor: &Tensor| Var::from_tensor(&tensor.to_dtype(dtype)?);
    let [xs, weight, gate] = [variable(xs)?, variable(weight)?, variable(gate)?];
    let norm = RmsNorm::new(weight.as_tensor().clone(), 1e-6)?;
    let ys = norm.forward_gated(&xs.transpose(1, 2)?, &gate.narrow(3, 1, xs.dim(3)?)?, activation)?;
    let gradients = (ys.to_dtype(DType::F64)? * upstream)?.sum_all()?.backward()?;
    let found = [&xs, &weight, &gate].map(|var| gradients.get(var).cloned().expect("a gradient"));
    [ys].into_iter().chain(found).map(|tensor| tensor.to_dtype(DType::F64)).collect()
}

#[test]
fn rms_norm_with_gate_matches_separate_operations() -> Result<()> {
    let random = |shape: &[usize]| Tensor::randn(0f64, 1., shape, &Device::Cpu);
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
        for activation in [GateActivation::Sigmoid, GateActivation::Softplus, GateActivation::Silu] {
            let mut all = [random(&[2, 3, 5, 33])?, random(&[33])?, random(&[2, 5, 3, 35])?, random(&[2, 5, 3, 33])?];
            for tensor in &mut all {
                *tensor = tensor.to_dtype(dtype)?.to_dtype(DType::F64)?;
            }
            let own = run(&all, activation, dtype)?;
            let expected = run(&all, activation, DType::F64)?;
            for (n, (result, exact)) in own.iter().zip(&expected).enumerate() {
                let largest = |xs: &Tensor| xs.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
                let error = largest(&(result - exact)?)? / largest(exact)?;
                assert!(error <= tolerance, "{dtype:?} {activation:?}: result {n} is off by {error:e}");
            }
        }
    }
    Ok(())
}

/// Returns the output and the gradients of rows, weight and gate by the CUDA kernels, on the emulator, in f64. Rows and
/// gate are the views of [`run`].
fn run_on_cuda(all: &[Tensor; 4], activation: GateActivation, dtype: DType) -> Result<Vec<Tensor>> {
    let [xs, weight, gate, upstream] = all;
    let variable = |tensor: &Tensor, own: DType| Var::from_tensor(&tensor.to_dtype(own)?);
    let [xs, weight, gate] = [variable(xs, dtype)?, variable(weight, DType::F32)?, variable(gate, dtype)?];
    let norm = RowNorm { subtracts_mean: false, eps: 1e-6 };
    let (rows, gates) = (xs.transpose(1, 2)?, gate.narrow(3, 1, xs.dim(3)?)?);
    let call = CudaGatedNorm::plan(norm, &rows, &weight, &gates, activation).expect("the kernels run the call");
    let ys = call.run()?;
    let gradients = (ys.to_dtype(DType::F64)? * upstream)?.sum_all()?.backward()?;
    let found = [&xs, &weight, &gate].map(|var| gradients.get(var).cloned().expect("a gradient"));
    [ys].into_iter().chain(found).map(|tensor| tensor.to_dtype(DType::F64)).collect()
}

#[test]
fn cuda_rms_norm_with_gate_matches_separate_operations() -> Result<()> {
    let random = |shape: &[usize]| Tensor::randn(0f64, 1., shape, &Device::Cpu);
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
        for activation in [GateActivation::Sigmoid, GateActivation::Softplus, GateActivation::Silu] {
            let mut all = [random(&[2, 3, 5, 33])?, random(&[33])?, random(&[2, 5, 3, 35])?, random(&[2, 5, 3, 33])?];
            for tensor in &mut all {
                *tensor = tensor.to_dtype(dtype)?.to_dtype(DType::F64)?;
            }
            let (own, expected) = (run_on_cuda(&all, activation, dtype)?, run(&all, activation, DType::F64)?);
            for (n, (result, exact)) in own.iter().zip(&expected).enumerate() {
                let largest = |xs: &Tensor| xs.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
                let error = largest(&(result - exact)?)? / largest(exact)?;
                assert!(error <= tolerance, "{dtype:?} {activation:?}: result {n} is off by {error:e}");
            }
        }
    }
    Ok(())
}
