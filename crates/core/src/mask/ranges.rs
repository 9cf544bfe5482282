//! A mask resolved for a shape, one interval of keys for each query; moved to the keys that a cache holds of a
//! sequence; and taken apart over packed sequences.

use std::fmt;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::constraint::{Alignment, Constraint, Placement};
use super::tensors::{check_memory, fit};
use super::{AttentionMask, EmptyRows, OP};
use candle_attention_modules::base::filled;

/// The structural constraints of an [`AttentionMask`] for given B, T_q and T_kv.
///
/// `Display` draws the (T_q, T_kv) matrix of each sequence: `1` a key that is seen, `.` one that is hidden.
#[derive(Debug, Clone)]
pub struct KvRanges {
    b: usize,
    t_q: usize,
    t_kv: usize,
    constraints: Vec<Constraint>,
    /// Of each sequence, or one of all; never empty.
    placements: Vec<Placement>,
    /// The number of the first sequence, of those that lengths are given for.
    first: usize,
}

impl KvRanges {
    /// The keys that query `i` of sequence `b` sees; `0..0` when it sees none, or lies outside the shape.
    pub fn kv_range(&self, b: usize, i: usize) -> Range<usize> {
        if b >= self.b || i >= self.t_q {
            return 0..0;
        }
        let placement = self.placement(b);
        if !placement.tokens.contains(&i) {
            return 0..0;
        }
        let (mut start, mut end) = (placement.keys.start as i128, placement.keys.end as i128);
        for constraint in &self.constraints {
            let keys = constraint.keys(self.first + b, i, placement);
            (start, end) = (start.max(keys.start), end.min(keys.end));
        }
        let first = placement.keys.start;
        if start < end { start as usize - first..end as usize - first } else { 0..0 }
    }

    /// The key position at which query `i` stands, from which windows and ALiBi distances count; negative when
    /// T_q > T_kv and the alignment is to the end, or where an offset is. Positions past the ends of i64 give its
    /// ends. Of joined masks, the position of the first that has one; of sequences with an offset each, that in the
    /// first.
    pub fn query_position(&self, i: usize) -> i64 {
        self.position(0, i)
    }

    /// [`query_position`](Self::query_position) in sequence `b`, where sequences stand at positions of their own.
    pub(crate) fn position(&self, b: usize, i: usize) -> i64 {
        self.position_by(self.alignments().next().unwrap_or(&Alignment::End), b, i)
    }

    /// That each query has one position, from which ALiBi counts.
    ///
    /// # Errors
    /// For joined masks that give a query different positions.
    pub(crate) fn check_positions(&self) -> Result<()> {
        for b in 0..self.b {
            let of = |alignment| self.position_by(alignment, b, 0);
            let first = self.position(b, 0);
            if let Some(other) = self.alignments().map(of).find(|&other| other != first) {
                bail!(
                    "[{OP}] ALiBi counts from a query's position, and the joined masks give query 0 of sequence \
                     {b} the positions {first} and {other}, expected one"
                )
            }
        }
        Ok(())
    }

    /// Those of one of several packed sequences, as of a batch of one.
    pub(crate) fn of_sequence(&self, s: usize) -> Self {
        let placement = self.placement(s).clone();
        let (t_q, t_kv) = (placement.tokens.len(), placement.keys.len());
        Self { b: 1, t_q, t_kv, constraints: self.constraints.clone(), placements: vec![placement], first: s }
    }

    /// Whether sequences may stand at different positions.
    pub(crate) fn positions_differ(&self) -> bool {
        self.placements.len() > 1 || self.alignments().any(|alignment| matches!(alignment, Alignment::Offsets(_)))
    }

