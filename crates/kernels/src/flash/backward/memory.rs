//! The memory that a task of the backward pass works in, and its size.

use std::ops::Range;

use crate::cpu::{Kernel, Layout, Scratch, Vector};
use crate::flash::options::TileModifiers;
use crate::flash::packed_width::PackedWidth;
use crate::flash::tile::Overlap;
use candle_attention_call::AttentionDims;

/// The bytes that a task of the backward pass keeps for its keys: most of an L2 cache of 1 MB, for every processor,
/// since the split of the keys changes the last bits of the queries' gradients.
const STATE_BYTES: usize = 768 << 10;

/// Tasks of the backward pass for each sequence, if it has enough keys. The number depends only on the shape of one
/// sequence, since the split of the keys changes the last bits of the queries' gradients.
const TASKS: usize = 16;

/// Returns the number of blocks of keys of a task, each of which takes `block_words` words of memory.
fn blocks_of_task(block: usize, dims: &AttentionDims, block_words: usize) -> usize {
    let blocks = dims.t_kv.div_ceil(block);
    let fit = STATE_BYTES / (4 * block_words).max(1);
    let most = fit.min(blocks.saturating_mul(dims.h_kv) / TASKS).max(1);
    // Chunks of one length.
    blocks.div_ceil(blocks.div_ceil(most).max(1)).max(1)
}

/// The sizes of rows of D, keys and queries, or of rows of D_v, values and gradients of outputs. Their columns make
/// panels of a product, all with the same number of vectors, since a panel of one vector keeps no product busy.
#[derive(Clone, Copy)]
pub(super) struct RowSize {
    pub width: usize,
    pub packed: PackedWidth,
    /// The number of panels.
    pub panels: usize,
    /// The number of vectors of each panel but the last, which may have fewer.
    vectors: usize,
    /// The number of vectors of all panels together.
    all_vectors: usize,
}

impl RowSize {
    fn new(layout: Layout, width: usize) -> Self {
        let all_vectors = width.div_ceil(layout.lanes);
        let panels = all_vectors.div_ceil(layout.panel / layout.lanes);
        let vectors = all_vectors.div_ceil(panels.max(1));
        Self { width, packed: PackedWidth::new(layout, width), panels, vectors, all_vectors }
    }

    /// Returns the columns of a panel, within the width.
    pub fn columns(&self, lanes: usize, panel: usize) -> Range<usize> {
        let columns = self.vectors * lanes;
        panel * columns..self.width.min((panel + 1) * columns)
    }

    /// Returns the number of vectors of a panel.
    pub fn vectors_of(&self, panel: usize) -> usize {
        self.vectors.min(self.all_vectors - panel * self.vectors)
    }

    /// Returns the number of words of the rows of a block.
    fn row_words(&self, layout: Layout) -> usize {
        layout.block * self.packed.words
    }

    /// Returns the number of words of the sums of the rows' gradients, (panels, block, panel).
    fn sum_words(&self, layout: Layout) -> usize {
        self.panels * layout.block * layout.panel
    }
}

/// The sizes of the memory of a task.
#[derive(Clone, Copy)]
pub(super) struct BackwardSizes {
    /// Rows of D.
    pub d: RowSize,
    /// Rows of D_v.
    pub d_v: RowSize,
    /// The number of blocks of keys in a task.
    pub blocks: usize,
}

impl BackwardSizes {
    /// Computes the sizes for the layout of a kernel.
    pub fn new(layout: Layout, dims: &AttentionDims) -> Self {
        let d = RowSize::new(layout, dims.d);
        let d_v = RowSize::new(layout, dims.d_v);
        let row_words = d.row_words(layout) + d_v.row_words(layout);
        let sum_words = d.sum_words(layout) + d_v.sum_words(layout);
        let words = row_words + sum_words + d.packed.column_words(layout);
        Self { d, d_v, blocks: blocks_of_task(layout.block, dims, words) }
    }
}

/// The packed keys or values of a block, and the sums of their gradients.
pub(super) struct BlockRowsMemory {
    pub rows: Scratch,
    pub sums: Scratch,
}

impl BlockRowsMemory {
    fn new(layout: Layout, size: &RowSize) -> Self {
        Self { rows: Scratch::zeros(size.row_words(layout)), sums: Scratch::zeros(size.sum_words(layout)) }
    }
}

