//! Many queries: tiles of queries against blocks of keys.
//!
//! ```text
//! for each block of keys:                                  packed once for all queries of the task
//!     for each tile of queries that sees some of it:       (queries are columns)
//!         scores  = keys · queries                         (block, panel)
//!         scores  = softcap, ALiBi, bias; -inf where hidden
//!         weights = 2^(scores - largest so far)            in place
//!         sum     = sum · factor + Σ weights               factor = 2^(largest before - largest so far)
//!         context = context · factor + valuesᵀ · weights   (D_v, panel)
//! context / sum, transposed, to the output
//! ```

use super::online_softmax::SoftmaxStep;
use super::pack::{self, Block};
use super::params::{Problem, Units};
use super::scores::TileScores;
use super::tile::{Part, Tile};
use super::workspace::{PanelState, Workspace};
use crate::cpu::{Element, Job, Kernel, MOST_COLUMNS, Product, Vector, load_first, store_first};
use std::ops::Range;

/// Some query rows of one key head against some of its keys. Leaves their state in the workspace.
pub(super) struct Prefill<'a, 'b, E> {
    pub problem: &'a Problem<'b, E>,
    pub workspace: &'a mut Workspace,
    pub b: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
}

impl<E: Element> Job for Prefill<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { problem, workspace, b, kv_head, rows, keys } = self;
        let units = problem.scores.units(K::ELEMENTS == 2);
        let tiles: Vec<_> = rows
            .clone()
            .step_by(K::PANEL)
            .map(|first| Tile::new::<K, E>(problem, b, kv_head, first..rows.end.min(first + K::PANEL)))
            .collect();
        workspace.state.clear(tiles.len());
        // SAFETY: the caller's promise; the workspace has a panel for each tile.
        unsafe {
            for (index, tile) in tiles.iter().enumerate() {
                pack::queries::<K, E>(problem, workspace, tile, (b, kv_head), (index, units));
            }
            let start = tiles.iter().map(|tile| tile.some.start).min().unwrap_or(0).max(keys.start);
            let end = tiles.iter().map(|tile| tile.some.end).max().unwrap_or(0).min(keys.end);
            let first_block = start / K::BLOCK * K::BLOCK;
            for first in (first_block..end).step_by(K::BLOCK) {
                let block = Block::new::<K, E>(problem, workspace, (b, kv_head), first);
                for (index, tile) in tiles.iter().enumerate() {
                    let panel = workspace.state.panel(index);
                    step::<K, E>(problem, workspace, &block, (index, tile, panel), units);
                }
            }
        }
    }
}

