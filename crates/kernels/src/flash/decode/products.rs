//! The two products of decoding: queries times keys, and weights times values. Both read their elements once.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector};
use crate::flash::pack::prefetch_row;
use crate::flash::problem::{KeysValues, KvHead, Row, ScoreInputs, StoredRows};
use crate::number::{Stored, load_first, store_first};

/// Keys whose rows are read by all groups of queries, and whose values for all of D_v, before the next ones: they stay
/// in the first cache meanwhile.
pub(super) const KEY_BLOCK: usize = 32;

/// R query rows of one key head, and some of the keys of one part.
pub(super) struct RowProducts<'a, 'b, S, const R: usize> {
    pub keys_values: &'a KeysValues<'b, S>,
    /// D and D_v.
    pub widths: [usize; 2],
    pub kv: KvHead,
    pub keys: Range<usize>,
}

impl<S: Stored, const R: usize> RowProducts<'_, '_, S, R> {
    /// Scores (keys, R), as many keys at a time as fill a vector with their products.
    ///
    /// # Safety
    /// The processor has the tier of V; `queries` is valid for R rows of D, with zeros up to whole vectors, and
    /// `scores` for R scores of each key, rounded up to a vector.
    #[inline(always)]
    pub unsafe fn scores<V: Vector>(&self, queries: *const f32, scores: *mut f32) {
        let (rows, keys, [d, _], lanes) = (&self.keys_values.k, &self.keys, self.widths, V::LANES);
        let (width, together) = (d.next_multiple_of(lanes), V::LANES / R);
        let stride = rows.stride();
        let start = rows.row(self.kv, keys.start);
        // SAFETY: as this method's contract; the rows and keys belong to the call, and their rows have D elements.
        unsafe {
            for first in (0..keys.len()).step_by(together) {
                let mut from = [start; MAX_LANES];
                for (k, from) in from[..together].iter_mut().enumerate() {
                    // Past the end the last key is repeated; its scores are hidden later.
                    *from = from.wrapping_add((first + k).min(keys.len() - 1) * stride);
                    prefetch_row::<V, S>(*from, stride, d);
                }
                let mut sums = [V::splat(0.0); MAX_LANES];
                let whole = d / lanes * lanes;
                for at in (0..whole).step_by(lanes) {
                    for k in 0..together {
                        let key = S::load::<V>(from[k].add(at));
                        for r in 0..R {
                            let query = V::load(queries.add(r * width + at));
                            sums[k * R + r] = key.mul_add(query, sums[k * R + r]);
                        }
                    }
                }
                if whole < d {
                    for k in 0..together {
                        let key: V = load_first(from[k].add(whole), d - whole);
                        for r in 0..R {
                            let query = V::load(queries.add(r * width + whole));
                            sums[k * R + r] = key.mul_add(query, sums[k * R + r]);
                        }
                    }
                }
                V::sum_each(&sums).store(scores.add(first * R));
            }
            self.scale(rows, scores);
        }
    }

    /// Weights become those of the codes of values.
    ///
    /// # Safety
    /// There is a weight for each key and row.
    #[inline(always)]
    pub unsafe fn scale_weights(&self, weights: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe { self.scale(&self.keys_values.v, weights) }
    }

    /// Multiplies the R numbers of each key by its scale.
    ///
    /// # Safety
    /// There are R numbers for each key.
    #[inline(always)]
    unsafe fn scale(&self, rows: &StoredRows<S>, numbers: *mut f32) {
        let Some(scales) = rows.scales.filter(|_| S::IS_SCALED) else { return };
        let (first, stride) = (scales.at([self.kv.b, self.kv.head, self.keys.start]), scales.strides[2]);
        for key in 0..self.keys.len() {
            // SAFETY: as this method's contract; the view was checked for every key of the call.
            unsafe {
                let scale = *first.wrapping_add(key * stride);
                (0..R).for_each(|r| *numbers.add(key * R + r) *= scale);
            }
        }
    }

