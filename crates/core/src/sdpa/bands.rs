//! A mask as the fused operations of GPUs take it.

use std::ops::Range;

use candle_core::Result;

use super::validate::{Call, Dims};

/// A call as the fused operations of GPUs see it: a band of keys around the diagonal that ends with the last query and
/// the last key of each sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bands {
    /// Of each sequence in which some query sees a key, the queries that see keys, and the keys that some of them sees:
    /// rows of (B · T_q) and (B · T_kv), or of (total_q) and (total_kv).
    pub spans: Vec<[Range<usize>; 2]>,
    pub window: Window,
}

/// Query i of a span of n queries and m keys stands at key `i + m - n` and sees `left` keys before that one and `right`
/// after it. `left: None, right: Some(0)` is the causal mask.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Window {
    pub left: Option<usize>,
    pub right: Option<usize>,
}

impl Bands {
    /// `None` for a mask that has no such form.
    ///
    /// # Errors
    /// For joined masks that let ALiBi count from several positions.
    pub fn new(call: &Call) -> Result<Option<Self>> {
        let (rows, mut spans) = (&call.rows.keys, Vec::new());
        let alibi = call.options.alibi_slopes.as_ref().map(|_| call.rows.positions()).transpose()?;
        for (s, sequence) in call.rows.sequences.iter().enumerate() {
            // The ranges of packed sequences count all keys.
            let first_key = if call.sequences.is_some() { 0 } else { s * call.dims.t_kv };
            let (queries, sees) = (&sequence.queries, |row: &usize| !rows[*row].is_empty());
            let (Some(first), Some(last)) = (queries.clone().find(sees), queries.clone().rfind(sees)) else { continue };
            let position = rows[last].end as i64 - (last + 1 - queries.start) as i64;
            if alibi.as_ref().is_some_and(|positions| positions[queries.start] != position) {
                return Ok(None);
            }
            spans.push((first..last + 1, rows[first].start..rows[last].end, first_key));
        }

        // Of each row its position, the keys that it sees, and those of its span.
        let seen = || {
            spans.iter().flat_map(|(queries, keys, _)| {
                queries.clone().map(move |row| {
                    let [seen, all] = [&rows[row], keys].map(|keys| keys.start as i64..keys.end as i64);
                    (all.end - (queries.end - row) as i64, seen, all)
                })
            })
        };
        let left = seen().filter_map(|(at, seen, all)| (seen.start > all.start).then_some(at - seen.start)).min();
        let right = seen().filter_map(|(at, seen, all)| (seen.end < all.end).then_some(seen.end - 1 - at)).min();
        let is_band = seen().all(|(at, seen, all)| {
            // A window of more queries than keys has queries that stand before all keys.
            let fits = (left.is_none() && right.is_none()) || at >= all.start;
            let start = left.map_or(all.start, |left| all.start.max(at - left));
            fits && seen == (start..right.map_or(all.end, |right| all.end.min(at + right + 1)))
        });
        let size = |side: Option<i64>| side.map(usize::try_from).transpose();
        let (Ok(left), Ok(right), true) = (size(left), size(right), is_band) else { return Ok(None) };
        let moved = |(queries, keys, first): (_, Range<usize>, _)| [queries, first + keys.start..first + keys.end];
        Ok(Some(Self { spans: spans.into_iter().map(moved).collect(), window: Window { left, right } }))
    }

    /// The keys that all queries of all sequences of a batch are given, where those are the same ones.
    pub fn common_keys(&self, call: &Call) -> Option<Range<usize>> {
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let [_, first] = self.spans.first()?.clone();
        let alike = |(b, [queries, keys]): (usize, &[Range<usize>; 2])| {
            *queries == (b * t_q..(b + 1) * t_q) && *keys == (b * t_kv + first.start..b * t_kv + first.end)
        };
        (self.spans.len() == b && self.spans.iter().enumerate().all(alike)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{AttentionMask, RowRanges, ValidLens};
    use crate::sdpa::SdpaOptions;
    use candle_core::{DType, Device, Tensor};

    fn zeros(shape: &[usize]) -> Result<Tensor> {
        Tensor::zeros(shape, DType::F32, &Device::Cpu)
    }

    #[test]
    fn a_batch_of_any_size_without_queries_has_no_rows() -> Result<()> {
        let (q, kv) = (zeros(&[1 << 50, 1, 0, 8])?, zeros(&[1, 1, 1, 8])?);
        let (mask, options) = (AttentionMask::causal(), SdpaOptions::default());
        let ys = crate::sdpa::scaled_dot_product_attention(&q, &kv, &kv, &mask, &options)?;
        assert_eq!(ys.dims(), q.dims());
        let call = Call::of("test", [&q, &kv, &kv], None, None, &mask, &options)?;
        assert_eq!(call.rows, RowRanges::default());
        assert!(Bands::new(&call)?.expect("a mask without rows").spans.is_empty());
        Ok(())
    }

    /// What a band says each query sees is what the mask says, for every mask of intervals, alone and with each other
    /// one.
    #[test]
    fn a_band_is_the_interval_of_each_query() -> Result<()> {
        let none = AttentionMask::none;
        let masks = [
            none(),
            AttentionMask::causal(),
            AttentionMask::causal_upper_left(),
            AttentionMask::causal_with_offset(2),
            AttentionMask::causal().with_window(1),
            AttentionMask::causal().with_window(3),
            none().with_window(2),
            none().with_local_window(1, 2),
            none().with_valid_lens(vec![3, 0]),
            none().with_valid_lens(vec![2, 9]),
            none().with_starts(vec![0, 2]),
            none().with_starts(vec![4, 9]),
            none().with_valid_lens(ValidLens::from(vec![vec![1, 4, 4], vec![0, 3, 3]])),
            AttentionMask::causal().with_prefix(vec![2, 0]),
        ];
        let (mut bands, mut others) = (0, 0);
        for mask in masks.iter().flat_map(|a| masks.iter().map(|b| a.and(b))) {
            for (t_q, t_kv) in [(1, 1), (1, 6), (3, 3), (3, 6), (3, 2), (3, 0), (0, 2)] {
                let (q, kv, options) = (zeros(&[2, 1, t_q, 8])?, zeros(&[2, 1, t_kv, 8])?, SdpaOptions::default());
                let Ok(call) = Call::new("test", [&q, &kv, &kv], None, &mask, &options) else { continue };
                let Ok(ranges) = mask.resolve(2, t_q, t_kv) else { continue };
                let Some(Bands { spans, window }) = Bands::new(&call)? else {
                    others += 1;
                    continue;
                };
                bands += 1;
                let mut seen = vec![0..0; 2 * t_q];
                for [queries, keys] in spans {
                    for (i, row) in queries.clone().enumerate() {
                        let position = (keys.end + i).saturating_sub(queries.len());
                        let start =
                            window.left.map_or(keys.start, |left| keys.start.max(position.saturating_sub(left)));
                        let end = window.right.map_or(keys.end, |right| keys.end.min(position + right + 1));
                        let first = row / t_q * t_kv;
                        seen[row] = start - first..end - first;
                    }
                }
                let expected: Vec<_> = (0..2 * t_q).map(|row| ranges.kv_range(row / t_q, row % t_q)).collect();
                assert_eq!(seen, expected, "{mask:?}, {t_q} queries, {t_kv} keys");
            }
        }
        assert!(bands > 300 && others > 100, "{bands} {others}");
        Ok(())
    }
}
