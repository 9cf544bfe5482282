//! The intervals of a sequence in the form that other libraries' kernels take: its keys, and a band beside the diagonal.

use std::ops::Range;

use super::KvRanges;

/// Query i of a sequence sees those of `keys` that lie from `i + first` to `i + last`, both included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outline {
    /// The others see nothing: padding.
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    pub first: Option<i128>,
    pub last: Option<i128>,
    /// The key position at which query 0 stands, from which ALiBi counts.
    pub position: i128,
}

impl KvRanges {
    /// What sequence `b` sees, or what about the mask has no such form.
    pub(crate) fn outline(&self, b: usize) -> Result<Outline, &'static str> {
        let position = self.position(b, 0).into();
        if self.t_q == 1 {
            return Ok(Outline { queries: 0..1, keys: self.kv_range(b, 0), first: None, last: None, position });
        }
        if self.relative.iter().any(|relative| relative.causal && !relative.prefix.is_empty()) {
            return Err("the mask has a prefix");
        }
        let (queries, keys) = self.of_lens(b)?;
        let relative = || self.relative.iter();
        let last = |causal: bool, after: Option<i128>| match (causal, after) {
            (true, after) => Some(after.map_or(0, |after| after.min(0))),
            (false, after) => after,
        };
        Ok(Outline {
            queries,
            keys,
            first: relative().filter_map(|r| Some(r.offset(b) - r.before?)).max(),
            last: relative().filter_map(|r| Some(r.offset(b) + last(r.causal, r.after)?)).min(),
            position,
        })
    }

    /// The queries to which starts and lengths leave any keys, and these keys, where they are the same for all of them.
    fn of_lens(&self, b: usize) -> Result<(Range<usize>, Range<usize>), &'static str> {
        let keys = |i: usize| {
            let end = self.ends.iter().map(|lens| lens.get(b, i)).fold(self.t_kv, usize::min);
            self.starts.iter().map(|lens| lens.get(b, i)).max().unwrap_or(0).min(end)..end
        };
        if !self.starts.iter().chain(&self.ends).any(|lens| lens.is_by_query()) {
            return Ok((0..self.t_q, keys(0)));
        }
        let sees = |i: &usize| !keys(*i).is_empty();
        let Some(first) = (0..self.t_q).find(sees) else { return Ok((0..0, 0..0)) };
        let end = (0..self.t_q).rfind(sees).map_or(first, |last| last + 1);
        if (first..end).any(|i| keys(i) != keys(first)) {
            return Err("the mask has a length for each query");
        }
        Ok((first..end, keys(first)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{Alignment, Relative};
    use crate::{AttentionMask, ValidLens};
    use candle_core::Result;

    /// Sequences that stand at positions of their own.
    fn of_each(offsets: &[i128], causal: bool) -> Relative {
        Relative { alignment: Alignment::Each(offsets.to_vec()), causal, ..Relative::default() }
    }

    /// Every mask of intervals, alone and with each other one.
    fn masks() -> Vec<AttentionMask> {
        let none = AttentionMask::none;
        let single = [
            none(),
            AttentionMask::causal(),
            AttentionMask::causal_upper_left(),
            AttentionMask::causal_with_offset(2),
            AttentionMask::causal().with_window(1),
            AttentionMask::causal().with_window(3),
            AttentionMask::causal_upper_left().with_band(2, 1),
            none().with_window(2),
            none().with_band(1, 2),
            none().with_band(0, 9),
            none().with_valid_lens(vec![3, 0]),
            none().with_valid_lens(vec![2, 9]),
            none().with_starts(vec![0, 2]),
            none().with_starts(vec![4, 9]),
            AttentionMask { relative: vec![of_each(&[1, -2], true)], ..none() },
            AttentionMask { relative: vec![of_each(&[-3, 4], false)], ..none() }.with_band(1, 1),
        ];
        single.iter().flat_map(|a| single.iter().map(|b| a.and(b))).collect()
    }

    #[test]
    fn an_outline_is_the_interval_of_each_query() -> Result<()> {
        for mask in masks() {
            for (t_q, t_kv) in [(1, 1), (1, 6), (4, 4), (3, 6), (6, 3), (2, 0), (0, 2)] {
                let bound = mask.resolve(2, t_q, t_kv)?;
                for b in 0..2 {
                    let Outline { queries, keys, first, last, position } = bound.outline(b).expect("only intervals");
                    assert_eq!((queries, position), (0..t_q, i128::from(bound.position(b, 0))));
                    for i in 0..t_q {
                        let seen: Vec<_> = keys
                            .clone()
                            .filter(|&key| first.is_none_or(|first| key as i128 >= i as i128 + first))
                            .filter(|&key| last.is_none_or(|last| key as i128 <= i as i128 + last))
                            .collect();
                        let expected: Vec<_> = bound.kv_range(b, i).collect();
                        assert_eq!(seen, expected, "{mask:?}, {t_q} queries, {t_kv} keys, query {i} of {b}");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn what_is_no_band_says_so() -> Result<()> {
        let rows = ValidLens::from(vec![vec![1, 2]]);
        for (mask, reason) in [
            (AttentionMask::causal().with_prefix(vec![2]), "the mask has a prefix"),
            (AttentionMask::none().with_valid_lens(rows.clone()), "the mask has a length for each query"),
            (AttentionMask::none().with_starts(rows), "the mask has a length for each query"),
        ] {
            assert_eq!(mask.resolve(1, 2, 4)?.outline(0), Err(reason));
        }
        // One query has one interval whatever the mask, and a prefix without a causal constraint lifts nothing.
        let one = AttentionMask::causal().with_prefix(vec![2]).with_valid_lens(vec![vec![3]]);
        let free = |queries, keys, position| Ok(Outline { queries, keys, first: None, last: None, position });
        assert_eq!(one.resolve(1, 1, 4)?.outline(0), free(0..1, 0..3, 3));
        let nothing = AttentionMask::none().with_prefix(vec![2]);
        assert_eq!(nothing.resolve(1, 2, 4)?.outline(0), free(0..2, 0..4, 2));
        // Queries of padding see nothing, and all others the same.
        let padded = AttentionMask::none().with_valid_lens(vec![vec![0, 3, 3, 0], vec![0; 4], vec![9; 4]]);
        let bound = padded.with_starts(vec![1; 3]).resolve(3, 4, 5)?;
        assert_eq!(bound.outline(0), free(1..3, 1..3, 1));
        assert_eq!(bound.outline(1), free(0..0, 0..0, 1));
        assert_eq!(bound.outline(2), free(0..4, 1..5, 1));
        Ok(())
    }
}
