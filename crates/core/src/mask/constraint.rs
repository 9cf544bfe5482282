//! The constraints of a mask, and what each leaves a query: the one place that gives them their meaning.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::OP;
use candle_attention_modules::base::{Dim, Expect, check_entries};

/// One thing that hides keys, without a tensor. All of a mask's constraints hold together.
#[derive(Debug, Clone)]
pub(super) enum Constraint {
    /// What a query sees from where it stands.
    Aligned(Alignment, Reach),
    /// Keys at and past the length are hidden.
    ValidLens(ValidLens),
    /// Keys before the start are hidden.
    Starts(ValidLens),
    /// Hides nothing; lifted the causal constraints before it, and lifts that of a layer that the mask is given to.
    Prefix(ValidLens),
    /// Masks nothing; the shape of the tokenizer's attention mask from which other constraints were made.
    Tokenized(Tokenized),
    /// Hides nothing; what is wrong with the mask whatever its shape: an error where it is resolved.
    Wrong(String),
}

/// A tokenizer's attention mask (B, T_kv) of ones and zeros.
#[derive(Debug, Clone)]
pub(super) struct Tokenized {
    /// T_kv.
    pub columns: usize,
    /// The column after the last one of each row, 0 for a row of zeros.
    pub ends: Arc<[usize]>,
    /// Whether a row has zeros between ones.
    pub has_gaps: bool,
}

impl Tokenized {
    /// Checks that no row has a token after the end of its sequence in a cache.
    pub fn check_ends(&self, placements: &[Placement]) -> Result<()> {
        for (s, (&end, placement)) in self.ends.iter().zip(placements).enumerate() {
            let len = placement.keys.end;
            if end > len {
                bail!(
                    "[{OP}] the attention mask has a token in column {} of sequence {s}, expected none after its {len} \
                     positions: a cache stores no padding that was given by `AttentionInput::with_starts` or \
                     `with_valid_lens`, and masks do not count it",
                    end - 1
                )
            }
        }
        Ok(())
    }
}

/// The keys that a query sees from its position.
#[derive(Debug, Clone)]
pub(super) enum Reach {
    /// None after its own but those before all prefixes.
    Causal { prefix: Vec<ValidLens> },
    /// From `left` before its own to `right` after it.
    Band { left: usize, right: usize },
    /// Those of the chunk of so many positions that it stands in, at least 1.
    Chunk(usize),
}

/// At which key position a query stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Alignment {
    /// The last query stands at the last key.
    End,
    /// Query i stands at key i + n.
    Offset(usize),
    /// Query i stands at key i + n, with an n for each sequence.
    Offsets(Arc<[i64]>),
}

/// Where the queries of a call, and the rows of keys that it reads, stand in one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The position of query 0; negative where padding stands before the first token.
    pub query: i128,
    /// The number of query 0 among the queries of the sequence, from which offsets count.
    pub first_query: usize,
    /// Which queries are tokens; the others see nothing.
    pub tokens: Range<usize>,
    /// The positions of the keys that are read: row 0 holds the first of them. A cache holds the last of a sequence.
    pub keys: Range<usize>,
}

impl Placement {
    /// All queries and keys of a call by itself: the last query stands at the last key.
    pub fn whole(t_q: usize, t_kv: usize) -> Self {
        Self { query: t_kv as i128 - t_q as i128, first_query: 0, tokens: 0..t_q, keys: 0..t_kv }
    }

    /// The rows of the keys that constraints leave query `i` of the sequence, the number of which is `b`; `0..0` where
    /// they leave none.
    pub(super) fn seen(&self, constraints: &[Constraint], b: usize, i: usize) -> Range<usize> {
        if !self.tokens.contains(&i) {
            return 0..0;
        }
        let first = self.keys.start;
        let both = |one: Range<i128>, other: Range<i128>| one.start.max(other.start)..one.end.min(other.end);
        let all = first as i128..self.keys.end as i128;
        let seen = constraints.iter().map(|constraint| constraint.keys(b, i, self)).fold(all, both);
        if seen.is_empty() { 0..0 } else { seen.start as usize - first..seen.end as usize - first }
    }

    /// The row of keys, or one that there would be, at which query `i` stands, and another one where joined masks give
    /// it several.
    pub(super) fn positions(&self, constraints: &[Constraint], b: usize, i: usize) -> (i64, Option<i64>) {
        let row = |alignment: &Alignment| {
            let row = alignment.position(b, self, i) - self.keys.start as i128;
            row.clamp(i64::MIN.into(), i64::MAX.into()) as i64
        };
        let mut rows = constraints.iter().filter_map(Constraint::alignment).map(row);
        let first = rows.next().unwrap_or_else(|| row(&Alignment::End));
        (first, rows.find(|&other| other != first))
    }
}

