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
use crate::cpu::{Kernel, Layout, MAX_COLUMNS, MAX_LANES, Scratch, SimdTask, Vector, for_each_task};
use crate::number::{Number, Stored, widen_row};
use products::{AccumulateSeen, KEY_BLOCK, Operand, Products};

/// The most rows that are decoded on any instruction set.
const MAX_ROWS: usize = 16;

/// The most rows that are decoded: beyond them, tiles of packed keys are faster, and from half as many on where a
/// kernel multiplies pairs of bf16, which decoding widens.
pub(super) const fn max_rows<K: Kernel>() -> usize {
    if K::Vector::LANES < 8 { K::Vector::LANES } else { MAX_ROWS / K::ELEMENTS }
}

/// Attention of up to [`MAX_ROWS`] rows for each key head. `None` where there is no memory for the parts' results.
///
/// # Safety
/// The processor has the instruction set of V.
pub(super) unsafe fn run<V: Vector, E: Number, S: Stored>(
    call: &Call<E>,
    keys_values: &[StoredRows<S>; 2],
) -> Option<()> {
    let (inputs, [_, value_rows]) = (&call.inputs, keys_values);
    // SAFETY: the processor has the instruction set of V; what a step names belongs to the call.
    run_parts(call, V::LAYOUT, group_rows::<V>(&inputs.dims), size_of::<S>(), &|step| unsafe {
        match step {
            Step::Widen(kv, queries) => V::run_simd(WidenQueries { q: &call.q, inputs, kv, queries }),
            Step::Multiply(rows, products) => V::run_simd((&keys_values[rows], products)),
            Step::Softmax(softmax) => V::run_simd(softmax),
            Step::AreFinite(kv, keys, are) => *are &= HeadRows::new(value_rows, *kv, keys.clone()).are_finite(),
            Step::AccumulateSeen(tile, keys, weights, context, stride) => {
                let values = HeadRows::new(value_rows, tile.kv, keys);
                V::run_simd(AccumulateSeen { inputs, values, tile, weights, context, stride });
            }
        }
    })
}

/// What is compiled for each element and each instruction set. By reference, where a copy would wait for what was
/// written a moment before.
enum Step<'a> {
    /// Queries, to rows in f32.
    Widen(&'a KvHead, *mut f32),
    /// With keys, or with values.
    Multiply(usize, &'a Products),
    Softmax(&'a TileSoftmax<'a>),
    /// Whether all values of some keys are, and those before.
    AreFinite(&'a KvHead, &'a Range<usize>, &'a mut bool),
    /// [`AccumulateSeen`], with its keys, weights, context and stride.
    AccumulateSeen(&'a Tile, Range<usize>, *const f32, *mut f32, usize),
}

/// A task for each part of the keys of each key head. Keys and values have so many `bytes` a number.
fn run_parts<E: Number>(
    call: &Call<E>,
    layout: Layout,
    group: usize,
    bytes: usize,
    run: &(dyn Fn(Step) + Sync),
) -> Option<()> {
    let (inputs, workers) = (&call.inputs, tasks::workers(call, bytes, 1));
    let dims = &inputs.dims;
    let parts = dims.t_kv.div_ceil(KV_SPLIT).max(1);
    // Rows that fill up the last group have no query.
    let rows = dims.rows().next_multiple_of(group);
    let partials = Partials::new(dims, rows, parts)?;
    let memory = || {
        let scores = rows * KV_SPLIT.min(dims.t_kv) + rows * MAX_COLUMNS;
        [rows * dims.d.next_multiple_of(MAX_LANES), scores].map(Scratch::zeros)
    };
    for_each_task(dims.b * dims.h_kv * parts, workers, &memory, &|[queries, scores], task| {
        let (kv, part) = (dims.kv_head(task / parts), task % parts);
        let own = part * KV_SPLIT..dims.t_kv.min((part + 1) * KV_SPLIT);
        // Rows in f32, and of each group of rows (keys, R), and a panel more.
        let (all_queries, all_scores) = (queries.as_mut_ptr(), scores.as_mut_ptr());
        run(Step::Widen(&kv, all_queries));
        let tile = |first: usize| {
            let rows = first..dims.rows().min(first + group);
            Tile::narrow(layout, inputs, kv, rows, own.clone(), group)
        };
        let tiles: Vec<_> = (0..dims.rows()).step_by(group).map(tile).collect();
        let keys = Tile::seen_keys(&tiles);
        let block = if tiles.len() == 1 { keys.len().max(1) } else { KEY_BLOCK };
        let scores = |index: usize, key: usize| {
            all_scores.wrapping_add(index * (keys.len() * group + MAX_COLUMNS) + (key - keys.start) * group)
        };
        let width = dims.d.next_multiple_of(layout.lanes);
        let context = |index: usize| partials.row(kv, index * group, part);
        let products = |rows: usize, operand: &dyn Fn(usize) -> Operand| {
            for first in keys.clone().step_by(block) {
                for index in 0..tiles.len() {
                    let (keys, numbers) = (first..keys.end.min(first + block), scores(index, first));
                    run(Step::Multiply(rows, &Products { kv, keys, group, numbers, operand: operand(index) }));
                }
            }
        };
        products(0, &|index| Operand::Queries(all_queries.wrapping_add(index * group * width)));
        // The keys that every row sees.
        let every = if inputs.options.keep.is_some() { 0..0 } else { keys.clone() };
        let every = tiles.iter().fold(every, |all, tile| all.start.max(tile.every.start)..all.end.min(tile.every.end));
        // A weight of zero does not silence what is not finite. Most calls hide no key, or few.
        let hidden = [keys.start..every.start.min(keys.end), every.end.max(keys.start)..keys.end];
        let mut are_finite = true;
        for keys in hidden.iter().filter(|keys| !keys.is_empty()) {
            run(Step::AreFinite(&kv, keys, &mut are_finite));
        }
        for (index, tile) in tiles.iter().enumerate() {
            let (scores, context, stride) = (scores(index, keys.start), context(index), partials.stride());
            let rows = (keys.len() * group).div_ceil(layout.panel);
            let (mut max, mut sum) = ([f32::NEG_INFINITY; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
            let mut factors = [0f32; MAX_COLUMNS];
            let nothing = std::ptr::null_mut();
            // SAFETY: each task writes parts of its own, which have the rows.
            unsafe {
                run(Step::Softmax(&TileSoftmax {
                    scores: TileScores {
                        inputs: *inputs,
                        tile,
                        units: inputs.options.units(false),
                        keys: keys.clone(),
                        rows,
                        is_masked: every != keys || rows * layout.panel != keys.len() * group,
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
                }));
                for r in 0..group {
                    let sum = sum[r..layout.panel].iter().step_by(group).sum();
                    partials.set(context.add(r * stride), max[r], sum);
                }
                if !are_finite {
                    run(Step::AccumulateSeen(tile, keys.clone(), scores, context, stride));
                }
            }
        }
        if are_finite {
            products(1, &|index| Operand::Context(context(index), partials.stride()));
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
    kv: &'a KvHead,
    /// A row for each.
    queries: *mut f32,
}

impl<E: Number> SimdTask for WidenQueries<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let (dims, factor) = (&self.inputs.dims, self.inputs.options.units(false).query);
        let width = dims.d.next_multiple_of(K::Vector::LANES);
        for row in 0..dims.rows() {
            let from = self.q.query(dims.row(*self.kv, row));
            // SAFETY: the processor has the instruction set of K; the row belongs to the call, and there is memory for
            // each.
            unsafe { widen_row::<E, K::Vector>(from, dims.d, self.queries.add(row * width), width, factor) };
        }
    }
}
