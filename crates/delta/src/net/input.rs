//! The inputs of one call of a gated delta net.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{DeltaCache, GatedDeltaNetConfig, OP};
use candle_attention_core::internal::runs_of_ones;
use candle_attention_core::internal::{NewTokens, Padding};
use candle_attention_core::{Backend, PackedSequences};
use candle_attention_modules::base::Dim::{Any, Is, Named};
use candle_attention_modules::base::{Expect, fits_in_memory};

/// The inputs of one call of a [`GatedDeltaNet`](crate::GatedDeltaNet). A `&Tensor` converts into one without options.
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

    /// Continues after the tokens of earlier calls, and updates the cache with those of this call.
    pub fn with_cache(self, cache: &'a mut DeltaCache) -> Self {
        Self { cache: Some(cache), ..self }
    }

    /// Padding on either side: 1 for tokens and 0 for padding, (B, T) in any dtype, for the tokens of this call only,
    /// without those in a cache. The ones of a row are contiguous, and there may be none; on the left there is no
    /// padding once the sequence has tokens in the cache. Padding affects neither the outputs of tokens nor the cache.
    /// Its own outputs have no meaning.
    pub fn with_attention_mask(self, mask: &'a Tensor) -> Self {
        Self { attention_mask: Some(mask), ..self }
    }

    /// Padding on the right: the number of tokens of each of the B sequences, at most T.
    pub fn with_valid_lens(self, valid_lens: &'a [usize]) -> Self {
        Self { valid_lens: Some(valid_lens), ..self }
    }

    /// Sequences of different lengths, one after the other in `xs` (total, E). Each begins with a state of zeros, and
    /// there is neither a cache nor padding.
    pub fn with_packed(self, sequences: &'a PackedSequences) -> Self {
        Self { packed: Some(sequences), ..self }
    }

    /// A tensor of the output's shape and dtype, which is added to it before it is rounded.
    pub fn with_residual(self, residual: &'a Tensor) -> Self {
        Self { residual: Some(residual), ..self }
    }

    /// Which implementation of the rule runs; [`Backend::Auto`] unless given.
    pub fn with_backend(self, backend: Backend) -> Self {
        Self { backend, ..self }
    }
}

impl DeltaInput<'_> {
    /// The inputs as (B, T, E) for a layer, with zeros in the place of padding, and which of them are tokens.
    ///
    /// # Errors
    /// For whatever does not fit the layer, or each other.
    pub(super) fn check(
        &self,
        cfg: &GatedDeltaNetConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, NewTokens)> {
        let (xs, width) = (self.xs, cfg.embed_dim());
        let expect = Expect::one(OP, "input", xs);
        match self.packed {
            Some(sequences) => expect.shape(&[Named("total", sequences.total_queries()), Is(width)])?,
            None => expect.shape_of(&[&[Any("B"), Any("T"), Is(width)], &[Any("T"), Is(width)]])?,
        };
        expect.dtype(dtype, "the weights'")?.beside("the weights", device)?;
        if let Some(residual) = self.residual {
            let residual = Expect::one(OP, "residual", residual).sizes(xs.dims())?;
            residual.dtype(dtype, "the input's")?.beside("the input", device)?;
        }
        let batch = if xs.rank() == 2 { xs.unsqueeze(0)? } else { xs.clone() };
        let (b, t, _) = batch.dims3()?;
        // What is projected, after what the convolutions have before it: of sequences without tokens too.
        if !fits_in_memory(&[b, t.saturating_add(cfg.conv_kernel()), cfg.rows()[5].end]) {
            bail!("[{OP}] input has shape {:?}, which does not fit in memory", xs.dims())
        }
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
        let is_padded = self.attention_mask.is_some() || self.valid_lens.is_some();
        if self.packed.is_some() && (self.cache.is_some() || is_padded) {
            bail!("[{OP}] packed sequences were given with a cache or with padding, expected neither")
        }
        Ok((tokens.without_padding(batch)?, tokens))
    }
}

impl<'a> From<&'a Tensor> for DeltaInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}
