//! Many queries: tiles of queries against blocks of keys.
//!
//! ```text
//! for each block of keys:                                  packed once for all queries of the task
//!     for each tile of queries that attends to some of it: (queries are columns)
//!         scores  = keys · queries                         (block, panel)
//!         scores  = softcap, ALiBi, bias; -inf where masked
//!         weights = 2^(scores - largest so far)            replace the scores
//!         sum     = sum · factor + Σ weights               factor = 2^(largest before - largest so far)
//!         outputs = outputs · factor + valuesᵀ · weights   (D_v, panel)
//! outputs / sum, transposed, to the output
//! ```

use super::block_products::{add_values, multiply_keys};
use super::inputs::CheckedCall;
use super::kv_rows::KeysValues;
use super::options::ScoreUnits;
use super::pack::PackedBlock;
use super::scores::TileScores;
use super::softmax::TileSoftmax;
use super::tasks::{AttentionTask, AttentionWorkspace};
use super::tile::{Overlap, Tile, TilePart, intersection};
use crate::cpu::{Kernel, MAX_COLUMNS, SimdTask, Vector};
use crate::number::{Stored, store_first};

/// Tiles of one key head, whose queries are packed, against some of its keys. Writes the state of the online softmax to
/// the workspace.
pub(super) struct Prefill<'a, 'b, S> {
    pub task: &'a AttentionTask<'b>,
    pub keys_values: &'a KeysValues<'a, S>,
    pub workspace: &'a mut AttentionWorkspace,
}

impl<S: Stored> SimdTask for Prefill<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { task, keys_values, workspace } = self;
        workspace.state.clear();
        // SAFETY: the processor has the instruction set of K; the workspace was made for the call and has a panel for
        // each tile.
        unsafe {
            let _tiles = K::configure_tiles();
            let attended = intersection(&Tile::attended_keys(&task.tiles), &task.keys);
            for first in (attended.start / K::BLOCK * K::BLOCK..attended.end).step_by(K::BLOCK) {
                let keys = first..task.inputs.dims.t_kv.min(first + K::BLOCK);
                let block = PackedBlock::new::<K>(keys_values, workspace, task.kv, keys);
                for (index, tile) in task.tiles.iter().enumerate() {
                    let step = TileBlock { inputs: task.inputs, block: &block, tile, index, units: task.units };
                    step.run::<K>(workspace);
                }
            }
        }
    }
}

/// One tile against one block.
struct TileBlock<'a, 'b, S> {
    inputs: &'a CheckedCall<'b>,
    block: &'a PackedBlock<'a, S>,
    tile: &'a Tile,
    /// The index of the tile's panel in the workspace.
    index: usize,
    units: ScoreUnits,
}

impl<S: Stored> TileBlock<'_, '_, S> {
    /// Updates the state of the tile.
    ///
    /// # Safety
    /// The processor has the instruction set of K, whose tiles are configured; the workspace contains the block and the
    /// tile's queries.
    #[inline(always)]
    unsafe fn run<K: Kernel>(&self, workspace: &mut AttentionWorkspace) {
        let &Self { inputs, block, tile, index, units, .. } = self;
        let Some(overlap) = tile.overlap(K::LAYOUT, &block.values.keys, inputs) else { return };
        let depth = overlap.depth;
        let d = workspace.d;
        let d_v = workspace.d_v;
        let scores = workspace.scores.as_mut_ptr();
        let pairs = workspace.weights.as_mut_ptr();
        let state = workspace.state.of_panel(index);
        let mut factors = [0f32; MAX_COLUMNS];
        // SAFETY: as this method's contract; a block has `BLOCK` rows, which is a multiple of `ROWS`.
        unsafe {
            let queries = workspace.queries.as_ptr().add(index * d.word_squares * K::PANEL);
            for part in overlap.parts.iter() {
                multiply_keys::<K>(&overlap, part, block.k, d.words, queries, scores);
            }
            let tile_scores = TileScores {
                inputs: *inputs,
                tile,
                units,
                keys: overlap.keys.clone(),
                rows: overlap.keys.len(),
                is_masked: overlap.is_masked,
                scores,
                staging: workspace.staging.as_mut_ptr(),
                dropout: workspace.dropout.as_mut_ptr(),
                product_derivatives: None,
            };
            let scores_out = workspace.statistics.as_mut().map(|memory| {
                let first = index * inputs.dims.t_kv + overlap.keys.start;
                memory.scores.as_mut_ptr().add(first * K::PANEL)
            });
            let factors_out = factors.as_mut_ptr();
            K::run_simd(&TileSoftmax { scores: tile_scores, depth, pairs, state, factors: factors_out, scores_out });
            let weights = if K::IS_BF16 { pairs } else { scores };
            let skips_masked = overlap.is_masked && !block.values.are_finite();
            for part in overlap.parts.iter() {
                if skips_masked {
                    self.add_attended::<K>(&overlap, part, weights, &factors, state.values);
                } else {
                    add_values::<K>(&overlap, part, block.v, d_v.rows, weights, &factors, state.values);
                }
                // The first product of a vector multiplied its earlier sums by the factors; the next ones only add.
                factors[part.vectors.start * K::Vector::LANES..part.vectors.end * K::Vector::LANES].fill(1.0);
            }
        }
    }

    /// Adds weighted values as [`add_values`], where the values are not all finite: zero times NaN is NaN, so that each
    /// query sums only the keys that it attends to. One query after the other, since such values are rare. The sums of
    /// finite values have the same bits.
    ///
    /// # Safety
    /// As [`add_values`].
    #[inline(always)]
    unsafe fn add_attended<K: Kernel>(
        &self,
        overlap: &Overlap,
        part: &TilePart,
        weights: *const f32,
        factors: &[f32; MAX_COLUMNS],
        to: *mut f32,
    ) {
        let &Self { inputs, tile, block, .. } = self;
        let d_v = inputs.dims.d_v;
        let lanes = K::Vector::LANES;
        let mut sums = vec![0f32; d_v.next_multiple_of(lanes)];
        let end = tile.rows.len().min(part.vectors.end * lanes);
        for (column, &factor) in factors.iter().enumerate().take(end).skip(part.vectors.start * lanes) {
            sums.fill(0.0);
            // SAFETY: as this method's contract.
            unsafe {
                for key in tile.keys_of(inputs, column, &part.keys) {
                    let at = key - overlap.keys.start;
                    let mut weight = (*weights.add(at / K::ELEMENTS * K::PANEL + column)).to_bits();
                    if K::IS_BF16 {
                        // A bf16 is the upper half of the same f32.
                        weight = if at.is_multiple_of(2) { weight << 16 } else { weight & 0xffff_0000 };
                    }
                    block.values.add::<K::Vector>(key, f32::from_bits(weight), &mut sums);
                }
                let factor = K::Vector::splat(factor);
                for (d, &sum) in sums[..d_v].iter().enumerate() {
                    let at = to.add(d * K::PANEL + column);
                    store_first(K::Vector::splat(*at).mul_add(factor, K::Vector::splat(sum)), at, 1);
                }
            }
        }
    }
}
