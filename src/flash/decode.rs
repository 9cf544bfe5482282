//! Few queries against many keys: a call that waits for memory, so keys and values are read once, in order, in place.
//!
//! Lanes run along D, and nothing is packed. One part of the keys goes through whole before the next step, since its
//! scores fit beside it:
//!
//! ```text
//! scores  = keys · queries          (keys, R): R is the number of rows, up to a power of two
//! scores  = softcap, ALiBi, bias; -inf where hidden
//! weights = 2^(scores - largest)
//! context = weightsᵀ · values       (R, D_v)
//! ```

use std::ops::Range;

use super::finish::{context_row, normalise};
use super::params::{Problem, Row};
use crate::cpu::{Element, Job, Kernel, Scratch, Vector, load_first, store_first, tanh};

/// The most rows that one part takes, and lanes of a vector.
pub(super) const MOST_ROWS: usize = 8;
const MOST_LANES: usize = 16;

/// Keys whose values are read for all of D_v before the next ones: they stay in the first cache meanwhile.
const VALUES: usize = 32;

/// Rows ahead that are asked for: enough to cover the way to memory at a row every few dozen cycles.
const AHEAD: usize = 16;

/// What a thread needs: queries (R, D) and scores (span, R).
pub(super) struct DecodeScratch {
    queries: Scratch,
    scores: Scratch,
}

impl DecodeScratch {
    pub fn new(d: usize, span: usize) -> Self {
        Self {
            queries: Scratch::zeros(MOST_ROWS * d.next_multiple_of(MOST_LANES)),
            scores: Scratch::zeros((span + MOST_LANES) * MOST_ROWS),
        }
    }
}

/// The words of a part's result: contexts (R, D_v), maxima (R,) and sums (R,).
pub(super) fn part_words(d_v: usize) -> usize {
    MOST_ROWS * (d_v + 2)
}

/// The query rows of one key head against a part of its keys.
pub(super) struct Decode<'a, 'b, E> {
    pub problem: &'a Problem<'b, E>,
    pub scratch: &'a mut DecodeScratch,
    pub b: usize,
    pub kv_head: usize,
    pub keys: Range<usize>,
    /// [`part_words`] words, all of which are written that matter.
    pub part: &'a mut [f32],
}

impl<E: Element> Job for Decode<'_, '_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.problem.dims.rows() {
                1 => self.rows::<K::Vector, 1>(),
                2 => self.rows::<K::Vector, 2>(),
                3 | 4 => self.rows::<K::Vector, 4>(),
                _ => self.rows::<K::Vector, 8>(),
            }
        }
    }
}

impl<E: Element> Decode<'_, '_, E> {
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn rows<V: Vector, const R: usize>(&mut self) {
        let Self { problem, b, kv_head, .. } = *self;
        let rows = problem.dims.rows();
        // Rows that pad a power of two do as the first.
        let row = |r: usize| problem.row(kv_head, if r < rows { r } else { 0 });
        let ranges: [Range<usize>; R] = std::array::from_fn(|r| {
            let range = problem.range(b, row(r).query);
            range.start.max(self.keys.start)..range.end.min(self.keys.end)
        });
        let seen = ranges.iter().filter(|range| range.start < range.end);
        let first = seen.clone().map(|range| range.start).min().unwrap_or(0);
        let end = seen.map(|range| range.end).max().unwrap_or(0);
        let (context, rest) = self.part.split_at_mut(R * problem.dims.d_v);
        let (max, sum) = rest[..2 * R].split_at_mut(R);
        context.fill(0.0);
        max.fill(f32::NEG_INFINITY);
        sum.fill(0.0);
        if first >= end {
            return;
        }
        let part = Part::<E, R> { problem, b, kv_head, rows: std::array::from_fn(row), ranges, first, end };
        let scores = self.scratch.scores.as_mut_ptr();
        // SAFETY: the caller's promise; the scratch was made for these sizes.
        unsafe {
            part.score::<V>(self.scratch.queries.as_mut_ptr(), scores);
            part.change::<V>(scores);
            part.hide(scores, V::LANES);
            part.weigh::<V>(scores, max, sum);
            if part.has_hidden() && part.has_non_finite_values::<V>() {
                return part.mix_seen::<V>(scores, context);
            }
            part.mix::<V>(scores, context);
        }
    }
}

