//! The memory that one task of the backward pass works in.

use crate::cpu::{Kernel, Scratch, Vector};
use crate::flash::heuristics::{PackedSizes, PackedWidth};
use crate::flash::problem::{Dims, ScoreOptions};

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
    pub fn columns<K: Kernel>(&self, panel: usize) -> std::ops::Range<usize> {
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
        sizes.blocks = crate::flash::heuristics::backward_blocks::<K>(dims, operands + sums);
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
