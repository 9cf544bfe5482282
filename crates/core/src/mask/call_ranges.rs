//! The ranges of keys of one call: computed query by query when a path reads them, or as bounds of each sequence.

use std::sync::OnceLock;

use candle_core::Result;

use super::AttentionMask;
use super::bounds::KeyBounds;
use super::placement::{PackedRows, Placement, SequencePlan, SequenceSize};
use super::ranges::RowRanges;

/// The ranges of keys that the queries of a call attend to, without the boolean masks and biases.
#[derive(Debug, Clone)]
pub(crate) struct CallRanges {
    source: Source,
    /// The ranges of all queries, once a path has read them.
    rows: OnceLock<RowRanges>,
}

/// The data that ranges are computed from.
#[derive(Debug, Clone)]
enum Source {
    /// B sequences of T_q queries and T_kv keys.
    Batch { mask: AttentionMask, b: usize, t_q: usize, t_kv: usize },
    /// Packed sequences.
    Packed { mask: AttentionMask, sequences: Vec<PackedRows> },
    /// Ranges that were computed before, of some packed sequences that are attended to as a batch.
    Known(RowRanges),
}

impl AttentionMask {
    /// Returns the ranges of `b` sequences of `t_q` queries and `t_kv` keys.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub(crate) fn ranges_of_batch(&self, b: usize, t_q: usize, t_kv: usize) -> Result<CallRanges> {
        self.check(b, &[SequenceSize { t_q, t_kv }])?;
        let mask = self.with_chunks_counted(b, t_q, t_kv)?.without_tensors();
        let source = Source::Batch { mask, b, t_q, t_kv };
        Ok(CallRanges { source, rows: OnceLock::new() })
    }

    /// Returns the ranges of packed sequences, each of which is masked as in a batch of one; `op` is for errors.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), and for a mask of a part.
    pub(crate) fn ranges_of_packed(&self, op: &str, sequences: Vec<PackedRows>) -> Result<CallRanges> {
        self.check_whole(op)?;
        let size = |rows: &PackedRows| SequenceSize { t_q: rows.queries.len(), t_kv: rows.keys.len() };
        let sizes: Vec<_> = sequences.iter().map(size).collect();
        self.check(sizes.len(), &sizes)?;
        let source = Source::Packed { mask: self.without_tensors(), sequences };
        Ok(CallRanges { source, rows: OnceLock::new() })
    }
}

impl CallRanges {
    /// Returns ranges that are known.
    pub fn known(rows: RowRanges) -> Self {
        Self { source: Source::Known(rows), rows: OnceLock::new() }
    }

    /// Returns the ranges of some of several packed sequences, which have the same number of queries, as of a batch;
    /// `op` is for errors.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn of_sequences(&self, op: &str, chosen: &[usize]) -> Result<Self> {
        Ok(Self::known(self.rows(op)?.of_sequences(chosen)))
    }

    /// Returns the range of each query. The first call computes them; `op` is for errors.
    ///
    /// # Errors
    /// If they do not fit in memory.
    pub fn rows(&self, op: &str) -> Result<&RowRanges> {
        let (mask, total) = match &self.source {
            Source::Known(rows) => return Ok(rows),
            Source::Batch { mask, b, t_q, .. } => (mask, b * t_q),
            Source::Packed { mask, sequences } => (mask, sequences.last().map_or(0, |rows| rows.queries.end)),
        };
        if let Some(rows) = self.rows.get() {
            return Ok(rows);
        }
        let rows = mask.rows_of(op, total, self.plans())?;
        Ok(self.rows.get_or_init(|| rows))
    }

    /// Returns the bounds of all queries; `None` if the mask is not of that form.
    pub fn bounds(&self) -> Option<KeyBounds> {
        match &self.source {
            Source::Batch { mask, .. } | Source::Packed { mask, .. } => {
                KeyBounds::new(&mask.constraints, &self.plans().collect::<Vec<_>>())
            }
            Source::Known(_) => None,
        }
    }

    /// Returns the queries and keys of each sequence; none for a batch without queries, however large.
    fn plans(&self) -> impl Iterator<Item = SequencePlan> {
        let count = match &self.source {
            Source::Batch { t_q: 0, .. } | Source::Known(_) => 0,
            Source::Batch { b, .. } => *b,
            Source::Packed { sequences, .. } => sequences.len(),
        };
        (0..count).filter_map(|s| self.source.plan(s))
    }
}

