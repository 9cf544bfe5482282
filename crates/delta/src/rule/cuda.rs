//! The CUDA kernels, and their results in Candle's graph. Nothing here waits for the device or reads from it.

use candle_attention_cuda::{CudaDeltaCall, CudaDeltaGradients, DeltaResults};
use candle_core::{Result, Tensor};

use super::call::{AllHeadGradients, CheckedDelta};
use candle_attention_kernels::delta::DeltaDims;
use candle_attention_modules::base::record_two;
use candle_attention_modules::base::rowwise::with_contiguous_rows;

/// A call that the kernels support, in the form that they read.
pub(super) struct CudaDeltaPath {
    call: CheckedDelta,
    kernels: CudaDeltaCall,
}

impl CudaDeltaPath {
    /// Returns the call for the kernels, which are loaded, or the reason why they do not run it.
    pub fn plan(call: &CheckedDelta) -> std::result::Result<Self, String> {
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
