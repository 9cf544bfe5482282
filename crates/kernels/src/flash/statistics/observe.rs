//! From the scores of a tile, which were kept, to the statistics of its weights.

use std::f32::consts::LN_2;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{MAX_TOP, StatisticsOptions, StatisticsOutput};
use crate::cpu::{EXP2_MIN, Kernel, MAX_COLUMNS, MAX_LANES, Scratch, SimdTask, Vector};
use crate::flash::problem::{Dims, ScoreInputs, ScoreUnits, SoftmaxStats};
use crate::flash::softmax::with_sink;
use crate::flash::tasks::{AttendTask, PanelState, Workspace};
use crate::flash::tile::Tile;

/// The keys among which the largest weight of a query is found before those of the whole are: a whole number of vectors
/// of every instruction set.
pub(super) const GROUP: usize = MAX_LANES;

/// Memory for the scores of some panels (panels, T_kv, panel), then for what is found of each group of keys (groups,
/// panel), and for sums over queries, (group, T_kv).
pub(in crate::flash) fn kept_scores(dims: &Dims, panels: usize, panel: usize) -> Option<Scratch> {
    let sums = dims.group().checked_mul(dims.t_kv)?.div_ceil(panel);
    Scratch::try_zeros(&[panels.checked_mul(dims.t_kv)?.checked_add(dims.t_kv.div_ceil(GROUP) + sums)?, panel])
}

/// The statistics of some tiles of a key head whose scores were kept and whose state is that after all keys.
pub(in crate::flash) struct Observe<'a, 'b> {
    pub task: &'a AttendTask<'b>,
    pub output: &'a StatisticsOutput<'a>,
    pub workspace: &'a mut Workspace,
}

impl SimdTask for Observe<'_, '_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { task, output, workspace: Workspace { state, kept, .. } } = self;
        let &AttendTask { inputs, units, kv, ref tiles, chain, index: task, .. } = task;
        let Some(kept) = kept else {
            output.is_short.store(true, Ordering::Relaxed);
            return chain.finish(task);
        };
        let (panel, t_kv, words) = (state.panel, inputs.dims.t_kv, inputs.dims.group() * inputs.dims.t_kv);
        let (scores, rest) = kept.words_mut().split_at_mut(tiles.len() * t_kv * panel);
        let (largest, sums) = rest.split_at_mut(t_kv.div_ceil(GROUP) * panel);
        let sums = &mut sums[..words];
        sums.fill(0.0);
        for (index, tile) in tiles.iter().enumerate() {
            let (scores, largest) = (scores[index * t_kv * panel..].as_ptr(), largest.as_mut_ptr());
            let tile = KeptTile { inputs, output, tile, units, scores, largest, panel };
            // SAFETY: the processor has the instruction set of K; the scores of the keys that the tile sees were kept,
            // and there is a row of largest ones for each group of keys.
            unsafe { tile.observe::<K>(state.of_panel(index), sums) };
        }
        chain.wait_for_all(task);
        // SAFETY: the sums for the heads of a group stand one after the other, and the tasks that add to them
        // take turns.
        let key_weight_sums =
            unsafe { output.key_weight_sums.slice((kv.b * inputs.dims.h_kv + kv.head) * words, words) };
        key_weight_sums.iter_mut().zip(sums).for_each(|(key_weight_sums, sum)| *key_weight_sums += *sum);
        chain.finish(task);
    }
}

/// A tile whose scores (T_kv, panel) were kept.
struct KeptTile<'a, 'b> {
    inputs: &'a ScoreInputs<'b>,
    output: &'a StatisticsOutput<'a>,
    tile: &'a Tile,
    units: ScoreUnits,
    scores: *const f32,
    /// The largest score in each group of keys, (groups, panel).
    largest: *mut f32,
    panel: usize,
}

