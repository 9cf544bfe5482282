//! A mask resolved for a shape: one interval of keys for each query.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::AttentionMask;
use super::constraint::{Alignment, Constraint, Placement};
use crate::size::filled;

/// The structural constraints of an [`AttentionMask`] for given B, T_q and T_kv.
///
/// `Display` draws the (T_q, T_kv) matrix of each sequence: `1` a key that is seen, `.` one that is hidden.
#[derive(Debug, Clone)]
pub struct KvRanges {
    b: usize,
    t_q: usize,
    t_kv: usize,
    constraints: Vec<Constraint>,
    frames: Option<Frames>,
}

/// Sequences that stand at positions of their own: beside a cache, or packed.
#[derive(Debug, Clone)]
pub(super) struct Frames {
    pub placements: Vec<Placement>,
    /// The sequence of the first placement, of so many that lengths are given for.
    pub first: usize,
    pub of: usize,
}

impl KvRanges {
    pub(super) fn new(mask: &AttentionMask, b: usize, t_q: usize, t_kv: usize) -> Result<Self> {
        let (sequences, of) = match &mask.frames {
            None => (0..b, b),
            Some(frames) if frames.placements.len() == b => (frames.first..frames.first + b, frames.of),
            Some(frames) => {
                bail!("[attention_mask] positions of {} sequences were given, expected {b}", frames.placements.len())
            }
        };
        for constraint in &mask.constraints {
            constraint.check(t_kv)?;
            let (what, lens) = constraint.lens();
            lens.iter().try_for_each(|lens| lens.check(what, of, sequences.clone(), t_q))?;
        }
        let structural = |constraint: &&Constraint| constraint.bounds_keys();
        let constraints = mask.constraints.iter().filter(structural).cloned().collect();
        Ok(Self { b, t_q, t_kv, constraints, frames: mask.frames.clone() })
    }

    /// The keys that query `i` of sequence `b` sees; `0..0` when it sees none, or lies outside the shape.
    pub fn kv_range(&self, b: usize, i: usize) -> Range<usize> {
        if b >= self.b || i >= self.t_q {
            return 0..0;
        }
        let (placement, sequence) = self.placement(b);
        if !placement.tokens.contains(&i) {
            return 0..0;
        }
        let (mut start, mut end) = (placement.keys.start as i128, placement.keys.end as i128);
        for constraint in &self.constraints {
            let keys = constraint.keys(sequence, i, &placement);
            (start, end) = (start.max(keys.start), end.min(keys.end));
        }
        let first = placement.keys.start;
        if start < end { start as usize - first..end as usize - first } else { 0..0 }
    }

    /// The key position at which query `i` stands, from which windows and ALiBi distances count; negative when
    /// T_q > T_kv and the alignment is to the end. Positions past the ends of i64 give its ends. Of joined masks, the
    /// position of the first that has one.
    pub fn query_position(&self, i: usize) -> i64 {
        self.position(0, i)
    }

    /// [`query_position`](Self::query_position) in sequence `b`, where sequences stand at positions of their own.
    pub(crate) fn position(&self, b: usize, i: usize) -> i64 {
        self.position_by(self.alignments().next().unwrap_or(Alignment::End), b, i)
    }

    /// The positions of all queries of the first `b` sequences, (b, T_q), for ALiBi.
    ///
    /// # Errors
    /// For joined masks that give a query different positions, and where memory is short.
    pub(crate) fn positions(&self, b: usize) -> Result<Vec<i64>> {
        for b in 0..b {
            let of = |alignment| self.position_by(alignment, b, 0);
            let first = self.position(b, 0);
            if let Some(other) = self.alignments().map(of).find(|&other| other != first) {
                bail!(
                    "[attention_mask] ALiBi counts from a query's position, and the joined masks give query 0 of sequence \
                     {b} the positions {first} and {other}, expected one"
                )
            }
        }
        let Some(mut positions) = filled(&[b, self.t_q], 0) else {
            bail!("[attention_mask] the positions of {b} × {} queries do not fit in memory", self.t_q)
        };
        for (row, position) in positions.iter_mut().enumerate() {
            *position = self.position(row / self.t_q, row % self.t_q);
        }
        Ok(positions)
    }

    /// Whether sequences stand at positions of their own.
    pub(crate) fn positions_differ(&self) -> bool {
        self.frames.is_some()
    }

    /// The intervals as u8 (B or 1, 1, T_q, T_kv), 1 = seen; `None` when no constraint was given.
    pub(super) fn to_keep(&self, device: &Device) -> Result<Option<Tensor>> {
        let is_part = |placement: &Placement| placement.tokens != (0..self.t_q) || placement.keys.len() != self.t_kv;
        if self.constraints.is_empty() && !self.frames.iter().flat_map(|frames| &frames.placements).any(is_part) {
            return Ok(None);
        }
        let by_sequence = self.frames.is_some() || self.constraints.iter().any(|one| !one.lens().1.is_empty());
        let b = if by_sequence { self.b } else { self.b.min(1) };
        let Some(mut keep) = filled(&[b, self.t_q, self.t_kv], 0u8) else {
            bail!("[attention_mask] a mask of {b} × {} × {} entries does not fit in memory", self.t_q, self.t_kv)
        };
        if self.t_kv > 0 {
            for (row, keys) in keep.chunks_exact_mut(self.t_kv).enumerate() {
                keys[self.kv_range(row / self.t_q, row % self.t_q)].fill(1);
            }
        }
        Ok(Some(Tensor::from_vec(keep, (b, 1, self.t_q, self.t_kv), device)?))
    }

    /// Where sequence `b` stands, and the number that its lengths go by.
    fn placement(&self, b: usize) -> (Cow<'_, Placement>, usize) {
        match self.frames.as_ref().and_then(|frames| Some((frames.placements.get(b)?, frames.first))) {
            Some((placement, first)) => (Cow::Borrowed(placement), first + b),
            None => (Cow::Owned(Placement::whole(self.t_q, self.t_kv)), b),
        }
    }

    fn alignments(&self) -> impl Iterator<Item = Alignment> {
        self.constraints.iter().filter_map(Constraint::alignment)
    }

    fn position_by(&self, alignment: Alignment, b: usize, i: usize) -> i64 {
        let (placement, _) = self.placement(b);
        let position = alignment.position(&placement, i) - placement.keys.start as i128;
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
