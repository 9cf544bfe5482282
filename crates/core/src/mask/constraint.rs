//! The constraints of a mask, and what each leaves a query: the one place that gives them their meaning.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

/// One thing that hides keys or changes scores. All of a mask's constraints hold together.
#[derive(Debug, Clone)]
pub(super) enum Constraint {
    /// No key after the query's own but those before all prefixes.
    Causal { alignment: Alignment, prefix: Vec<ValidLens> },
    /// `size` keys with the query's own, and all that come later.
    Window { alignment: Alignment, size: usize },
    /// From `left` keys before the query's own to `right` after it.
    Band { alignment: Alignment, left: usize, right: usize },
    /// The keys of the chunk of `size` positions that the query stands in.
    Chunk { alignment: Alignment, size: usize },
    /// Keys at and past the length are hidden.
    ValidLens(ValidLens),
    /// Keys before the start are hidden.
    Starts(ValidLens),
    /// Hides nothing; lifts the causal constraint of a layer that the mask is given to.
    Prefix(ValidLens),
    /// Hides nothing; T_kv of the attention mask that lengths were read from.
    Columns(usize),
    /// u8, 0 hides.
    Keep(Tensor),
    /// The largest entry of a `Keep`, which is more than 1: an error where the mask is resolved.
    KeepEntry(u8),
    /// Added to the scores.
    Bias(Tensor),
    /// A builder whose meaning depends on the order in which masks were joined: an error where the mask is resolved.
    Ambiguous { builder: &'static str },
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
    /// Which queries are tokens; the others see nothing.
    pub tokens: Range<usize>,
    /// The positions of the keys that are read: row 0 holds the first of them.
    pub keys: Range<usize>,
    /// The positions of the sequence in all.
    pub end: usize,
}

impl Placement {
    /// All queries and keys of a call by itself: the last query stands at the last key.
    pub fn whole(t_q: usize, t_kv: usize) -> Self {
        Self { query: t_kv as i128 - t_q as i128, tokens: 0..t_q, keys: 0..t_kv, end: t_kv }
    }
}

impl Alignment {
    /// Sums of sizes and positions do not overflow in i128.
    pub fn position(&self, b: usize, placement: &Placement, i: usize) -> i128 {
        let first = match self {
            Self::End => placement.query,
            Self::Offset(n) => *n as i128,
            Self::Offsets(offsets) => offsets.get(b).copied().unwrap_or(0).into(),
        };
        first + i as i128
    }
}

impl Constraint {
    /// The key positions that are left to query `i` of sequence `b`.
    pub fn keys(&self, b: usize, i: usize, placement: &Placement) -> Range<i128> {
        const ALL: Range<i128> = i128::MIN..i128::MAX;
        match self {
            Self::Causal { alignment, prefix } => {
                let prefix = prefix.iter().map(|lens| lens.get(b, i) as i128).min().unwrap_or(0);
                ALL.start..(alignment.position(b, placement, i) + 1).max(prefix)
            }
            Self::Window { alignment, size } => alignment.position(b, placement, i) + 1 - *size as i128..ALL.end,
            Self::Band { alignment, left, right } => {
                let position = alignment.position(b, placement, i);
                position - *left as i128..position + *right as i128 + 1
            }
            Self::Chunk { alignment, size } => {
                // A size of 0 is an error where the mask is resolved.
                let size = (*size).max(1) as i128;
                let start = alignment.position(b, placement, i).div_euclid(size) * size;
                start..start + size
            }
            Self::ValidLens(lens) => ALL.start..lens.get(b, i) as i128,
            Self::Starts(starts) => starts.get(b, i) as i128..ALL.end,
            Self::Prefix(_)
            | Self::Columns(_)
            | Self::Keep(_)
            | Self::KeepEntry(_)
            | Self::Bias(_)
            | Self::Ambiguous { .. } => ALL,
        }
    }

    /// Whether [`keys`](Self::keys) may leave out a key.
    pub fn bounds_keys(&self) -> bool {
        self.alignment().is_some() || matches!(self, Self::ValidLens(_) | Self::Starts(_))
    }

    pub fn alignment(&self) -> Option<&Alignment> {
        match self {
            Self::Causal { alignment, .. }
            | Self::Window { alignment, .. }
            | Self::Band { alignment, .. }
            | Self::Chunk { alignment, .. } => Some(alignment),
            _ => None,
        }
    }

