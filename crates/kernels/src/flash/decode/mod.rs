//! Few queries against many keys: a call that waits for memory, so keys and values are read once, in order, in place.
//!
//! Lanes run along D, and nothing is packed. One part of the keys goes through each step as a whole, since its scores
//! fit the first cache. In the softmax the lanes belong to a narrow tile, whose panel has several keys in each row:
//!
//! ```text
//! scores  = keys · queries          (keys, R) for each group of R rows, whose sums fit the registers
//! scores  = softcap, ALiBi, bias; -inf where masked
//! weights = 2^(scores - largest)
//! output  = weightsᵀ · values       (R, D_v)
//! ```

mod products;

use std::ops::Range;

use super::call::ForwardCall;
use super::epilogue::Partials;
use super::inputs::{CheckedCall, query_row};
use super::kv_rows::{KeysValues, KvHeadRows};
use super::options::SoftmaxStats;
use super::scores::TileScores;
use super::softmax::TileSoftmax;
use super::state::PanelState;
use super::tasks::{KV_SPLIT, TASKS_PER_THREAD, workers};
use super::tile::{Tile, intersection};
use crate::cpu::{
    Kernel, Layout, MAX_COLUMNS, MAX_LANES, Scratch, SimdTask, Vector, Workers, for_each_task, second_cache,
};
use crate::number::{Number, Stored, Strided, widen_row};
use candle_attention_call::{AttentionDims, KvHead};
use products::{AccumulateAttended, KEY_BLOCK, MOST_GROUPED_ROWS, Multiply, Operand, OutputRows, Products};

/// The most rows that are decoded on any instruction set.
const MAX_ROWS: usize = 16;

/// Returns the most rows that are decoded: beyond them, tiles of packed keys are faster, and from half that number on
/// where a kernel multiplies pairs of bf16, which decoding widens.
pub(super) const fn max_rows<K: Kernel>() -> usize {
    if K::Vector::LANES < 8 { K::Vector::LANES } else { MAX_ROWS / K::ELEMENTS }
}

/// Computes attention of up to [`MAX_ROWS`] rows for each key head. `None` if there is no memory for the results of the
/// parts.
///
/// # Safety
/// The processor has the instruction set of V.
pub(super) unsafe fn run<V: Vector, E: Number, S: Stored>(
    call: &ForwardCall<E>,
    keys_values: &KeysValues<S>,
) -> Option<()> {
    let inputs = &call.inputs;
    let values = &keys_values.v;
    let split = DecodeSplit {
        layout: V::LAYOUT,
        group: group_rows::<V>(&inputs.dims),
        workers: workers(&inputs.dims, size_of::<S>(), 1),
        may_join_heads: keys_values.k.has_heads_side_by_side() && values.has_heads_side_by_side(),
    };
    // SAFETY: the processor has the instruction set of V; the operands of a step belong to the call.
    run_parts(call, &split, &|step| unsafe {
        match step {
            DecodeStep::WidenQueries { kv, to } => V::run_simd(WidenQueries { q: &call.q, inputs, kv, queries: to }),
            DecodeStep::MultiplyKeys(products) => V::run_simd(Multiply { rows: &keys_values.k, products }),
            DecodeStep::MultiplyValues(products) => V::run_simd(Multiply { rows: values, products }),
            DecodeStep::Softmax(softmax) => V::run_simd(softmax),
            DecodeStep::CheckFinite { kv, keys, are_finite } => {
                *are_finite &= KvHeadRows::new(values, *kv, keys.clone()).are_finite();
            }
            DecodeStep::AccumulateAttended { tile, keys, weights, outputs } => {
                let values = KvHeadRows::new(values, tile.kv, keys);
                V::run_simd(AccumulateAttended { inputs, values, tile, weights, outputs });
            }
        }
    })
}

