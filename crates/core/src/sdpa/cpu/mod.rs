//! The fused CPU kernel: the conversion of a call to the kernel's input, and of the kernel's results to tensors.

mod graph;

use std::ops::Deref;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, Dropout, DropoutMask, RequestedResults};
use candle_core::{Error, Result, Shape, Storage, Tensor};

use super::call::{Call, is_tracked, swapped_for};
use super::dropout::{DropoutDraw, DropoutSource};
use super::options::OutputLayout;
use super::prepared::prepared;
use super::reference;
use super::results::Attended;
use super::statistics::AttentionStatistics;
use crate::mask::CallRanges;
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::{self, CpuCall, Diagonals, KeysOfQueries};
use candle_attention_modules::base::rowwise::{Element, Read, read, with_float};
use candle_attention_modules::init::TorchSeed;

/// Returns the requested results.
pub(super) fn attend(call: Call, instruction_set: InstructionSet, requested: RequestedResults) -> Result<Attended> {
    if needs_reference_gradients(&call) {
        return reference::attend(&call, requested);
    }
    let path = CpuPath::new(&call, instruction_set)?;
    with_float!(path.op, call.attention.q.dtype(), |E| path.attend::<E>(requested))
}

/// Returns whether gradients have to come from the reference path: the backward kernel is for calls with scores.
fn needs_reference_gradients(call: &Call) -> bool {
    let Dims { b, t_q, t_kv, d_v, .. } = call.attention.dims;
    call.tracks_gradients() && [b, t_q, t_kv, d_v].contains(&0)
}

/// Draws the weights to drop, or a seed for them.
fn draw(dropout: &DropoutDraw, call: &Call) -> Result<Dropout<Tensor>> {
    let mask = match &dropout.source {
        DropoutSource::Torch(seed) => DropoutMask::KeptBits(kept_bits(seed, dropout.p, call)?),
        DropoutSource::Philox(seed) => DropoutMask::Philox(*seed),
        DropoutSource::Device => DropoutMask::Philox(draw_philox_seed(call)?),
    };
    Ok(Dropout { p: dropout.p, mask })
}

/// Returns a bit for each weight, which is 1 if PyTorch's generator keeps the weight.
fn kept_bits(seed: &TorchSeed, p: f64, call: &Call) -> Result<Tensor> {
    let is_kept = seed.dropout_keep(&call.score_dims(), p)?.flatten_all()?.to_vec1::<u8>()?;
    let byte = |bits: &[u8]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
    let bytes: Vec<u8> = is_kept.chunks(8).map(byte).collect();
    let count = bytes.len();
    Tensor::from_vec(bytes, count, call.attention.q.device())
}

/// Draws a seed for Philox from the generator of the device: 24 bits of each of three numbers.
fn draw_philox_seed(call: &Call) -> Result<u64> {
    let numbers = Tensor::rand(0f32, 1f32, 3, call.attention.q.device())?.to_vec1::<f32>()?;
    let bits = |x: f32| (f64::from(x) * f64::from(1 << 24)) as u64;
    Ok(numbers.into_iter().fold(0u64, |seed, x| seed.rotate_left(24) ^ bits(x)))
}

/// A call that the CPU kernel runs.
struct CpuPath {
    op: &'static str,
    attention: AttentionCall<Tensor, QueryTables>,
    instruction_set: InstructionSet,
}

/// The keys that each query attends to, and its position among them.
struct QueryTables {
    ranges: CallRanges,
    /// The positions of the queries, (B, T_q), if there are ALiBi slopes.
    positions: Vec<f32>,
    /// For each query, (B, T_q), the entry of the relative bias for key 0, if there is a relative bias.
    relative_bias_origins: Vec<i64>,
}

impl CpuPath {
    fn new(call: &Call, instruction_set: InstructionSet) -> Result<Self> {
        let positions = match &call.attention.scores.alibi_slopes {
            Some(_) => call.rows()?.positions()?.into_iter().map(|position| position as f32).collect(),
            None => Vec::new(),
        };
        let last_query = call.most_queries() as i64 - 1;
        let relative_bias_origins = match &call.attention.scores.relative_bias {
            Some(_) => call.rows()?.by_query(|sequence, i| last_query - i - sequence.first_key as i64)?,
            None => Vec::new(),
        };
        let ranges = call.attention.keys.ranges.clone();
        let dropout = match &call.dropout {
            Some(dropout) => Some(draw(dropout, call)?),
            None => None,
        };
        let attention = prepared(call, QueryTables { ranges, positions, relative_bias_origins }, dropout)?;
        Ok(Self { op: call.op, attention, instruction_set })
    }

    /// Returns the shape of the output as it is stored.
    fn output_shape(&self) -> Shape {
        let Dims { b, h, t_q, d_v, .. } = self.attention.dims;
        match self.attention.output_layout {
            OutputLayout::Bhtd => (b, h, t_q, d_v).into(),
            OutputLayout::Bthd => (b, t_q, h, d_v).into(),
        }
    }

    /// Locks the tensors for reading.
    fn lock(&self) -> Result<AttentionCall<Read<'_, impl Deref<Target = Storage>>, ()>> {
        self.attention.map((), |_, tensor| Ok(read(tensor)))
    }

    /// Returns the call as the kernel reads it.
    fn views<'r>(
        &'r self,
        locked: &'r AttentionCall<Read<'r, impl Deref<Target = Storage>>, ()>,
    ) -> Result<CpuCall<'r>> {
        let QueryTables { ranges, positions, relative_bias_origins } = &self.attention.keys;
        let len = match &self.attention.scores.relative_bias {
            Some(biases) => biases.dim(2)?,
            None => 0,
        };
        let diagonals = Diagonals { len, origins: relative_bias_origins };
        let keys = KeysOfQueries { ranges: &ranges.rows(self.op)?.keys, positions, diagonals };
        locked.map(keys, |_, tensor| tensor.view())
    }

    /// Returns an error of the kernel as one of the public function.
    fn error(&self, error: candle_attention_kernels::Error) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Runs the kernel, and returns the requested results with gradients for the inputs that are tracked.
    fn attend<E: Element>(self, requested: RequestedResults) -> Result<Attended> {
        let is_tracked = self.attention.differentiable().in_order().into_iter().any(is_tracked);
        let with_softmax_stats = RequestedResults { softmax_stats: is_tracked, ..requested };
        let locked = self.lock()?;
        let found = flash::attend::<E>(&self.views(&locked)?, self.instruction_set, with_softmax_stats);
        let found = found.map_err(|error| self.error(error))?;
        drop(locked);
        let statistics = match (found.statistics, requested.statistics) {
            (Some(statistics), Some(wanted)) => {
                Some(AttentionStatistics::from_kernel(statistics, self.attention.dims, wanted)?)
            }
            _ => None,
        };
        let layout = self.attention.output_layout;
        let stats = found.softmax_stats.unwrap_or_default();
        let recorded = graph::record_results(self, found.output, found.log_sum_exp, stats)?;
        Ok(Attended { output: swapped_for(layout, recorded.output)?, statistics, ..recorded })
    }
}
