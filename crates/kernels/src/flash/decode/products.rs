//! The two products of decoding: queries times keys, and weights times values. Both read their elements once.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector, add_products};
use crate::flash::pack::{HeadRows, prefetch_row};
use crate::flash::problem::{KvHead, ScoreInputs, StoredRows};
use crate::flash::tile::Tile;
use crate::number::{Stored, load_first, store_first};

/// Keys whose rows are read by all groups of queries, and whose values for all of D_v, before the next ones: they stay
/// in the first cache meanwhile.
pub(super) const KEY_BLOCK: usize = 32;

/// A group of R query rows of one key head, and some of the keys of one part.
pub(super) struct RowProducts<'a, 'b, S, const R: usize> {
    pub keys_values: &'a [StoredRows<'b, S>; 2],
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// D and D_v.
    pub widths: [usize; 2],
    /// The words from one row's context to the next.
    pub stride: usize,
}

impl<S: Stored, const R: usize> RowProducts<'_, '_, S, R> {
    /// Scores (keys, R), as many keys at a time as fill a vector with their products.
    ///
    /// # Safety
    /// The processor has the tier of V; `queries` is valid for R rows of D, with zeros up to whole vectors, and
    /// `scores` for R scores of each key, rounded up to a vector.
    #[inline(always)]
    pub unsafe fn scores<V: Vector>(&self, queries: *const f32, scores: *mut f32) {
        let (rows, keys, lanes) = (&self.keys_values[0], &self.keys, V::LANES);
        let (d, whole, together, start) =
            (self.widths[0], self.widths[0] / lanes * lanes, lanes / R, rows.row(self.kv, keys.start));
        // SAFETY: as this method's contract; the rows and keys belong to the call, and their rows have D elements.
        unsafe {
            for first in (0..keys.len()).step_by(together) {
                let from = self.prefetched_keys::<V>(start, first, together);
                let mut sums = [V::splat(0.0); MAX_LANES];
                for at in (0..whole).step_by(lanes) {
                    self.add_keys::<V>(&mut sums, &from, at..at + lanes, queries);
                }
                if whole < d {
                    self.add_keys::<V>(&mut sums, &from, whole..d, queries);
                }
                V::sum_each(&sums).store(scores.add(first * R));
            }
            self.scale(rows, scores);
        }
    }

    /// The rows of `count` keys from the one with index `first` on, where `start` is the first key's. Past the end the
    /// last key is repeated; its scores are hidden later.
    ///
    /// # Safety
    /// The processor has the tier of V.
    #[inline(always)]
    unsafe fn prefetched_keys<V: Vector>(&self, start: *const S, first: usize, count: usize) -> [*const S; MAX_LANES] {
        let stride = self.keys_values[0].stride();
        let mut keys = [start; MAX_LANES];
        for (k, key) in keys[..count].iter_mut().enumerate() {
            *key = key.wrapping_add((first + k).min(self.keys.len() - 1) * stride);
            // SAFETY: as this method's contract.
            unsafe { prefetch_row::<V, S>(*key, stride, self.widths[0]) };
        }
        keys
    }

