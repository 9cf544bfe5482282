//! The fused kernel of the CPU: how a call goes to it, and what it gives.

mod graph;

use candle_core::{DType, Error, Result, Shape, Tensor, WithDType};

use super::validate::{Call, Dims, reordered};
use super::{Attended, AttentionStatistics, OutputLayout, Outputs, SdpaOptions, reference};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::{
    self, Alibi, AttentionProblem, Dropout, DropoutMask, KvRows, RelativeBias, ScoreOptions,
};
use candle_attention_modules::base::executor;
use candle_attention_modules::base::rowwise::{Element, Read, read, with_contiguous_rows, with_float};
use candle_attention_modules::init::TorchSeed;

/// What is wanted of a call. No input is tracked for gradients where it is statistics.
pub(super) fn attend(call: Call, instruction_set: InstructionSet, outputs: Outputs) -> Result<Attended> {
    let (Dims { b, t_q, t_kv, d_v, .. }, order) = (call.dims, call.output_layout());
    if call.tracks_gradients() && [b, t_q, t_kv, d_v].contains(&0) {
        // The backward pass of the kernel is for calls that compute something.
        return reference::attend(&call, outputs);
    }
    let flash = Flash::new(call, instruction_set)?;
    let attended = with_float!(flash.call.op, flash.call.q.dtype(), |E| flash.attend::<E>(outputs))?;
    Ok(Attended { context: reordered(order, attended.context)?, ..attended })
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

/// What a call reads besides q, k and v, in f32 and in this order: biases broadcastable to (B, H, T_q, T_kv), biases by
/// distance in rows of (B or 1, H), slopes (H,), sinks (H,). Gradients flow into it.
type ScoreTensors = [Option<Tensor>; 4];

fn score_tensors(call: &Call) -> Result<ScoreTensors> {
    let floats = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_dtype(DType::F32)).transpose();
    // So that what a variable holds later does not reach the backward pass.
    let copy = |tensor: &Option<Tensor>| floats(tensor)?.map(|tensor| tensor.force_contiguous()).transpose();
    let narrowed = |bias: &Tensor| {
        // An entry that a view repeats is one entry, whose gradient is the sum.
        let repeats = |dim: &usize| bias.dims()[*dim] > 1 && bias.stride()[*dim] == 0;
        (0..4).filter(repeats).try_fold(bias.clone(), |bias, dim| bias.narrow(dim, 0, 1))
    };
    let distances = match floats(&call.options.relative_bias)? {
        Some(biases) if biases.rank() == 2 => Some(biases.contiguous()?.unsqueeze(0)?),
        biases => biases.map(|biases| biases.contiguous()).transpose()?,
    };
    let bias = call.bias.as_ref().map(narrowed).transpose()?;
    Ok([bias, distances, copy(&call.options.alibi_slopes)?, copy(&call.options.sinks)?])
}

/// A call as the kernel takes it: q, k and v have contiguous rows.
struct Flash {
    call: Call,
    instruction_set: InstructionSet,
    scores: ScoreTensors,
    /// (B, T_q), where there are slopes.
    positions: Vec<f32>,
    /// (B, T_q), where there are biases by distance: the entry that is of key 0.
    origins: Vec<i64>,
    /// Which weights are dropped, where some are: those with a bit of 0, or those that Philox draws for a seed.
    kept: Option<Vec<u8>>,
    philox: Option<u64>,
}

impl Flash {
    fn new(call: Call, instruction_set: InstructionSet) -> Result<Self> {
        let positions = if call.options.alibi_slopes.is_some() { call.rows.positions()? } else { Vec::new() };
        let last_query = call.longest()[0] as i64 - 1;
        let origins = match call.options.relative_bias {
            Some(_) => call.rows.by_query(|sequence, i| last_query - i - sequence.first_key as i64)?,
            None => Vec::new(),
        };
        let (kept, philox) = match (&call.options.dropout_seed, call.options.dropout_philox_seed) {
            _ if !call.options.drops() => (None, None),
            (Some(seed), _) => (Some(kept_weights(seed, &call)?), None),
            (None, Some(seed)) => (None, Some(seed)),
            (None, None) => (None, Some(drawn_seed(&call)?)),
        };
        let [q, k, v] = [&call.q, &call.k, &call.v].map(with_contiguous_rows);
        Ok(Self {
            scores: score_tensors(&call)?,
            // What was drawn by a seed is not kept for the backward pass.
            call: Call { q: q?, k: k?, v: v?, options: SdpaOptions { dropout_seed: None, ..call.options }, ..call },
            instruction_set,
            positions: positions.into_iter().map(|position| position as f32).collect(),
            origins,
            kept,
            philox,
        })
    }

