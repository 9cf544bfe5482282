//! The backward pass of the fused kernel.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, WithDType};

use super::{Flash, ScoreTensors};
use crate::sdpa::OutputOrder;
use candle_attention_kernels::Element;
use candle_attention_kernels::flash::{self, BackwardProblem, Dims, Gradients, KvRows, Strided, Wanted};
use candle_attention_modules::base::rowwise::{read, with_contiguous_rows, with_float};

/// The results of the forward pass that a loss was made of.
struct Results<'a> {
    /// As it lies in memory.
    context: &'a Tensor,
    gradient: &'a Tensor,
    /// (B, H, T_q).
    lse_gradient: Option<Vec<f32>>,
}

/// [`Gradients`]: those of q, k and v in their shapes, and those of the score tensors one after the other.
type TensorGradients = ([Option<Tensor>; 3], Vec<f32>);

impl Flash {
    /// Of q, k and v, as far as they are tracked.
    pub(super) fn operand_gradients(
        &self,
        operands: [&Tensor; 3],
        context: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let results = Results { context, gradient, lse_gradient: None };
        let [q, k, v] = operands.map(Tensor::track_op);
        let wanted = Wanted { q, k, v, ..Default::default() };
        let gradients = with_float!(self.op, operands[0].dtype(), |E| self.gradients::<E>(operands, &results, wanted));
        Ok(gradients?.0)
    }

    fn gradients<E: Element + WithDType>(
        &self,
        operands: [&Tensor; 3],
        results: &Results,
        wanted: Wanted,
    ) -> Result<TensorGradients> {
        // (B, H, T_q, D_v), whatever the order in memory.
        let gradient = match self.output_order {
            OutputOrder::Bhtd => results.gradient.clone(),
            OutputOrder::Bthd => results.gradient.transpose(1, 2)?,
        };
        let gradient = with_contiguous_rows(&gradient)?;
        let [q, k, v] = operands.map(read);
        let (context, gradient) = (read(results.context), read(&gradient));
        let context: Strided<E, 1> = context.strided()?;
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let Some(stats) = self.stats.as_ref().and_then(|stats| stats.get()) else {
            return Err(self.error("the backward pass is without a forward pass"));
        };
        let kv = [KvRows::Float(k.strided()?), KvRows::Float(v.strided()?)];
        let gradients = self.with_problem(q.strided()?, kv, |&forward| {
            let problem = BackwardProblem {
                forward,
                context: &context.data[..b * h * t_q * d_v],
                stats,
                context_grad: gradient.strided()?,
                lse_grad: results.lse_gradient.as_deref(),
            };
            flash::attend_backward(&problem, self.tier, wanted).map_err(|error| self.error(error))
        })?;
        let Gradients { q, k, v, bias, distances, slopes, sinks } = gradients;
        let device = operands[0].device();
        let tensor = |gradient: Option<Vec<E>>, h: usize, t: usize, width: usize| {
            gradient.map(|gradient| Tensor::from_vec(gradient, (b, h, t, width), device)).transpose()
        };
        let operands = [tensor(q, h, t_q, d)?, tensor(k, h_kv, t_kv, d)?, tensor(v, h_kv, t_kv, d_v)?];
        Ok((operands, [bias, distances, slopes, sinks].into_iter().flatten().flatten().collect()))
    }
}

/// Attention that has more inputs than Candle's operations, or more results: they are joined in one flat tensor, and
/// taken apart by Candle's own operations, which know the gradients of that.
pub(super) struct FlattenedFlash {
    flash: Flash,
    /// Of biases, distance biases, slopes and sinks.
    wanted: Wanted,
}

impl FlattenedFlash {
    /// The context as it lies in memory, and the log-sum-exp if it is wanted.
    pub fn attend(
        operands: [&Tensor; 3],
        score_tensors: &ScoreTensors,
        flash: Flash,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let join = |tensors: &[&Tensor]| -> Result<Tensor> {
            let flat: Vec<_> = tensors.iter().map(|tensor| tensor.flatten_all()).collect::<Result<_>>()?;
            Tensor::cat(&flat, 0)
        };
        let is_tracked = |tensor: &Option<Tensor>| tensor.as_ref().is_some_and(Tensor::track_op);
        let bias = score_tensors.bias.as_ref().filter(|bias| bias.track_op());
        let wanted = Wanted {
            bias: bias.map(|bias| bias.dims4()).transpose()?.map(<[usize; 4]>::from),
            distances: is_tracked(&score_tensors.distances),
            slopes: is_tracked(&score_tensors.slopes),
            sinks: is_tracked(&score_tensors.sinks),
            ..Default::default()
        };
        let score_tensors = match score_tensors.are_tracked() {
            true => join(&score_tensors.tracked().collect::<Vec<_>>())?,
            false => Tensor::zeros(1, DType::F32, operands[0].device())?,
        };
        let (shape, wants_lse, Dims { b, h, t_q, .. }) = (flash.context_shape(), flash.lse.is_some(), flash.dims);
        let results = join(&operands)?.apply_op2(&score_tensors, Self { flash, wanted })?;
        let count = shape.elem_count();
        let context = results.narrow(0, 0, count)?.reshape(shape)?.to_dtype(operands[0].dtype())?;
        let lse = wants_lse.then(|| results.narrow(0, count, b * h * t_q)?.reshape((b, h, t_q)));
        Ok((context, lse.transpose()?))
    }

