//! The keys that each query of a call sees, as kernels read them.

use std::ops::Range;

use candle_core::{Result, bail};

use super::validate::{Call, Dims};
use candle_attention_modules::base::filled;

/// What the structural constraints of a mask leave: an interval of keys for each row of queries.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RowRanges {
    /// The keys that a query sees, empty where it sees none. Of a batch, (B, T_q), counted in the query's own sequence;
    /// of packed sequences, (total_q,), counted in all of them.
    pub keys: Vec<Range<usize>>,
    /// The key position at which a query stands, which ALiBi counts from; empty without ALiBi. It may lie outside of
    /// the query's own sequence.
    pub positions: Vec<i64>,
    /// The entry of a distance bias that is of key 0; empty without such a bias.
    pub origins: Vec<i64>,
}

impl RowRanges {
    /// # Errors
    /// For joined masks that let ALiBi count from several positions, and where memory is short.
    pub fn new(call: &Call) -> Result<Self> {
        let total = call.dims.b * call.dims.t_q;
        let (has_alibi, has_biases) = (call.options.alibi_slopes.is_some(), call.options.distance_bias.is_some());
        let numbers = |are_wanted: bool| filled(&[if are_wanted { total } else { 0 }], 0i64);
        let (Some(mut keys), Some(mut positions), Some(mut origins)) =
            (filled(&[total], 0..0), numbers(has_alibi), numbers(has_biases))
        else {
            bail!("[{}] a range for each of {total} queries does not fit in memory", call.op)
        };
        if has_alibi {
            call.ranges.check_positions()?;
        }
        let last_query = call.longest()[0] as i64 - 1;
        for (s, [queries, of_keys]) in call.parts().into_iter().enumerate() {
            let first = if call.sequences.is_some() { of_keys.start } else { 0 };
            for (i, row) in queries.enumerate() {
                let own = call.ranges.kv_range(s, i);
                keys[row] = first + own.start..first + own.end;
                if has_biases {
                    origins[row] = last_query - i as i64 - first as i64;
                }
                if has_alibi {
                    positions[row] = call.ranges.position(s, i).saturating_add(first as i64);
                }
            }
        }
        Ok(Self { keys, positions, origins })
    }
}

/// A call as the fused operations of GPUs see it: a band of keys around the diagonal that ends with the last query and
/// the last key of each sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bands {
    /// Sequences in which some query sees a key.
    pub spans: Vec<Span>,
    pub window: Window,
}

