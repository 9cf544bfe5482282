//! The steps of the backward pass: one tile against one block, which is five products, and what is done with each query
//! before the first tile and after the last.

use std::cell::OnceCell;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::BackwardCall;
use super::gradient::{BiasGradients, TileColumns, TileGradient};
use super::task::{BackwardMemory, BlockMemory, Side};
use crate::cpu::{Format, Kernel, LeftOperand, MAX_COLUMNS, Product, Scratch, SharedPtr, SimdTask, Vector};
use crate::flash::pack::{HeadRows, TileRows, is_finite_row, pack_columns, pack_rows};
use crate::flash::prefill::{add_values, multiply_keys};
use crate::flash::problem::{Row, ScoreUnits};
use crate::flash::scores::TileScores;
use crate::flash::tile::{Overlap, Part, Tile};
use crate::number::{Number, load_first, store_first, widen_row};

/// One block of keys and values, packed, and the sums of their gradients.
pub(super) struct KeyBlock<'a, E> {
    /// Keys and values.
    sources: [HeadRows<'a, E>; 2],
    rows: [LeftOperand; 2],
    key_columns: LeftOperand,
    pub sums: [*mut f32; 2],
}

impl<'a, E: Number> KeyBlock<'a, E> {
    /// Packs block `index` of a task.
    ///
    /// # Safety
    /// The processor has the tier of K; the keys are those of a block; the memory was made for the call and has it.
    #[inline(always)]
    pub unsafe fn new<K: Kernel>(sources: [HeadRows<'a, E>; 2], memory: &mut BackwardMemory, index: usize) -> Self {
        let (sides, staging) = (&memory.sizes.sides, memory.staging.as_mut_ptr());
        let BlockMemory { sides: block, key_columns } = &mut memory.blocks[index];
        // SAFETY: as this function's contract.
        unsafe {
            let key_columns = pack_columns::<K, E>(&sources[0], key_columns.as_mut_ptr(), staging, sides[0].packed);
            let mut rows = [key_columns; 2];
            let mut sums = [std::ptr::null_mut(); 2];
            for (side, [of_rows, of_sums]) in block.iter_mut().enumerate() {
                rows[side] = pack_rows::<K, E>(&sources[side], of_rows.as_mut_ptr(), sides[side].packed.words);
                of_sums.words_mut().fill(0.0);
                sums[side] = of_sums.as_mut_ptr();
            }
            Self { sources, rows, key_columns, sums }
        }
    }

    pub fn keys(&self) -> &Range<usize> {
        &self.sources[0].keys
    }
}

/// A tile whose queries and gradients are packed.
pub(super) struct PackedTile<'a, E> {
    pub tile: &'a Tile,
    pub columns: TileColumns,
    /// Its queries, and the gradients of its contexts.
    pub rows: [TileRows<'a, E>; 2],
    pub finite: OnceCell<bool>,
}

impl<E: Number> PackedTile<'_, E> {
    /// Whether all queries and gradients of contexts are finite, found out once.
    fn are_finite(&self) -> bool {
        let of = |rows: &TileRows<E>| {
            // SAFETY: the rows belong to the call.
            let is_finite = |row| unsafe { is_finite_row(row, rows.width) };
            (0..self.tile.rows.len()).filter_map(|column| rows.row(column)).all(is_finite)
        };
        *self.finite.get_or_init(|| self.rows.iter().all(of))
    }
}

/// One tile against one block.
pub(super) struct Step<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub block: &'a KeyBlock<'a, E>,
    pub tile: &'a PackedTile<'a, E>,
    pub units: ScoreUnits,
    pub biases: Option<BiasGradients>,
}

const ONES: [f32; MAX_COLUMNS] = [1.0; MAX_COLUMNS];

