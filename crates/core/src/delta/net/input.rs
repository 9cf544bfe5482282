//! What one call of a gated delta net reads.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{DeltaCache, OP};
use crate::base::Dim::{Any, Is, Named};
use crate::base::{Expect, fits_in_memory};
use crate::sdpa::{Backend, PackedSequences};

/// What one call of a [`GatedDeltaNet`](crate::GatedDeltaNet) reads besides the layer's parameters. A `&Tensor` is one
/// call over it.
#[derive(Debug)]
#[must_use]
pub struct DeltaInput<'a> {
    pub(super) xs: &'a Tensor,
    pub(super) cache: Option<&'a mut DeltaCache>,
    pub(super) attention_mask: Option<&'a Tensor>,
    pub(super) valid_lens: Option<&'a [usize]>,
    pub(super) packed: Option<&'a PackedSequences>,
    pub(super) residual: Option<&'a Tensor>,
    pub(super) backend: Backend,
}

impl<'a> DeltaInput<'a> {
    /// `xs` (B, T, E), or (T, E) for one sequence.
    pub fn new(xs: &'a Tensor) -> Self {
        let (attention_mask, valid_lens) = (None, None);
        Self { xs, cache: None, attention_mask, valid_lens, packed: None, residual: None, backend: Backend::Auto }
    }

    /// Goes on after the tokens of earlier calls, and keeps what the next call needs.
    pub fn with_cache(self, cache: &'a mut DeltaCache) -> Self {
        Self { cache: Some(cache), ..self }
    }

    /// 1 for tokens and 0 for padding, (B, T), as tokenizers give it, of this call's tokens alone: those of a sequence
    /// are one run, or none, which follows on its tokens in a cache. Padding changes nothing that a token or a cache
    /// gets, and means nothing in the output.
    pub fn with_attention_mask(self, mask: &'a Tensor) -> Self {
        Self { attention_mask: Some(mask), ..self }
    }

    /// Padding on the right: of each sequence, how many of the T positions are tokens.
    pub fn with_valid_lens(self, valid_lens: &'a [usize]) -> Self {
        Self { valid_lens: Some(valid_lens), ..self }
    }

    /// Sequences of different lengths, one after the other in `xs` (total, E): each begins with a state of zeros.
    pub fn with_packed(self, sequences: &'a PackedSequences) -> Self {
        Self { packed: Some(sequences), ..self }
    }

    /// What is added to the output, of its shape, before it is rounded.
    pub fn with_residual(self, residual: &'a Tensor) -> Self {
        Self { residual: Some(residual), ..self }
    }

    /// Which implementation of the rule runs; [`Backend::Auto`] unless given.
    pub fn with_backend(self, backend: Backend) -> Self {
        Self { backend, ..self }
    }
}

/// Which positions of a call are tokens.
pub(super) struct Padding {
    /// (B, T), u8.
    is_token: Tensor,
    /// Of each sequence, where its tokens are.
    pub tokens: Vec<Range<usize>>,
}

impl Padding {
    /// Something of tokens (B, T, ..), with zeros in the place of padding, which may hold anything.
    pub fn hide(&self, xs: &Tensor) -> Result<Tensor> {
        let ones = vec![1; xs.rank() - 2];
        let is_token = self.is_token.reshape([self.is_token.dims(), &ones].concat())?;
        is_token.broadcast_as(xs.shape())?.where_cond(xs, &xs.zeros_like()?)
    }
}

impl DeltaInput<'_> {
    /// The inputs as (B, T, E) for a layer of a width, and their padding, which they have as zeros, if there is any.
    ///
    /// # Errors
    /// For whatever does not fit the layer, or each other.
    pub(super) fn check(&self, width: usize, dtype: DType, device: &Device) -> Result<(Tensor, Option<Padding>)> {
        let xs = self.xs;
        let expect = Expect::one(OP, "input", xs);
        expect.shape_of(&[&[Any("B"), Any("T"), Is(width)], &[Any("T"), Is(width)]])?;
        expect.dtype(dtype, "the weights'")?.beside("the weights", device)?;
        if !fits_in_memory(xs.dims()) {
            bail!("[{OP}] input has shape {:?}, which does not fit in memory", xs.dims())
        }
        if let Some(residual) = self.residual {
            let shape: Vec<_> = xs.dims().iter().map(|&size| Is(size)).collect();
            let residual = Expect::one(OP, "residual", residual).shape(&shape)?;
            residual.dtype(dtype, "the input's")?.beside("the input", device)?;
        }
        let batch = if xs.rank() == 2 { xs.unsqueeze(0)? } else { xs.clone() };
        let (b, t, _) = batch.dims3()?;
        let rows = self.token_rows(b, t)?;
        if let Some(sequences) = self.packed {
            if xs.rank() != 2 || self.cache.is_some() || rows.is_some() {
                bail!(
                    "[{OP}] packed sequences were given with an input {:?}, expected (total, E), no cache and no padding",
                    xs.dims()
                )
            }
            let found = sequences.total_queries();
            if found != t {
                bail!("[{OP}] the packed sequences have {found} tokens, expected the {t} of the input")
            }
        }
        let Some(rows) = rows.filter(|rows| rows.iter().flatten().any(|&is_token| is_token != 1.0)) else {
            return Ok((batch, None));
        };
        let mut tokens = Vec::with_capacity(b);
        let before = self.cache.as_ref().map(|cache| cache.lens()).unwrap_or_default();
        for (sequence, row) in rows.iter().enumerate() {
            if let Some(other) = row.iter().find(|&&number| number != 0.0 && number != 1.0) {
                bail!("[{OP}] attention_mask has {other} in sequence {sequence}, expected ones and zeros")
            }
            let start = row.iter().position(|&is_token| is_token == 1.0).unwrap_or(0);
            let end = row.iter().rposition(|&is_token| is_token == 1.0).map_or(0, |last| last + 1);
            if row[start..end].contains(&0.0) {
                bail!("[{OP}] attention_mask has zeros between ones in sequence {sequence}, expected one run of ones")
            }
            if start > 0 && before.get(sequence).is_some_and(|&len| len > 0) {
                bail!("[{OP}] sequence {sequence} has padding between its tokens and those in the cache, expected none")
            }
            tokens.push(start..end);
        }
        let padding = Padding { is_token: Tensor::new(rows, device)?.to_dtype(DType::U8)?, tokens };
        Ok((padding.hide(&batch)?, Some(padding)))
    }

    /// Of each sequence, 1 for tokens and 0 for padding.
    fn token_rows(&self, b: usize, t: usize) -> Result<Option<Vec<Vec<f32>>>> {
        match (self.attention_mask, self.valid_lens) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => {
                bail!("[{OP}] both attention_mask and valid_lens were given, expected one of the two")
            }
            (Some(mask), None) => {
                Expect::one(OP, "attention_mask", mask).shape(&[Named("B", b), Named("T", t)])?;
                mask.to_dtype(DType::F32)?.to_vec2().map(Some)
            }
            (None, Some(lens)) if lens.len() != b => {
                bail!("[{OP}] valid_lens has {} entries, expected one for each of {b} sequences", lens.len())
            }
            (None, Some(lens)) => match lens.iter().find(|&&len| len > t) {
                Some(len) => bail!("[{OP}] valid_lens has {len}, expected at most the call's {t}"),
                None => Ok(Some(lens.iter().map(|&len| [vec![1.0; len], vec![0.0; t - len]].concat()).collect())),
            },
        }
    }
}

impl<'a> From<&'a Tensor> for DeltaInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}
