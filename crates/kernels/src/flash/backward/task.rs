//! One task of the backward pass, some keys of one key head against all queries that see them, and the memory that it
//! works in.
//!
//! ```text
//! for each tile of queries that sees some of the keys:    (queries are columns)
//!     for each block of the keys:                         packed once for all tiles
//!         scores    = keys · queries                      (block, panel)
//!         gradients = values · gradients of contexts      (block, panel)
//!         weights   = 2^(scores - max) / sum              in place of the scores
//!         gradients = weights ∘ (gradients - delta)       of the scores, in place
//!         d queries += keysᵀ · gradients                  (D, panel)
//!         d keys    += gradients · queries                (block, D)
//!         d values  += weights · gradients of contexts    (block, D_v)
//!     d queries, transposed, are added to the output
//! d keys and d values to the output
//! ```

use std::cell::{Cell, OnceCell};
use std::ops::Range;

use super::BackwardCall;
use super::gradient::{BiasGradients, TileColumns};
use super::step::{KeyBlock, PackedTile, Step};
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, Scratch, SharedPtr, SimdTask, Vector};
use crate::flash::pack::{TileRows, pack_panel};
use crate::flash::problem::{Dims, KvHead, ScoreOptions};
use crate::flash::tasks::{Chain, PackedSizes, PackedWidth, backward_blocks};
use crate::flash::tile::Tile;
use crate::number::{Number, load_first, pack_row_pair, store_first, widen_row};

/// Some keys of one key head.
pub(super) struct BackwardTask<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub memory: &'a mut BackwardMemory,
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// The keys that each tile of the sequence sees some of.
    pub tiles: &'a [Range<usize>],
    /// The number of the task in its chain.
    pub chain: &'a Chain,
    pub task: usize,
    /// The task's sums of the slopes' gradients, one for each head of the group, if they are wanted.
    pub slopes: &'a mut [f32],
}

impl<E: Number> SimdTask for BackwardTask<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { backward, memory, kv, keys, tiles, chain, task, slopes } = self;
        let (call, wanted, bias, distances) = (&backward.call, &backward.wanted, backward.bias, backward.distances);
        let (inputs, units) = (&call.inputs, call.inputs.options.units(K::ELEMENTS == 2));
        let by_key = match bias {
            Some(bias) if bias.is_summed_over_queries => vec![Cell::new(0f32); inputs.dims.group() * keys.len()],
            _ => Vec::new(),
        };
        let by_distance = match (distances, inputs.distances) {
            (Some(_), Some(table)) => vec![Cell::new(0f32); table.size()],
            _ => Vec::new(),
        };
        let biases = (bias.is_some() || distances.is_some() || !slopes.is_empty()).then(|| BiasGradients {
            bias,
            by_key: &by_key,
            distances,
            by_distance: &by_distance,
            first_key: keys.start,
            keys: keys.len(),
            slopes: Cell::from_mut(slopes).as_slice_of_cells(),
        });
        // Entries that other tasks add to as well, tile by tile.
        let shared = bias.filter(|bias| !bias.is_summed_over_queries);
        // SAFETY: the processor has the tier of K; the memory was made for the call, and has the task's blocks.
        unsafe {
            let _tiles = K::configure_tiles();
            let pack = |(index, first)| KeyBlock::new::<K>(backward, memory, kv, first, index);
            let blocks: Vec<_> = keys.clone().step_by(K::BLOCK).enumerate().map(pack).collect();
            for (index, seen) in tiles.iter().enumerate() {
                if seen.start >= keys.end || seen.end <= keys.start {
                    continue;
                }
                chain.pass(task, index);
                let first = index * K::PANEL;
                let rows = first..inputs.dims.rows().min(first + K::PANEL);
                let tile = Tile::new(inputs, kv, rows, K::Vector::LANES);
                let tile = pack_tile::<K, E>(backward, memory, &tile, units.query);
                if let Some(bias) = shared {
                    chain.wait(task, bias.last_sharing::<K>(&inputs.dims, tile.tile.rows.end));
                }
                for block in &blocks {
                    Step { backward, block, tile: &tile, units, biases }.run::<K>(memory);
                }
                if wanted.q {
                    chain.wait(task, index);
                    add_queries::<K, E>(backward, memory, tile.tile);
                }
            }
            for block in &blocks {
                let keys = &block.keys;
                if let Some(to) = backward.k {
                    write_sums::<K, E>(&memory.sizes.d, block.key_sums, keys, to, backward.key_row(kv));
                }
                if let Some(to) = backward.v {
                    write_sums::<K, E>(&memory.sizes.d_v, block.value_sums, keys, to, backward.key_row(kv));
                }
            }
            if let Some(biases) = biases.filter(|_| !by_key.is_empty() || !by_distance.is_empty()) {
                chain.wait_for_all(task);
                biases.finish(inputs, inputs.dims.row(kv, 0));
            }
        }
        chain.finish(task);
    }
}

