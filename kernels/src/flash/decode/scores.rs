//! Queries times keys, read once, and the softmax of a part.

use std::ops::Range;

use super::MOST_LANES;
use crate::cpu::{Element, Vector, load_first, tanh};
use crate::flash::ahead::ask_ahead;
use crate::flash::params::{Problem, Row};

/// Sums that take turns.
const CHAINS: usize = 4;

/// Up to R query rows of one key head, and the keys of one part that they see.
pub(super) struct Part<'a, 'b, E, const R: usize> {
    pub problem: &'a Problem<'b, E>,
    pub b: usize,
    pub kv_head: usize,
    pub rows: [Row; R],
    /// What each row sees of the part.
    pub ranges: [Range<usize>; R],
    /// The keys from the first to the last that some row sees.
    pub first: usize,
    pub end: usize,
}

impl<E: Element, const R: usize> Part<'_, '_, E, R> {
    fn keys(&self) -> usize {
        self.end - self.first
    }

    /// Scores (keys, R), as many keys at a time as fill a vector with their products.
    ///
    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    pub unsafe fn score<V: Vector>(&self, queries: *mut f32, scores: *mut f32) {
        let (d, lanes) = (self.problem.dims.d, V::LANES);
        let (width, together) = (d.next_multiple_of(lanes), V::LANES / R);
        let stride = self.problem.k.stride(2);
        let mut square = [0f32; MOST_LANES * MOST_LANES];
        // SAFETY: the caller's promise.
        unsafe {
            let factor = V::splat(self.problem.scores.units(false).query);
            for (r, row) in self.rows.iter().enumerate() {
                let from = self.problem.q.at([self.b, row.head, row.query]);
                for at in (0..d).step_by(lanes) {
                    let query: V = load_first(from.add(at), lanes.min(d - at));
                    query.mul(factor).store(queries.add(r * width + at));
                }
            }
            for first in (0..self.keys()).step_by(together) {
                let mut keys = [self.key(self.first + first); MOST_LANES];
                for (k, key) in keys[..together].iter_mut().enumerate() {
                    // Past the end the last key stands in; its scores are hidden later.
                    *key = key.wrapping_add(k.min(self.keys() - 1 - first) * stride);
                    ask_ahead::<V, E>(*key, stride, d);
                }
                let mut sums = [V::splat(0.0); MOST_LANES];
                let whole = d / lanes * lanes;
                for at in (0..whole).step_by(lanes) {
                    for k in 0..together {
                        let key = E::load::<V>(keys[k].add(at));
                        for r in 0..R {
                            let query = V::load(queries.add(r * width + at));
                            sums[k * R + r] = key.mul_add(query, sums[k * R + r]);
                        }
                    }
                }
                if whole < d {
                    for k in 0..together {
                        let key: V = load_first(keys[k].add(whole), d - whole);
                        for r in 0..R {
                            let query = V::load(queries.add(r * width + whole));
                            sums[k * R + r] = key.mul_add(query, sums[k * R + r]);
                        }
                    }
                }
                // The lanes of each sum are added up by transposing them: all sums at once.
                for (lane, sum) in sums[..lanes].iter().enumerate() {
                    sum.store(square.as_mut_ptr().add(lane * lanes));
                }
                let mut turned = [0f32; MOST_LANES * MOST_LANES];
                V::transpose(square.as_ptr(), lanes, turned.as_mut_ptr(), lanes);
                for (lane, sum) in sums[..lanes].iter_mut().enumerate() {
                    *sum = V::load(turned.as_ptr().add(lane * lanes));
                }
                let mut half = lanes / 2;
                while half > 0 {
                    for lane in 0..half {
                        sums[lane] = sums[lane].add(sums[half + lane]);
                    }
                    half /= 2;
                }
                sums[0].store(scores.add(first * R));
            }
        }
    }

    #[inline(always)]
    fn key(&self, key: usize) -> *const E {
        self.problem.k.at([self.b, self.kv_head, key])
    }

