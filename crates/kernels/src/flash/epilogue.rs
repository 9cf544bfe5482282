//! From the state of the online softmax to the attention output: the transposition to rows, parts of the keys, sinks,
//! division, log-sum-exp.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::call::ForwardCall;
use super::inputs::CheckedCall;
use super::options::SoftmaxStats;
use super::state::SoftmaxState;
use crate::cpu::{Kernel, MAX_LANES, Scratch, SharedPtr, SimdTask, Vector, WorkSize, Workers, for_each_index};
use crate::number::{Number, store_first};
use candle_attention_call::{AttentionDims, KvHead, QueryRow};

/// Writes the output rows of a state, or the rows of its part of the keys.
pub(super) struct WriteOutput<'a, 'b, E> {
    pub call: &'a ForwardCall<'b, E>,
    pub state: &'a mut SoftmaxState,
    pub kv: KvHead,
    pub rows: Range<usize>,
    /// The destination of the rows if the state covers one part of the keys; otherwise the output.
    pub key_part: Option<KeyPart<'a>>,
}

/// One part of the keys of a call whose keys are split.
#[derive(Clone, Copy)]
pub(super) struct KeyPart<'a> {
    pub partials: &'a Partials,
    /// The number of the part.
    pub part: usize,
}

impl<E: Number> SimdTask for WriteOutput<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { call, state, kv, rows, key_part } = self;
        let lanes = K::Vector::LANES;
        let dims = &call.inputs.dims;
        let panel = state.panel;
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for first in rows.clone().step_by(lanes) {
            let column = (first - rows.start) % panel;
            let own = state.of_panel((first - rows.start) / panel);
            let filled = lanes.min(rows.end - first);
            let mut factors = [1f32; MAX_LANES];
            // SAFETY: the processor has the instruction set of K; the state has D_v rows of a panel, padded to a
            // multiple of `lanes`; no other task writes these output rows.
            unsafe {
                for (lane, factor) in factors[..filled].iter_mut().enumerate() {
                    let stats = SoftmaxStats { max: *own.max.add(column + lane), sum: *own.sum.add(column + lane) };
                    match key_part {
                        Some(KeyPart { partials, part }) => {
                            partials.set_stats(partials.row(kv, first + lane, part), stats);
                        }
                        None => *factor = normalise(call, dims.row(kv, first + lane), stats),
                    }
                }
                for d in (0..dims.d_v).step_by(lanes) {
                    let width = lanes.min(dims.d_v - d);
                    K::Vector::transpose(own.values.add(d * panel + column), panel, square.as_mut_ptr(), lanes);
                    for (lane, &factor) in factors[..filled].iter().enumerate() {
                        let values = K::Vector::load(square.as_ptr().add(lane * lanes)).mul(K::Vector::splat(factor));
                        let row = first + lane;
                        match key_part {
                            Some(KeyPart { partials, part }) => values.store(partials.row(kv, row, part).add(d)),
                            None => store_first(values, call.output_row(dims.row(kv, row)).add(d), width),
                        }
                    }
                }
            }
        }
    }
}

/// The words after the sums of a row: the largest exponent and the sum of the weights.
const STATS_WORDS: usize = 2;

/// The results of rows over each part of the keys, where keys are split: D_v sums of weighted values, padded to whole
/// vectors, the largest exponent and the sum of the weights. No two tasks write the same row.
pub(super) struct Partials {
    /// The memory: (B, H_kv, rows, parts, width + [`STATS_WORDS`]).
    at: SharedPtr<f32>,
    _memory: Scratch,
    heads: usize,
    rows: usize,
    parts: usize,
    /// D_v, padded to whole vectors.
    width: usize,
}

impl Partials {
    /// Allocates some rows for each key head; `None` if there is no memory for them.
    pub fn new(dims: &AttentionDims, rows: usize, parts: usize) -> Option<Self> {
        let width = dims.d_v.checked_next_multiple_of(MAX_LANES)?;
        let mut memory = Scratch::try_zeros(&[dims.kv_heads(), rows, parts, width + STATS_WORDS])?;
        Some(Self { at: SharedPtr(memory.as_mut_ptr()), _memory: memory, heads: dims.h_kv, rows, parts, width })
    }

    /// Returns the number of words from one row to the next.
    pub fn stride(&self) -> usize {
        self.parts * (self.width + STATS_WORDS)
    }

    /// Returns a pointer to a part of a row.
    #[inline(always)]
    pub fn row(&self, kv: KvHead, row: usize, part: usize) -> *mut f32 {
        let index = (kv.b * self.heads + kv.head) * self.rows + row;
        self.at.0.wrapping_add(index * self.stride() + part * (self.width + STATS_WORDS))
    }

