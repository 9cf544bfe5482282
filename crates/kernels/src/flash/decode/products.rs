//! The two products of decoding: queries times keys, and weights times values. Both read their elements once.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector, add_products};
use crate::flash::inputs::CheckedCall;
use crate::flash::kv_rows::{KvHeadRows, KvMatrix, KvRun, prefetch_row};
use crate::flash::tile::Tile;
use crate::number::{Stored, load_first};
use candle_attention_call::KvHead;

/// The number of keys whose rows are read for all groups of queries, and whose values for all of D_v, before the next
/// keys: they stay in the first cache meanwhile.
pub(super) const KEY_BLOCK: usize = 32;

/// The most vectors of sums of outputs that are in registers.
const MAX_SUMS: usize = 16;
/// The most vectors of values that are added to these sums at a time.
const MAX_VECTORS: usize = 8;

/// The products of a group of R query rows of one key head, a power of two, with some of the keys of one part, or of
/// their weights with the values.
pub(super) struct Products {
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// The number R of query heads that read one key head.
    pub group: usize,
    /// (keys, R), rounded up to a vector: takes the scores, or contains the weights.
    pub scores_or_weights: *mut f32,
    pub operand: Operand,
}

/// The other operand of the products.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// Products of keys with queries: R rows of D, with zeros up to whole vectors.
    Queries(*const f32),
    /// Products of values with weights, added to the outputs.
    Outputs(OutputRows),
}

/// R rows of D_v, padded to whole vectors, which values are added to.
#[derive(Clone, Copy)]
pub(super) struct OutputRows {
    pub at: *mut f32,
    /// The words from one row to the next.
    pub stride: usize,
}

/// Computes products with the keys or the values.
pub(super) struct Multiply<'a, S> {
    pub rows: &'a KvMatrix<'a, S>,
    pub products: &'a Products,
}

/// Products with copies of what describes them, since loops would read references again after each store.
struct RowProducts<'a, S> {
    rows: KvMatrix<'a, S>,
    products: Products,
}

impl<S: Stored> SimdTask for Multiply<'_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let products = Products { keys: self.products.keys.clone(), ..*self.products };
        let own = RowProducts { rows: *self.rows, products };
        // SAFETY: by the contract of `SimdTask`.
        unsafe {
            match own.products.group {
                1 => own.multiply::<K::Vector>(1),
                2 => own.multiply::<K::Vector>(2),
                8 if const { K::Vector::LANES == MAX_LANES } => own.multiply::<K::Vector>(8),
                _ => own.multiply::<K::Vector>(4),
            }
        }
    }
}

