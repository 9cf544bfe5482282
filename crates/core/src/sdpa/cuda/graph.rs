//! The CUDA kernels as an operation of Candle's graph, with its backward pass.

use std::sync::Arc;

use candle_attention_cuda::{
    AttentionCall, BackwardInputs, ForwardOutput, Gradients, OutputLayout, RequestedGradients, RequestedResults,
};
use candle_core::op::BackpropOp;
use candle_core::{Error, Result, Shape, Storage, Tensor};

use super::super::call::{Qkv, swapped_for};
use super::super::score_tensors::{ByInput, is_tracked};
use super::CudaCall;
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::base::{is_linked, record, record_two};

const NAME: &str = "flash-attention";

/// Runs the kernels and returns the output as it is stored, with gradients for the inputs that are tracked.
pub(super) fn output(cuda_call: CudaCall) -> Result<Tensor> {
    cuda_call.prepare_backward()?;
    let requested = RequestedResults { log_sum_exp: false, statistics: cuda_call.tracks_gradients() };
    let forward = cuda_call.attention.forward(requested)?;
    let ForwardOutput { output, output_shape, statistics, statistics_shape, .. } = forward;
    let statistics = statistics.map(|storage| untracked(storage, statistics_shape));
    let cuda_call = Arc::new(cuda_call);
    let shared = cuda_call.clone();
    let backward = move |stored: &Tensor, gradient: &Tensor| {
        let statistics = statistics.as_ref().ok_or_else(|| missing("statistics"))?;
        Ok(shared.gradients(stored, statistics, gradient, None)?.in_order().into())
    };
    record(NAME, &cuda_call.inputs().in_order(), output, output_shape, backward)
}

/// Runs the kernels and returns the output as it is stored, and the log-sum-exp, as [`output`] does.
pub(super) fn output_and_lse(cuda_call: CudaCall) -> Result<(Tensor, Tensor)> {
    cuda_call.prepare_backward()?;
    let requested = RequestedResults { log_sum_exp: true, statistics: cuda_call.tracks_gradients() };
    let forward = cuda_call.attention.forward(requested)?;
    let ForwardOutput { output, output_shape, log_sum_exp, log_sum_exp_shape, statistics, statistics_shape } = forward;
    let lse = log_sum_exp.ok_or_else(|| missing("log-sum-exp"))?;
    let statistics = statistics.map(|storage| untracked(storage, statistics_shape));
    let cuda_call = Arc::new(cuda_call);
    let shared = cuda_call.clone();
    let backward = move |stored: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        let statistics = statistics.as_ref().ok_or_else(|| missing("statistics"))?;
        Ok(shared.gradients(stored, statistics, gradient, lse_gradient)?.in_order().into())
    };
    let shapes = [output_shape, log_sum_exp_shape];
    let [output, lse] = record_two(NAME, &cuda_call.inputs().in_order(), shapes, output, lse, backward)?;
    Ok((output, lse))
}

fn untracked(storage: Storage, shape: Shape) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

fn missing(result: &str) -> Error {
    Error::msg(format!("[{NAME}] expected a forward pass with its {result}, found none"))
}

impl CudaCall {
    /// Returns the tensors that gradients flow into.
    fn inputs(&self) -> ByInput<Option<&Tensor>> {
        let AttentionCall { q, k, v, .. } = &self.attention;
        self.score_tensors.with_qkv(Qkv { q, k, v })
    }

    /// Returns whether an input is tracked for gradients.
    pub(super) fn tracks_gradients(&self) -> bool {
        self.inputs().in_order().into_iter().any(is_tracked)
    }

    /// Loads the kernels of the backward pass, if an input is tracked: if they fail to, another path can still run.
    fn prepare_backward(&self) -> Result<()> {
        if !self.tracks_gradients() {
            return Ok(());
        }
        self.attention.prepare_backward(self.requested_gradients())
    }

    /// Returns which gradients a backward pass computes.
    pub(super) fn requested_gradients(&self) -> RequestedGradients {
        let inputs = self.inputs();
        RequestedGradients {
            layout: self.gradient_layout(),
            q: is_tracked(inputs.q),
            k: is_tracked(inputs.k),
            v: is_tracked(inputs.v),
            bias: is_tracked(inputs.bias),
            relative_bias: is_tracked(inputs.relative_bias),
            slopes: is_tracked(inputs.slopes),
            sinks: is_tracked(inputs.sinks),
        }
    }

    /// Returns the order in memory of the gradients of q, k and v. If they go to results of which q, k and v are views,
    /// they are contiguous once the views are undone.
    fn gradient_layout(&self) -> OutputLayout {
        let AttentionCall { q, k, v, .. } = &self.attention;
        let strides = q.stride();
        let all_are_linked = [q, k, v].into_iter().all(|heads| !heads.track_op() || is_linked(heads));
        if all_are_linked && strides[2] > strides[1] { OutputLayout::Bthd } else { OutputLayout::Bhtd }
    }

    /// Computes the gradients of the inputs that are tracked. The output and its gradient are as they are stored.
    fn gradients(
        &self,
        output: &Tensor,
        statistics: &Tensor,
        output_gradient: &Tensor,
        lse_gradient: Option<Tensor>,
    ) -> Result<ByInput<Option<Tensor>>> {
        // (B, H, T_q, D_v) in any layout.
        let output_gradient = swapped_for(self.output_layout, output_gradient.clone())?;
        let output_gradient = with_contiguous_rows(&output_gradient)?;
        let lse_gradient = match lse_gradient {
            Some(gradient) => Some(gradient.contiguous()?),
            None => None,
        };
        let backward = BackwardInputs {
            output,
            statistics,
            output_gradient: &output_gradient,
            log_sum_exp_gradient: lse_gradient.as_ref(),
        };
        let found = self.attention.backward(&backward, self.requested_gradients())?;
        let Gradients { q, k, v, bias, relative_bias, slopes, sinks } = found;
        Ok(ByInput { q, k, v, bias, relative_bias, slopes, sinks })
    }
}
