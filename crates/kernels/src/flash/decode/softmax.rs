//! From scores to weights. Does not depend on the elements that the scores were made of, so that it is compiled once
//! for all of them and for any number of rows.

use std::ops::Range;

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector, tanh};
use crate::flash::problem::{Row, ScoreInputs, ScoreUnits, Strided};
use crate::flash::scores::DistanceBias;
use crate::flash::softmax::PARTIAL_SUMS;

/// The scores (keys, R) of some rows, which become weights. R is a power of two, at most a vector.
pub(super) struct RowSoftmax<'a> {
    pub inputs: ScoreInputs<'a>,
    /// R rows.
    pub rows: &'a [Row],
    /// What each row sees of the keys.
    pub ranges: &'a [Range<usize>],
    pub keys: Range<usize>,
    /// A vector more than the scores.
    pub scores: *mut f32,
    /// Receive the largest exponent of each row and the sum of its weights.
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
}

/// Replaces every vector of scores by an expression of itself and its position. A closure would not be compiled for the
/// tier.
macro_rules! for_each {
    ($this:expr, $V:ty, |$score:ident, $at:ident| $value:expr) => {
        for $at in (0..$this.keys.len() * $this.rows.len()).step_by(<$V>::LANES) {
            let $score = <$V>::load($this.scores.add($at));
            $value.store($this.scores.add($at));
        }
    };
}

impl SimdTask for RowSoftmax<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let units = self.inputs.options.units(false);
        // SAFETY: the processor has the tier of K; the scores are valid for all keys and rows, rounded up to a vector.
        unsafe {
            self.modify::<K::Vector>(units);
            self.mask(K::Vector::LANES);
            self.softmax::<K::Vector>(units);
        }
    }
}

