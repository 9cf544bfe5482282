//! The fused CPU kernel: the conversion of a call to the kernel's input, and of the kernel's results to tensors.

mod graph;

use std::ops::Deref;

use candle_core::{Error, Result, Shape, Storage, Tensor, WithDType};

use super::call::{Call, Dims, swapped_for};
use super::options::OutputLayout;
use super::reference;
use super::score_tensors::ScoreTensors;
use super::statistics::{AttentionStatistics, StatisticsOptions};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::{
    self, Alibi, AttentionProblem, Dropout, DropoutMask, KvRows, RelativeBias, ScoreOptions,
};
use candle_attention_modules::base::rowwise::{Element, Read, read, with_contiguous_rows, with_float};
use candle_attention_modules::init::TorchSeed;

/// Returns the attention output.
pub(super) fn output(call: Call, instruction_set: InstructionSet) -> Result<Tensor> {
    if needs_reference_gradients(&call) {
        return reference::output(&call);
    }
    let layout = call.output_layout();
    let dtype = call.q.dtype();
    let kernel_call = KernelCall::new(call, instruction_set)?;
    let output = with_float!(kernel_call.call.op, dtype, |E| kernel_call.output::<E>())?;
    swapped_for(layout, output)
}

/// Returns the attention output and the log-sum-exp of the scores.
pub(super) fn output_and_lse(call: Call, instruction_set: InstructionSet) -> Result<(Tensor, Tensor)> {
    if needs_reference_gradients(&call) {
        return reference::output_and_lse(&call);
    }
    let layout = call.output_layout();
    let dtype = call.q.dtype();
    let kernel_call = KernelCall::new(call, instruction_set)?;
    let (output, lse) = with_float!(kernel_call.call.op, dtype, |E| kernel_call.output_and_lse::<E>())?;
    Ok((swapped_for(layout, output)?, lse))
}

/// Returns the attention output and statistics of the weights. No input is tracked for gradients.
pub(super) fn output_and_statistics(
    call: Call,
    instruction_set: InstructionSet,
    options: &StatisticsOptions,
) -> Result<(Tensor, AttentionStatistics)> {
    let layout = call.output_layout();
    let dtype = call.q.dtype();
    let kernel_call = KernelCall::new(call, instruction_set)?;
    let (output, statistics) =
        with_float!(kernel_call.call.op, dtype, |E| kernel_call.output_and_statistics::<E>(options))?;
    Ok((swapped_for(layout, output)?, statistics))
}

/// Returns whether gradients have to come from the reference path: the backward kernel is for calls with scores.
fn needs_reference_gradients(call: &Call) -> bool {
    let Dims { b, t_q, t_kv, d_v, .. } = call.dims;
    call.tracks_gradients() && [b, t_q, t_kv, d_v].contains(&0)
}

/// The dropout mask of a call.
enum DropoutSource {
    /// A bit for each weight; a bit of 0 drops the weight.
    Bits(Vec<u8>),
    /// A seed from which Philox draws the weights to drop.
    Philox(u64),
}

impl DropoutSource {
    /// Draws the mask, or a seed for it; `None` if nothing is dropped.
    fn draw(call: &Call) -> Result<Option<Self>> {
        if !call.options.drops() {
            return Ok(None);
        }
        if let Some(seed) = &call.options.dropout_seed {
            return Ok(Some(Self::Bits(kept_bits(seed, call)?)));
        }
        let seed = match call.options.dropout_philox_seed {
            Some(seed) => seed,
            None => draw_philox_seed(call)?,
        };
        Ok(Some(Self::Philox(seed)))
    }
}

/// Returns a bit for each weight, which is 1 if PyTorch's generator keeps the weight.
fn kept_bits(seed: &TorchSeed, call: &Call) -> Result<Vec<u8>> {
    let is_kept = seed.dropout_keep(&call.score_dims(), call.options.dropout)?.flatten_all()?.to_vec1::<u8>()?;
    let byte = |bits: &[u8]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
    Ok(is_kept.chunks(8).map(byte).collect())
}

/// Draws a seed for Philox from the generator of the device: 24 bits of each of three numbers.
fn draw_philox_seed(call: &Call) -> Result<u64> {
    let numbers = Tensor::rand(0f32, 1f32, 3, call.q.device())?.to_vec1::<f32>()?;
    let bits = |x: f32| (f64::from(x) * f64::from(1 << 24)) as u64;
    Ok(numbers.into_iter().fold(0u64, |seed, x| seed.rotate_left(24) ^ bits(x)))
}

/// Returns keys or values as the kernel reads them: floats, or codes of 8 bits with scales.
fn kv_rows<'r, E: WithDType>(
    rows: &'r Read<'_, impl Deref<Target = Storage>>,
    scales: Option<&'r Read<'_, impl Deref<Target = Storage>>>,
) -> Result<KvRows<'r, E>> {
    match scales {
        Some(scales) => Ok(KvRows::Q8 { codes: rows.strided()?, scales: scales.strided()? }),
        None => Ok(KvRows::Float(rows.strided()?)),
    }
}

/// A call in the form that the kernel reads.
struct KernelCall {
    /// The call, with contiguous rows of q, k and v.
    call: Call,
    instruction_set: InstructionSet,
    score_tensors: ScoreTensors,
    /// The positions of the queries, (B, T_q), if there are ALiBi slopes.
    positions: Vec<f32>,
    /// For each query, (B, T_q), the entry of the relative bias for key 0, if there is a relative bias.
    relative_bias_origins: Vec<i64>,
    dropout: Option<DropoutSource>,
}