/// R is an argument, which is a constant after inlining into [`SimdTask::run`].
impl<S: Stored> RowProducts<'_, S> {
    /// Computes the products of R rows.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the keys belong to the call; the pointers are valid for the sizes
    /// in the fields.
    #[inline(always)]
    unsafe fn multiply<V: Vector>(&self, r: usize) {
        // SAFETY: as this method's contract.
        unsafe {
            match self.products.operand {
                Operand::Queries(queries) => {
                    self.score::<V>(r, queries);
                    self.scale(r);
                }
                // The weights of scaled values become the weights of their codes.
                Operand::Outputs(outputs) => {
                    self.scale(r);
                    for first in self.products.keys.clone().step_by(KEY_BLOCK) {
                        let keys = first..self.products.keys.end.min(first + KEY_BLOCK);
                        self.accumulate::<V>(r, keys, outputs);
                    }
                }
            }
        }
    }

    /// Computes scores, for the keys whose products fill a vector at a time.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn score<V: Vector>(&self, r: usize, queries: *const f32) {
        let Products { kv, keys, scores_or_weights, .. } = &self.products;
        let d = self.rows.width;
        let lanes = V::LANES;
        let together = lanes / r;
        let whole = d / lanes * lanes;
        let are_listed = self.rows.has_runs_of_one_key();
        let mut rest = keys.clone();
        while !rest.is_empty() {
            let run = self.rows.run(*kv, rest.clone());
            let count = if are_listed { rest.len() } else { run.keys.len() };
            let scores = scores_or_weights.wrapping_add((rest.start - keys.start) * r);
            for first in (0..count).step_by(together) {
                // SAFETY: as this method's contract; the rows of keys have D elements. The scores past the end of the
                // run are overwritten by the next run, or masked later.
                unsafe {
                    let from = if are_listed {
                        self.prefetched_listed_keys::<V>(rest.start + first..rest.end, together)
                    } else {
                        self.prefetched_keys::<V>(&run, first, together)
                    };
                    let mut sums = [V::splat(0.0); MAX_LANES];
                    for at in (0..whole).step_by(lanes) {
                        self.add_keys(r, &mut sums, &from, at..at + lanes, queries);
                    }
                    if whole < d {
                        self.add_keys(r, &mut sums, &from, whole..d, queries);
                    }
                    V::sum_each(&sums).store(scores.add(first * r));
                }
            }
            rest.start += count;
        }
    }

    /// Returns the rows of the first `count` of some keys that are in pages of one key each. Past the end the last key
    /// is repeated.
    ///
    /// # Safety
    /// The processor has the instruction set of V.
    #[inline(always)]
    unsafe fn prefetched_listed_keys<V: Vector>(&self, keys: Range<usize>, count: usize) -> [*const S; MAX_LANES] {
        let mut rows = [std::ptr::null(); MAX_LANES];
        for (k, row) in rows[..count].iter_mut().enumerate() {
            let key = (keys.start + k).min(keys.end - 1);
            let run = self.rows.run(self.products.kv, key..key + 1);
            *row = run.first;
            // SAFETY: as this method's contract.
            unsafe { prefetch_row::<V, S>(run.ahead, self.rows.width) };
        }
        rows
    }

    /// Returns the rows of `count` keys of a run from its key `first` on. Past the end the last key is repeated.
    ///
    /// # Safety
    /// The processor has the instruction set of V.
    #[inline(always)]
    unsafe fn prefetched_keys<V: Vector>(&self, run: &KvRun<S>, first: usize, count: usize) -> [*const S; MAX_LANES] {
        let mut keys = [run.first; MAX_LANES];
        for (k, key) in keys[..count].iter_mut().enumerate() {
            let offset = (first + k).min(run.keys.len() - 1).wrapping_mul(run.stride);
            *key = run.first.wrapping_add(offset);
            // SAFETY: as this method's contract.
            unsafe { prefetch_row::<V, S>(run.ahead.wrapping_add(offset), self.rows.width) };
        }
        keys
    }

    /// Adds the products of R queries with the keys that fill the sums, over a vector of D or the rest of D.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); the keys have the elements.
    #[inline(always)]
    unsafe fn add_keys<V: Vector>(
        &self,
        r: usize,
        sums: &mut [V; MAX_LANES],
        keys: &[*const S; MAX_LANES],
        elements: Range<usize>,
        queries: *const f32,
    ) {
        let at = elements.start;
        let filled = elements.len();
        let width = self.rows.width.next_multiple_of(V::LANES);
        for (k, key_sums) in sums[..V::LANES].chunks_exact_mut(r).enumerate() {
            // SAFETY: as this method's contract.
            unsafe {
                let key: V = load_first(keys[k].add(at), filled);
                for (row, sum) in key_sums.iter_mut().enumerate() {
                    *sum = key.mul_add(V::load(queries.add(row * width + at)), *sum);
                }
            }
        }
    }

    /// Multiplies the R numbers of each key by its scale, if it has one.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn scale(&self, r: usize) {
        if !S::IS_SCALED {
            return;
        }
        let Products { kv, keys, scores_or_weights, .. } = &self.products;
        for run in self.rows.runs(*kv, keys.clone()) {
            let numbers = scores_or_weights.wrapping_add((run.keys.start - keys.start) * r);
            for key in 0..run.keys.len() {
                // SAFETY: as this method's contract.
                unsafe {
                    let scale = run.scale(key);
                    for row in 0..r {
                        *numbers.add(key * r + row) *= scale;
                    }
                }
            }
        }
    }

    /// Adds the weighted values of some keys to the outputs.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); the keys have weights.
    #[inline(always)]
    unsafe fn accumulate<V: Vector>(&self, r: usize, keys: Range<usize>, outputs: OutputRows) {
        let most = V::ROWS * V::VECTORS;
        let mut d = 0;
        // SAFETY: as this method's contract; `d` counts whole vectors within D_v, then the rest of it.
        unsafe {
            // Eight sums cover the latency of a multiply-add; registers for sixteen halve the loads of weights. No more
            // than the tile of a product has, which is four on the scalar instruction set.
            if r == 1 && 8 <= most {
                self.accumulate_columns::<V>(r, 8, &keys, outputs, &mut d);
            }
            if (r <= 2 || V::LANES == MAX_LANES) && r <= 4 && 4 * r <= most {
                self.accumulate_columns::<V>(r, 4, &keys, outputs, &mut d);
            }
            if 2 * r <= most {
                self.accumulate_columns::<V>(r, 2, &keys, outputs, &mut d);
            }
            self.accumulate_columns::<V>(r, 1, &keys, outputs, &mut d);
        }
    }

    /// Adds groups of N whole vectors of columns from `d` on, while there are N, or for N = 1 the rest.
    ///
    /// # Safety
    /// As [`accumulate`](Self::accumulate).
    #[inline(always)]
    unsafe fn accumulate_columns<V: Vector>(
        &self,
        r: usize,
        n: usize,
        keys: &Range<usize>,
        outputs: OutputRows,
        d: &mut usize,
    ) {
        let Products { kv, keys: all, scores_or_weights, .. } = &self.products;
        let rows = &self.rows;
        let lanes = V::LANES;
        while *d < rows.width && (n == 1 || *d + n * lanes <= rows.width) {
            let mut weights = scores_or_weights.wrapping_add((keys.start - all.start) * r).cast_const();
            // SAFETY: as this method's contract.
            unsafe {
                // GradientSums of a few keys each, and not one over all of them, which would round more.
                let mut all_sums = [V::splat(0.0); MAX_SUMS];
                let mut all_values = [V::splat(0.0); MAX_VECTORS];
                let sums = &mut all_sums[..r * n];
                let values = &mut all_values[..n];
                for run in rows.runs(*kv, keys.clone()) {
                    let mut from = run.first.wrapping_add(*d);
                    let mut ahead = run.ahead.wrapping_add(*d);
                    for _ in 0..run.keys.len() {
                        prefetch_row::<V, S>(ahead, n * lanes);
                        if n == 1 {
                            values[0] = load_first(from, lanes.min(rows.width - *d));
                        } else {
                            for (vector, value) in values.iter_mut().enumerate() {
                                *value = S::load(from.add(vector * lanes));
                            }
                        }
                        add_products::<V>(sums, weights, 1, values);
                        from = from.wrapping_add(run.stride);
                        ahead = ahead.wrapping_add(run.stride);
                        weights = weights.add(r);
                    }
                }
                for (row, row_sums) in sums.chunks_exact(n).enumerate() {
                    for (vector, sum) in row_sums.iter().enumerate() {
                        let at = outputs.at.add(*d + row * outputs.stride + vector * lanes);
                        sum.add(V::load(at)).store(at);
                    }
                }
            }
            *d += n * lanes;
        }
    }
}

