//! From the scores of a tile to its weights: the softmax over keys that arrive block by block (Milakov and Gimelshein,
//! <https://arxiv.org/abs/1805.02867>).
//!
//! Queries are lanes: a maximum or a sum over keys goes down the rows of a panel, and nothing is reduced across lanes,
//! except for the lanes of a narrow tile that belong to the same query.

use super::scores::TileScores;
use super::state::PanelState;
use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector};

/// The number of partial sums of a column: several short sums round less than a long one.
const PARTIAL_SUMS: usize = 4;

/// The most vectors of columns that are taken at once.
const MAX_VECTORS: usize = 3;

/// The products of one tile with some keys (keys, panel), which become weights. Independent of the type of elements, so
/// that its code is compiled once for all types.
pub(super) struct TileSoftmax<'a> {
    /// The scores, which f32 weights replace.
    pub scores: TileScores<'a>,
    /// The depth of the next product, in words.
    pub depth: usize,
    /// `depth` rows of a panel for pairs of bf16 weights.
    pub pairs: *mut f32,
    pub state: PanelState,
    /// A panel that receives the factors by which earlier sums shrink.
    pub factors: *mut f32,
    /// Takes a copy of the scores, (rows, panel), if statistics are requested.
    pub scores_out: Option<*mut f32>,
}

impl SimdTask for &TileSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the instruction set of K; the pointers are valid for a panel of the sizes that the
        // fields name.
        unsafe {
            K::Vector::run_simd(&self.scores);
            if let Some(scores_out) = self.scores_out {
                self.scores.scores.cast_const().copy_to_nonoverlapping(scores_out, self.scores.rows * K::PANEL);
            }
            match self.scores.tile.vectors {
                1 => self.softmax::<K>(1, 0),
                2 => self.softmax::<K>(2, 0),
                3 if const { K::VECTORS >= 3 } => self.softmax::<K>(3, 0),
                vectors => (0..vectors).for_each(|vector| self.softmax::<K>(1, vector)),
            }
            if const { !K::IS_BF16 } && self.drops() {
                for at in self.scores.offsets::<K::Vector>() {
                    let to = self.scores.scores.add(at);
                    self.drop_weights::<K>(K::Vector::load(to), at).store(to);
                }
            }
        }
    }
}

