//! A mask resolved for a shape, one interval of keys for each query: for who asks, and in a list for kernels; moved to
//! the keys that a cache holds of a sequence; and to those of one of several processes.

use std::fmt;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::constraint::{Constraint, Placement, Placements, Tokenized};
use super::tensors::{all_of, check_memory, fit, readable};
use super::{AttentionMask, FullyMaskedRows, OP};
use candle_attention_modules::base::filled;

/// The structural constraints of an [`AttentionMask`] for given B, T_q and T_kv.
///
/// `Display` draws the (T_q, T_kv) matrix of each sequence: `1` a key that is seen, `.` one that is hidden.
#[derive(Debug, Clone)]
pub struct KeyRanges {
    b: usize,
    t_q: usize,
    t_kv: usize,
    mask: AttentionMask,
}

impl KeyRanges {
    /// The keys that query `i` of sequence `b` sees; `0..0` when it sees none, or lies outside the shape.
    pub fn kv_range(&self, b: usize, i: usize) -> Range<usize> {
        if b >= self.b || i >= self.t_q {
            return 0..0;
        }
        self.mask.placement(b, self.t_q, self.t_kv).seen(&self.mask.constraints, b, i)
    }

    /// The key position at which query `i` stands, from which windows and ALiBi distances count; negative when
    /// T_q > T_kv and the alignment is to the end, or where an offset is. Positions past the ends of i64 give its
    /// ends. Of joined masks, the position of the first that has one; of sequences with an offset each, that in the
    /// first.
    pub fn query_position(&self, i: usize) -> i64 {
        self.mask.placement(0, self.t_q, self.t_kv).positions(&self.mask.constraints, 0, i).0
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

/// What the structural constraints of a mask leave: an interval of keys for each row of queries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RowRanges {
    /// The keys that a query sees, empty where it sees none. Of a batch, (B, T_q), counted in the query's own sequence;
    /// of packed sequences, (total_q,), counted in all of them.
    pub keys: Vec<Range<usize>>,
    /// Of a batch, none where there are no queries, whatever its size.
    pub sequences: Vec<SequenceRows>,
    /// The first sequence whose query 0 has two positions by joined masks, and these.
    conflict: Option<(usize, [i64; 2])>,
}

/// The rows of one sequence, and from where its keys are counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SequenceRows {
    /// Rows of (B · T_q), or of (total_q).
    pub queries: Range<usize>,
    /// The number of its first key.
    pub first_key: usize,
    /// The key position at which its first query stands, which may lie outside of the sequence.
    pub position: i64,
}

impl RowRanges {
    /// Those of one of several packed sequences, as of a batch of one.
    pub fn of_sequence(&self, s: usize) -> Self {
        let SequenceRows { queries, first_key, position } = self.sequences[s].clone();
        let own = |keys: &Range<usize>| keys.start - first_key..keys.end - first_key;
        let keys: Vec<_> = self.keys[queries].iter().map(own).collect();
        let position = position.saturating_sub(first_key as i64);
        let sequences = vec![SequenceRows { queries: 0..keys.len(), first_key: 0, position }];
        Self { keys, sequences, conflict: self.conflict }
    }

    /// The key position at which each query stands, from which ALiBi counts.
    ///
    /// # Errors
    /// For joined masks that give a query different positions, and where memory is short.
    pub fn positions(&self) -> Result<Vec<i64>> {
        if let Some((s, [first, other])) = self.conflict {
            bail!(
                "[{OP}] ALiBi counts from a query's position, and the joined masks give query 0 of sequence {s} the \
                 positions {first} and {other}, expected one"
            )
        }
        self.by_query(|sequence, i| sequence.position.saturating_add(i))
    }

    /// A number for each query, of its sequence and its number in there.
    ///
    /// # Errors
    /// Where memory is short.
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

    /// The intervals, and what a mask tensor hides besides, as u8 broadcastable to `dims` = (B, H, T_q, T_kv), 1 =
    /// seen; `None` where nothing is hidden.
    pub fn to_keep(&self, keep: Option<Tensor>, dims: [usize; 4], device: &Device) -> Result<Option<Tensor>> {
        let [_, _, t_q, t_kv] = dims;
        if self.keys.iter().all(|keys| *keys == (0..t_kv)) {
            return Ok(keep);
        }
        // One for all sequences, where they are alike.
        let first = &self.keys[..t_q];
        let rows = if self.keys.chunks(t_q).all(|own| own == first) { first } else { &self.keys };
        let dims = [rows.len() / t_q, t_q, t_kv];
        let Some(mut seen) = filled(&dims, 0u8) else {
            bail!("[{OP}] a mask of {dims:?} entries does not fit in memory")
        };
        for (keys, seen) in rows.iter().zip(seen.chunks_exact_mut(t_kv)) {
            seen[keys.clone()].fill(1);
        }
        let seen = Tensor::from_vec(seen, (dims[0], 1, t_q, t_kv), device)?;
        Ok(Some(if let Some(keep) = keep { all_of(&seen, &keep)? } else { seen }))
    }
}

