//! From the scores of a tile to its weights: the softmax over keys that arrive block by block (Milakov and Gimelshein,
//! <https://arxiv.org/abs/1805.02867>). And from the state that it leaves to the output: sinks, division, log-sum-exp, and
//! the transposition to rows.
//!
//! Queries are lanes: a maximum or a sum over keys goes down the rows of a panel, and nothing is reduced across lanes.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::problem::{Call, KvHead, Row, ScoreInputs, SoftmaxStats};
use super::scores::TileScores;
use super::tasks::{PanelState, State};
use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector};
use crate::number::{Number, store_first};

/// Sums that a thread adds to in turn: several short sums round less than a long one.
pub(super) const PARTIAL_SUMS: usize = 4;

/// The products of one tile with some keys (keys, panel), which become weights. Does not depend on the elements that
/// they were made of, so that it is compiled once for all of them.
pub(super) struct TileSoftmax<'a> {
    /// f32 weights replace them.
    pub scores: TileScores<'a>,
    /// The words of depth that the next product reads.
    pub depth: usize,
    /// `depth` rows of a panel for pairs of bf16 weights.
    pub pairs: *mut f32,
    pub state: PanelState,
    /// A panel that receives the factors by which earlier sums shrink.
    pub factors: *mut f32,
    /// As many rows as there are keys, which receive the scores, if those are wanted.
    pub scores_out: Option<*mut f32>,
}

impl SimdTask for TileSoftmax<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the tier of K; the pointers are valid for a panel of the sizes that the fields
        // name.
        unsafe {
            self.scores.finish::<K>(None);
            if let Some(scores_out) = self.scores_out {
                self.scores.scores.cast_const().copy_to_nonoverlapping(scores_out, self.scores.keys * K::PANEL);
            }
            match self.scores.tile.vectors {
                1 => self.softmax::<K, 1>(0),
                2 => self.softmax::<K, 2>(0),
                3 if const { K::VECTORS >= 3 } => self.softmax::<K, 3>(0),
                vectors => (0..vectors).for_each(|vector| self.softmax::<K, 1>(vector)),
            }
            if const { !K::IS_BF16 } && self.drops() {
                for key in 0..self.scores.keys {
                    for column in (0..self.scores.tile.vectors * K::Vector::LANES).step_by(K::Vector::LANES) {
                        let at = self.scores.scores.add(key * K::PANEL + column);
                        self.kept::<K>(K::Vector::load(at), key, column).store(at);
                    }
                }
            }
        }
    }
}

