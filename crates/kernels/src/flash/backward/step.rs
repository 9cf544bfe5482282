//! One tile against one block in the backward pass, which takes five products.

use std::cell::OnceCell;
use std::ops::Range;

use super::call::BackwardCall;
use super::memory::{BackwardScratch, BlockMemory, BlockRowsMemory, RowSize};
use super::tile_gradient::{ColumnStats, TileGradient, TileModifierGradients};
use crate::cpu::{Kernel, LeftOperand, MAX_COLUMNS, NextBytes, PanelProduct, RightOperand, Vector, multiply_words};
use crate::flash::block_products::{add_values, multiply_keys};
use crate::flash::kv_rows::{KvHeadRows, is_finite_row};
use crate::flash::options::ScoreUnits;
use crate::flash::pack::{TileRows, pack_columns, pack_rows};
use crate::flash::scores::TileScores;
use crate::flash::tile::{Overlap, Tile, TilePart};
use crate::number::{Number, widen_row};

/// The packed keys or values of a block, and the sums of their gradients.
pub(super) struct BlockRows<'a, E> {
    source: KvHeadRows<'a, E>,
    packed: LeftOperand,
    /// (panels, block, panel).
    pub sums: *mut f32,
}

impl<'a, E: Number> BlockRows<'a, E> {
    /// Packs rows, and clears the sums of their gradients.
    ///
    /// # Safety
    /// As [`KeyBlock::new`].
    #[inline(always)]
    unsafe fn new<K: Kernel>(source: KvHeadRows<'a, E>, memory: &mut BlockRowsMemory, size: &RowSize) -> Self {
        // SAFETY: as this function's contract.
        let packed = unsafe { pack_rows::<K, E>(&source, memory.rows.as_mut_ptr(), size.packed.words) };
        memory.sums.words_mut().fill(0.0);
        Self { source, packed, sums: memory.sums.as_mut_ptr() }
    }
}

/// One block of keys and values, packed, and the sums of their gradients.
pub(super) struct KeyBlock<'a, E> {
    pub k: BlockRows<'a, E>,
    pub v: BlockRows<'a, E>,
    key_columns: LeftOperand,
}

impl<'a, E: Number> KeyBlock<'a, E> {
    /// Packs block `index` of a task.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the keys are one block; the memory was made for the call and
    /// has the block.
    #[inline(always)]
    pub unsafe fn new<K: Kernel>(
        k: KvHeadRows<'a, E>,
        v: KvHeadRows<'a, E>,
        memory: &mut BackwardScratch,
        index: usize,
    ) -> Self {
        let sizes = &memory.sizes;
        let staging = memory.staging.as_mut_ptr();
        let BlockMemory { k: k_memory, v: v_memory, key_columns } = &mut memory.blocks[index];
        // SAFETY: as this function's contract.
        unsafe {
            let key_columns = pack_columns::<K, E>(&k, key_columns.as_mut_ptr(), staging, sizes.d.packed);
            let k = BlockRows::new::<K>(k, k_memory, &sizes.d);
            let v = BlockRows::new::<K>(v, v_memory, &sizes.d_v);
            Self { k, v, key_columns }
        }
    }

    /// Returns the keys of the block.
    pub fn keys(&self) -> &Range<usize> {
        &self.k.source.keys
    }
}

/// A tile whose queries and gradients are packed.
pub(super) struct PackedTile<'a, E> {
    pub tile: &'a Tile,
    pub columns: ColumnStats,
    pub queries: TileRows<'a, E>,
    pub output_grads: TileRows<'a, E>,
    pub finite: OnceCell<bool>,
}

impl<E: Number> PackedTile<'_, E> {
    /// Returns whether all queries and gradients of outputs are finite. Computed once.
    fn are_finite(&self) -> bool {
        let all_finite = |rows: &TileRows<E>| {
            // SAFETY: the rows belong to the call.
            let is_finite = |row| unsafe { is_finite_row(row, rows.width) };
            (0..self.tile.rows.len()).filter_map(|column| rows.row(column)).all(is_finite)
        };
        *self.finite.get_or_init(|| all_finite(&self.queries) && all_finite(&self.output_grads))
    }
}