impl Source {
    /// Returns the queries and keys of sequence `s`; `None` if its ranges are known.
    fn plan(&self, s: usize) -> Option<SequencePlan> {
        match self {
            Self::Known(_) => None,
            Self::Batch { mask, t_q, t_kv, .. } => Some(SequencePlan {
                placement: mask.placement(s, *t_q, *t_kv),
                queries: s * t_q..(s + 1) * t_q,
                first_key: 0,
                t_kv: *t_kv,
            }),
            Self::Packed { sequences, .. } => {
                let PackedRows { queries, keys } = &sequences[s];
                Some(SequencePlan {
                    placement: Placement::whole(queries.len(), keys.len()),
                    queries: queries.clone(),
                    first_key: keys.start,
                    t_kv: keys.len(),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rows of two sequences of 2 and 3 queries and 4 and 2 keys, with one without queries and one without
    /// keys between them.
    fn packed_rows(mask: &AttentionMask) -> Result<RowRanges> {
        let sequences = vec![
            PackedRows { queries: 0..2, keys: 0..4 },
            PackedRows { queries: 2..2, keys: 4..7 },
            PackedRows { queries: 2..3, keys: 7..7 },
            PackedRows { queries: 3..6, keys: 7..9 },
        ];
        Ok(mask.ranges_of_packed("test", sequences)?.rows("test")?.clone())
    }

    #[test]
    fn packed_ranges_count_keys_through_all_sequences() -> Result<()> {
        let rows = packed_rows(&AttentionMask::none())?;
        assert_eq!(rows.keys, [0..4, 0..4, 7..7, 7..9, 7..9, 7..9]);
        // The last query of a sequence is at its last key.
        assert_eq!(rows.positions()?, [2, 3, 6, 6, 7, 8]);

        let causal = packed_rows(&AttentionMask::causal())?;
        assert_eq!(causal.keys, [0..3, 0..4, 7..7, 7..7, 7..8, 7..9]);
        assert_eq!(causal.positions()?, [2, 3, 6, 6, 7, 8]);

        let upper_left = packed_rows(&AttentionMask::causal_upper_left())?;
        assert_eq!(upper_left.keys, [0..1, 0..2, 7..7, 7..8, 7..9, 7..9]);
        assert_eq!(upper_left.positions()?, [0, 1, 7, 7, 8, 9]);
        Ok(())
    }

    #[test]
    fn packed_ranges_take_lengths_starts_and_prefixes_of_each_sequence() -> Result<()> {
        let each = AttentionMask::none().with_valid_lens(vec![3, 1, 1, 1]).with_starts(vec![1, 0, 0, 0]);
        assert_eq!(packed_rows(&each)?.keys, [1..3, 1..3, 7..7, 7..8, 7..8, 7..8]);
        let rows = AttentionMask::none().with_valid_lens(vec![vec![1, 2], vec![], vec![5], vec![0, 1, 2]]);
        assert_eq!(packed_rows(&rows)?.keys, [0..1, 0..2, 7..7, 7..7, 7..8, 7..9]);
        let prefix = AttentionMask::causal_upper_left().with_prefix(vec![3, 0, 0, 2]);
        assert_eq!(packed_rows(&prefix)?.keys, [0..3, 0..3, 7..7, 7..9, 7..9, 7..9]);
        Ok(())
    }

    #[test]
    fn packed_ranges_of_a_mask_of_part_are_an_error() -> Result<()> {
        let part = AttentionMask::causal().of_part(4, 0..1, 0..1)?;
        let text = packed_rows(&part).expect_err("packed sequences").to_string();
        assert!(text.contains("`of_part`, expected one of whole sequences"), "{text}");
        Ok(())
    }
}