    /// The shapes of q, k and v.
    fn shapes(&self) -> [[usize; 4]; 3] {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.flash.dims;
        [[b, h, t_q, d], [b, h_kv, t_kv, d], [b, h_kv, t_kv, d_v]]
    }

    /// The results one after the other: in f32 with the log-sum-exp, else the context as it is.
    fn results<E: Element + WithDType>(&self, operands: &[E]) -> Result<CpuStorage> {
        let mut rest = operands;
        let operands = self.shapes().map(|shape| {
            let (data, after) = rest.split_at(shape.iter().product());
            rest = after;
            let [_, h, t, width] = shape;
            Strided { data, strides: [h * t * width, t * width, width] }
        });
        let [q, k, v] = operands;
        let context = self.flash.attend(q, [k.into(), v.into()])?;
        match self.flash.lse.as_ref().and_then(|lse| lse.get()) {
            Some(lse) => {
                let context = context.iter().map(|x| x.to_f64() as f32);
                Ok(CpuStorage::F32(context.chain(lse.iter().copied()).collect()))
            }
            None => Ok(E::to_cpu_storage_owned(context)),
        }
    }

    fn gradients<E: Element + WithDType>(
        &self,
        operands: &Tensor,
        results: &Results,
    ) -> Result<(Option<Tensor>, Vec<f32>)> {
        let (mut start, wants_operands) = (0, operands.track_op());
        let detached = operands.detach();
        let [q, k, v] = self.shapes().map(|shape| {
            let count = shape.iter().product();
            start += count;
            detached.narrow(0, start - count, count)?.reshape(&shape[..])
        });
        let wanted = Wanted { q: wants_operands, k: wants_operands, v: wants_operands, ..self.wanted };
        let (of_operands, of_score_tensors) = self.flash.gradients::<E>([&q?, &k?, &v?], results, wanted)?;
        let flat = of_operands.into_iter().flatten().map(|tensor| tensor.flatten_all()).collect::<Result<Vec<_>>>()?;
        Ok((wants_operands.then(|| Tensor::cat(&flat, 0)).transpose()?, of_score_tensors))
    }
}

impl CustomOp2 for FlattenedFlash {
    fn name(&self) -> &'static str {
        "flash-attention"
    }

    fn cpu_fwd(
        &self,
        operands: &CpuStorage,
        layout: &Layout,
        _leaves: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (start, end) = (layout.start_offset(), layout.start_offset() + layout.shape().elem_count());
        let results =
            with_float!(self.flash.op, operands.dtype(), |E| self.results(&operands.as_slice::<E>()?[start..end]))?;
        let Dims { b, h, t_q, .. } = self.flash.dims;
        let count = self.flash.context_shape().elem_count() + if self.flash.lse.is_some() { b * h * t_q } else { 0 };
        Ok((results, count.into()))
    }

    fn bwd(
        &self,
        operands: &Tensor,
        score_tensors: &Tensor,
        results: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (shape, dtype) = (self.flash.context_shape(), operands.dtype());
        let count = shape.elem_count();
        let of_context =
            |tensor: &Tensor| tensor.detach().narrow(0, 0, count)?.reshape(&shape)?.to_dtype(dtype)?.contiguous();
        let queries = gradient.elem_count() - count;
        let lse_gradient =
            self.flash.lse.as_ref().map(|_| gradient.narrow(0, count, queries)?.to_vec1()).transpose()?;
        let (context, gradient) = (of_context(results)?, of_context(gradient)?);
        let results = Results { context: &context, gradient: &gradient, lse_gradient };
        let (operand_gradient, tensor_gradients) =
            with_float!(self.flash.op, dtype, |E| self.gradients::<E>(operands, &results))?;
        let are_tracked = score_tensors
            .track_op()
            .then(|| Tensor::from_vec(tensor_gradients, score_tensors.shape(), score_tensors.device()));
        Ok((operand_gradient, are_tracked.transpose()?))
    }
}
