//! Many queries: tiles of queries against blocks of keys.
//!
//! ```text
//! for each block of keys:                                  packed once for all queries of the task
//!     for each tile of queries that sees some of it:       (queries are columns)
//!         scores  = keys · queries                         (block, panel)
//!         scores  = softcap, ALiBi, bias; -inf where hidden
//!         weights = 2^(scores - largest so far)            in place of the scores
//!         sum     = sum · factor + Σ weights               factor = 2^(largest before - largest so far)
//!         context = context · factor + valuesᵀ · weights   (D_v, panel)
//! context / sum, transposed, to the output
//! ```

use super::pack::Block;
use super::problem::{ScoreInputs, ScoreUnits, StoredRows};
use super::scores::TileScores;
use super::softmax::TileSoftmax;
use super::tasks::{AttendTask, Workspace};
use super::tile::{Overlap, Part, Tile};
use crate::cpu::{Format, Kernel, LeftOperand, MAX_COLUMNS, Product, SimdTask, Vector};
use crate::number::{Stored, store_first};

/// Tiles of one key head, whose queries are packed, against some of its keys. Leaves their state in the workspace.
pub(super) struct Prefill<'a, 'b, S> {
    pub task: &'a AttendTask<'b>,
    pub keys_values: &'a [StoredRows<'a, S>; 2],
    pub workspace: &'a mut Workspace,
}

impl<S: Stored> SimdTask for Prefill<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { task, keys_values, workspace } = self;
        workspace.state.clear();
        // SAFETY: the processor has the instruction set of K; the workspace was made for the call and has a panel for
        // each tile.
        unsafe {
            let _tiles = K::configure_tiles();
            let seen = Tile::seen_keys(&task.tiles);
            let first_block = seen.start.max(task.keys.start) / K::BLOCK * K::BLOCK;
            for first in (first_block..seen.end.min(task.keys.end)).step_by(K::BLOCK) {
                let keys = first..task.inputs.dims.t_kv.min(first + K::BLOCK);
                let block = Block::new::<K>(keys_values, workspace, task.kv, keys);
                for (index, tile) in task.tiles.iter().enumerate() {
                    Step { inputs: task.inputs, block: &block, tile, index, units: task.units }.run::<K>(workspace);
                }
            }
        }
    }
}

/// One tile against one block.
struct Step<'a, 'b, S> {
    inputs: &'a ScoreInputs<'b>,
    block: &'a Block<'a, S>,
    tile: &'a Tile,
    /// The tile's panel in the workspace.
    index: usize,
    units: ScoreUnits,
}

