//! Queries, keys and values on their way into matrix products.

use std::cell::Cell;
use std::ops::Range;

use half::bf16;

use super::heuristics::PackedSizes;
use super::problem::{Dims, KeysValues, KvHead, ScoreInputs, StoredRows, Strided};
use super::tile::Tile;
use super::workspace::Workspace;
use crate::cpu::{Kernel, SimdTask, Vector};
use crate::element::{Kernels, Stored, load_first, store_first, widen_row};

/// How many rows ahead are prefetched: enough to cover the latency of memory at a row every few dozen cycles.
const PREFETCH_ROWS: usize = 16;

/// Prefetches `width` elements of the row [`PREFETCH_ROWS`] rows after this one, which need not exist.
///
/// # Safety
/// The processor has the tier of V.
#[inline(always)]
pub(super) unsafe fn prefetch_row<V: Vector, E>(row: *const E, stride: usize, width: usize) {
    let ahead = row.wrapping_add(PREFETCH_ROWS * stride).cast::<u8>();
    for line in (0..width * size_of::<E>()).step_by(64) {
        // SAFETY: the processor has the tier, and an address to prefetch need not be valid.
        unsafe { V::prefetch(ahead.wrapping_add(line)) };
    }
}

/// Whether a value of some keys, of `d_v` numbers each, is infinite or NaN, which a weight of zero does not silence.
///
/// # Safety
/// The processor has the tier of K; the keys belong to the call.
pub(super) unsafe fn has_non_finite_values<K: Kernel, S: Stored>(
    values: &StoredRows<S>,
    d_v: usize,
    kv: KvHead,
    keys: Range<usize>,
) -> bool {
    struct Find<'a, 'b, S> {
        values: &'a StoredRows<'b, S>,
        d_v: usize,
        kv: KvHead,
        keys: Range<usize>,
        found: &'a mut bool,
    }
    impl<S: Stored> SimdTask for Find<'_, '_, S> {
        #[inline(always)]
        unsafe fn run<K: Kernel>(self) {
            let (d_v, lanes) = (self.d_v, K::Vector::LANES);
            // SAFETY: the processor has the tier of K; a row of values has D_v elements.
            unsafe {
                let mut residue = K::Vector::splat(0.0);
                for key in self.keys {
                    let row = self.values.row(self.kv, key);
                    for d in (0..d_v).step_by(lanes) {
                        let value: K::Vector = load_first(row.add(d), lanes.min(d_v - d));
                        // 0 for what is finite, NaN for the rest.
                        residue = residue.add(value.sub(value));
                    }
                }
                *self.found = residue.sum().is_nan();
            }
        }
    }
    if S::IS_SCALED {
        return keys.into_iter().any(|key| !values.scale(kv, key).is_finite());
    }
    let mut found = false;
    // SAFETY: as this function's contract; the tier includes that of its kernel for f32.
    unsafe { K::F32::run_simd(Find { values, d_v, kv, keys, found: &mut found }) };
    found
}

/// The words from one group of columns of values to the next: a cache line more than a block of keys has, since groups a power
/// of two apart would share a set of the first cache, where each row of values is written to all of them.
pub(super) const fn value_group<K: Kernel>() -> usize {
    K::ROWS * K::BLOCK + 16
}

