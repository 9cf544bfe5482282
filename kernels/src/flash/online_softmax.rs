//! The softmax over keys that arrive block by block (Milakov and Gimelshein, <https://arxiv.org/abs/1805.02867>).
//!
//! Queries are lanes: a maximum or a sum over keys goes down the rows of a panel, and nothing is reduced across lanes.

use crate::cpu::{Kernel, Vector};

/// Sums that take turns.
const CHAINS: usize = 4;

/// Scores of some keys (keys, panel) that become weights, and what is known of their columns.
pub(super) struct SoftmaxStep {
    pub scores: *mut f32,
    /// Where pairs of bf16 weights go; f32 weights take the place of the scores.
    pub pairs: *mut f32,
    pub keys: usize,
    /// The words of depth that the next product reads.
    pub depth: usize,
    /// From scores to powers of two.
    pub power: f32,
    pub max: *mut f32,
    pub sum: *mut f32,
    /// Receives the factor by which what was summed before shrinks.
    pub factors: *mut f32,
}

impl SoftmaxStep {
    /// `vectors` of the panel hold queries.
    ///
    /// # Safety
    /// As [`Vector`]; the pointers are valid for a panel, the scores for `keys` rows of it, the pairs for `depth`.
    #[inline(always)]
    pub unsafe fn run<K: Kernel>(&self, vectors: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match vectors {
                1 => self.columns::<K, 1>(0),
                2 => self.columns::<K, 2>(0),
                3 => self.columns::<K, 3>(0),
                _ => (0..vectors).for_each(|vector| self.columns::<K, 1>(vector)),
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    #[inline(always)]
    unsafe fn columns<K: Kernel, const N: usize>(&self, first: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = K::Vector::LANES;
            let first_column = first * lanes;
            let column = |n: usize| first_column + n * lanes;
            let power = K::Vector::splat(self.power);
            let mut most = [K::Vector::splat(f32::NEG_INFINITY); N];
            for key in 0..self.keys {
                for (n, most) in most.iter_mut().enumerate() {
                    // A NaN is passed over here; it reaches the sum by its own exponential.
                    *most = K::Vector::load(self.scores.add(key * K::PANEL + column(n))).max(*most);
                }
            }
            let mut shifts = most;
            for (n, shift) in shifts.iter_mut().enumerate() {
                let before = K::Vector::load(self.max.add(column(n)));
                let after = shift.mul(power).max(before);
                after.store(self.max.add(column(n)));
                // A column that has seen no key has no shift: -inf - 0 is 0 as a power, -inf - -inf would be NaN.
                let seen = K::Vector::splat(f32::MIN).less_than(after);
                let negative = K::Vector::splat(0.0).sub(after);
                *shift = K::Vector::select(seen, negative, K::Vector::splat(0.0));
                before.add(*shift).exp2().store(self.factors.add(column(n)));
            }
            // Several short sums round less than a long one.
            let mut sums = [[K::Vector::splat(0.0); N]; CHAINS];
            if K::ELEMENTS == 1 {
                let whole = self.keys / CHAINS * CHAINS;
                for first in (0..whole).step_by(CHAINS) {
                    for (chain, sums) in sums.iter_mut().enumerate() {
                        self.weigh::<K, N>(first + chain, (first_column, &shifts), sums);
                    }
                }
                for key in whole..self.keys {
                    self.weigh::<K, N>(key, (first_column, &shifts), &mut sums[0]);
                }
            } else {
                for pair in 0..self.keys / 2 {
                    for (n, sum) in sums[0].iter_mut().enumerate() {
                        let low = self.weight::<K>(2 * pair, column(n), shifts[n]);
                        let high = self.weight::<K>(2 * pair + 1, column(n), shifts[n]);
                        *sum = sum.add(low.add(high));
                        K::store_pairs(low, high, self.pairs.add(pair * K::PANEL + column(n)));
                    }
                }
                if self.keys % 2 == 1 {
                    for (n, sum) in sums[0].iter_mut().enumerate() {
                        let low = self.weight::<K>(self.keys - 1, column(n), shifts[n]);
                        *sum = sum.add(low);
                        let at = self.pairs.add(self.keys / 2 * K::PANEL + column(n));
                        K::store_pairs(low, K::Vector::splat(0.0), at);
                    }
                }
                for row in self.keys.div_ceil(2)..self.depth {
                    for n in 0..N {
                        K::Vector::splat(0.0).store(self.pairs.add(row * K::PANEL + column(n)));
                    }
                }
            }
            let [a, b, c, d] = sums;
            for n in 0..N {
                let sum = a[n].add(b[n]).add(c[n].add(d[n]));
                let at = self.sum.add(column(n));
                K::Vector::load(at).mul_add(K::Vector::load(self.factors.add(column(n))), sum).store(at);
            }
        }
    }

    /// Weights of one key in the place of its scores, added to the sums.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    #[inline(always)]
    unsafe fn weigh<K: Kernel, const N: usize>(
        &self,
        key: usize,
        (first_column, shifts): (usize, &[K::Vector; N]),
        sums: &mut [K::Vector; N],
    ) {
        for (n, sum) in sums.iter_mut().enumerate() {
            let column = first_column + n * K::Vector::LANES;
            // SAFETY: the caller's promise.
            unsafe {
                let weight = self.weight::<K>(key, column, shifts[n]);
                *sum = sum.add(weight);
                weight.store(self.scores.add(key * K::PANEL + column));
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run). A function, since a closure would not be compiled for the tier.
    #[inline(always)]
    unsafe fn weight<K: Kernel>(&self, key: usize, column: usize, shift: K::Vector) -> K::Vector {
        // SAFETY: the caller's promise.
        unsafe {
            let score = K::Vector::load(self.scores.add(key * K::PANEL + column));
            // Not one rounding for both: the largest score minus itself is to be 0, so that a lone key weighs 1.
            score.mul(K::Vector::splat(self.power)).add(shift).exp2()
        }
    }
}
