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

use std::ops::Range;

use super::pack::Block;
use super::problem::{KeysValues, KvHead, ScoreInputs, ScoreUnits};
use super::softmax::TileSoftmax;
use super::tile::{Part, Tile};
use super::workspace::Workspace;
use crate::cpu::{Kernel, MAX_COLUMNS, Product, SimdTask, Vector, Words};
use crate::element::{Stored, load_first, store_first};

/// Tiles of one key head, whose queries are packed, against some of its keys. Leaves their state in the workspace.
pub(super) struct Prefill<'a, 'b, S> {
    pub inputs: &'a ScoreInputs<'b>,
    pub keys_values: &'a KeysValues<'b, S>,
    pub workspace: &'a mut Workspace,
    pub kv: KvHead,
    pub tiles: &'a [Tile],
    pub keys: Range<usize>,
}

impl<S: Stored> SimdTask for Prefill<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, keys_values, workspace, kv, tiles, keys } = self;
        let units = inputs.options.units(K::ELEMENTS == 2);
        workspace.state.clear(tiles.len());
        // SAFETY: the processor has the tier of K; the workspace was made for the call and has a panel for each tile.
        unsafe {
            let _tiles = K::configure_tiles();
            let start = tiles.iter().map(|tile| tile.some.start).min().unwrap_or(0).max(keys.start);
            let end = tiles.iter().map(|tile| tile.some.end).max().unwrap_or(0).min(keys.end);
            let first_block = start / K::BLOCK * K::BLOCK;
            for first in (first_block..end).step_by(K::BLOCK) {
                let block = Block::new::<K, S>(keys_values, inputs.dims, workspace, kv, first);
                for (index, tile) in tiles.iter().enumerate() {
                    Step { inputs, keys_values, block: &block, tile, index, units }.run::<K>(workspace);
                }
            }
        }
    }
}

/// One tile against one block.
struct Step<'a, 'b, S> {
    inputs: &'a ScoreInputs<'b>,
    keys_values: &'a KeysValues<'b, S>,
    block: &'a Block,
    tile: &'a Tile,
    /// The tile's panel in the workspace.
    index: usize,
    units: ScoreUnits,
}

impl<S: Stored> Step<'_, '_, S> {
    /// # Safety
    /// The processor has the tier of K, whose tiles are configured; the workspace holds the block and the tile's queries.
    #[inline(always)]
    unsafe fn run<K: Kernel>(&self, workspace: &mut Workspace) {
        let &Self { inputs, keys_values, block, tile, index, units } = self;
        let end = tile.some.end.min(block.keys.end);
        // Keys are rows of the first product and depth of the second, and begin at whole multiples of both; the ones before
        // the first that is seen are hidden.
        let whole = K::ROWS.max(K::DEPTH * K::ELEMENTS);
        let skipped = tile.some.start.saturating_sub(block.keys.start) / whole * whole;
        let first = block.keys.start + skipped;
        if first >= end {
            return;
        }
        let keys = end - first;
        let depth = keys.div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH);
        // The product over values reads `depth` words of keys, of which those past the end weigh nothing.
        let read = (first + depth * K::ELEMENTS).min(block.keys.end);
        let all_seen = tile.every.start <= first && read <= tile.every.end && inputs.options.keep.is_none();
        let sizes = workspace.sizes;
        let (scores, pairs) = (workspace.scores.as_mut_ptr(), workspace.weights.as_mut_ptr());
        let state = workspace.state.of_panel(index);
        let mut factors = [0f32; MAX_COLUMNS];
        // SAFETY: as this method's contract; a block has `BLOCK` rows, which is a multiple of `ROWS`.
        unsafe {
            let queries = workspace.queries.as_ptr().add(index * sizes.query * K::PANEL);
            let product = KeyProduct { block, depth: sizes.depth, first, queries, scores };
            let parts = tile.parts(first..end, whole);
            parts.iter().for_each(|part| product.multiply::<K>(part));
            K::run_simd(TileSoftmax {
                inputs: *inputs,
                tile,
                units,
                first,
                keys,
                depth,
                is_masked: !all_seen,
                scores,
                pairs,
                staging: workspace.staging.as_mut_ptr(),
                state,
                factors: factors.as_mut_ptr(),
            });
            let weights = if K::ELEMENTS == 1 { scores } else { pairs };
            let values = ValueProduct { block, rows: sizes.value, first, weights, context: state.context };
            let only_seen = !all_seen && block.has_non_finite_values::<K, S>(keys_values, inputs.dims.d_v);
            for part in parts.iter() {
                match only_seen {
                    true => values.add_seen::<K, S>(self, part, &factors),
                    false => values.add::<K>(part, &factors),
                }
                // The first part of a vector corrected its context; the next ones only add.
                factors[part.vectors.start * K::Vector::LANES..part.vectors.end * K::Vector::LANES].fill(1.0);
            }
        }
    }
}

