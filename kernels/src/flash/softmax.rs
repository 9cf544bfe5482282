//! From the scores of a tile to its weights: softcap, ALiBi, bias and masks, then the softmax over keys that arrive block by
//! block (Milakov and Gimelshein, <https://arxiv.org/abs/1805.02867>).
//!
//! Queries are lanes: a maximum or a sum over keys goes down the rows of a panel, and nothing is reduced across lanes.

use super::problem::{ScoreInputs, ScoreUnits, Strided};
use super::tile::Tile;
use super::workspace::PanelState;
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, SimdTask, Vector, tanh};

/// Sums that a thread adds to in turn: several short sums round less than a long one.
pub(super) const PARTIAL_SUMS: usize = 4;

/// The scores of one tile over some keys (keys, panel), which become weights. Does not depend on the elements that they were
/// made of, so that it is compiled once for all of them.
pub(super) struct TileSoftmax<'a> {
    pub inputs: ScoreInputs<'a>,
    pub tile: &'a Tile,
    pub units: ScoreUnits,
    /// The key of the first scores.
    pub first: usize,
    pub keys: usize,
    /// The words of depth that the next product reads.
    pub depth: usize,
    /// Whether some query does not see some of the keys.
    pub is_masked: bool,
    /// `keys` rows of a panel. f32 weights replace them.
    pub scores: *mut f32,
    /// `depth` rows of a panel for pairs of bf16 weights.
    pub pairs: *mut f32,
    /// `LANES` rows of a block.
    pub staging: *mut f32,
    pub state: PanelState,
    /// A panel that receives the factors by which earlier sums shrink.
    pub factors: *mut f32,
}

impl SimdTask for TileSoftmax<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the tier of K; the pointers are valid for a panel of the sizes that the fields name.
        unsafe {
            if self.inputs.options.modify_scores() {
                self.modify::<K>();
            }
            if self.is_masked {
                self.mask::<K>();
            }
            match self.tile.vectors {
                1 => self.softmax::<K, 1>(0),
                2 => self.softmax::<K, 2>(0),
                3 => self.softmax::<K, 3>(0),
                vectors => (0..vectors).for_each(|vector| self.softmax::<K, 1>(vector)),
            }
        }
    }
}

/// Replaces the scores of some keys by an expression of the score, the key (counted from the first) and the column. A closure
/// would not be compiled for the tier.
macro_rules! for_each {
    ($this:expr, $K:ident, $keys:expr, |$score:ident, $key:ident, $column:ident| $value:expr) => {
        for $key in $keys {
            for vector in 0..$this.tile.vectors {
                let $column = vector * $K::Vector::LANES;
                let at = $this.scores.add($key * $K::PANEL + $column);
                let $score = $K::Vector::load(at);
                $value.store(at);
            }
        }
    };
}

