//! The CUDA kernels, and their results in Candle's graph. Nothing here waits for the device or reads from it.

use candle_attention_cuda::{CudaDeltaCall, CudaDeltaGradients, DeltaResults};
use candle_core::{DType, Device, Error, Result, Tensor, Var};

use super::call::{AllHeadGradients, CheckedDelta, DeltaTensors};
use super::options::DeltaOptions;
use super::reference;
use candle_attention_kernels::delta::DeltaDims;
use candle_attention_modules::base::first_use::{
    ComparedResult, FirstUseCase, ResultWithGradients, case_numbers, variables_in, variables_on,
};
use candle_attention_modules::base::record_two;
use candle_attention_modules::base::rowwise::with_contiguous_rows;

/// The case of forward passes, token by token and over chunks.
pub const DELTA_CASE: FirstUseCase =
    FirstUseCase { operation: "gated delta rule, forward", is_new: false, run: delta_case };

/// The case of backward passes.
pub const DELTA_BACKWARD_CASE: FirstUseCase =
    FirstUseCase { operation: "gated delta rule, backward", is_new: false, run: delta_backward_case };

/// A call that the kernels support, in the form that they read.
pub(super) struct CudaDeltaPath {
    call: CheckedDelta,
    kernels: CudaDeltaCall,
}

impl CudaDeltaPath {
    /// Returns the call for the kernels, which are loaded, or the reason why they do not run it.
    pub fn plan(call: &CheckedDelta) -> std::result::Result<Self, String> {
        let delta_path = Self::unchecked(call)?;
        DELTA_CASE.check(call.q.device(), call.dtype())?;
        if call.tracks_gradients() {
            DELTA_BACKWARD_CASE.check(call.q.device(), call.dtype())?;
        }
        Ok(delta_path)
    }

    /// Returns the call as [`plan`](Self::plan) does, whether or not the kernels passed a check.
    fn unchecked(call: &CheckedDelta) -> std::result::Result<Self, String> {
        let rows = call.with_contiguous_rows().map_err(|error| error.to_string())?;
        let kernels = CudaDeltaCall {
            q: rows.q.detach(),
            k: rows.k.detach(),
            v: rows.v.detach(),
            decay: rows.decay.as_ref().map(Tensor::detach),
            beta: rows.beta.as_ref().map(Tensor::detach),
            states: rows.states.as_ref().map(Tensor::detach),
            heads: call.dims.h,
            cumulative_tokens: call.sequences.as_ref().map(|sequences| {
                let ends = (0..sequences.len()).map(|s| sequences.queries(s).end);
                std::iter::once(0).chain(ends).collect()
            }),
            scale: call.scale,
            qk_norm: call.options.qk_norm,
        };
        kernels.plan().map_err(|reason| reason.to_string())?;
        if rows.tracks_gradients() {
            kernels.plan_backward().map_err(|reason| reason.to_string())?;
        }
        kernels.prepare(rows.tracks_gradients()).map_err(|reason| reason.to_string())?;
        Ok(Self { call: rows, kernels })
    }

    /// Runs the kernels and records their results: the attention output (B, H, T, D_v), a view of (B, T, H, D_v), and
    /// the states (n, H, D_k, D_v).
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        let Self { call, kernels } = self;
        let DeltaDims { b, t, h, d_v, .. } = call.dims;
        let shapes = [[b, t, h, d_v], call.state_dims()];
        let DeltaResults { output, states } = kernels.forward()?;
        let operands_of = call.clone();
        let backward = move |_: &Tensor, output_grad: &Tensor, states_grad: Option<Tensor>| {
            let output_grad = with_contiguous_rows(&output_grad.transpose(1, 2)?)?;
            let states_grad = states_grad.as_ref().map(Tensor::contiguous).transpose()?;
            let gradients: CudaDeltaGradients = kernels.backward(&output_grad, states_grad.as_ref())?;
            operands_of.gradients_of(AllHeadGradients {
                q: gradients.q,
                k: gradients.k,
                v: gradients.v,
                decay: gradients.decay,
                beta: gradients.beta,
                states: gradients.states,
            })
        };
        let operands = call.operands();
        let [ys, final_states] =
            record_two("gated-delta-rule", &operands, shapes.each_ref(), output, states, backward)?;
        Ok((ys.transpose(1, 2)?, final_states))
    }
}

/// Computes 5 tokens, and then 40, by the kernels and by the reference path.
fn delta_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let mut compared = Vec::new();
    for tokens in [5, 40] {
        let inputs = case_inputs(tokens, dtype)?;
        let on_device = inputs.iter().map(|input| input.to_device(device)).collect::<Result<Vec<_>>>()?;
        let wide = inputs.iter().map(|input| input.to_dtype(DType::F64)).collect::<Result<Vec<_>>>()?;
        let (found, found_states) = by_kernels(&on_device)?;
        let (expected, expected_states) = by_reference(&wide)?;
        compared.push(ComparedResult { name: "the output", found, expected });
        compared.push(ComparedResult { name: "the states", found: found_states, expected: expected_states });
    }
    Ok(compared)
}

/// Computes the gradients of all inputs by the kernels and by the reference path.
fn delta_backward_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let inputs = case_inputs(40, dtype)?;
    let own = variables_on(device, &inputs)?;
    let other = variables_in(DType::F64, &inputs)?;
    let tensors = |variables: &[Var]| variables.iter().map(|variable| variable.as_tensor().clone()).collect::<Vec<_>>();
    let (found, _) = by_kernels(&tensors(&own))?;
    let (expected, _) = by_reference(&tensors(&other))?;
    let names = [
        "the gradient of queries",
        "the gradient of keys",
        "the gradient of values",
        "the gradient of decays",
        "the gradient of betas",
        "the gradient of the states",
    ];
    ResultWithGradients { names: &names, found: &own, expected: &other }.compare(&found, &expected)
}

/// Returns queries, keys, values, decays, betas and states of two sequences with two heads.
fn case_inputs(tokens: usize, dtype: DType) -> Result<[Tensor; 6]> {
    let (b, h, d_k, d_v) = (2, 2, 64, 32);
    let floats = |dims: &[usize], seed: u64| case_numbers(dims, seed, DType::F32);
    Ok([
        case_numbers(&[b, h, tokens, d_k], 1, dtype)?,
        case_numbers(&[b, h, tokens, d_k], 2, dtype)?,
        case_numbers(&[b, h, tokens, d_v], 3, dtype)?,
        // From -1 to 0, and from 0 to 1.
        floats(&[b, h, tokens], 4)?.affine(1.0 / 3.0, -0.5)?,
        floats(&[b, h, tokens], 5)?.affine(1.0 / 3.0, 0.5)?,
        floats(&[b, h, d_k, d_v], 6)?,
    ])
}

fn by_kernels(inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
    CudaDeltaPath::unchecked(&case_call(inputs)?).map_err(Error::msg)?.run()
}

fn by_reference(inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
    reference::run(&case_call(inputs)?)
}

fn case_call(inputs: &[Tensor]) -> Result<CheckedDelta> {
    let [q, k, v, decay, beta, state] = [0, 1, 2, 3, 4, 5].map(|at: usize| &inputs[at]);
    let tensors = DeltaTensors { q, k, v, decay: Some(decay), beta: Some(beta), state: Some(state) };
    CheckedDelta::new("check at first use", tensors, None, &DeltaOptions::default().with_qk_norm(1e-6))
}
