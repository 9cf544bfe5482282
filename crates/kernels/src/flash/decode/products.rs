//! The two products of decoding: queries times keys, and weights times values. Both read their elements once.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector, add_products};
use crate::flash::inputs::CheckedCall;
use crate::flash::kv_rows::{KvHeadRows, KvMatrix, KvRun, ScalesOfRow, prefetch_row};
use crate::flash::tile::Tile;
use crate::number::{Stored, load_part};
use candle_attention_call::KvHead;

/// The number of keys whose rows are read for all groups of queries, and whose values for all of D_v, before the next
/// keys: they stay in the first cache meanwhile.
pub(super) const KEY_BLOCK: usize = 32;

/// The most query rows of a group.
pub(super) const MOST_GROUPED_ROWS: usize = 8;

/// The most vectors of sums of outputs that are in registers.
const MAX_SUMS: usize = 16;
/// The most vectors of values that are added to these sums at a time.
const MAX_VECTORS: usize = 8;

/// The products of a group of R query rows of one key head, a power of two, with some of the keys of one part, or of
/// their weights with the values.
pub(super) struct Products {
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// R, the number of query rows of the group.
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
    /// The number of words from one row to the next.
    pub stride: usize,
}

/// Computes products with the keys or the values.
pub(super) struct Multiply<'a, S> {
    pub rows: &'a KvMatrix<'a, S>,
    pub products: &'a Products,
}

/// The rows of keys whose products fill a vector.
struct KeyRows<S> {
    numbers: [*const S; MAX_LANES],
    /// The scales of each row, where a row may have several.
    scales: [ScalesOfRow; MAX_LANES],
}

/// Some columns of the values of some keys, and the weights of the keys.
struct WeightedColumns {
    keys: Range<usize>,
    /// (keys, R).
    weights: *const f32,
    columns: Range<usize>,
}

/// Products with copies of what describes them, since loops would read references again after each store.
struct RowProducts<'a, S> {
    rows: KvMatrix<'a, S>,
    products: Products,
}

