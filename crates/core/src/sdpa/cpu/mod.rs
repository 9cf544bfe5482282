//! The fused kernel of the CPU: how a call goes to it, what it gives, and its backward pass.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Error, Result, Shape, Tensor, WithDType};

use super::rows::RowRanges;
use super::validate::{Call, Dims};
use super::{Attended, AttentionStatistics, OutputOrder, Outputs, plan, reference};
use candle_attention_kernels::Tier;
use candle_attention_kernels::flash::{
    self, Alibi, BackwardProblem, DistanceBias, Dropout, DropoutMask, KvRows, Problem, ScoreOptions, SoftmaxStats,
    Wanted,
};
use candle_attention_modules::base::rowwise::{Element, Read, read, to_vec, with_contiguous_rows, with_float};
use candle_attention_modules::base::{executor, gradient_of, record, record_two};
use candle_attention_modules::init::TorchSeed;

/// What is wanted of a call. No input is tracked for gradients where it is statistics.
pub(super) fn attend(call: &Call, tier: Tier, outputs: Outputs) -> Result<Attended> {
    let Dims { b, t_q, t_kv, d_v, .. } = call.dims;
    if plan::tracks_gradients(call) && [b, t_q, t_kv, d_v].contains(&0) {
        // The backward pass of the kernel is for calls that compute something.
        return reference::attend(call, outputs);
    }
    let rows = RowRanges::new(call)?;
    let (kept, philox) = match (&call.options.dropout_seed, call.options.dropout_philox_seed) {
        _ if !call.options.drops() => (None, None),
        (Some(seed), _) => (Some(kept_weights(seed, call)?), None),
        (None, Some(seed)) => (None, Some(seed)),
        (None, None) => (None, Some(drawn_seed(call)?)),
    };
    let [q, k, v] = [&call.q, &call.k, &call.v].map(with_contiguous_rows);
    let flash = Flash {
        op: call.op,
        tier,
        rows: [q?, k?, v?],
        dims: call.dims,
        scale: call.scale(),
        softcap: call.options.softcap.map(|softcap| softcap as f32),
        ranges: rows.keys,
        positions: rows.positions.into_iter().map(|position| position as f32).collect(),
        origins: rows.origins,
        scores: score_tensors(call)?,
        keep: call.mask.explicit_keep(call.score_dims(), call.q.device())?,
        dropout: call.options.dropout,
        kept,
        philox,
        scales: call.scales.cloned(),
        output_order: call.output_order(),
    };
    let attended = with_float!(call.op, call.q.dtype(), |E| flash.attend::<E>(call, outputs))?;
    // The context as it lies in memory, as (B, H, T_q, D_v).
    match call.output_order() {
        OutputOrder::Bhtd => Ok(attended),
        OutputOrder::Bthd => Ok(Attended { context: attended.context.transpose(1, 2)?, ..attended }),
    }
}

/// Which weights PyTorch's generator keeps: a bit for each.
fn kept_weights(seed: &TorchSeed, call: &Call) -> Result<Vec<u8>> {
    let keep = seed.dropout_keep(&call.score_dims(), call.options.dropout)?.flatten_all()?.to_vec1::<u8>()?;
    let byte = |bits: &[u8]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
    Ok(keep.chunks(8).map(byte).collect())
}

/// A seed of Philox: 24 bits of each of some numbers, from the generator of the device.
fn drawn_seed(call: &Call) -> Result<u64> {
    let numbers = Tensor::rand(0f32, 1f32, 3, call.q.device())?.to_vec1::<f32>()?;
    let bits = |x: f32| (f64::from(x) * f64::from(1 << 24)) as u64;
    Ok(numbers.into_iter().fold(0u64, |seed, x| seed.rotate_left(24) ^ bits(x)))
}

