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

use std::cell::OnceCell;
use std::ops::Range;

use super::BackwardCall;
use super::gradient::{BiasGradients, BiasOutput, TileColumns};
use super::step::{KeyBlock, PackedTile, Step};
use crate::cpu::{Kernel, Layout, MAX_COLUMNS, Scratch, SharedPtr, SimdTask, Vector};
use crate::flash::pack::{HeadRows, PackPanel, TileRows};
use crate::flash::problem::{Dims, KvHead, ScoreOptions, StoredRows};
use crate::flash::tasks::{Chain, PackedWidth, backward_blocks};
use crate::flash::tile::{Overlap, Tile};
use crate::number::{Number, pack_row_pair, store_first, widen_row};

/// Some keys of one key head.
pub(super) struct BackwardTask<'a> {
    pub memory: &'a mut BackwardMemory,
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// The keys that each tile of the sequence sees some of.
    pub tiles: &'a [Range<usize>],
    /// The number of the task in its chain.
    pub chain: &'a Chain,
    pub task: usize,
    /// Where the gradients of its tiles are added, if they are wanted.
    pub biases: Option<BiasGradients>,
}

/// What is compiled for an instruction set and an element; rows are those of one head of a sequence, (B, H).
pub(super) enum Work<'a, E> {
    Deltas(usize, &'a mut f32),
    Task(BackwardTask<'a>),
    Round(usize, SharedPtr<E>),
}

/// Work of a call, whose numbers are one task's.
pub(super) struct WorkOn<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub keys_values: &'a [StoredRows<'b, E>; 2],
    pub work: Work<'a, E>,
}

impl<E: Number> SimdTask for WorkOn<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { backward, keys_values: [keys_of, values_of], work } = self;
        let task = match work {
            // SAFETY: the processor has the instruction set of K, and the rows are this task's.
            Work::Deltas(row, sink) => return unsafe { backward.write_deltas::<K::Vector>(row, sink) },
            // SAFETY: as above.
            Work::Round(row, to) => return unsafe { backward.round_queries::<K::Vector>(row, to) },
            Work::Task(task) => task,
        };
        let BackwardTask { memory, kv, keys, tiles, chain, task, biases } = task;
        let (inputs, units) = (&backward.call.inputs, backward.call.inputs.options.units(K::IS_BF16));
        let Dims { b, h, h_kv, t_q, t_kv, d, .. } = inputs.dims;
        let queries = BiasOutput::new(backward.q_sums, [b, h, t_q, d]);
        // Entries that other tasks add to as well, tile by tile.
        let shared = backward.bias.filter(|bias| !bias.is_summed_over_queries);
        // SAFETY: the processor has the instruction set of K; the memory was made for the call, and has the task's
        // blocks.
        unsafe {
            let _tiles = K::configure_tiles();
            let mut blocks = Vec::new();
            for (index, first) in keys.clone().step_by(K::BLOCK).enumerate() {
                let own = first..keys.end.min(first + K::BLOCK);
                let sources = [HeadRows::new(keys_of, kv, own.clone()), HeadRows::new(values_of, kv, own)];
                blocks.push(KeyBlock::new::<K>(sources, memory, index));
            }
            for (index, seen) in tiles.iter().enumerate() {
                if seen.start >= keys.end || seen.end <= keys.start {
                    continue;
                }
                chain.pass(task, index);
                let first = index * K::PANEL;
                let tile = &Tile::new(K::LAYOUT, inputs, kv, first..inputs.dims.rows().min(first + K::PANEL));
                let packed = &pack_tile::<K, E>(backward, memory, tile, units.query);
                if let Some(bias) = shared {
                    chain.wait(task, bias.last_sharing(&inputs.dims, tile));
                }
                for block in &blocks {
                    Step { backward, block, tile: packed, units, biases }.run::<K>(memory);
                }
                if backward.wanted.q {
                    chain.wait(task, index);
                    queries.add::<K::Vector>(&inputs.dims, tile, 0..d, memory.query_sums.as_ptr());
                }
            }
            for block in &blocks {
                let first = (kv.b * h_kv + kv.head) * t_kv + block.keys().start;
                for (index, side) in memory.sizes.sides.iter().enumerate() {
                    if let Some(to) = backward.keys_values[index] {
                        write_sums::<K, E>(side, block.sums[index], to.add(first * side.width), block.keys().len());
                    }
                }
            }
        }
    }
}