    /// Adds the products of R queries with as many keys as fill the sums, over a vector of D or what is left of it.
    ///
    /// # Safety
    /// As [`scores`](Self::scores); the keys have the elements.
    #[inline(always)]
    unsafe fn add_keys<V: Vector>(
        &self,
        sums: &mut [V; MAX_LANES],
        keys: &[*const S; MAX_LANES],
        elements: Range<usize>,
        queries: *const f32,
    ) {
        let (at, filled) = (elements.start, elements.end - elements.start);
        let width = self.widths[0].next_multiple_of(V::LANES);
        for (k, sums) in sums[..V::LANES].chunks_exact_mut(R).enumerate() {
            // SAFETY: as this method's contract.
            unsafe {
                let key: V = load_first(keys[k].add(at), filled);
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = key.mul_add(V::load(queries.add(r * width + at)), *sum);
                }
            }
        }
    }

    /// Multiplies the R numbers of each key by its scale, if it has one.
    ///
    /// # Safety
    /// There are R numbers for each key.
    #[inline(always)]
    unsafe fn scale(&self, rows: &StoredRows<S>, numbers: *mut f32) {
        let Some(scales) = rows.scales.as_ref().filter(|_| S::IS_SCALED) else { return };
        let (first, stride) = (scales.at([self.kv.b, self.kv.head, self.keys.start]), scales.strides[2]);
        for key in 0..self.keys.len() {
            // SAFETY: as this method's contract; the view was checked for every key of the call.
            unsafe {
                let scale = *first.wrapping_add(key * stride);
                for r in 0..R {
                    *numbers.add(key * R + r) *= scale;
                }
            }
        }
    }

    /// Adds weighted values to the contexts of R rows. The weights become those of codes where values are scaled.
    ///
    /// # Safety
    /// The processor has the tier of V; there is a weight for each key and row, and `context` has the rows, of D_v.
    #[inline(always)]
    pub unsafe fn accumulate<V: Vector>(&self, weights: *mut f32, context: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe { self.scale(&self.keys_values[1], weights) };
        for first in self.keys.clone().step_by(KEY_BLOCK) {
            let keys = &(first..self.keys.end.min(first + KEY_BLOCK));
            // SAFETY: as this method's contract.
            unsafe {
                self.accumulate_keys::<V>(keys, weights.add((first - self.keys.start) * R), context);
            }
        }
    }

    /// # Safety
    /// As [`accumulate`](Self::accumulate), of as many keys as weights.
    #[inline(always)]
    unsafe fn accumulate_keys<V: Vector>(&self, keys: &Range<usize>, weights: *const f32, context: *mut f32) {
        let (d_v, lanes, mut d) = (self.widths[1], V::LANES, 0);
        // SAFETY: as this method's contract; `d` counts whole vectors within D_v, then the rest of it.
        unsafe {
            // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights.
            while const { R == 1 } && d + 8 * lanes <= d_v {
                self.accumulate_columns::<V, 8>(keys, weights, context, d);
                d += 8 * lanes;
            }
            while const { R <= 2 || (R == 4 && V::LANES == MAX_LANES) } && d + 4 * lanes <= d_v {
                self.accumulate_columns::<V, 4>(keys, weights, context, d);
                d += 4 * lanes;
            }
            while d + 2 * lanes <= d_v {
                self.accumulate_columns::<V, 2>(keys, weights, context, d);
                d += 2 * lanes;
            }
            while d < d_v {
                self.accumulate_columns::<V, 1>(keys, weights, context, d);
                d += lanes;
            }
        }
    }

    /// # Safety
    /// As [`accumulate_keys`](Self::accumulate_keys); N whole vectors from `d` on, or for N = 1 what is left of D_v.
    #[inline(always)]
    unsafe fn accumulate_columns<V: Vector, const N: usize>(
        &self,
        keys: &Range<usize>,
        mut weights: *const f32,
        context: *mut f32,
        d: usize,
    ) {
        let (rows, lanes) = (&self.keys_values[1], V::LANES);
        let filled = if const { N == 1 } { lanes.min(self.widths[1] - d) } else { lanes };
        let (mut from, stride) = (rows.row(self.kv, keys.start).wrapping_add(d), rows.stride());
        // SAFETY: as this method's contract.
        unsafe {
            // Sums of a few keys each, and not one over all of them, which would round more.
            let mut sums = [[V::splat(0.0); N]; R];
            for _ in 0..keys.len() {
                prefetch_row::<V, S>(from, stride, N * lanes);
                add_products::<V, R, N>(&mut sums, weights, 1, &load_vectors(from, filled));
                (from, weights) = (from.wrapping_add(stride), weights.add(R));
            }
            let mut to = context.add(d);
            for sums in sums.iter() {
                for (n, sum) in sums.iter().enumerate() {
                    let at = to.add(n * lanes);
                    store_first(sum.add(load_first(at.cast_const(), filled)), at, filled);
                }
                to = to.wrapping_add(self.stride);
            }
        }
    }
}

/// N vectors, or of one alone the first `filled` lanes.
///
/// # Safety
/// As [`load_first`].
#[inline(always)]
unsafe fn load_vectors<S: Stored, V: Vector, const N: usize>(from: *const S, filled: usize) -> [V; N] {
    // SAFETY: as this function's contract.
    unsafe {
        let mut vectors = [V::splat(0.0); N];
        for (n, vector) in vectors.iter_mut().enumerate() {
            *vector = load_first(from.add(n * V::LANES), filled);
        }
        vectors
    }
}

/// [`RowProducts::accumulate`] where values are not all finite: zero times NaN is NaN, so each row sums the keys that
/// it sees and no others.
pub(super) struct AccumulateSeen<'a, 'b, S> {
    pub inputs: &'a ScoreInputs<'b>,
    pub values: HeadRows<'a, S>,
    pub tile: &'a Tile,
    /// (keys, R).
    pub weights: *const f32,
    /// A row of D_v every `stride`.
    pub context: *mut f32,
    pub stride: usize,
}

impl<S: Stored> SimdTask for AccumulateSeen<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, values, tile, .. } = self;
        let keys = &values.keys;
        let mut sums = vec![0f32; values.width.next_multiple_of(K::Vector::LANES)];
        for r in 0..tile.rows.len() {
            // The same sums of a few keys each as for finite values.
            for first in keys.clone().step_by(KEY_BLOCK) {
                sums.fill(0.0);
                // SAFETY: the processor has the tier of K; the keys have weights, and the context has the row.
                unsafe {
                    for key in tile.seen_by(inputs, r, &(first..keys.end.min(first + KEY_BLOCK))) {
                        let weight = *self.weights.add((key - keys.start) * tile.width + r);
                        values.add::<K::Vector>(key, weight, &mut sums);
                    }
                    for (d, sum) in sums[..values.width].iter().enumerate() {
                        *self.context.add(r * self.stride + d) += sum;
                    }
                }
            }
        }
    }
}
