//! From the stored scores of a tile to the statistics of its weights.

use std::f32::consts::LN_2;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::memory::KEY_GROUP;
use super::output::{MAX_TOP, StatisticsOutput};
use crate::cpu::{EXP2_MIN, Kernel, MAX_COLUMNS, MAX_LANES, SimdTask, Vector};
use crate::flash::epilogue::with_sink;
use crate::flash::inputs::CheckedCall;
use crate::flash::options::{ScoreUnits, SoftmaxStats};
use crate::flash::state::PanelState;
use crate::flash::tasks::{AttentionTask, AttentionWorkspace};
use crate::flash::tile::{Tile, intersection};
use candle_attention_call::WeightTile;

/// Computes the statistics of some tiles of a key head, whose scores were stored and whose state includes all keys.
pub(in crate::flash) struct Observe<'a, 'b> {
    pub task: &'a AttentionTask<'b>,
    pub output: &'a StatisticsOutput<'a>,
    pub workspace: &'a mut AttentionWorkspace,
}

impl SimdTask for Observe<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { task, output, workspace: AttentionWorkspace { state, statistics, .. } } = self;
        let &AttentionTask { inputs, units, kv, ref tiles, chain, index: task_index, .. } = task;
        let Some(memory) = statistics else {
            output.is_out_of_memory.store(true, Ordering::Relaxed);
            return chain.finish(task_index);
        };
        let panel = state.panel;
        let t_kv = inputs.dims.t_kv;
        // The sums of the heads of a group.
        let words = inputs.dims.group() * t_kv;
        let largest = memory.largest.as_mut_ptr();
        let sums = &mut memory.sums.words_mut()[..words];
        sums.fill(0.0);
        for (index, tile) in tiles.iter().enumerate() {
            let scores = memory.scores.words()[index * t_kv * panel..].as_ptr();
            let scored = ScoredTile { inputs, output, tile, units, scores, largest, panel };
            // SAFETY: the processor has the instruction set of K; the scores of the keys that the tile attends to were
            // stored, and there is a row of largest scores for each group of keys.
            unsafe { scored.observe::<K>(state.of_panel(index), sums) };
        }
        chain.wait_for_all(task_index);
        // SAFETY: the sums for the heads of a group are contiguous, and the tasks that add to them take turns.
        let key_weight_sums = unsafe { output.key_weight_sums.slice(inputs.dims.kv_index(kv) * words, words) };
        key_weight_sums.iter_mut().zip(sums).for_each(|(to, sum)| *to += *sum);
        chain.finish(task_index);
    }
}

/// A tile whose scores (T_kv, panel) were stored.
struct ScoredTile<'a, 'b> {
    inputs: &'a CheckedCall<'b>,
    output: &'a StatisticsOutput<'a>,
    tile: &'a Tile,
    units: ScoreUnits,
    scores: *const f32,
    /// The largest score in each group of keys, (groups, panel).
    largest: *mut f32,
    panel: usize,
}

/// The factors from scores to weights for each column, and the statistics so far.
struct ColumnStatistics {
    /// The number that is added to the exponents of each column.
    shifts: [f32; MAX_COLUMNS],
    /// The factor of the powers of each column, which makes them weights.
    factors: [f32; MAX_COLUMNS],
    /// Whether all powers are finite, also in columns without a query.
    are_finite: bool,
    /// The first part of the entropy: with w = factor · power, `-Σ w ln w` is `-Σ w ln factor - Σ w ln power`.
    entropy: [f32; MAX_COLUMNS],
    /// The sums of powers times their exponents, from which the second part of the entropy follows.
    exponents: [f32; MAX_COLUMNS],
    /// The largest of the scores of [`ScoredTile::largest`], one for each top key, in order.
    top: [[f32; MAX_COLUMNS]; MAX_TOP],
}

/// The powers of a group of keys: weights before they are multiplied by the factor of their column. They do not replace
/// the scores, since all of these would then be written to memory again.
type Powers = [[f32; MAX_COLUMNS]; KEY_GROUP];

