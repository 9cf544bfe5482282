//! The inputs of one call of attention to compressed keys, and their checks.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::cache::CompressedKeyCache;
use super::{CompressedKeyAttentionConfig, OP};
use crate::cache::{NewTokens, Padding};
use crate::layer::validate::ExpectedInput;
use crate::sdpa::Backend;
use candle_attention_modules::base::{OptionalRef, is_addressable};

/// The inputs of one call of a [`CompressedKeyAttention`](crate::CompressedKeyAttention). A `&Tensor` converts into one
/// without options.
#[derive(Debug)]
#[must_use]
pub struct CompressedKeyInput<'a> {
    pub(super) xs: &'a Tensor,
    pub(super) cache: Option<&'a mut CompressedKeyCache>,
    starts: Option<&'a [usize]>,
    valid_lens: Option<&'a [usize]>,
    pub(super) train: bool,
    pub(super) backend: Backend,
}

/// The checked inputs of a call.
pub(super) struct CheckedCompressedInput {
    /// (B, T, E), with zeros for padding.
    pub xs: Tensor,
    pub tokens: NewTokens,
}

impl<'a> CompressedKeyInput<'a> {
    /// Creates the inputs of a call over `xs` (B, T, E), or (T, E) for one sequence.
    pub fn new(xs: &'a Tensor) -> Self {
        Self { xs, cache: None, starts: None, valid_lens: None, train: false, backend: Backend::default() }
    }

    /// Continues after the tokens of earlier calls, and updates the cache with the tokens of this call.
    pub fn with_cache(mut self, cache: &'a mut CompressedKeyCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Sets padding on the left: the index of the first token of each of the B sequences. Padding affects neither the
    /// outputs of tokens nor the cache. Its outputs have no meaning.
    pub fn with_starts(mut self, starts: impl OptionalRef<'a, [usize]>) -> Self {
        self.starts = starts.into_option();
        self
    }

    /// Sets padding on the right: the end of the tokens of each of the B sequences, at most T.
    pub fn with_valid_lens(mut self, valid_lens: impl OptionalRef<'a, [usize]>) -> Self {
        self.valid_lens = valid_lens.into_option();
        self
    }

    /// Sets whether the call is part of training, in which attention weights are dropped.
    pub fn with_train(mut self, train: bool) -> Self {
        self.train = train;
        self
    }

    /// Sets the implementation of attention that runs. It is [`Backend::Auto`] by default.
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Checks that the inputs fit a layer with weights of a dtype on a device, and each other.
    pub(super) fn check(
        &self,
        cfg: &CompressedKeyAttentionConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<CheckedCompressedInput> {
        let expected = ExpectedInput { op: OP, batched: self.xs.rank() == 3, dtype, device };
        let xs = expected.queries(self.xs, cfg.embed_dim)?;
        let (b, t, _) = xs.dims3()?;
        let widest = cfg.num_heads.saturating_mul(cfg.head_dim).saturating_mul(2);
        if !is_addressable(&[b, t, widest]) {
            bail!("[{OP}] queries {:?} are too large to address", self.xs.dims())
        }
        let before = self.cache.as_ref().map(|cache| cache.lens()).unwrap_or_default();
        let padding = Padding { starts: self.starts, valid_lens: self.valid_lens };
        let tokens = NewTokens::new(OP, before, (b, t), padding, |_| String::new())?;
        Ok(CheckedCompressedInput { xs: tokens.without_padding(xs)?, tokens })
    }
}

impl<'a> From<&'a Tensor> for CompressedKeyInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}
