//! Lengths that come with the data: one a sequence, or one a query.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

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

    /// Checks that there is an entry for each of `n` sequences, and one for each of `t_q` queries of those in `sequences`;
    /// `what` names the lengths in errors.
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
