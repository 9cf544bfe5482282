//! The kernels of a GPU as an operation of Candle's graph, with its backward pass.

use std::sync::Arc;

use candle_attention_call::{AttentionCall, OutputLayout, PerInput, RequestedGradients, RequestedResults};
use candle_attention_cuda::{BackwardInputs, CudaAttention, ForwardOutput};
use candle_attention_metal::MetalAttention;
use candle_core::op::BackpropOp;
use candle_core::{Error, Result, Shape, Storage, Tensor};

use super::call::{is_tracked, swapped_for};
use super::dropout::draw_seed;
use super::kernel_call::KernelTensors;
use super::results::Attended;
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::base::{is_linked, record, record_two};

const NAME: &str = "flash-attention";

/// A call for the kernels of a kind of GPU.
pub(super) trait KernelAttention: Send + Sync + 'static {
    /// Returns the call.
    fn call(&self) -> &KernelTensors;

    /// Sets the seed of dropout, on the device.
    fn set_dropout_seed(&mut self, seed: Tensor);

    /// Loads the kernels of the backward pass.
    fn prepare_backward(&self, wanted: RequestedGradients) -> Result<()>;

    /// Computes the attention output and the other requested results.
    fn forward(&self, wanted: RequestedResults) -> Result<ForwardOutput>;

    /// Computes gradients.
    fn backward(&self, inputs: &BackwardInputs, wanted: RequestedGradients) -> Result<PerInput<Option<Tensor>>>;
}

impl KernelAttention for CudaAttention {
    fn call(&self) -> &KernelTensors {
        self.call()
    }

    fn set_dropout_seed(&mut self, seed: Tensor) {
        self.set_dropout_seed(seed);
    }

    fn prepare_backward(&self, wanted: RequestedGradients) -> Result<()> {
        self.prepare_backward(wanted)
    }

    fn forward(&self, wanted: RequestedResults) -> Result<ForwardOutput> {
        self.forward(wanted)
    }

    fn backward(&self, inputs: &BackwardInputs, wanted: RequestedGradients) -> Result<PerInput<Option<Tensor>>> {
        self.backward(inputs, wanted)
    }
}

impl KernelAttention for MetalAttention {
    fn call(&self) -> &KernelTensors {
        self.call()
    }

    fn set_dropout_seed(&mut self, seed: Tensor) {
        self.set_dropout_seed(seed);
    }

    fn prepare_backward(&self, wanted: RequestedGradients) -> Result<()> {
        self.prepare_backward(wanted)
    }

    fn forward(&self, wanted: RequestedResults) -> Result<ForwardOutput> {
        let found = self.forward(wanted)?;
        let dims = self.call().dims;
        Ok(ForwardOutput {
            output_shape: found.output.shape().clone(),
            output: storage_of(&found.output)?,
            log_sum_exp: found.log_sum_exp.as_ref().map(storage_of).transpose()?,
            log_sum_exp_shape: (dims.b, dims.h, dims.t_q).into(),
            softmax_stats: found.softmax_stats.as_ref().map(storage_of).transpose()?,
            softmax_stats_shape: (2, dims.b, dims.h, dims.t_q).into(),
        })
    }

    fn backward(&self, inputs: &BackwardInputs, wanted: RequestedGradients) -> Result<PerInput<Option<Tensor>>> {
        self.backward(inputs, wanted)
    }
}

/// Returns the storage of a new tensor: on Metal another handle to the same memory.
fn storage_of(tensor: &Tensor) -> Result<Storage> {
    let (storage, layout) = tensor.storage_and_layout();
    storage.try_clone(layout)
}

