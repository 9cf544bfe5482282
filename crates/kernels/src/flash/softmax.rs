//! From the scores of a tile to its weights: the softmax over keys that arrive block by block (Milakov and Gimelshein,
//! <https://arxiv.org/abs/1805.02867>). And from the state that it leaves to the output: the transposition to rows,
//! parts of the keys, sinks, division, log-sum-exp.
//!
//! Queries are lanes: a maximum or a sum over keys goes down the rows of a panel, and nothing is reduced across lanes,
//! but for those of a narrow tile that are of the same query.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::problem::{Call, Dims, KvHead, Row, ScoreInputs, SoftmaxStats};
use super::scores::TileScores;
use super::tasks::{PanelState, State};
use crate::cpu::{Kernel, MAX_LANES, Scratch, SharedPtr, SimdTask, Vector, Workers, for_each_index};
use crate::number::{Number, store_first};

/// Sums that a thread adds to in turn: several short sums round less than a long one.
const PARTIAL_SUMS: usize = 4;

/// The most vectors of columns that are taken at once.
const MAX_VECTORS: usize = 3;

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
    /// As many rows, which receive the scores, if those are wanted.
    pub scores_out: Option<*mut f32>,
}

impl SimdTask for &TileSoftmax<'_> {
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
                for at in self.scores.entries::<K::Vector>() {
                    let to = self.scores.scores.add(at);
                    self.kept::<K>(K::Vector::load(to), at).store(to);
                }
            }
        }
    }
}

