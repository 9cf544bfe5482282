//! The fused kernel as an operation of Candle's graph, with its backward pass.

use std::sync::Arc;

use candle_core::{Result, Tensor, WithDType};

use super::super::call::{is_tracked, swapped_for};
use super::super::options::OutputLayout;
use super::super::results::Attended;
use super::CpuPath;
use candle_attention_call::{AttentionDims as Dims, PerInput, RequestedGradients};
use candle_attention_kernels::flash::{self, AttentionBackwardProblem, SoftmaxStats};
use candle_attention_modules::base::rowwise::{Element, read, to_vec, with_contiguous_rows};
use candle_attention_modules::base::{gradient_of, record, record_two};

const NAME: &str = "flash-attention";

/// Returns the output that the kernel computed, as it is stored, and the log-sum-exp if the kernel computed it, with
/// gradients for the inputs that are tracked. The statistics of the softmax are (B, H, T_q) if any is.
pub(super) fn record_results<E: Element>(
    path: CpuPath,
    output: Vec<E>,
    log_sum_exp: Option<Vec<f32>>,
    softmax_stats: Vec<SoftmaxStats>,
) -> Result<Attended> {
    let Dims { b, h, t_q, .. } = path.attention.dims;
    let shape = path.output_shape();
    let path = Arc::new(path);
    let forward = path.clone();
    let Some(lse) = log_sum_exp else {
        let backward = move |stored: &Tensor, gradient: &Tensor| {
            let gradients = forward.gradients::<E>(&softmax_stats, stored, gradient, None)?;
            Ok(gradients.in_order().into())
        };
        return Ok(record(NAME, &path.attention.differentiable().in_order(), output, shape, backward)?.into());
    };
    let backward = move |stored: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        let gradients = forward.gradients::<E>(&softmax_stats, stored, gradient, lse_gradient)?;
        Ok(gradients.in_order().into())
    };
    let shapes = [shape, (b, h, t_q).into()];
    let [output, lse] = record_two(NAME, &path.attention.differentiable().in_order(), shapes, output, lse, backward)?;
    Ok(Attended { log_sum_exp: Some(lse), ..output.into() })
}

impl CpuPath {
    /// Returns the order in memory of the gradients of q, k and v: the order of q. The gradient of a view of (B, T, H,
    /// D) is such a view too, and is contiguous once the view is undone.
    fn gradient_layout(&self) -> OutputLayout {
        let strides = self.attention.q.stride();
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
    ) -> Result<PerInput<Option<Tensor>>> {
        // (B, H, T_q, D_v) in any layout.
        let output_gradient = swapped_for(self.attention.output_layout, output_gradient.clone())?;
        let output_gradient = with_contiguous_rows(&output_gradient)?;
        let lse_gradient = lse_gradient.as_ref().map(to_vec).transpose()?;
        let (output, output_gradient) = (read(output), read(&output_gradient));
        let (output, output_grad) = (output.contiguous::<E>()?, output_gradient.strided()?);
        let inputs = self.attention.differentiable();
        let layout = self.gradient_layout();
        let wanted = RequestedGradients { layout, of: inputs.map(is_tracked) };
        let locked = self.lock()?;
        let problem = AttentionBackwardProblem {
            forward: self.views(&locked)?,
            output,
            softmax_stats,
            output_grad,
            lse_grad: lse_gradient.as_deref(),
        };
        let found = flash::attend_backward(&problem, self.instruction_set, wanted);
        let found = found.map_err(|error| self.error(error))?;
        Ok(PerInput {
            q: heads_gradient(inputs.q, found.q, layout)?,
            k: heads_gradient(inputs.k, found.k, layout)?,
            v: heads_gradient(inputs.v, found.v, layout)?,
            bias: gradient_of(inputs.bias, found.bias)?,
            relative_bias: gradient_of(inputs.relative_bias, found.relative_bias)?,
            alibi_slopes: gradient_of(inputs.alibi_slopes, found.alibi_slopes)?,
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
