//! From the scores of a tile, which were kept, to the statistics of its weights.

use std::cmp::Ordering::Equal;
use std::f32::consts::LN_2;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{MAX_TOP, StatisticsOptions, StatisticsOutput};
use crate::cpu::{EXP2_MIN, Kernel, MAX_COLUMNS, MAX_LANES, Scratch, SimdTask, Vector};
use crate::flash::problem::{Dims, KvHead, ScoreInputs, ScoreUnits, SoftmaxStats};
use crate::flash::softmax::with_sink;
use crate::flash::tasks::{Chain, PanelState, Workspace};
use crate::flash::tile::Tile;

/// The keys among which the largest weight of a query is found before those of the whole are: a whole number of vectors
/// of every tier.
pub(super) const GROUP: usize = MAX_LANES;

/// Memory for the scores of some panels (panels, T_kv, panel), then for what is found of each group of keys (groups,
/// panel), and for sums over queries, (group, T_kv).
pub(in crate::flash) fn kept_scores(dims: &Dims, panels: usize, panel: usize) -> Option<Scratch> {
    let sums = dims.group().checked_mul(dims.t_kv)?.div_ceil(panel);
    Scratch::try_zeros(&[panels.checked_mul(dims.t_kv)?.checked_add(dims.t_kv.div_ceil(GROUP) + sums)?, panel])
}

/// The statistics of some tiles of a key head whose scores were kept and whose state is that after all keys.
pub(in crate::flash) struct Observe<'a, 'b> {
    pub inputs: &'a ScoreInputs<'b>,
    pub output: &'a StatisticsOutput<'a>,
    pub workspace: &'a mut Workspace,
    pub kv: KvHead,
    pub tiles: &'a [Tile],
    pub units: ScoreUnits,
    pub chain: &'a Chain,
    /// The number of the task in its chain.
    pub task: usize,
}

impl SimdTask for Observe<'_, '_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, output, kv, tiles, units, chain, task, .. } = self;
        let Workspace { state, kept, .. } = self.workspace;
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
            let state = state.of_panel(index);
            // SAFETY: the processor has the tier of K; the scores of the keys that the tile sees were kept, and there
            // is a row of largest ones for each group of keys.
            unsafe { KeptTile { inputs, output, tile, units, scores, largest, panel, state }.observe::<K>(sums) };
        }
        chain.wait_for_all(task);
        // SAFETY: the sums received by the heads of a group stand one after the other, and the tasks that add to them
        // take turns.
        let received = unsafe { output.received.slice((kv.b * inputs.dims.h_kv + kv.head) * words, words) };
        received.iter_mut().zip(sums).for_each(|(received, sum)| *received += *sum);
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
    state: PanelState,
}