    /// The intervals as u8 (B or 1, 1, T_q, T_kv), 1 = seen; `None` when no constraint was given.
    pub(super) fn to_keep(&self, device: &Device) -> Result<Option<Tensor>> {
        let is_part = |placement: &Placement| placement.tokens != (0..self.t_q) || placement.keys.len() != self.t_kv;
        if !self.constraints.iter().any(Constraint::bounds_keys) && !self.placements.iter().any(is_part) {
            return Ok(None);
        }
        let by_sequence = self.placements.len() > 1 || self.constraints.iter().any(Constraint::differs_by_sequence);
        let b = if by_sequence { self.b } else { self.b.min(1) };
        let dims = [b, self.t_q, self.t_kv];
        let Some(mut keep) = filled(&dims, 0u8) else {
            bail!("[{OP}] a mask of {dims:?} entries does not fit in memory")
        };
        if self.t_kv > 0 {
            for (row, keys) in keep.chunks_exact_mut(self.t_kv).enumerate() {
                keys[self.kv_range(row / self.t_q, row % self.t_q)].fill(1);
            }
        }
        Ok(Some(Tensor::from_vec(keep, (b, 1, self.t_q, self.t_kv), device)?))
    }

    /// Where sequence `b` stands.
    fn placement(&self, b: usize) -> &Placement {
        self.placements.get(b).unwrap_or(&self.placements[0])
    }

    fn alignments(&self) -> impl Iterator<Item = &Alignment> {
        self.constraints.iter().filter_map(Constraint::alignment)
    }

    fn position_by(&self, alignment: &Alignment, b: usize, i: usize) -> i64 {
        let placement = self.placement(b);
        let position = alignment.position(self.first + b, placement, i) - placement.keys.start as i128;
        position.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }
}

impl fmt::Display for KvRanges {
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

impl AttentionMask {
    /// The structural constraints for `b` sequences, `t_q` queries and `t_kv` keys, as an interval for each query.
    ///
    /// # Errors
    /// For lengths whose shape is neither (B,) nor (B, T_q), for a window or a chunk of 0, and for what was built on
    /// joined masks that let it mean several things.
    pub fn resolve(&self, b: usize, t_q: usize, t_kv: usize) -> Result<KvRanges> {
        self.constraints.iter().try_for_each(|constraint| constraint.check(b, &[[t_q, t_kv]]))?;
        let placements = match &self.placements {
            Some(placements) if placements.len() != b => {
                bail!("[{OP}] positions of {} sequences were given, expected {b}", placements.len())
            }
            Some(placements) if b > 0 => placements.clone(),
            _ => vec![Placement::whole(t_q, t_kv)],
        };
        Ok(KvRanges { b, t_q, t_kv, constraints: self.constraints.clone(), placements, first: 0 })
    }