/// Puts the parts of one key head together, in order, and writes its rows.
pub(super) fn finish<E: Element>(problem: &Problem<E>, (b, kv_head): (usize, usize), parts: &[f32]) {
    let (rows, d_v) = (problem.dims.rows(), problem.dims.d_v);
    let padded = rows.next_power_of_two();
    let mut mixed = vec![0f32; d_v];
    for r in 0..rows {
        let row = problem.row(kv_head, r);
        let parts = parts.chunks_exact(part_words(d_v)).map(|part| {
            let (context, rest) = part.split_at(padded * d_v);
            (&context[r * d_v..(r + 1) * d_v], rest[r], rest[padded + r])
        });
        let most = parts.clone().fold(f32::NEG_INFINITY, |most, (_, max, _)| most.max(max));
        // Where no part has seen a key, the factors are of zeros.
        let shift = if most == f32::NEG_INFINITY { 0.0 } else { most };
        let mut total = 0.0;
        mixed.fill(0.0);
        for (context, max, sum) in parts {
            let factor = (max - shift).exp2();
            total += sum * factor;
            for (mixed, value) in mixed.iter_mut().zip(context) {
                *mixed += value * factor;
            }
        }
        // SAFETY: the row belongs to the problem, and this head's rows to this task.
        unsafe {
            let whole = normalise(problem, (b, row), most, total);
            let to = context_row(problem, b, row.head, row.query);
            for (d, &mixed) in mixed.iter().enumerate() {
                *to.add(d) = E::from_f32(mixed * whole);
            }
        }
    }
}

struct Part<'a, 'b, E, const R: usize> {
    problem: &'a Problem<'b, E>,
    b: usize,
    kv_head: usize,
    rows: [Row; R],
    /// What each row sees of the part.
    ranges: [Range<usize>; R],
    /// The keys from the first to the last that some row sees.
    first: usize,
    end: usize,
}

impl<E: Element, const R: usize> Part<'_, '_, E, R> {
    fn keys(&self) -> usize {
        self.end - self.first
    }