/// What scores become weights by, for each column: what is added to exponents, and the factor from powers to weights;
/// and what is found.
struct Columns {
    shifts: [f32; MAX_COLUMNS],
    factors: [f32; MAX_COLUMNS],
    /// Whether all powers are numbers, those of columns without a query too.
    are_finite: bool,
    /// `-Σ w ln w`, where every `ln w` is that of the factor.
    entropy: [f32; MAX_COLUMNS],
    /// The sums of powers times their exponents, of which the rest of the entropy is made.
    exponents: [f32; MAX_COLUMNS],
    /// The largest of the scores of [`KeptTile::largest`], as many as there are top keys, in order.
    top: [[f32; MAX_COLUMNS]; MAX_TOP],
}

/// Weights of a group of keys without their factors. They do not replace the scores, which would write all of them to
/// memory again.
type Powers = [[f32; MAX_COLUMNS]; GROUP];

impl KeptTile<'_, '_> {
    /// # Safety
    /// The processor has the instruction set of K; the scores of the keys that the tile sees were kept.
    #[inline(always)]
    unsafe fn observe<K: Kernel>(&self, state: PanelState, key_weight_sums: &mut [f32]) {
        let t_kv = self.inputs.dims.t_kv;
        let mut columns = self.columns(state);
        let of_head = self.factors_of_heads(&columns);
        let mut powers = [[0f32; MAX_COLUMNS]; GROUP];
        for group in 0..self.tile.some.len().div_ceil(GROUP) {
            let keys = self.keys_of(group);
            // SAFETY: as this method's contract.
            unsafe {
                self.weigh::<K>(group, &mut columns, &mut powers);
                for (head, of_head) in of_head.iter().enumerate() {
                    let sums = sums_of_keys::<K>(&powers, of_head, self.tile.vectors, columns.are_finite);
                    let key_weight_sums = &mut key_weight_sums[head * t_kv..][keys.clone()];
                    key_weight_sums.iter_mut().zip(sums).for_each(|(key_weight_sums, sum)| *key_weight_sums += sum);
                }
                self.write_window(&keys, &columns, &powers);
            }
        }
        // SAFETY: as this method's contract; the rows of the tile are this task's.
        unsafe { self.write::<K>(&columns) };
    }

    fn keys_of(&self, group: usize) -> Range<usize> {
        let first = self.tile.some.start + group * GROUP;
        first..self.tile.some.end.min(first + GROUP)
    }

    fn columns(&self, state: PanelState) -> Columns {
        let zeros = [0f32; MAX_COLUMNS];
        let top = [[f32::NEG_INFINITY; MAX_COLUMNS]; MAX_TOP];
        let mut columns =
            Columns { shifts: zeros, factors: zeros, are_finite: true, entropy: zeros, exponents: zeros, top };
        for column in 0..self.panel {
            // SAFETY: the state has an element for each column.
            let (max, sum) = unsafe { (*state.max.add(column), *state.sum.add(column)) };
            columns.are_finite &= sum.is_finite();
            let row = self.tile.rows.start + column;
            // A column without a query weighs nothing, but has powers that are to be finite.
            let whole = match row < self.tile.rows.end {
                true => with_sink(self.inputs, self.inputs.dims.row(self.tile.kv, row), max, sum),
                false => SoftmaxStats { max, sum: 0.0 },
            };
            columns.shifts[column] = if whole.max == f32::NEG_INFINITY { 0.0 } else { -whole.max };
            // Nor does a query that sees nothing.
            if whole.sum != 0.0 {
                columns.factors[column] = 1.0 / whole.sum;
                // What a sink leaves to the keys.
                let share = sum * ((max - whole.max) * self.units.exponent_unit).exp2() / whole.sum;
                columns.entropy[column] = share * whole.sum.ln();
            }
        }
        columns
    }

    /// For each head of the group, the factors of the columns of its queries, and 0.
    fn factors_of_heads(&self, columns: &Columns) -> Vec<[f32; MAX_COLUMNS]> {
        let group = self.inputs.dims.group();
        let mut of_heads = vec![[0f32; MAX_COLUMNS]; group];
        for (column, row) in self.tile.rows.clone().enumerate() {
            of_heads[row % group][column] = columns.factors[column];
        }
        of_heads
    }

