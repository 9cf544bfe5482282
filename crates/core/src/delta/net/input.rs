//! What one call of a gated delta net reads.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{DeltaCache, OP};
use crate::base::Dim::{Any, Is, Named};
use crate::base::{Expect, fits_in_memory};
use crate::cache::{NewTokens, Padding};
use crate::mask::runs_of_ones;
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

impl DeltaInput<'_> {
    /// The inputs as (B, T, E) for a layer of a width, with zeros in the place of padding, and which are tokens.
    ///
    /// # Errors
    /// For whatever does not fit the layer, or each other.
    pub(super) fn check(&self, width: usize, dtype: DType, device: &Device) -> Result<(Tensor, NewTokens)> {
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
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        let padding = match (self.attention_mask, self.valid_lens) {
            (Some(_), Some(_)) => {
                bail!("[{OP}] both attention_mask and valid_lens were given, expected one of the two")
            }
            (Some(mask), None) => {
                Expect::one(OP, "attention_mask", mask).shape(&[Named("B", b), Named("T", t)])?;
                for (sequence, run) in runs_of_ones(OP, mask)?.into_iter().enumerate() {
                    let Some((start, end)) = run else {
                        bail!(
                            "[{OP}] attention_mask has zeros between ones in sequence {sequence}, expected one run of ones"
                        )
                    };
                    starts.push(start);
                    ends.push(end);
                }
                Padding { valid_lens: Some(&ends), starts: Some(&starts) }
            }
            (None, valid_lens) => Padding { valid_lens, starts: None },
        };
        let before = self.cache.as_ref().map(|cache| cache.lens()).unwrap_or_default();
        let tokens = NewTokens::new(OP, before, (b, t), padding)?;
        if let Some(n) = (0..b).find(|&n| tokens.before[n] > 0 && tokens.tokens[n].start > 0) {
            bail!("[{OP}] sequence {n} has padding between its tokens and those in the cache, expected none")
        }
        if let Some(sequences) = self.packed {
            let is_padded = self.attention_mask.is_some() || self.valid_lens.is_some();
            if xs.rank() != 2 || self.cache.is_some() || is_padded {
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
        Ok((tokens.without_padding(batch)?, tokens))
    }
}

impl<'a> From<&'a Tensor> for DeltaInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}