/// Where the queries and keys of a call of one shape are located in their sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placements {
    /// The number of sequences.
    pub b: usize,
    /// The number of queries that the call has for each sequence.
    pub t_q: usize,
    /// The number of rows of keys that the call has for each sequence.
    pub t_kv: usize,
    /// A placement for each sequence, or one for all of them.
    pub each: Vec<Placement>,
}

impl Placements {
    /// Returns the placement of sequence `b`.
    pub fn of_sequence(&self, b: usize) -> Option<&Placement> {
        if self.each.len() == 1 { self.each.first() } else { self.each.get(b) }
    }

    /// Checks that a call has the shape that the placements are for: `n` sequences, with the queries and keys of
    /// `sizes`.
    pub fn check(&self, n: usize, sizes: &[[usize; 2]]) -> Result<()> {
        let Self { b, t_q, t_kv, .. } = *self;
        if b != n {
            bail!("[{OP}] the mask is `of_part` with {b} sequences, expected {n}")
        }
        if let Some([queries, keys]) = sizes.iter().find(|&&size| size != [t_q, t_kv]) {
            bail!(
                "[{OP}] the mask is `of_part` with {t_q} queries and {t_kv} keys, expected {queries} queries and {keys} \
                 keys"
            )
        }
        Ok(())
    }
}

impl Alignment {
    /// Sums of sizes and positions do not overflow in i128.
    pub fn position(&self, b: usize, placement: &Placement, i: usize) -> i128 {
        let first = match self {
            Self::End => placement.query,
            Self::Offset(n) => placement.first_query as i128 + *n as i128,
            Self::Offsets(offsets) => placement.first_query as i128 + i128::from(offsets.get(b).copied().unwrap_or(0)),
        };
        first + i as i128
    }
}

impl Constraint {
    /// That the meaning of a builder depends on the order in which masks were joined.
    pub fn ambiguous(builder: &str) -> Self {
        Self::Wrong(format!(
            "{builder} was called on masks that were joined and whose queries stand at different positions, expected \
             it on one of them before `and`"
        ))
    }

    /// That a window or a chunk is without keys.
    pub fn empty(name: &str) -> Self {
        Self::Wrong(format!("{name} is 0, expected at least 1 (the query's own key)"))
    }

    /// Returns the error of masks of different parts that were joined.
    pub fn different_parts() -> Self {
        Self::Wrong(
            "masks `of_part` of different parts were joined, expected masks of the same queries and keys".into(),
        )
    }

    /// The key positions that are left to query `i` of sequence `b`.
    pub fn keys(&self, b: usize, i: usize, placement: &Placement) -> Range<i128> {
        const ALL: Range<i128> = i128::MIN..i128::MAX;
        match self {
            Self::Aligned(alignment, reach) => {
                let position = alignment.position(b, placement, i);
                match reach {
                    Reach::Causal { prefix } => {
                        let prefix = prefix.iter().map(|lens| lens.get(b, i) as i128).min().unwrap_or(0);
                        ALL.start..(position + 1).max(prefix)
                    }
                    Reach::Band { left, right } => position - *left as i128..position + *right as i128 + 1,
                    Reach::Chunk(size) => {
                        let start = position.div_euclid(*size as i128) * *size as i128;
                        start..start + *size as i128
                    }
                }
            }
            Self::ValidLens(lens) => ALL.start..lens.get(b, i) as i128,
            Self::Starts(starts) => starts.get(b, i) as i128..ALL.end,
            Self::Prefix(_) | Self::Tokenized(_) | Self::Wrong(_) => ALL,
        }
    }

    /// Returns the constraint for some of the queries of each sequence: the entries of these queries, where it has
    /// entries for each query.
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
            Self::Prefix(prefix) => Self::Prefix(prefix.of_queries("prefix", queries)?),
            Self::Aligned(..) | Self::Tokenized(_) | Self::Wrong(_) => self.clone(),
        })
    }

    pub fn alignment(&self) -> Option<&Alignment> {
        if let Self::Aligned(alignment, _) = self { Some(alignment) } else { None }
    }

    /// What is wrong with it for `n` sequences, of which `sizes` are the queries and keys of each, or of all.
    pub fn check(&self, n: usize, sizes: &[[usize; 2]]) -> Result<()> {
        match self {
            Self::Aligned(Alignment::Offsets(offsets), _) => {
                check_entries(OP, "causal_with_offsets", offsets.len(), n, "sequences")
            }
            Self::Aligned(..) => Ok(()),
            Self::ValidLens(lens) => lens.check("valid_lens", n, sizes),
            Self::Starts(starts) => starts.check("starts", n, sizes),
            Self::Prefix(prefix) => prefix.check("prefix", n, sizes),
            Self::Tokenized(Tokenized { columns, .. }) => match sizes.iter().find(|[_, t_kv]| t_kv != columns) {
                Some([_, t_kv]) => {
                    bail!("[{OP}] the attention mask has {columns} columns, expected one for each of {t_kv} keys")
                }
                None => Ok(()),
            },
            Self::Wrong(problem) => bail!("[{OP}] {problem}"),
        }
    }
}