/// One block of keys and values of one key head, packed.
pub(super) struct Block {
    pub kv: KvHead,
    /// The keys, from a multiple of the block's length on; fewer than its length only at the end.
    pub keys: Range<usize>,
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
    /// multiplies f32. A block serves all queries of a task, so that the copy is some hundredths of the work; read in place,
    /// its rows would share few sets of the first cache at the usual power-of-two strides.
    ///
    /// # Safety
    /// The processor has the tier of K; `first` lies within the keys; the workspace was made for the call.
    #[inline(always)]
    pub unsafe fn new<K: Kernel, S: Stored>(
        keys_values: &KeysValues<S>,
        dims: Dims,
        workspace: &mut Workspace,
        kv: KvHead,
        first: usize,
    ) -> Self {
        let KeysValues { k, v } = keys_values;
        let keys = first..dims.t_kv.min(first + K::BLOCK);
        let depth = workspace.sizes.depth;
        // SAFETY: as this function's contract; the workspace holds a block of keys and of values.
        unsafe {
            let to = workspace.keys.as_mut_ptr();
            for (index, key) in keys.clone().enumerate() {
                let row = k.row(kv, key);
                prefetch_row::<K::Vector, S>(row, k.stride(), dims.d);
                pack_row::<K, S>(row, dims.d, to.add(index * depth), depth, k.scale(kv, key));
            }
            let padded = keys.len().next_multiple_of(K::ROWS);
            to.add(keys.len() * depth).write_bytes(0, (padded - keys.len()) * depth);
            let (v_group, v_row, v_step) = if K::ELEMENTS == 2 {
                pack_value_pairs::<K, S>(v, dims.d_v, workspace, kv, keys.clone());
                (K::ROWS * (K::BLOCK / 2), K::BLOCK / 2, 1)
            } else {
                pack_value_groups::<K, S>(v, dims.d_v, workspace, kv, keys.clone());
                (value_group::<K>(), 1, K::ROWS)
            };
            let (k, v) = (workspace.keys.as_ptr(), workspace.values.as_ptr());
            Self { kv, keys, k, k_row: depth, v, v_group, v_row, v_step, non_finite: Cell::new(None) }
        }
    }

    /// [`has_non_finite_values`], found out once.
    ///
    /// # Safety
    /// The processor has the tier of K; the block is of these keys and values.
    pub unsafe fn has_non_finite_values<K: Kernel, S: Stored>(&self, of: &KeysValues<S>, d_v: usize) -> bool {
        self.non_finite.get().unwrap_or_else(|| {
            // SAFETY: as this method's contract; the block's keys belong to the call.
            let found = unsafe { has_non_finite_values::<K, S>(&of.v, d_v, self.kv, self.keys.clone()) };
            self.non_finite.set(Some(found));
            found
        })
    }
}

/// One row as words, times a factor, and zeros up to `padded` words. The factor of a row that is bf16 already, and stays so in
/// pairs, may only change the sign or be zero.
///
/// # Safety
/// The processor has the tier of K; `row` is valid for `width` elements, `to` for writes of `padded` words.
#[inline(always)]
unsafe fn pack_row<K: Kernel, S: Stored>(row: *const S, width: usize, to: *mut f32, padded: usize, factor: f32) {
    // SAFETY: as this function's contract; pairs are two elements of 16 bits.
    unsafe {
        if K::ELEMENTS == 1 {
            return widen_row::<S, K::Vector>(row, width, to, padded, factor);
        }
        let pairs: *mut bf16 = to.cast();
        pairs.add(width).write_bytes(0, 2 * padded - width);
        if S::IS_SCALED {
            let (lanes, factor) = (K::Vector::LANES, K::Vector::splat(factor));
            for at in (0..width).step_by(lanes) {
                let n = lanes.min(width - at);
                let numbers: K::Vector = load_first(row.add(at), n);
                store_first(numbers.mul(factor), pairs.add(at), n);
            }
            return;
        }
        std::ptr::copy_nonoverlapping(row, pairs.cast(), width);
        if factor != 1.0 {
            let bits: *mut u16 = to.cast();
            for i in 0..width {
                *bits.add(i) = if factor == 0.0 { *bits.add(i) & 0x8000 } else { *bits.add(i) ^ 0x8000 };
            }
        }
    }
}

/// The queries of tiles, each transposed into a panel (D, panel) of the workspace and multiplied by the unit of the scores.
pub(super) struct PackQueries<'a, 'b, E> {
    pub q: &'a Strided<'b, E, 3>,
    pub inputs: &'a ScoreInputs<'b>,
    /// Made for the call, with a panel for each tile.
    pub workspace: &'a mut Workspace,
    pub tiles: &'a [Tile],
}