    /// Writes the largest exponent and the sum of the weights after the sums of a row.
    ///
    /// # Safety
    /// The row was returned by [`row`](Self::row), and no other thread uses it.
    #[inline(always)]
    pub unsafe fn set_stats(&self, row: *mut f32, stats: SoftmaxStats) {
        // SAFETY: as this method's contract.
        unsafe {
            row.add(self.width).write(stats.max);
            row.add(self.width + 1).write(stats.sum);
        }
    }

    /// Merges the parts of each row of a call, in order, and writes the output.
    pub fn merge<E: Number>(self, call: &ForwardCall<E>) {
        let dims = &call.inputs.dims;
        let rows = dims.rows();
        let count = dims.kv_heads() * rows;
        // In most calls it is over before another thread would have begun.
        let sums = count * self.parts * dims.d_v;
        let work = WorkSize { multiply_adds: sums, bytes: sums.saturating_mul(size_of::<f32>()) };
        let workers = Workers::for_call(work);
        for_each_index(count, workers, &|index| self.merge_row(call, dims.kv_head(index / rows), index % rows));
    }

    /// Merges the parts of one row, and writes its output.
    fn merge_row<E: Number>(&self, call: &ForwardCall<E>, kv: KvHead, row: usize) {
        let width = self.width;
        let part_len = width + STATS_WORDS;
        let unit = call.inputs.options.exponent_unit();
        // SAFETY: the words are initialised, and one task merges each row.
        let parts = unsafe { std::slice::from_raw_parts_mut(self.row(kv, row, 0), self.stride()) };
        let max = parts.chunks_exact(part_len).fold(f32::NEG_INFINITY, |max, part| max.max(part[width]));
        // Where no part has a key, the factors multiply zeros.
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let factor_of = |part: &[f32]| ((part[width] - shift) * unit).exp2();
        let (whole, others) = parts.split_at_mut(part_len);
        let first = factor_of(whole);
        whole.iter_mut().for_each(|sum| *sum *= first);
        for part in others.chunks_exact(part_len) {
            let factor = factor_of(part);
            whole.iter_mut().zip(part).for_each(|(sum, x)| *sum += x * factor);
        }
        let query = call.inputs.dims.row(kv, row);
        // SAFETY: the row belongs to the call, and no other task writes it.
        unsafe {
            let normaliser = normalise(call, query, SoftmaxStats { max, sum: whole[width + 1] });
            let to = call.output_row(query);
            for (d, &sum) in whole[..call.inputs.dims.d_v].iter().enumerate() {
                to.add(d).write(E::from_f32(sum * normaliser));
            }
        }
    }
}

/// Adds the sink of a row, if there is one, to its largest exponent and the sum of its weights.
pub(super) fn with_sink(inputs: &CheckedCall, row: QueryRow, stats: SoftmaxStats) -> SoftmaxStats {
    let Some(sinks) = inputs.options.sinks else { return stats };
    let SoftmaxStats { max, sum } = stats;
    let unit = inputs.options.exponent_unit();
    let sink = sinks[row.head] * (LOG2_E / unit);
    let shift = max.max(sink);
    let finite = if shift == f32::NEG_INFINITY { 0.0 } else { shift };
    SoftmaxStats { max: shift, sum: sum * ((max - finite) * unit).exp2() + ((sink - finite) * unit).exp2() }
}

/// Returns the factor from a sum of weighted values to the output of a row, and writes its log-sum-exp. `stats` are
/// computed from the keys alone.
///
/// # Safety
/// The row belongs to the call, and no other thread writes its log-sum-exp.
#[inline(always)]
pub(super) unsafe fn normalise<E: Number>(call: &ForwardCall<E>, row: QueryRow, stats: SoftmaxStats) -> f32 {
    let unit = call.inputs.options.exponent_unit();
    let whole = with_sink(&call.inputs, row, stats);
    // SAFETY: as this function's contract.
    unsafe { call.write_stats(row, whole, || log_sum_exp(whole, unit)) };
    if whole.sum == 0.0 {
        0.0
    } else if whole.max == stats.max {
        1.0 / whole.sum
    } else {
        ((stats.max - whole.max) * unit).exp2() / whole.sum
    }
}

/// Returns the log-sum-exp, whose largest exponent counts `unit` powers of two.
fn log_sum_exp(stats: SoftmaxStats, unit: f32) -> f32 {
    let max = stats.max * (LN_2 * unit);
    if stats.sum == 0.0 {
        f32::NEG_INFINITY
    } else if stats.max.is_finite() {
        // The largest score must not be rounded to an infinity.
        max.clamp(f32::MIN, f32::MAX) + stats.sum.ln()
    } else {
        max + stats.sum.ln()
    }
}
