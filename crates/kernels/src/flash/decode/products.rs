//! The two products of decoding: queries times keys, and weights times values. Both read their elements once.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector, add_products};
use crate::flash::pack::{HeadRows, prefetch_row};
use crate::flash::problem::{KeysValues, KvHead, Row, ScoreInputs, StoredRows};
use crate::number::{Stored, load_first, store_first};

/// Keys whose rows are read by all groups of queries, and whose values for all of D_v, before the next ones: they stay
/// in the first cache meanwhile.
pub(super) const KEY_BLOCK: usize = 32;

/// A group of query rows of one key head, and some of the keys of one part.
pub(super) struct RowProducts<'a, 'b, S> {
    pub keys_values: &'a KeysValues<'b, S>,
    /// D and D_v.
    pub widths: [usize; 2],
    pub kv: KvHead,
    pub keys: Range<usize>,
    /// The rows of the group, R: [`group_rows`] of all.
    pub rows: usize,
}

/// As many of the query rows, a power of two, as registers hold the sums of.
pub(super) fn group_rows<V: Vector>(rows: usize) -> usize {
    rows.min(if V::LANES == MAX_LANES { 8 } else { 4 })
}

impl<S: Stored> RowProducts<'_, '_, S> {
    /// Scores (keys, R), as many keys at a time as fill a vector with their products.
    ///
    /// # Safety
    /// The processor has the tier of V; `queries` is valid for R rows of D, with zeros up to whole vectors, and
    /// `scores` for R scores of each key, rounded up to a vector.
    #[inline(always)]
    pub unsafe fn scores<V: Vector>(&self, queries: *const f32, scores: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            match self.rows {
                1 => self.scores_of::<V, 1>(queries, scores),
                2 => self.scores_of::<V, 2>(queries, scores),
                8 if const { V::LANES == MAX_LANES } => self.scores_of::<V, 8>(queries, scores),
                _ => self.scores_of::<V, 4>(queries, scores),
            }
            self.scale(&self.keys_values.k, scores);
        }
    }

    /// # Safety
    /// As [`scores`](Self::scores), of R rows.
    #[inline(always)]
    unsafe fn scores_of<V: Vector, const R: usize>(&self, queries: *const f32, scores: *mut f32) {
        let (rows, keys, [d, _], lanes) = (&self.keys_values.k, &self.keys, self.widths, V::LANES);
        let (whole, together, start) = (d / lanes * lanes, lanes / R, rows.row(self.kv, keys.start));
        // SAFETY: as this method's contract; the rows and keys belong to the call, and their rows have D elements.
        unsafe {
            for first in (0..keys.len()).step_by(together) {
                let from = self.prefetched_keys::<V>(start, first, together);
                let mut sums = [V::splat(0.0); MAX_LANES];
                for at in (0..whole).step_by(lanes) {
                    self.add_keys::<V, R>(&mut sums, &from, at..at + lanes, queries);
                }
                if whole < d {
                    self.add_keys::<V, R>(&mut sums, &from, whole..d, queries);
                }
                V::sum_each(&sums).store(scores.add(first * R));
            }
        }
    }

    /// The rows of `count` keys from the one with index `first` on, where `start` is the first key's. Past the end the
    /// last key is repeated; its scores are hidden later.
    ///
    /// # Safety
    /// The processor has the tier of V.
    #[inline(always)]
    unsafe fn prefetched_keys<V: Vector>(&self, start: *const S, first: usize, count: usize) -> [*const S; MAX_LANES] {
        let stride = self.keys_values.k.stride();
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
    /// As [`scores`](Self::scores), of R rows; the keys have the elements.
    #[inline(always)]
    unsafe fn add_keys<V: Vector, const R: usize>(
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

    /// Multiplies the R numbers of each key by its scale.
    ///
    /// # Safety
    /// There are R numbers for each key.
    #[inline(always)]
    unsafe fn scale(&self, rows: &StoredRows<S>, numbers: *mut f32) {
        if const { !S::IS_SCALED } {
            return;
        }
        // SAFETY: as this method's contract.
        unsafe {
            match self.rows {
                1 => self.scale_of::<1>(rows, numbers),
                2 => self.scale_of::<2>(rows, numbers),
                4 => self.scale_of::<4>(rows, numbers),
                _ => self.scale_of::<8>(rows, numbers),
            }
        }
    }

    /// # Safety
    /// As [`scale`](Self::scale), of R rows.
    #[inline(always)]
    unsafe fn scale_of<const R: usize>(&self, rows: &StoredRows<S>, numbers: *mut f32) {
        let Some(scales) = &rows.scales else { return };
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

    /// Adds weighted values to the contexts (R, D_v). The weights become those of codes where values are scaled.
    ///
    /// # Safety
    /// The processor has the tier of V; there is a weight for each key and row, and `context` has R rows of D_v.
    #[inline(always)]
    pub unsafe fn accumulate<V: Vector>(&self, weights: *mut f32, context: &mut [f32]) {
        // SAFETY: as this method's contract.
        unsafe { self.scale(&self.keys_values.v, weights) };
        for first in self.keys.clone().step_by(KEY_BLOCK) {
            let keys = &(first..self.keys.end.min(first + KEY_BLOCK));
            // SAFETY: as this method's contract.
            unsafe {
                let weights = weights.add((first - self.keys.start) * self.rows);
                match self.rows {
                    1 => self.accumulate_of::<V, 1>(keys, weights, context),
                    2 => self.accumulate_of::<V, 2>(keys, weights, context),
                    8 if const { V::LANES == MAX_LANES } => self.accumulate_of::<V, 8>(keys, weights, context),
                    _ => self.accumulate_of::<V, 4>(keys, weights, context),
                }
            }
        }
    }

    /// # Safety
    /// As [`accumulate`](Self::accumulate), of R rows and as many keys as weights.
    #[inline(always)]
    unsafe fn accumulate_of<V: Vector, const R: usize>(
        &self,
        keys: &Range<usize>,
        weights: *const f32,
        context: &mut [f32],
    ) {
        let (d_v, lanes, mut d) = (self.widths[1], V::LANES, 0);
        // SAFETY: as this method's contract; `d` counts whole vectors within D_v, then the rest of it.
        unsafe {
            // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights.
            while const { R == 1 } && d + 8 * lanes <= d_v {
                self.accumulate_columns::<V, R, 8>(keys, weights, context, d);
                d += 8 * lanes;
            }
            while const { R <= 2 || (R == 4 && V::LANES == MAX_LANES) } && d + 4 * lanes <= d_v {
                self.accumulate_columns::<V, R, 4>(keys, weights, context, d);
                d += 4 * lanes;
            }
            while d + 2 * lanes <= d_v {
                self.accumulate_columns::<V, R, 2>(keys, weights, context, d);
                d += 2 * lanes;
            }
            while d < d_v {
                self.accumulate_columns::<V, R, 1>(keys, weights, context, d);
                d += lanes;
            }
        }
    }

    /// # Safety
    /// As [`accumulate_of`](Self::accumulate_of); N whole vectors from `d` on, or for N = 1 what is left of D_v.
    #[inline(always)]
    unsafe fn accumulate_columns<V: Vector, const R: usize, const N: usize>(
        &self,
        keys: &Range<usize>,
        mut weights: *const f32,
        context: &mut [f32],
        d: usize,
    ) {
        let (rows, d_v, lanes) = (&self.keys_values.v, self.widths[1], V::LANES);
        let filled = if const { N == 1 } { lanes.min(d_v - d) } else { lanes };
        let (mut from, stride) = (rows.row(self.kv, keys.start).wrapping_add(d), rows.stride());
        // SAFETY: as this method's contract.
        unsafe {
            // Sums of a few keys each, and not one over all of them, which would round more.
            let mut sums = [[V::splat(0.0); N]; R];
            for _ in keys.clone() {
                prefetch_row::<V, S>(from, stride, N * lanes);
                add_products::<V, R, N>(&mut sums, weights, 1, &load_vectors(from, filled));
                (from, weights) = (from.wrapping_add(stride), weights.add(R));
            }
            add_rows(&sums, context.as_mut_ptr().add(d), d_v, filled);
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

/// Adds R rows of N vectors, or of one alone the first `filled` lanes, to what is at `to`, a row every `stride`.
///
/// # Safety
/// As [`store_first`].
#[inline(always)]
unsafe fn add_rows<V: Vector, const R: usize, const N: usize>(
    rows: &[[V; N]; R],
    mut to: *mut f32,
    stride: usize,
    filled: usize,
) {
    for vectors in rows.iter() {
        for (n, vector) in vectors.iter().enumerate() {
            // SAFETY: as this function's contract.
            unsafe {
                let at = to.add(n * V::LANES);
                store_first(vector.add(load_first(at.cast_const(), filled)), at, filled);
            }
        }
        to = to.wrapping_add(stride);
    }
}

/// [`RowProducts::accumulate`] where values are not all finite: zero times NaN is NaN, so each row sums the keys that
/// it sees and no others.
pub(super) struct AccumulateSeen<'a, 'b, S> {
    pub inputs: &'a ScoreInputs<'b>,
    pub values: HeadRows<'a, S>,
    pub rows: &'a [Row],
    /// What each row sees of the keys.
    pub ranges: &'a [Range<usize>],
    pub keys: Range<usize>,
    /// (keys, rows).
    pub weights: *const f32,
    /// (rows, D_v).
    pub context: &'a mut [f32],
}

impl<S: Stored> SimdTask for AccumulateSeen<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, values, rows, keys, .. } = self;
        let d_v = values.width;
        let mut sums = vec![0f32; d_v.next_multiple_of(K::Vector::LANES)];
        for (r, (&row, range)) in rows.iter().zip(self.ranges).enumerate() {
            // The same sums of a few keys each as for finite values.
            for first in keys.clone().step_by(KEY_BLOCK) {
                let own = first.max(range.start)..range.end.min(first + KEY_BLOCK);
                sums.fill(0.0);
                for key in own {
                    if !inputs.is_kept(row, key) {
                        continue;
                    }
                    // SAFETY: the processor has the tier of K; the row's range lies within the keys, which have
                    // weights.
                    unsafe {
                        let weight = *self.weights.add((key - keys.start) * rows.len() + r);
                        values.add::<K::Vector>(key, weight, &mut sums);
                    }
                }
                for (context, sum) in self.context[r * d_v..(r + 1) * d_v].iter_mut().zip(&sums) {
                    *context += sum;
                }
            }
        }
    }
}