/// The queries and gradients of a tile, as panels and as rows.
///
/// # Safety
/// The processor has the instruction set of K; the memory was made for the call.
#[inline(always)]
unsafe fn pack_tile<'a, K: Kernel, E: Number>(
    backward: &'a BackwardCall<E>,
    memory: &mut BackwardMemory,
    tile: &'a Tile,
    factor: f32,
) -> PackedTile<'a, E> {
    let (call, dims) = (&backward.call, &backward.call.inputs.dims);
    let queries = TileRows { matrix: &call.q, width: dims.d, dims, tile };
    let rows = [queries, TileRows { matrix: &backward.context_grad, width: dims.d_v, dims, tile }];
    // SAFETY: as this function's contract.
    unsafe {
        for (side, factor) in [factor, 1.0].into_iter().enumerate() {
            let (rows, sizes, staging) = (&rows[side], &memory.sizes.sides[side], memory.staging.as_mut_ptr());
            let panel = memory.panels[side].as_mut_ptr();
            K::run_simd(PackPanel { rows, width: sizes.packed, panel, staging, factor });
            pack_row_panels::<K, E>(rows, sizes, memory.rows[side].as_mut_ptr());
        }
        let count = memory.sizes.sides[0].packed.row_squares * K::PANEL;
        memory.query_sums.as_mut_ptr().write_bytes(0, count);
    }
    PackedTile { tile, columns: columns_of(backward, tile), rows, finite: OnceCell::new() }
}

/// What the columns of a tile bring along.
fn columns_of<E>(backward: &BackwardCall<E>, tile: &Tile) -> TileColumns {
    let dims = &backward.call.inputs.dims;
    let mut columns =
        TileColumns { max: [0.0; MAX_COLUMNS], reciprocal: [0.0; MAX_COLUMNS], delta: [0.0; MAX_COLUMNS] };
    for column in (0..tile.rows.len()).filter(|&column| !tile.is_empty(column)) {
        let row = dims.row_index(dims.row(tile.kv, tile.rows.start + column));
        let stats = backward.stats[row];
        // A row whose scores are all -inf has seen nothing either.
        if stats.sum != 0.0 {
            (columns.max[column], columns.reciprocal[column]) = (stats.max, 1.0 / stats.sum);
        }
        // SAFETY: there is one for each query, and they are all written before the first task reads one.
        columns.delta[column] = unsafe { *backward.deltas.add(row) };
    }
    columns
}