impl<E: Number> Step<'_, '_, E> {
    /// Adds to the sums of the block and of the tile.
    ///
    /// # Safety
    /// The processor has the tier of K, whose tiles are configured; the memory holds the block and the tile; no other
    /// thread uses what the biases share.
    #[inline(always)]
    pub unsafe fn run<K: Kernel>(&self, memory: &mut BackwardMemory) {
        let &Self { backward, block, tile: packed, units, biases } = self;
        let (inputs, tile, sides, wanted) = (backward.call.inputs, packed.tile, memory.sizes.sides, &backward.wanted);
        let Some(overlap) = tile.overlap::<K>(block.keys(), &inputs) else { return };
        let [scores, products] = memory.products.each_mut().map(Scratch::as_mut_ptr);
        // SAFETY: as this method's contract.
        unsafe {
            for part in overlap.parts.iter() {
                for (side, to) in [scores, products].into_iter().enumerate() {
                    let (depth, columns) = (sides[side].packed.words, memory.panels[side].as_ptr());
                    multiply_keys::<K>(&overlap, part, block.rows[side], depth, columns, to);
                }
            }
            K::Vector::run_simd(TileGradient {
                scores: TileScores {
                    inputs,
                    tile,
                    units,
                    keys: overlap.keys.clone(),
                    rows: overlap.keys.len(),
                    is_masked: overlap.is_masked,
                    scores,
                    staging: memory.staging.as_mut_ptr(),
                    dropout: memory.dropout.as_mut_ptr(),
                    cap_slopes: Some(memory.slopes.as_mut_ptr()),
                },
                products,
                columns: &packed.columns,
                scale: inputs.options.scale as f32,
                biases,
            });
            if overlap.is_masked && !(block.sources[0].are_finite() && packed.are_finite()) {
                return self.add_seen::<K>(memory, &overlap);
            }
            let (mut gradient_columns, mut gradient_rows) = (products, [products, scores]);
            if const { K::IS_BF16 } {
                memory.store_words::<K>(&overlap, tile.vectors);
                let [of_weights, of_gradients] = memory.halves.each_mut().map(Scratch::as_mut_ptr);
                (gradient_columns, gradient_rows) = (memory.pairs.as_mut_ptr(), [of_gradients, of_weights]);
            }
            let (keys, d, to) = (block.key_columns, sides[0].packed.rows, memory.query_sums.as_mut_ptr());
            for part in overlap.parts.iter() {
                if wanted.q {
                    add_values::<K>(&overlap, part, keys, d, gradient_columns, &ONES, to);
                }
                for (side, is_wanted) in [wanted.k, wanted.v].into_iter().enumerate() {
                    if is_wanted {
                        let (weights, rows, to) = (gradient_rows[side], memory.rows[side].as_ptr(), block.sums[side]);
                        add_rows::<K>(&overlap, part, &sides[side], weights, rows, to);
                    }
                }
            }
        }
    }

    /// The same where something is not finite: zero times NaN is NaN, so that each pair that is seen is added by
    /// itself. Rare, and slow.
    ///
    /// # Safety
    /// As [`run`](Self::run), for weights and gradients that are there.
    unsafe fn add_seen<K: Kernel>(&self, memory: &mut BackwardMemory, overlap: &Overlap) {
        let (inputs, sides) = (&self.backward.call.inputs, memory.sizes.sides);
        let (tile, block) = (self.tile.tile, self.block);
        let widened = |row: *const E, width: usize| {
            let mut wide = vec![0f32; width];
            // SAFETY: the processor has the tier of K, and the row has the width.
            unsafe { widen_row::<E, K::Vector>(row, width, wide.as_mut_ptr(), width, 1.0) };
            wide
        };
        for column in (0..tile.rows.len()).filter(|&column| !tile.is_empty(column)) {
            let rows = self.tile.rows.each_ref().map(|rows| rows.row(column).map(|row| widened(row, rows.width)));
            for key in tile.seen_by(inputs, column, &overlap.keys) {
                let at = (key - overlap.keys.start) * K::PANEL + column;
                let [weight, gradient] = memory.products.each_ref().map(|products| products.words()[at]);
                let sums = memory.query_sums.words_mut()[column..].iter_mut().step_by(K::PANEL);
                for (sum, x) in sums.zip(widened(block.sources[0].row(key), sides[0].width)) {
                    *sum += gradient * x;
                }
                for (side, factor) in [gradient, weight].into_iter().enumerate() {
                    let Some(row) = &rows[side] else { continue };
                    // SAFETY: as this method's contract; the key is one of the block's.
                    unsafe { add_row::<K>(&sides[side], block.sums[side], key - block.keys().start, factor, row) };
                }
            }
        }
    }
}

/// Adds a row times a factor to the sums (panels, block, panel) of a key of the block.
///
/// # Safety
/// The sums have the key.
unsafe fn add_row<K: Kernel>(side: &Side, sums: *mut f32, key: usize, factor: f32, row: &[f32]) {
    for panel in 0..side.count {
        let sums = sums.wrapping_add((panel * K::BLOCK + key) * K::PANEL);
        for (n, &x) in row[side.columns::<K>(panel)].iter().enumerate() {
            // SAFETY: as this function's contract.
            unsafe { *sums.add(n) += factor * x };
        }
    }
}