    /// Adds weighted values to the contexts (R, D_v).
    ///
    /// # Safety
    /// The processor has the tier of V; there is a weight for each key and row, and `context` has R rows of D_v.
    #[inline(always)]
    pub unsafe fn accumulate<V: Vector>(&self, weights: *const f32, context: &mut [f32]) {
        let ([_, d_v], lanes) = (self.widths, V::LANES);
        for first in self.keys.clone().step_by(KEY_BLOCK) {
            let keys = first..self.keys.end.min(first + KEY_BLOCK);
            let mut d = 0;
            // SAFETY: as this method's contract; `d` counts whole vectors within D_v, then the rest of it.
            unsafe {
                // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights.
                while d + 8 * lanes <= d_v && R == 1 {
                    self.accumulate_columns::<V, 8>(weights, context, keys.clone(), d);
                    d += 8 * lanes;
                }
                while d + 4 * lanes <= d_v && (R <= 2 || (R == 4 && lanes == MAX_LANES)) {
                    self.accumulate_columns::<V, 4>(weights, context, keys.clone(), d);
                    d += 4 * lanes;
                }
                while d + 2 * lanes <= d_v && (R <= 4 || lanes == MAX_LANES) {
                    self.accumulate_columns::<V, 2>(weights, context, keys.clone(), d);
                    d += 2 * lanes;
                }
                while d < d_v {
                    self.accumulate_columns::<V, 1>(weights, context, keys.clone(), d);
                    d += lanes;
                }
            }
        }
    }

    /// # Safety
    /// As [`accumulate`](Self::accumulate); N whole vectors from `d` on, or for N = 1 what is left of D_v.
    #[inline(always)]
    unsafe fn accumulate_columns<V: Vector, const N: usize>(
        &self,
        weights: *const f32,
        context: &mut [f32],
        keys: Range<usize>,
        d: usize,
    ) {
        let (values_of, [_, d_v], lanes) = (&self.keys_values.v, self.widths, V::LANES);
        let filled = if N == 1 { lanes.min(d_v - d) } else { lanes };
        let stride = values_of.stride();
        let mut from = values_of.row(self.kv, keys.start).wrapping_add(d);
        // SAFETY: as this method's contract.
        unsafe {
            // Sums of a few keys each, and not one over all of them, which would round more.
            let mut sums = [[V::splat(0.0); N]; R];
            for key in keys {
                prefetch_row::<V, S>(from, stride, N * lanes);
                let mut values = [V::splat(0.0); N];
                for (n, value) in values.iter_mut().enumerate() {
                    *value = load_first(from.add(n * lanes), filled);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add((key - self.keys.start) * R + r));
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        *sum = weight.mul_add(value, *sum);
                    }
                }
                from = from.wrapping_add(stride);
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, &sum) in sums.iter().enumerate() {
                    let at = context.as_mut_ptr().add(r * d_v + d + n * lanes);
                    store_first(sum.add(load_first(at.cast_const(), filled)), at, filled);
                }
            }
        }
    }
}

/// [`RowProducts::accumulate`] where values are not all finite: zero times NaN is NaN, so each row sums the keys that
/// it sees and no others.
pub(super) struct AccumulateSeen<'a, 'b, S> {
    pub inputs: &'a ScoreInputs<'b>,
    pub values: &'a StoredRows<'b, S>,
    pub kv: KvHead,
    pub rows: &'a [Row],
    /// What each row sees of the keys.
    pub ranges: &'a [Range<usize>],
    pub keys: Range<usize>,
    /// (keys, rows), scaled.
    pub weights: *const f32,
    /// (rows, D_v).
    pub context: &'a mut [f32],
}

impl<S: Stored> SimdTask for AccumulateSeen<'_, '_, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, values, kv, rows, keys, .. } = self;
        let (d_v, lanes) = (inputs.dims.d_v, K::Vector::LANES);
        let mut sums = vec![0f32; d_v.next_multiple_of(lanes)];
        for (r, (&row, range)) in rows.iter().zip(self.ranges).enumerate() {
            // The same sums of a few keys each as for finite values.
            for first in keys.clone().step_by(KEY_BLOCK) {
                let own = first.max(range.start)..range.end.min(first + KEY_BLOCK);
                sums.fill(0.0);
                for key in own.filter(|&key| inputs.is_kept(row, key)) {
                    // SAFETY: the processor has the tier of K; the row's range lies within the keys, which have
                    // weights.
                    unsafe {
                        let weight = K::Vector::splat(*self.weights.add((key - keys.start) * rows.len() + r));
                        for d in (0..d_v).step_by(lanes) {
                            let value: K::Vector = load_first(values.row(kv, key).add(d), lanes.min(d_v - d));
                            let at = sums.as_mut_ptr().add(d);
                            weight.mul_add(value, K::Vector::load(at.cast_const())).store(at);
                        }
                    }
                }
                for (context, sum) in self.context[r * d_v..(r + 1) * d_v].iter_mut().zip(&sums) {
                    *context += sum;
                }
            }
        }
    }
}
