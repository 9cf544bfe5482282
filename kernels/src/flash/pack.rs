//! Queries, keys and values on their way into matrix products.

use std::cell::Cell;

use super::ahead::ask_ahead;
use super::heuristics::Layout;
use super::params::{Problem, Units};
use super::tile::Tile;
use super::workspace::Workspace;
use crate::cpu::{Element, Kernel, Vector, load_first};

/// The words from one group of columns of values to the next: a cache line more than a block of keys has, since groups a power
/// of two apart would meet in the same set of the first cache, where each row of values is written to all of them.
pub(super) const fn value_group<K: Kernel>() -> usize {
    K::ROWS * K::BLOCK + 16
}

/// One block of keys and values of one key head.
pub(super) struct Block {
    pub b: usize,
    pub kv_head: usize,
    /// The first key, a multiple of the block's length.
    pub first: usize,
    /// The keys of the block, fewer than its length only at the end.
    pub keys: usize,
    /// Row-major keys in words, and the words from one to the next.
    pub k: *const f32,
    pub k_row: usize,
    /// Values in words, transposed: D_v is the rows of a product, keys its depth.
    pub v: *const f32,
    pub v_group: usize,
    pub v_row: usize,
    pub v_step: usize,
    non_finite: Cell<Option<bool>>,
}

impl Block {
    /// Copies the block into the workspace, in the order in which products read it, converted to f32 where the tier
    /// multiplies f32. A block serves all queries of a task, so that the copy is some hundredths of the work; read where
    /// it lies, it would collide with itself in the first cache at the usual power-of-two strides.
    ///
    /// # Safety
    /// As [`Vector`]; `first` lies within the keys.
    #[inline(always)]
    pub unsafe fn new<K: Kernel, E: Element>(
        problem: &Problem<E>,
        workspace: &mut Workspace,
        (b, kv_head): (usize, usize),
        first: usize,
    ) -> Self {
        let dims = &problem.dims;
        let keys = K::BLOCK.min(dims.t_kv - first);
        let layout = workspace.layout;
        // SAFETY: the caller's promise; the workspace was made for these sizes.
        unsafe {
            let to = workspace.keys.as_mut_ptr();
            for key in 0..keys {
                let row = problem.k.at([b, kv_head, first + key]);
                ask_ahead::<K::Vector, E>(row, problem.k.stride(2), dims.d);
                words::<K, E>(row, dims.d, to.add(key * layout.depth), layout.depth, 1.0);
            }
            let padded = keys.next_multiple_of(K::ROWS);
            to.add(keys * layout.depth).write_bytes(0, (padded - keys) * layout.depth);
            let (v_group, v_row, v_step) = if K::ELEMENTS == 2 {
                pair_values::<K, E>(problem, workspace, (b, kv_head), first..first + keys);
                (K::ROWS * (K::BLOCK / 2), K::BLOCK / 2, 1)
            } else {
                group_values::<K, E>(problem, workspace, (b, kv_head), first..first + keys);
                (value_group::<K>(), 1, K::ROWS)
            };
            let (k, v) = (workspace.keys.as_ptr(), workspace.values.as_ptr());
            Self {
                b,
                kv_head,
                first,
                keys,
                k,
                k_row: layout.depth,
                v,
                v_group,
                v_row,
                v_step,
                non_finite: Cell::new(None),
            }
        }
    }

    /// Whether a value of the block is infinite or NaN, which a weight of zero does not silence.
    ///
    /// # Safety
    /// As [`Vector`].
    #[inline(always)]
    pub unsafe fn has_non_finite_values<K: Kernel, E: Element>(&self, problem: &Problem<E>) -> bool {
        if let Some(known) = self.non_finite.get() {
            return known;
        }
        let (d_v, lanes) = (problem.dims.d_v, K::Vector::LANES);
        // SAFETY: the caller's promise; rows have D_v elements.
        let found = unsafe {
            let mut residue = K::Vector::splat(0.0);
            for key in self.first..self.first + self.keys {
                let row = problem.v.at([self.b, self.kv_head, key]);
                for d in (0..d_v).step_by(lanes) {
                    let value: K::Vector = load_first(row.add(d), lanes.min(d_v - d));
                    // 0 for what is finite, NaN for the rest.
                    residue = residue.add(value.sub(value));
                }
            }
            residue.sum().is_nan()
        };
        self.non_finite.set(Some(found));
        found
    }
}

/// One row of elements as words, times a factor, and zeros up to `padded` words. In pairs of bf16 the factor may only
/// change the sign or be zero.
///
/// # Safety
/// As [`Vector`]; `row` has `width` elements, `to` takes `padded` words.
#[inline(always)]
unsafe fn words<K: Kernel, E: Element>(row: *const E, width: usize, to: *mut f32, padded: usize, factor: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if K::ELEMENTS == 2 {
            let pairs: *mut E = to.cast();
            std::ptr::copy_nonoverlapping(row, pairs, width);
            pairs.add(width).write_bytes(0, 2 * padded - width);
            if factor != 1.0 {
                let bits: *mut u16 = to.cast();
                for i in 0..width {
                    *bits.add(i) = if factor == 0.0 { *bits.add(i) & 0x8000 } else { *bits.add(i) ^ 0x8000 };
                }
            }
            return;
        }
        let (lanes, factor) = (K::Vector::LANES, K::Vector::splat(factor));
        let mut at = 0;
        while at + lanes <= width {
            E::load::<K::Vector>(row.add(at)).mul(factor).store(to.add(at));
            at += lanes;
        }
        for rest in at..width {
            // One element at a time through the same conversion.
            let value: K::Vector = load_first(row.add(rest), 1);
            crate::cpu::store_first(value.mul(factor), to.add(rest), 1);
        }
        to.add(width).write_bytes(0, padded - width);
    }
}