    /// The powers of a group of keys, the sums of these times their exponents, and the largest scores.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    #[inline(always)]
    unsafe fn weigh<K: Kernel>(&self, group: usize, columns: &mut Columns, powers: &mut Powers) {
        for vector in 0..self.tile.vectors {
            let column = vector * K::Vector::LANES;
            // SAFETY: as this method's contract; the arrays have an element for each column.
            unsafe {
                let shift = K::Vector::load(columns.shifts.as_ptr().add(column));
                let mut exponents = K::Vector::load(columns.exponents.as_ptr().add(column));
                let mut largest = K::Vector::splat(f32::NEG_INFINITY);
                for (key, powers) in self.keys_of(group).zip(powers.iter_mut()) {
                    let score = K::Vector::load(self.scores.add(key * self.panel + column));
                    largest = score.max(largest);
                    let exponent = self.exponent(score, shift);
                    let power = exponent.exp2();
                    power.store(powers.as_mut_ptr().add(column));
                    // Not 0 · inf of what weighs nothing.
                    exponents = power.mul_add(exponent.max(K::Vector::splat(EXP2_MIN)), exponents);
                }
                exponents.store(columns.exponents.as_mut_ptr().add(column));
                largest.store(self.largest.add(group * self.panel + column));
                // Each takes the place of the first that is smaller.
                for top in &mut columns.top[..self.k()] {
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

    /// The keys that are wanted of each query.
    fn k(&self) -> usize {
        self.output.options.top.min(self.inputs.dims.t_kv)
    }

    /// Writes those of a group's weights that are wanted as they are.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    unsafe fn write_window(&self, keys: &Range<usize>, columns: &Columns, powers: &Powers) {
        let (dims, StatisticsOptions { rows, columns: window, .. }) = (&self.inputs.dims, self.output.options);
        let wanted = keys.start.max(window.start)..keys.end.min(window.end);
        if rows.is_empty() || wanted.is_empty() {
            return;
        }
        for (column, row) in self.tile.rows.clone().enumerate() {
            let row = dims.row(self.tile.kv, row);
            if rows.contains(&row.query) {
                let index = (row.b * dims.h + row.head) * rows.len() + row.query - rows.start;
                let first = index * window.len() + wanted.start - window.start;
                // SAFETY: the row is this task's, and there is an element for each of the columns.
                let to = unsafe { self.output.weights.slice(first, wanted.len()) };
                let powers = powers[wanted.start - keys.start..].iter();
                to.iter_mut().zip(powers).for_each(|(to, power)| *to = power[column] * columns.factors[column]);
            }
        }
    }

    /// Writes what was found of each query.
    ///
    /// # Safety
    /// As [`observe`](Self::observe); the rows of the tile are this task's alone.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, columns: &Columns) {
        let index = |column: usize| {
            let row = self.inputs.dims.row(self.tile.kv, self.tile.rows.start + column);
            self.inputs.dims.row_index(row)
        };
        let count = self.tile.rows.len();
        let k = self.k();
        // SAFETY: as this method's contract; the results are initialised.
        unsafe {
            for column in 0..count {
                let rest = columns.factors[column] * columns.exponents[column] * LN_2;
                self.output.entropy.add(index(column)).write(columns.entropy[column] - rest);
            }
            if k == 0 {
                return;
            }
            let top = |column: usize| Top {
                keys: self.output.top_keys.slice(index(column) * k, k),
                scores: self.output.top_weights.slice(index(column) * k, k),
                count: 0,
            };
            let mut all: Vec<_> = (0..count).map(top).collect();
            self.find_top(&columns.top[k - 1][..count], &mut all);
            for (column, top) in all.into_iter().enumerate() {
                if columns.factors[column].is_nan() {
                    top.fill_with_nan();
                    continue;
                }
                let shift = K::Vector::splat(columns.shifts[column]);
                let factor = K::Vector::splat(columns.factors[column]);
                top.finish(|score| {
                    let mut lanes = [0f32; MAX_LANES];
                    self.exponent(K::Vector::splat(score), shift).exp2().mul(factor).store(lanes.as_mut_ptr());
                    lanes[0]
                });
            }
        }
    }

    /// The exponents of two that scores of columns with these shifts are.
    ///
    /// # Safety
    /// The processor has the instruction set of the vector.
    #[inline(always)]
    unsafe fn exponent<V: Vector>(&self, scores: V, shifts: V) -> V {
        // SAFETY: as this method's contract.
        unsafe { scores.mul(V::splat(self.units.exponent)).add(shifts).mul(V::splat(self.units.exponent_unit)) }
    }

    /// The keys of the largest scores of each column. `least` is the k-th largest of those that groups have: k scores
    /// are at least that, and few others.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    #[inline(always)]
    unsafe fn find_top(&self, least: &[f32], all: &mut [Top]) {
        for group in 0..self.tile.some.len().div_ceil(GROUP) {
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
struct Top<'a> {
    keys: &'a mut [u32],
    /// Of which `count` are scores.
    scores: &'a mut [f32],
    count: usize,
}

impl Top<'_> {
    /// Keys are offered from the lowest on, so that of two alike the lower one comes first.
    #[inline(always)]
    fn offer(&mut self, key: u32, score: f32) {
        let Self { keys, scores, count } = self;
        if score == f32::NEG_INFINITY || *count == keys.len() && score <= scores[*count - 1] {
            return;
        }
        let mut at = (*count).min(keys.len() - 1);
        while at > 0 && scores[at - 1] < score {
            (scores[at], keys[at]) = (scores[at - 1], keys[at - 1]);
            at -= 1;
        }
        (scores[at], keys[at]) = (score, key);
        *count = (*count + 1).min(keys.len());
    }

    /// All weights of a query are NaN if one of its scores is.
    fn fill_with_nan(self) {
        self.scores.fill(f32::NAN);
        (0..).zip(self.keys).for_each(|(lowest, key)| *key = lowest);
    }

    /// Scores become weights, and those that are 0 the weights of the lowest other keys.
    #[inline(always)]
    fn finish(self, weigh: impl Fn(f32) -> f32) {
        let Self { keys, scores: weights, count } = self;
        weights[..count].iter_mut().for_each(|weight| *weight = weigh(*weight));
        let count = weights[..count].iter().filter(|weight| **weight != 0.0).count();
        let (found, others) = keys.split_at_mut(count);
        let mut lowest = (0..).filter(|key| !found.contains(key));
        others.iter_mut().for_each(|key| *key = lowest.next().unwrap_or(0));
    }
}

/// The sums over columns of the weights of each key, by the factors of the columns.
///
/// # Safety
/// The processor has the instruction set of K.
#[inline(always)]
unsafe fn sums_of_keys<K: Kernel>(
    powers: &Powers,
    factors: &[f32; MAX_COLUMNS],
    vectors: usize,
    are_finite: bool,
) -> [f32; GROUP] {
    let mut found = [0f32; GROUP];
    for (powers, found) in powers.chunks_exact(K::Vector::LANES).zip(found.chunks_exact_mut(K::Vector::LANES)) {
        // SAFETY: as this function's contract; the arrays have an element for each column.
        unsafe {
            let mut sums = [K::Vector::splat(0.0); MAX_LANES];
            for column in (0..vectors).map(|vector| vector * K::Vector::LANES) {
                let (factor, zero) = (K::Vector::load(factors.as_ptr().add(column)), K::Vector::splat(0.0));
                // Columns of other heads, and of no query, may have powers that are no numbers, which 0 does not undo.
                let is_left_out = factor.abs().less_than(K::Vector::splat(f32::MIN_POSITIVE));
                for (powers, sum) in powers.iter().zip(&mut sums) {
                    let mut power = K::Vector::load(powers.as_ptr().add(column));
                    if !are_finite {
                        power = K::Vector::select(is_left_out, zero, power);
                    }
                    *sum = power.mul_add(factor, *sum);
                }
            }
            K::Vector::sum_each(&sums).store(found.as_mut_ptr());
        }
    }
    found
}
