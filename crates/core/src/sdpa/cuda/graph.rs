//! The CUDA kernels as an operation of Candle's graph, with its backward pass.

use std::sync::Arc;

use candle_attention_call::{AttentionCall, OutputLayout, PerInput, RequestedGradients, RequestedResults};
use candle_attention_cuda::{BackwardInputs, ForwardOutput};
use candle_core::op::BackpropOp;
use candle_core::{Error, Result, Shape, Storage, Tensor};

use super::super::call::{is_tracked, swapped_for};
use super::super::results::Attended;
use super::CudaPath;
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::base::{is_linked, record, record_two};

const NAME: &str = "flash-attention";

/// Runs the kernels and returns the output as it is stored, and the log-sum-exp if it is requested, with gradients for
/// the inputs that are tracked.
pub(super) fn attend(cuda_path: CudaPath, wanted: RequestedResults) -> Result<Attended> {
    cuda_path.prepare_backward()?;
    let with_softmax_stats = RequestedResults { softmax_stats: cuda_path.tracks_gradients(), ..wanted };
    let ForwardOutput { output, output_shape, log_sum_exp, log_sum_exp_shape, softmax_stats, softmax_stats_shape } =
        cuda_path.attention.forward(with_softmax_stats)?;
    let softmax_stats = softmax_stats.map(|storage| untracked(storage, softmax_stats_shape));
    let cuda_path = Arc::new(cuda_path);
    let shared = cuda_path.clone();
    let Some(lse) = log_sum_exp else {
        let backward = move |stored: &Tensor, gradient: &Tensor| {
            let stats = softmax_stats.as_ref().ok_or_else(no_softmax_stats)?;
            Ok(shared.gradients(stored, stats, gradient, None)?.in_order().into())
        };
        return Ok(record(NAME, &cuda_path.inputs().in_order(), output, output_shape, backward)?.into());
    };
    let backward = move |stored: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        let stats = softmax_stats.as_ref().ok_or_else(no_softmax_stats)?;
        Ok(shared.gradients(stored, stats, gradient, lse_gradient)?.in_order().into())
    };
    let shapes = [output_shape, log_sum_exp_shape];
    let [output, lse] = record_two(NAME, &cuda_path.inputs().in_order(), shapes, output, lse, backward)?;
    Ok(Attended { log_sum_exp: Some(lse), ..output.into() })
}

fn untracked(storage: Storage, shape: Shape) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

fn no_softmax_stats() -> Error {
    Error::msg(format!("[{NAME}] expected a forward pass with the statistics of its softmax, found none"))
}

impl CudaPath {
    /// Returns the tensors that gradients flow into.
    fn inputs(&self) -> PerInput<Option<&Tensor>> {
        self.attention.call().differentiable()
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
        RequestedGradients { layout: self.gradient_layout(), of: self.inputs().map(is_tracked) }
    }

    /// Returns the order in memory of the gradients of q, k and v. If they go to results of which q, k and v are views,
    /// they are contiguous once the views are undone.
    fn gradient_layout(&self) -> OutputLayout {
        let AttentionCall { q, k, v, .. } = self.attention.call();
        let strides = q.stride();
        let all_are_linked = [q, k, v].into_iter().all(|heads| !heads.track_op() || is_linked(heads));
        if all_are_linked && strides[2] > strides[1] { OutputLayout::Bthd } else { OutputLayout::Bhtd }
    }

    /// Computes the gradients of the inputs that are tracked. The output and its gradient are as they are stored.
    fn gradients(
        &self,
        output: &Tensor,
        softmax_stats: &Tensor,
        output_gradient: &Tensor,
        lse_gradient: Option<Tensor>,
    ) -> Result<PerInput<Option<Tensor>>> {
        // (B, H, T_q, D_v) in any layout.
        let output_gradient = swapped_for(self.attention.call().output_layout, output_gradient.clone())?;
        let output_gradient = with_contiguous_rows(&output_gradient)?;
        let lse_gradient = match lse_gradient {
            Some(gradient) => Some(gradient.contiguous()?),
            None => None,
        };
        let backward = BackwardInputs {
            output,
            softmax_stats,
            output_gradient: &output_gradient,
            log_sum_exp_gradient: lse_gradient.as_ref(),
        };
        self.attention.backward(&backward, self.requested_gradients())
    }
}