    /// Scores (keys, R), as many keys at a time as fill a vector with their products.
    ///
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn score<V: Vector>(&self, queries: *mut f32, scores: *mut f32) {
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
                    let ahead = key.wrapping_add(AHEAD * stride).cast::<u8>();
                    for line in (0..d * size_of::<E>()).step_by(64) {
                        V::prefetch(ahead.wrapping_add(line));
                    }
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

    #[inline(always)]
    fn value(&self, key: usize) -> *const E {
        self.problem.v.at([self.b, self.kv_head, key])
    }

    /// Softcap, ALiBi and bias, and then powers of two.
    ///
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn change<V: Vector>(&self, scores: *mut f32) {
        let options = &self.problem.scores;
        let units = options.units(false);
        if !options.change() && units.power == 1.0 {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            self.cap_and_slope::<V>(scores);
            if let Some(bias) = &options.bias {
                for (r, row) in self.rows.iter().enumerate() {
                    let from = bias.at([self.b, row.head, row.query, self.first]);
                    for key in 0..self.keys() {
                        *scores.add(key * R + r) += *from.add(key * bias.stride(3));
                    }
                }
            }
            let power = V::splat(units.power);
            for at in (0..self.keys() * R).step_by(V::LANES) {
                V::load(scores.add(at)).mul(power).store(scores.add(at));
            }
        }
    }

    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn cap_and_slope<V: Vector>(&self, scores: *mut f32) {
        let options = &self.problem.scores;
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(softcap) = options.softcap {
                let (cap, shrink) = (V::splat(softcap), V::splat(1.0 / softcap));
                for at in (0..self.keys() * R).step_by(V::LANES) {
                    tanh(V::load(scores.add(at)).mul(shrink)).mul(cap).store(scores.add(at));
                }
            }
            if let Some(alibi) = options.alibi {
                let (mut slopes, mut positions, mut keys) =
                    ([0f32; MOST_LANES], [0f32; MOST_LANES], [0f32; MOST_LANES]);
                for lane in 0..MOST_LANES {
                    let row = self.rows[lane % R];
                    (slopes[lane], positions[lane]) = (-alibi.slopes[row.head], alibi.positions[row.query]);
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
    /// As [`Job`].
    unsafe fn hide(&self, scores: *mut f32, lanes: usize) {
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

    fn has_hidden(&self) -> bool {
        self.problem.scores.keep.is_some() || self.ranges.iter().any(|range| *range != (self.first..self.end))
    }

    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn has_non_finite_values<V: Vector>(&self) -> bool {
        let d_v = self.problem.dims.d_v;
        // SAFETY: the caller's promise.
        unsafe {
            let mut residue = V::splat(0.0);
            for key in self.first..self.end {
                for d in (0..d_v).step_by(V::LANES) {
                    let value: V = load_first(self.value(key).add(d), V::LANES.min(d_v - d));
                    // 0 for what is finite, NaN for the rest.
                    residue = residue.add(value.sub(value));
                }
            }
            residue.sum().is_nan()
        }
    }

    /// Scores become weights; their maxima and sums are returned for each row.
    ///
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn weigh<V: Vector>(&self, scores: *mut f32, max: &mut [f32], sum: &mut [f32]) {
        let words = self.keys() * R;
        // SAFETY: the caller's promise.
        unsafe {
            let mut most = V::splat(f32::NEG_INFINITY);
            for at in (0..words).step_by(V::LANES) {
                // A NaN is passed over here; it reaches the sum by its own exponential.
                most = V::load(scores.add(at)).max(most);
            }
            let mut by_lane = [0f32; MOST_LANES];
            most.store(by_lane.as_mut_ptr());
            for (lane, &most) in by_lane[..V::LANES].iter().enumerate() {
                max[lane % R] = max[lane % R].max(most);
            }
            let shifts: [f32; MOST_LANES] =
                std::array::from_fn(|lane| if max[lane % R] == f32::NEG_INFINITY { 0.0 } else { max[lane % R] });
            let shifts = V::load(shifts.as_ptr());
            let mut sums = V::splat(0.0);
            for at in (0..words).step_by(V::LANES) {
                let weight = V::load(scores.add(at)).sub(shifts).exp2();
                sums = sums.add(weight);
                weight.store(scores.add(at));
            }
            sums.store(by_lane.as_mut_ptr());
            for (lane, &part) in by_lane[..V::LANES].iter().enumerate() {
                sum[lane % R] += part;
            }
        }
    }

    /// Adds weighted values to the contexts (R, D_v).
    ///
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn mix<V: Vector>(&self, weights: *const f32, context: &mut [f32]) {
        let (d_v, lanes) = (self.problem.dims.d_v, V::LANES);
        for first in (self.first..self.end).step_by(VALUES) {
            let keys = first..self.end.min(first + VALUES);
            let mut d = 0;
            // SAFETY: the caller's promise; `d` counts whole vectors within D_v, then the rest of it.
            unsafe {
                // Eight sums hide the latency of a multiply-add; registers for sixteen halve the loads of weights.
                while d + 4 * lanes <= d_v && (R <= 2 || (R == 4 && lanes == MOST_LANES)) {
                    self.mix_columns::<V, 4>(weights, context, keys.clone(), d);
                    d += 4 * lanes;
                }
                while d + 2 * lanes <= d_v && (R <= 4 || lanes == MOST_LANES) {
                    self.mix_columns::<V, 2>(weights, context, keys.clone(), d);
                    d += 2 * lanes;
                }
                while d < d_v {
                    self.mix_columns::<V, 1>(weights, context, keys.clone(), d);
                    d += lanes;
                }
            }
        }
    }

    /// # Safety
    /// As [`Job`]; N whole vectors from `d` on, or for N = 1 what is left of D_v.
    #[inline(always)]
    unsafe fn mix_columns<V: Vector, const N: usize>(
        &self,
        weights: *const f32,
        context: &mut [f32],
        keys: Range<usize>,
        d: usize,
    ) {
        let (d_v, lanes) = (self.problem.dims.d_v, V::LANES);
        let held = if N == 1 { lanes.min(d_v - d) } else { lanes };
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[V::splat(0.0); N]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = load_first(context.as_ptr().add(r * d_v + d + n * lanes), held);
                }
            }
            for key in keys {
                let from = self.value(key).add(d);
                let ahead = from.wrapping_add(AHEAD * self.problem.v.stride(2)).cast::<u8>();
                for line in (0..N * lanes * size_of::<E>()).step_by(64) {
                    V::prefetch(ahead.wrapping_add(line));
                }
                let mut values = [V::splat(0.0); N];
                for (n, value) in values.iter_mut().enumerate() {
                    *value = load_first(from.add(n * lanes), held);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add((key - self.first) * R + r));
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        *sum = weight.mul_add(value, *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, &sum) in sums.iter().enumerate() {
                    store_first(sum, context.as_mut_ptr().add(r * d_v + d + n * lanes), held);
                }
            }
        }
    }

    /// As [`mix`](Self::mix) where values are not all finite: zero times NaN is NaN, so each row takes the keys that it
    /// sees and no others.
    ///
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn mix_seen<V: Vector>(&self, weights: *const f32, context: &mut [f32]) {
        let (d_v, lanes) = (self.problem.dims.d_v, V::LANES);
        for (r, row) in self.rows.iter().enumerate() {
            for key in self.ranges[r].clone() {
                // SAFETY: the caller's promise; the row's range lies within the keys.
                unsafe {
                    let keep = self.problem.scores.keep.as_ref();
                    if keep.is_some_and(|keep| *keep.at([self.b, row.head, row.query, key]) == 0) {
                        continue;
                    }
                    let weight = V::splat(*weights.add((key - self.first) * R + r));
                    for d in (0..d_v).step_by(lanes) {
                        let held = lanes.min(d_v - d);
                        let at = context.as_mut_ptr().add(r * d_v + d);
                        let value: V = load_first(self.value(key).add(d), held);
                        store_first(weight.mul_add(value, load_first(at.cast_const(), held)), at, held);
                    }
                }
            }
        }
    }
}