    /// The same for the queries after the first `n`.
    pub fn skip_queries(&mut self, n: usize) {
        let (Self::Causal { alignment, .. }
        | Self::Window { alignment, .. }
        | Self::Band { alignment, .. }
        | Self::Chunk { alignment, .. }) = self
        else {
            return;
        };
        match alignment {
            Alignment::End => {}
            Alignment::Offset(offset) => *offset = offset.saturating_add(n),
            Alignment::Offsets(offsets) => {
                *offsets = offsets.iter().map(|offset| offset.saturating_add_unsigned(n as u64)).collect();
            }
        }
    }

    /// Whether it may leave sequences different keys.
    pub fn differs_by_sequence(&self) -> bool {
        !self.lens().1.is_empty() || matches!(self.alignment(), Some(Alignment::Offsets(_)))
    }

    /// The lengths that it reads, and their name in errors.
    pub fn lens(&self) -> (&'static str, &[ValidLens]) {
        match self {
            Self::ValidLens(lens) => ("valid_lens", std::slice::from_ref(lens)),
            Self::Starts(starts) => ("starts", std::slice::from_ref(starts)),
            Self::Prefix(prefix) => ("prefix", std::slice::from_ref(prefix)),
            Self::Causal { prefix, .. } => ("prefix", prefix),
            _ => ("", &[]),
        }
    }

    /// What is wrong with it for any lengths, for `n` sequences and `t_kv` keys.
    pub fn check(&self, n: usize, t_kv: usize) -> Result<()> {
        if let Some(Alignment::Offsets(offsets)) = self.alignment()
            && offsets.len() != n
        {
            bail!(
                "[attention_mask] causal_with_offsets has {} entries, expected one for each of {n} sequences",
                offsets.len()
            )
        }
        match self {
            Self::Window { size: 0, .. } => {
                bail!("[attention_mask] window is 0, expected at least 1 (the query's own key)")
            }
            Self::Chunk { size: 0, .. } => {
                bail!("[attention_mask] chunk is 0, expected at least 1 (the query's own key)")
            }
            Self::Columns(columns) if *columns != t_kv => {
                bail!("[attention_mask] the attention mask has {columns} columns, expected one for each of {t_kv} keys")
            }
            Self::KeepEntry(entry) => {
                bail!("[attention_mask] keep has an entry {entry}, expected ones (the key is seen) and zeros")
            }
            Self::Ambiguous { builder } => bail!(
                "[attention_mask] {builder} was called on masks that were joined and whose queries stand at different \
                 positions, expected it on one of them before `and`"
            ),
            _ => Ok(()),
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
        if lens.dtype().is_float() {
            bail!("[valid_lens] expected an integer tensor, found {:?}", lens.dtype());
        }
        let non_negative = |len: i64| match usize::try_from(len) {
            Ok(len) => Ok(len),
            Err(_) => bail!("[valid_lens] expected lengths of zero or more, found {len}"),
        };
        let wide = super::tensors::readable(lens)?.to_dtype(DType::I64)?;
        match lens.rank() {
            1 => {
                let row = wide.to_vec1::<i64>()?;
                Ok(row.into_iter().map(non_negative).collect::<Result<Vec<_>>>()?.into())
            }
            2 => {
                let rows = wide.to_vec2::<i64>()?.into_iter();
                let rows = rows.map(|row| row.into_iter().map(non_negative).collect::<Result<Vec<_>>>());
                Ok(rows.collect::<Result<Vec<_>>>()?.into())
            }
            _ => bail!("[valid_lens] expected shape (B,) or (B, T_q), found {:?}", lens.shape()),
        }
    }

    /// Checks that there is an entry for each of `n` sequences, and one for each of `t_q` queries of those in
    /// `sequences`; `what` names the lengths in errors.
    pub(super) fn check(&self, what: &str, n: usize, sequences: Range<usize>, t_q: usize) -> Result<()> {
        let (found, unit) = match &*self.0 {
            Lens::PerSequence(lens) => (lens.len(), "entries"),
            Lens::PerQuery(rows) => (rows.len(), "rows"),
        };
        if found != n {
            bail!("[attention_mask] {what} has {found} {unit}, expected one for each of {n} sequences")
        }
        if let Lens::PerQuery(rows) = &*self.0 {
            for (row, lens) in rows.iter().enumerate().take(sequences.end).skip(sequences.start) {
                if lens.len() != t_q {
                    bail!(
                        "[attention_mask] row {row} of {what} has {} entries, expected one for each of {t_q} queries",
                        lens.len()
                    )
                }
            }
        }
        Ok(())
    }

    /// The entry of query `i` of sequence `b`; zero where there is none.
    pub(super) fn get(&self, b: usize, i: usize) -> usize {
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
