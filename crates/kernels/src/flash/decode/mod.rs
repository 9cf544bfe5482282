//! Few queries against many keys: a call that waits for memory, so keys and values are read once, in order, in place.
//!
//! Lanes run along D, and nothing is packed. One part of the keys goes through each step as a whole, since its scores
//! fit the first cache:
//!
//! ```text
//! scores  = keys · queries          (keys, R) for each group of R rows, as many as registers hold sums for
//! scores  = softcap, ALiBi, bias; -inf where hidden
//! weights = 2^(scores - largest)
//! context = weightsᵀ · values       (R, D_v)
//! ```

mod products;
mod softmax;

use std::ops::Range;

use super::pack::HeadRows;
use super::problem::{Call, KeysValues, KvHead, Row, ScoreInputs, Strided};
use super::softmax::normalise;
use super::tasks::{self, KV_SPLIT};
use crate::cpu::{Kernel, MAX_LANES, Scratch, SharedPtr, SimdTask, Vector, Workers, for_each_index, for_each_task};
use crate::number::{Number, Stored, widen_row};
use products::{AccumulateSeen, KEY_BLOCK, RowProducts, group_rows};
use softmax::RowSoftmax;

/// The most rows that are decoded on any tier.
const MAX_ROWS: usize = 16;

/// The most rows that are decoded: beyond them, tiles of packed keys are faster, and from half as many on where a
/// kernel multiplies pairs of bf16, which decoding widens.
pub(super) const fn max_rows<K: Kernel>() -> usize {
    match K::Vector::LANES {
        lanes @ ..8 => lanes,
        _ => MAX_ROWS / K::ELEMENTS,
    }
}

/// Attention of up to [`MAX_ROWS`] rows for each key head: a task for each part of its keys. `None` where there is no
/// memory for the parts' results.
///
/// # Safety
/// The processor has the tier of K, whose words are f32.
pub(super) unsafe fn run<K: Kernel, E: Number, S: Stored>(call: &Call<E, S>) -> Option<()> {
    let dims = &call.inputs.dims;
    let (heads, key_chunks) = (dims.b * dims.h_kv, dims.t_kv.div_ceil(KV_SPLIT).max(1));
    // Of each part: contexts (R, D_v), maxima (R,) and sums (R,).
    let padded = dims.rows().next_power_of_two();
    let words = padded * (dims.d_v + 2);
    let mut partials = Scratch::try_zeros(&[heads, key_chunks, words])?;
    let slots = SharedPtr(partials.as_mut_ptr());
    let scratch = || DecodeScratch::new(padded, dims.d, KV_SPLIT.min(dims.t_kv));
    let workers = tasks::workers(call, 1);
    for_each_task(heads * key_chunks, workers, scratch, |scratch, task| {
        let first = task % key_chunks * KV_SPLIT;
        let kv = dims.kv_head(task / key_chunks);
        let seen = &SeenRows::new(&call.inputs, kv, first..dims.t_kv.min(first + KV_SPLIT));
        let (inputs, keys_values, queries) = (&call.inputs, &call.keys_values, scratch.queries.as_mut_ptr());
        // SAFETY: the processor has the tier of K; the scratch was made for these sizes; the partial results are
        // initialised, and each task writes one of its own.
        unsafe {
            K::run_simd(WidenQueries { q: &call.q, inputs, rows: &seen.rows[..seen.padded], queries });
            let partial = slots.slice(task * words, words);
            K::run_simd(Decode { inputs, keys_values, scratch, kv, seen, partial });
        }
    });
    let partials = partials.words();
    // A short sum for most calls, which is over before another thread would have begun.
    let sums = [dims.b, dims.h, dims.t_q, key_chunks, dims.d_v].into_iter().fold(1, usize::saturating_mul);
    let workers = Workers::of(sums, sums.saturating_mul(size_of::<f32>()), call.executor);
    for_each_index(heads, workers, &|head| {
        let own = &partials[head * key_chunks * words..][..key_chunks * words];
        merge(call, dims.kv_head(head), own.chunks_exact(words));
    });
    Some(())
}

/// What a thread needs: queries (rows, D), and scores (keys, R) for each group of rows.
struct DecodeScratch {
    queries: Scratch,
    scores: Scratch,
}

impl DecodeScratch {
    fn new(rows: usize, d: usize, keys: usize) -> Self {
        Self {
            queries: Scratch::zeros(rows * d.next_multiple_of(MAX_LANES)),
            scores: Scratch::zeros((keys + MAX_LANES) * rows),
        }
    }
}