impl<S: Stored> SimdTask for Multiply<'_, S> {
    type Output = ();

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
                    if !self.rows.has_groups() {
                        self.scale(r);
                    }
                }
                // The weights of scaled values become the weights of their codes.
                Operand::Outputs(outputs) => {
                    if const { !S::HAS_GROUPS } {
                        self.scale(r);
                    }
                    for first in self.products.keys.clone().step_by(KEY_BLOCK) {
                        let keys = first..self.products.keys.end.min(first + KEY_BLOCK);
                        if const { S::HAS_GROUPS } {
                            self.accumulate_groups::<V>(r, keys, outputs);
                        } else {
                            let weights = self.weights_of(r, keys.start);
                            let weighted = WeightedColumns { keys, weights, columns: 0..self.rows.width };
                            self.accumulate::<V>(r, &weighted, outputs);
                        }
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
        // The numbers of a block are loaded from the same elements.
        let step = lanes.max(S::BLOCK);
        let whole = d / step * step;
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
                    for at in (0..whole).step_by(step) {
                        self.add_keys(r, &mut sums, &from, at..at + step, queries);
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
    unsafe fn prefetched_listed_keys<V: Vector>(&self, keys: Range<usize>, count: usize) -> KeyRows<S> {
        let first = self.rows.run(self.products.kv, keys.start..keys.start + 1);
        let mut rows = KeyRows { numbers: [first.first; MAX_LANES], scales: [first.scales(0); MAX_LANES] };
        for k in 0..count {
            let key = (keys.start + k).min(keys.end - 1);
            let run = self.rows.run(self.products.kv, key..key + 1);
            rows.numbers[k] = run.first;
            if S::HAS_GROUPS {
                rows.scales[k] = run.scales(0);
            }
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
    unsafe fn prefetched_keys<V: Vector>(&self, run: &KvRun<S>, first: usize, count: usize) -> KeyRows<S> {
        let mut keys = KeyRows { numbers: [run.first; MAX_LANES], scales: [run.scales(0); MAX_LANES] };
        for k in 0..count {
            let n = (first + k).min(run.keys.len() - 1);
            let offset = n.wrapping_mul(run.stride);
            keys.numbers[k] = run.first.wrapping_add(offset);
            if S::HAS_GROUPS {
                keys.scales[k] = run.scales(n);
            }
            // SAFETY: as this method's contract.
            unsafe { prefetch_row::<V, S>(run.ahead.wrapping_add(offset), self.rows.width) };
        }
        keys
    }

    /// Adds the products of R queries with the keys that fill the sums, over whole vectors of D or the rest of D.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); the keys have the elements.
    #[inline(always)]
    unsafe fn add_keys<V: Vector>(
        &self,
        r: usize,
        sums: &mut [V; MAX_LANES],
        keys: &KeyRows<S>,
        numbers: Range<usize>,
        queries: *const f32,
    ) {
        let at = numbers.start;
        let filled = V::LANES.min(numbers.len());
        let width = self.rows.width.next_multiple_of(V::LANES);
        let has_groups = self.rows.has_groups();
        for (k, key_sums) in sums[..V::LANES].chunks_exact_mut(r).enumerate() {
            // SAFETY: as this method's contract; `at` is the first number of a block.
            unsafe {
                let block = keys.numbers[k].add(at / S::NUMBERS);
                for n in (0..numbers.len()).step_by(V::LANES) {
                    let mut key: V = load_part(block, n, filled);
                    if has_groups {
                        key = key.mul(V::splat(keys.scales[k].at::<S>(at)));
                    }
                    for (row, sum) in key_sums.iter_mut().enumerate() {
                        *sum = key.mul_add(V::load(queries.add(row * width + at + n)), *sum);
                    }
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
                    let scale = run.scales(key).at::<S>(0);
                    for row in 0..r {
                        *numbers.add(key * r + row) *= scale;
                    }
                }
            }
        }
    }

    /// Returns a pointer to the weights of a key, one for each of the `r` query rows.
    #[inline(always)]
    fn weights_of(&self, r: usize, key: usize) -> *const f32 {
        self.products.scores_or_weights.wrapping_add((key - self.products.keys.start) * r).cast_const()
    }

    /// Adds the weighted values of at most [`KEY_BLOCK`] keys, which have a scale for each group of columns. The
    /// weights of values become the weights of the codes of a group.
    ///
    /// # Safety
    /// As [`accumulate`](Self::accumulate).
    #[inline(always)]
    unsafe fn accumulate_groups<V: Vector>(&self, r: usize, keys: Range<usize>, outputs: OutputRows) {
        let weights = self.weights_of(r, keys.start);
        for group in 0..self.rows.groups.count {
            let columns = self.rows.groups.columns(group, self.rows.width);
            let mut scaled = [0f32; KEY_BLOCK * MOST_GROUPED_ROWS];
            for run in self.rows.runs(self.products.kv, keys.clone()) {
                for n in 0..run.keys.len() {
                    let scale = run.scales(n).at::<S>(columns.start);
                    let key = run.keys.start - keys.start + n;
                    for row in 0..r {
                        // SAFETY: as this method's contract.
                        scaled[key * r + row] = unsafe { *weights.add(key * r + row) } * scale;
                    }
                }
            }
            let of_group = WeightedColumns { keys: keys.clone(), weights: scaled.as_ptr(), columns };
            // SAFETY: as this method's contract.
            unsafe { self.accumulate::<V>(r, &of_group, outputs) };
        }
    }

    /// Adds the weighted values of some keys to the outputs.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply); the keys have weights.
    #[inline(always)]
    unsafe fn accumulate<V: Vector>(&self, r: usize, weighted: &WeightedColumns, outputs: OutputRows) {
        let most = V::ROWS * V::VECTORS;
        let mut d = weighted.columns.start;
        // SAFETY: as this method's contract; `d` counts whole vectors within the columns, then the rest of them.
        unsafe {
            // Eight sums cover the latency of a multiply-add; registers for sixteen halve the loads of weights. No more
            // than the tile of a product has, which is four on the scalar instruction set.
            if r == 1 && 8 <= most {
                self.accumulate_columns::<V>(r, 8, weighted, outputs, &mut d);
            }
            if (r <= 2 || V::LANES == MAX_LANES) && r <= 4 && 4 * r <= most {
                self.accumulate_columns::<V>(r, 4, weighted, outputs, &mut d);
            }
            if 2 * r <= most {
                self.accumulate_columns::<V>(r, 2, weighted, outputs, &mut d);
            }
            self.accumulate_columns::<V>(r, 1, weighted, outputs, &mut d);
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
        weighted: &WeightedColumns,
        outputs: OutputRows,
        d: &mut usize,
    ) {
        let rows = &self.rows;
        let lanes = V::LANES;
        let end = weighted.columns.end;
        while *d < end && (n == 1 || *d + n * lanes <= end) {
            let mut weights = weighted.weights;
            // The columns begin within a block of numbers, or with one: whole blocks follow whole blocks.
            let block = *d / S::BLOCK * S::BLOCK;
            let offset = if (n * lanes).is_multiple_of(S::BLOCK) { 0 } else { *d - block };
            // SAFETY: as this method's contract.
            unsafe {
                // GradientSums of a few keys each, and not one over all of them, which would round more.
                let mut all_sums = [V::splat(0.0); MAX_SUMS];
                let mut all_values = [V::splat(0.0); MAX_VECTORS];
                let sums = &mut all_sums[..r * n];
                let values = &mut all_values[..n];
                for run in rows.runs(self.products.kv, weighted.keys.clone()) {
                    let mut from = run.first.wrapping_add(block / S::NUMBERS);
                    let mut ahead = run.ahead.wrapping_add(block / S::NUMBERS);
                    for _ in 0..run.keys.len() {
                        prefetch_row::<V, S>(ahead, n * lanes);
                        if n == 1 {
                            values[0] = load_part(from, offset, lanes.min(end - *d));
                        } else {
                            for (vector, value) in values.iter_mut().enumerate() {
                                *value = S::load_at(from, offset + vector * lanes);
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
    type Output = ();

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