impl ScoredTile<'_, '_> {
    /// Computes the statistics of the tile.
    ///
    /// # Safety
    /// The processor has the instruction set of K; the scores of the keys that the tile attends to were stored.
    #[inline(always)]
    unsafe fn observe<K: Kernel>(&self, state: PanelState, key_weight_sums: &mut [f32]) {
        let t_kv = self.inputs.dims.t_kv;
        let mut columns = self.columns(state);
        let head_factors = self.factors_of_heads(&columns);
        let mut powers = [[0f32; MAX_COLUMNS]; KEY_GROUP];
        for group in 0..self.tile.some_attend.len().div_ceil(KEY_GROUP) {
            let keys = self.keys_of(group);
            // SAFETY: as this method's contract.
            unsafe {
                self.weigh::<K>(group, &mut columns, &mut powers);
                for (head, factors) in head_factors.iter().enumerate() {
                    let sums = sums_of_keys::<K>(&powers, factors, self.tile.vectors, columns.are_finite);
                    let head_sums = &mut key_weight_sums[head * t_kv..][keys.clone()];
                    head_sums.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
                }
                self.write_requested_weights(&keys, &columns, &powers);
            }
        }
        // SAFETY: as this method's contract; no other task writes the rows of the tile.
        unsafe { self.write::<K>(&columns) };
    }

    /// Returns the keys of a group.
    fn keys_of(&self, group: usize) -> Range<usize> {
        let first = self.tile.some_attend.start + group * KEY_GROUP;
        first..self.tile.some_attend.end.min(first + KEY_GROUP)
    }

    /// Prepares the factors of each column from the state after all keys.
    fn columns(&self, state: PanelState) -> ColumnStatistics {
        let mut columns = ColumnStatistics {
            shifts: [0.0; MAX_COLUMNS],
            factors: [0.0; MAX_COLUMNS],
            are_finite: true,
            entropy: [0.0; MAX_COLUMNS],
            exponents: [0.0; MAX_COLUMNS],
            top: [[f32::NEG_INFINITY; MAX_COLUMNS]; MAX_TOP],
        };
        for column in 0..self.panel {
            // SAFETY: the state has an element for each column.
            let key_stats = unsafe { SoftmaxStats { max: *state.max.add(column), sum: *state.sum.add(column) } };
            columns.are_finite &= key_stats.sum.is_finite();
            let row = self.tile.rows.start + column;
            // The weights of a column without a query are zeros, but its powers must be finite.
            let whole = if row < self.tile.rows.end {
                with_sink(self.inputs, self.inputs.dims.row(self.tile.kv, row), key_stats)
            } else {
                SoftmaxStats { sum: 0.0, ..key_stats }
            };
            columns.shifts[column] = if whole.max == f32::NEG_INFINITY { 0.0 } else { -whole.max };
            // The weights of a fully masked query are zeros too.
            if whole.sum != 0.0 {
                columns.factors[column] = 1.0 / whole.sum;
                // The sum of the keys' weights, without the sink's.
                let share = key_stats.sum * ((key_stats.max - whole.max) * self.units.exponent_unit).exp2() / whole.sum;
                columns.entropy[column] = share * whole.sum.ln();
            }
        }
        columns
    }

    /// Returns for each head of the group the factors of the columns of its queries, and 0 for other columns.
    fn factors_of_heads(&self, columns: &ColumnStatistics) -> Vec<[f32; MAX_COLUMNS]> {
        let group = self.inputs.dims.group();
        let mut head_factors = vec![[0f32; MAX_COLUMNS]; group];
        for (column, row) in self.tile.rows.clone().enumerate() {
            head_factors[row % group][column] = columns.factors[column];
        }
        head_factors
    }

    /// Computes the powers of a group of keys, the sums of powers times their exponents, and the largest scores.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    #[inline(always)]
    unsafe fn weigh<K: Kernel>(&self, group: usize, columns: &mut ColumnStatistics, powers: &mut Powers) {
        for vector in 0..self.tile.vectors {
            let column = vector * K::Vector::LANES;
            // SAFETY: as this method's contract; the arrays have an element for each column.
            unsafe {
                let shift = K::Vector::load(columns.shifts.as_ptr().add(column));
                let mut exponents = K::Vector::load(columns.exponents.as_ptr().add(column));
                let mut largest = K::Vector::splat(f32::NEG_INFINITY);
                for (key, key_powers) in self.keys_of(group).zip(powers.iter_mut()) {
                    let score = K::Vector::load(self.scores.add(key * self.panel + column));
                    largest = score.max(largest);
                    let exponent = self.exponent(score, shift);
                    let power = exponent.exp2();
                    power.store(key_powers.as_mut_ptr().add(column));
                    // Not 0 · inf for a weight of zero.
                    exponents = power.mul_add(exponent.max(K::Vector::splat(EXP2_MIN)), exponents);
                }
                exponents.store(columns.exponents.as_mut_ptr().add(column));
                largest.store(self.largest.add(group * self.panel + column));
                // Each score replaces the first one that is smaller, which moves on.
                for top in &mut columns.top[..self.top_count()] {
                    let at = top.as_mut_ptr().add(column);
                    let before = K::Vector::load(at);
                    let is_larger = before.less_than(largest);
                    // Not a selection, which would be a masked store: those are slow on AMD's processors.
                    largest.max(before).store(at);
                    largest = K::Vector::select(is_larger, before, largest);
                }
            }
        }
    }

