//! The fused kernel in Candle's graph, and its backward pass.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{Call, Dims, Flash, reordered};
use crate::sdpa::Attended;
use candle_attention_kernels::flash::{self, BackwardProblem, Problem, SoftmaxStats, Wanted};
use candle_attention_modules::base::rowwise::{Element, read, to_vec, with_contiguous_rows};
use candle_attention_modules::base::{gradient_of, record, record_two};

/// What the kernel gave for a call, with gradients: the context as it lies in memory, and the log-sum-exp if it is
/// wanted. `stats` are (B, H, T_q).
pub(super) fn attended<E: Element>(
    flash: Flash,
    context: Vec<E>,
    lse: Option<Vec<f32>>,
    stats: Vec<SoftmaxStats>,
) -> Result<Attended> {
    let (name, Dims { b, h, t_q, .. }, shape) = ("flash-attention", flash.call.dims, flash.context_shape());
    let flash = Arc::new(flash);
    let Call { q, k, v, .. } = &flash.call;
    let operands: Vec<_> = [q, k, v].map(Some).into_iter().chain(flash.scores.each_ref().map(Option::as_ref)).collect();
    let own = flash.clone();
    let backward = move |context: &Tensor, gradient: &Tensor, of_lse: Option<Tensor>| {
        own.gradients::<E>(&stats, context, gradient, of_lse)
    };
    let Some(lse) = lse else {
        let backward = move |context: &Tensor, gradient: &Tensor| backward(context, gradient, None);
        return Ok(Attended::context(record(name, &operands, context, shape, backward)?));
    };
    let [context, lse] = record_two(name, &operands, [shape, (b, h, t_q).into()], context, lse, backward)?;
    Ok(Attended { lse: Some(lse), ..Attended::context(context) })
}

impl Flash {
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
        let gradient = reordered(self.call.output_order(), gradient.clone())?;
        let (gradient, lse_grad) = (with_contiguous_rows(&gradient)?, of_lse.as_ref().map(to_vec).transpose()?);
        let (context, gradient) = (read(context), read(&gradient));
        let (context, context_grad, lse_grad) = (context.contiguous()?, gradient.strided()?, lse_grad.as_deref());
        let (rows, scores) = ([&self.call.q, &self.call.k, &self.call.v], self.scores.each_ref().map(Option::as_ref));
        let [q, k, v] = rows.map(Tensor::track_op);
        let [bias, distances, slopes, sinks] = scores.map(|tensor| tensor.filter(|tensor| tensor.track_op()));
        let bias = bias.map(|bias| bias.dims4()).transpose()?.map(<[usize; 4]>::from);
        let [distances, slopes, sinks] = [distances, slopes, sinks].map(|tensor| tensor.is_some());
        let wanted = Wanted { q, k, v, bias, distances, slopes, sinks };
        let found = self.with_problem(|&forward: &Problem<E>| {
            let problem = BackwardProblem { forward, context, stats, context_grad, lse_grad };
            flash::attend_backward(&problem, self.tier, wanted)
        })?;
        let of_rows = rows.map(Some).into_iter().zip([found.q, found.k, found.v]);
        let of_rows = of_rows.map(|(row, numbers)| gradient_of(row, numbers));
        let of_scores = scores.into_iter().zip([found.bias, found.distances, found.slopes, found.sinks]);
        of_rows.chain(of_scores.map(|(tensor, numbers)| gradient_of(tensor, numbers))).collect()
    }
}
