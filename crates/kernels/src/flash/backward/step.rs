//! The steps of the backward pass: one tile against one block, which is five products, and what is done with each query
//! before the first tile and after the last.

use std::cell::OnceCell;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::BackwardCall;
use super::gradient::{BiasGradients, TileColumns, TileGradient};
use super::task::{BackwardMemory, BlockMemory, Side};
use crate::cpu::{Format, Kernel, LeftOperand, MAX_COLUMNS, Product, Scratch, SharedPtr, Vector};
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
    /// The processor has the instruction set of K; the keys are those of a block; the memory was made for the call and
    /// has it.
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
    /// The processor has the instruction set of K, whose tiles are configured; the memory holds the block and the tile;
    /// no other thread uses what the biases share.
    #[inline(always)]
    pub unsafe fn run<K: Kernel>(&self, memory: &mut BackwardMemory) {
        let &Self { backward, block, tile: packed, units, biases } = self;
        let (inputs, tile, sides, wanted) = (backward.call.inputs, packed.tile, memory.sizes.sides, &backward.wanted);
        let Some(overlap) = tile.overlap(K::LAYOUT, block.keys(), &inputs) else { return };
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
            // SAFETY: the processor has the instruction set of K, and the row has the width.
            unsafe { widen_row::<E, K::Vector>(row, width, wide.as_mut_ptr(), width, 1.0) };
            wide
        };
        for column in (0..tile.rows.len()).filter(|&column| !tile.is_empty(column)) {
            let row = |rows: &TileRows<E>| rows.row(column).map(|row| widened(row, rows.width));
            let rows = [row(&self.tile.rows[0]), row(&self.tile.rows[1])];
            for key in tile.seen_by(inputs, column, &overlap.keys) {
                let at = (key - overlap.keys.start) * K::PANEL + column;
                let (weight, gradient) = (memory.products[0].words()[at], memory.products[1].words()[at]);
                let sums = memory.query_sums.words_mut()[column..].iter_mut().step_by(K::PANEL);
                for (sum, x) in sums.zip(widened(block.sources[0].row(key), sides[0].width)) {
                    *sum += gradient * x;
                }
                for (side, factor) in [gradient, weight].into_iter().enumerate() {
                    let (Some(row), side, sums) = (&rows[side], &sides[side], block.sums[side]) else { continue };
                    for panel in 0..side.count {
                        let at = (panel * K::BLOCK + key - block.keys().start) * K::PANEL;
                        for (n, &x) in row[side.columns(K::LAYOUT.lanes, panel)].iter().enumerate() {
                            // SAFETY: as this method's contract; the sums have the key, which is one of the block's.
                            unsafe { *sums.add(at + n) += factor * x };
                        }
                    }
                }
            }
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
                vectors: side.vectors.min(side.total - panel * side.vectors),
                factors: Some(ONES.as_ptr()),
                format: Format::F32,
            });
        }
    }
}

impl<E: Number> BackwardCall<'_, E> {
    /// Of each query of one head of (B, H): the sum of its context times the gradient of it, which is that of its
    /// weights times theirs. Clears the sums of the queries' gradients on the way, and sums the gradient of the head's
    /// sink.
    ///
    /// # Safety
    /// The processor has the instruction set of V, and the head's rows are this task's.
    #[inline(always)]
    pub(super) unsafe fn write_deltas<V: Vector>(&self, row: usize, sink: &mut f32) {
        let (call, lanes) = (&self.call, V::LANES);
        let (dims, options) = (&call.inputs.dims, &call.inputs.options);
        let (b, head) = (row / dims.h, row % dims.h);
        let mut sink_sum = 0f64;
        for query in 0..dims.t_q {
            let row = Row { b, head, query };
            let index = dims.row_index(row);
            // SAFETY: the processor has the instruction set of V; the row belongs to the call and this head's rows to
            // this task.
            unsafe {
                if self.wanted.q {
                    self.q_sums.add(index * dims.d).write_bytes(0, dims.d);
                }
                let (context, gradient) = (call.context_row(row), self.context_grad.at([b, head, query]));
                let mut sum = V::splat(0.0);
                for d in (0..dims.d_v).step_by(lanes) {
                    let width = lanes.min(dims.d_v - d);
                    let context: V = load_first(context.add(d).cast_const(), width);
                    sum = context.mul_add(load_first(gradient.add(d), width), sum);
                }
                let stats = self.stats[index];
                // What sees nothing has no gradient, whatever the gradient of its context is.
                let is_empty = call.inputs.range(row).is_empty() && options.sinks.is_none() || stats.sum == 0.0;
                // Adding to every score adds as much to the log-sum-exp.
                let of_lse = if let Some(lse) = self.lse_grad { lse[index] } else { 0.0 };
                let delta = if is_empty { 0.0 } else { sum.sum() - of_lse };
                self.deltas.add(index).write(delta);
                if let (Some(sinks), true) = (options.sinks, self.wanted.sinks && !is_empty) {
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

    /// The gradients of the queries of one head of (B, H), rounded to their type.
    ///
    /// # Safety
    /// As [`write_deltas`](Self::write_deltas).
    #[inline(always)]
    pub(super) unsafe fn round_queries<V: Vector>(&self, row: usize, to: SharedPtr<E>) {
        let (dims, lanes) = (&self.call.inputs.dims, V::LANES);
        let count = dims.t_q * dims.d;
        let (first, end) = (row * count, (row + 1) * count);
        for at in (first..end).step_by(lanes) {
            let width = lanes.min(end - at);
            // SAFETY: the processor has the instruction set of V; both have the elements, which no other thread writes.
            unsafe {
                let sum: V = load_first::<f32, _>(self.q_sums.add(at), width);
                store_first(sum, to.add(at), width);
            }
        }
    }
}