    /// Returns the number of top keys of each query.
    fn top_count(&self) -> usize {
        self.output.requested.top_keys.min(self.inputs.dims.t_kv)
    }

    /// Writes the requested weights of a group of keys.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    unsafe fn write_requested_weights(&self, keys: &Range<usize>, columns: &ColumnStatistics, powers: &Powers) {
        let dims = &self.inputs.dims;
        let Some(WeightTile { queries: rows, keys: window }) = &self.output.requested.tile else { return };
        let requested = intersection(keys, window);
        if rows.is_empty() || requested.is_empty() {
            return;
        }
        for (column, row) in self.tile.rows.clone().enumerate() {
            let row = dims.row(self.tile.kv, row);
            if rows.contains(&row.query) {
                let index = (row.b * dims.h + row.head) * rows.len() + row.query - rows.start;
                let first = index * window.len() + requested.start - window.start;
                // SAFETY: no other task writes the row, and there is an element for each of the columns.
                let to = unsafe { self.output.weights.slice(first, requested.len()) };
                let powers = powers[requested.start - keys.start..].iter();
                to.iter_mut().zip(powers).for_each(|(to, power)| *to = power[column] * columns.factors[column]);
            }
        }
    }

    /// Writes the statistics of each query.
    ///
    /// # Safety
    /// As [`observe`](Self::observe); no other task writes the rows of the tile.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, columns: &ColumnStatistics) {
        let index = |column: usize| {
            let row = self.inputs.dims.row(self.tile.kv, self.tile.rows.start + column);
            self.inputs.dims.row_index(row)
        };
        let count = self.tile.rows.len();
        let top_count = self.top_count();
        // SAFETY: as this method's contract; the results are initialised.
        unsafe {
            for column in 0..count {
                let rest = columns.factors[column] * columns.exponents[column] * LN_2;
                self.output.entropy.add(index(column)).write(columns.entropy[column] - rest);
            }
            if top_count == 0 {
                return;
            }
            let top_of = |column: usize| TopScores {
                keys: self.output.top_keys.slice(index(column) * top_count, top_count),
                scores: self.output.top_weights.slice(index(column) * top_count, top_count),
                count: 0,
            };
            let mut all: Vec<_> = (0..count).map(top_of).collect();
            self.find_top(&columns.top[top_count - 1][..count], &mut all);
            for (column, top) in all.into_iter().enumerate() {
                if columns.factors[column].is_nan() {
                    top.fill_with_nan();
                    continue;
                }
                let shift = K::Vector::splat(columns.shifts[column]);
                let factor = K::Vector::splat(columns.factors[column]);
                top.write_weights(|score| {
                    let mut lanes = [0f32; MAX_LANES];
                    self.exponent(K::Vector::splat(score), shift).exp2().mul(factor).store(lanes.as_mut_ptr());
                    lanes[0]
                });
            }
        }
    }

    /// Returns the exponents, in powers of two, of scores in columns with these shifts.
    ///
    /// # Safety
    /// The processor has the instruction set of the vector.
    #[inline(always)]
    unsafe fn exponent<V: Vector>(&self, scores: V, shifts: V) -> V {
        // SAFETY: as this method's contract.
        unsafe { scores.mul(V::splat(self.units.exponent)).add(shifts).mul(V::splat(self.units.exponent_unit)) }
    }

    /// Finds the keys of the largest scores of each column. `least` is the k-th largest of the groups' largest scores:
    /// k scores are at least as large, and few others.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    #[inline(always)]
    unsafe fn find_top(&self, least: &[f32], all: &mut [TopScores]) {
        for group in 0..self.tile.some_attend.len().div_ceil(KEY_GROUP) {
            // SAFETY: as this method's contract.
            let largest = unsafe { std::slice::from_raw_parts(self.largest.add(group * self.panel), least.len()) };
            if !largest.iter().zip(least).fold(false, |found, (largest, least)| found | (largest >= least)) {
                continue;
            }
            for (column, top) in all.iter_mut().enumerate().filter(|(column, _)| largest[*column] >= least[*column]) {
                for key in self.keys_of(group) {
                    // SAFETY: as this method's contract.
                    let score = unsafe { *self.scores.add(key * self.panel + column) };
                    if score >= least[column] {
                        top.offer(key as u32, score);
                    }
                }
            }
        }
    }
}