/// What a call reads besides q, k and v, in f32: a bias broadcastable to (B, H, T_q, T_kv), biases by distance in rows
/// of (B or 1, H), slopes and sinks (H,). Gradients flow into them.
fn score_tensors(call: &Call) -> Result<[Option<Tensor>; 4]> {
    let floats = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_dtype(DType::F32)).transpose();
    // So that what a variable holds later does not reach the backward pass.
    let copy = |tensor: &Option<Tensor>| floats(tensor)?.map(|tensor| tensor.force_contiguous()).transpose();
    let bias = call.mask.bias_tensor(call.score_dims(), DType::F32, call.q.device())?;
    let narrowed = |bias: Tensor| {
        // An entry that a view repeats is one entry, whose gradient is the sum.
        let repeats = |dim: &usize| bias.dims()[*dim] > 1 && bias.stride()[*dim] == 0;
        (0..4).filter(repeats).try_fold(bias.clone(), |bias, dim| bias.narrow(dim, 0, 1))
    };
    let distances = match floats(&call.options.distance_bias)? {
        Some(biases) if biases.rank() == 2 => Some(biases.contiguous()?.unsqueeze(0)?),
        biases => biases.map(|biases| biases.contiguous()).transpose()?,
    };
    let (slopes, sinks) = (copy(&call.options.alibi_slopes)?, copy(&call.options.sinks)?);
    Ok([bias.map(narrowed).transpose()?, distances, slopes, sinks])
}

/// A call.
struct Flash {
    op: &'static str,
    tier: Tier,
    /// q, k and v, whose rows are contiguous.
    rows: [Tensor; 3],
    dims: Dims,
    scale: f64,
    softcap: Option<f32>,
    /// (B, T_q).
    ranges: Vec<Range<usize>>,
    /// (B, T_q), where there are slopes.
    positions: Vec<f32>,
    /// (B, T_q), where there are biases by distance.
    origins: Vec<i64>,
    /// Bias, biases by distance, slopes and sinks.
    scores: [Option<Tensor>; 4],
    /// Broadcastable to (B, H, T_q, T_kv).
    keep: Option<Tensor>,
    /// The probability with which weights are dropped: those with a bit of 0, or those that Philox draws for a seed.
    dropout: f64,
    kept: Option<Vec<u8>>,
    philox: Option<u64>,
    /// Of keys and values of 8 bits.
    scales: Option<[Tensor; 2]>,
    output_order: OutputOrder,
}

impl Flash {
    /// The context as it lies in memory.
    fn context_shape(&self) -> Shape {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        match self.output_order {
            OutputOrder::Bhtd => (b, h, t_q, d_v).into(),
            OutputOrder::Bthd => (b, t_q, h, d_v).into(),
        }
    }

    /// Gives the call to a function of the kernels.
    fn with_problem<E: WithDType, R>(
        &self,
        run: impl FnOnce(&Problem<E>) -> std::result::Result<R, candle_attention_kernels::Error>,
    ) -> Result<R> {
        let [q, k, v] = self.rows.each_ref().map(read);
        let scales = self.scales.as_ref().map(|scales| scales.each_ref().map(read));
        let (k, v) = match &scales {
            None => (KvRows::Float(k.strided()?), KvRows::Float(v.strided()?)),
            Some([of_k, of_v]) => (
                KvRows::Q8 { codes: k.strided()?, scales: of_k.strided()? },
                KvRows::Q8 { codes: v.strided()?, scales: of_v.strided()? },
            ),
        };
        let (scores, keep) = (self.scores.each_ref().map(|own| own.as_ref().map(read)), self.keep.as_ref().map(read));
        let [bias, distances, slopes, sinks] = scores.each_ref().map(Option::as_ref);
        let distance_bias = match distances {
            Some(biases) => {
                Some(DistanceBias { rows: biases.strided()?, len: biases.layout.dims()[2], origins: &self.origins })
            }
            None => None,
        };
        let slopes = slopes.map(Read::contiguous).transpose()?;
        let kept = self.kept.as_deref().map(DropoutMask::Kept);
        let scores = ScoreOptions {
            scale: self.scale,
            softcap: self.softcap,
            alibi: slopes.map(|slopes| Alibi { slopes, positions: &self.positions }),
            distance_bias,
            bias: bias.map(Read::strided).transpose()?,
            keep: keep.as_ref().map(Read::strided).transpose()?,
            sinks: sinks.map(Read::contiguous).transpose()?,
            dropout: kept.or(self.philox.map(DropoutMask::Philox)).map(|mask| Dropout { mask, p: self.dropout }),
        };
        let problem = Problem {
            dims: self.dims,
            q: q.strided()?,
            k,
            v,
            ranges: &self.ranges,
            scores,
            output_order: self.output_order,
            executor: executor(),
        };
        run(&problem).map_err(|error| Error::msg(format!("[{}] {error}", self.op)))
    }

