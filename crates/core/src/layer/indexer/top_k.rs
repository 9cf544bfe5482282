//! The largest scores of each query, by a selection that does not sort all of them.

use std::cmp::Ordering;

use candle_attention_kernels::{Workers, for_each_chunk};

/// A key and its score.
#[derive(Debug, Clone, Copy)]
struct Scored {
    key: u32,
    score: f32,
}

/// Scores (rows, T_kv), and which of them may be chosen.
pub(super) struct Scores<'a> {
    pub scores: &'a [f32],
    /// (rows, T_kv): 0 for a key that is not chosen.
    pub allowed: &'a [u8],
    pub t_kv: usize,
}

impl Scores<'_> {
    /// Returns the keys of the `k` largest scores of each row, (rows, k), in ascending order. Of equal scores the
    /// lowest keys are chosen, so that the result does not depend on threads. A row with fewer allowed keys ends with
    /// entries of -1.
    pub fn largest(&self, k: usize) -> Vec<i64> {
        let t_kv = self.t_kv;
        let mut chosen = vec![-1i64; self.scores.len() / t_kv * k];
        let tasks = Workers::for_tasks(chosen.len() / k);
        for_each_chunk(&mut chosen, k, tasks, &|row, entries| {
            let own = row * t_kv..(row + 1) * t_kv;
            let mut candidates = Vec::with_capacity(t_kv);
            for (key, (&score, &allowed)) in self.scores[own.clone()].iter().zip(&self.allowed[own]).enumerate() {
                if allowed != 0 {
                    candidates.push(Scored { key: key as u32, score });
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
        let (rows, t_kv) = (7, 50);
        // Many equal scores, and some that are no numbers.
        let scores: Vec<f32> =
            (0..rows * t_kv).map(|i| if i % 13 == 0 { f32::NAN } else { ((i * i * 7) % 11) as f32 }).collect();
        let allowed: Vec<u8> = (0..rows * t_kv).map(|i| u8::from(i % 5 != 0 && i / t_kv != 3)).collect();
        for k in [1, 2, 10, 39, 45] {
            let found = Scores { scores: &scores, allowed: &allowed, t_kv }.largest(k);
            for row in 0..rows {
                let own = row * t_kv..(row + 1) * t_kv;
                let mut order: Vec<usize> = (0..t_kv).filter(|key| allowed[own.clone()][*key] == 1).collect();
                let value = |key: usize| Some(scores[own.clone()][key]).filter(|score| !score.is_nan());
                order.sort_by(|&one, &other| {
                    let rank = |key| value(key).map_or(f32::NEG_INFINITY, |score| score);
                    rank(other).total_cmp(&rank(one))
                });
                let mut expected: Vec<i64> = order.into_iter().take(k).map(|key| key as i64).collect();
                expected.sort_unstable();
                expected.resize(k, -1);
                assert_eq!(found[row * k..(row + 1) * k], expected, "row {row}, k {k}");
            }
        }
    }
}