impl TileSoftmax<'_> {
    /// Returns whether weights are dropped.
    fn drops(&self) -> bool {
        self.scores.inputs.options.dropout.is_some()
    }

    /// Multiplies a vector of weights by its dropout factors.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; weights are dropped.
    #[inline(always)]
    unsafe fn drop_weights<K: Kernel>(&self, weights: K::Vector, at: usize) -> K::Vector {
        // SAFETY: as this method's contract.
        unsafe { weights.mul(K::Vector::load(self.scores.dropout.add(at))) }
    }

    /// Computes the weights of some vectors of columns, from `first_vector` on, and the new maxima, sums and factors.
    /// The number of vectors is a constant after inlining into [`SimdTask::run`].
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the panel has the vectors.
    #[inline(always)]
    unsafe fn softmax<K: Kernel>(&self, vectors: usize, first_vector: usize) {
        // SAFETY: as this method's contract.
        unsafe {
            let lanes = K::Vector::LANES;
            let rows = self.scores.rows;
            let units = self.scores.units;
            let first_column = first_vector * lanes;
            let column = |n: usize| first_column + n * lanes;
            let exponent = K::Vector::splat(units.exponent);
            let unit = K::Vector::splat(units.exponent_unit);
            let mut shifts = [K::Vector::splat(f32::NEG_INFINITY); MAX_VECTORS];
            let most = &mut shifts[..vectors];
            for row in 0..rows {
                for (n, largest) in most.iter_mut().enumerate() {
                    // A NaN is not the maximum; it reaches the sum through its exponential.
                    *largest = K::Vector::load(self.scores.scores.add(row * K::PANEL + column(n))).max(*largest);
                }
            }
            if self.scores.tile.width < K::PANEL {
                self.share_maximum(most);
            }
            for (n, shift) in most.iter_mut().enumerate() {
                let before = K::Vector::load(self.state.max.add(column(n)));
                let after = shift.mul(exponent).max(before);
                after.store(self.state.max.add(column(n)));
                // A column without a key so far has no shift: 2^(-inf - 0) is 0, where -inf - -inf would be NaN.
                let has_key = K::Vector::splat(f32::MIN).less_than(after);
                let negative = K::Vector::splat(0.0).sub(after);
                *shift = K::Vector::select(has_key, negative, K::Vector::splat(0.0));
                before.add(*shift).mul(unit).exp2().store(self.factors.add(column(n)));
            }
            let mut weights = ScoreWeights::<K> { scores: self.scores.scores, first_column, exponent, shifts };
            if units.exponent_unit != 1.0 {
                // The exponents replace the scores, in powers of two.
                for row in 0..rows {
                    for n in 0..vectors {
                        weights.exponent_of(row, n).mul(unit).store(weights.at(row, n));
                    }
                }
                weights.exponent = K::Vector::splat(1.0);
                weights.shifts = [K::Vector::splat(0.0); MAX_VECTORS];
            }
            let mut sums = [[K::Vector::splat(0.0); MAX_VECTORS]; PARTIAL_SUMS];
            if const { !K::IS_BF16 } {
                let whole = rows / PARTIAL_SUMS * PARTIAL_SUMS;
                for first_row in (0..whole).step_by(PARTIAL_SUMS) {
                    for (offset, partial) in sums.iter_mut().enumerate() {
                        weights.store_and_add(first_row + offset, &mut partial[..vectors]);
                    }
                }
                for row in whole..rows {
                    weights.store_and_add(row, &mut sums[0][..vectors]);
                }
            } else {
                for pair in 0..rows.div_ceil(2) {
                    for (n, sum) in sums[0][..vectors].iter_mut().enumerate() {
                        let mut halves = [K::Vector::splat(0.0); 2];
                        for (row, half) in (2 * pair..rows).zip(&mut halves) {
                            *half = weights.exponent_of(row, n).exp2();
                        }
                        let [low, high] = &mut halves;
                        *sum = sum.add(low.add(*high));
                        if self.drops() {
                            let at = 2 * pair * K::PANEL + column(n);
                            *low = self.drop_weights::<K>(*low, at);
                            if 2 * pair + 1 < rows {
                                *high = self.drop_weights::<K>(*high, at + K::PANEL);
                            }
                        }
                        low.store_pairs(*high, self.pairs.add(pair * K::PANEL + column(n)));
                    }
                }
                for row in rows.div_ceil(2)..self.depth {
                    for n in 0..vectors {
                        K::Vector::splat(0.0).store(self.pairs.add(row * K::PANEL + column(n)));
                    }
                }
            }
            let [a, b, c, d] = sums;
            for n in 0..vectors {
                let sum = a[n].add(b[n]).add(c[n].add(d[n]));
                let at = self.state.sum.add(column(n));
                K::Vector::load(at).mul_add(K::Vector::load(self.factors.add(column(n))), sum).store(at);
            }
        }
    }

    /// Sets the columns of each query of a narrow tile to the largest of their scores.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the vectors are all vectors of the panel.
    #[inline(always)]
    unsafe fn share_maximum<V: Vector>(&self, largest: &mut [V]) {
        let mut columns = [f32::NEG_INFINITY; MAX_LANES];
        let mut most = largest[0];
        // SAFETY: as this method's contract; the array has an element for each lane.
        unsafe {
            largest.iter().for_each(|largest| most = most.max(*largest));
            most.store(columns.as_mut_ptr());
            let mut width = V::LANES;
            while width > self.scores.tile.width {
                width /= 2;
                for column in 0..width {
                    columns[column] = columns[column].max(columns[width + column]);
                }
            }
            for column in width..V::LANES {
                columns[column] = columns[column - width];
            }
            largest.fill(V::load(columns.as_ptr()));
        }
    }
}

/// The computation of weights from the scores of some vectors of columns.
struct ScoreWeights<K: Kernel> {
    scores: *mut f32,
    first_column: usize,
    exponent: K::Vector,
    shifts: [K::Vector; MAX_VECTORS],
}

impl<K: Kernel> ScoreWeights<K> {
    /// Returns a pointer to a vector of scores.
    #[inline(always)]
    fn at(&self, row: usize, n: usize) -> *mut f32 {
        self.scores.wrapping_add(row * K::PANEL + self.first_column + n * K::Vector::LANES)
    }

    /// Returns the exponents of a row of the panel: scores minus the largest, in
    /// [`ScoreUnits::exponent_unit`](super::options::ScoreUnits::exponent_unit). A function, since a closure would not
    /// be compiled for the instruction set.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the scores have the row and the vector.
    #[inline(always)]
    unsafe fn exponent_of(&self, row: usize, n: usize) -> K::Vector {
        // Two roundings: the largest score minus itself must be 0, so that the weight of a single key is 1.
        // SAFETY: as this method's contract.
        unsafe { K::Vector::load(self.at(row, n)).mul(self.exponent).add(self.shifts[n]) }
    }

    /// Replaces a row of scores by weights, and adds the weights to the sums.
    ///
    /// # Safety
    /// As [`exponent_of`](Self::exponent_of), whose unit must be a power of two.
    #[inline(always)]
    unsafe fn store_and_add(&self, row: usize, sums: &mut [K::Vector]) {
        for (n, sum) in sums.iter_mut().enumerate() {
            // SAFETY: as this method's contract.
            unsafe {
                let weight = self.exponent_of(row, n).exp2();
                *sum = sum.add(weight);
                weight.store(self.at(row, n));
            }
        }
    }
}