/// The largest scores of a query, and their keys.
struct TopScores<'a> {
    keys: &'a mut [u32],
    /// The scores, the first `count` of which are set.
    scores: &'a mut [f32],
    count: usize,
}

impl TopScores<'_> {
    /// Inserts the score of a key if it is among the largest. Keys are offered in ascending order, so that for equal
    /// scores the lower key comes first.
    #[inline(always)]
    fn offer(&mut self, key: u32, score: f32) {
        let Self { keys, scores, count } = self;
        if score == f32::NEG_INFINITY || *count == keys.len() && score <= scores[*count - 1] {
            return;
        }
        let mut at = (*count).min(keys.len() - 1);
        while at > 0 && scores[at - 1] < score {
            scores[at] = scores[at - 1];
            keys[at] = keys[at - 1];
            at -= 1;
        }
        scores[at] = score;
        keys[at] = key;
        *count = (*count + 1).min(keys.len());
    }

    /// Sets all weights to NaN, as for a query with a score of NaN.
    fn fill_with_nan(self) {
        self.scores.fill(f32::NAN);
        (0..).zip(self.keys).for_each(|(lowest, key)| *key = lowest);
    }

    /// Turns scores into weights, and replaces keys of weight 0 by the lowest other keys.
    #[inline(always)]
    fn write_weights(self, weigh: impl Fn(f32) -> f32) {
        let Self { keys, scores: weights, count } = self;
        weights[..count].iter_mut().for_each(|weight| *weight = weigh(*weight));
        let count = weights[..count].iter().filter(|weight| **weight != 0.0).count();
        let (found, others) = keys.split_at_mut(count);
        let mut lowest = (0..).filter(|key| !found.contains(key));
        others.iter_mut().for_each(|key| *key = lowest.next().unwrap_or(0));
    }
}

/// Returns the sum of the weights of each key over the columns, with these factors of the columns.
///
/// # Safety
/// The processor has the instruction set of K.
#[inline(always)]
unsafe fn sums_of_keys<K: Kernel>(
    powers: &Powers,
    factors: &[f32; MAX_COLUMNS],
    vectors: usize,
    are_finite: bool,
) -> [f32; KEY_GROUP] {
    let mut group_sums = [0f32; KEY_GROUP];
    for (vector_powers, found) in
        powers.chunks_exact(K::Vector::LANES).zip(group_sums.chunks_exact_mut(K::Vector::LANES))
    {
        // SAFETY: as this function's contract; the arrays have an element for each column.
        unsafe {
            let mut sums = [K::Vector::splat(0.0); MAX_LANES];
            for column in (0..vectors).map(|vector| vector * K::Vector::LANES) {
                let factor = K::Vector::load(factors.as_ptr().add(column));
                let zero = K::Vector::splat(0.0);
                // Columns of other heads, and without a query, may have powers of NaN or infinity, whose product with 0
                // is not 0.
                let is_left_out = factor.abs().less_than(K::Vector::splat(f32::MIN_POSITIVE));
                for (key_powers, sum) in vector_powers.iter().zip(&mut sums) {
                    let mut power = K::Vector::load(key_powers.as_ptr().add(column));
                    if !are_finite {
                        power = K::Vector::select(is_left_out, zero, power);
                    }
                    *sum = power.mul_add(factor, *sum);
                }
            }
            K::Vector::sum_each(&sums).store(found.as_mut_ptr());
        }
    }
    group_sums
}
