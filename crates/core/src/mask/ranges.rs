//! The range of keys that each query may attend to, for callers and for kernels.

use std::fmt;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::constraint::QueryPosition;
use super::placement::Placement;
use super::tensors::all_of;
use super::{AttentionMask, OP};
use candle_attention_modules::base::filled;

/// The range of keys that each query may attend to, for one shape (B, T_q, T_kv): a block mask of one block for each
/// query. [`AttentionMask::resolve`] returns it.
///
/// `Display` prints the (T_q, T_kv) matrix of each sequence, with `1` for a key that the query may attend to and `.`
/// for a masked one.
///
/// ```
/// use candle_attention::AttentionMask;
/// # fn main() -> candle_core::Result<()> {
/// let ranges = AttentionMask::causal().with_window(2).resolve(1, 3, 3)?;
/// assert_eq!((ranges.kv_range(0, 0), ranges.kv_range(0, 2)), (0..1, 1..3));
/// assert_eq!(ranges.to_string(), "1 . .\n1 1 .\n. 1 1\n");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct KeyRanges {
    b: usize,
    t_q: usize,
    t_kv: usize,
    mask: AttentionMask,
}

impl KeyRanges {
    /// Returns the keys that query `i` of sequence `b` may attend to; `0..0` if there are none, and outside of the
    /// shape.
    pub fn kv_range(&self, b: usize, i: usize) -> Range<usize> {
        if b >= self.b || i >= self.t_q {
            return 0..0;
        }
        self.mask.placement(b, self.t_q, self.t_kv).allowed_keys(&self.mask.constraints, b, i)
    }

    /// Returns the key position of query `i`, from which windows and ALiBi distances count. It is negative if T_q >
    /// T_kv and the mask is aligned to the end, or if an offset is. Positions outside of i64 become its smallest or
    /// largest number. If joined masks disagree, it is the position by the first mask that has one; if sequences have
    /// an offset each, it is the position in the first sequence.
    pub fn query_position(&self, i: usize) -> i64 {
        self.mask.placement(0, self.t_q, self.t_kv).query_position(&self.mask.constraints, 0, i).first
    }
}

impl fmt::Display for KeyRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for b in 0..self.b {
            if b > 0 {
                writeln!(f)?;
            }
            for i in 0..self.t_q {
                let range = self.kv_range(b, i);
                let row: Vec<_> = (0..self.t_kv).map(|j| if range.contains(&j) { "1" } else { "." }).collect();
                writeln!(f, "{}", row.join(" "))?;
            }
        }
        Ok(())
    }
}

/// The range of keys that each row of queries may attend to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RowRanges {
    /// The keys of each query, an empty range if it attends to none. For a batch, (B, T_q), counted in the query's own
    /// sequence; for packed sequences, (total_q,), counted through all of them.
    pub keys: Vec<Range<usize>>,
    /// The sequences; none for a batch without queries, however large.
    pub sequences: Vec<SequenceRows>,
    /// The first sequence whose query 0 has two positions by joined masks.
    conflict: Option<PositionConflict>,
}

/// The rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SequenceRows {
    /// Rows of (B · T_q), or of (total_q).
    pub queries: Range<usize>,
    /// The number of its first key.
    pub first_key: usize,
    /// The key position of its first query, which may be outside of the sequence.
    pub position: i64,
}

/// A sequence whose first query has two positions by joined masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PositionConflict {
    sequence: usize,
    position: i64,
    other: i64,
}

/// A sequence whose rows [`AttentionMask::rows_of`] computes.
struct SequencePlan {
    placement: Placement,
    /// Its rows of queries.
    queries: Range<usize>,
    /// The number of its first key.
    first_key: usize,
}

impl RowRanges {
    /// Returns the rows of one of several packed sequences, as of a batch of one.
    pub fn of_sequence(&self, s: usize) -> Self {
        let SequenceRows { queries, first_key, position } = self.sequences[s].clone();
        let own = |keys: &Range<usize>| keys.start - first_key..keys.end - first_key;
        let keys: Vec<_> = self.keys[queries].iter().map(own).collect();
        let position = position.saturating_sub(first_key as i64);
        let sequences = vec![SequenceRows { queries: 0..keys.len(), first_key: 0, position }];
        Self { keys, sequences, conflict: self.conflict }
    }

    /// Returns the key position of each query, from which ALiBi counts.
    ///
    /// # Errors
    /// For joined masks by which a query has different positions, and if the positions do not fit in memory.
    pub fn positions(&self) -> Result<Vec<i64>> {
        if let Some(PositionConflict { sequence, position, other }) = self.conflict {
            bail!(
                "[{OP}] ALiBi counts from a query's position, and the joined masks give query 0 of sequence {sequence} \
                 the positions {position} and {other}, expected one"
            )
        }
        self.by_query(|sequence, i| sequence.position.saturating_add(i))
    }

    /// Returns a number for each query, which `number` computes from its sequence and its index in the sequence.
    ///
    /// # Errors
    /// If the numbers do not fit in memory.
    pub fn by_query(&self, number: impl Fn(&SequenceRows, i64) -> i64) -> Result<Vec<i64>> {
        let Some(mut numbers) = filled(&[self.keys.len()], 0) else {
            bail!("[{OP}] a position for each of {} queries does not fit in memory", self.keys.len())
        };
        for sequence in &self.sequences {
            for (i, own) in (0..).zip(&mut numbers[sequence.queries.clone()]) {
                *own = number(sequence, i);
            }
        }
        Ok(numbers)
    }

