//! The fused kernel in Candle's graph, and its backward pass.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{Dims, Flash};
use crate::sdpa::{Attended, OutputOrder};
use candle_attention_kernels::flash::{self, BackwardProblem, Problem, SoftmaxStats, Wanted};
use candle_attention_modules::base::rowwise::{Element, read, to_vec, with_contiguous_rows};
use candle_attention_modules::base::{gradient_of, record, record_two};

/// What the kernel gave for q, k and v, with gradients: the context as it lies in memory, and the log-sum-exp if it is
/// wanted. `stats` are (B, H, T_q).
pub(super) fn attended<E: Element>(
    flash: Flash,
    rows: [&Tensor; 3],
    context: Vec<E>,
    lse: Option<Vec<f32>>,
    stats: Vec<SoftmaxStats>,
) -> Result<Attended> {
    let (name, Dims { b, h, t_q, .. }, shape) = ("flash-attention", flash.dims, flash.context_shape());
    let (own, flash) = (rows.map(Tensor::clone), Arc::new(flash));
    let operands: Vec<_> = rows.map(Some).into_iter().chain(flash.scores.all()).collect();
    let call = flash.clone();
    let backward = move |context: &Tensor, gradient: &Tensor, of_lse: Option<Tensor>| {
        call.gradients::<E>(own.each_ref(), &stats, context, gradient, of_lse)
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
        rows: [&Tensor; 3],
        stats: &[SoftmaxStats],
        context: &Tensor,
        gradient: &Tensor,
        of_lse: Option<Tensor>,
    ) -> Result<Vec<Option<Tensor>>> {
        // (B, H, T_q, D_v), whatever the order in memory.
        let gradient = match self.output_order {
            OutputOrder::Bhtd => gradient.clone(),
            OutputOrder::Bthd => gradient.transpose(1, 2)?,
        };
        let (gradient, lse_grad) = (with_contiguous_rows(&gradient)?, of_lse.as_ref().map(to_vec).transpose()?);
        let (context, gradient) = (read(context), read(&gradient));
        let (context, context_grad, lse_grad) = (context.contiguous()?, gradient.strided()?, lse_grad.as_deref());
        let [q, k, v] = rows.map(Tensor::track_op);
        let wanted = Wanted { q, k, v, ..self.scores.wanted()? };
        let found = self.with_problem(rows, |&forward: &Problem<E>| {
            let problem = BackwardProblem { forward, context, stats, context_grad, lse_grad };
            flash::attend_backward(&problem, self.tier, wanted)
        })?;
        let of_rows = rows.into_iter().zip([found.q, found.k, found.v]);
        let of_scores = [found.bias, found.distances, found.slopes, found.sinks];
        let of_scores = self.scores.all().into_iter().zip(of_scores);
        let of_rows = of_rows.map(|(row, numbers)| gradient_of(Some(row), numbers));
        of_rows.chain(of_scores.map(|(tensor, numbers)| gradient_of(tensor, numbers))).collect()
    }
}
