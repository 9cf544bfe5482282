//! Inputs of calls, and comparisons.

use candle_attention_cuda::{
    AttentionDims, BackwardInputs, BackwardKernel, BoundedKeys, CudaAttention, CudaCall, ForwardKernel, OutputLayout,
    PerInput, RequestedGradients, RequestedResults, ScoreModifiers, Unsupported, emulator_bytes_of_thread,
};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Tensor};

use super::reference::{self, Loss, Rows};

/// The sizes of a call.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub d_v: usize,
}

/// Enough queries to a key head for the forward kernel.
pub const MANY_QUERIES: Sizes = Sizes { b: 2, h: 4, h_kv: 2, t_q: 70, t_kv: 90, d: 16, d_v: 32 };

/// A few queries, for which keys are split.
pub const FEW_QUERIES: Sizes = Sizes { b: 2, h: 4, h_kv: 2, t_q: 3, t_kv: 300, d: 16, d_v: 32 };

/// Returns numbers between -1 and 1 that look random, from a linear congruential generator.
pub fn numbers(seed: u32, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// Returns a tensor of integers.
pub fn integers(values: &[i32]) -> Result<Tensor> {
    Tensor::new(values, &Device::Cpu)
}

impl Sizes {
    /// Returns a call without masks and modifiers.
    pub fn call(&self, dtype: DType) -> Result<CudaCall> {
        let &Self { b, h, h_kv, t_q, t_kv, d, d_v } = self;
        Ok(CudaCall {
            dims: AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v },
            q: numbers(1, &[b, h, t_q, d], dtype)?,
            k: numbers(2, &[b, h_kv, t_kv, d], dtype)?,
            v: numbers(3, &[b, h_kv, t_kv, d_v], dtype)?,
            kv_scales: None,
            pages: None,
            keys: BoundedKeys::default(),
            scores: ScoreModifiers { scale: 1.5 / (d as f64).sqrt(), ..ScoreModifiers::default() },
            output_layout: OutputLayout::Bhtd,
        })
    }
}

/// Returns the kernels of a call.
pub fn kernels(call: &CudaCall) -> Result<CudaAttention> {
    Ok(CudaAttention::new(call.clone())?)
}

/// Returns the kernel of the forward pass of a call.
pub fn plan(call: &CudaCall) -> std::result::Result<ForwardKernel, Unsupported> {
    CudaAttention::new(call.clone())?.plan()
}

/// Returns the kernels of the backward pass of a call.
pub fn plan_backward(
    call: &CudaCall,
    requested: RequestedGradients,
) -> std::result::Result<BackwardKernel, Unsupported> {
    CudaAttention::new(call.clone())?.plan_backward(requested)
}

/// Returns the largest error that is allowed, relative to the largest number of a result.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2.5e-3,
        DType::BF16 => 2e-2,
        _ => 1e-5,
    }
}

/// Checks that a result has the reference's numbers.
pub fn assert_close(name: &str, found: &Tensor, expected: &[f64], tolerance: f64) -> Result<()> {
    let numbers = found.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    assert_eq!(numbers.len(), expected.len(), "{name}");
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.05f64, |largest, x| largest.max(x.abs()));
    for (index, (&number, &reference)) in numbers.iter().zip(expected).enumerate() {
        let is_close = number == reference || (number - reference).abs() <= tolerance * largest;
        assert!(is_close, "{name}, entry {index}: found {number}, expected {reference}");
    }
    Ok(())
}

/// The results of a forward pass as tensors.
pub struct Forward {
    /// As it is stored.
    pub output: Tensor,
    /// The input of the backward pass.
    pub softmax_stats: Tensor,
}

