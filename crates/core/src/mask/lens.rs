//! Counts of keys for each sequence or each query.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::OP;
use super::placement::SequenceSize;
use candle_attention_modules::base::{Dim, Expect, check_entries};

/// A number of keys for each sequence, (B,), or for each query, (B, T_q): the lengths, starts and prefixes of an
/// [`AttentionMask`](crate::AttentionMask).
///
/// A `ValidLens` comes from a `Vec<usize>`, from a `Vec<Vec<usize>>` or from an integer tensor of either rank. Its
/// shape is checked against the call that uses the mask. An entry may exceed T_kv.
///
/// ```
/// use candle_attention::{AttentionMask, ValidLens};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let lens = ValidLens::from_tensor(&Tensor::new(&[3u32, 1], &Device::Cpu)?)?;
/// assert_eq!(lens, ValidLens::from(vec![3, 1]));
/// let ranges = AttentionMask::none().with_valid_lens(lens).resolve(2, 1, 4)?;
/// assert_eq!(ranges.to_string(), "1 1 1 .\n\n1 . . .\n");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidLens(Arc<Lens>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Lens {
    PerSequence(Vec<usize>),
    PerQuery(Vec<Vec<usize>>),
}

impl ValidLens {
    /// Reads an integer tensor (B,) or (B, T_q).
    ///
    /// # Errors
    /// For another rank, for a float tensor, for a negative entry, and if the entries do not fit in memory.
    pub fn from_tensor(lens: &Tensor) -> Result<Self> {
        let entries = Expect::many("valid_lens", "lengths", lens);
        let entries = entries.shape_of(&[&[Dim::Any("B")], &["B", "T_q"].map(Dim::Any)])?.counts()?;
        Ok(match *lens.dims() {
            [b, t_q] => (0..b).map(|b| entries[b * t_q..][..t_q].to_vec()).collect::<Vec<_>>().into(),
            _ => entries.into(),
        })
    }

    /// Checks that there is an entry for each of `n` sequences, or for each of their queries. `sizes` has the queries
    /// and keys of each sequence, or of all; `what` names the lengths in errors.
    pub(super) fn check(&self, what: &str, n: usize, sizes: &[SequenceSize]) -> Result<()> {
        let rows = match &*self.0 {
            Lens::PerSequence(lens) => return check_entries(OP, what, lens.len(), n, "sequences"),
            Lens::PerQuery(rows) => rows,
        };
        check_entries(OP, what, rows.len(), n, "sequences")?;
        for (b, row) in rows.iter().enumerate() {
            let t_q = sizes.get(b).or(sizes.first()).map_or(0, |size| size.t_q);
            check_entries(OP, format_args!("row {b} of {what}"), row.len(), t_q, "queries")?;
        }
        Ok(())
    }

    /// Returns the entry of sequence `b`, if there is one for all of its queries.
    pub(super) fn of_sequence(&self, b: usize) -> Option<usize> {
        match &*self.0 {
            Lens::PerSequence(lens) => lens.get(b).copied(),
            Lens::PerQuery(_) => None,
        }
    }

    /// Returns the largest entry, if there is one.
    pub(super) fn largest(&self) -> Option<usize> {
        match &*self.0 {
            Lens::PerSequence(lens) => lens.iter().max().copied(),
            Lens::PerQuery(rows) => rows.iter().flatten().max().copied(),
        }
    }

    /// Returns whether there is an entry for each sequence, and one of them is above 0.
    pub(super) fn is_above_zero(&self) -> bool {
        matches!(&*self.0, Lens::PerSequence(lens) if lens.iter().any(|&entry| entry > 0))
    }

    /// Returns the entries of some of the sequences, in this order. All of them have entries.
    pub(super) fn of_sequences(&self, chosen: &[usize]) -> Self {
        match &*self.0 {
            Lens::PerSequence(lens) => chosen.iter().map(|&s| lens[s]).collect::<Vec<_>>().into(),
            Lens::PerQuery(rows) => chosen.iter().map(|&s| rows[s].clone()).collect::<Vec<_>>().into(),
        }
    }

    /// Returns the entries of some of the queries of each sequence; `what` names the lengths in errors.
    pub(super) fn of_queries(&self, what: &str, queries: &Range<usize>) -> Result<Self> {
        let Lens::PerQuery(rows) = &*self.0 else { return Ok(self.clone()) };
        let mut selected = Vec::with_capacity(rows.len());
        for (b, row) in rows.iter().enumerate() {
            let Some(entries) = row.get(queries.clone()) else {
                bail!(
                    "[{OP}] row {b} of {what} has {} entries, expected one for each query up to the part's {queries:?}",
                    row.len()
                )
            };
            selected.push(entries.to_vec());
        }
        Ok(selected.into())
    }

    /// Returns the entry of query `i` of sequence `b`; zero if there is none.
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