/// Runs kernels and returns the output (B, H, T_q, D_v), and the log-sum-exp if it is requested, with gradients for the
/// inputs that are tracked. If `draws_seed`, the seed of dropout is drawn.
pub(super) fn attend(
    mut attention: impl KernelAttention,
    draws_seed: bool,
    wanted: RequestedResults,
) -> Result<Attended> {
    if draws_seed {
        let seed = draw_seed(attention.call().q.device())?;
        attention.set_dropout_seed(seed);
    }
    let layout = attention.call().output_layout;
    let stored = attend_in_layout(attention, wanted)?;
    Ok(Attended { output: swapped_for(layout, stored.output)?, ..stored })
}

/// Runs kernels as [`attend`] does, and returns the output as it is stored.
fn attend_in_layout(attention: impl KernelAttention, wanted: RequestedResults) -> Result<Attended> {
    let is_trained = tracks_gradients(attention.call());
    // If the kernels of the backward pass do not load, another path can still run.
    if is_trained {
        attention.prepare_backward(requested_gradients(attention.call()))?;
    }
    let with_softmax_stats = RequestedResults { softmax_stats: is_trained, ..wanted };
    let ForwardOutput { output, output_shape, log_sum_exp, log_sum_exp_shape, softmax_stats, softmax_stats_shape } =
        attention.forward(with_softmax_stats)?;
    let softmax_stats = softmax_stats.map(|storage| untracked(storage, softmax_stats_shape));
    let attention = Arc::new(attention);
    let shared = attention.clone();
    let inputs = attention.call().differentiable().in_order();
    let Some(lse) = log_sum_exp else {
        let backward = move |stored: &Tensor, gradient: &Tensor| {
            let stats = softmax_stats.as_ref().ok_or_else(no_softmax_stats)?;
            Ok(gradients(&*shared, stored, stats, gradient, None)?.in_order().into())
        };
        return Ok(record(NAME, &inputs, output, output_shape, backward)?.into());
    };
    let backward = move |stored: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        let stats = softmax_stats.as_ref().ok_or_else(no_softmax_stats)?;
        Ok(gradients(&*shared, stored, stats, gradient, lse_gradient)?.in_order().into())
    };
    let shapes = [output_shape, log_sum_exp_shape];
    let [output, lse] = record_two(NAME, &inputs, shapes, output, lse, backward)?;
    Ok(Attended { log_sum_exp: Some(lse), ..output.into() })
}

fn untracked(storage: Storage, shape: Shape) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

fn no_softmax_stats() -> Error {
    Error::msg(format!("[{NAME}] expected a forward pass with the statistics of its softmax, found none"))
}

/// Returns whether an input of a call is tracked for gradients.
pub(super) fn tracks_gradients(call: &KernelTensors) -> bool {
    call.differentiable().in_order().into_iter().any(is_tracked)
}

/// Returns which gradients a backward pass computes.
pub(super) fn requested_gradients(call: &KernelTensors) -> RequestedGradients {
    RequestedGradients { layout: gradient_layout(call), of: call.differentiable().map(is_tracked) }
}

/// Returns the order in memory of the gradients of q, k and v. If they go to results of which q, k and v are views,
/// they are contiguous once the views are undone.
fn gradient_layout(call: &KernelTensors) -> OutputLayout {
    let AttentionCall { q, k, v, .. } = call;
    let strides = q.stride();
    let all_are_linked = [q, k, v].into_iter().all(|heads| !heads.track_op() || is_linked(heads));
    if all_are_linked && strides[2] > strides[1] { OutputLayout::Bthd } else { OutputLayout::Bhtd }
}

/// Computes the gradients of the inputs that are tracked. The output and its gradient are as they are stored.
fn gradients(
    attention: &impl KernelAttention,
    output: &Tensor,
    softmax_stats: &Tensor,
    output_gradient: &Tensor,
    lse_gradient: Option<Tensor>,
) -> Result<PerInput<Option<Tensor>>> {
    let call = attention.call();
    // (B, H, T_q, D_v) in any layout.
    let output_gradient = swapped_for(call.output_layout, output_gradient.clone())?;
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
    attention.backward(&backward, requested_gradients(call))
}