impl<S: Stored> Step<'_, '_, S> {
    /// # Safety
    /// The processor has the instruction set of K, whose tiles are configured; the workspace holds the block and the
    /// tile's queries.
    #[inline(always)]
    unsafe fn run<K: Kernel>(&self, workspace: &mut Workspace) {
        let &Self { inputs, block, tile, index, units, .. } = self;
        let Some(overlap) = tile.overlap(K::LAYOUT, &block.values.keys, inputs) else { return };
        let (first, depth, is_masked) = (overlap.keys.start, overlap.depth, overlap.is_masked);
        let [d, d_v] = workspace.sizes;
        let (scores, pairs) = (workspace.scores.as_mut_ptr(), workspace.weights.as_mut_ptr());
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
                is_masked,
                scores,
                staging: workspace.staging.as_mut_ptr(),
                dropout: workspace.dropout.as_mut_ptr(),
                cap_slopes: None,
            };
            let kept = workspace.kept.as_mut();
            let scores_out = kept.map(|kept| kept.as_mut_ptr().add((index * inputs.dims.t_kv + first) * K::PANEL));
            let factors_out = factors.as_mut_ptr();
            K::run_simd(&TileSoftmax { scores: tile_scores, depth, pairs, state, factors: factors_out, scores_out });
            let weights = if K::IS_BF16 { pairs } else { scores };
            let only_seen = is_masked && !block.values.are_finite();
            for part in overlap.parts.iter() {
                match only_seen {
                    true => self.add_seen::<K>(&overlap, part, weights, &factors, state.context),
                    false => add_values::<K>(&overlap, part, block.v, d_v.rows, weights, &factors, state.context),
                }
                // The first part of a vector corrected its context; the next ones only add.
                factors[part.vectors.start * K::Vector::LANES..part.vectors.end * K::Vector::LANES].fill(1.0);
            }
        }
    }

    /// [`add_values`] where these are not all finite: zero times NaN is NaN, so each query sums the keys that it sees
    /// and no others. One query after the other, since such values are rare; finite values get the same sums as
    /// elsewhere.
    ///
    /// # Safety
    /// As [`add_values`].
    #[inline(always)]
    unsafe fn add_seen<K: Kernel>(
        &self,
        overlap: &Overlap,
        part: &Part,
        weights: *const f32,
        factors: &[f32; MAX_COLUMNS],
        to: *mut f32,
    ) {
        let &Self { inputs, tile, block, .. } = self;
        let (d_v, lanes) = (inputs.dims.d_v, K::Vector::LANES);
        let mut sums = vec![0f32; d_v.next_multiple_of(lanes)];
        let end = tile.rows.len().min(part.vectors.end * lanes);
        for (column, &factor) in factors.iter().enumerate().take(end).skip(part.vectors.start * lanes) {
            sums.fill(0.0);
            // SAFETY: as this method's contract.
            unsafe {
                for key in tile.seen_by(inputs, column, &part.keys) {
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

/// The product of a block's keys with a tile's queries, (depth, panel), over parts of both; or of its values with the
/// gradients of contexts.
///
/// # Safety
/// The processor has the instruction set of K, whose tiles are configured; the operands are a block and a panel of the
/// depth; the part begins at a whole group of keys.
pub(super) unsafe fn multiply_keys<K: Kernel>(
    overlap: &Overlap,
    part: &Part,
    rows: LeftOperand,
    depth: usize,
    columns: *const f32,
    to: *mut f32,
) {
    let column = part.vectors.start * K::Vector::LANES;
    // SAFETY: as this function's contract; a block has `BLOCK` rows, which is a multiple of `ROWS`.
    unsafe {
        K::multiply(&Product {
            a: rows.offset((part.keys.start - overlap.block) * rows.row),
            b: columns.add(column),
            c: to.add((part.keys.start - overlap.keys.start) * K::PANEL + column),
            rows: part.keys.len().next_multiple_of(K::ROWS),
            depth,
            vectors: part.vectors.len(),
            factors: None,
            format: Format::F32,
        });
    }
}

/// The product of a block's values, the rows of whose transposition are counted, with a tile's weights, over parts of
/// both; or of its keys with the gradients of scores. Each part is summed from zero and added to what was there times
/// its factors.
///
/// # Safety
/// The processor has the instruction set of K, whose tiles are configured; the operands are a block of the rows and
/// weights of a panel; the part begins at a whole step of depth.
pub(super) unsafe fn add_values<K: Kernel>(
    overlap: &Overlap,
    part: &Part,
    values: LeftOperand,
    rows: usize,
    weights: *const f32,
    factors: &[f32; MAX_COLUMNS],
    to: *mut f32,
) {
    let column = part.vectors.start * K::Vector::LANES;
    // SAFETY: as this function's contract.
    unsafe {
        K::multiply(&Product {
            a: values.offset((part.keys.start - overlap.block) / K::ELEMENTS * values.step),
            b: weights.add((part.keys.start - overlap.keys.start) / K::ELEMENTS * K::PANEL + column),
            c: to.add(column),
            rows,
            depth: part.keys.len().div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH),
            vectors: part.vectors.len(),
            factors: Some(factors.as_ptr().add(column)),
            format: Format::F32,
        });
    }
}
