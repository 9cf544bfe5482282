//! The constraints of a mask. Everything else asks this file which keys a constraint allows a query to attend to.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

use super::OP;
use super::lens::ValidLens;
use super::placement::{Placement, SequenceSize};
use super::tokenizer::Tokenized;
use candle_attention_modules::base::check_entries;

/// One constraint that needs no tensor. A query attends to the keys that all constraints of a mask allow.
#[derive(Debug, Clone)]
pub(super) enum Constraint {
    /// Allows keys by their distance from the query's position.
    Aligned(QueryAlignment, Reach),
    /// Masks the keys from the length of a sequence or query on.
    ValidLens(ValidLens),
    /// Masks the keys before the start of a sequence or query. Chunks count from it.
    Starts(ValidLens),
    /// Masks the keys before the first key of a sequence or query, as `Starts`, but chunks do not count from it.
    FirstKeys(ValidLens),
    /// Masks nothing: the columns of each sequence that are padding on the left by the tensors of the mask. Chunks
    /// count from the column after them.
    Padded(Arc<[usize]>),
    /// Masks nothing. It relaxed the causal constraints before it, and relaxes the causal constraint of a layer that
    /// the mask is passed to.
    Prefix(ValidLens),
    /// Masks nothing: the tokenizer's attention mask that other constraints were made from.
    Tokenized(Tokenized),
    /// Masks nothing. Every use of the mask returns this error.
    Wrong(String),
}

/// The keys that a query may attend to, counted from its position.
#[derive(Debug, Clone)]
pub(super) enum Reach {
    /// The query's own key, the keys before it, and the keys before the shortest prefix.
    Causal { prefix: Vec<ValidLens> },
    /// The keys from `left` keys before the query's own to `right` keys after it.
    Window { left: usize, right: usize },
    /// The keys in the query's chunk of this many positions, at least 1. The first chunk begins at the first key of the
    /// query's sequence.
    Chunk(usize),
}

/// The key position of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum QueryAlignment {
    /// The last query is at the last key.
    End,
    /// Query i is at key i + n.
    Offset(usize),
    /// Query i is at key i + n, with an n for each sequence.
    Offsets(Arc<[i64]>),
}

/// The key position of a query, by all constraints of a mask.
pub(super) struct QueryPosition {
    /// The position that the first constraint with an alignment says.
    pub first: i64,
    /// The position that a later constraint says, if the masks that were joined disagree.
    pub other: Option<i64>,
}

impl Placement {
    /// Returns the rows of the keys that constraints allow query `i` of the sequence `b` to attend to; `0..0` if there
    /// are none.
    pub(super) fn allowed_keys(&self, constraints: &[Constraint], b: usize, i: usize) -> Range<usize> {
        if !self.tokens.contains(&i) {
            return 0..0;
        }
        let first = self.keys.start;
        let first_of_sequence = first_key(constraints, b, i) as i128;
        let mut allowed = first as i128..self.keys.end as i128;
        for constraint in constraints {
            let keys = constraint.keys(b, i, self, first_of_sequence);
            allowed = allowed.start.max(keys.start)..allowed.end.min(keys.end);
        }
        if allowed.is_empty() { 0..0 } else { allowed.start as usize - first..allowed.end as usize - first }
    }

    /// Returns the row of keys at which query `i` is located. There need not be such a row.
    pub(super) fn query_position(&self, constraints: &[Constraint], b: usize, i: usize) -> QueryPosition {
        let row = |alignment: &QueryAlignment| {
            let row = alignment.position(b, self, i) - self.keys.start as i128;
            row.clamp(i64::MIN.into(), i64::MAX.into()) as i64
        };
        let mut rows = constraints.iter().filter_map(Constraint::alignment).map(row);
        let first = rows.next().unwrap_or_else(|| row(&QueryAlignment::End));
        QueryPosition { first, other: rows.find(|&other| other != first) }
    }
}

impl QueryAlignment {
    /// Returns the key position of query `i` of sequence `b`. Sums of sizes and positions do not overflow in i128.
    pub fn position(&self, b: usize, placement: &Placement, i: usize) -> i128 {
        let first = match self {
            Self::End => placement.first_position,
            Self::Offset(n) => placement.first_query as i128 + *n as i128,
            Self::Offsets(offsets) => placement.first_query as i128 + i128::from(offsets.get(b).copied().unwrap_or(0)),
        };
        first + i as i128
    }

    /// Returns the alignment for some of the sequences, in this order.
    fn of_sequences(&self, chosen: &[usize]) -> Self {
        match self {
            Self::End | Self::Offset(_) => self.clone(),
            Self::Offsets(offsets) => Self::Offsets(chosen.iter().map(|&s| offsets[s]).collect()),
        }
    }
}

/// Returns the key at which the sequence of query `i` of row `b` of a batch begins: the last of its starts and of the
/// columns that tensors pad.
pub(super) fn first_key(constraints: &[Constraint], b: usize, i: usize) -> usize {
    let mut first = 0;
    for constraint in constraints {
        match constraint {
            Constraint::Starts(starts) => first = first.max(starts.get(b, i)),
            Constraint::Padded(columns) => first = first.max(columns.get(b).copied().unwrap_or(0)),
            _ => {}
        }
    }
    first
}

/// All key positions.
const ALL: Range<i128> = i128::MIN..i128::MAX;

impl Reach {
    /// Returns the reach for some of the sequences, in this order.
    fn of_sequences(&self, chosen: &[usize]) -> Self {
        match self {
            Self::Causal { prefix } => {
                Self::Causal { prefix: prefix.iter().map(|lens| lens.of_sequences(chosen)).collect() }
            }
            Self::Window { .. } | Self::Chunk(_) => self.clone(),
        }
    }