    /// What gradients flow into.
    fn inputs(&self) -> [Option<&Tensor>; 7] {
        let ([q, k, v], [bias, distances, slopes, sinks]) = (&self.rows, self.scores.each_ref().map(Option::as_ref));
        [Some(q), Some(k), Some(v), bias, distances, slopes, sinks]
    }

    /// The context as it lies in memory, and what is wanted beside it.
    fn attend<E: Element>(self, call: &Call, outputs: Outputs) -> Result<Attended> {
        let Dims { b, h, t_q, .. } = self.dims;
        let (name, shape) = ("flash-attention", self.context_shape());
        if let Outputs::Statistics(wanted) = outputs {
            let options = wanted.as_kernels();
            let observe = |problem: &Problem<E>| flash::attend_with_statistics(problem, self.tier, &options);
            let (context, found) = self.with_problem(observe)?;
            let context = Tensor::from_vec(context, shape, call.q.device())?;
            let statistics = Some(AttentionStatistics::of_kernel(found, call, wanted)?);
            return Ok(Attended { statistics, ..Attended::context(context) });
        }
        let (is_tracked, mut lse, mut stats) =
            (plan::tracks_gradients(call), (outputs == Outputs::LogSumExp).then(Vec::new), Vec::new());
        let context = self.with_problem(|problem: &Problem<E>| {
            flash::attend_vec(problem, self.tier, lse.as_mut(), is_tracked.then_some(&mut stats))
        })?;
        let own = Arc::new(self);
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
        let gradient = match self.output_order {
            OutputOrder::Bhtd => gradient.clone(),
            OutputOrder::Bthd => gradient.transpose(1, 2)?,
        };
        let (gradient, lse_grad) = (with_contiguous_rows(&gradient)?, of_lse.as_ref().map(to_vec).transpose()?);
        let (context, gradient) = (read(context), read(&gradient));
        let (context, context_grad, lse_grad) = (context.contiguous()?, gradient.strided()?, lse_grad.as_deref());
        let is_tracked = self.inputs().map(|input| input.is_some_and(Tensor::track_op));
        let [q, k, v, bias, distances, slopes, sinks] = is_tracked;
        let bias = self.scores[0].as_ref().filter(|_| bias).map(|bias| bias.dims4()).transpose()?;
        let wanted = Wanted { q, k, v, bias: bias.map(<[usize; 4]>::from), distances, slopes, sinks };
        let found = self.with_problem(|&forward: &Problem<E>| {
            let problem = BackwardProblem { forward, context, stats, context_grad, lse_grad };
            flash::attend_backward(&problem, self.tier, wanted)
        })?;
        let of_rows = self.rows.iter().zip([found.q, found.k, found.v]);
        let of_rows = of_rows.map(|(row, numbers)| gradient_of(Some(row), numbers));
        let of_scores = self.scores.iter().zip([found.bias, found.distances, found.slopes, found.sinks]);
        of_rows.chain(of_scores.map(|(own, numbers)| gradient_of(own.as_ref(), numbers))).collect()
    }
}
