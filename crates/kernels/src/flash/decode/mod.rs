//! Few queries against many keys: a call that waits for memory, so keys and values are read once, in order, in place.
//!
//! Lanes run along D, and nothing is packed. One part of the keys goes through each step as a whole, since its scores
//! fit the first cache. In the softmax lanes are those of a narrow tile, whose panel has keys side by side:
//!
//! ```text
//! scores  = keys · queries          (keys, R) for each group of R rows, as many as registers hold sums for
//! scores  = softcap, ALiBi, bias; -inf where hidden
//! weights = 2^(scores - largest)
//! context = weightsᵀ · values       (R, D_v)
//! ```

mod products;

use std::ops::Range;

use super::pack::HeadRows;
use super::problem::{Call, Dims, KvHead, ScoreInputs, StoredRows, Strided};
use super::scores::TileScores;
use super::softmax::{Partials, TileSoftmax};
use super::tasks::{self, KV_SPLIT, PanelState};
use super::tile::Tile;
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, Scratch, SimdTask, Vector, for_each_task};
use crate::number::{Number, Stored, widen_row};
use products::{AccumulateSeen, KEY_BLOCK, Operand, RowProducts};

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
pub(super) unsafe fn run<K: Kernel, E: Number, S: Stored>(
    call: &Call<E>,
    keys_values: &[StoredRows<S>; 2],
) -> Option<()> {
    let (inputs, workers) = (&call.inputs, tasks::workers(call, size_of::<S>(), 1));
    let dims = &inputs.dims;
    let parts = dims.t_kv.div_ceil(KV_SPLIT).max(1);
    // Rows that fill up the last group have no query.
    let rows = dims.rows().next_multiple_of(group_rows::<K::Vector>(dims));
    let partials = Partials::new(dims, rows, parts)?;
    let memory = || {
        let scores = rows * KV_SPLIT.min(dims.t_kv) + rows * MAX_COLUMNS;
        [rows * dims.d.next_multiple_of(MAX_LANES), scores].map(Scratch::zeros)
    };
    for_each_task(dims.b * dims.h_kv * parts, workers, memory, |[queries, scores], task| {
        let (kv, part) = (dims.kv_head(task / parts), task % parts);
        let keys = part * KV_SPLIT..dims.t_kv.min((part + 1) * KV_SPLIT);
        // SAFETY: the processor has the tier of K; the memory was made for these sizes; each task writes parts of its
        // own.
        unsafe {
            K::run_simd(WidenQueries { q: &call.q, inputs, kv, queries: queries.as_mut_ptr() });
            let (queries, scores) = (queries.as_ptr(), scores.as_mut_ptr());
            Decode { inputs, keys_values, queries, scores, kv, keys, partials: (&partials, part) }.run::<K>();
        }
    });
    partials.merge(call);
    Some(())
}

/// As many of the query rows of a key head, a power of two, as registers hold the sums of.
fn group_rows<V: Vector>(dims: &Dims) -> usize {
    dims.rows().next_power_of_two().min(if V::LANES == MAX_LANES { 8 } else { 4 })
}

/// Query rows in f32, times the unit of the scores, with zeros up to whole vectors.
struct WidenQueries<'a, 'b, E> {
    q: &'a Strided<'b, E, 3>,
    inputs: &'a ScoreInputs<'b>,
    kv: KvHead,
    /// A row for each.
    queries: *mut f32,
}

impl<E: Number> SimdTask for WidenQueries<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let (dims, factor) = (&self.inputs.dims, self.inputs.options.units(false).query);
        let width = dims.d.next_multiple_of(K::Vector::LANES);
        for row in 0..dims.rows() {
            let from = self.q.query(dims.row(self.kv, row));
            // SAFETY: the processor has the tier of K; the row belongs to the call, and there is memory for each.
            unsafe { widen_row::<E, K::Vector>(from, dims.d, self.queries.add(row * width), width, factor) };
        }
    }
}

/// The query rows of one key head against a part of its keys.
struct Decode<'a, 'b, S> {
    inputs: &'a ScoreInputs<'b>,
    keys_values: &'a [StoredRows<'b, S>; 2],
    /// Rows in f32.
    queries: *const f32,
    /// Of each group of rows (keys, R), and a panel more.
    scores: *mut f32,
    kv: KvHead,
    keys: Range<usize>,
    /// Takes the results, by the number of the part.
    partials: (&'a Partials, usize),
}