/// The rows of a tile as the right operand of a product over queries: (panels, rows in words, panel).
///
/// # Safety
/// The processor has the instruction set of K; `to` takes as many words.
#[inline(always)]
unsafe fn pack_row_panels<K: Kernel, E: Number>(rows: &TileRows<E>, side: &Side, to: *mut f32) {
    let words = K::PANEL / K::ELEMENTS;
    for panel in 0..side.count {
        let columns = side.columns(K::Vector::LANES, panel);
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

/// Writes the sums of a block's gradients (panels, block, panel) as `count` rows.
///
/// # Safety
/// The processor has the instruction set of K; `to` has the rows, which no other thread writes.
#[inline(always)]
unsafe fn write_sums<K: Kernel, E: Number>(side: &Side, sums: *const f32, to: *mut E, count: usize) {
    let lanes = K::Vector::LANES;
    for panel in 0..side.count {
        let columns = side.columns(K::Vector::LANES, panel);
        for row in 0..count {
            let from = sums.wrapping_add((panel * K::BLOCK + row) * K::PANEL);
            // SAFETY: as this function's contract.
            unsafe {
                let to = to.add(row * side.width + columns.start);
                for column in (0..columns.len()).step_by(lanes) {
                    let sum = K::Vector::load(from.add(column));
                    store_first(sum, to.add(column), lanes.min(columns.len() - column));
                }
            }
        }
    }
}

/// Keys and queries, rows of D, or values and gradients of contexts, rows of D_v. Their columns make panels of a
/// product: as many vectors in each as in the others, since a panel of one vector keeps no product busy.
#[derive(Clone, Copy)]
pub(super) struct Side {
    pub width: usize,
    pub packed: PackedWidth,
    /// Panels.
    pub count: usize,
    /// Of all panels but the last, which may have fewer.
    pub vectors: usize,
    pub total: usize,
}

impl Side {
    fn new(layout: Layout, width: usize) -> Self {
        let total = width.div_ceil(layout.lanes);
        let count = total.div_ceil(layout.panel / layout.lanes);
        Self { width, packed: PackedWidth::new(layout, width), count, vectors: total.div_ceil(count.max(1)), total }
    }

    /// The columns of a panel, within the width.
    pub fn columns(&self, lanes: usize, panel: usize) -> Range<usize> {
        let columns = self.vectors * lanes;
        panel * columns..self.width.min((panel + 1) * columns)
    }

    /// The words of a block: of its rows, and of the sums of their gradients, (panels, block, panel).
    pub fn block_words(&self, layout: Layout) -> [usize; 2] {
        [layout.block * self.packed.words, self.count * layout.block * layout.panel]
    }
}

/// Sizes of the memory of a task.
#[derive(Clone, Copy)]
pub(super) struct BackwardSizes {
    pub sides: [Side; 2],
    /// Blocks of keys in a task.
    pub blocks: usize,
}

impl BackwardSizes {
    pub fn new(layout: Layout, dims: &Dims) -> Self {
        let sides = [dims.d, dims.d_v].map(|width| Side::new(layout, width));
        let words = sides.map(|side| side.block_words(layout).iter().sum::<usize>());
        let words = words[0] + words[1] + sides[0].packed.column_words(layout);
        Self { sides, blocks: backward_blocks(layout.block, dims, words) }
    }
}

/// Of a block: its rows and the sums of their gradients, of each side, and its keys transposed.
pub(super) struct BlockMemory {
    pub sides: [[Scratch; 2]; 2],
    pub key_columns: Scratch,
}

/// Everything a thread needs for its tasks. Its size is bounded by D, D_v and the instruction set, and does not grow
/// with T.
pub(super) struct BackwardMemory {
    pub sizes: BackwardSizes,
    pub blocks: Vec<BlockMemory>,
    /// Of a tile and each side: (width, panel), and as the right operand of a product (panels, rows, panel).
    pub panels: [Scratch; 2],
    pub rows: [Scratch; 2],
    /// Gradients of queries: (D, panel).
    pub query_sums: Scratch,
    /// The products of a block and a tile of each side, (block, panel): scores, which become weights, and gradients of
    /// weights, which become those of scores.
    pub products: [Scratch; 2],
    /// (block, panel), with a softcap: its derivative.
    pub slopes: Scratch,
    /// (block, panel), where weights are dropped.
    pub dropout: Scratch,
    /// The weights and the gradients of scores in bf16, (block, panel / 2), and the latter in pairs of keys,
    /// (block / 2, panel).
    pub halves: [Scratch; 2],
    pub pairs: Scratch,
    pub staging: Scratch,
}

impl BackwardMemory {
    pub fn new(layout: Layout, sizes: BackwardSizes, options: &ScoreOptions) -> Self {
        let Layout { elements, panel, .. } = layout;
        let (sides, scores) = (sizes.sides, layout.block * panel);
        let packed = sides.map(|side| side.packed);
        let block = |_| BlockMemory {
            sides: sides.map(|side| side.block_words(layout).map(Scratch::zeros)),
            key_columns: Scratch::zeros(packed[0].column_words(layout)),
        };
        let if_wanted = |is_wanted: bool, words: usize| Scratch::zeros(if is_wanted { words } else { 0 });
        let [of_keys, of_values] = packed.map(|width| width.staging_words(layout));
        Self {
            sizes,
            blocks: (0..sizes.blocks).map(block).collect(),
            panels: packed.map(|width| Scratch::zeros(width.word_squares * panel)),
            rows: sides.map(|side| Scratch::zeros(side.count * panel / elements * panel)),
            query_sums: Scratch::zeros(packed[0].row_squares * panel),
            products: [scores; 2].map(Scratch::zeros),
            slopes: if_wanted(options.softcap.is_some(), scores),
            dropout: if_wanted(options.dropout.is_some(), scores),
            halves: [scores / 2; 2].map(|words| if_wanted(elements == 2, words)),
            pairs: if_wanted(elements == 2, scores / 2),
            staging: Scratch::zeros((layout.lanes * layout.block).max(of_keys).max(of_values)),
        }
    }
    /// The weights and gradients of a tile's scores over some keys as the words that the kernel multiplies, and zeros
    /// where a product reads more than there is.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the products are those of the tile.
    #[inline(always)]
    pub unsafe fn store_words<K: Kernel>(&mut self, overlap: &Overlap, vectors: usize) {
        let (keys, lanes) = (overlap.keys.len(), K::Vector::LANES);
        let rows = keys.next_multiple_of(K::MIN_ROWS);
        let [[weights, gradients], [weight_halves, gradient_halves]] =
            [&mut self.products, &mut self.halves].map(|of| of.each_mut().map(Scratch::as_mut_ptr));
        // SAFETY: as this method's contract; a block has `BLOCK` rows, a multiple of `MIN_ROWS` and of twice the depth.
        unsafe {
            for pair in 0..overlap.depth.max(rows.div_ceil(2)) {
                for vector in 0..K::VECTORS {
                    let column = vector * lanes;
                    let mut pairs = [K::Vector::splat(0.0); 2];
                    for (row, gradient) in (2 * pair..).zip(&mut pairs) {
                        let mut weight = K::Vector::splat(0.0);
                        if row < keys && vector < vectors {
                            weight = K::Vector::load(weights.add(row * K::PANEL + column));
                            *gradient = K::Vector::load(gradients.add(row * K::PANEL + column));
                        }
                        let at = (row * K::PANEL + column) / 2;
                        weight.store_halves(weight_halves.add(at));
                        gradient.store_halves(gradient_halves.add(at));
                    }
                    let [low, high] = pairs;
                    low.store_pairs(high, self.pairs.as_mut_ptr().add(pair * K::PANEL + column));
                }
            }
        }
    }
}