/// The product of keys and a tile's queries, over parts of both.
struct KeyProduct<'a> {
    block: &'a Block,
    depth: usize,
    /// The first key of the scores.
    first: usize,
    queries: *const f32,
    scores: *mut f32,
}

impl KeyProduct<'_> {
    /// # Safety
    /// As [`Step::run`]; the part begins at a whole group of keys.
    unsafe fn multiply<K: Kernel>(&self, part: &Part) {
        let column = part.vectors.start * K::Vector::LANES;
        // SAFETY: as this method's contract.
        unsafe {
            K::multiply::<Words>(&Product {
                a: self.block.k.add((part.keys.start - self.block.keys.start) * self.block.k_row),
                a_group: K::ROWS * self.block.k_row,
                a_row: self.block.k_row,
                a_step: 1,
                b: self.queries.add(column),
                c: self.scores.add((part.keys.start - self.first) * K::PANEL + column),
                rows: part.keys.len().next_multiple_of(K::ROWS),
                depth: self.depth,
                vectors: part.vectors.len(),
                factors: None,
                has_minimums: false,
            });
        }
    }
}

/// The product of values and a tile's weights, over parts of both. Each part is summed from zero and added to the context
/// times its factors.
struct ValueProduct<'a> {
    block: &'a Block,
    /// D_v, as a product takes it.
    rows: usize,
    /// The first key of the weights.
    first: usize,
    weights: *const f32,
    context: *mut f32,
}

impl ValueProduct<'_> {
    /// # Safety
    /// As [`Step::run`]; the part begins at a whole step of depth.
    unsafe fn add<K: Kernel>(&self, part: &Part, factors: &[f32; MAX_COLUMNS]) {
        let column = part.vectors.start * K::Vector::LANES;
        // SAFETY: as this method's contract.
        unsafe {
            K::multiply::<Words>(&Product {
                a: self.block.v.add((part.keys.start - self.block.keys.start) / K::ELEMENTS * self.block.v_step),
                a_group: self.block.v_group,
                a_row: self.block.v_row,
                a_step: self.block.v_step,
                b: self.weights.add((part.keys.start - self.first) / K::ELEMENTS * K::PANEL + column),
                c: self.context.add(column),
                rows: self.rows,
                depth: part.keys.len().div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH),
                vectors: part.vectors.len(),
                factors: Some(factors.as_ptr().add(column)),
                has_minimums: false,
            });
        }
    }

    /// The same over values that are not all finite: zero times NaN is NaN, so each query sums the keys that it sees and no
    /// others. One query after the other, since such values are rare; finite values get the same sums as elsewhere.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_seen<K: Kernel, S: Stored>(&self, step: &Step<S>, part: &Part, factors: &[f32; MAX_COLUMNS]) {
        let &Step { inputs, keys_values, tile, .. } = step;
        let (kv, dims, lanes) = (self.block.kv, &inputs.dims, K::Vector::LANES);
        let d_v = dims.d_v;
        let mut sums = vec![0f32; d_v.next_multiple_of(lanes)];
        let columns = part.vectors.start * lanes..tile.rows.len().min(part.vectors.end * lanes);
        for column in columns {
            let row = dims.row(kv, tile.rows.start + column);
            sums.fill(0.0);
            // SAFETY: as this method's contract.
            unsafe {
                for key in part.keys.clone() {
                    if !tile.sees(column, key) || !inputs.is_kept(row, key) {
                        continue;
                    }
                    let word = *self.weights.add((key - self.first) / K::ELEMENTS * K::PANEL + column);
                    let weight = match (K::ELEMENTS, (key - self.first) % 2) {
                        (1, _) => word,
                        (_, 0) => f32::from_bits(word.to_bits() << 16),
                        _ => f32::from_bits(word.to_bits() & 0xffff_0000),
                    };
                    let weight = K::Vector::splat(weight * keys_values.v.scale(kv, key));
                    let values = keys_values.v.row(kv, key);
                    for d in (0..d_v).step_by(lanes) {
                        let value: K::Vector = load_first(values.add(d), lanes.min(d_v - d));
                        let sum = K::Vector::load(sums.as_ptr().add(d));
                        weight.mul_add(value, sum).store(sums.as_mut_ptr().add(d));
                    }
                }
                let factor = K::Vector::splat(factors[column]);
                for (d, &sum) in sums[..d_v].iter().enumerate() {
                    let at = self.context.add(d * K::PANEL + column);
                    store_first(K::Vector::splat(*at).mul_add(factor, K::Vector::splat(sum)), at, 1);
                }
            }
        }
    }
}
