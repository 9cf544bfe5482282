//! The range of keys that each query may attend to, for callers and for kernels.

use std::fmt;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::constraint::QueryPosition;
use super::placement::{Placement, SequencePlan, SequenceSize};
use super::tensors::all_of;
use super::{AttentionMask, OP};
use candle_attention_modules::base::{copied_to, filled};

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
    pub first_position: i64,
}

/// Returns the smallest range with all keys of some ranges.
pub(crate) fn union_of(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let mut union = 0..0;
    for range in ranges.filter(|range| !range.is_empty()) {
        if union.is_empty() {
            union = range;
        } else {
            union = union.start.min(range.start)..union.end.max(range.end);
        }
    }
    union
}

/// A sequence whose first query has two positions by joined masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PositionConflict {
    sequence: usize,
    position: i64,
    other: i64,
}

impl RowRanges {
    /// Returns the rows of a batch of sequences of `t_q` queries with these ranges of keys (B, T_q), whose first query
    /// is at the first key.
    pub fn of_batch(keys: Vec<Range<usize>>, t_q: usize) -> Self {
        let b = keys.len() / t_q.max(1);
        let rows = |s: usize| SequenceRows { queries: s * t_q..(s + 1) * t_q, first_key: 0, first_position: 0 };
        Self { keys, sequences: (0..b).map(rows).collect(), conflict: None }
    }

    /// Returns the rows of some of several packed sequences. For sequences with the same number of queries they are the
    /// rows of a batch.
    pub fn of_sequences(&self, chosen: &[usize]) -> Self {
        let mut keys = Vec::new();
        let mut sequences = Vec::new();
        for &s in chosen {
            let SequenceRows { queries, first_key, first_position } = self.sequences[s].clone();
            let first_row = keys.len();
            for own in &self.keys[queries] {
                keys.push(own.start - first_key..own.end - first_key);
            }
            sequences.push(SequenceRows {
                queries: first_row..keys.len(),
                first_key: 0,
                first_position: first_position.saturating_sub(first_key as i64),
            });
        }
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
        self.by_query(|sequence, i| sequence.first_position.saturating_add(i))
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
            for (i, entry) in (0..).zip(&mut numbers[sequence.queries.clone()]) {
                *entry = number(sequence, i);
            }
        }
        Ok(numbers)
    }

    /// Returns the ranges and a boolean mask as one boolean mask: u8 that broadcasts to `dims` = (B, H, T_q, T_kv),
    /// where 1 allows to attend; `None` if nothing is masked.
    pub fn to_bool_mask(&self, other: Option<Tensor>, dims: [usize; 4], device: &Device) -> Result<Option<Tensor>> {
        let [_, _, t_q, t_kv] = dims;
        if self.keys.iter().all(|keys| *keys == (0..t_kv)) {
            return Ok(other);
        }
        // One matrix for all sequences, if their ranges are equal.
        let first = &self.keys[..t_q];
        let rows = if self.keys.chunks(t_q).all(|keys| keys == first) { first } else { &self.keys };
        let matrices = [rows.len() / t_q, t_q, t_kv];
        let Some(mut allowed) = filled(&matrices, 0u8) else {
            bail!("[{OP}] a mask of {matrices:?} entries does not fit in memory")
        };
        for (keys, row) in rows.iter().zip(allowed.chunks_exact_mut(t_kv)) {
            row[keys.clone()].fill(1);
        }
        let allowed = copied_to(device, allowed, (matrices[0], 1, t_q, t_kv))?;
        match other {
            Some(other) => all_of(&allowed, &other).map(Some),
            None => Ok(Some(allowed)),
        }
    }
}

impl AttentionMask {
    /// Returns the range of keys that each query may attend to, for `b` sequences, `t_q` queries and `t_kv` keys.
    /// Boolean masks and biases are not part of it, except that chunks count from the end of the padding on the left
    /// that they name.
    ///
    /// # Errors
    /// For lengths whose shape is neither (B,) nor (B, T_q), for a window or a chunk of 0, for an option that is
    /// ambiguous for the joined masks that it was set on, and for a mask [of a part](Self::of_part) with another shape.
    pub fn resolve(&self, b: usize, t_q: usize, t_kv: usize) -> Result<KeyRanges> {
        self.check(b, &[SequenceSize { t_q, t_kv }])?;
        let mask = self.with_chunks_counted(b, t_q, t_kv)?.without_tensors();
        Ok(KeyRanges { b, t_q, t_kv, mask })
    }

    /// Returns the keys that each of `total` queries of some sequences may attend to; `op` is for errors.
    ///
    /// # Errors
    /// If the ranges do not fit in memory.
    pub(super) fn rows_of(
        &self,
        op: &str,
        total: usize,
        plans: impl Iterator<Item = SequencePlan>,
    ) -> Result<RowRanges> {
        let Some(mut keys) = filled(&[total], 0..0) else {
            bail!("[{op}] a range for each of {total} queries does not fit in memory")
        };
        let mut sequences = Vec::new();
        let mut conflict = None;
        for (s, SequencePlan { placement, queries, first_key, .. }) in plans.enumerate() {
            for (i, keys_of_query) in keys[queries.clone()].iter_mut().enumerate() {
                let allowed = placement.allowed_keys(&self.constraints, s, i);
                *keys_of_query = first_key + allowed.start..first_key + allowed.end;
            }
            let QueryPosition { first: position, other } = placement.query_position(&self.constraints, s, 0);
            if let Some(other) = other {
                conflict.get_or_insert(PositionConflict { sequence: s, position, other });
            }
            sequences.push(SequenceRows {
                queries,
                first_key,
                first_position: position.saturating_add(first_key as i64),
            });
        }
        Ok(RowRanges { keys, sequences, conflict })
    }

    /// Returns the placement of sequence `b`.
    pub(super) fn placement(&self, b: usize, t_q: usize, t_kv: usize) -> Placement {
        let placement = self.placements.as_ref().and_then(|placements| placements.of_sequence(b));
        placement.cloned().unwrap_or_else(|| Placement::whole(t_q, t_kv))
    }

    /// Checks that the mask fits `n` sequences. `sizes` has the numbers of queries and keys of each sequence, or one
    /// entry for all sequences.
    pub(super) fn check(&self, n: usize, sizes: &[SequenceSize]) -> Result<()> {
        self.constraints.iter().try_for_each(|constraint| constraint.check(n, sizes))?;
        if let Some(placements) = &self.placements {
            placements.check(n, sizes)?;
        }
        Ok(())
    }
}
