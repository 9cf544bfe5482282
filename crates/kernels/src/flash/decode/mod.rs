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
use products::{AccumulateSeen, KEY_BLOCK, RowProducts};

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
    let parts = dims.t_kv.div_ceil(KV_SPLIT).max(1);
    // Rows that fill up the last group have no query.
    let rows = dims.rows().next_multiple_of(group_rows::<K::Vector>(dims));
    let partials = Partials::new(dims, rows, parts)?;
    let memory = || {
        let scores = rows * KV_SPLIT.min(dims.t_kv) + rows * MAX_COLUMNS;
        [rows * dims.d.next_multiple_of(MAX_LANES), scores].map(Scratch::zeros)
    };
    for_each_task(dims.b * dims.h_kv * parts, tasks::workers(call, 1), memory, |[queries, scores], task| {
        let (kv, part) = (dims.kv_head(task / parts), task % parts);
        let keys = part * KV_SPLIT..dims.t_kv.min((part + 1) * KV_SPLIT);
        let (inputs, keys_values) = (&call.inputs, &call.keys_values);
        // SAFETY: the processor has the tier of K; the memory was made for these sizes; each task writes parts of its
        // own.
        unsafe {
            K::run_simd(WidenQueries { q: &call.q, inputs, kv, queries: queries.as_mut_ptr() });
            let (queries, scores) = (queries.as_ptr(), scores.as_mut_ptr());
            K::run_simd(Decode { inputs, keys_values, queries, scores, kv, keys, partials: (&partials, part) });
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

impl<S: Stored> SimdTask for Decode<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: by the contract of `SimdTask`.
        unsafe {
            match group_rows::<K::Vector>(&self.inputs.dims) {
                1 => self.decode::<K, 1>(),
                2 => self.decode::<K, 2>(),
                8 if const { K::Vector::LANES == MAX_LANES } => self.decode::<K, 8>(),
                _ => self.decode::<K, 4>(),
            }
        }
    }
}

impl<S: Stored> Decode<'_, '_, S> {
    /// In groups of R rows.
    ///
    /// # Safety
    /// The processor has the tier of K; the memory was made for the call's sizes.
    #[inline(always)]
    unsafe fn decode<K: Kernel, const R: usize>(&self) {
        let &Self { inputs, keys_values, kv, partials: (partials, part), .. } = self;
        let dims = &inputs.dims;
        let tile = |first: usize| {
            let rows = first..dims.rows().min(first + R);
            Tile::narrow::<K>(inputs, kv, rows, self.keys.clone(), R)
        };
        let tiles: Vec<_> = (0..dims.rows()).step_by(R).map(tile).collect();
        let keys = Tile::seen_keys(&tiles);
        let block = if tiles.len() == 1 { keys.len().max(1) } else { KEY_BLOCK };
        let queries = |group: usize| self.queries.wrapping_add(group * R * dims.d.next_multiple_of(K::Vector::LANES));
        let scores = |group: usize, key: usize| {
            self.scores.wrapping_add(group * (keys.len() * R + MAX_COLUMNS) + (key - keys.start) * R)
        };
        let products = |first: usize| RowProducts::<S, R> {
            keys_values,
            kv,
            keys: first..keys.end.min(first + block),
            widths: [dims.d, dims.d_v],
            stride: partials.stride(),
        };
        let context = |group: usize| partials.row(kv, group * R, part);
        // The keys that every row sees.
        let every = if inputs.options.keep.is_some() { 0..0 } else { keys.clone() };
        let every = tiles.iter().fold(every, |all, tile| all.start.max(tile.every.start)..all.end.min(tile.every.end));
        // SAFETY: as this method's contract.
        unsafe {
            for first in keys.clone().step_by(block) {
                for group in 0..tiles.len() {
                    products(first).scores::<K::Vector>(queries(group), scores(group, first));
                }
            }
            let values = |keys: Range<usize>| HeadRows::new(&keys_values[1], kv, keys);
            // A weight of zero does not silence what is not finite. Most calls hide no key, or few.
            let hidden = [keys.start..every.start.min(keys.end), every.end.max(keys.start)..keys.end];
            let only_seen = hidden.into_iter().any(|keys| values(keys).has_non_finite::<K>());
            for (group, tile) in tiles.iter().enumerate() {
                let rows = (keys.len() * R).div_ceil(K::PANEL);
                let (mut max, mut sum) = ([f32::NEG_INFINITY; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
                let mut factors = [0f32; MAX_COLUMNS];
                let nothing = std::ptr::null_mut();
                K::run_simd(TileSoftmax {
                    scores: TileScores {
                        inputs: *inputs,
                        tile,
                        units: inputs.options.units(false),
                        keys: keys.clone(),
                        rows,
                        is_masked: every != keys || rows * K::PANEL != keys.len() * R,
                        scores: scores(group, keys.start),
                        staging: nothing,
                        dropout: nothing,
                    },
                    depth: rows,
                    pairs: nothing,
                    state: PanelState { context: nothing, max: max.as_mut_ptr(), sum: sum.as_mut_ptr() },
                    factors: factors.as_mut_ptr(),
                    scores_out: None,
                });
                for r in 0..R {
                    let sum = sum[r..K::PANEL].iter().step_by(R).sum();
                    partials.set(context(group).add(r * partials.stride()), max[r], sum);
                }
                if only_seen {
                    let (weights, context, stride) = (scores(group, keys.start), context(group), partials.stride());
                    let values = values(keys.clone());
                    K::run_simd(AccumulateSeen { inputs, values, tile, weights, context, stride });
                }
            }
            for first in keys.clone().step_by(block).filter(|_| !only_seen) {
                for group in 0..tiles.len() {
                    products(first).accumulate::<K::Vector>(scores(group, first), context(group));
                }
            }
        }
    }
}