/// The queries and gradients of a tile, as panels and as rows.
///
/// # Safety
/// The processor has the tier of K; the memory was made for the call.
#[inline(always)]
unsafe fn pack_tile<'a, K: Kernel, E: Number>(
    backward: &'a BackwardCall<E>,
    memory: &mut BackwardMemory,
    tile: &'a Tile,
    factor: f32,
) -> PackedTile<'a, E> {
    let (call, sizes) = (&backward.call, memory.sizes);
    let dims = &call.inputs.dims;
    let contexts = TileRows { matrix: &backward.context_grad, width: dims.d_v, dims, tile };
    let queries = TileRows { matrix: &call.q, width: dims.d, dims, tile };
    let mut columns =
        TileColumns { max: [0.0; MAX_COLUMNS], reciprocal: [0.0; MAX_COLUMNS], delta: [0.0; MAX_COLUMNS] };
    for column in (0..tile.rows.len()).filter(|&column| !tile.is_empty(column)) {
        let row = dims.row_index(dims.row(tile.kv, tile.rows.start + column));
        let stats = backward.stats[row];
        // A row whose scores are all -inf has seen nothing either.
        if stats.sum != 0.0 {
            (columns.max[column], columns.reciprocal[column]) = (stats.max, 1.0 / stats.sum);
        }
        columns.delta[column] = backward.deltas()[row];
    }
    // SAFETY: as this function's contract.
    unsafe {
        let staging = memory.staging.as_mut_ptr();
        let (d, d_v) = (sizes.packed.d, sizes.packed.d_v);
        pack_panel::<K, E>(&queries, d, memory.queries.as_mut_ptr(), staging, factor);
        pack_panel::<K, E>(&contexts, d_v, memory.contexts.as_mut_ptr(), staging, 1.0);
        pack_row_panels::<K, E>(&queries, &sizes.d, memory.query_rows.as_mut_ptr());
        pack_row_panels::<K, E>(&contexts, &sizes.d_v, memory.context_rows.as_mut_ptr());
        memory.query_sums.as_mut_ptr().write_bytes(0, d.row_squares * K::PANEL);
    }
    PackedTile { tile, columns, queries, contexts, non_finite: OnceCell::new() }
}

/// The rows of a tile as the right operand of a product over queries: (panels, rows in words, panel).
///
/// # Safety
/// The processor has the tier of K; `to` takes as many words.
#[inline(always)]
unsafe fn pack_row_panels<K: Kernel, E: Number>(rows: &TileRows<E>, panels: &ColumnPanels, to: *mut f32) {
    let words = K::PANEL / K::ELEMENTS;
    for panel in 0..panels.count {
        let columns = panels.columns::<K>(panel);
        let width = columns.len();
        for word in 0..words {
            let part = |column: usize| rows.row(column).map(|row| row.wrapping_add(columns.start));
            // SAFETY: as this function's contract.
            unsafe {
                let to = to.add((panel * words + word) * K::PANEL);
                if K::ELEMENTS == 2 {
                    pack_row_pair(part(2 * word), part(2 * word + 1), width, to, K::PANEL);
                } else if let Some(row) = part(word) {
                    widen_row::<E, K::Vector>(row, width, to, K::PANEL, 1.0);
                } else {
                    to.write_bytes(0, K::PANEL);
                }
            }
        }
    }
}