/// One tile against one block.
pub(super) struct BackwardStep<'a, 'b, E> {
    pub backward: &'a BackwardCall<'b, E>,
    pub block: &'a KeyBlock<'a, E>,
    pub packed: &'a PackedTile<'a, E>,
    pub units: ScoreUnits,
    pub modifiers: Option<TileModifierGradients>,
}

const ONES: [f32; MAX_COLUMNS] = [1.0; MAX_COLUMNS];

impl<E: Number> BackwardStep<'_, '_, E> {
    /// Adds to the sums of the block and of the tile.
    ///
    /// # Safety
    /// The processor has the instruction set of K, whose tiles are configured; the memory contains the block and the
    /// tile; no other thread uses the gradients of score modifiers that the tile adds to.
    #[inline(always)]
    pub unsafe fn run<K: Kernel>(&self, memory: &mut BackwardScratch) {
        let &Self { backward, block, packed, .. } = self;
        let tile = packed.tile;
        let sizes = memory.sizes;
        let requested = &backward.requested;
        let Some(overlap) = tile.overlap(K::LAYOUT, block.keys(), &backward.inputs) else { return };
        let scores = memory.scores.as_mut_ptr();
        let gradients = memory.gradients.as_mut_ptr();
        // SAFETY: as this method's contract.
        unsafe {
            let query_panel = memory.queries.panel.as_ptr();
            let grad_panel = memory.output_grads.panel.as_ptr();
            for part in overlap.parts.iter() {
                multiply_keys::<K>(&overlap, part, block.k.packed, sizes.d.packed.words, query_panel, scores);
                multiply_keys::<K>(&overlap, part, block.v.packed, sizes.d_v.packed.words, grad_panel, gradients);
            }
            K::Vector::run_simd(self.tile_gradient(memory, &overlap));
            if overlap.is_masked && !(block.k.source.are_finite() && packed.are_finite()) {
                return self.add_attended::<K>(memory, &overlap);
            }
            // The weights, and the gradients of scores as the operands of products over keys and over queries.
            let mut weights = scores;
            let mut gradient_rows = gradients;
            let mut gradient_columns = gradients;
            if const { K::IS_BF16 } {
                memory.store_words::<K>(&overlap, tile.vectors);
                weights = memory.weight_halves.as_mut_ptr();
                gradient_rows = memory.gradient_halves.as_mut_ptr();
                gradient_columns = memory.gradient_pairs.as_mut_ptr();
            }
            let query_sums = memory.query_sums.as_mut_ptr();
            let query_rows = memory.queries.rows.as_ptr();
            let grad_rows = memory.output_grads.rows.as_ptr();
            for part in overlap.parts.iter() {
                if requested.of.q {
                    let rows = sizes.d.packed.rows;
                    add_values::<K>(&overlap, part, block.key_columns, rows, gradient_columns, &ONES, query_sums);
                }
                if requested.of.k {
                    add_rows::<K>(&overlap, part, &sizes.d, gradient_rows, query_rows, block.k.sums);
                }
                if requested.of.v {
                    add_rows::<K>(&overlap, part, &sizes.d_v, weights, grad_rows, block.v.sums);
                }
            }
        }
    }