/// Query rows in f32, times the unit of the scores, with zeros up to whole vectors.
struct WidenQueries<'a, 'b, E> {
    q: &'a Strided<'b, E, 3>,
    inputs: &'a ScoreInputs<'b>,
    rows: &'a [Row],
    /// A row for each.
    queries: *mut f32,
}

impl<E: Number> SimdTask for WidenQueries<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let (d, factor) = (self.inputs.dims.d, self.inputs.options.units(false).query);
        let width = d.next_multiple_of(K::Vector::LANES);
        for (r, &row) in self.rows.iter().enumerate() {
            let from = self.q.query(row);
            // SAFETY: the processor has the tier of K; the row belongs to the call, and there is memory for each.
            unsafe { widen_row::<E, K::Vector>(from, d, self.queries.add(r * width), width, factor) };
        }
    }
}

/// The query rows of one key head, widened in the scratch, against a part of its keys.
struct Decode<'a, 'b, S> {
    inputs: &'a ScoreInputs<'b>,
    keys_values: &'a KeysValues<'b, S>,
    scratch: &'a mut DecodeScratch,
    kv: KvHead,
    seen: &'a SeenRows,
    partial: &'a mut [f32],
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

    /// The context, maxima and sums of a partial result, before any key.
    fn cleared<'p>(&self, partial: &'p mut [f32], d_v: usize) -> [&'p mut [f32]; 3] {
        let (context, rest) = partial.split_at_mut(self.padded * d_v);
        let (max, sum) = rest.split_at_mut(self.padded);
        context.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        [context, max, sum]
    }

    /// Whether every row sees all of the keys.
    fn is_same_for_all(&self) -> bool {
        self.ranges[..self.padded].iter().all(|range| *range == self.keys)
    }
}

impl<S: Stored> SimdTask for Decode<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, keys_values, kv, .. } = self;
        let SeenRows { padded, keys, .. } = self.seen;
        let [d, d_v] = [inputs.dims.d, inputs.dims.d_v];
        let [context, max, sum] = self.seen.cleared(self.partial, d_v);
        if keys.is_empty() {
            return;
        }
        let r = group_rows::<K::Vector>(*padded);
        let groups = padded / r;
        let block = if groups == 1 { keys.len() } else { KEY_BLOCK };
        let (group_queries, group_scores) = (r * d.next_multiple_of(K::Vector::LANES), (keys.len() + MAX_LANES) * r);
        let (queries, scores) = (self.scratch.queries.as_ptr(), self.scratch.scores.as_mut_ptr());
        let products = |keys: Range<usize>| RowProducts { keys_values, widths: [d, d_v], kv, keys, rows: r };
        let ranges = &self.seen.ranges[..*padded];
        let all_seen = inputs.options.keep.is_none() && self.seen.is_same_for_all();
        // SAFETY: the processor has the tier of K; the scratch was made for these sizes.
        unsafe {
            for first in keys.clone().step_by(block) {
                let products = products(first..keys.end.min(first + block));
                for group in 0..groups {
                    let scores = scores.add(group * group_scores + (first - keys.start) * r);
                    products.scores::<K::Vector>(queries.add(group * group_queries), scores);
                }
            }
            let values = HeadRows { rows: &keys_values.v, kv, width: d_v };
            let only_seen = !all_seen && values.has_non_finite::<K>(keys.clone());
            for group in 0..groups {
                let own = group * r..(group + 1) * r;
                let (rows, ranges) = (&self.seen.rows[own.clone()], &ranges[own.clone()]);
                let (max, sum) = (&mut max[own.clone()], &mut sum[own.clone()]);
                let scores = scores.add(group * group_scores);
                K::run_simd(RowSoftmax { inputs: *inputs, rows, ranges, keys: keys.clone(), scores, max, sum });
                if only_seen {
                    let context = &mut context[own.start * d_v..own.end * d_v];
                    let (keys, weights) = (keys.clone(), scores);
                    K::run_simd(AccumulateSeen { inputs, values, rows, ranges, keys, weights, context });
                }
            }
            for first in keys.clone().step_by(block) {
                if only_seen {
                    break;
                }
                let products = products(first..keys.end.min(first + block));
                for group in 0..groups {
                    let context = &mut context[group * r * d_v..][..r * d_v];
                    let weights = scores.add(group * group_scores + (first - keys.start) * r);
                    products.accumulate::<K::Vector>(weights, context);
                }
            }
        }
    }
}

/// Merges the parts of one key head, in order, and writes its rows.
fn merge<'a, E: Number, S>(call: &Call<E, S>, kv: KvHead, parts: impl Iterator<Item = &'a [f32]> + Clone) {
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