impl AttentionMask {
    /// The structural constraints for `b` sequences, `t_q` queries and `t_kv` keys, as an interval for each query.
    ///
    /// # Errors
    /// For lengths whose shape is neither (B,) nor (B, T_q), for a window or a chunk of 0, and for what was built on
    /// joined masks that let it mean several things.
    pub fn resolve(&self, b: usize, t_q: usize, t_kv: usize) -> Result<KeyRanges> {
        self.check(b, &[[t_q, t_kv]])?;
        let mask = Self { keeps: Vec::new(), biases: Vec::new(), ..self.clone() };
        Ok(KeyRanges { b, t_q, t_kv, mask })
    }

    /// What is left to each query of a batch, for `op`.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), and where memory is short.
    pub(crate) fn rows(&self, op: &str, b: usize, t_q: usize, t_kv: usize) -> Result<RowRanges> {
        self.check(b, &[[t_q, t_kv]])?;
        let rows = |b: usize| (self.placement(b, t_q, t_kv), b * t_q..(b + 1) * t_q, 0);
        self.rows_of(op, b * t_q, (0..if t_q == 0 { 0 } else { b }).map(rows))
    }

    /// What is left to each query of packed sequences with such queries and keys, each as in a batch of one.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub(crate) fn packed_rows(&self, op: &str, parts: &[[Range<usize>; 2]]) -> Result<RowRanges> {
        self.check_whole(op)?;
        let sizes: Vec<_> = parts.iter().map(|part| part.each_ref().map(|rows| rows.len())).collect();
        self.check(sizes.len(), &sizes)?;
        let rows = |[queries, keys]: &[Range<usize>; 2]| {
            (Placement::whole(queries.len(), keys.len()), queries.clone(), keys.start)
        };
        self.rows_of(op, parts.last().map_or(0, |[queries, _]| queries.end), parts.iter().map(rows))
    }

    /// Of sequences that stand there, with these rows of queries, `total` in all, and these first keys.
    fn rows_of(
        &self,
        op: &str,
        total: usize,
        of: impl Iterator<Item = (Placement, Range<usize>, usize)>,
    ) -> Result<RowRanges> {
        let Some(mut keys) = filled(&[total], 0..0) else {
            bail!("[{op}] a range for each of {total} queries does not fit in memory")
        };
        let (mut sequences, mut conflict) = (Vec::new(), None);
        for (s, (placement, queries, first_key)) in of.enumerate() {
            for (i, keys) in keys[queries.clone()].iter_mut().enumerate() {
                let own = placement.seen(&self.constraints, s, i);
                *keys = first_key + own.start..first_key + own.end;
            }
            let (position, other) = placement.positions(&self.constraints, s, 0);
            conflict = conflict.or(other.map(|other| (s, [position, other])));
            sequences.push(SequenceRows { queries, first_key, position: position.saturating_add(first_key as i64) });
        }
        Ok(RowRanges { keys, sequences, conflict })
    }

    /// Where sequence `b` stands.
    fn placement(&self, b: usize, t_q: usize, t_kv: usize) -> Placement {
        let own = self.placements.as_ref().and_then(|placements| placements.of_sequence(b));
        own.cloned().unwrap_or_else(|| Placement::whole(t_q, t_kv))
    }

    /// That the mask fits `n` sequences, of which `sizes` are the queries and keys of each, or of all.
    fn check(&self, n: usize, sizes: &[[usize; 2]]) -> Result<()> {
        self.constraints.iter().try_for_each(|constraint| constraint.check(n, sizes))?;
        if let Some(placements) = &self.placements {
            placements.check(n, sizes)?;
        }
        Ok(())
    }

    /// That the mask itself says nothing of where sequences stand, which a cache or packed sequences do.
    fn check_whole(&self, op: &str) -> Result<()> {
        if self.placements.is_some() {
            bail!("[{op}] the mask is `of_part`, expected one of whole sequences for a cache or packed sequences")
        }
        Ok(())
    }

    /// This mask, in which keys are counted by their position in the sequence, for keys that are counted by row: for
    /// scores (B, H, T_q, rows). T_kv of this mask is the length of the longest sequence, and what is aligned to the
    /// end is aligned to that of each sequence.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), for `keep` and `bias` tensors that do not fit, and if a query sees a key that the
    /// cache of `op` no longer holds.
    pub(crate) fn rebase(
        &self,
        op: &str,
        placements: &[Placement],
        [b, h, t_q, rows]: [usize; 4],
        device: &Device,
    ) -> Result<Self> {
        self.check_whole(op)?;
        let t_kv = longest(placements);
        self.check(b, &[[t_q, t_kv]])?;
        for constraint in &self.constraints {
            if let Constraint::Tokenized(tokenized) = constraint {
                tokenized.check_ends(placements)?;
            }
        }
        for (s, placement) in placements.iter().enumerate().filter(|(_, placement)| placement.keys.start > 0) {
            let (first, all) = (placement.keys.start, Placement { keys: 0..placement.keys.end, ..placement.clone() });
            let mut seen = (0..t_q).map(|i| all.seen(&self.constraints, s, i)).filter(|keys| !keys.is_empty());
            if let Some(keys) = seen.find(|keys| keys.start < first) {
                bail!(
                    "[{op}] a query of sequence {s} sees the key at position {}, but the cache holds those from \
                     {first} on; expected a shorter window in the mask, or a longer one in the cache",
                    keys.start
                )
            }
        }
        let whole = Placement::whole(t_q, t_kv);
        if placements.iter().all(|placement| *placement == whole) {
            return Ok(self.clone());
        }
        if self.fully_masked_rows == FullyMaskedRows::Uniform {
            bail!("[{OP}] uniform empty rows weigh all keys alike, expected every sequence to hold all of its keys")
        }
        let cut = |what, tensors: &[Tensor]| {
            let own = tensors.iter().map(|tensor| fit(what, tensor, [b, h, t_q, t_kv], device));
            own.map(|tensor| columns(&tensor?, placements, rows)).collect::<Result<_>>()
        };
        let (keeps, biases) = (cut("keep", &self.keeps)?, cut("bias", &self.biases)?);
        let placements = Placements { b, t_q, t_kv: rows, each: placements.to_vec() };
        Ok(Self { keeps, biases, ..self.placed(placements) })
    }

    /// This mask of `b` sequences for some of their queries and some of their keys, as each of several processes has
    /// them: what it leaves of these keys, counted from the first of them. Positions stay those in the sequence, so
    /// that windows, chunks, offsets, lengths and ALiBi mean what they do in the whole, also those of masks that are
    /// joined with this one later.
    ///
    /// ```
    /// use candle_attention::AttentionMask;
    /// # fn main() -> candle_core::Result<()> {
    /// let part = AttentionMask::causal().with_window(3).of_part(1, 4..6, 2..6)?;
    /// assert_eq!(part.resolve(1, 2, 4)?.to_string(), "1 1 1 .\n. 1 1 1\n");
    /// # Ok(()) }
    /// ```
    ///
    /// The mask is for calls with the queries and keys of the part, and joins with masks of the same part and of whole
    /// sequences. An error where it is used: another number of sequences, queries or keys, and masks of different parts
    /// that were joined.
    ///
    /// # Errors
    /// For `keep` and `bias` tensors, for uniform empty rows, for a part of a part, for a range that ends before its
    /// start, for keys past the end of an attention mask, and for lengths by query that end before the part.
    pub fn of_part(&self, b: usize, queries: Range<usize>, keys: Range<usize>) -> Result<Self> {
        let obstacle = match self.tensor_kind() {
            Some(tensor) => Some(format!("has a {tensor} tensor")),
            None if self.fully_masked_rows == FullyMaskedRows::Uniform => {
                Some("has uniform empty rows, which weigh all keys".into())
            }
            None => self.placements.as_ref().map(|_| "is of a part already".into()),
        };
        if let Some(obstacle) = obstacle {
            bail!("[{OP}] the mask {obstacle}, expected one that leaves intervals of a whole sequence")
        }
        for (name, range) in [("queries", &queries), ("keys", &keys)] {
            if range.start > range.end {
                bail!("[{OP}] the {name} of the part are {range:?}, expected a range that ends at or after its start")
            }
        }
        let mut own = self.clone();
        for constraint in &mut own.constraints {
            if let Constraint::Tokenized(Tokenized { columns, .. }) = *constraint
                && keys.end > columns
            {
                bail!("[{OP}] the attention mask has {columns} columns, expected one for each key up to {}", keys.end)
            }
            *constraint = constraint.of_queries(&queries)?;
        }
        let (t_q, t_kv) = (queries.len(), keys.len());
        let (query, first_query) = (queries.start as i128, queries.start);
        let each = vec![Placement { query, first_query, tokens: 0..t_q, keys }];
        Ok(own.placed(Placements { b, t_q, t_kv, each }))
    }

    /// The constraints for a placement of each sequence, where rows of keys are no columns of an attention mask;
    /// without `keep` and `bias` tensors.
    fn placed(&self, placements: Placements) -> Self {
        let is_of_rows = |constraint: &&Constraint| !matches!(constraint, Constraint::Tokenized(_));
        let constraints = self.constraints.iter().filter(is_of_rows).cloned().collect();
        Self { constraints, fully_masked_rows: self.fully_masked_rows, placements: Some(placements), ..Self::none() }
    }
}