impl TileSoftmax<'_> {
    fn drops(&self) -> bool {
        self.scores.inputs.options.dropout.is_some()
    }

    /// What is left of the weights of a key, from a column on.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; weights are dropped.
    #[inline(always)]
    unsafe fn kept<K: Kernel>(&self, weights: K::Vector, key: usize, column: usize) -> K::Vector {
        // SAFETY: as this method's contract.
        unsafe { weights.mul(K::Vector::load(self.scores.dropout.add(key * K::PANEL + column))) }
    }

    /// The weights of N vectors of columns, from vector `first` on, and their new maxima, sums and factors.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the panel has the vectors.
    #[inline(always)]
    unsafe fn softmax<K: Kernel, const N: usize>(&self, first: usize) {
        // SAFETY: as this method's contract.
        unsafe {
            let (lanes, keys, units) = (K::Vector::LANES, self.scores.keys, self.scores.units);
            let first_column = first * lanes;
            let column = |n: usize| first_column + n * lanes;
            let exponent = K::Vector::splat(units.exponent);
            let unit = K::Vector::splat(units.exponent_unit);
            let mut most = [K::Vector::splat(f32::NEG_INFINITY); N];
            for key in 0..keys {
                for (n, most) in most.iter_mut().enumerate() {
                    // A NaN is passed over here; it reaches the sum by its own exponential.
                    *most = K::Vector::load(self.scores.scores.add(key * K::PANEL + column(n))).max(*most);
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
            let mut weights = Weights::<K, N> { scores: self.scores.scores, first_column, exponent, shifts };
            if units.exponent_unit != 1.0 {
                // The exponents replace the scores, in powers of two.
                for key in 0..keys {
                    for n in 0..N {
                        weights.exponent_of(key, n).mul(unit).store(weights.at(key, n));
                    }
                }
                weights.exponent = K::Vector::splat(1.0);
                weights.shifts = [K::Vector::splat(0.0); N];
            }
            let mut sums = [[K::Vector::splat(0.0); N]; PARTIAL_SUMS];
            if const { !K::IS_BF16 } {
                let whole = keys / PARTIAL_SUMS * PARTIAL_SUMS;
                for first in (0..whole).step_by(PARTIAL_SUMS) {
                    for (offset, sums) in sums.iter_mut().enumerate() {
                        weights.store_and_add(first + offset, sums);
                    }
                }
                for key in whole..keys {
                    weights.store_and_add(key, &mut sums[0]);
                }
            } else {
                for pair in 0..keys.div_ceil(2) {
                    for (n, sum) in sums[0].iter_mut().enumerate() {
                        let mut low = weights.get(2 * pair, n);
                        let to = self.pairs.add(pair * K::PANEL + column(n));
                        if 2 * pair + 1 < keys {
                            let mut high = weights.get(2 * pair + 1, n);
                            *sum = sum.add(low.add(high));
                            if self.drops() {
                                low = self.kept::<K>(low, 2 * pair, column(n));
                                high = self.kept::<K>(high, 2 * pair + 1, column(n));
                            }
                            K::store_pairs(low, high, to);
                        } else {
                            *sum = sum.add(low);
                            if self.drops() {
                                low = self.kept::<K>(low, 2 * pair, column(n));
                            }
                            K::store_pairs(low, K::Vector::splat(0.0), to);
                        }
                    }
                }
                for row in keys.div_ceil(2)..self.depth {
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

    /// The exponents of a key: scores minus the largest, in [`ScoreUnits::exponent_unit`]. A function, since a closure
    /// would not be compiled for the tier.
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

/// Writes the rows whose state is given.
pub(super) struct Epilogue<'a, 'b, E, S> {
    pub call: &'a Call<'b, E, S>,
    pub state: &'a mut State,
    pub kv: KvHead,
    pub rows: Range<usize>,
}

impl<E: Number, S> SimdTask for Epilogue<'_, '_, E, S> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { call, state, kv, rows } = self;
        let (lanes, dims, panel) = (K::Vector::LANES, &call.inputs.dims, state.panel);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for first in rows.clone().step_by(lanes) {
            let column = (first - rows.start) % panel;
            let own = state.of_panel((first - rows.start) / panel);
            let filled = lanes.min(rows.end - first);
            let mut factors = [0f32; MAX_LANES];
            // SAFETY: the processor has the tier of K; the state has `context` rows of a panel, a multiple of `lanes`;
            // the rows of the context are this task's.
            unsafe {
                for (lane, factor) in factors[..filled].iter_mut().enumerate() {
                    let (max, sum) = (*own.max.add(column + lane), *own.sum.add(column + lane));
                    *factor = normalise(call, dims.row(kv, first + lane), max, sum);
                }
                for d in (0..dims.d_v).step_by(lanes) {
                    let from = own.context.add(d * panel + column);
                    K::Vector::transpose(from, panel, square.as_mut_ptr(), lanes);
                    for (lane, &factor) in factors[..filled].iter().enumerate() {
                        let to = call.context_row(dims.row(kv, first + lane)).add(d);
                        let values = K::Vector::load(square.as_ptr().add(lane * lanes));
                        store_first::<E, _>(values.mul(K::Vector::splat(factor)), to, lanes.min(dims.d_v - d));
                    }
                }
            }
        }
    }
}

/// The largest exponent and the sum of the weights of a row, its sink's included.
pub(super) fn with_sink(inputs: &ScoreInputs, row: Row, max: f32, sum: f32) -> SoftmaxStats {
    let Some(sinks) = inputs.options.sinks else { return SoftmaxStats { max, sum } };
    let unit = inputs.options.exponent_unit();
    let sink = sinks[row.head] * (LOG2_E / unit);
    let shift = max.max(sink);
    let finite = if shift == f32::NEG_INFINITY { 0.0 } else { shift };
    SoftmaxStats { max: shift, sum: sum * ((max - finite) * unit).exp2() + ((sink - finite) * unit).exp2() }
}

/// The factor from a sum of weighted values to the context of a row, whose log-sum-exp is written too. `max` is the
/// largest exponent, `sum` that of the weights.
///
/// # Safety
/// The row belongs to the call, and no other thread writes its log-sum-exp.
#[inline(always)]
pub(super) unsafe fn normalise<E, S>(call: &Call<E, S>, row: Row, max: f32, sum: f32) -> f32 {
    let unit = call.inputs.options.exponent_unit();
    let SoftmaxStats { max: shift, sum: whole } = with_sink(&call.inputs, row, max, sum);
    let lse = || match (whole == 0.0, shift * (LN_2 * unit)) {
        (true, _) => f32::NEG_INFINITY,
        // Rounding may not take the least score to -inf.
        (false, most) if shift.is_finite() => most.clamp(f32::MIN, f32::MAX) + whole.ln(),
        (false, most) => most + whole.ln(),
    };
    // SAFETY: as this function's contract.
    unsafe { call.write_lse(row, SoftmaxStats { max: shift, sum: whole }, lse) };
    match (whole == 0.0, shift == max) {
        (true, _) => 0.0,
        (false, true) => 1.0 / whole,
        (false, false) => ((max - shift) * unit).exp2() / whole,
    }
}
