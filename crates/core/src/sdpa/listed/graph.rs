//! Attention to listed keys as an operation of Candle's graph.

use std::sync::Arc;

use candle_attention_call::{AttentionCall, PerInput, RequestedGradients};
use candle_core::{Result, Tensor, bail};

use super::super::call::{Call, is_tracked, swapped_for};
use super::super::cpu::{self, CpuForward};
use super::super::options::OutputLayout;
use super::super::results::Attended;
use super::part::parts_of;
use super::rows::{ListableRows, RowSums};
use super::{ListedKernel, ListedResults, whole};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::SoftmaxStats;
use candle_attention_modules::base::record_two;
use candle_attention_modules::base::rowwise::{TensorElement, to_vec};

/// Returns the results, with the log-sum-exp, and with gradients for the inputs that are tracked.
pub(super) fn record_results<E: TensorElement>(
    call: Call,
    instruction_set: InstructionSet,
    found: ListedResults,
) -> Result<Attended> {
    let ListedResults { output, log_sum_exp, softmax_stats } = found;
    let Some(lse) = &log_sum_exp else {
        bail!("[{}] expected the log-sum-exp of a call with gradients, found none", call.op)
    };
    let layout = call.attention.output_layout;
    let stored = swapped_for(layout, output)?;
    let shapes = [stored.shape().clone(), lse.shape().clone()];
    let shared = Arc::new(call);
    let forward = ListedForward { call: shared.clone(), instruction_set, softmax_stats };
    let backward = move |recorded: &Tensor, gradient: &Tensor, lse_gradient: Option<Tensor>| {
        let of_output = swapped_for(layout, gradient.clone())?;
        forward.gradients::<E>(&swapped_for(layout, recorded.clone())?, &of_output, lse_gradient)
    };
    // A call with a modifier that depends on keys runs on another path.
    let PerInput { q, k, v, bias: _, relative_bias: _, alibi_slopes: _, sinks } = shared.attention.differentiable();
    let operands = [q, k, v, sinks];
    let (numbers, lse_numbers) = (to_vec::<E>(&stored)?, to_vec::<f32>(lse)?);
    let [recorded, recorded_lse] = record_two("listed-attention", &operands, shapes, numbers, lse_numbers, backward)?;
    Ok(Attended { log_sum_exp: Some(recorded_lse), ..swapped_for(layout, recorded)?.into() })
}

/// A forward pass whose gradients may be requested.
struct ListedForward {
    call: Arc<Call>,
    instruction_set: InstructionSet,
    /// The statistics of the softmax of each part, (blocks, H, queries of a block).
    softmax_stats: Vec<Vec<SoftmaxStats>>,
}

impl ListedForward {
    /// Computes the gradients of q, k, v and the sinks, as far as these are tracked, from the output (B, H, T_q, D_v)
    /// and the gradients of the output and of the log-sum-exp (B, H, T_q).
    fn gradients<E: TensorElement>(
        &self,
        output: &Tensor,
        of_output: &Tensor,
        of_lse: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        let call = &self.call;
        let AttentionCall { q, k, v, scores, .. } = &call.attention;
        let of = PerInput {
            q: q.track_op(),
            k: k.track_op(),
            v: v.track_op(),
            bias: false,
            relative_bias: false,
            alibi_slopes: false,
            sinks: is_tracked(scores.sinks.as_ref()),
        };
        let wanted = RequestedGradients { layout: OutputLayout::Bhtd, of };
        let stored = ListableRows::new(call)?;
        let mut of_queries = Vec::new();
        let mut of_keys = k.track_op().then(|| RowSums::of(call, k)).transpose()?;
        let mut of_values = v.track_op().then(|| RowSums::of(call, v)).transpose()?;
        let mut of_sinks = vec![0f32; call.attention.dims.h];
        for (part, softmax_stats) in parts_of(call)?.zip(&self.softmax_stats) {
            let part = part?;
            let forward = CpuForward {
                call: Arc::new(cpu::prepared_call(
                    part.call(call, &stored, ListedKernel::Cpu(self.instruction_set))?,
                    None,
                )?),
                instruction_set: self.instruction_set,
                softmax_stats: softmax_stats.clone(),
            };
            let own_lse = match &of_lse {
                Some(gradient) => Some(part.in_blocks(&gradient.unsqueeze(3)?)?.squeeze(3)?),
                None => None,
            };
            let own_output = part.in_blocks(output)?.contiguous()?;
            let of_own_output = part.in_blocks(of_output)?;
            let found = forward.requested_gradients::<E>(&own_output, &of_own_output, own_lse, wanted)?;
            if let Some(numbers) = found.q {
                let of_own_q = Tensor::from_vec(numbers, forward.call.attention.q.shape(), q.device())?;
                of_queries.push(part.in_order(&of_own_q)?);
            }
            if let (Some(sums), Some(gradient)) = (&mut of_keys, found.k) {
                sums.add(part.entry(), &part.selected, &gradient);
            }
            if let (Some(sums), Some(gradient)) = (&mut of_values, found.v) {
                sums.add(part.entry(), &part.selected, &gradient);
            }
            for (sum, term) in of_sinks.iter_mut().zip(found.sinks.into_iter().flatten()) {
                *sum += term;
            }
        }
        let of_q = q.track_op().then(|| whole(call, &of_queries)).transpose()?;
        let of_k = of_keys.map(|sums| sums.into_tensor(call, k)).transpose()?;
        let of_v = of_values.map(|sums| sums.into_tensor(call, v)).transpose()?;
        let of_sinks = match &scores.sinks {
            Some(sinks) if of.sinks => {
                Some(Tensor::from_vec(of_sinks, sinks.shape(), sinks.device())?.to_dtype(sinks.dtype())?)
            }
            _ => None,
        };
        Ok(vec![of_q, of_k, of_v, of_sinks])
    }
}
