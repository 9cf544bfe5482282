//! The fused kernel as an operation of Candle's graph, with its backward pass.

use std::sync::Arc;

use candle_core::{Result, Tensor, WithDType};

use super::super::call::{Call, is_tracked, swapped_for};
use super::super::options::OutputLayout;
use super::super::results::Attended;
use super::{QueryTables, lock, output_shape, public_error, views};
use candle_attention_call::{AttentionDims as Dims, PerInput, RequestedGradients};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::{
    self, AttentionBackwardProblem, AttentionGradients, AttentionResults, SoftmaxStats,
};
use candle_attention_modules::base::rowwise::{TensorElement, read, to_vec, with_contiguous_rows};
use candle_attention_modules::base::{gradient_of, record, record_two};

const NAME: &str = "flash-attention";

/// Returns the output that the kernel computed, as it is stored, and the log-sum-exp if the kernel computed it, with
/// gradients for the inputs that are tracked.
pub(super) fn record_results<E: TensorElement>(
    call: Call,
    instruction_set: InstructionSet,
    found: AttentionResults<E>,
) -> Result<Attended> {
    let AttentionResults { output, log_sum_exp, softmax_stats, statistics: _ } = found;
    let Dims { b, h, t_q, .. } = call.attention.dims;
    let shape = output_shape(&call);
    let call = Arc::new(call);
    let softmax_stats = softmax_stats.unwrap_or_default();
    let forward = CpuForward { call: call.clone(), instruction_set, softmax_stats };
    let Some(lse) = log_sum_exp else {
        let backward = move |stored: &Tensor, gradient: &Tensor| {
            Ok(forward.gradients::<E>(stored, gradient, None)?.in_order().into())
        };
        return Ok(record(NAME, &call.attention.differentiable().in_order(), output, shape, backward)?.into());
    };
    let backward = move |stored: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        Ok(forward.gradients::<E>(stored, gradient, lse_gradient)?.in_order().into())
    };
    let shapes = [shape, (b, h, t_q).into()];
    let [output, lse] = record_two(NAME, &call.attention.differentiable().in_order(), shapes, output, lse, backward)?;
    Ok(Attended { log_sum_exp: Some(lse), ..output.into() })
}

/// A forward pass whose gradients may be requested. The tensors of the call are prepared for the kernel; the statistics
/// of the softmax are (B, H, T_q) if any input is tracked.
pub(in crate::sdpa) struct CpuForward {
    pub call: Arc<Call>,
    pub instruction_set: InstructionSet,
    pub softmax_stats: Vec<SoftmaxStats>,
}

impl CpuForward {
    /// Returns the order in memory of the gradients of q, k and v: the order of q. The gradient of a view of (B, T, H,
    /// D) is such a view too, and is contiguous once the view is undone.
    fn gradient_layout(&self) -> OutputLayout {
        let strides = self.call.attention.q.stride();
        if strides[2] > strides[1] { OutputLayout::Bthd } else { OutputLayout::Bhtd }
    }

    /// Computes the gradients of the inputs that are tracked, from the output and its gradient in the output layout of
    /// the call.
    fn gradients<E: TensorElement>(
        &self,
        output: &Tensor,
        output_gradient: &Tensor,
        lse_gradient: Option<Tensor>,
    ) -> Result<PerInput<Option<Tensor>>> {
        let call = &self.call;
        let inputs = call.attention.differentiable();
        let layout = self.gradient_layout();
        let wanted = RequestedGradients { layout, of: inputs.map(is_tracked) };
        let of_output = swapped_for(call.attention.output_layout, output_gradient.clone())?;
        let found = self.requested_gradients::<E>(output, &of_output, lse_gradient, wanted)?;
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

    /// Computes the requested gradients from the output in the layout of the call, its gradient (B, H, T_q, D_v) and
    /// the gradient of the log-sum-exp (B, H, T_q).
    pub fn requested_gradients<E: TensorElement>(
        &self,
        output: &Tensor,
        output_gradient: &Tensor,
        lse_gradient: Option<Tensor>,
        wanted: RequestedGradients,
    ) -> Result<AttentionGradients<E>> {
        let Self { call, instruction_set, softmax_stats } = self;
        let output_rows = with_contiguous_rows(output_gradient)?;
        let lse_numbers = lse_gradient.as_ref().map(to_vec).transpose()?;
        let (locked_output, locked_rows) = (read(output), read(&output_rows));
        let tables = QueryTables::new(call)?;
        let locked = lock(call)?;
        let problem = AttentionBackwardProblem {
            forward: views(call, &tables, &locked)?,
            output: locked_output.contiguous::<E>()?,
            softmax_stats,
            output_grad: locked_rows.strided()?,
            lse_grad: lse_numbers.as_deref(),
        };
        let found = flash::attend_backward(&problem, *instruction_set, wanted);
        found.map_err(|error| public_error(call, error))
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