impl TileSoftmax<'_> {
    fn drops(&self) -> bool {
        self.scores.inputs.options.dropout.is_some()
    }

    /// What is left of a vector of weights.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; weights are dropped.
    #[inline(always)]
    unsafe fn kept<K: Kernel>(&self, weights: K::Vector, at: usize) -> K::Vector {
        // SAFETY: as this method's contract.
        unsafe { weights.mul(K::Vector::load(self.scores.dropout.add(at))) }
    }

    /// The weights of so many vectors of columns, from vector `first` on, and their new maxima, sums and factors. The
    /// compiler knows how many where this becomes a part of [`SimdTask::run`].
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the panel has the vectors.
    #[inline(always)]
    unsafe fn softmax<K: Kernel>(&self, vectors: usize, first: usize) {
        // SAFETY: as this method's contract.
        unsafe {
            let (lanes, rows, units) = (K::Vector::LANES, self.scores.rows, self.scores.units);
            let first_column = first * lanes;
            let column = |n: usize| first_column + n * lanes;
            let exponent = K::Vector::splat(units.exponent);
            let unit = K::Vector::splat(units.exponent_unit);
            let mut shifts = [K::Vector::splat(f32::NEG_INFINITY); MAX_VECTORS];
            let most = &mut shifts[..vectors];
            for row in 0..rows {
                for (n, most) in most.iter_mut().enumerate() {
                    // A NaN is passed over here; it reaches the sum by its own exponential.
                    *most = K::Vector::load(self.scores.scores.add(row * K::PANEL + column(n))).max(*most);
                }
            }
            if self.scores.tile.width < K::PANEL {
                self.share_largest(most);
            }
            for (n, shift) in most.iter_mut().enumerate() {
                let before = K::Vector::load(self.state.max.add(column(n)));
                let after = shift.mul(exponent).max(before);
                after.store(self.state.max.add(column(n)));
                // A column that has seen no key has no shift: 2^(-inf - 0) is 0, where -inf - -inf would be NaN.
                let seen = K::Vector::splat(f32::MIN).less_than(after);
                let negative = K::Vector::splat(0.0).sub(after);
                *shift = K::Vector::select(seen, negative, K::Vector::splat(0.0));
                before.add(*shift).mul(unit).exp2().store(self.factors.add(column(n)));
            }
            let mut weights = Weights::<K> { scores: self.scores.scores, first_column, exponent, shifts };
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
                for first in (0..whole).step_by(PARTIAL_SUMS) {
                    for (offset, sums) in sums.iter_mut().enumerate() {
                        weights.store_and_add(first + offset, &mut sums[..vectors]);
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
                            *low = self.kept::<K>(*low, at);
                            if 2 * pair + 1 < rows {
                                *high = self.kept::<K>(*high, at + K::PANEL);
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

    /// Gives the columns of a query of a narrow tile the largest of their scores.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the vectors are those of the panel.
    #[inline(always)]
    unsafe fn share_largest<V: Vector>(&self, largest: &mut [V]) {
        let (mut columns, mut most) = ([f32::NEG_INFINITY; MAX_LANES], largest[0]);
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

/// The weights of some vectors of columns, computed from their scores.
struct Weights<K: Kernel> {
    scores: *mut f32,
    first_column: usize,
    exponent: K::Vector,
    shifts: [K::Vector; MAX_VECTORS],
}

impl<K: Kernel> Weights<K> {
    #[inline(always)]
    fn at(&self, row: usize, n: usize) -> *mut f32 {
        self.scores.wrapping_add(row * K::PANEL + self.first_column + n * K::Vector::LANES)
    }

    /// The exponents of a row of the panel: scores minus the largest, in [`ScoreUnits::exponent_unit`]. A function,
    /// since a closure would not be compiled for the instruction set.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the scores have the row and the vector.
    #[inline(always)]
    unsafe fn exponent_of(&self, row: usize, n: usize) -> K::Vector {
        // Two roundings: the largest score minus itself is to be 0, so that a lone key weighs 1.
        // SAFETY: as this method's contract.
        unsafe { K::Vector::load(self.at(row, n)).mul(self.exponent).add(self.shifts[n]) }
    }

    /// Replaces a row of scores by weights, and adds them to the sums.
    ///
    /// # Safety
    /// As [`exponent_of`](Self::exponent_of), which is then in powers of two.
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

/// Writes the rows whose state is given.
pub(super) struct Epilogue<'a, 'b, E> {
    pub call: &'a Call<'b, E>,
    pub state: &'a mut State,
    pub kv: KvHead,
    pub rows: Range<usize>,
    /// Takes the rows where the state is that after one part of the keys, the number of which is given.
    pub partials: Option<(&'a Partials, usize)>,
}

impl<E: Number> SimdTask for Epilogue<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { call, state, kv, rows, partials } = self;
        let (lanes, dims, panel) = (K::Vector::LANES, &call.inputs.dims, state.panel);
        let mut square = [0f32; MAX_LANES * MAX_LANES];
        for first in rows.clone().step_by(lanes) {
            let column = (first - rows.start) % panel;
            let own = state.of_panel((first - rows.start) / panel);
            let filled = lanes.min(rows.end - first);
            let mut factors = [1f32; MAX_LANES];
            // SAFETY: the processor has the instruction set of K; the state has `context` rows of a panel, a multiple
            // of `lanes`; the rows of the context are this task's.
            unsafe {
                for (lane, factor) in factors[..filled].iter_mut().enumerate() {
                    let (max, sum) = (*own.max.add(column + lane), *own.sum.add(column + lane));
                    match partials {
                        Some((partials, part)) => partials.set(partials.row(kv, first + lane, part), max, sum),
                        None => *factor = normalise(call, dims.row(kv, first + lane), max, sum),
                    }
                }
                for d in (0..dims.d_v).step_by(lanes) {
                    let (from, width) = (own.context.add(d * panel + column), lanes.min(dims.d_v - d));
                    K::Vector::transpose(from, panel, square.as_mut_ptr(), lanes);
                    for (lane, &factor) in factors[..filled].iter().enumerate() {
                        let values = K::Vector::load(square.as_ptr().add(lane * lanes)).mul(K::Vector::splat(factor));
                        let row = first + lane;
                        match partials {
                            Some((partials, part)) => values.store(partials.row(kv, row, part).add(d)),
                            None => store_first(values, call.context_row(dims.row(kv, row)).add(d), width),
                        }
                    }
                }
            }
        }
    }
}

/// What is found of rows over each part of the keys, where these are split: D_v sums of weighted values, up to whole
/// vectors, the largest exponent and the sum of the weights. Each task writes rows of its own.
pub(super) struct Partials {
    /// Of the memory: (B, H_kv, rows, parts, width + 2).
    at: SharedPtr<f32>,
    _memory: Scratch,
    heads: usize,
    rows: usize,
    parts: usize,
    /// D_v, up to a whole vector.
    width: usize,
}

impl Partials {
    /// For so many rows of each key head; `None` where there is no memory for them.
    pub fn new(dims: &Dims, rows: usize, parts: usize) -> Option<Self> {
        let width = dims.d_v.checked_next_multiple_of(MAX_LANES)?;
        let mut memory = Scratch::try_zeros(&[dims.b * dims.h_kv, rows, parts, width + 2])?;
        Some(Self { at: SharedPtr(memory.as_mut_ptr()), _memory: memory, heads: dims.h_kv, rows, parts, width })
    }

    /// The words from one row to the next.
    pub fn stride(&self) -> usize {
        self.parts * (self.width + 2)
    }

    #[inline(always)]
    pub fn row(&self, kv: KvHead, row: usize, part: usize) -> *mut f32 {
        let row = (kv.b * self.heads + kv.head) * self.rows + row;
        self.at.0.wrapping_add(row * self.stride() + part * (self.width + 2))
    }

    /// Writes what stands behind the sums of a row.
    ///
    /// # Safety
    /// The row is one of these, and no other thread uses it.
    #[inline(always)]
    pub unsafe fn set(&self, row: *mut f32, max: f32, sum: f32) {
        // SAFETY: as this method's contract.
        unsafe {
            row.add(self.width).write(max);
            row.add(self.width + 1).write(sum);
        }
    }

    /// Merges the parts of each row of a call, in order, and writes it.
    pub fn merge<E: Number>(self, call: &Call<E>) {
        let (dims, width, unit) = (&call.inputs.dims, self.width, call.inputs.options.exponent_unit());
        let (rows, d_v, heads) = (dims.rows(), dims.d_v, dims.b * dims.h_kv);
        // Brief for most calls: it is over before another thread would have begun.
        let sums = heads * rows * self.parts * d_v;
        let workers = Workers::of(sums, sums.saturating_mul(size_of::<f32>()), call.executor);
        for_each_index(heads * rows, workers, &|index| {
            let (kv, row) = (dims.kv_head(index / rows), index % rows);
            // SAFETY: the words are initialised, and each row is one task's.
            let parts = unsafe { std::slice::from_raw_parts_mut(self.row(kv, row, 0), self.stride()) };
            let most = parts.chunks_exact(width + 2).fold(f32::NEG_INFINITY, |most, part| most.max(part[width]));
            // Where no part has seen a key, the factors are of zeros.
            let shift = if most == f32::NEG_INFINITY { 0.0 } else { most };
            let factor = |part: &[f32]| ((part[width] - shift) * unit).exp2();
            let (whole, others) = parts.split_at_mut(width + 2);
            let first = factor(whole);
            whole.iter_mut().for_each(|sum| *sum *= first);
            for part in others.chunks_exact(width + 2) {
                let factor = factor(part);
                whole.iter_mut().zip(part).for_each(|(sum, x)| *sum += x * factor);
            }
            let row = dims.row(kv, row);
            // SAFETY: the row belongs to the call, and to this task.
            unsafe {
                let factor = normalise(call, row, most, whole[width + 1]);
                let to = call.context_row(row);
                for (d, &sum) in whole[..d_v].iter().enumerate() {
                    to.add(d).write(E::from_f32(sum * factor));
                }
            }
        });
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
pub(super) unsafe fn normalise<E: Number>(call: &Call<E>, row: Row, max: f32, sum: f32) -> f32 {
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