    /// Returns the key positions that query `i` of sequence `b`, at a position, may attend to. The sequence begins at
    /// the key `first`.
    pub fn keys(&self, position: i128, b: usize, i: usize, first: i128) -> Range<i128> {
        match self {
            Self::Causal { prefix } => {
                let shortest = prefix.iter().map(|lens| lens.get(b, i) as i128).min().unwrap_or(0);
                ALL.start..(position + 1).max(shortest)
            }
            Self::Window { left, right } => position - *left as i128..position + *right as i128 + 1,
            Self::Chunk(size) => {
                let size = *size as i128;
                let start = first + (position - first).div_euclid(size) * size;
                start..start + size
            }
        }
    }
}

impl Constraint {
    /// Returns the error of a builder whose meaning depends on the order in which masks were joined.
    pub fn ambiguous(builder: &str) -> Self {
        Self::Wrong(format!(
            "{builder} was called on masks that were joined and whose queries are at different positions, expected \
             it on one of them before `and`"
        ))
    }

    /// Returns the error of a window or a chunk without keys.
    pub fn empty(name: &str) -> Self {
        Self::Wrong(format!("{name} is 0, expected at least 1 (the query's own key)"))
    }

    /// Returns the error of masks of different parts that were joined.
    pub fn different_parts() -> Self {
        Self::Wrong(
            "masks `of_part` of different parts were joined, expected masks of the same queries and keys".into(),
        )
    }

    /// Returns the key positions that the constraint allows query `i` of sequence `b` to attend to. The sequence begins
    /// at the key `first`.
    fn keys(&self, b: usize, i: usize, placement: &Placement, first: i128) -> Range<i128> {
        match self {
            Self::Aligned(alignment, reach) => reach.keys(alignment.position(b, placement, i), b, i, first),
            Self::ValidLens(lens) => ALL.start..lens.get(b, i) as i128,
            Self::Starts(starts) | Self::FirstKeys(starts) => starts.get(b, i) as i128..ALL.end,
            Self::Padded(_) | Self::Prefix(_) | Self::Tokenized(_) | Self::Wrong(_) => ALL,
        }
    }

    /// Returns the constraint for some of the queries of each sequence: the entries of these queries, if it has entries
    /// for each query.
    ///
    /// # Errors
    /// For a query without an entry.
    pub fn of_queries(&self, queries: &Range<usize>) -> Result<Self> {
        Ok(match self {
            Self::Aligned(alignment, Reach::Causal { prefix }) => {
                let prefix = prefix.iter().map(|lens| lens.of_queries("prefix", queries)).collect::<Result<_>>()?;
                Self::Aligned(alignment.clone(), Reach::Causal { prefix })
            }
            Self::ValidLens(lens) => Self::ValidLens(lens.of_queries("valid_lens", queries)?),
            Self::Starts(starts) => Self::Starts(starts.of_queries("starts", queries)?),
            Self::FirstKeys(keys) => Self::FirstKeys(keys.of_queries("first keys", queries)?),
            Self::Prefix(prefix) => Self::Prefix(prefix.of_queries("prefix", queries)?),
            Self::Aligned(..) | Self::Padded(_) | Self::Tokenized(_) | Self::Wrong(_) => self.clone(),
        })
    }

    /// Returns the constraint for some of the sequences, in this order. It fits all of them.
    pub fn of_sequences(&self, chosen: &[usize]) -> Self {
        match self {
            Self::Aligned(alignment, reach) => {
                Self::Aligned(alignment.of_sequences(chosen), reach.of_sequences(chosen))
            }
            Self::ValidLens(lens) => Self::ValidLens(lens.of_sequences(chosen)),
            Self::Starts(starts) => Self::Starts(starts.of_sequences(chosen)),
            Self::FirstKeys(keys) => Self::FirstKeys(keys.of_sequences(chosen)),
            Self::Prefix(prefix) => Self::Prefix(prefix.of_sequences(chosen)),
            Self::Padded(columns) => {
                Self::Padded(chosen.iter().map(|&s| columns.get(s).copied().unwrap_or(0)).collect())
            }
            Self::Tokenized(_) | Self::Wrong(_) => self.clone(),
        }
    }

    /// Returns the alignment of a constraint that counts from the query's position.
    pub fn alignment(&self) -> Option<&QueryAlignment> {
        if let Self::Aligned(alignment, _) = self { Some(alignment) } else { None }
    }

    /// Checks that the constraint fits `n` sequences, with the queries and keys of `sizes` for each sequence, or for
    /// all.
    pub fn check(&self, n: usize, sizes: &[SequenceSize]) -> Result<()> {
        match self {
            Self::Aligned(QueryAlignment::Offsets(offsets), _) => {
                check_entries(OP, "causal_with_offsets", offsets.len(), n, "sequences")
            }
            Self::Aligned(..) | Self::Padded(_) => Ok(()),
            Self::ValidLens(lens) => lens.check("valid_lens", n, sizes),
            Self::Starts(starts) => starts.check("starts", n, sizes),
            Self::FirstKeys(keys) => keys.check("first keys", n, sizes),
            Self::Prefix(prefix) => prefix.check("prefix", n, sizes),
            Self::Tokenized(Tokenized { columns, .. }) => {
                if let Some(SequenceSize { t_kv, .. }) = sizes.iter().find(|size| size.t_kv != *columns) {
                    bail!("[{OP}] the attention mask has {columns} columns, expected one for each of {t_kv} keys")
                }
                Ok(())
            }
            Self::Wrong(problem) => bail!("[{OP}] {problem}"),
        }
    }
}