    /// Softcap, ALiBi and bias, in natural units.
    ///
    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    pub unsafe fn change<V: Vector>(&self, scores: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            self.cap_and_slope::<V>(scores);
            if let Some(bias) = &self.problem.scores.bias {
                for (r, row) in self.rows.iter().enumerate() {
                    let from = bias.at([self.b, row.head, row.query, self.first]);
                    for key in 0..self.keys() {
                        *scores.add(key * R + r) += *from.add(key * bias.stride(3));
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    unsafe fn cap_and_slope<V: Vector>(&self, scores: *mut f32) {
        let options = &self.problem.scores;
        // SAFETY: the caller's promise.
        unsafe {
            let product = options.units(false).product;
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (V::splat(softcap), V::splat(product / softcap));
                for at in (0..self.keys() * R).step_by(V::LANES) {
                    tanh(V::load(scores.add(at)).mul(shrink)).mul(cap).store(scores.add(at));
                }
            }
            if options.softcap.is_none() && product != 1.0 {
                for at in (0..self.keys() * R).step_by(V::LANES) {
                    V::load(scores.add(at)).mul(V::splat(product)).store(scores.add(at));
                }
            }
            if let Some(alibi) = options.alibi {
                let (mut slopes, mut positions, mut keys) =
                    ([0f32; MOST_LANES], [0f32; MOST_LANES], [0f32; MOST_LANES]);
                for lane in 0..MOST_LANES {
                    let row = self.rows[lane % R];
                    slopes[lane] = -alibi.slopes[row.head];
                    positions[lane] = alibi.position(&self.problem.dims, self.b, row.query);
                    keys[lane] = (lane / R) as f32;
                }
                let (slopes, positions) = (V::load(slopes.as_ptr()), V::load(positions.as_ptr()));
                let keys = V::load(keys.as_ptr());
                for at in (0..self.keys() * R).step_by(V::LANES) {
                    let key = V::splat((self.first + at / R) as f32).add(keys);
                    let score = V::load(scores.add(at));
                    slopes.mul_add(positions.sub(key).abs(), score).store(scores.add(at));
                }
            }
        }
    }

    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    pub unsafe fn hide(&self, scores: *mut f32, lanes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            for at in self.keys() * R..(self.keys() * R).next_multiple_of(lanes) {
                *scores.add(at) = f32::NEG_INFINITY;
            }
            for (r, range) in self.ranges.iter().enumerate() {
                // An empty range may stand anywhere.
                let start = range.start.clamp(self.first, self.end);
                let end = if range.is_empty() { start } else { range.end };
                for key in (self.first..start).chain(end..self.end) {
                    *scores.add((key - self.first) * R + r) = f32::NEG_INFINITY;
                }
            }
            if let Some(keep) = &self.problem.scores.keep {
                for (r, row) in self.rows.iter().enumerate() {
                    let from = keep.at([self.b, row.head, row.query, self.first]);
                    for key in 0..self.keys() {
                        if *from.add(key * keep.stride(3)) == 0 {
                            *scores.add(key * R + r) = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }

    /// Scores become weights; their maxima and sums are returned for each row.
    ///
    /// # Safety
    /// As [`Job`](crate::cpu::Job).
    #[inline(always)]
    pub unsafe fn weigh<V: Vector>(&self, scores: *mut f32, max: &mut [f32], sum: &mut [f32]) {
        let words = self.keys() * R;
        // SAFETY: the caller's promise.
        unsafe {
            let mut most = V::splat(f32::NEG_INFINITY);
            for at in (0..words).step_by(V::LANES) {
                // A NaN is passed over here; it reaches the sum by its own exponential.
                most = V::load(scores.add(at)).max(most);
            }
            let power = V::splat(self.problem.scores.units(false).power);
            let mut by_lane = [0f32; MOST_LANES];
            most.mul(power).store(by_lane.as_mut_ptr());
            for (lane, &most) in by_lane[..V::LANES].iter().enumerate() {
                max[lane % R] = max[lane % R].max(most);
            }
            let mut shifts = [0f32; MOST_LANES];
            for (lane, shift) in shifts.iter_mut().enumerate() {
                *shift = if max[lane % R] == f32::NEG_INFINITY { 0.0 } else { -max[lane % R] };
            }
            let shifts = V::load(shifts.as_ptr());
            // Several short sums round less than a long one.
            let mut sums = [V::splat(0.0); CHAINS];
            for at in (0..words).step_by(V::LANES) {
                // Not one rounding for both: the largest score minus itself is to be 0, so that a lone key weighs 1.
                let weight = V::load(scores.add(at)).mul(power).add(shifts).exp2();
                let sum = &mut sums[at / V::LANES % CHAINS];
                *sum = sum.add(weight);
                weight.store(scores.add(at));
            }
            sums[0].add(sums[1]).add(sums[2].add(sums[3])).store(by_lane.as_mut_ptr());
            for (lane, &part) in by_lane[..V::LANES].iter().enumerate() {
                sum[lane % R] += part;
            }
        }
    }
}