impl RowSoftmax<'_> {
    /// Softcap, ALiBi and biases, in natural units.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn modify<V: Vector>(&self, units: ScoreUnits) {
        let (options, first) = (&self.inputs.options, self.keys.start);
        // SAFETY: as this method's contract; the arrays have an element for each lane.
        unsafe {
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (V::splat(softcap), V::splat(units.product / softcap));
                for_each!(self, V, |score, at| tanh(score.mul(shrink)).mul(cap));
            } else if units.product != 1.0 {
                let product = V::splat(units.product);
                for_each!(self, V, |score, at| score.mul(product));
            }
            if let Some(alibi) = &options.alibi {
                let (mut slopes, mut positions) = ([0f32; MAX_LANES], [0f32; MAX_LANES]);
                let mut keys = [0f32; MAX_LANES];
                for lane in 0..MAX_LANES {
                    let row = self.rows[lane % self.rows.len()];
                    (slopes[lane], positions[lane]) = self.inputs.slope_and_position(alibi, row);
                    keys[lane] = (lane / self.rows.len()) as f32;
                }
                let (slopes, positions) = (V::load(slopes.as_ptr()), V::load(positions.as_ptr()));
                let keys = V::load(keys.as_ptr());
                for_each!(self, V, |score, at| {
                    let key = V::splat((first + at / self.rows.len()) as f32).add(keys);
                    slopes.mul_add(positions.sub(key).abs(), score)
                });
            }
            if let Some(bias) = &options.distance_bias {
                self.add_distances(bias);
            }
            if let Some(bias) = &options.bias {
                self.combine(bias, |score, bias| score + bias);
            }
        }
    }

    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn add_distances(&self, bias: &DistanceBias) {
        let (rows, keys) = (self.rows.len(), &self.keys);
        for (r, &row) in self.rows.iter().enumerate() {
            let (origin, biases) = (bias.origin(&self.inputs.dims, row), bias.of_row(row));
            // The keys that have entries.
            let first = keys.start.max(usize::try_from(-origin).unwrap_or(0)).min(keys.end);
            let end = keys.end.min(usize::try_from(bias.len as i64 - origin).unwrap_or(0)).max(first);
            let biases = &biases[(origin + first as i64).clamp(0, bias.len as i64) as usize..];
            // SAFETY: as this method's contract; the keys lie within those of the scores.
            unsafe {
                let to = self.scores.add((first - keys.start) * rows + r);
                // A length that the compiler knows lets it use vectors.
                if rows == 1 {
                    (0..end - first).for_each(|key| *to.add(key) += biases[key]);
                    continue;
                }
                (0..end - first).for_each(|key| *to.add(key * rows) += biases[key]);
            }
        }
    }

    /// Scores of hidden keys become -inf, and what fills the last vector up.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn mask(&self, lanes: usize) {
        let (rows, keys) = (self.rows.len(), &self.keys);
        let count = keys.len() * rows;
        // SAFETY: as this method's contract; the ranges lie within the keys.
        unsafe {
            for at in count..count.next_multiple_of(lanes) {
                *self.scores.add(at) = f32::NEG_INFINITY;
            }
            for (r, range) in self.ranges.iter().enumerate() {
                // An empty range may stand anywhere.
                let start = range.start.clamp(keys.start, keys.end);
                let end = if range.is_empty() { start } else { range.end };
                for key in (keys.start..start).chain(end..keys.end) {
                    *self.scores.add((key - keys.start) * rows + r) = f32::NEG_INFINITY;
                }
            }
            if let Some(keep) = &self.inputs.options.keep {
                self.combine(keep, |score, keep| if keep == 0 { f32::NEG_INFINITY } else { score });
            }
        }
    }

    /// Combines every score with its entry of a tensor (B, H, T_q, T_kv).
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the tensor has an entry for each score.
    #[inline(always)]
    unsafe fn combine<T: Copy>(&self, tensor: &Strided<T, 4>, combine: impl Fn(f32, T) -> f32) {
        let (rows, step) = (self.rows.len(), tensor.strides[3]);
        for (r, row) in self.rows.iter().enumerate() {
            let from = tensor.at([row.b, row.head, row.query, self.keys.start]);
            let to = self.scores.wrapping_add(r);
            // SAFETY: as this method's contract.
            unsafe {
                // Lengths and strides that the compiler knows let it use vectors.
                if rows == 1 && step == 1 {
                    (0..self.keys.len()).for_each(|key| *to.add(key) = combine(*to.add(key), *from.add(key)));
                    continue;
                }
                for key in 0..self.keys.len() {
                    *to.add(key * rows) = combine(*to.add(key * rows), *from.add(key * step));
                }
            }
        }
    }

    /// Scores become weights.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn softmax<V: Vector>(&mut self, units: ScoreUnits) {
        // The rows are a power of two.
        let row_of = self.rows.len() - 1;
        // SAFETY: as this method's contract; the arrays have an element for each lane.
        unsafe {
            let mut most = V::splat(f32::NEG_INFINITY);
            for at in (0..self.keys.len() * self.rows.len()).step_by(V::LANES) {
                // A NaN is passed over here; it reaches the sum by its own exponential.
                most = V::load(self.scores.add(at)).max(most);
            }
            let (mut exponent, unit) = (V::splat(units.exponent), V::splat(units.exponent_unit));
            let mut by_lane = [0f32; MAX_LANES];
            most.mul(exponent).store(by_lane.as_mut_ptr());
            for (lane, &most) in by_lane[..V::LANES].iter().enumerate() {
                let max = &mut self.max[lane & row_of];
                *max = max.max(most);
            }
            let mut shifts = [0f32; MAX_LANES];
            for (lane, shift) in shifts.iter_mut().enumerate() {
                let max = self.max[lane & row_of];
                *shift = if max == f32::NEG_INFINITY { 0.0 } else { -max };
            }
            let mut shifts = V::load(shifts.as_ptr());
            if units.exponent_unit != 1.0 {
                // The exponents replace the scores, in powers of two.
                for_each!(self, V, |score, at| score.mul(exponent).add(shifts).mul(unit));
                (exponent, shifts) = (V::splat(1.0), V::splat(0.0));
            }
            let mut sums = [V::splat(0.0); PARTIAL_SUMS];
            for_each!(self, V, |score, at| {
                // Two roundings: the largest score minus itself is to be 0, so that a lone key weighs 1.
                let weight = score.mul(exponent).add(shifts).exp2();
                let sum = &mut sums[at / V::LANES % PARTIAL_SUMS];
                *sum = sum.add(weight);
                weight
            });
            sums[0].add(sums[1]).add(sums[2].add(sums[3])).store(by_lane.as_mut_ptr());
            for (lane, &part) in by_lane[..V::LANES].iter().enumerate() {
                self.sum[lane & row_of] += part;
            }
        }
    }
}
