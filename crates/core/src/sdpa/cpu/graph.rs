//! The fused kernel in Candle's graph, and its backward pass.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{Call, Dims, Flash, reordered};
use crate::sdpa::Attended;
use candle_attention_kernels::flash::{
    self, AttentionBackwardProblem, AttentionProblem, RequestedGradients, SoftmaxStats,
};
use candle_attention_modules::base::rowwise::{Element, read, to_vec, with_contiguous_rows};
use candle_attention_modules::base::{gradient_of, record, record_two};

/// What the kernel gave for a call, with gradients if something is tracked: the context as it lies in memory, and the
/// log-sum-exp if it is wanted. `stats` are (B, H, T_q) then.
pub(super) fn attended<E: Element>(
    flash: Flash,
    context: Vec<E>,
    lse: Option<Vec<f32>>,
    stats: Vec<SoftmaxStats>,
) -> Result<Attended> {
    let (name, Dims { b, h, t_q, .. }, shape) = ("flash-attention", flash.call.dims, flash.context_shape());
    let own = Arc::new(flash);
    let flash = own.clone();
    let backward = move |context: &Tensor, gradient: &Tensor, of_lse: Option<Tensor>| {
        flash.gradients::<E>(&stats, context, gradient, of_lse)
    };
    let Some(lse) = lse else {
        let backward = move |context: &Tensor, gradient: &Tensor| backward(context, gradient, None);
        return Ok(Attended::context(record(name, &own.inputs(), context, shape, backward)?));
    };
    let [context, lse] = record_two(name, &own.inputs(), [shape, (b, h, t_q).into()], context, lse, backward)?;
    Ok(Attended { lse: Some(lse), ..Attended::context(context) })
}

impl Flash {
    /// What gradients flow into.
    fn inputs(&self) -> [Option<&Tensor>; 7] {
        let Call { q, k, v, .. } = &self.call;
        let [bias, distances, slopes, sinks] = self.scores.each_ref().map(Option::as_ref);
        [Some(q), Some(k), Some(v), bias, distances, slopes, sinks]
    }

    /// The gradients of q, k and v and of the score tensors, as far as they are tracked. Contexts are as they lie in
    /// memory.
    fn gradients<E: Element>(
        &self,
        stats: &[SoftmaxStats],
        context: &Tensor,
        gradient: &Tensor,
        of_lse: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        // (B, H, T_q, D_v), whatever the order in memory.
        let gradient = reordered(self.call.output_layout(), gradient.clone())?;
        let (gradient, lse_grad) = (with_contiguous_rows(&gradient)?, of_lse.as_ref().map(to_vec).transpose()?);
        let (context, gradient) = (read(context), read(&gradient));
        let (context, context_grad, lse_grad) = (context.contiguous()?, gradient.strided()?, lse_grad.as_deref());
        let inputs = self.inputs();
        let (rows, scores) = inputs.split_at(3);
        let tracked = inputs.map(|input| input.filter(|input| input.track_op()));
        let [q, k, v, _, distances, slopes, sinks] = tracked.map(|input| input.is_some());
        let bias = tracked[3].map(|bias| bias.dims4()).transpose()?.map(<[usize; 4]>::from);
        let wanted = RequestedGradients { q, k, v, bias, relative_bias: distances, slopes, sinks };
        let found = self.with_problem(|&forward: &AttentionProblem<E>| {
            let problem =
                AttentionBackwardProblem { forward, output: context, stats, output_grad: context_grad, lse_grad };
            flash::attend_backward(&problem, self.instruction_set, wanted)
        })?;
        let of_rows = rows.iter().zip([found.q, found.k, found.v]);
        let of_rows = of_rows.map(|(row, numbers)| gradient_of(*row, numbers));
        let of_scores = scores.iter().zip([found.bias, found.relative_bias, found.slopes, found.sinks]);
        of_rows.chain(of_scores.map(|(tensor, numbers)| gradient_of(*tensor, numbers))).collect()
    }
}