/// What scores become weights by, for each column: what is added to exponents, and the factor from powers to weights;
/// and what is found.
struct Columns {
    shifts: [f32; MAX_COLUMNS],
    factors: [f32; MAX_COLUMNS],
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
    /// The processor has the tier of K; the scores of the keys that the tile sees were kept.
    #[inline(always)]
    unsafe fn observe<K: Kernel>(&self, received: &mut [f32]) {
        let t_kv = self.inputs.dims.t_kv;
        let mut columns = self.columns();
        let of_head = self.factors_of_heads(&columns);
        let mut powers = [[0f32; MAX_COLUMNS]; GROUP];
        for group in 0..self.tile.some.len().div_ceil(GROUP) {
            let keys = self.keys_of(group);
            // SAFETY: as this method's contract.
            unsafe {
                self.weigh::<K>(group, &mut columns, &mut powers);
                for (head, of_head) in of_head.iter().enumerate() {
                    let sums = sums_of_keys::<K>(&powers, of_head, self.tile.vectors);
                    let received = &mut received[head * t_kv..][keys.clone()];
                    received.iter_mut().zip(sums).for_each(|(received, sum)| *received += sum);
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

    fn columns(&self) -> Columns {
        let zeros = [0f32; MAX_COLUMNS];
        let top = [[f32::NEG_INFINITY; MAX_COLUMNS]; MAX_TOP];
        let mut columns = Columns { shifts: zeros, factors: zeros, entropy: zeros, exponents: zeros, top };
        for column in 0..self.panel {
            // SAFETY: the state has an element for each column.
            let (max, sum) = unsafe { (*self.state.max.add(column), *self.state.sum.add(column)) };
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
                // Columns of no query may have powers that are no numbers too, which a factor of 0 would not undo.
                let sum = K::Vector::load(self.state.sum.add(column));
                let is_finite = sum.abs().less_than(K::Vector::splat(f32::INFINITY));
                let mut exponents = K::Vector::load(columns.exponents.as_ptr().add(column));
                let mut largest = K::Vector::splat(f32::NEG_INFINITY);
                for (key, powers) in self.keys_of(group).zip(powers.iter_mut()) {
                    let score = K::Vector::load(self.scores.add(key * self.panel + column));
                    largest = score.max(largest);
                    let exponent = self.exponent(score, shift);
                    let power = K::Vector::select(is_finite, exponent.exp2(), K::Vector::splat(0.0));
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
                    K::Vector::select(is_larger, largest, before).store(at);
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
        let (count, k) = (self.tile.rows.len(), self.k());
        // SAFETY: as this method's contract; the results are initialised.
        unsafe {
            for column in 0..count {
                let rest = columns.factors[column] * columns.exponents[column] * LN_2;
                self.output.entropy.add(index(column)).write(columns.entropy[column] - rest);
            }
            if k == 0 {
                return;
            }
            for (column, mut found) in self.find_top(&columns.top[k - 1][..count]).into_iter().enumerate() {
                // Keys are found from the lowest on, and the order of equal scores stays.
                found.sort_by(|(one, _), (other, _)| other.partial_cmp(one).unwrap_or(Equal));
                found.truncate(k);
                // All weights of a query are NaN if one of its scores is.
                if columns.factors[column].is_nan() {
                    found.clear();
                }
                let mut weights = [f32::NEG_INFINITY; MAX_TOP];
                weights.iter_mut().zip(&found).for_each(|(weight, (score, _))| *weight = *score);
                for weights in weights.chunks_exact_mut(K::Vector::LANES) {
                    let shift = K::Vector::splat(columns.shifts[column]);
                    let power = self.exponent(K::Vector::load(weights.as_ptr()), shift).exp2();
                    power.mul(K::Vector::splat(columns.factors[column])).store(weights.as_mut_ptr());
                }
                self.output.top_weights.slice(index(column) * k, k).copy_from_slice(&weights[..k]);
                // Where weights are 0, the lowest of the other keys.
                found.truncate(weights.iter().take_while(|weight| **weight != 0.0).count());
                let others = (0..).filter(|key| found.iter().all(|(_, other)| other != key));
                let keys = found.iter().map(|(_, key)| *key).chain(others);
                self.output.top_keys.slice(index(column) * k, k).iter_mut().zip(keys).for_each(|(to, key)| *to = key);
            }
        }
    }

    /// The exponents of two that scores of columns with these shifts are.
    ///
    /// # Safety
    /// The processor has the tier of the vector.
    #[inline(always)]
    unsafe fn exponent<V: Vector>(&self, scores: V, shifts: V) -> V {
        // SAFETY: as this method's contract.
        unsafe { scores.mul(V::splat(self.units.exponent)).add(shifts).mul(V::splat(self.units.exponent_unit)) }
    }

    /// The largest scores of each column and their keys. `least` is the k-th largest of those that groups have: k scores
    /// are at least that, and few others.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    #[inline(always)]
    unsafe fn find_top(&self, least: &[f32]) -> Vec<Vec<(f32, u32)>> {
        let mut found = vec![Vec::new(); least.len()];
        for group in 0..self.tile.some.len().div_ceil(GROUP) {
            // SAFETY: as this method's contract.
            let largest = unsafe { std::slice::from_raw_parts(self.largest.add(group * self.panel), least.len()) };
            if !largest.iter().zip(least).fold(false, |found, (largest, least)| found | (largest >= least)) {
                continue;
            }
            for (column, found) in found.iter_mut().enumerate().filter(|(column, _)| largest[*column] >= least[*column])
            {
                for key in self.keys_of(group) {
                    // SAFETY: as this method's contract.
                    let score = unsafe { *self.scores.add(key * self.panel + column) };
                    if score >= least[column] && score > f32::NEG_INFINITY {
                        found.push((score, key as u32));
                    }
                }
            }
        }
        found
    }
}

/// The sums over columns of the weights of each key, by the factors of the columns.
///
/// # Safety
/// The processor has the tier of K.
#[inline(always)]
unsafe fn sums_of_keys<K: Kernel>(powers: &Powers, factors: &[f32; MAX_COLUMNS], vectors: usize) -> [f32; GROUP] {
    let mut found = [0f32; GROUP];
    for (powers, found) in powers.chunks_exact(K::Vector::LANES).zip(found.chunks_exact_mut(K::Vector::LANES)) {
        // SAFETY: as this function's contract; the arrays have an element for each column.
        unsafe {
            let mut sums = [K::Vector::splat(0.0); MAX_LANES];
            for column in (0..vectors).map(|vector| vector * K::Vector::LANES) {
                let factor = K::Vector::load(factors.as_ptr().add(column));
                for (powers, sum) in powers.iter().zip(&mut sums) {
                    *sum = K::Vector::load(powers.as_ptr().add(column)).mul_add(factor, *sum);
                }
            }
            K::Vector::sum_each(&sums).store(found.as_mut_ptr());
        }
    }
    found
}
