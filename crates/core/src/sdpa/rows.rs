//! The keys that each query of a call sees, as kernels read them.

use std::ops::Range;

use candle_core::{Result, bail};

use super::PackedSequences;
use super::validate::{Call, Dims};
use candle_attention_modules::base::check_memory;

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
    /// As [`AttentionMask::resolve`](crate::AttentionMask::resolve), and where memory is short.
    pub fn new(call: &Call) -> Result<Self> {
        match call.sequences {
            None => Self::of_batch(call),
            Some(sequences) => Self::of_sequences(call, sequences),
        }
    }

    fn of_batch(call: &Call) -> Result<Self> {
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let ranges = call.mask.resolve(b, t_q, t_kv)?;
        let mut keys = Vec::new();
        if keys.try_reserve_exact(b * t_q).is_err() {
            bail!("[{}] the ranges of {} queries do not fit in memory", call.op, b * t_q)
        }
        keys.extend((0..b * t_q).map(|row| ranges.kv_range(row / t_q, row % t_q)));
        let positions = if call.options.alibi_slopes.is_some() { ranges.positions(b)? } else { Vec::new() };
        let diagonals = if call.options.distance_bias.is_some() { b * t_q } else { 0 };
        let origins = (0..diagonals).map(|row| (t_q - 1 - row % t_q) as i64).collect();
        Ok(Self { keys, positions, origins })
    }

    fn of_sequences(call: &Call, sequences: &PackedSequences) -> Result<Self> {
        let (total, n) = (sequences.total_queries(), sequences.len());
        let bytes = size_of::<Range<usize>>() + size_of::<i64>();
        check_memory("packed_sequences", format_args!("a range for each of {total} queries"), &[total, bytes])?;
        let mut rows = Self { keys: Vec::with_capacity(total), ..Self::default() };
        let last_query = sequences.longest_queries() as i64 - 1;
        for s in 0..n {
            let (t_q, keys) = (sequences.queries(s).len(), sequences.keys(s));
            let ranges = call.mask.of_sequence(s, n, t_q, keys.len()).resolve(1, t_q, keys.len())?;
            let first = keys.start;
            rows.keys.extend((0..t_q).map(|i| ranges.kv_range(0, i)).map(|own| first + own.start..first + own.end));
            if call.options.distance_bias.is_some() {
                rows.origins.extend((0..t_q).map(|i| last_query - i as i64 - first as i64));
            }
            if call.options.alibi_slopes.is_some() {
                let first = i64::try_from(first).unwrap_or(i64::MAX);
                rows.positions.extend(ranges.positions(1)?.into_iter().map(|position| position.saturating_add(first)));
            }
        }
        Ok(rows)
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
        let rows = RowRanges::new(call)?;
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let sequences: Vec<_> = match call.sequences {
            None => (0..b).map(|b| (b * t_q..(b + 1) * t_q, b * t_kv)).collect(),
            // The intervals of packed sequences count all keys.
            Some(packed) => (0..packed.len()).map(|s| (packed.queries(s), 0)).collect(),
        };
        let mut spans = Vec::new();
        for (queries, first_key) in sequences {
            let sees = |row: &usize| !rows.keys[*row].is_empty();
            let (Some(first), Some(last)) = (queries.clone().find(sees), queries.clone().rfind(sees)) else { continue };
            let keys = first_key + rows.keys[first].start..first_key + rows.keys[last].end;
            spans.push((Span { queries: first..last + 1, keys }, first_key as i64));
        }

        // Key positions from here on count from the first key of each sequence.
        let own = |(span, first_key): &(Span, i64)| {
            let (lo, hi) = (span.keys.start as i64 - first_key, span.keys.end as i64 - first_key);
            (lo, hi, hi - span.queries.len() as i64)
        };
        let sides = |row: usize| (rows.keys[row].start as i64, rows.keys[row].end as i64);
        let left = spans.iter().filter_map(|span| {
            let ((lo, hi, _), (start, _)) = (own(span), sides(span.0.queries.end - 1));
            (start > lo).then_some(hi - 1 - start)
        });
        let right = spans.iter().filter_map(|span| {
            let ((_, hi, position), (_, end)) = (own(span), sides(span.0.queries.start));
            (end < hi).then_some(end - 1 - position)
        });
        let (left, right) = (left.min(), right.min());
        let is_band = |span: &(Span, i64)| {
            let (lo, hi, first) = own(span);
            // A window of more queries than keys has queries that stand before all keys.
            let fits = (left.is_none() && right.is_none()) || first >= lo;
            let alibi = rows.positions.get(span.0.queries.start).is_none_or(|&position| position == first);
            let sees = |row: usize| {
                let position = first + (row - span.0.queries.start) as i64;
                let start = left.map_or(lo, |left| lo.max(position - left));
                (start, right.map_or(hi, |right| hi.min(position + right + 1)))
            };
            fits && alibi && span.0.queries.clone().all(|row| sides(row) == sees(row))
        };
        let size = |side: Option<i64>| side.map(usize::try_from).transpose();
        let (Ok(left), Ok(right), true) = (size(left), size(right), spans.iter().all(is_band)) else { return Ok(None) };
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
    use crate::sdpa::SdpaOptions;
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
