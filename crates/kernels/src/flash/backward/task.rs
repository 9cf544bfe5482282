//! One task of the backward pass: some keys of one key head against all queries that attend to them.
//!
//! ```text
//! for each tile of queries that attends to some of the keys: (queries are columns)
//!     for each block of the keys:                         packed once for all tiles
//!         scores    = keys · queries                      (block, panel)
//!         gradients = values · gradients of outputs       (block, panel)
//!         weights   = 2^(scores - max) / sum              replace the scores
//!         gradients = weights ∘ (gradients - delta)       of the scores, in place
//!         d queries += keysᵀ · gradients                  (D, panel)
//!         d keys    += gradients · queries                (block, D)
//!         d values  += weights · gradients of outputs     (block, D_v)
//!     d queries, transposed, are added to the output
//! d keys and d values to the output
//! ```

use std::cell::OnceCell;
use std::ops::Range;

use super::call::BackwardCall;
use super::memory::{BackwardScratch, RowSize, TileRowsMemory};
use super::output::GradientOutput;
use super::step::{BackwardStep, KeyBlock, PackedTile};
use super::tile_gradient::{ColumnStats, TileModifierGradients};
use crate::cpu::{Kernel, MAX_COLUMNS, SharedPtr, SimdTask, Vector};
use crate::flash::chain::Chain;
use crate::flash::kv_rows::KvHeadRows;
use crate::flash::pack::{PackTile, TileRows};
use crate::flash::tile::Tile;
use crate::number::{Number, pack_row_pair, store_first, widen_row};
use candle_attention_call::{AttentionDims, KvHead};

/// Some keys of one key head of a call.
pub(super) struct BackwardTask<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub memory: &'a mut BackwardScratch,
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// For each tile of the sequence, the smallest range that contains the keys that it attends to.
    pub tile_keys: &'a [Range<usize>],
    pub chain: &'a Chain,
    /// The number of the task in the chain.
    pub index: usize,
    /// The gradients of score modifiers, if they are requested.
    pub modifiers: Option<TileModifierGradients>,
}

/// The work that is compiled for an instruction set and a type of elements. Heads are counted in (B, H). No two tasks
/// write the same number at the same time.
pub(super) enum BackwardWork<'a, 'b, E> {
    /// Computes the row terms of a head's queries and the gradient of its sink, before the first tile.
    PrepareRows { backward: &'a BackwardCall<'b, E>, head: usize, sink: &'a mut f32 },
    /// Computes the gradients of some keys.
    Keys(BackwardTask<'a, 'b, E>),
    /// Rounds the gradients of a head's queries.
    RoundQueries { backward: &'a BackwardCall<'b, E>, head: usize, to: SharedPtr<E> },
}

impl<E: Number> SimdTask for BackwardWork<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the instruction set of K, and no other task writes the rows.
        unsafe {
            match self {
                Self::PrepareRows { backward, head, sink } => backward.prepare_rows::<K::Vector>(head, sink),
                Self::RoundQueries { backward, head, to } => backward.round_queries::<K::Vector>(head, to),
                Self::Keys(task) => task.run::<K>(),
            }
        }
    }
}

impl<E: Number> BackwardTask<'_, '_, E> {
    /// Computes the gradients of the task's keys and values, and adds to the gradients of queries and score modifiers.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the memory was made for the call, and has the task's blocks.
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { backward, memory, kv, keys, tile_keys, chain, index, modifiers } = self;
        let inputs = &backward.inputs;
        let units = inputs.options.units(K::IS_BF16);
        let AttentionDims { d, d_v, .. } = inputs.dims;
        let queries = GradientOutput::of_rows(backward.to.q_sums, backward.query_strides());
        let key_strides = backward.key_strides(d);
        let value_strides = backward.key_strides(d_v);
        // Entries that other tasks add to as well, tile by tile.
        let shared = backward.to.bias.filter(|bias| !bias.is_summed_over_queries);
        // SAFETY: as this method's contract.
        unsafe {
            let _tiles = K::configure_tiles();
            let mut blocks = Vec::new();
            for (block_index, first) in keys.clone().step_by(K::BLOCK).enumerate() {
                let block_keys = first..keys.end.min(first + K::BLOCK);
                let k = KvHeadRows::new(&backward.keys_values.k, kv, block_keys.clone());
                let v = KvHeadRows::new(&backward.keys_values.v, kv, block_keys);
                blocks.push(KeyBlock::new::<K>(k, v, memory, block_index));
            }
            for (tile_index, attended) in tile_keys.iter().enumerate() {
                if attended.start >= keys.end || attended.end <= keys.start {
                    continue;
                }
                chain.pass(index, tile_index);
                let first = tile_index * K::PANEL;
                let tile = &Tile::new(K::LAYOUT, inputs, kv, first..inputs.dims.rows().min(first + K::PANEL));
                let packed = &pack_tile::<K, E>(backward, memory, tile, units.query);
                if let Some(bias) = shared {
                    chain.wait(index, bias.last_sharing(&inputs.dims, tile));
                }
                for block in &blocks {
                    BackwardStep { backward, block, packed, units, modifiers }.run::<K>(memory);
                }
                if backward.requested.of.q {
                    chain.wait(index, tile_index);
                    queries.add::<K::Vector>(&inputs.dims, tile, 0..d, memory.query_sums.as_ptr());
                }
            }
            for block in &blocks {
                let first = block.keys().start;
                let count = block.keys().len();
                if let Some(to) = backward.to.k {
                    let to = to.add(key_strides.start(kv.b, kv.head, first));
                    write_sums::<K, E>(&memory.sizes.d, block.k.sums, to, key_strides.position, count);
                }
                if let Some(to) = backward.to.v {
                    let to = to.add(value_strides.start(kv.b, kv.head, first));
                    write_sums::<K, E>(&memory.sizes.d_v, block.v.sums, to, value_strides.position, count);
                }
            }
        }
    }
}

