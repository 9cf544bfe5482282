//! Few queries against many keys: a call that waits for memory, so keys and values are read once, in order, in place.
//!
//! Lanes run along D, and nothing is packed. One part of the keys goes through each step as a whole, since its scores fit
//! the first cache:
//!
//! ```text
//! scores  = keys · queries          (keys, R): R is the number of rows, up to a power of two
//! scores  = softcap, ALiBi, bias; -inf where hidden
//! weights = 2^(scores - largest)
//! context = weightsᵀ · values       (R, D_v)
//! ```

mod products;
mod softmax;

use std::ops::Range;

use super::epilogue::normalise;
use super::heuristics::{self, KV_SPLIT};
use super::pack::has_non_finite_values;
use super::problem::{Call, KvHead, Row, ScoreInputs};
use crate::cpu::{Kernel, MAX_LANES, Scratch, SharedPtr, SimdTask, for_each_task};
use crate::element::Kernels;
use products::{AccumulateSeen, RowProducts};
use softmax::RowSoftmax;

/// The most rows that are decoded; fewer than the lanes of a vector decide otherwise.
pub(super) const MAX_ROWS: usize = 8;

/// Attention of up to [`MAX_ROWS`] rows for each key head: a task for each part of its keys. `None` where there is no memory
/// for the parts' results.
///
/// # Safety
/// The processor has the tier of K, whose words are f32.
pub(super) unsafe fn run<K: Kernel, E: Kernels>(call: &Call<E>) -> Option<()> {
    let dims = &call.inputs.dims;
    let (heads, key_chunks) = (dims.b * dims.h_kv, dims.t_kv.div_ceil(KV_SPLIT).max(1));
    // Of each part: contexts (R, D_v), maxima (R,) and sums (R,).
    let words = MAX_ROWS * (dims.d_v + 2);
    let mut partials = Scratch::try_zeros(&[heads, key_chunks, words])?;
    let slots = SharedPtr(partials.as_mut_ptr());
    let scratch = || DecodeScratch::new(dims.d, KV_SPLIT.min(dims.t_kv));
    let workers = heuristics::workers(call);
    for_each_task(heads * key_chunks, workers, scratch, |scratch, task| {
        let first = task % key_chunks * KV_SPLIT;
        let keys = first..dims.t_kv.min(first + KV_SPLIT);
        // SAFETY: the processor has the tier of K; the partial results are initialised, and each task writes one of its own.
        unsafe {
            let partial = slots.slice(task * words, words);
            K::run_simd(Decode { call, scratch, kv: dims.kv_head(task / key_chunks), keys, partial });
        }
    });
    let partials = partials.words();
    for_each_task(
        heads,
        workers,
        || (),
        |(), head| {
            let own = &partials[head * key_chunks * words..][..key_chunks * words];
            merge(call, dims.kv_head(head), own.chunks_exact(words));
        },
    );
    Some(())
}

/// What a thread needs: queries (R, D) and scores (keys, R).
struct DecodeScratch {
    queries: Scratch,
    scores: Scratch,
}

impl DecodeScratch {
    fn new(d: usize, keys: usize) -> Self {
        Self {
            queries: Scratch::zeros(MAX_ROWS * d.next_multiple_of(MAX_LANES)),
            scores: Scratch::zeros((keys + MAX_LANES) * MAX_ROWS),
        }
    }
}

/// The query rows of one key head against a part of its keys.
struct Decode<'a, 'b, E> {
    call: &'a Call<'b, E>,
    scratch: &'a mut DecodeScratch,
    kv: KvHead,
    keys: Range<usize>,
    partial: &'a mut [f32],
}

impl<E: Kernels> SimdTask for Decode<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let seen = SeenRows::new(&self.call.inputs, self.kv, self.keys.clone());
        // SAFETY: the processor has the tier of K; there are at most R rows.
        unsafe {
            match seen.padded {
                1 => self.rows::<K, 1>(&seen),
                2 => self.rows::<K, 2>(&seen),
                4 => self.rows::<K, 4>(&seen),
                _ => self.rows::<K, 8>(&seen),
            }
        }
    }
}

