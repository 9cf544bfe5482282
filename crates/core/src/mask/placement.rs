//! The queries and keys of a call within longer sequences.

use std::ops::Range;

use candle_core::{Result, bail};

use super::OP;

/// The numbers of queries and keys of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SequenceSize {
    pub t_q: usize,
    pub t_kv: usize,
}

/// The rows of queries and of keys of a packed sequence among the rows of all sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PackedRows {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

/// The queries and keys of a call within one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The position of query 0. It is negative if the call begins with padding.
    pub first_position: i128,
    /// The index of query 0 among all queries of the sequence, from which offsets count.
    pub first_query: usize,
    /// The queries that are tokens. The others attend to nothing.
    pub tokens: Range<usize>,
    /// The positions of the keys. The first of them is in row 0; a cache stores the last positions of a sequence.
    pub keys: Range<usize>,
}

impl Placement {
    /// Returns the placement of a whole sequence: the last query is at the last key.
    pub fn whole(t_q: usize, t_kv: usize) -> Self {
        Self { first_position: t_kv as i128 - t_q as i128, first_query: 0, tokens: 0..t_q, keys: 0..t_kv }
    }
}

/// The queries and the keys of one sequence of a call.
#[derive(Debug, Clone)]
pub(super) struct SequencePlan {
    pub placement: Placement,
    /// The range of the sequence's queries among the queries of the call.
    pub queries: Range<usize>,
    /// The index of the sequence's first key among the keys of the call.
    pub first_key: usize,
    /// The number of the sequence's rows of keys, some of which may be past its end.
    pub t_kv: usize,
}

/// The placements of all sequences of a call, which has one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placements {
    /// The number of sequences.
    pub b: usize,
    /// The number of queries of each sequence.
    pub t_q: usize,
    /// The number of rows of keys of each sequence.
    pub t_kv: usize,
    /// A placement for each sequence, or one for all of them.
    pub each: Vec<Placement>,
}

impl Placements {
    /// Returns the placement of sequence `b`.
    pub fn of_sequence(&self, b: usize) -> Option<&Placement> {
        if self.each.len() == 1 { self.each.first() } else { self.each.get(b) }
    }

    /// Checks that a call has the shape of the placements: `n` sequences, with the queries and keys of `sizes`.
    pub fn check(&self, n: usize, sizes: &[SequenceSize]) -> Result<()> {
        let Self { b, t_q, t_kv, .. } = *self;
        let own = SequenceSize { t_q, t_kv };
        if b != n {
            bail!("[{OP}] the mask is `of_part` with {b} sequences, expected {n}")
        }
        if let Some(size) = sizes.iter().find(|&&size| size != own) {
            bail!(
                "[{OP}] the mask is `of_part` with {t_q} queries and {t_kv} keys, expected {} queries and {} keys",
                size.t_q,
                size.t_kv
            )
        }
        Ok(())
    }
}