/// The product of a tile's weights, (keys, panel) in words, with its gradients of contexts, (panels, panel in words,
/// panel), over parts of both; or of the gradients of its scores with its queries. Keys are rows, queries the depth, D
/// or D_v the columns, whose sums are (panels, block, panel).
///
/// # Safety
/// As [`Step::run`]; the weights of the part are there, and zeros beyond it where the kernel takes whole tiles.
unsafe fn add_rows<K: Kernel>(
    overlap: &Overlap,
    part: &Part,
    side: &Side,
    weights: *const f32,
    rows: *const f32,
    to: *mut f32,
) {
    let (lanes, words) = (K::Vector::LANES, K::PANEL / K::ELEMENTS);
    let start = part.vectors.start * lanes / K::ELEMENTS / K::DEPTH * K::DEPTH;
    let end = (part.vectors.end * lanes / K::ELEMENTS).next_multiple_of(K::DEPTH);
    let row = (part.keys.start - overlap.keys.start) * words;
    for panel in 0..side.count {
        // SAFETY: as this function's contract.
        unsafe {
            K::multiply(&Product {
                a: LeftOperand { at: weights.add(row + start), group: K::ROWS * words, row: words, step: 1 },
                b: rows.add((panel * words + start) * K::PANEL),
                c: to.add((panel * K::BLOCK + part.keys.start - overlap.block) * K::PANEL),
                rows: part.keys.len().next_multiple_of(K::MIN_ROWS),
                depth: end - start,
                vectors: side.vectors(panel),
                factors: Some(ONES.as_ptr()),
                format: Format::F32,
            });
        }
    }
}

/// Of each query of one head: the sum of its context times the gradient of it, which is that of its weights times
/// theirs. Clears the sums of the queries' gradients on the way, and sums the gradient of the head's sink.
pub(super) struct Deltas<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub b: usize,
    pub head: usize,
    /// Takes the gradient of the sink.
    pub sink: &'a mut f32,
}

impl<E: Number> SimdTask for Deltas<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { backward, b, head, sink } = self;
        let (call, lanes) = (&backward.call, K::Vector::LANES);
        let (dims, options) = (&call.inputs.dims, &call.inputs.options);
        let mut sink_sum = 0f64;
        for query in 0..dims.t_q {
            let row = Row { b, head, query };
            let index = dims.row_index(row);
            // SAFETY: the processor has the tier of K; the row belongs to the call and this head's rows to this task.
            unsafe {
                if backward.wanted.q {
                    backward.q_sums.add(index * dims.d).write_bytes(0, dims.d);
                }
                let (context, gradient) = (call.context_row(row), backward.context_grad.at([b, head, query]));
                let mut sum = K::Vector::splat(0.0);
                for d in (0..dims.d_v).step_by(lanes) {
                    let width = lanes.min(dims.d_v - d);
                    let context: K::Vector = load_first(context.add(d).cast_const(), width);
                    sum = context.mul_add(load_first(gradient.add(d), width), sum);
                }
                let stats = backward.stats[index];
                // What sees nothing has no gradient, whatever the gradient of its context is.
                let is_empty = call.inputs.range(row).is_empty() && options.sinks.is_none() || stats.sum == 0.0;
                // Adding to every score adds as much to the log-sum-exp.
                let of_lse = if let Some(lse) = backward.lse_grad { lse[index] } else { 0.0 };
                let delta = if is_empty { 0.0 } else { sum.sum() - of_lse };
                backward.deltas.add(index).write(delta);
                if let (Some(sinks), true) = (options.sinks, backward.wanted.sinks && !is_empty) {
                    let unit = options.exponent_unit();
                    let weight = ((sinks[head] * (LOG2_E / unit) - stats.max) * unit).exp2() / stats.sum;
                    // A sink without weight has no gradient either.
                    if weight != 0.0 {
                        sink_sum -= f64::from(weight) * f64::from(delta);
                    }
                }
            }
        }
        *sink = sink_sum as f32;
    }
}

/// The gradients of one head's queries, rounded to their type.
pub(super) struct RoundQueries<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub to: SharedPtr<E>,
    /// The first element, and how many.
    pub first: usize,
    pub count: usize,
}

impl<E: Number> SimdTask for RoundQueries<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        for at in (0..self.count).step_by(lanes) {
            let width = lanes.min(self.count - at);
            // SAFETY: the processor has the tier of K; both have the elements, which no other thread writes.
            unsafe {
                let sum: K::Vector = load_first::<f32, _>(self.backward.q_sums.add(self.first + at), width);
                store_first(sum, self.to.add(self.first + at), width);
            }
        }
    }
}
