//! The largest scores of each query, by a selection that does not sort all of them.

use std::cmp::Ordering;
use std::ops::Range;

use candle_attention_kernels::{Workers, for_each_chunk};

/// A key and its score.
#[derive(Debug, Clone, Copy)]
struct Scored {
    key: u32,
    score: f32,
}

/// Scores of some keys, and the keys that may be chosen.
pub(in crate::layer) struct Scores<'a> {
    /// (rows, keys).
    pub scores: &'a [f32],
    /// The keys that have scores.
    pub keys: Range<usize>,
    /// The keys that each row may choose, all of which have scores.
    pub ranges: &'a [Range<usize>],
    /// (rows, keys): 0 for a key of the range that is not chosen either.
    pub allowed: Option<&'a [u8]>,
}

impl Scores<'_> {
    /// Returns the keys of the `k` largest scores of each row, (rows, k), in ascending order. Of equal scores the
    /// lowest keys are chosen, so that the result does not depend on threads. A row with fewer allowed keys ends with
    /// entries of -1.
    pub fn largest(&self, k: usize) -> Vec<i64> {
        let count = self.keys.len();
        let mut chosen = vec![-1i64; self.ranges.len() * k];
        let tasks = Workers::for_tasks(self.ranges.len());
        for_each_chunk(&mut chosen, k, tasks, &|row, entries| {
            let range = &self.ranges[row];
            let mut candidates = Vec::with_capacity(range.len());
            for key in range.clone() {
                let at = row * count + key - self.keys.start;
                if self.allowed.is_none_or(|allowed| allowed[at] != 0) {
                    candidates.push(Scored { key: key as u32, score: self.scores[at] });
                }
            }
            if candidates.len() > k {
                candidates.select_nth_unstable_by(k - 1, better_first);
                candidates.truncate(k);
            }
            candidates.sort_unstable_by_key(|scored| scored.key);
            for (entry, scored) in entries.iter_mut().zip(&candidates) {
                *entry = scored.key.into();
            }
        });
        chosen
    }
}

/// Orders a higher score before a lower one, and of equal scores the lower key first. A NaN counts as the lowest score.
fn better_first(one: &Scored, other: &Scored) -> Ordering {
    let by_score = match (one.score.is_nan(), other.score.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        // +0 and -0 are equal.
        (false, false) => other.score.partial_cmp(&one.score).unwrap_or(Ordering::Equal),
    };
    by_score.then(one.key.cmp(&other.key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_scores_match_a_stable_sort_with_ties_and_masked_keys() {
        let (rows, keys) = (7, 10..60);
        let count = keys.len();
        // Many equal scores, and some that are no numbers.
        let scores: Vec<f32> =
            (0..rows * count).map(|i| if i % 13 == 0 { f32::NAN } else { ((i * i * 7) % 11) as f32 }).collect();
        let allowed: Vec<u8> = (0..rows * count).map(|i| u8::from(i % 5 != 0 && i / count != 3)).collect();
        let ranges: Vec<Range<usize>> = (0..rows).map(|row| 10 + row..if row == 4 { 14 } else { 60 - row }).collect();
        for k in [1, 2, 10, 39, 45] {
            for mask in [None, Some(&allowed[..])] {
                let found = Scores { scores: &scores, keys: keys.clone(), ranges: &ranges, allowed: mask }.largest(k);
                for row in 0..rows {
                    let at = |key: usize| row * count + key - keys.start;
                    let is_allowed = |key: &usize| mask.is_none_or(|mask| mask[at(*key)] == 1);
                    let mut order: Vec<usize> = ranges[row].clone().filter(is_allowed).collect();
                    let rank = |key: usize| if scores[at(key)].is_nan() { f32::NEG_INFINITY } else { scores[at(key)] };
                    order.sort_by(|&one, &other| rank(other).total_cmp(&rank(one)));
                    let mut expected: Vec<i64> = order.into_iter().take(k).map(|key| key as i64).collect();
                    expected.sort_unstable();
                    expected.resize(k, -1);
                    assert_eq!(found[row * k..(row + 1) * k], expected, "row {row}, k {k}");
                }
            }
        }
    }
}