/// The queries of one sequence that see keys, and the keys that some of them sees: rows of (B · T_q) and (B · T_kv), or
/// of (total_q) and (total_kv).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
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
    /// As [`RowRanges::new`].
    pub fn new(call: &Call) -> Result<Option<Self>> {
        let rows = &RowRanges::new(call)?;
        let mut spans = Vec::new();
        for [queries, keys] in call.parts() {
            // The ranges of packed sequences count all keys.
            let first_key = if call.sequences.is_some() { 0 } else { keys.start };
            let sees = |row: &usize| !rows.keys[*row].is_empty();
            let (Some(first), Some(last)) = (queries.clone().find(sees), queries.clone().rfind(sees)) else { continue };
            let keys = first_key + rows.keys[first].start..first_key + rows.keys[last].end;
            spans.push((Span { queries: first..last + 1, keys }, first_key as i64));
        }

        // Of each row its position, the keys that it sees, and those of its span, from the sequence's first key on.
        let seen = || {
            spans.iter().flat_map(|(span, first_key)| {
                let (lo, hi) = (span.keys.start as i64 - first_key, span.keys.end as i64 - first_key);
                span.queries.clone().map(move |row| {
                    let (start, end) = (rows.keys[row].start as i64, rows.keys[row].end as i64);
                    (row, hi - (span.queries.end - row) as i64, start..end, lo..hi)
                })
            })
        };
        let left = seen().filter_map(|(_, at, seen, all)| (seen.start > all.start).then_some(at - seen.start)).min();
        let right = seen().filter_map(|(_, at, seen, all)| (seen.end < all.end).then_some(seen.end - 1 - at)).min();
        let is_band = seen().all(|(row, at, seen, all)| {
            // A window of more queries than keys has queries that stand before all keys.
            let fits = (left.is_none() && right.is_none()) || at >= all.start;
            let alibi = rows.positions.get(row).is_none_or(|&position| position == at);
            let start = left.map_or(all.start, |left| all.start.max(at - left));
            fits && alibi && seen == (start..right.map_or(all.end, |right| all.end.min(at + right + 1)))
        });
        let size = |side: Option<i64>| side.map(usize::try_from).transpose();
        let (Ok(left), Ok(right), true) = (size(left), size(right), is_band) else { return Ok(None) };
        Ok(Some(Self { spans: spans.into_iter().map(|(span, _)| span).collect(), window: Window { left, right } }))
    }

    /// The keys that all queries of all sequences of a batch are given, where those are the same ones.
    pub fn common_keys(&self, call: &Call) -> Option<Range<usize>> {
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let first = self.spans.first()?.keys.clone();
        let alike = |(b, span): (usize, &Span)| {
            span.queries == (b * t_q..(b + 1) * t_q) && span.keys == (b * t_kv + first.start..b * t_kv + first.end)
        };
        (self.spans.len() == b && self.spans.iter().enumerate().all(alike)).then_some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{AttentionMask, ValidLens};
    use crate::sdpa::{PackedSequences, SdpaOptions};
    use candle_core::{DType, Device, Tensor};

    /// Two sequences of 2 and 3 queries against 4 and 2 keys, with an empty one of each kind between them.
    fn sequences() -> PackedSequences {
        PackedSequences::from_lens(&[2, 0, 1, 3], &[4, 3, 0, 2]).expect("as many of each")
    }

    fn packed_rows(mask: &AttentionMask) -> Result<RowRanges> {
        let options = SdpaOptions::default().with_alibi_slopes(&Tensor::zeros(1, DType::F32, &Device::Cpu)?);
        let (q, kv) = (zeros(&[6, 1, 8])?, zeros(&[9, 1, 8])?);
        RowRanges::new(&Call::packed("test", [&q, &kv, &kv], &sequences(), mask, &options)?)
    }

    fn zeros(shape: &[usize]) -> Result<Tensor> {
        Tensor::zeros(shape, DType::F32, &Device::Cpu)
    }

    #[test]
    fn ranges_are_those_of_each_sequence_moved_to_its_keys() -> Result<()> {
        let RowRanges { keys, positions, .. } = packed_rows(&AttentionMask::none())?;
        assert_eq!(keys, [0..4, 0..4, 7..7, 7..9, 7..9, 7..9]);
        // The last query of a sequence stands at its last key.
        assert_eq!(positions, [2, 3, 6, 6, 7, 8]);

        let RowRanges { keys, positions, .. } = packed_rows(&AttentionMask::causal())?;
        assert_eq!(keys, [0..3, 0..4, 7..7, 7..7, 7..8, 7..9]);
        assert_eq!(positions, [2, 3, 6, 6, 7, 8]);

        let RowRanges { keys, positions, .. } = packed_rows(&AttentionMask::causal_upper_left())?;
        assert_eq!(keys, [0..1, 0..2, 7..7, 7..8, 7..9, 7..9]);
        assert_eq!(positions, [0, 1, 7, 7, 8, 9]);
        Ok(())
    }

    #[test]
    fn a_batch_of_any_size_without_queries_has_no_rows() -> Result<()> {
        let (q, kv) = (zeros(&[1 << 50, 1, 0, 8])?, zeros(&[1, 1, 1, 8])?);
        let (mask, options) = (AttentionMask::causal(), SdpaOptions::default());
        let ys = crate::sdpa::scaled_dot_product_attention(&q, &kv, &kv, &mask, &options)?;
        assert_eq!(ys.dims(), q.dims());
        let call = Call::of("test", [&q, &kv, &kv], None, None, &mask, &options)?;
        assert_eq!(RowRanges::new(&call)?, RowRanges::default());
        assert_eq!(Bands::new(&call)?.expect("a mask without rows").spans, []);
        Ok(())
    }

    #[test]
    fn lengths_of_a_mask_are_of_each_sequence() -> Result<()> {
        let each = AttentionMask::none().with_valid_lens(vec![3, 1, 1, 1]).with_starts(vec![1, 0, 0, 0]);
        assert_eq!(packed_rows(&each)?.keys, [1..3, 1..3, 7..7, 7..8, 7..8, 7..8]);
        let rows = AttentionMask::none().with_valid_lens(vec![vec![1, 2], vec![], vec![5], vec![0, 1, 2]]);
        assert_eq!(packed_rows(&rows)?.keys, [0..1, 0..2, 7..7, 7..7, 7..8, 7..9]);
        let prefix = AttentionMask::causal_upper_left().with_prefix(vec![3, 0, 0, 2]);
        assert_eq!(packed_rows(&prefix)?.keys, [0..3, 0..3, 7..7, 7..9, 7..9, 7..9]);
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
            none().with_band(1, 2),
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
                let Ok(call) = Call::new("test", [&q, &kv, &kv], &mask, &options) else { continue };
                let Ok(ranges) = mask.resolve(2, t_q, t_kv) else { continue };
                let Some(Bands { spans, window }) = Bands::new(&call)? else {
                    others += 1;
                    continue;
                };
                bands += 1;
                let mut seen = vec![0..0; 2 * t_q];
                for Span { queries, keys } in spans {
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