    /// Returns the ranges and a boolean mask as one boolean mask: u8 that broadcasts to `dims` = (B, H, T_q, T_kv),
    /// where 1 allows to attend; `None` if nothing is masked.
    pub fn to_keep(&self, keep: Option<Tensor>, dims: [usize; 4], device: &Device) -> Result<Option<Tensor>> {
        let [_, _, t_q, t_kv] = dims;
        if self.keys.iter().all(|keys| *keys == (0..t_kv)) {
            return Ok(keep);
        }
        // One matrix for all sequences, if their ranges are equal.
        let first = &self.keys[..t_q];
        let rows = if self.keys.chunks(t_q).all(|own| own == first) { first } else { &self.keys };
        let matrices = [rows.len() / t_q, t_q, t_kv];
        let Some(mut allowed) = filled(&matrices, 0u8) else {
            bail!("[{OP}] a mask of {matrices:?} entries does not fit in memory")
        };
        for (keys, row) in rows.iter().zip(allowed.chunks_exact_mut(t_kv)) {
            row[keys.clone()].fill(1);
        }
        let allowed = Tensor::from_vec(allowed, (matrices[0], 1, t_q, t_kv), device)?;
        Ok(Some(if let Some(keep) = keep { all_of(&allowed, &keep)? } else { allowed }))
    }
}

impl AttentionMask {
    /// Returns the range of keys that each query may attend to, for `b` sequences, `t_q` queries and `t_kv` keys.
    /// Boolean masks and biases are not part of it.
    ///
    /// # Errors
    /// For lengths whose shape is neither (B,) nor (B, T_q), for a window or a chunk of 0, for an option that is
    /// ambiguous for the joined masks that it was set on, and for a mask [of a part](Self::of_part) with another shape.
    pub fn resolve(&self, b: usize, t_q: usize, t_kv: usize) -> Result<KeyRanges> {
        self.check(b, &[[t_q, t_kv]])?;
        let mask = Self { bool_masks: Vec::new(), biases: Vec::new(), ..self.clone() };
        Ok(KeyRanges { b, t_q, t_kv, mask })
    }

    /// Returns the keys that each query of a batch may attend to; `op` is for errors.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), and if they do not fit in memory.
    pub(crate) fn rows(&self, op: &str, b: usize, t_q: usize, t_kv: usize) -> Result<RowRanges> {
        self.check(b, &[[t_q, t_kv]])?;
        // A batch without queries has no rows, even if it has more sequences than memory holds.
        let sequences = if t_q == 0 { 0 } else { b };
        let plan = |s: usize| SequencePlan {
            placement: self.placement(s, t_q, t_kv),
            queries: s * t_q..(s + 1) * t_q,
            first_key: 0,
        };
        self.rows_of(op, b * t_q, (0..sequences).map(plan))
    }

    /// Returns the keys that each query of packed sequences may attend to. `parts` has the queries and the keys of each
    /// sequence, which is masked as in a batch of one.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub(crate) fn packed_rows(&self, op: &str, parts: &[[Range<usize>; 2]]) -> Result<RowRanges> {
        self.check_whole(op)?;
        let sizes: Vec<_> = parts.iter().map(|part| part.each_ref().map(|rows| rows.len())).collect();
        self.check(sizes.len(), &sizes)?;
        let total = parts.last().map_or(0, |[queries, _]| queries.end);
        let plan = |[queries, keys]: &[Range<usize>; 2]| SequencePlan {
            placement: Placement::whole(queries.len(), keys.len()),
            queries: queries.clone(),
            first_key: keys.start,
        };
        self.rows_of(op, total, parts.iter().map(plan))
    }

    /// Returns the keys that each of `total` queries may attend to, by the plans of their sequences.
    fn rows_of(&self, op: &str, total: usize, plans: impl Iterator<Item = SequencePlan>) -> Result<RowRanges> {
        let Some(mut keys) = filled(&[total], 0..0) else {
            bail!("[{op}] a range for each of {total} queries does not fit in memory")
        };
        let (mut sequences, mut conflict) = (Vec::new(), None);
        for (s, SequencePlan { placement, queries, first_key }) in plans.enumerate() {
            for (i, of_query) in keys[queries.clone()].iter_mut().enumerate() {
                let own = placement.allowed_keys(&self.constraints, s, i);
                *of_query = first_key + own.start..first_key + own.end;
            }
            let QueryPosition { first: position, other } = placement.query_position(&self.constraints, s, 0);
            if let (None, Some(other)) = (conflict, other) {
                conflict = Some(PositionConflict { sequence: s, position, other });
            }
            sequences.push(SequenceRows { queries, first_key, position: position.saturating_add(first_key as i64) });
        }
        Ok(RowRanges { keys, sequences, conflict })
    }

    /// Returns the placement of sequence `b`.
    fn placement(&self, b: usize, t_q: usize, t_kv: usize) -> Placement {
        let own = self.placements.as_ref().and_then(|placements| placements.of_sequence(b));
        own.cloned().unwrap_or_else(|| Placement::whole(t_q, t_kv))
    }

    /// Checks that the mask fits `n` sequences, with the queries and keys of `sizes` for each sequence, or for all.
    pub(super) fn check(&self, n: usize, sizes: &[[usize; 2]]) -> Result<()> {
        self.constraints.iter().try_for_each(|constraint| constraint.check(n, sizes))?;
        if let Some(placements) = &self.placements {
            placements.check(n, sizes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rows of two sequences of 2 and 3 queries and 4 and 2 keys, with one without queries and one without
    /// keys between them.
    fn packed_rows(mask: &AttentionMask) -> Result<RowRanges> {
        mask.packed_rows("test", &[[0..2, 0..4], [2..2, 4..7], [2..3, 7..7], [3..6, 7..9]])
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