impl KernelCall {
    fn new(call: Call, instruction_set: InstructionSet) -> Result<Self> {
        let positions = match &call.options.alibi_slopes {
            Some(_) => call.rows()?.positions()?.into_iter().map(|position| position as f32).collect(),
            None => Vec::new(),
        };
        let last_query = call.most_queries() as i64 - 1;
        let relative_bias_origins = match &call.options.relative_bias {
            Some(_) => call.rows()?.by_query(|sequence, i| last_query - i - sequence.first_key as i64)?,
            None => Vec::new(),
        };
        let dropout = DropoutSource::draw(&call)?;
        let score_tensors = ScoreTensors::new(&call)?;
        let q = with_contiguous_rows(&call.q)?;
        let k = with_contiguous_rows(&call.k)?;
        let v = with_contiguous_rows(&call.v)?;
        let mut call = Call { q, k, v, ..call };
        // The backward pass reads the mask that was drawn, not the generator.
        call.options.dropout_seed = None;
        Ok(Self { call, instruction_set, score_tensors, positions, relative_bias_origins, dropout })
    }

    /// Returns the shape of the output as it is stored.
    fn output_shape(&self) -> Shape {
        let Dims { b, h, t_q, d_v, .. } = self.call.dims;
        match self.call.output_layout() {
            OutputLayout::Bhtd => (b, h, t_q, d_v).into(),
            OutputLayout::Bthd => (b, t_q, h, d_v).into(),
        }
    }

    /// Calls a function of the kernels with the call.
    fn with_problem<E: WithDType, R>(
        &self,
        run: impl FnOnce(&AttentionProblem<E>) -> std::result::Result<R, candle_attention_kernels::Error>,
    ) -> Result<R> {
        let Call { op, q, k, v, scales, bool_mask, options, dims, .. } = &self.call;
        let q = read(q);
        let k = read(k);
        let v = read(v);
        let k_scales = scales.as_ref().map(|scales| read(&scales.k));
        let v_scales = scales.as_ref().map(|scales| read(&scales.v));
        let ScoreTensors { bias, relative_bias, slopes, sinks } = &self.score_tensors;
        let bias = bias.as_ref().map(read);
        let relative_bias = relative_bias.as_ref().map(read);
        let slopes = slopes.as_ref().map(read);
        let sinks = sinks.as_ref().map(read);
        let bool_mask = bool_mask.as_ref().map(read);
        let relative_bias = match &relative_bias {
            Some(biases) => Some(RelativeBias {
                rows: biases.strided()?,
                len: biases.layout.dims()[2],
                origins: &self.relative_bias_origins,
            }),
            None => None,
        };
        let slopes = slopes.as_ref().map(Read::contiguous).transpose()?;
        let dropout_mask = self.dropout.as_ref().map(|source| match source {
            DropoutSource::Bits(kept) => DropoutMask::KeptBits(kept),
            DropoutSource::Philox(seed) => DropoutMask::Philox(*seed),
        });
        let scores = ScoreOptions {
            scale: self.call.scale(),
            softcap: options.softcap.map(|softcap| softcap as f32),
            alibi: slopes.map(|slopes| Alibi { slopes, positions: &self.positions }),
            relative_bias,
            bias: bias.as_ref().map(Read::strided).transpose()?,
            bool_mask: bool_mask.as_ref().map(Read::strided).transpose()?,
            sinks: sinks.as_ref().map(Read::contiguous).transpose()?,
            dropout: dropout_mask.map(|mask| Dropout { mask, p: options.dropout }),
        };
        let problem = AttentionProblem {
            dims: *dims,
            q: q.strided()?,
            k: kv_rows(&k, k_scales.as_ref())?,
            v: kv_rows(&v, v_scales.as_ref())?,
            ranges: &self.call.rows()?.keys,
            scores,
            output_layout: self.call.output_layout(),
        };
        run(&problem).map_err(|error| Error::msg(format!("[{op}] {error}")))
    }

    /// Returns the output as it is stored.
    fn output<E: Element>(self) -> Result<Tensor> {
        let is_tracked = self.call.tracks_gradients();
        let mut softmax_stats = Vec::new();
        let output = self.with_problem(|problem: &AttentionProblem<E>| {
            flash::attend_vec(problem, self.instruction_set, None, is_tracked.then_some(&mut softmax_stats))
        })?;
        graph::record_output(self, output, softmax_stats)
    }

    /// Returns the output as it is stored, and the log-sum-exp.
    fn output_and_lse<E: Element>(self) -> Result<(Tensor, Tensor)> {
        let is_tracked = self.call.tracks_gradients();
        let mut lse = Vec::new();
        let mut softmax_stats = Vec::new();
        let output = self.with_problem(|problem: &AttentionProblem<E>| {
            let softmax_stats = is_tracked.then_some(&mut softmax_stats);
            flash::attend_vec(problem, self.instruction_set, Some(&mut lse), softmax_stats)
        })?;
        graph::record_output_and_lse(self, output, lse, softmax_stats)
    }

    /// Returns the output as it is stored, and the statistics.
    fn output_and_statistics<E: Element>(self, options: &StatisticsOptions) -> Result<(Tensor, AttentionStatistics)> {
        let kernel_options = options.for_kernels();
        let (output, found) = self.with_problem(|problem: &AttentionProblem<E>| {
            flash::attend_with_statistics(problem, self.instruction_set, &kernel_options)
        })?;
        let output = Tensor::from_vec(output, self.output_shape(), self.call.q.device())?;
        Ok((output, AttentionStatistics::from_kernel(found, &self.call, options)?))
    }
}
