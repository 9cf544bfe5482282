//! Weights times values, read once.

use std::ops::Range;

use super::MOST_LANES;
use super::scores::Part;
use crate::cpu::{Element, Vector, load_first, store_first};
use crate::flash::ahead::ask_ahead;

/// Keys whose values are read for all of D_v before the next ones: they stay in the first cache meanwhile.
const VALUES: usize = 32;

impl<E: Element, const R: usize> Part<'_, '_, E, R> {
    #[inline(always)]
    fn value(&self, key: usize) -> *const E {
        self.problem.v.at([self.b, self.kv_head, key])
    }

    pub fn has_hidden(&self) -> bool {
        self.problem.scores.keep.is_some() || self.ranges.iter().any(|range| *range != (self.first..self.end))
    }

    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    pub unsafe fn has_non_finite_values<V: Vector>(&self) -> bool {
        let d_v = self.problem.dims.d_v;
        // SAFETY: the caller's promise.
        unsafe {
            let mut residue = V::splat(0.0);
            for key in self.first..self.end {
                for d in (0..d_v).step_by(V::LANES) {
                    let value: V = load_first(self.value(key).add(d), V::LANES.min(d_v - d));
                    // 0 for what is finite, NaN for the rest.
                    residue = residue.add(value.sub(value));
                }
            }
            residue.sum().is_nan()
        }
    }

    /// Adds weighted values to the contexts (R, D_v).
    ///
    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    pub unsafe fn mix<V: Vector>(&self, weights: *const f32, context: &mut [f32]) {
        let (d_v, lanes) = (self.problem.dims.d_v, V::LANES);
        for first in (self.first..self.end).step_by(VALUES) {
            let keys = first..self.end.min(first + VALUES);
            let mut d = 0;
            // SAFETY: the caller's promise; `d` counts whole vectors within D_v, then the rest of it.
            unsafe {
                // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights.
                while d + 4 * lanes <= d_v && (R <= 2 || (R == 4 && lanes == MOST_LANES)) {
                    self.mix_columns::<V, 4>(weights, context, keys.clone(), d);
                    d += 4 * lanes;
                }
                while d + 2 * lanes <= d_v && (R <= 4 || lanes == MOST_LANES) {
                    self.mix_columns::<V, 2>(weights, context, keys.clone(), d);
                    d += 2 * lanes;
                }
                while d < d_v {
                    self.mix_columns::<V, 1>(weights, context, keys.clone(), d);
                    d += lanes;
                }
            }
        }
    }

    /// # Safety
    /// As [`Job`](crate::cpu::Job); N whole vectors from `d` on, or for N = 1 what is left of D_v.
    #[inline(always)]
    unsafe fn mix_columns<V: Vector, const N: usize>(
        &self,
        weights: *const f32,
        context: &mut [f32],
        keys: Range<usize>,
        d: usize,
    ) {
        let (d_v, lanes) = (self.problem.dims.d_v, V::LANES);
        let held = if N == 1 { lanes.min(d_v - d) } else { lanes };
        // SAFETY: the caller's promise.
        unsafe {
            // Sums of a few keys each, and not one over all of them, which would round more.
            let mut sums = [[V::splat(0.0); N]; R];
            for key in keys {
                let from = self.value(key).add(d);
                ask_ahead::<V, E>(from, self.problem.v.stride(2), N * lanes);
                let mut values = [V::splat(0.0); N];
                for (n, value) in values.iter_mut().enumerate() {
                    *value = load_first(from.add(n * lanes), held);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add((key - self.first) * R + r));
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        *sum = weight.mul_add(value, *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, &sum) in sums.iter().enumerate() {
                    let at = context.as_mut_ptr().add(r * d_v + d + n * lanes);
                    store_first(sum.add(load_first(at.cast_const(), held)), at, held);
                }
            }
        }
    }

    /// As [`mix`](Self::mix) where values are not all finite: zero times NaN is NaN, so each row takes the keys that it
    /// sees and no others.
    ///
    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    pub unsafe fn mix_seen<V: Vector>(&self, weights: *const f32, context: &mut [f32]) {
        let (d_v, lanes) = (self.problem.dims.d_v, V::LANES);
        let mut sums = vec![0f32; d_v.next_multiple_of(lanes)];
        for (r, row) in self.rows.iter().enumerate() {
            // The same sums of a few keys each as for finite values.
            for first in (self.first..self.end).step_by(VALUES) {
                let own = first.max(self.ranges[r].start)..self.ranges[r].end.min(first + VALUES);
                sums.fill(0.0);
                for key in own {
                    // SAFETY: the caller's promise; the row's range lies within the keys.
                    unsafe {
                        let keep = self.problem.scores.keep.as_ref();
                        if keep.is_some_and(|keep| *keep.at([self.b, row.head, row.query, key]) == 0) {
                            continue;
                        }
                        let weight = V::splat(*weights.add((key - self.first) * R + r));
                        for d in (0..d_v).step_by(lanes) {
                            let value: V = load_first(self.value(key).add(d), lanes.min(d_v - d));
                            let at = sums.as_mut_ptr().add(d);
                            weight.mul_add(value, V::load(at.cast_const())).store(at);
                        }
                    }
                }
                for (context, sum) in context[r * d_v..(r + 1) * d_v].iter_mut().zip(&sums) {
                    *context += sum;
                }
            }
        }
    }
}
