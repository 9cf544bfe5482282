//! Norms and norms times a gate in one pass, against separate operations.

use candle_attention_cuda::{NewDevice, SourceFault, on_new_device};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::gate::GateActivation;
use crate::norm::RmsNorm;
use crate::norm::cuda::{CudaGatedNorm, CudaNorm};
use crate::norm::metal::gated_norm_on_metal;
use crate::norm::passes::RowNorm;
use crate::norm::rows::Affine;

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

#[test]
fn rms_norm_with_gate_on_metal_matches_separate_operations() -> Result<()> {
    let random = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu);
    let norm = RowNorm { subtracts_mean: false, eps: 1e-6 };
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
        for activation in [GateActivation::Sigmoid, GateActivation::Softplus, GateActivation::Silu] {
            let xs = random(&[2, 3, 5, 33])?.to_dtype(dtype)?.transpose(1, 2)?;
            let gate = random(&[2, 5, 3, 35])?.to_dtype(dtype)?.narrow(3, 1, 33)?;
            let weight = random(&[33])?;
            let found =
                gated_norm_on_metal(norm, &xs, &weight, &gate, activation).expect("the kernel runs the call")?;
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64);
            let factor = (wide(&xs)?.sqr()?.mean_keepdim(3)? + 1e-6)?.sqrt()?.recip()?;
            let normed = wide(&xs)?.broadcast_mul(&factor)?.broadcast_mul(&wide(&weight)?)?;
            let expected = activation.gate(&normed, &wide(&gate)?)?;
            let largest = |tensor: &Tensor| tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
            let error = largest(&(wide(&found)? - &expected)?)? / largest(&expected)?;
            assert!(error <= tolerance, "{dtype:?} {activation:?}: off by {error:e}");
        }
    }
    let tracked = Var::zeros((1, 1, 2, 8), DType::F32, &Device::Cpu)?;
    let weight = Tensor::ones(8, DType::F32, &Device::Cpu)?;
    assert!(gated_norm_on_metal(norm, &tracked, &weight, &tracked, GateActivation::Silu).is_none(), "gradients");
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

/// A norm of rows with weights, and the gradient of its output.
struct NormInputs {
    xs: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    upstream: Tensor,
}

/// The way to compute a norm.
#[derive(Clone, Copy)]
enum Path {
    Cpu,
    Cuda,
}

/// Returns the output and the gradients of rows, weight and bias. The rows are a view: the two dimensions before the
/// last one are transposed in memory.
fn norm_with_gradients(norm: RowNorm, inputs: &NormInputs, path: Path) -> Result<Vec<Tensor>> {
    let rank = inputs.xs.rank();
    let xs = Var::from_tensor(&inputs.xs)?;
    let rows = if rank > 2 { xs.transpose(rank - 3, rank - 2)? } else { xs.as_tensor().clone() };
    let weight = Var::from_tensor(&inputs.weight)?;
    let bias = inputs.bias.as_ref().map(Var::from_tensor).transpose()?;
    let affine =
        Affine { weight: weight.as_tensor().clone(), bias: bias.as_ref().map(|bias| bias.as_tensor().clone()) };
    let ys = match path {
        Path::Cpu => norm.apply(&rows, &affine)?,
        Path::Cuda => CudaNorm::plan(norm, &rows, &affine).expect("the kernels run the call").run()?,
    };
    let upstream = inputs.upstream.reshape(ys.shape())?.to_dtype(ys.dtype())?;
    let gradients = (&ys * upstream)?.sum_all()?.backward()?;
    let mut results = vec![ys];
    for variable in [Some(&xs), Some(&weight), bias.as_ref()].into_iter().flatten() {
        results.push(gradients.get(variable).cloned().expect("a gradient"));
    }
    results.iter().map(|tensor| tensor.to_dtype(DType::F64)).collect()
}

#[test]
fn cuda_norms_match_cpu_norms() -> Result<()> {
    let random = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu);
    let shapes: [(&[usize], &[usize]); 5] = [
        (&[33], &[33]),
        (&[7, 600], &[600]),
        (&[2, 3, 40], &[40]),
        (&[2, 3, 5, 64], &[64]),
        (&[2, 3, 5, 20], &[3, 20]),
    ];
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 2e-3)] {
        for (shape, weight_shape) in shapes {
            for (subtracts_mean, has_bias) in [(false, false), (true, true), (true, false)] {
                let norm = RowNorm { subtracts_mean, eps: 1e-5 };
                let inputs = NormInputs {
                    xs: random(shape)?.to_dtype(dtype)?,
                    weight: random(weight_shape)?,
                    bias: if has_bias { Some(random(weight_shape)?) } else { None },
                    upstream: random(shape)?,
                };
                let own = norm_with_gradients(norm, &inputs, Path::Cuda)?;
                let expected = norm_with_gradients(norm, &inputs, Path::Cpu)?;
                for (n, (result, exact)) in own.iter().zip(&expected).enumerate() {
                    let largest = |xs: &Tensor| xs.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
                    let error = largest(&(result - exact)?)? / largest(exact)?;
                    assert!(
                        error <= tolerance,
                        "{dtype:?} {shape:?}, mean {subtracts_mean}: result {n} is off by {error:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// A norm whose variance is the mean of one number too many.
const WRONG_VARIANCE: SourceFault = SourceFault {
    file: "norm.cu",
    text: "row_sum(arguments, squares) / arguments.width",
    replacement: "row_sum(arguments, squares) / (arguments.width + 1)",
};

#[test]
fn wrong_norm_kernel_at_first_use_is_not_planned_and_right_one_is() -> Result<()> {
    if let Err(reason) = candle_attention_cuda::is_available(&Device::Cpu) {
        println!("skipped: {reason}");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let ones = Tensor::ones(16, DType::F32, &Device::Cpu)?;
    let affine = Affine { weight: ones.clone(), bias: None };
    let is_planned = |device: &NewDevice| {
        let norm = RowNorm { subtracts_mean: false, eps: 1e-6 };
        on_new_device(device, || CudaNorm::plan(norm, &ones, &affine).is_some())
    };
    assert!(is_planned(&NewDevice::new("a device", folder.path())));
    let wrong = NewDevice::new("a device with a wrong norm", folder.path()).with_fault(WRONG_VARIANCE);
    assert!(!is_planned(&wrong));
    assert!(!is_planned(&NewDevice::new("a device with a wrong norm", folder.path())), "in a later process");
    Ok(())
}