/// Adds a tile's sums to the gradients of its queries.
///
/// # Safety
/// The processor has the tier of K; no other thread uses the gradients of these queries.
#[inline(always)]
unsafe fn add_queries<K: Kernel, E: Number>(backward: &BackwardCall<E>, memory: &mut BackwardMemory, tile: &Tile) {
    let (dims, lanes) = (&backward.call.inputs.dims, K::Vector::LANES);
    let mut square = [0f32; MAX_LANES * MAX_LANES];
    for vector in 0..tile.vectors {
        let first = tile.rows.start + vector * lanes;
        for d in (0..dims.d).step_by(lanes) {
            let width = lanes.min(dims.d - d);
            // SAFETY: as this function's contract; the sums have a multiple of `lanes` rows.
            unsafe {
                let from = memory.query_sums.as_ptr().add(d * K::PANEL + vector * lanes);
                K::Vector::transpose(from, K::PANEL, square.as_mut_ptr(), lanes);
                for (row, sums) in (first..tile.rows.end).zip(square.chunks_exact(lanes)).take(lanes) {
                    let to = backward.q_sums.add(dims.row_index(dims.row(tile.kv, row)) * dims.d + d);
                    let sum: K::Vector = load_first::<f32, _>(to, width);
                    store_first(sum.add(K::Vector::load(sums.as_ptr())), to, width);
                }
            }
        }
    }
}

/// Writes the sums of a block's gradients (panels, block, panel) as rows, `first` being that of the head's first key.
///
/// # Safety
/// The processor has the tier of K; `to` has the rows, which no other thread writes.
#[inline(always)]
unsafe fn write_sums<K: Kernel, E: Number>(
    panels: &ColumnPanels,
    sums: *const f32,
    keys: &Range<usize>,
    to: SharedPtr<E>,
    first: usize,
) {
    let lanes = K::Vector::LANES;
    for panel in 0..panels.count {
        let columns = panels.columns::<K>(panel);
        for (index, key) in keys.clone().enumerate() {
            let from = sums.wrapping_add((panel * K::BLOCK + index) * K::PANEL);
            // SAFETY: as this function's contract.
            unsafe {
                let to = to.add((first + key) * panels.width + columns.start);
                for column in (0..columns.len()).step_by(lanes) {
                    let sum = K::Vector::load(from.add(column));
                    store_first(sum, to.add(column), lanes.min(columns.len() - column));
                }
            }
        }
    }
}

/// The columns of a matrix of rows, D or D_v wide, as panels of a product: as many vectors in each as in the others,
/// since a panel of one vector keeps no product busy.
#[derive(Clone, Copy)]
pub(super) struct ColumnPanels {
    pub width: usize,
    pub count: usize,
    /// Of all panels but the last, which may have fewer.
    pub vectors: usize,
    total: usize,
}

impl ColumnPanels {
    pub fn new<K: Kernel>(width: usize) -> Self {
        let total = width.div_ceil(K::Vector::LANES);
        let count = total.div_ceil(K::VECTORS);
        Self { width, count, vectors: total.div_ceil(count.max(1)), total }
    }

    pub fn vectors(&self, panel: usize) -> usize {
        self.vectors.min(self.total - panel * self.vectors)
    }

    /// The columns of a panel, within the width.
    pub fn columns<K: Kernel>(&self, panel: usize) -> Range<usize> {
        let columns = self.vectors * K::Vector::LANES;
        panel * columns..self.width.min((panel + 1) * columns)
    }
}

/// Sizes of the memory of a task, in words.
#[derive(Clone, Copy)]
pub(super) struct BackwardSizes {
    pub packed: PackedSizes,
    pub d: ColumnPanels,
    pub d_v: ColumnPanels,
    /// Blocks of keys in a task.
    pub blocks: usize,
}