/// The memory of a block.
pub(super) struct BlockMemory {
    pub k: BlockRowsMemory,
    pub v: BlockRowsMemory,
    /// The keys, transposed.
    pub key_columns: Scratch,
}

/// The packed queries of a tile, or the gradients of their outputs.
pub(super) struct TileRowsMemory {
    /// (width, panel).
    pub panel: Scratch,
    /// The right operand of a product over queries, (panels, rows, panel).
    pub rows: Scratch,
}

impl TileRowsMemory {
    fn new(layout: Layout, size: &RowSize) -> Self {
        Self {
            panel: Scratch::zeros(size.packed.word_squares * layout.panel),
            rows: Scratch::zeros(size.panels * layout.panel / layout.elements * layout.panel),
        }
    }
}

/// The memory that a thread needs for its tasks. Its size is bounded by D, D_v and the instruction set, and does not
/// grow with T.
pub(super) struct BackwardScratch {
    pub sizes: BackwardSizes,
    pub blocks: Vec<BlockMemory>,
    pub queries: TileRowsMemory,
    pub output_grads: TileRowsMemory,
    /// The gradients of queries, (D, panel).
    pub query_sums: Scratch,
    /// The products of keys and queries, (block, panel), which become weights.
    pub scores: Scratch,
    /// The products of values and gradients of outputs, (block, panel), which are gradients of weights and become
    /// gradients of scores.
    pub gradients: Scratch,
    /// The derivatives of scores with respect to products times the scale, (block, panel).
    pub product_derivatives: Scratch,
    /// The dropout factors, (block, panel), where weights are dropped.
    pub dropout: Scratch,
    /// The weights in bf16, (block, panel / 2).
    pub weight_halves: Scratch,
    /// The gradients of scores in bf16, (block, panel / 2).
    pub gradient_halves: Scratch,
    /// The gradients of scores in pairs of keys, (block / 2, panel).
    pub gradient_pairs: Scratch,
    /// Rows before they are transposed.
    pub staging: Scratch,
}

impl BackwardScratch {
    /// Allocates the memory of a call with these options.
    pub fn new(layout: Layout, sizes: BackwardSizes, options: &TileModifiers) -> Self {
        let BackwardSizes { d, d_v, .. } = &sizes;
        let scores = layout.block * layout.panel;
        let block = || BlockMemory {
            k: BlockRowsMemory::new(layout, d),
            v: BlockRowsMemory::new(layout, d_v),
            key_columns: Scratch::zeros(d.packed.column_words(layout)),
        };
        let zeros_if = |is_used: bool, words: usize| Scratch::zeros(if is_used { words } else { 0 });
        let has_pairs = layout.elements == 2;
        let staging =
            (layout.lanes * layout.block).max(d.packed.staging_words(layout)).max(d_v.packed.staging_words(layout));
        Self {
            sizes,
            blocks: std::iter::repeat_with(block).take(sizes.blocks).collect(),
            queries: TileRowsMemory::new(layout, d),
            output_grads: TileRowsMemory::new(layout, d_v),
            query_sums: Scratch::zeros(d.packed.row_squares * layout.panel),
            scores: Scratch::zeros(scores),
            gradients: Scratch::zeros(scores),
            product_derivatives: zeros_if(options.has_product_derivative(), scores),
            dropout: zeros_if(options.dropout.is_some(), scores),
            weight_halves: zeros_if(has_pairs, scores / 2),
            gradient_halves: zeros_if(has_pairs, scores / 2),
            gradient_pairs: zeros_if(has_pairs, scores / 2),
            staging: Scratch::zeros(staging),
        }
    }

    /// Converts the weights and gradients of a tile's scores over some keys to the words that the kernel multiplies,
    /// with zeros where a product reads more keys or columns.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the scores and gradients belong to the tile.
    #[inline(always)]
    pub unsafe fn store_words<K: Kernel>(&mut self, overlap: &Overlap, vectors: usize) {
        let keys = overlap.keys.len();
        let lanes = K::Vector::LANES;
        let rows = keys.next_multiple_of(K::MIN_ROWS);
        let weights = self.scores.as_mut_ptr();
        let gradients = self.gradients.as_mut_ptr();
        let weight_halves = self.weight_halves.as_mut_ptr();
        let gradient_halves = self.gradient_halves.as_mut_ptr();
        let gradient_pairs = self.gradient_pairs.as_mut_ptr();
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
                    low.store_pairs(high, gradient_pairs.add(pair * K::PANEL + column));
                }
            }
        }
    }
}