impl<S: Stored> Decode<'_, '_, S> {
    /// # Safety
    /// The processor has the tier of K; the memory was made for the call's sizes.
    unsafe fn run<K: Kernel>(&self) {
        let &Self { inputs, keys_values: [key_rows, value_rows], kv, partials: (partials, part), .. } = self;
        let (dims, group) = (&inputs.dims, group_rows::<K::Vector>(&inputs.dims));
        let tile = |first: usize| {
            let rows = first..dims.rows().min(first + group);
            Tile::narrow::<K>(inputs, kv, rows, self.keys.clone(), group)
        };
        let tiles: Vec<_> = (0..dims.rows()).step_by(group).map(tile).collect();
        let keys = Tile::seen_keys(&tiles);
        let block = if tiles.len() == 1 { keys.len().max(1) } else { KEY_BLOCK };
        let scores = |index: usize, key: usize| {
            self.scores.wrapping_add(index * (keys.len() * group + MAX_COLUMNS) + (key - keys.start) * group)
        };
        let queries = |index: usize| {
            let row = index * group * dims.d.next_multiple_of(K::Vector::LANES);
            Operand::Queries(self.queries.wrapping_add(row))
        };
        let context = |index: usize| partials.row(kv, index * group, part);
        let products = |&rows: &StoredRows<S>, operand: &dyn Fn(usize) -> Operand| {
            for first in keys.clone().step_by(block) {
                for index in 0..tiles.len() {
                    let (keys, numbers) = (first..keys.end.min(first + block), scores(index, first));
                    // SAFETY: as this method's contract.
                    unsafe { K::run_simd(RowProducts { rows, kv, keys, group, numbers, operand: operand(index) }) };
                }
            }
        };
        products(key_rows, &queries);
        // The keys that every row sees.
        let every = if inputs.options.keep.is_some() { 0..0 } else { keys.clone() };
        let every = tiles.iter().fold(every, |all, tile| all.start.max(tile.every.start)..all.end.min(tile.every.end));
        let values = |keys: Range<usize>| HeadRows::new(value_rows, kv, keys);
        // A weight of zero does not silence what is not finite. Most calls hide no key, or few.
        let hidden = [keys.start..every.start.min(keys.end), every.end.max(keys.start)..keys.end];
        // SAFETY: as this method's contract.
        let only_seen = !hidden.into_iter().all(|keys| unsafe { values(keys).are_finite() });
        for (index, tile) in tiles.iter().enumerate() {
            let (scores, context, stride) = (scores(index, keys.start), context(index), partials.stride());
            let rows = (keys.len() * group).div_ceil(K::PANEL);
            let (mut max, mut sum) = ([f32::NEG_INFINITY; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
            let mut factors = [0f32; MAX_COLUMNS];
            let nothing = std::ptr::null_mut();
            // SAFETY: as this method's contract.
            unsafe {
                K::run_simd(TileSoftmax {
                    scores: TileScores {
                        inputs: *inputs,
                        tile,
                        units: inputs.options.units(false),
                        keys: keys.clone(),
                        rows,
                        is_masked: every != keys || rows * K::PANEL != keys.len() * group,
                        scores,
                        staging: nothing,
                        dropout: nothing,
                        cap_slopes: None,
                    },
                    depth: rows,
                    pairs: nothing,
                    state: PanelState { context: nothing, max: max.as_mut_ptr(), sum: sum.as_mut_ptr() },
                    factors: factors.as_mut_ptr(),
                    scores_out: None,
                });
                for r in 0..group {
                    let sum = sum[r..K::PANEL].iter().step_by(group).sum();
                    partials.set(context.add(r * stride), max[r], sum);
                }
                if only_seen {
                    let values = values(keys.clone());
                    K::run_simd(AccumulateSeen { inputs, values, tile, weights: scores, context, stride });
                }
            }
        }
        if !only_seen {
            products(value_rows, &|index| Operand::Context(context(index), partials.stride()));
        }
    }
}
