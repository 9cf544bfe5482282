//! The fused kernel of the CPU: how a call goes to it, and what it gives.

mod graph;

use std::ops::Range;

use candle_core::{DType, Error, Result, Shape, Tensor, WithDType};

use super::rows::RowRanges;
use super::validate::{Call, Dims};
use super::{Attended, AttentionStatistics, OutputOrder, Outputs, plan, reference};
use candle_attention_kernels::Tier;
use candle_attention_kernels::flash::{
    self, Alibi, DistanceBias, Dropout, DropoutMask, KvRows, Problem, ScoreOptions, Wanted,
};
use candle_attention_modules::base::executor;
use candle_attention_modules::base::rowwise::{Element, Read, read, with_contiguous_rows, with_float};
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
    let flash = Flash {
        op: call.op,
        tier,
        dims: call.dims,
        scale: call.scale(),
        softcap: call.options.softcap.map(|softcap| softcap as f32),
        ranges: rows.keys,
        positions: rows.positions.into_iter().map(|position| position as f32).collect(),
        origins: rows.origins,
        scores: ScoreTensors::new(call)?,
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

/// What a call reads besides q, k and v, in f32. Gradients flow into it.
struct ScoreTensors {
    /// Broadcastable to (B, H, T_q, T_kv).
    bias: Option<Tensor>,
    /// Rows of (B or 1, H).
    distances: Option<Tensor>,
    /// (H,), contiguous. Copies, so that what a variable holds later does not reach the backward pass.
    slopes: Option<Tensor>,
    sinks: Option<Tensor>,
}

impl ScoreTensors {
    fn new(call: &Call) -> Result<Self> {
        let floats = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_dtype(DType::F32)).transpose();
        let copy = |tensor: &Option<Tensor>| floats(tensor)?.map(|tensor| tensor.force_contiguous()).transpose();
        let bias = call.mask.bias_tensor(call.score_dims(), DType::F32, call.q.device())?;
        let narrowed = |bias: Tensor| {
            // An entry that a view repeats is one entry, whose gradient is the sum.
            let repeats = |dim: &usize| bias.dims()[*dim] > 1 && bias.stride()[*dim] == 0;
            (0..4).filter(repeats).try_fold(bias.clone(), |bias, dim| bias.narrow(dim, 0, 1))
        };
        Ok(Self {
            bias: bias.map(narrowed).transpose()?,
            distances: match floats(&call.options.distance_bias)? {
                Some(biases) if biases.rank() == 2 => Some(biases.contiguous()?.unsqueeze(0)?),
                biases => biases.map(|biases| biases.contiguous()).transpose()?,
            },
            slopes: copy(&call.options.alibi_slopes)?,
            sinks: copy(&call.options.sinks)?,
        })
    }

    /// In the order of the fields.
    fn all(&self) -> [Option<&Tensor>; 4] {
        let Self { bias, distances, slopes, sinks } = self;
        [bias, distances, slopes, sinks].map(Option::as_ref)
    }

    /// Those that are tracked for gradients, as the kernel names them.
    fn wanted(&self) -> Result<Wanted> {
        let [bias, distances, slopes, sinks] = self.all().map(|tensor| tensor.filter(|tensor| tensor.track_op()));
        Ok(Wanted {
            bias: bias.map(|bias| bias.dims4()).transpose()?.map(<[usize; 4]>::from),
            distances: distances.is_some(),
            slopes: slopes.is_some(),
            sinks: sinks.is_some(),
            ..Default::default()
        })
    }
}

/// A call without q, k and v.
struct Flash {
    op: &'static str,
    tier: Tier,
    dims: Dims,
    scale: f64,
    softcap: Option<f32>,
    /// (B, T_q).
    ranges: Vec<Range<usize>>,
    /// (B, T_q), where there are slopes.
    positions: Vec<f32>,
    /// (B, T_q), where there are biases by distance.
    origins: Vec<i64>,
    scores: ScoreTensors,
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
        operands: [&Tensor; 3],
        run: impl FnOnce(&Problem<E>) -> std::result::Result<R, candle_attention_kernels::Error>,
    ) -> Result<R> {
        let [q, k, v] = operands.map(read);
        let scales = self.scales.as_ref().map(|scales| scales.each_ref().map(read));
        let (k, v) = match &scales {
            None => (KvRows::Float(k.strided()?), KvRows::Float(v.strided()?)),
            Some([of_k, of_v]) => (
                KvRows::Q8 { codes: k.strided()?, scales: of_k.strided()? },
                KvRows::Q8 { codes: v.strided()?, scales: of_v.strided()? },
            ),
        };
        let [bias, distances, slopes, sinks] = self.scores.all();
        let score_tensors = [bias, distances, slopes, sinks, self.keep.as_ref()].map(|tensor| tensor.map(read));
        let [bias, distances, slopes, sinks, keep] = score_tensors.each_ref().map(Option::as_ref);
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
            keep: keep.map(Read::strided).transpose()?,
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

    /// The context as it lies in memory, and what is wanted beside it.
    fn attend<E: Element>(self, call: &Call, outputs: Outputs) -> Result<Attended> {
        let [q, k, v] = [&call.q, &call.k, &call.v].map(with_contiguous_rows);
        let (operands, device) = ([&q?, &k?, &v?], call.q.device());
        if let Outputs::Statistics(wanted) = outputs {
            let options = wanted.as_kernels();
            let observe = |problem: &Problem<E>| flash::attend_with_statistics(problem, self.tier, &options);
            let (context, found) = self.with_problem(operands, observe)?;
            let context = Tensor::from_vec(context, self.context_shape(), device)?;
            let statistics = Some(AttentionStatistics::of_kernel(found, call, wanted)?);
            return Ok(Attended { statistics, ..Attended::context(context) });
        }
        let (is_tracked, mut lse, mut stats) =
            (plan::tracks_gradients(call), (outputs == Outputs::LogSumExp).then(Vec::new), Vec::new());
        let context = self.with_problem(operands, |problem: &Problem<E>| {
            flash::attend_vec(problem, self.tier, lse.as_mut(), is_tracked.then_some(&mut stats))
        })?;
        if is_tracked {
            return graph::attended(self, operands, context, lse, stats);
        }
        let Dims { b, h, t_q, .. } = self.dims;
        let lse = lse.map(|lse| Tensor::from_vec(lse, (b, h, t_q), device)).transpose()?;
        Ok(Attended { lse, ..Attended::context(Tensor::from_vec(context, self.context_shape(), device)?) })
    }
}
