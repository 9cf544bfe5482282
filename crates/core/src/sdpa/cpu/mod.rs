//! The fused CPU kernel: the conversion of a call to the kernel's input, and of the kernel's results to tensors.

mod graph;
mod pages;

use std::ops::Deref;

use candle_attention_call::{AttentionCall, AttentionDims as Dims, Dropout, DropoutMask, RequestedResults};
use candle_core::{Error, Result, Shape, Storage, Tensor};

use super::call::{Call, swapped_for};
use super::dropout::{DropoutDraw, DropoutSource};
use super::prepared::prepared;
use super::reference;
use super::results::Attended;
use super::statistics::AttentionStatistics;
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::flash::{self, AttentionResults, CpuCall, Diagonals, KeysOfQueries};
use candle_attention_modules::base::rowwise::{Read, TensorElement, read, with_float};
use candle_attention_modules::init::TorchSeed;

pub(super) use graph::CpuForward;
pub(super) use pages::{attend_over_pages, reason_to_copy};

/// Returns the requested results.
pub(super) fn attend(call: Call, instruction_set: InstructionSet, requested: RequestedResults) -> Result<Attended> {
    if needs_reference_gradients(&call) {
        return reference::attend(&call, requested);
    }
    let dropout = match &call.dropout {
        Some(dropout) => Some(draw(dropout, &call)?),
        None => None,
    };
    let call = prepared_call(call, dropout)?;
    with_float!(call.op, call.attention.q.dtype(), |E| attend_prepared::<E>(call, instruction_set, requested))
}

/// Returns a call whose tensors are prepared for the kernel, with drawn dropout.
pub(super) fn prepared_call(call: Call, dropout: Option<Dropout<Tensor>>) -> Result<Call> {
    let attention = prepared(&call, call.attention.keys.clone(), dropout)?;
    Ok(Call { attention, ..call })
}

/// Returns whether gradients have to come from the reference path: the backward kernel does not run calls without
/// scores.
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

/// The position of each query among its keys, as the kernel reads it.
struct QueryTables {
    /// The positions of the queries, (B, T_q), if there are ALiBi slopes.
    positions: Vec<f32>,
    /// For each query, (B, T_q), the entry of the relative bias for key 0, if there is a relative bias.
    relative_bias_origins: Vec<i64>,
}

impl QueryTables {
    fn new(call: &Call) -> Result<Self> {
        let positions = match &call.attention.scores.alibi_slopes {
            Some(_) => call.rows()?.positions()?.into_iter().map(|position| position as f32).collect(),
            None => Vec::new(),
        };
        let last_query = call.most_queries() as i64 - 1;
        let relative_bias_origins = match &call.attention.scores.relative_bias {
            Some(_) => call.rows()?.by_query(|sequence, i| last_query - i - sequence.first_key as i64)?,
            None => Vec::new(),
        };
        Ok(Self { positions, relative_bias_origins })
    }
}

/// A call whose tensors are locked for reading.
type LockedCall<'a, G> = AttentionCall<Read<'a, G>, ()>;

/// Locks the tensors of a call for reading.
fn lock(call: &Call) -> Result<LockedCall<'_, impl Deref<Target = Storage>>> {
    call.attention.map((), |_, tensor| Ok(read(tensor)))
}

/// Returns a call as the kernel reads it.
fn views<'r>(
    call: &'r Call,
    tables: &'r QueryTables,
    locked: &'r LockedCall<'r, impl Deref<Target = Storage>>,
) -> Result<CpuCall<'r>> {
    let len = match &call.attention.scores.relative_bias {
        Some(biases) => biases.dim(2)?,
        None => 0,
    };
    let diagonals = Diagonals { len, origins: &tables.relative_bias_origins };
    let keys = KeysOfQueries { ranges: &call.rows()?.keys, positions: &tables.positions, diagonals };
    locked.map(keys, |_, tensor| tensor.view())
}

/// Returns the shape of the output as it is stored.
fn output_shape(call: &Call) -> Shape {
    let Dims { b, h, t_q, d_v, .. } = call.attention.dims;
    Shape::from(&call.attention.output_layout.dims(b, h, t_q, d_v))
}

/// Returns an error of the kernel as one of the public function.
fn public_error(call: &Call, error: candle_attention_kernels::Error) -> Error {
    Error::msg(format!("[{}] {error}", call.op))
}

/// Runs the kernel on a call whose tensors are prepared for it, and returns the requested results as numbers, which are
/// no part of Candle's graph yet.
pub(super) fn computed<E: TensorElement>(
    call: &Call,
    instruction_set: InstructionSet,
    requested: RequestedResults,
) -> Result<AttentionResults<E>> {
    let tables = QueryTables::new(call)?;
    let locked = lock(call)?;
    let found = flash::attend::<E>(&views(call, &tables, &locked)?, instruction_set, requested);
    found.map_err(|error| public_error(call, error))
}

/// Runs the kernel on a call whose tensors are prepared for it, and returns the requested results with gradients for
/// the inputs that are tracked.
fn attend_prepared<E: TensorElement>(
    call: Call,
    instruction_set: InstructionSet,
    requested: RequestedResults,
) -> Result<Attended> {
    let with_softmax_stats = RequestedResults { softmax_stats: call.tracks_gradients(), ..requested };
    let mut found = computed::<E>(&call, instruction_set, with_softmax_stats)?;
    let statistics = match (found.statistics.take(), requested.statistics) {
        (Some(statistics), Some(wanted)) => {
            Some(AttentionStatistics::from_kernel(statistics, call.attention.dims, wanted)?)
        }
        _ => None,
    };
    let layout = call.attention.output_layout;
    let recorded = graph::record_results(call, instruction_set, found)?;
    Ok(Attended { output: swapped_for(layout, recorded.output)?, statistics, ..recorded })
}