impl BackwardSizes {
    pub fn new<K: Kernel>(dims: &Dims) -> Self {
        let (packed, d, d_v) =
            (PackedSizes::new::<K>(dims), ColumnPanels::new::<K>(dims.d), ColumnPanels::new::<K>(dims.d_v));
        let mut sizes = Self { packed, d, d_v, blocks: 1 };
        let PackedSizes { d, d_v } = packed;
        let operands = K::BLOCK * (d.words + d_v.words) + d.column_words::<K>();
        let sums = sizes.sums::<K>(&sizes.d) + sizes.sums::<K>(&sizes.d_v);
        sizes.blocks = backward_blocks::<K>(dims, operands + sums);
        sizes
    }

    /// The sums of a block's gradients: (panels, block, panel).
    pub fn sums<K: Kernel>(&self, panels: &ColumnPanels) -> usize {
        panels.count * K::BLOCK * K::PANEL
    }

    /// The rows of a tile as the right operand of a product: (panels, rows, panel).
    pub fn rows<K: Kernel>(&self, panels: &ColumnPanels) -> usize {
        panels.count * K::PANEL / K::ELEMENTS * K::PANEL
    }
}

/// Everything a thread needs for its tasks. Its size is bounded by D, D_v and the tier, and does not grow with T.
pub(super) struct BackwardMemory {
    pub sizes: BackwardSizes,
    /// Of each block: keys (block, D), values (block, D_v), keys transposed, sums of the gradients of keys and of
    /// values.
    pub keys: Scratch,
    pub values: Scratch,
    pub key_columns: Scratch,
    pub key_sums: Scratch,
    pub value_sums: Scratch,
    /// Of a tile: queries (D, panel) and gradients of contexts (D_v, panel), and both as rows.
    pub queries: Scratch,
    pub contexts: Scratch,
    pub query_rows: Scratch,
    pub context_rows: Scratch,
    /// Gradients of queries: (D, panel).
    pub query_sums: Scratch,
    /// (block, panel), which become weights and the gradients of scores.
    pub scores: Scratch,
    pub products: Scratch,
    /// (block, panel), with a softcap: its derivative.
    pub slopes: Scratch,
    /// (block, panel), where weights are dropped.
    pub dropout: Scratch,
    /// The weights and the gradients of scores in bf16, (block, panel / 2), and the latter in pairs of keys,
    /// (block / 2, panel).
    pub weight_halves: Scratch,
    pub gradient_halves: Scratch,
    pub gradient_pairs: Scratch,
    pub staging: Scratch,
}

impl BackwardMemory {
    pub fn new<K: Kernel>(sizes: BackwardSizes, options: &ScoreOptions) -> Self {
        let PackedSizes { d, d_v } = sizes.packed;
        let (block, blocks, scores) = (K::BLOCK, sizes.blocks, K::BLOCK * K::PANEL);
        let panel = |width: PackedWidth| Scratch::zeros(width.word_squares * K::PANEL);
        let halves = || Scratch::zeros(if K::IS_BF16 { scores / 2 } else { 0 });
        let staging = (K::Vector::LANES * block).max(d.staging_words::<K>()).max(d_v.staging_words::<K>());
        Self {
            sizes,
            keys: Scratch::zeros(blocks * block * d.words),
            values: Scratch::zeros(blocks * block * d_v.words),
            key_columns: Scratch::zeros(blocks * d.column_words::<K>()),
            key_sums: Scratch::zeros(blocks * sizes.sums::<K>(&sizes.d)),
            value_sums: Scratch::zeros(blocks * sizes.sums::<K>(&sizes.d_v)),
            queries: panel(d),
            contexts: panel(d_v),
            query_rows: Scratch::zeros(sizes.rows::<K>(&sizes.d)),
            context_rows: Scratch::zeros(sizes.rows::<K>(&sizes.d_v)),
            query_sums: Scratch::zeros(d.row_squares * K::PANEL),
            scores: Scratch::zeros(scores),
            products: Scratch::zeros(scores),
            slopes: Scratch::zeros(if options.softcap.is_some() { scores } else { 0 }),
            dropout: Scratch::zeros(if options.dropout.is_some() { scores } else { 0 }),
            weight_halves: halves(),
            gradient_halves: halves(),
            gradient_pairs: halves(),
            staging: Scratch::zeros(staging),
        }
    }
}