/// A count of keys for each sequence `(B,)` or for each query `(B, T_q)`.
///
/// Used for lengths, starts and prefixes of an [`AttentionMask`](crate::AttentionMask). A value may exceed T_kv, which
/// then hides nothing. Comes from a `Vec<usize>`, a `Vec<Vec<usize>>` or an integer tensor of either rank; the shape is
/// checked against the call in which it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidLens(Arc<Lens>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Lens {
    PerSequence(Vec<usize>),
    PerQuery(Vec<Vec<usize>>),
}

impl ValidLens {
    /// Reads an integer tensor `(B,)` or `(B, T_q)`.
    ///
    /// # Errors
    /// For another rank, for a float tensor, and for a negative entry.
    pub fn from_tensor(lens: &Tensor) -> Result<Self> {
        let entries = Expect::many("valid_lens", "lengths", lens);
        let entries = entries.shape_of(&[&[Dim::Any("B")], &["B", "T_q"].map(Dim::Any)])?.counts()?;
        Ok(match *lens.dims() {
            [b, t_q] => (0..b).map(|b| entries[b * t_q..][..t_q].to_vec()).collect::<Vec<_>>().into(),
            _ => entries.into(),
        })
    }

    /// Checks that there is an entry for each of `n` sequences, and one for each of its queries, of which `sizes` begin
    /// with the count for each sequence, or for all; `what` names the lengths in errors.
    fn check(&self, what: &str, n: usize, sizes: &[[usize; 2]]) -> Result<()> {
        let rows = match &*self.0 {
            Lens::PerSequence(lens) => return check_entries(OP, what, lens.len(), n, "sequences"),
            Lens::PerQuery(rows) => rows,
        };
        check_entries(OP, what, rows.len(), n, "sequences")?;
        let queries = |row: usize| sizes.get(row).or(sizes.first()).map_or(0, |[t_q, _]| *t_q);
        rows.iter().enumerate().try_for_each(|(row, lens)| {
            check_entries(OP, format_args!("row {row} of {what}"), lens.len(), queries(row), "queries")
        })
    }

    /// Returns the entry of sequence `b`, where there is one for all of its queries.
    pub(super) fn of_sequence(&self, b: usize) -> Option<usize> {
        match &*self.0 {
            Lens::PerSequence(lens) => lens.get(b).copied(),
            Lens::PerQuery(_) => None,
        }
    }

    /// Returns whether there is an entry for each sequence, and one of them is above 0.
    pub(super) fn is_above_zero(&self) -> bool {
        matches!(&*self.0, Lens::PerSequence(lens) if lens.iter().any(|&entry| entry > 0))
    }

    /// Returns the entries of some of the queries of each sequence; `what` names the lengths in errors.
    fn of_queries(&self, what: &str, queries: &Range<usize>) -> Result<Self> {
        let Lens::PerQuery(rows) = &*self.0 else { return Ok(self.clone()) };
        let mut own = Vec::with_capacity(rows.len());
        for (b, row) in rows.iter().enumerate() {
            let Some(entries) = row.get(queries.clone()) else {
                bail!(
                    "[{OP}] row {b} of {what} has {} entries, expected one for each query up to the part's {queries:?}",
                    row.len()
                )
            };
            own.push(entries.to_vec());
        }
        Ok(own.into())
    }

    /// The entry of query `i` of sequence `b`; zero where there is none.
    fn get(&self, b: usize, i: usize) -> usize {
        let entry = match &*self.0 {
            Lens::PerSequence(lens) => lens.get(b),
            Lens::PerQuery(rows) => rows.get(b).and_then(|row| row.get(i)),
        };
        entry.copied().unwrap_or(0)
    }
}

impl From<Vec<usize>> for ValidLens {
    fn from(lens: Vec<usize>) -> Self {
        Self(Arc::new(Lens::PerSequence(lens)))
    }
}

impl From<Vec<Vec<usize>>> for ValidLens {
    fn from(lens: Vec<Vec<usize>>) -> Self {
        Self(Arc::new(Lens::PerQuery(lens)))
    }
}

impl TryFrom<&Tensor> for ValidLens {
    type Error = candle_core::Error;

    fn try_from(lens: &Tensor) -> Result<Self> {
        Self::from_tensor(lens)
    }
}