impl TileSoftmax<'_> {
    /// Softcap, ALiBi and bias, in natural units.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn modify<K: Kernel>(&self) {
        let (options, product) = (&self.inputs.options, self.units.product);
        // SAFETY: as this method's contract; the arrays have an element for each column.
        unsafe {
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (K::Vector::splat(softcap), K::Vector::splat(product / softcap));
                for_each!(self, K, 0..self.keys, |score, _key, _column| tanh(score.mul(shrink)).mul(cap));
            } else if product != 1.0 {
                let product = K::Vector::splat(product);
                for_each!(self, K, 0..self.keys, |score, _key, _column| score.mul(product));
            }
            if let Some(alibi) = &options.alibi {
                let (mut slopes, mut positions) = ([0f32; MAX_COLUMNS], [0f32; MAX_COLUMNS]);
                for (column, row) in self.tile.rows.clone().enumerate() {
                    let row = self.inputs.dims.row(self.tile.kv, row);
                    (slopes[column], positions[column]) = self.inputs.slope_and_position(alibi, row);
                }
                for_each!(self, K, 0..self.keys, |score, key, column| {
                    let position = K::Vector::load(positions.as_ptr().add(column));
                    let distance = position.sub(K::Vector::splat((self.first + key) as f32)).abs();
                    K::Vector::load(slopes.as_ptr().add(column)).mul_add(distance, score)
                });
            }
            if let Some(bias) = &options.bias {
                self.combine::<K, f32, true>(bias);
            }
        }
    }

    /// Scores of hidden keys become -inf.
    ///
    /// # Safety
    /// As [`SimdTask::run`].
    #[inline(always)]
    unsafe fn mask<K: Kernel>(&self) {
        let every = &self.tile.every;
        // SAFETY: as this method's contract; the bounds have an element for each column.
        unsafe {
            let hidden = K::Vector::splat(f32::NEG_INFINITY);
            if every.start > self.first || every.end < self.first + self.keys {
                let (starts, ends) = self.tile.bounds(self.first, self.keys);
                // Keys that every query sees stay as they are: of a window, all but the edges.
                let from = every.start.saturating_sub(self.first).min(self.keys);
                let to = every.end.saturating_sub(self.first).clamp(from, self.keys);
                for_each!(self, K, (0..from).chain(to..self.keys), |score, key, column| {
                    let key = K::Vector::splat(key as f32);
                    let after_start =
                        K::Vector::select(key.less_than(K::Vector::load(starts.as_ptr().add(column))), hidden, score);
                    K::Vector::select(key.less_than(K::Vector::load(ends.as_ptr().add(column))), after_start, hidden)
                });
            }
            if let Some(keep) = &self.inputs.options.keep {
                self.combine::<K, u8, false>(keep);
            }
        }
    }

    /// Adds to every score its entry of a tensor (B, H, T_q, T_kv), or hides it where the entry is 0: rows of the tensor are
    /// staged, then transposed.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the tensor has an entry for each score.
    #[inline(always)]
    unsafe fn combine<K: Kernel, T: Copy + Into<f32>, const IS_BIAS: bool>(&self, tensor: &Strided<T, 4>) {
        let (lanes, step) = (K::Vector::LANES, tensor.strides[3]);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for vector in 0..self.tile.vectors {
            let first_row = self.tile.rows.start + vector * lanes;
            let filled = lanes.min(self.tile.rows.end - first_row);
            // SAFETY: as this method's contract; the staging memory has `lanes` rows of a block.
            unsafe {
                let hidden = K::Vector::splat(f32::NEG_INFINITY);
                for lane in 0..filled {
                    let row = self.inputs.dims.row(self.tile.kv, first_row + lane);
                    let from = tensor.at([row.b, row.head, row.query, self.first]);
                    let to = self.staging.add(lane * K::BLOCK);
                    if step == 1 {
                        (0..self.keys).for_each(|key| *to.add(key) = (*from.add(key)).into());
                    } else {
                        (0..self.keys).for_each(|key| *to.add(key) = (*from.add(key * step)).into());
                    }
                }
                for key in (0..self.keys).step_by(lanes) {
                    K::Vector::transpose(self.staging.add(key), K::BLOCK, square.as_mut_ptr(), lanes);
                    for k in 0..lanes.min(self.keys - key) {
                        let at = self.scores.add((key + k) * K::PANEL + vector * lanes);
                        let (score, entry) = (K::Vector::load(at), K::Vector::load(square.as_ptr().add(k * lanes)));
                        let combined = match IS_BIAS {
                            true => score.add(entry),
                            false => K::Vector::select(entry.less_than(K::Vector::splat(0.5)), hidden, score),
                        };
                        combined.store(at);
                    }
                }
            }
        }
    }

    /// The weights of N vectors of columns, from vector `first` on, and their new maxima, sums and factors.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the panel has the vectors.
    #[inline(always)]
    unsafe fn softmax<K: Kernel, const N: usize>(&self, first: usize) {
        // SAFETY: as this method's contract.
        unsafe {
            let lanes = K::Vector::LANES;
            let first_column = first * lanes;
            let column = |n: usize| first_column + n * lanes;
            let exponent = K::Vector::splat(self.units.exponent);
            let unit = K::Vector::splat(self.units.exponent_unit);
            let mut most = [K::Vector::splat(f32::NEG_INFINITY); N];
            for key in 0..self.keys {
                for (n, most) in most.iter_mut().enumerate() {
                    // A NaN is passed over here; it reaches the sum by its own exponential.
                    *most = K::Vector::load(self.scores.add(key * K::PANEL + column(n))).max(*most);
                }
            }
            let mut shifts = most;
            for (n, shift) in shifts.iter_mut().enumerate() {
                let before = K::Vector::load(self.state.max.add(column(n)));
                let after = shift.mul(exponent).max(before);
                after.store(self.state.max.add(column(n)));
                // A column that has seen no key has no shift: 2^(-inf - 0) is 0, where -inf - -inf would be NaN.
                let seen = K::Vector::splat(f32::MIN).less_than(after);
                let negative = K::Vector::splat(0.0).sub(after);
                *shift = K::Vector::select(seen, negative, K::Vector::splat(0.0));
                before.add(*shift).mul(unit).exp2().store(self.factors.add(column(n)));
            }
            let mut weights = Weights::<K, N> { scores: self.scores, first_column, exponent, shifts };
            if self.units.exponent_unit != 1.0 {
                // The exponents replace the scores, in powers of two.
                for key in 0..self.keys {
                    for n in 0..N {
                        weights.exponent_of(key, n).mul(unit).store(weights.at(key, n));
                    }
                }
                weights.exponent = K::Vector::splat(1.0);
                weights.shifts = [K::Vector::splat(0.0); N];
            }
            let mut sums = [[K::Vector::splat(0.0); N]; PARTIAL_SUMS];
            if K::ELEMENTS == 1 {
                let whole = self.keys / PARTIAL_SUMS * PARTIAL_SUMS;
                for first in (0..whole).step_by(PARTIAL_SUMS) {
                    for (offset, sums) in sums.iter_mut().enumerate() {
                        weights.store_and_add(first + offset, sums);
                    }
                }
                for key in whole..self.keys {
                    weights.store_and_add(key, &mut sums[0]);
                }
            } else {
                for pair in 0..self.keys.div_ceil(2) {
                    for (n, sum) in sums[0].iter_mut().enumerate() {
                        let low = weights.get(2 * pair, n);
                        let to = self.pairs.add(pair * K::PANEL + column(n));
                        if 2 * pair + 1 < self.keys {
                            let high = weights.get(2 * pair + 1, n);
                            *sum = sum.add(low.add(high));
                            K::store_pairs(low, high, to);
                        } else {
                            *sum = sum.add(low);
                            K::store_pairs(low, K::Vector::splat(0.0), to);
                        }
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
                let at = self.state.sum.add(column(n));
                K::Vector::load(at).mul_add(K::Vector::load(self.factors.add(column(n))), sum).store(at);
            }
        }
    }
}

/// The weights of N vectors of columns, computed from their scores.
struct Weights<K: Kernel, const N: usize> {
    scores: *mut f32,
    first_column: usize,
    exponent: K::Vector,
    shifts: [K::Vector; N],
}

impl<K: Kernel, const N: usize> Weights<K, N> {
    #[inline(always)]
    fn at(&self, key: usize, n: usize) -> *mut f32 {
        self.scores.wrapping_add(key * K::PANEL + self.first_column + n * K::Vector::LANES)
    }

    /// The exponents of a key: scores minus the largest, in [`ScoreUnits::exponent_unit`]. A function, since a closure would
    /// not be compiled for the tier.
    ///
    /// # Safety
    /// The processor has the tier of K; the scores have the key and the vector.
    #[inline(always)]
    unsafe fn exponent_of(&self, key: usize, n: usize) -> K::Vector {
        // Two roundings: the largest score minus itself is to be 0, so that a lone key weighs 1.
        // SAFETY: as this method's contract.
        unsafe { K::Vector::load(self.at(key, n)).mul(self.exponent).add(self.shifts[n]) }
    }

    /// # Safety
    /// As [`exponent_of`](Self::exponent_of), which is then in powers of two.
    #[inline(always)]
    unsafe fn get(&self, key: usize, n: usize) -> K::Vector {
        // SAFETY: as this method's contract.
        unsafe { self.exponent_of(key, n).exp2() }
    }

    /// Replaces the scores of a key by its weights, and adds them to the sums.
    ///
    /// # Safety
    /// As [`get`](Self::get).
    #[inline(always)]
    unsafe fn store_and_add(&self, key: usize, sums: &mut [K::Vector; N]) {
        for (n, sum) in sums.iter_mut().enumerate() {
            // SAFETY: as this method's contract.
            unsafe {
                let weight = self.get(key, n);
                *sum = sum.add(weight);
                weight.store(self.at(key, n));
            }
        }
    }
}
