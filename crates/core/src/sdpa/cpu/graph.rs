//! The fused kernel as an operation of Candle's graph, with its backward pass.

use std::sync::Arc;

use candle_core::{Result, Tensor, WithDType};

use super::super::call::{Call, Dims, Qkv, swapped_for};
use super::super::options::OutputLayout;
use super::super::score_tensors::{ByInput, is_tracked};
use super::KernelCall;
use candle_attention_kernels::flash::{
    self, AttentionBackwardProblem, AttentionProblem, RequestedGradients, SoftmaxStats,
};
use candle_attention_modules::base::rowwise::{Element, read, to_vec, with_contiguous_rows};
use candle_attention_modules::base::{gradient_of, record, record_two};

const NAME: &str = "flash-attention";

/// Returns the output that the kernel computed, as it is stored, with gradients for the inputs that are tracked. The
/// statistics of the softmax are (B, H, T_q) if any is.
pub(super) fn record_output<E: Element>(
    kernel_call: KernelCall,
    output: Vec<E>,
    softmax_stats: Vec<SoftmaxStats>,
) -> Result<Tensor> {
    let shape = kernel_call.output_shape();
    let kernel_call = Arc::new(kernel_call);
    let forward = kernel_call.clone();
    let backward = move |stored: &Tensor, gradient: &Tensor| {
        let gradients = forward.gradients::<E>(&softmax_stats, stored, gradient, None)?;
        Ok(gradients.in_order().into())
    };
    record(NAME, &kernel_call.inputs().in_order(), output, shape, backward)
}

/// Returns the output and the log-sum-exp as [`record_output`] does.
pub(super) fn record_output_and_lse<E: Element>(
    kernel_call: KernelCall,
    output: Vec<E>,
    lse: Vec<f32>,
    softmax_stats: Vec<SoftmaxStats>,
) -> Result<(Tensor, Tensor)> {
    let Dims { b, h, t_q, .. } = kernel_call.call.dims;
    let shapes = [kernel_call.output_shape(), (b, h, t_q).into()];
    let kernel_call = Arc::new(kernel_call);
    let forward = kernel_call.clone();
    let backward = move |stored: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        let gradients = forward.gradients::<E>(&softmax_stats, stored, gradient, lse_gradient)?;
        Ok(gradients.in_order().into())
    };
    let [output, lse] = record_two(NAME, &kernel_call.inputs().in_order(), shapes, output, lse, backward)?;
    Ok((output, lse))
}

impl KernelCall {
    /// Returns the tensors that gradients flow into.
    fn inputs(&self) -> ByInput<Option<&Tensor>> {
        let Call { q, k, v, .. } = &self.call;
        self.score_tensors.with_qkv(Qkv { q, k, v })
    }

    /// Returns the order in memory of the gradients of q, k and v: the order of q. The gradient of a view of (B, T, H,
    /// D) is such a view too, and is contiguous once the view is undone.
    fn gradient_layout(&self) -> OutputLayout {
        let strides = self.call.q.stride();
        if strides[2] > strides[1] { OutputLayout::Bthd } else { OutputLayout::Bhtd }
    }

    /// Computes the gradients of the inputs that are tracked, from the output and its gradient in the output layout of
    /// the call.
    fn gradients<E: Element>(
        &self,
        softmax_stats: &[SoftmaxStats],
        output: &Tensor,
        output_gradient: &Tensor,
        lse_gradient: Option<Tensor>,
    ) -> Result<ByInput<Option<Tensor>>> {
        // (B, H, T_q, D_v) in any layout.
        let output_gradient = swapped_for(self.call.output_layout(), output_gradient.clone())?;
        let output_gradient = with_contiguous_rows(&output_gradient)?;
        let lse_gradient = lse_gradient.as_ref().map(to_vec).transpose()?;
        let (output, output_gradient) = (read(output), read(&output_gradient));
        let (output, output_grad) = (output.contiguous()?, output_gradient.strided()?);
        let inputs = self.inputs();
        let bias = match inputs.bias {
            Some(bias) if bias.track_op() => Some(bias.dims4()?.into()),
            _ => None,
        };
        let layout = self.gradient_layout();
        let wanted = RequestedGradients {
            layout,
            q: is_tracked(inputs.q),
            k: is_tracked(inputs.k),
            v: is_tracked(inputs.v),
            bias,
            relative_bias: is_tracked(inputs.relative_bias),
            slopes: is_tracked(inputs.slopes),
            sinks: is_tracked(inputs.sinks),
        };
        let found = self.with_problem(|&forward: &AttentionProblem<E>| {
            let lse_grad = lse_gradient.as_deref();
            let problem = AttentionBackwardProblem { forward, output, stats: softmax_stats, output_grad, lse_grad };
            flash::attend_backward(&problem, self.instruction_set, wanted)
        })?;
        Ok(ByInput {
            q: heads_gradient(inputs.q, found.q, layout)?,
            k: heads_gradient(inputs.k, found.k, layout)?,
            v: heads_gradient(inputs.v, found.v, layout)?,
            bias: gradient_of(inputs.bias, found.bias)?,
            relative_bias: gradient_of(inputs.relative_bias, found.relative_bias)?,
            slopes: gradient_of(inputs.slopes, found.slopes)?,
            sinks: gradient_of(inputs.sinks, found.sinks)?,
        })
    }
}

/// Returns the gradient of queries, keys or values (B, H, T, ..), whose numbers are in the order of a layout.
fn heads_gradient<E: WithDType>(
    heads: Option<&Tensor>,
    numbers: Option<Vec<E>>,
    layout: OutputLayout,
) -> Result<Option<Tensor>> {
    match (heads, layout) {
        (Some(heads), OutputLayout::Bthd) => {
            let stored = gradient_of(Some(&heads.transpose(1, 2)?), numbers)?;
            stored.map(|gradient| gradient.transpose(1, 2)).transpose()
        }
        _ => gradient_of(heads, numbers),
    }
}