    /// The same for packed sequences of so many queries and keys, each as a batch of one. Tensors `keep` and `bias`
    /// have no meaning there.
    pub(crate) fn resolve_packed(&self, sizes: &[[usize; 2]]) -> Result<KvRanges> {
        self.constraints.iter().try_for_each(|constraint| constraint.check(sizes.len(), sizes))?;
        let [t_q, t_kv] = [0, 1].map(|of| sizes.iter().map(|size| size[of]).max().unwrap_or(0));
        let placements = sizes.iter().map(|&[t_q, t_kv]| Placement::whole(t_q, t_kv)).collect();
        let constraints = self.constraints.clone();
        Ok(KvRanges { b: sizes.len(), t_q, t_kv, constraints, placements, first: 0 })
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
        let t_kv = longest(placements);
        self.resolve(b, t_q, t_kv)?;
        if placements.iter().any(|placement| placement.keys.start > 0) {
            let all = placements.iter().map(|placement| Placement { keys: 0..placement.end, ..placement.clone() });
            let ranges = self.placed(all.collect()).resolve(b, t_q, t_kv)?;
            for (sequence, first) in placements.iter().map(|placement| placement.keys.start).enumerate() {
                let mut seen = (0..t_q).map(|i| ranges.kv_range(sequence, i));
                if let Some(keys) = seen.find(|keys| !keys.is_empty() && keys.start < first) {
                    bail!(
                        "[{op}] a query of sequence {sequence} sees the key at position {}, but the cache holds those \
                         from {first} on; expected a shorter window in the mask, or a longer one in the cache",
                        keys.start
                    )
                }
            }
        }
        let whole = Placement::whole(t_q, t_kv);
        if placements.iter().all(|placement| *placement == whole) {
            return Ok(self.clone());
        }
        if self.empty_rows == EmptyRows::Uniform {
            bail!("[{OP}] uniform empty rows weigh all keys alike, expected every sequence to hold all of its keys")
        }
        let cut = |what, tensors: &[Tensor]| {
            let own = tensors.iter().map(|tensor| fit(what, tensor, [b, h, t_q, t_kv], device));
            own.map(|tensor| columns(&tensor?, placements, rows)).collect::<Result<_>>()
        };
        let (keeps, biases) = (cut("keep", &self.keeps)?, cut("bias", &self.biases)?);
        Ok(Self { keeps, biases, ..self.placed(placements.to_vec()) })
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
    /// # Errors
    /// For `keep` and `bias` tensors, for uniform empty rows, and for a part of a part.
    pub fn of_part(&self, b: usize, queries: Range<usize>, keys: Range<usize>) -> Result<Self> {
        let obstacle = match self.tensor_kind() {
            Some(tensor) => Some(format!("has a {tensor} tensor")),
            None if self.empty_rows == EmptyRows::Uniform => {
                Some("has uniform empty rows, which weigh all keys".into())
            }
            None => self.placements.as_ref().map(|_| "is of a part already".into()),
        };
        if let Some(obstacle) = obstacle {
            bail!("[{OP}] the mask {obstacle}, expected one that leaves intervals of a whole sequence")
        }
        let (query, first_query, end) = (queries.start as i128, queries.start, keys.end.max(queries.end));
        Ok(self.placed(vec![Placement { query, first_query, tokens: 0..queries.len(), end, keys }; b]))
    }

    /// The constraints for a placement of each sequence, where rows of keys are no columns of an attention mask;
    /// without `keep` and `bias` tensors.
    fn placed(&self, placements: Vec<Placement>) -> Self {
        let is_of_rows = |constraint: &&Constraint| !matches!(constraint, Constraint::Columns(_));
        let constraints = self.constraints.iter().filter(is_of_rows).cloned().collect();
        Self { constraints, empty_rows: self.empty_rows, placements: Some(placements), ..Self::none() }
    }
}

fn longest(placements: &[Placement]) -> usize {
    placements.iter().map(|placement| placement.end).max().unwrap_or(0)
}

/// The columns of a mask tensor (.., T_kv) for the rows of keys that each sequence reads.
fn columns(tensor: &Tensor, placements: &[Placement], rows: usize) -> Result<Tensor> {
    let t_kv = tensor.dim(3)?;
    if t_kv == 1 && longest(placements) != 1 {
        return Ok(tensor.clone());
    }
    let (_, h, t_q, _) = tensor.dims4()?;
    if tensor.elem_count() == 0 || rows == 0 {
        // Candle copies no empty views.
        return Tensor::zeros((placements.len(), h, t_q, rows), tensor.dtype(), tensor.device());
    }
    let own = |tensor: &Tensor, start: usize| {
        let start = start.min(t_kv);
        let own = tensor.narrow(3, start, rows.min(t_kv - start))?;
        let (b, h, t_q, have) = own.dims4()?;
        if have == rows {
            return Ok(own);
        }
        // Hidden, since the sequence holds no more keys.
        check_memory(&[b, h, t_q, rows])?;
        match have {
            0 => Tensor::zeros((b, h, t_q, rows), own.dtype(), own.device()),
            _ => own.contiguous()?.pad_with_zeros(3, 0, rows - have),
        }
    };
    let start = placements.first().map_or(0, |placement| placement.keys.start);
    if placements.iter().all(|placement| placement.keys.start == start) {
        return own(tensor, start);
    }
    check_memory(&[placements.len(), h, t_q, rows])?;
    let of_all = tensor.broadcast_as((placements.len(), h, t_q, t_kv))?;
    let parts = placements.iter().enumerate().map(|(b, placement)| own(&of_all.narrow(0, b, 1)?, placement.keys.start));
    Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
}