/// Packs the queries of a tile and the gradients of their outputs, as panels and as rows, and clears the sums of the
/// queries' gradients.
///
/// # Safety
/// The processor has the instruction set of K; the memory was made for the call.
#[inline(always)]
unsafe fn pack_tile<'a, K: Kernel, E: Number>(
    backward: &'a BackwardCall<E>,
    memory: &mut BackwardScratch,
    tile: &'a Tile,
    factor: f32,
) -> PackedTile<'a, E> {
    let dims = &backward.inputs.dims;
    let queries = TileRows { matrix: &backward.q, width: dims.d, dims, tile };
    let output_grads = TileRows { matrix: &backward.output_grad, width: dims.d_v, dims, tile };
    let sizes = memory.sizes;
    let staging = memory.staging.as_mut_ptr();
    // SAFETY: as this function's contract.
    unsafe {
        pack_tile_rows::<K, E>(&queries, &sizes.d, &mut memory.queries, staging, factor);
        pack_tile_rows::<K, E>(&output_grads, &sizes.d_v, &mut memory.output_grads, staging, 1.0);
        memory.query_sums.as_mut_ptr().write_bytes(0, sizes.d.packed.row_squares * K::PANEL);
    }
    PackedTile { tile, columns: column_stats(backward, tile), queries, output_grads, finite: OnceCell::new() }
}

/// Packs the rows of a tile as a panel, times a factor, and as rows.
///
/// # Safety
/// As [`pack_tile`].
#[inline(always)]
unsafe fn pack_tile_rows<K: Kernel, E: Number>(
    rows: &TileRows<E>,
    size: &RowSize,
    memory: &mut TileRowsMemory,
    staging: *mut f32,
    factor: f32,
) {
    let panel = memory.panel.as_mut_ptr();
    // SAFETY: as this function's contract.
    unsafe {
        K::run_simd(PackTile { rows, width: size.packed, panel, staging, factor });
        pack_row_panels::<K, E>(rows, size, memory.rows.as_mut_ptr());
    }
}

/// Collects the softmax statistics of the columns of a tile.
fn column_stats<E>(backward: &BackwardCall<E>, tile: &Tile) -> ColumnStats {
    let dims = &backward.inputs.dims;
    let mut columns =
        ColumnStats { max: [0.0; MAX_COLUMNS], reciprocal: [0.0; MAX_COLUMNS], delta: [0.0; MAX_COLUMNS] };
    for column in (0..tile.rows.len()).filter(|&column| !tile.is_empty(column)) {
        let row = dims.row_index(dims.row(tile.kv, tile.rows.start + column));
        let stats = backward.softmax_stats[row];
        // A row whose scores are all -inf counts as fully masked.
        if stats.sum != 0.0 {
            columns.max[column] = stats.max;
            columns.reciprocal[column] = 1.0 / stats.sum;
        }
        // SAFETY: there is one for each query, and they are all written before the first task reads one.
        columns.delta[column] = unsafe { *backward.to.deltas.add(row) };
    }
    columns
}

/// Packs the rows of a tile as the right operand of a product over queries: (panels, rows in words, panel).
///
/// # Safety
/// The processor has the instruction set of K; `to` is valid for writes of these words.
#[inline(always)]
unsafe fn pack_row_panels<K: Kernel, E: Number>(rows: &TileRows<E>, size: &RowSize, to: *mut f32) {
    let words = K::PANEL / K::ELEMENTS;
    for panel in 0..size.panels {
        let columns = size.columns(K::Vector::LANES, panel);
        let width = columns.len();
        for word in 0..words {
            let row_from_start = |column: usize| rows.row(column).map(|row| row.wrapping_add(columns.start));
            // SAFETY: as this function's contract.
            unsafe {
                let to = to.add((panel * words + word) * K::PANEL);
                if K::ELEMENTS == 2 {
                    pack_row_pair(row_from_start(2 * word), row_from_start(2 * word + 1), width, to, K::PANEL);
                } else if let Some(row) = row_from_start(word) {
                    widen_row::<E, K::Vector>(row, width, to, K::PANEL, 1.0);
                } else {
                    to.write_bytes(0, K::PANEL);
                }
            }
        }
    }
}

/// Writes the sums of a block's gradients (panels, block, panel) as `count` rows, `stride` elements apart.
///
/// # Safety
/// The processor has the instruction set of K; `to` has the rows, which no other thread writes.
#[inline(always)]
unsafe fn write_sums<K: Kernel, E: Number>(size: &RowSize, sums: *const f32, to: *mut E, stride: usize, count: usize) {
    let lanes = K::Vector::LANES;
    for panel in 0..size.panels {
        let columns = size.columns(lanes, panel);
        for row in 0..count {
            let from = sums.wrapping_add((panel * K::BLOCK + row) * K::PANEL);
            // SAFETY: as this function's contract.
            unsafe {
                let to = to.add(row * stride + columns.start);
                for column in (0..columns.len()).step_by(lanes) {
                    let sum = K::Vector::load(from.add(column));
                    store_first(sum, to.add(column), lanes.min(columns.len() - column));
                }
            }
        }
    }
}