/// One tile against one block.
///
/// # Safety
/// As [`Job`].
#[inline(always)]
unsafe fn step<K: Kernel, E: Element>(
    problem: &Problem<E>,
    workspace: &mut Workspace,
    block: &Block,
    (index, tile, panel): (usize, &Tile, PanelState),
    units: Units,
) {
    let end = tile.some.end.min(block.first + block.keys);
    // Keys are rows of the first product and depth of the second, and begin at whole multiples of both; the ones before the
    // first that is seen are hidden.
    let whole = K::ROWS.max(K::DEPTH * K::ELEMENTS);
    let skipped = tile.some.start.saturating_sub(block.first) / whole * whole;
    let first = block.first + skipped;
    if first >= end {
        return;
    }
    let keys = end - first;
    let depth = keys.div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH);
    // The product over values reads `depth` words of keys, of which those past the end weigh nothing.
    let read = (first + depth * K::ELEMENTS).min(block.first + block.keys);
    let all_seen = tile.every.start <= first && read <= tile.every.end && problem.scores.keep.is_none();
    let layout = workspace.layout;
    let weights = if K::ELEMENTS == 1 { workspace.scores.as_mut_ptr() } else { workspace.weights.as_mut_ptr() };
    let mut factors = [0f32; MOST_COLUMNS];
    // SAFETY: the caller's promise; a block has `BLOCK` rows, which is a multiple of `ROWS`.
    unsafe {
        let product = KeyProduct {
            block,
            depth: layout.depth,
            first,
            queries: workspace.queries.as_ptr().add(index * layout.query * K::PANEL),
            scores: workspace.scores.as_mut_ptr(),
        };
        let parts = tile.parts(first..end, whole);
        parts.iter().for_each(|part| product.multiply::<K>(part));
        let scores =
            TileScores { scores: workspace.scores.as_mut_ptr(), staging: workspace.staging.as_mut_ptr(), first, keys };
        if problem.scores.change() {
            scores.change::<K, E>(problem, tile, block, units);
        }
        if !all_seen {
            scores.hide::<K, E>(problem, tile, block);
        }
        SoftmaxStep {
            scores: workspace.scores.as_mut_ptr(),
            pairs: workspace.weights.as_mut_ptr(),
            keys,
            depth,
            power: units.power,
            max: panel.max,
            sum: panel.sum,
            factors: factors.as_mut_ptr(),
        }
        .run::<K>(tile.vectors);
        let values = ValueProduct { block, rows: layout.value, first, weights, context: panel.context };
        let only_seen = !all_seen && block.has_non_finite_values::<K, E>(problem);
        for part in parts.iter() {
            match only_seen {
                true => values.add_seen::<K, E>(problem, tile, part, &factors),
                false => values.add::<K>(part, &factors),
            }
            // What is summed in the next part has been corrected.
            factors[part.vectors.start * K::Vector::LANES..part.vectors.end * K::Vector::LANES].fill(1.0);
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
    /// As [`Job`]; the part begins at a whole group of keys.
    unsafe fn multiply<K: Kernel>(&self, part: &Part) {
        let column = part.vectors.start * K::Vector::LANES;
        // SAFETY: the caller's promise.
        unsafe {
            K::multiply(&Product {
                a: self.block.k.add((part.keys.start - self.block.first) * self.block.k_row),
                a_group: K::ROWS * self.block.k_row,
                a_row: self.block.k_row,
                a_step: 1,
                b: self.queries.add(column),
                c: self.scores.add((part.keys.start - self.first) * K::PANEL + column),
                rows: part.keys.len().next_multiple_of(K::ROWS),
                depth: self.depth,
                vectors: part.vectors.len(),
                factors: None,
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
    /// As [`Job`]; the part begins at a whole step of depth.
    unsafe fn add<K: Kernel>(&self, part: &Part, factors: &[f32; MOST_COLUMNS]) {
        let column = part.vectors.start * K::Vector::LANES;
        // SAFETY: the caller's promise.
        unsafe {
            K::multiply(&Product {
                a: self.block.v.add((part.keys.start - self.block.first) / K::ELEMENTS * self.block.v_step),
                a_group: self.block.v_group,
                a_row: self.block.v_row,
                a_step: self.block.v_step,
                b: self.weights.add((part.keys.start - self.first) / K::ELEMENTS * K::PANEL + column),
                c: self.context.add(column),
                rows: self.rows,
                depth: part.keys.len().div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH),
                vectors: part.vectors.len(),
                factors: Some(factors.as_ptr().add(column)),
            });
        }
    }

    /// The same over values that are not all finite: zero times NaN is NaN, so each query takes the keys that it sees and no
    /// others. One query after the other, since such values are rare; what is finite gets the same sums as ever.
    ///
    /// # Safety
    /// As [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_seen<K: Kernel, E: Element>(
        &self,
        problem: &Problem<E>,
        tile: &Tile,
        part: &Part,
        factors: &[f32; MOST_COLUMNS],
    ) {
        let (&Block { b, kv_head, .. }, d_v, lanes) = (self.block, problem.dims.d_v, K::Vector::LANES);
        let mut sums = vec![0f32; d_v.next_multiple_of(lanes)];
        let columns = part.vectors.start * lanes..tile.rows.len().min(part.vectors.end * lanes);
        for column in columns {
            let row = problem.row(kv_head, tile.rows.start + column);
            sums.fill(0.0);
            // SAFETY: the caller's promise.
            unsafe {
                for key in part.keys.clone() {
                    let kept =
                        problem.scores.keep.as_ref().is_none_or(|keep| *keep.at([b, row.head, row.query, key]) != 0);
                    if !kept || !tile.sees(column, key) {
                        continue;
                    }
                    let word = *self.weights.add((key - self.first) / K::ELEMENTS * K::PANEL + column);
                    let weight = K::Vector::splat(match (K::ELEMENTS, (key - self.first) % 2) {
                        (1, _) => word,
                        (_, 0) => f32::from_bits(word.to_bits() << 16),
                        _ => f32::from_bits(word.to_bits() & 0xffff_0000),
                    });
                    let values = problem.v.at([b, kv_head, key]);
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