/// Runs a forward pass and checks its results.
pub fn check_forward(call: &CudaCall) -> Result<Forward> {
    let attention = kernels(call)?;
    let allocated_before = emulator_bytes_of_thread();
    let found = attention.forward(RequestedResults {
        log_sum_exp: true,
        softmax_stats: true,
        ..RequestedResults::default()
    })?;
    let allocated = emulator_bytes_of_thread() - allocated_before;
    let results = found.output_shape.elem_count() * call.q.dtype().size_in_bytes()
        + (found.log_sum_exp_shape.elem_count() + found.softmax_stats_shape.elem_count()) * size_of::<f32>();
    assert_eq!(allocated, results + attention.forward_scratch_bytes()?, "the bytes of the forward pass");
    let output = Tensor::from_storage(found.output, found.output_shape, BackpropOp::none(), false);
    let log_sum_exp = found.log_sum_exp.expect("a log-sum-exp");
    let log_sum_exp = Tensor::from_storage(log_sum_exp, found.log_sum_exp_shape, BackpropOp::none(), false);
    let expected = reference::forward(call)?;
    let in_order = match call.output_layout {
        OutputLayout::Bhtd => output.clone(),
        OutputLayout::Bthd => output.transpose(1, 2)?,
    };
    assert_close("the output", &in_order, &expected.output, tolerance(call.q.dtype()))?;
    assert_close("the log-sum-exp", &log_sum_exp, &expected.log_sum_exp, 1e-5)?;
    let stats = found.softmax_stats.expect("statistics");
    let softmax_stats = Tensor::from_storage(stats, found.softmax_stats_shape, BackpropOp::none(), false);
    Ok(Forward { output, softmax_stats })
}

/// Returns the bytes of gradients that are computed in a dtype.
fn bytes<const N: usize>(gradients: [&Option<Tensor>; N], dtype: DType) -> usize {
    gradients.into_iter().flatten().map(|gradient| gradient.elem_count() * dtype.size_in_bytes()).sum()
}

/// The gradients of everything.
pub const ALL: RequestedGradients = RequestedGradients {
    layout: OutputLayout::Bhtd,
    of: PerInput { q: true, k: true, v: true, bias: true, relative_bias: true, alibi_slopes: true, sinks: true },
};

/// Runs both passes with gradients of the output and of the log-sum-exp, and checks all gradients.
pub fn check_backward(call: &CudaCall) -> Result<PerInput<Option<Tensor>>> {
    let forward = check_forward(call)?;
    let &[b, h, t_q, _] = call.q.dims() else { panic!("four dimensions") };
    let output_gradient = numbers(4, &[b, h, t_q, call.v.dim(3)?], call.q.dtype())?;
    let log_sum_exp_gradient = numbers(5, &[b, h, t_q], DType::F32)?;
    let inputs = BackwardInputs {
        output: &forward.output,
        softmax_stats: &forward.softmax_stats,
        output_gradient: &output_gradient,
        log_sum_exp_gradient: Some(&log_sum_exp_gradient),
    };
    let allocated_before = emulator_bytes_of_thread();
    let found = kernels(call)?.backward(&inputs, ALL)?;
    let allocated = emulator_bytes_of_thread() - allocated_before;
    let loss =
        Loss { output_gradient: Rows::of(&output_gradient)?, log_sum_exp_gradient: Rows::of(&log_sum_exp_gradient)? };
    let expected = reference::backward(call, &loss)?;
    let largest_error = 2.0 * tolerance(call.q.dtype());
    let results = [
        ("the gradient of q", &found.q, Some(&expected.q)),
        ("the gradient of k", &found.k, Some(&expected.k)),
        ("the gradient of v", &found.v, Some(&expected.v)),
        ("the gradient of the bias", &found.bias, expected.bias.as_ref()),
        ("the gradient of the relative bias", &found.relative_bias, expected.relative_bias.as_ref()),
        ("the gradient of slopes", &found.alibi_slopes, expected.slopes.as_ref()),
        ("the gradient of sinks", &found.sinks, expected.sinks.as_ref()),
    ];
    for (name, gradient, reference) in results {
        assert_eq!(gradient.is_some(), reference.is_some(), "{name}");
        if let (Some(gradient), Some(reference)) = (gradient, reference) {
            assert_close(name, gradient, reference, largest_error)?;
        }
    }
    let of_dtype = [&found.q, &found.k, &found.v];
    let of_floats = [&found.bias, &found.relative_bias, &found.alibi_slopes, &found.sinks];
    let gradients = bytes(of_dtype, call.q.dtype()) + bytes(of_floats, DType::F32);
    assert_eq!(allocated, gradients + kernels(call)?.backward_scratch_bytes(ALL)?, "the bytes of the backward pass");
    Ok(found)
}