/// The queries of a tile, transposed into a panel (D, panel) and multiplied by the unit of the scores.
///
/// # Safety
/// As [`Vector`]; the workspace has room for panel `index`.
#[inline(always)]
pub(super) unsafe fn queries<K: Kernel, E: Element>(
    problem: &Problem<E>,
    workspace: &mut Workspace,
    tile: &Tile,
    (b, kv_head): (usize, usize),
    (index, units): (usize, Units),
) {
    let (lanes, Layout { query, .. }) = (K::Vector::LANES, workspace.layout);
    let staging = workspace.staging.as_mut_ptr();
    // SAFETY: the caller's promise; staging holds `lanes` rows of `query` words.
    unsafe {
        let panel = workspace.queries.as_mut_ptr().add(index * query * K::PANEL);
        for vector in 0..tile.vectors {
            for lane in 0..lanes {
                let (row, to) = (tile.rows.start + vector * lanes + lane, staging.add(lane * query));
                if row < tile.rows.end {
                    let row = problem.row(kv_head, row);
                    let from = problem.q.at([b, row.head, row.query]);
                    ask_ahead::<K::Vector, E>(from, problem.q.stride(2), problem.dims.d);
                    words::<K, E>(from, problem.dims.d, to, query, units.query);
                } else {
                    to.write_bytes(0, query);
                }
            }
            for depth in (0..query).step_by(lanes) {
                let to = panel.add(depth * K::PANEL + vector * lanes);
                K::Vector::transpose(staging.add(depth), query, to, K::PANEL);
            }
        }
    }
}

/// The values of some keys in groups of as many columns as a product has rows: (D_v / rows, block, rows), the groups
/// [`value_group`] words apart.
///
/// # Safety
/// As [`Vector`]; at most a block of keys, all of which exist.
#[inline(always)]
unsafe fn group_values<K: Kernel, E: Element>(
    problem: &Problem<E>,
    workspace: &mut Workspace,
    (b, kv_head): (usize, usize),
    keys: std::ops::Range<usize>,
) {
    let (value, row) = (workspace.layout.value, workspace.staging.as_mut_ptr());
    let to = workspace.values.as_mut_ptr();
    // SAFETY: the caller's promise; staging holds a row, the values a block of rows.
    unsafe {
        for (at, key) in keys.enumerate() {
            let values = problem.v.at([b, kv_head, key]);
            ask_ahead::<K::Vector, E>(values, problem.v.stride(2), problem.dims.d_v);
            words::<K, E>(values, problem.dims.d_v, row, value, 1.0);
            for group in 0..value / K::ROWS {
                let to = to.add(group * value_group::<K>() + at * K::ROWS);
                std::ptr::copy_nonoverlapping(row.add(group * K::ROWS), to, K::ROWS);
            }
        }
    }
}

/// The values of some keys as pairs of neighbouring keys, transposed to (D_v, block / 2), and zeros to the end of the
/// block.
///
/// # Safety
/// As [`Vector`]; E is bf16; at most a block of keys, all of which exist.
#[inline(always)]
unsafe fn pair_values<K: Kernel, E: Element>(
    problem: &Problem<E>,
    workspace: &mut Workspace,
    (b, kv_head): (usize, usize),
    keys: std::ops::Range<usize>,
) {
    let (d_v, context, lanes) = (problem.dims.d_v, workspace.layout.context, K::Vector::LANES);
    let (pairs, half) = (workspace.staging.as_mut_ptr(), K::BLOCK / 2);
    let row = |key: usize| problem.v.at([b, kv_head, key]).cast::<u16>();
    // SAFETY: the caller's promise; staging holds half a block of rows of `context` words.
    unsafe {
        for pair in 0..half {
            let (first, to) = (keys.start + 2 * pair, pairs.add(pair * context).cast::<u32>());
            if first + 1 < keys.end {
                let (low, high) = (row(first), row(first + 1));
                ask_ahead::<K::Vector, _>(low, problem.v.stride(2), d_v);
                ask_ahead::<K::Vector, _>(high, problem.v.stride(2), d_v);
                for d in 0..d_v {
                    *to.add(d) = u32::from(*low.add(d)) | u32::from(*high.add(d)) << 16;
                }
            } else if first < keys.end {
                for d in 0..d_v {
                    *to.add(d) = u32::from(*row(first).add(d));
                }
            } else {
                to.write_bytes(0, d_v);
            }
            to.add(d_v).write_bytes(0, context - d_v);
        }
        for d in (0..context).step_by(lanes) {
            for pair in (0..half).step_by(lanes) {
                let to = workspace.values.as_mut_ptr().add(d * half + pair);
                K::Vector::transpose(pairs.add(pair * context + d), context, to, half);
            }
        }
    }
}
