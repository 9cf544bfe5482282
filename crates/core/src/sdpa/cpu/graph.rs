//! The fused kernel in Candle's graph, and its backward pass.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, WithDType, bail};

use super::{Dims, Flash};
use crate::sdpa::{Attended, OutputOrder};
use candle_attention_kernels::Element;
use candle_attention_kernels::flash::{self, BackwardProblem, Problem, SoftmaxStats, Wanted};
use candle_attention_modules::base::rowwise::{Op3, Operand, Ternary, read, with_contiguous_rows, with_float};

/// A call in Candle's graph, whose operations have three operands at most and one result. Where score tensors are
/// tracked, they are the third operand, one after the other, and keys and values are the second; where there is a
/// log-sum-exp, it follows the context in a flat result in f32. Candle's own operations join and take apart, and know
/// the gradients of that.
struct Node {
    flash: Flash,
    /// (B, H, T_q).
    stats: Vec<SoftmaxStats>,
    /// What the kernel gave, until it is in the graph.
    results: Mutex<Option<(CpuStorage, Shape)>>,
}

/// What the kernel gave for q, k and v, with gradients: the context as it lies in memory, and the log-sum-exp if it is
/// wanted.
pub(super) fn attended<E: Element + WithDType>(
    flash: Flash,
    [q, k, v]: [&Tensor; 3],
    context: Vec<E>,
    lse: Option<Vec<f32>>,
    stats: Vec<SoftmaxStats>,
) -> Result<Attended> {
    let (dims, shape) = (flash.dims, flash.context_shape());
    let results = match lse {
        Some(lse) => {
            let both: Vec<_> = context.iter().map(|x| x.to_f64() as f32).chain(lse).collect();
            let count = both.len();
            (CpuStorage::F32(both), count.into())
        }
        None => (E::to_cpu_storage_owned(context), shape.clone()),
    };
    let tracked = flash.scores.tracked().map(Tensor::flatten_all).collect::<Result<Vec<_>>>()?;
    let node = Op3(Node { flash, stats, results: Mutex::new(Some(results)) });
    let results = match tracked.is_empty() {
        true => q.apply_op3(k, v, node)?,
        false => {
            let keys_and_values = Tensor::cat(&[k.flatten_all()?, v.flatten_all()?], 0)?;
            q.apply_op3(&keys_and_values, &Tensor::cat(&tracked, 0)?, node)?
        }
    };
    let (context, lse) = apart(&results, &shape, dims, q.dtype())?;
    Ok(Attended { lse, ..Attended::context(context) })
}

/// The context of results, in its shape and dtype, and the log-sum-exp (B, H, T_q) that follows it in flat ones.
fn apart(results: &Tensor, shape: &Shape, dims: Dims, dtype: DType) -> Result<(Tensor, Option<Tensor>)> {
    if results.rank() > 1 {
        return Ok((results.clone(), None));
    }
    let (Dims { b, h, t_q, .. }, count) = (dims, shape.elem_count());
    let lse = results.narrow(0, count, b * h * t_q)?.reshape((b, h, t_q))?;
    Ok((results.narrow(0, 0, count)?.reshape(shape)?.to_dtype(dtype)?, Some(lse)))
}

impl Ternary for Node {
    const NAME: &'static str = "flash-attention";

    fn forward(&self, _: [Operand; 3]) -> Result<(CpuStorage, Shape)> {
        match self.results.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(results) => Ok(results),
            None => bail!("[{}] the operation is in a graph already", self.flash.op),
        }
    }

    fn backward(&self, operands: [&Tensor; 3], results: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let dtype = operands[0].dtype();
        let parts = |results: &Tensor| apart(&results.detach(), &self.flash.context_shape(), self.flash.dims, dtype);
        let ((context, _), (gradient, lse_gradient)) = (parts(results)?, parts(gradient)?);
        let lse_gradient = lse_gradient.map(|of_lse| of_lse.flatten_all()?.to_vec1::<f32>()).transpose()?;
        with_float!(self.flash.op, dtype, |E| self.gradients::<E>(operands, &context, &gradient, lse_gradient))
    }
}

impl Node {
    /// The gradients of the operands, as far as they are tracked. Contexts are as they lie in memory.
    fn gradients<E: Element + WithDType>(
        &self,
        operands: [&Tensor; 3],
        context: &Tensor,
        gradient: &Tensor,
        lse_gradient: Option<Vec<f32>>,
    ) -> Result<[Option<Tensor>; 3]> {
        let flash = &self.flash;
        let Dims { b, h_kv, t_kv, d, d_v, .. } = flash.dims;
        // (B, H, T_q, D_v), whatever the order in memory.
        let gradient = match flash.output_order {
            OutputOrder::Bhtd => gradient.clone(),
            OutputOrder::Bthd => gradient.transpose(1, 2)?,
        };
        let gradient = with_contiguous_rows(&gradient)?;
        let (context, gradient) = (read(context), read(&gradient));
        let (context, context_grad, lse_grad) = (context.contiguous()?, gradient.strided()?, lse_gradient.as_deref());

        let wanted_of_scores = flash.scores.wanted()?;
        let are_joined = wanted_of_scores != Wanted::default();
        let [q, second, third] = operands;
        let (k, v) = match are_joined {
            true => {
                let (both, count) = (second.detach(), b * h_kv * t_kv * d);
                let values = both.narrow(0, count, b * h_kv * t_kv * d_v)?.reshape((b, h_kv, t_kv, d_v))?;
                (both.narrow(0, 0, count)?.reshape((b, h_kv, t_kv, d))?, values)
            }
            false => (second.clone(), third.clone()),
        };
        let of_v = if are_joined { second } else { third };
        let wanted = Wanted { q: q.track_op(), k: second.track_op(), v: of_v.track_op(), ..wanted_of_scores };
        let found = flash.with_problem([q, &k, &v], |&forward: &Problem<E>| {
            let problem = BackwardProblem { forward, context, stats: &self.stats, context_grad, lse_grad };
            flash::attend_backward(&problem, flash.tier, wanted)
        })?;
        let like = |operand: &Tensor, gradient: Option<Vec<E>>| {
            gradient.map(|gradient| Tensor::from_vec(gradient, operand.shape(), operand.device())).transpose()
        };
        if !are_joined {
            return Ok([like(q, found.q)?, like(second, found.k)?, like(third, found.v)?]);
        }
        let of_both = found.k.zip(found.v).map(|(k, v)| [k, v].concat());
        let numbers = [found.bias, found.distances, found.slopes, found.sinks].into_iter().flatten().flatten();
        let of_scores = Tensor::from_vec(numbers.collect::<Vec<_>>(), third.shape(), third.device())?;
        Ok([like(q, found.q)?, like(second, of_both)?, Some(of_scores)])
    }
}