/// Adds weighted values that are not all finite: zero times NaN is NaN, so that each row sums only the keys that it
/// attends to.
pub(super) struct AccumulateAttended<'a, 'b, S> {
    pub inputs: &'a CheckedCall<'b>,
    pub values: KvHeadRows<'a, S>,
    pub tile: &'a Tile,
    /// (keys, R).
    pub weights: *const f32,
    pub outputs: OutputRows,
}

impl<S: Stored> SimdTask for AccumulateAttended<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, values, tile, weights, outputs } = self;
        let keys = &values.keys;
        let mut sums = vec![0f32; values.width.next_multiple_of(K::Vector::LANES)];
        for r in 0..tile.rows.len() {
            // The same sums of a few keys each as for finite values.
            for first in keys.clone().step_by(KEY_BLOCK) {
                sums.fill(0.0);
                // SAFETY: the processor has the instruction set of K; the keys have weights, and the outputs have the
                // row.
                unsafe {
                    for key in tile.keys_of(inputs, r, &(first..keys.end.min(first + KEY_BLOCK))) {
                        let weight = *weights.add((key - keys.start) * tile.width + r);
                        values.add::<K::Vector>(key, weight, &mut sums);
                    }
                    for (d, sum) in sums[..values.width].iter().enumerate() {
                        *outputs.at.add(r * outputs.stride + d) += sum;
                    }
                }
            }
        }
    }
}
