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

mod scores;
mod values;

use std::ops::Range;

use crate::cpu::{Element, Job, Kernel, Scratch, Vector};
use crate::flash::finish::normalise;
use crate::flash::params::Problem;
use scores::Part;

/// The most rows that one part takes, and lanes of a vector.
pub(super) const MOST_ROWS: usize = 8;
const MOST_LANES: usize = 16;

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
            let to = problem.context_row(b, row);
            for (d, &mixed) in mixed.iter().enumerate() {
                *to.add(d) = E::from_f32(mixed * whole);
            }
        }
    }
}