fn longest(placements: &[Placement]) -> usize {
    placements.iter().map(|placement| placement.keys.end).max().unwrap_or(0)
}

/// The columns of a mask tensor (.., T_kv) for the rows of keys that each sequence reads.
fn columns(tensor: &Tensor, placements: &[Placement], rows: usize) -> Result<Tensor> {
    let t_kv = tensor.dim(3)?;
    if t_kv == 1 && longest(placements) != 1 {
        return Ok(tensor.clone());
    }
    // Where all sequences begin alike, the rows of the longest one end with the columns.
    let start = placements.first().map_or(0, |placement| placement.keys.start);
    if placements.iter().all(|placement| placement.keys.start == start) {
        return readable(&tensor.narrow(3, start, rows)?);
    }
    let (_, h, t_q, _) = tensor.dims4()?;
    check_memory(&[placements.len(), h, t_q, rows], tensor.dtype())?;
    let of_all = tensor.broadcast_as((placements.len(), h, t_q, t_kv))?;
    let own = |(b, placement): (usize, &Placement)| {
        let start = placement.keys.start;
        // Hidden behind them, since the sequence holds no more keys.
        match rows.min(t_kv - start) {
            0 => Tensor::zeros((1, h, t_q, rows), tensor.dtype(), tensor.device()),
            have => {
                let own = of_all.narrow(0, b, 1)?.narrow(3, start, have)?;
                readable(&own)?.contiguous()?.pad_with_zeros(3, 0, rows - have)
            }
        }
    };
    Tensor::cat(&placements.iter().enumerate().map(own).collect::<Result<Vec<_>>>()?, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two sequences of 2 and 3 queries against 4 and 2 keys, with an empty one of each kind between them.
    fn packed_rows(mask: &AttentionMask) -> Result<RowRanges> {
        mask.packed_rows("test", &[[0..2, 0..4], [2..2, 4..7], [2..3, 7..7], [3..6, 7..9]])
    }

    #[test]
    fn ranges_are_those_of_each_sequence_moved_to_its_keys() -> Result<()> {
        let rows = packed_rows(&AttentionMask::none())?;
        assert_eq!(rows.keys, [0..4, 0..4, 7..7, 7..9, 7..9, 7..9]);
        // The last query of a sequence stands at its last key.
        assert_eq!(rows.positions()?, [2, 3, 6, 6, 7, 8]);

        let rows = packed_rows(&AttentionMask::causal())?;
        assert_eq!(rows.keys, [0..3, 0..4, 7..7, 7..7, 7..8, 7..9]);
        assert_eq!(rows.positions()?, [2, 3, 6, 6, 7, 8]);

        let rows = packed_rows(&AttentionMask::causal_upper_left())?;
        assert_eq!(rows.keys, [0..1, 0..2, 7..7, 7..8, 7..9, 7..9]);
        assert_eq!(rows.positions()?, [0, 1, 7, 7, 8, 9]);
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

    #[test]
    fn a_part_of_a_sequence_is_refused_where_others_say_where_sequences_stand() -> Result<()> {
        let part = AttentionMask::causal().of_part(4, 0..1, 0..1)?;
        let text = packed_rows(&part).expect_err("packed sequences").to_string();
        assert!(text.contains("`of_part`, expected one of whole sequences"), "{text}");
        assert!(part.rebase("test", &[Placement::whole(1, 3)], [1, 1, 1, 3], &Device::Cpu).is_err());
        Ok(())
    }
}