    /// Returns the task that turns the products of the tile into weights and gradients of scores.
    fn tile_gradient(&self, memory: &mut BackwardScratch, overlap: &Overlap) -> TileGradient<'_> {
        let inputs = self.backward.inputs;
        TileGradient {
            scores: TileScores {
                inputs,
                tile: self.packed.tile,
                units: self.units,
                keys: overlap.keys.clone(),
                rows: overlap.keys.len(),
                is_masked: overlap.is_masked,
                scores: memory.scores.as_mut_ptr(),
                staging: memory.staging.as_mut_ptr(),
                dropout: memory.dropout.as_mut_ptr(),
                product_derivatives: Some(memory.product_derivatives.as_mut_ptr()),
            },
            gradients: memory.gradients.as_mut_ptr(),
            columns: &self.packed.columns,
            scale: inputs.options.scale as f32,
            modifiers: self.modifiers,
        }
    }

    /// Adds the products of each query and key that is not masked, one by one, where an operand is not finite: in a
    /// product of matrices, the weight 0 of a masked key times NaN would be NaN. Rare, and slow.
    ///
    /// # Safety
    /// As [`run`](Self::run); the weights and the gradients of scores are computed.
    unsafe fn add_attended<K: Kernel>(&self, memory: &mut BackwardScratch, overlap: &Overlap) {
        let inputs = &self.backward.inputs;
        let sizes = memory.sizes;
        let tile = self.packed.tile;
        let block = self.block;
        let widened = |row: *const E, width: usize| {
            let mut wide = vec![0f32; width];
            // SAFETY: the processor has the instruction set of K, and the row has the width.
            unsafe { widen_row::<E, K::Vector>(row, width, wide.as_mut_ptr(), width, 1.0) };
            wide
        };
        for column in 0..tile.rows.len() {
            let Some(query) = self.packed.queries.row(column) else { continue };
            let Some(output_grad) = self.packed.output_grads.row(column) else { continue };
            let query = widened(query, sizes.d.width);
            let output_grad = widened(output_grad, sizes.d_v.width);
            for key in tile.keys_of(inputs, column, &overlap.keys) {
                let at = (key - overlap.keys.start) * K::PANEL + column;
                let weight = memory.scores.words()[at];
                let gradient = memory.gradients.words()[at];
                let query_sums = memory.query_sums.words_mut()[column..].iter_mut().step_by(K::PANEL);
                for (sum, x) in query_sums.zip(widened(block.k.source.row(key).numbers, sizes.d.width)) {
                    *sum += gradient * x;
                }
                let index = key - block.keys().start;
                // SAFETY: as this method's contract; the sums have the key, which is one of the block's.
                unsafe {
                    add_scaled_row::<K>(&sizes.d, block.k.sums, index, gradient, &query);
                    add_scaled_row::<K>(&sizes.d_v, block.v.sums, index, weight, &output_grad);
                }
            }
        }
    }
}

/// Adds a row times a factor to row `index` of some sums, (panels, block, panel).
///
/// # Safety
/// The sums have the row, which no other thread uses.
unsafe fn add_scaled_row<K: Kernel>(size: &RowSize, sums: *mut f32, index: usize, factor: f32, row: &[f32]) {
    for panel in 0..size.panels {
        let at = (panel * K::BLOCK + index) * K::PANEL;
        for (n, &x) in row[size.columns(K::LAYOUT.lanes, panel)].iter().enumerate() {
            // SAFETY: as this function's contract.
            unsafe { *sums.add(at + n) += factor * x };
        }
    }
}

/// Adds the product of a tile's weights, (keys, panel) in words, with its gradients of outputs, (panels, panel in
/// words, panel), over a part of both; or of the gradients of its scores with its queries. Keys are rows, queries the
/// depth, D or D_v the columns, whose sums are (panels, block, panel).
///
/// # Safety
/// As [`BackwardStep::run`]; the weights of the part are computed, with zeros beyond it where the kernel takes whole
/// tiles.
unsafe fn add_rows<K: Kernel>(
    overlap: &Overlap,
    part: &TilePart,
    size: &RowSize,
    weights: *const f32,
    rows: *const f32,
    to: *mut f32,
) {
    let lanes = K::Vector::LANES;
    let words = K::PANEL / K::ELEMENTS;
    let start = part.vectors.start * lanes / K::ELEMENTS / K::DEPTH * K::DEPTH;
    let end = (part.vectors.end * lanes / K::ELEMENTS).next_multiple_of(K::DEPTH);
    let row = (part.keys.start - overlap.keys.start) * words;
    for panel in 0..size.panels {
        // SAFETY: as this function's contract.
        unsafe {
            multiply_words::<K>(&PanelProduct {
                a: LeftOperand { at: weights.add(row + start), group: K::ROWS * words, row: words, step: 1 },
                b: RightOperand::words(rows.add((panel * words + start) * K::PANEL), K::PANEL),
                c: to.add((panel * K::BLOCK + part.keys.start - overlap.block_start) * K::PANEL),
                rows: part.keys.len().next_multiple_of(K::MIN_ROWS),
                depth: end - start,
                vectors: size.vectors_of(panel),
                factors: Some(ONES.as_ptr()),
                next: NextBytes::NONE,
            });
        }
    }
}