/// The query rows of a key head, and what they see of some keys.
struct SeenRows {
    /// The number of rows, up to a power of two. Rows that pad it repeat the first.
    padded: usize,
    rows: [Row; MAX_ROWS],
    ranges: [Range<usize>; MAX_ROWS],
    /// The keys from the first to the last that some row sees.
    keys: Range<usize>,
}

impl SeenRows {
    fn new(inputs: &ScoreInputs, kv: KvHead, keys: Range<usize>) -> Self {
        let count = inputs.dims.rows();
        let rows = std::array::from_fn(|r| inputs.dims.row(kv, if r < count { r } else { 0 }));
        let ranges: [Range<usize>; MAX_ROWS] = rows.map(|row| {
            let range = inputs.range(row);
            range.start.max(keys.start)..range.end.min(keys.end)
        });
        let seen = ranges.iter().filter(|range| !range.is_empty());
        let first = seen.clone().map(|range| range.start).min().unwrap_or(0);
        let end = seen.map(|range| range.end).max().unwrap_or(0);
        Self { padded: count.next_power_of_two(), rows, ranges, keys: first..end }
    }
}

impl<E: Kernels> Decode<'_, '_, E> {
    /// # Safety
    /// As [`SimdTask::run`]; R is the padded number of rows.
    #[inline(always)]
    unsafe fn rows<K: Kernel, const R: usize>(self, seen: &SeenRows) {
        let Self { call, kv, .. } = self;
        let SeenRows { rows, ranges, keys, .. } = seen;
        let (rows, ranges, keys) = (&rows[..R], &ranges[..R], keys.clone());
        let (context, rest) = self.partial.split_at_mut(R * call.inputs.dims.d_v);
        let (max, sum) = rest[..2 * R].split_at_mut(R);
        context.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        if keys.is_empty() {
            return;
        }
        let is_masked = call.inputs.options.keep.is_some() || ranges.iter().any(|range| *range != keys);
        let scores = self.scratch.scores.as_mut_ptr();
        let products = RowProducts::<E, R> { call, kv, rows, keys: keys.clone() };
        // SAFETY: the processor has the tier of K; the scratch was made for these sizes.
        unsafe {
            products.scores::<K::Vector>(self.scratch.queries.as_mut_ptr(), scores);
            K::run_simd(RowSoftmax { inputs: call.inputs, rows, ranges, keys: keys.clone(), scores, max, sum });
            if is_masked && has_non_finite_values::<K, E>(call, kv, keys.clone()) {
                K::run_simd(AccumulateSeen { call, kv, rows, ranges, keys, weights: scores, context });
            } else {
                products.accumulate::<K::Vector>(scores, context);
            }
        }
    }
}

/// Merges the parts of one key head, in order, and writes its rows.
fn merge<'a, E: Kernels>(call: &Call<E>, kv: KvHead, parts: impl Iterator<Item = &'a [f32]> + Clone) {
    let (dims, unit) = (&call.inputs.dims, call.inputs.options.exponent_unit());
    let (d_v, padded) = (dims.d_v, dims.rows().next_power_of_two());
    let mut sums = vec![0f32; d_v];
    for r in 0..dims.rows() {
        let row = dims.row(kv, r);
        let parts = parts.clone().map(|part| {
            let (context, rest) = part.split_at(padded * d_v);
            (&context[r * d_v..(r + 1) * d_v], rest[r], rest[padded + r])
        });
        let most = parts.clone().fold(f32::NEG_INFINITY, |most, (_, max, _)| most.max(max));
        // Where no part has seen a key, the factors are of zeros.
        let shift = if most == f32::NEG_INFINITY { 0.0 } else { most };
        let mut total = 0.0;
        sums.fill(0.0);
        for (context, max, sum) in parts {
            let factor = ((max - shift) * unit).exp2();
            total += sum * factor;
            for (sum, value) in sums.iter_mut().zip(context) {
                *sum += value * factor;
            }
        }
        // SAFETY: the row belongs to the call, and this head's rows to this task.
        unsafe {
            let whole = normalise(call, row, most, total);
            let to = call.context_row(row);
            for (d, &sum) in sums.iter().enumerate() {
                to.add(d).write(E::from_f32(sum * whole));
            }
        }
    }
}