impl<E: Kernels> SimdTask for PackQueries<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { q, inputs, workspace, tiles } = self;
        let (lanes, PackedSizes { query, .. }) = (K::Vector::LANES, workspace.sizes);
        let (dims, staging) = (&inputs.dims, workspace.staging.as_mut_ptr());
        let factor = inputs.options.units(K::ELEMENTS == 2).query;
        for (index, tile) in tiles.iter().enumerate() {
            // SAFETY: the processor has the tier of K; the staging memory holds `lanes` rows of `query` words.
            unsafe {
                let panel = workspace.queries.as_mut_ptr().add(index * query * K::PANEL);
                for vector in 0..tile.vectors {
                    for lane in 0..lanes {
                        let (row, to) = (tile.rows.start + vector * lanes + lane, staging.add(lane * query));
                        if row < tile.rows.end {
                            let from = q.query(dims.row(tile.kv, row));
                            prefetch_row::<K::Vector, E>(from, q.strides[2], dims.d);
                            pack_row::<K, E>(from, dims.d, to, query, factor);
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
    }
}

/// The values of some keys in groups of as many columns as a product has rows: (D_v / rows, block, rows), the groups
/// [`value_group`] words apart.
///
/// # Safety
/// The processor has the tier of K; the keys are at most a block of the call; the workspace was made for it.
#[inline(always)]
unsafe fn pack_value_groups<K: Kernel, S: Stored>(
    v: &StoredRows<S>,
    d_v: usize,
    workspace: &mut Workspace,
    kv: KvHead,
    keys: Range<usize>,
) {
    let value = workspace.sizes.value;
    let (row, to) = (workspace.staging.as_mut_ptr(), workspace.values.as_mut_ptr());
    // SAFETY: as this function's contract; the staging memory holds a row, the values a block of rows.
    unsafe {
        for (at, key) in keys.enumerate() {
            let values = v.row(kv, key);
            prefetch_row::<K::Vector, S>(values, v.stride(), d_v);
            pack_row::<K, S>(values, d_v, row, value, v.scale(kv, key));
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
/// As [`pack_value_groups`]; S is bf16 or scaled.
#[inline(always)]
unsafe fn pack_value_pairs<K: Kernel, S: Stored>(
    v: &StoredRows<S>,
    d_v: usize,
    workspace: &mut Workspace,
    kv: KvHead,
    keys: Range<usize>,
) {
    let (context, lanes) = (workspace.sizes.context, K::Vector::LANES);
    let (pairs, half) = (workspace.staging.as_mut_ptr(), K::BLOCK / 2);
    let row = |key: usize| v.row(kv, key).cast::<u16>();
    // SAFETY: as this function's contract; the staging memory holds half a block of rows of `context` words.
    unsafe {
        for pair in 0..half {
            let (first, to) = (keys.start + 2 * pair, pairs.add(pair * context).cast::<u32>());
            if first < keys.end && S::IS_SCALED {
                let second = if first + 1 < keys.end { first + 1 } else { first };
                let (low, high) = (v.row(kv, first), v.row(kv, second));
                prefetch_row::<K::Vector, _>(low, v.stride(), d_v);
                prefetch_row::<K::Vector, _>(high, v.stride(), d_v);
                let factors = [v.scale(kv, first), if second > first { v.scale(kv, second) } else { 0.0 }];
                let [low_factor, high_factor] = factors.map(|factor| K::Vector::splat(factor));
                for d in (0..d_v).step_by(lanes) {
                    let n = lanes.min(d_v - d);
                    let (low, high): (K::Vector, K::Vector) = (load_first(low.add(d), n), load_first(high.add(d), n));
                    K::store_pairs(low.mul(low_factor), high.mul(high_factor), to.cast::<f32>().add(d));
                }
            } else if first + 1 < keys.end {
                let (low, high) = (row(first), row(first + 1));
                prefetch_row::<K::Vector, _>(low, v.stride(), d_v);
                prefetch_row::<K::Vector, _>(high, v.stride(), d_v);
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