    /// The context as it lies in memory.
    fn context_shape(&self) -> Shape {
        let Dims { b, h, t_q, d_v, .. } = self.call.dims;
        match self.call.output_layout() {
            OutputLayout::Bhtd => (b, h, t_q, d_v).into(),
            OutputLayout::Bthd => (b, t_q, h, d_v).into(),
        }
    }

    /// Gives the call to a function of the kernels.
    fn with_problem<E: WithDType, R>(
        &self,
        run: impl FnOnce(&AttentionProblem<E>) -> std::result::Result<R, candle_attention_kernels::Error>,
    ) -> Result<R> {
        let Call { op, q, k, v, scales, rows, keep, options, dims, .. } = &self.call;
        let [q, k, v] = [q, k, v].map(read);
        let scales = scales.as_ref().map(|scales| scales.each_ref().map(read));
        let (k, v) = match &scales {
            None => (KvRows::Float(k.strided()?), KvRows::Float(v.strided()?)),
            Some([of_k, of_v]) => (
                KvRows::Q8 { codes: k.strided()?, scales: of_k.strided()? },
                KvRows::Q8 { codes: v.strided()?, scales: of_v.strided()? },
            ),
        };
        let (scores, keep) = (self.scores.each_ref().map(|tensor| tensor.as_ref().map(read)), keep.as_ref().map(read));
        let [bias, distances, slopes, sinks] = scores.each_ref().map(Option::as_ref);
        let relative_bias = match distances {
            Some(biases) => {
                Some(RelativeBias { rows: biases.strided()?, len: biases.layout.dims()[2], origins: &self.origins })
            }
            None => None,
        };
        let slopes = slopes.map(Read::contiguous).transpose()?;
        let kept = self.kept.as_deref().map(DropoutMask::Kept);
        let scores = ScoreOptions {
            scale: self.call.scale(),
            softcap: options.softcap.map(|softcap| softcap as f32),
            alibi: slopes.map(|slopes| Alibi { slopes, positions: &self.positions }),
            relative_bias,
            bias: bias.map(Read::strided).transpose()?,
            keep: keep.as_ref().map(Read::strided).transpose()?,
            sinks: sinks.map(Read::contiguous).transpose()?,
            dropout: kept.or(self.philox.map(DropoutMask::Philox)).map(|mask| Dropout { mask, p: options.dropout }),
        };
        let problem = AttentionProblem {
            dims: *dims,
            q: q.strided()?,
            k,
            v,
            ranges: &rows.keys,
            scores,
            output_layout: self.call.output_layout(),
            executor: executor(),
        };
        run(&problem).map_err(|error| Error::msg(format!("[{op}] {error}")))
    }

    /// The context as it lies in memory, and what is wanted beside it.
    fn attend<E: Element>(self, outputs: Outputs) -> Result<Attended> {
        if let Outputs::Statistics(wanted) = outputs {
            let options = wanted.as_kernels();
            let observe =
                |problem: &AttentionProblem<E>| flash::attend_with_statistics(problem, self.instruction_set, &options);
            let (context, found) = self.with_problem(observe)?;
            let context = Tensor::from_vec(context, self.context_shape(), self.call.q.device())?;
            let statistics = Some(AttentionStatistics::of_kernel(found, &self.call, wanted)?);
            return Ok(Attended { statistics, ..Attended::context(context) });
        }
        let is_tracked = self.call.tracks_gradients();
        let (mut lse, mut stats) = ((outputs == Outputs::LogSumExp).then(Vec::new), Vec::new());
        let context = self.with_problem(|problem: &AttentionProblem<E>| {
            flash::attend_vec(problem, self.instruction_set, lse.as_mut(), is_tracked.then_some(&mut stats))
        })?;
        graph::attended(self, context, lse, stats)
    }
}