/// A step that is compiled for each type of elements and each instruction set. Large arguments are passed by reference:
/// a copy would have to wait until they are stored.
enum DecodeStep<'a> {
    /// Converts queries to rows in f32.
    WidenQueries { kv: &'a KvHead, to: *mut f32 },
    /// Multiplies keys with queries.
    MultiplyKeys(&'a Products),
    /// Adds weighted values to the outputs.
    MultiplyValues(&'a Products),
    /// Turns scores into weights.
    Softmax(&'a TileSoftmax<'a>),
    /// Clears the flag if a value of some keys is not finite.
    CheckFinite { kv: &'a KvHead, keys: &'a Range<usize>, are_finite: &'a mut bool },
    /// Adds weighted values that are not all finite, by [`AccumulateAttended`].
    AccumulateAttended { tile: &'a Tile, keys: Range<usize>, weights: *const f32, outputs: OutputRows },
}

/// The memory of a thread, for each head of a task.
struct DecodeMemory {
    /// Query rows in f32.
    queries: Scratch,
    /// The scores of each group of rows, (keys, R), and a panel more.
    scores: Scratch,
}

/// How a call is split into tasks.
struct DecodeSplit {
    layout: Layout,
    /// R, the number of query rows of a tile.
    group: usize,
    workers: Workers,
    /// Whether a task reads several heads of the same keys.
    may_join_heads: bool,
}

impl DecodeSplit {
    /// Returns the most key heads of a task, whose scores have `scores` numbers for each head.
    ///
    /// Where the rows of a key are next to each other, as in pages, a thread that reads one head skips most of what the
    /// processor prefetches. A task that reads all heads of some keys before the next keys reads one piece of memory.
    fn heads_of_task(&self, dims: &AttentionDims, parts: usize, scores: usize) -> usize {
        if !self.may_join_heads {
            return 1;
        }
        let for_threads = dims.kv_heads() * parts / (TASKS_PER_THREAD * self.workers.count);
        let that_fit = second_cache() / 4 / (scores * size_of::<f32>()).max(1);
        for_threads.min(that_fit).clamp(1, dims.h_kv)
    }
}

/// Runs a task for each part of the keys of some key heads.
fn run_parts<E: Number>(call: &ForwardCall<E>, split: &DecodeSplit, run: &(dyn Fn(DecodeStep) + Sync)) -> Option<()> {
    let inputs = &call.inputs;
    let dims = &inputs.dims;
    let &DecodeSplit { layout, group, workers, .. } = split;
    let parts = dims.t_kv.div_ceil(KV_SPLIT).max(1);
    // Rows that fill up the last group have no query.
    let rows = dims.rows().next_multiple_of(group);
    let partials = Partials::new(dims, rows, parts)?;
    let query_numbers = rows * dims.d.next_multiple_of(MAX_LANES);
    let score_numbers = rows * KV_SPLIT.min(dims.t_kv) + rows * MAX_COLUMNS;
    let heads = split.heads_of_task(dims, parts, score_numbers);
    let tasks_of_part = dims.h_kv.div_ceil(heads);
    let allocate = || DecodeMemory {
        queries: Scratch::zeros(heads * query_numbers),
        scores: Scratch::zeros(heads * score_numbers),
    };
    for_each_task(dims.b * tasks_of_part * parts, workers, &allocate, &|memory, task| {
        let part = task % parts;
        let (b, first_head) = (task / parts / tasks_of_part, task / parts % tasks_of_part * heads);
        let mut joined = Vec::with_capacity(heads);
        for (n, head) in (first_head..dims.h_kv.min(first_head + heads)).enumerate() {
            let kv = KvHead { b, head };
            let keys = part * KV_SPLIT..dims.t_kv.min((part + 1) * KV_SPLIT);
            let tile = |first: usize| {
                let tile_rows = first..dims.rows().min(first + group);
                Tile::narrow(layout, inputs, kv, tile_rows, keys.clone(), group)
            };
            let tiles: Vec<_> = (0..dims.rows()).step_by(group).map(tile).collect();
            joined.push(DecodeTask {
                inputs,
                layout,
                group,
                kv,
                keys: Tile::attended_keys(&tiles),
                tiles,
                partials: &partials,
                part,
                queries: memory.queries.as_mut_ptr().wrapping_add(n * query_numbers),
                scores: memory.scores.as_mut_ptr().wrapping_add(n * score_numbers),
            });
        }
        run_joined(&joined, run);
    });
    partials.merge(call);
    Some(())
}

/// Runs the steps of some heads. The heads take turns after each block of keys.
fn run_joined(heads: &[DecodeTask], run: &(dyn Fn(DecodeStep) + Sync)) {
    let tiles: usize = heads.iter().map(|head| head.tiles.len()).sum();
    let keys = heads.iter().map(|head| head.keys.len()).max().unwrap_or(0);
    let block = if tiles == 1 { keys.max(1) } else { KEY_BLOCK };
    for head in heads {
        run(DecodeStep::WidenQueries { kv: &head.kv, to: head.queries });
    }
    for first in (0..keys).step_by(block) {
        for head in heads {
            head.multiply_keys(&head.block(first, block), run);
        }
    }
    // The others have multiplied their values already.
    let finite: Vec<&DecodeTask> = heads.iter().filter(|head| head.weights(run)).collect();
    for first in (0..keys).step_by(block) {
        for head in &finite {
            head.multiply_values(&head.block(first, block), run);
        }
    }
}

/// All query rows of a key head against one part of its keys.
struct DecodeTask<'a, 'b> {
    inputs: &'a CheckedCall<'b>,
    layout: Layout,
    /// R, the number of query rows of a tile.
    group: usize,
    kv: KvHead,
    /// The keys of the part that some row attends to.
    keys: Range<usize>,
    tiles: Vec<Tile>,
    partials: &'a Partials,
    part: usize,
    queries: *mut f32,
    scores: *mut f32,
}

impl DecodeTask<'_, '_> {
    /// Returns up to `count` keys from the `first` of the task on.
    fn block(&self, first: usize, count: usize) -> Range<usize> {
        let start = self.keys.end.min(self.keys.start + first);
        start..self.keys.end.min(start + count)
    }

    /// Multiplies some keys with the queries.
    fn multiply_keys(&self, keys: &Range<usize>, run: &(dyn Fn(DecodeStep) + Sync)) {
        let width = self.inputs.dims.d.next_multiple_of(self.layout.lanes);
        for index in 0..self.tiles.len() {
            let queries = self.queries.wrapping_add(index * self.group * width);
            run(DecodeStep::MultiplyKeys(&self.products(index, keys, Operand::Queries(queries))));
        }
    }

    /// Turns the scores into weights. If some masked value is not finite, multiplies the values and returns `false`.
    fn weights(&self, run: &(dyn Fn(DecodeStep) + Sync)) -> bool {
        // The keys that every row attends to.
        let all = if self.inputs.options.boolean_mask.is_some() { 0..0 } else { self.keys.clone() };
        let every = self.tiles.iter().fold(all, |every, tile| intersection(&every, &tile.all_attend));
        // The product of a weight of zero and a value that is not finite is NaN. Most calls mask no key, or few.
        let masked_before = self.keys.start..every.start.min(self.keys.end);
        let masked_after = every.end.max(self.keys.start)..self.keys.end;
        let mut are_finite = true;
        for keys in [&masked_before, &masked_after].into_iter().filter(|keys| !keys.is_empty()) {
            run(DecodeStep::CheckFinite { kv: &self.kv, keys, are_finite: &mut are_finite });
        }
        for (index, tile) in self.tiles.iter().enumerate() {
            self.softmax(index, tile, every != self.keys, run);
            if !are_finite {
                let keys = self.keys.clone();
                let weights = self.scores_of(index, keys.start);
                run(DecodeStep::AccumulateAttended { tile, keys, weights, outputs: self.outputs_of(index) });
            }
        }
        are_finite
    }

    /// Adds the weighted values of some keys to the outputs.
    fn multiply_values(&self, keys: &Range<usize>, run: &(dyn Fn(DecodeStep) + Sync)) {
        for index in 0..self.tiles.len() {
            let outputs = Operand::Outputs(self.outputs_of(index));
            run(DecodeStep::MultiplyValues(&self.products(index, keys, outputs)));
        }
    }

    /// Returns a pointer to the scores of a tile from a key on.
    fn scores_of(&self, index: usize, key: usize) -> *mut f32 {
        let tile = index * (self.keys.len() * self.group + MAX_COLUMNS);
        self.scores.wrapping_add(tile + (key - self.keys.start) * self.group)
    }

    /// Returns the output rows of a tile.
    fn outputs_of(&self, index: usize) -> OutputRows {
        OutputRows { at: self.partials.row(self.kv, index * self.group, self.part), stride: self.partials.stride() }
    }

    /// Returns the products of a tile with a block of keys.
    fn products(&self, index: usize, keys: &Range<usize>, operand: Operand) -> Products {
        let scores_or_weights = self.scores_of(index, keys.start);
        Products { kv: self.kv, keys: keys.clone(), group: self.group, scores_or_weights, operand }
    }

    /// Turns the scores of a tile into weights, and writes its maxima and sums.
    fn softmax(&self, index: usize, tile: &Tile, is_masked: bool, run: &(dyn Fn(DecodeStep) + Sync)) {
        let &Self { inputs, layout, group, ref keys, .. } = self;
        let rows = (keys.len() * group).div_ceil(layout.panel);
        let mut max = [f32::NEG_INFINITY; MAX_COLUMNS];
        let mut sum = [0f32; MAX_COLUMNS];
        let mut factors = [0f32; MAX_COLUMNS];
        let unused = std::ptr::null_mut();
        run(DecodeStep::Softmax(&TileSoftmax {
            scores: TileScores {
                inputs: *inputs,
                tile,
                units: inputs.options.units(false),
                keys: keys.clone(),
                rows,
                is_masked: is_masked || rows * layout.panel != keys.len() * group,
                scores: self.scores_of(index, keys.start),
                staging: unused,
                dropout: unused,
                product_derivatives: None,
            },
            depth: rows,
            pairs: unused,
            state: PanelState { values: unused, max: max.as_mut_ptr(), sum: sum.as_mut_ptr() },
            factors: factors.as_mut_ptr(),
            scores_out: None,
        }));
        let outputs = self.outputs_of(index);
        for r in 0..group {
            let stats = SoftmaxStats { max: max[r], sum: sum[r..layout.panel].iter().step_by(group).sum() };
            // SAFETY: the parts have the rows, and no two tasks write the same part.
            unsafe { self.partials.set_stats(outputs.at.add(r * outputs.stride), stats) };
        }
    }
}

/// Returns the number of query rows of a key head, a power of two, whose sums fit the registers.
fn group_rows<V: Vector>(dims: &AttentionDims) -> usize {
    dims.rows().next_power_of_two().min(if V::LANES == MAX_LANES { MOST_GROUPED_ROWS } else { 4 })
}

/// Converts query rows to f32, times the unit of the scores, with zeros up to whole vectors.
struct WidenQueries<'a, 'b, E> {
    q: &'a Strided<'b, E, 3>,
    inputs: &'a CheckedCall<'b>,
    kv: &'a KvHead,
    /// The destination: a row for each query row.
    queries: *mut f32,
}

impl<E: Number> SimdTask for WidenQueries<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let dims = &self.inputs.dims;
        let factor = self.inputs.options.units(false).query;
        let width = dims.d.next_multiple_of(K::Vector::LANES);
        for row in 0..dims.rows() {
            let from = query_row(self.q, dims.row(*self.kv, row));
            // SAFETY: the processor has the instruction set of K; the row belongs to the call, and there is memory for
            // each.
            unsafe { widen_row::<E, K::Vector>(from, dims.d, self.queries.add(row * width), width, factor) };
        }
    }
}
