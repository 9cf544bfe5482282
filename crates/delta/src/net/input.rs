//! The inputs of one call of a gated delta net, and their checks.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::cache::DeltaCache;
use super::config::{GatedDeltaNetConfig, OP};
use super::pool::DeltaPool;
use super::tree::{Trees, is_row};
use candle_attention_core::internal::{NewTokens, Padding, check_trees, rows_of_ones, tree_of};
use candle_attention_core::{Backend, PackedSequences, PagedTokens, TokenTree};
use candle_attention_modules::base::Dim::{Any, Is, Named};
use candle_attention_modules::base::{Expect, OptionalRef, fits_in_memory};

/// The inputs of one call of a [`GatedDeltaNet`](crate::GatedDeltaNet). A `&Tensor` converts into one without options.
#[derive(Debug)]
#[must_use]
pub struct DeltaInput<'a> {
    pub(super) xs: &'a Tensor,
    pub(super) cache: Option<&'a mut DeltaCache>,
    attention_mask: Option<&'a Tensor>,
    valid_lens: Option<&'a [usize]>,
    /// One tree for all sequences, or one for each.
    pub(super) trees: Option<&'a [TokenTree]>,
    pub(super) packed: Option<&'a PackedSequences>,
    pub(super) pages: Option<PooledTokens<'a>>,
    pub(super) residual: Option<&'a Tensor>,
    pub(super) backend: Backend,
}

/// A pool of states with the tokens of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct PooledTokens<'a> {
    pub pool: &'a DeltaPool,
    pub step: &'a PagedTokens,
}

impl PooledTokens<'_> {
    /// Checks that the trees of a step fit its sequences, and that the state after each of their nodes is stored.
    fn check_trees(&self, trees: Option<&[TokenTree]>) -> Result<()> {
        let Some(trees) = trees else { return Ok(()) };
        let sequences = self.step.sequences();
        let counts: Vec<_> = (0..sequences.len()).map(|s| sequences.queries(s).len()).collect();
        check_trees(OP, trees, counts.iter().copied())?;
        for (s, (states, &nodes)) in self.step.states().iter().zip(&counts).enumerate() {
            if !is_row(tree_of(trees, s)) && states.after.len() < nodes {
                bail!(
                    "[{OP}] a tree has {nodes} tokens, of which one path is kept, expected a table made \
                     `with_drafts({nodes})`"
                )
            }
        }
        Ok(())
    }
}

impl<'a> DeltaInput<'a> {
    /// Creates the inputs of a call over `xs` (B, T, E), or (T, E) for one sequence.
    pub fn new(xs: &'a Tensor) -> Self {
        Self {
            xs,
            cache: None,
            attention_mask: None,
            valid_lens: None,
            trees: None,
            packed: None,
            pages: None,
            residual: None,
            backend: Backend::default(),
        }
    }

    /// Continues after the tokens of earlier calls, and updates the cache with the tokens of this call.
    pub fn with_cache(mut self, cache: &'a mut DeltaCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Sets padding on either side: 1 for tokens and 0 for padding, (B, T) in any dtype, for the tokens of this call
    /// only, without the tokens in a cache. The ones of a row are contiguous, and a row may have none. A sequence with
    /// tokens in the cache has no padding on the left. Padding affects neither the outputs of tokens nor the cache. The
    /// outputs of padding have no meaning.
    pub fn with_attention_mask(mut self, attention_mask: impl OptionalRef<'a, Tensor>) -> Self {
        self.attention_mask = attention_mask.into_option();
        self
    }

    /// Sets padding on the right: the number of tokens of each of the B sequences, at most T.
    pub fn with_valid_lens(mut self, valid_lens: impl OptionalRef<'a, [usize]>) -> Self {
        self.valid_lens = valid_lens.into_option();
        self
    }

    /// Sets that the tokens of the call are the nodes of a tree, in every sequence: drafts, of which a model accepts
    /// one path. A node follows the tokens in the cache and its ancestors. A cache of a tree that has branches is made
    /// [`with_drafts`](DeltaCache::with_drafts) for its number of nodes; [`DeltaCache::keep`] then keeps the path.
    ///
    /// The projections of a node are computed once, and the rule once for each path that it is on.
    #[doc(alias("tree_attention"))]
    pub fn with_tree(mut self, tree: impl OptionalRef<'a, TokenTree>) -> Self {
        self.trees = tree.into_option().map(std::slice::from_ref);
        self
    }

    /// Sets a [tree](Self::with_tree) for each sequence. Trees of different sizes need padding
    /// ([`with_valid_lens`](Self::with_valid_lens)): the nodes are the tokens of a sequence.
    pub fn with_trees(mut self, trees: impl OptionalRef<'a, [TokenTree]>) -> Self {
        self.trees = trees.into_option();
        self
    }

    /// Sets sequences of different lengths, one after the other in `xs` (total, E). Each begins with a state of zeros.
    /// They have neither a cache nor padding.
    pub fn with_packed(mut self, packed: impl OptionalRef<'a, PackedSequences>) -> Self {
        self.packed = packed.into_option();
        self
    }

    /// Reads `xs` (total, E) as the new tokens of a step of a [`PageTable`](candle_attention_core::PageTable), one
    /// sequence after the other: each continues after its state in the layer's pool, and the states after the new
    /// tokens are stored there. Some sequences may bring a chunk of a prompt, others one token. Each has the numbers
    /// that it has alone with a cache.
    ///
    /// There is neither a cache nor padding. [`PageTable::truncate`] takes tokens back, in a table made
    /// [`with_drafts`](candle_attention_core::PageTable::with_drafts), and [`PageTable::keep`] all nodes of a tree but
    /// one path.
    ///
    /// [`PageTable::truncate`]: candle_attention_core::PageTable::truncate
    /// [`PageTable::keep`]: candle_attention_core::PageTable::keep
    pub fn with_pages(mut self, pool: &'a DeltaPool, step: &'a PagedTokens) -> Self {
        self.pages = Some(PooledTokens { pool, step });
        self
    }

    /// Sets a tensor of the output's shape and dtype, which is added to the output before it is rounded.
    pub fn with_residual(mut self, residual: impl OptionalRef<'a, Tensor>) -> Self {
        self.residual = residual.into_option();
        self
    }

    /// Sets the implementation of the rule that runs. It is [`Backend::Auto`] by default.
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }
}

impl<'a> From<&'a Tensor> for DeltaInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}

/// The checked inputs of a call.
pub(super) struct CheckedInput<'a> {
    /// (B, T, E), with zeros for padding.
    pub xs: Tensor,
    /// Which of the inputs are tokens.
    pub tokens: NewTokens,
    /// The trees of the tokens, if one has a branch.
    pub trees: Option<Trees<'a>>,
}

impl<'a> DeltaInput<'a> {
    /// Checks that the inputs fit a layer with weights of a dtype on a device, and each other.
    pub(super) fn check(&self, cfg: &GatedDeltaNetConfig, dtype: DType, device: &Device) -> Result<CheckedInput<'a>> {
        let xs = self.xs;
        let expect = Expect::one(OP, "input", xs).embeddings()?;
        let total = match (self.packed, self.pages) {
            (Some(sequences), _) => Some(sequences.total_queries()),
            (None, Some(pages)) => Some(pages.step.total_tokens()),
            (None, None) => None,
        };
        match total {
            Some(total) => expect.shape(&[Named("total", total), Is(cfg.embed_dim())])?,
            None => expect.shape_of(&[&[Any("B"), Any("T"), Is(cfg.embed_dim())], &[Any("T"), Is(cfg.embed_dim())]])?,
        };
        expect.dtype(dtype, "the weights'")?.same_device("the weights", device)?;
        if let Some(residual) = self.residual {
            let residual = Expect::one(OP, "residual", residual).sizes(xs.dims())?;
            residual.dtype(dtype, "the input's")?.same_device("the input", device)?;
        }
        let batch = if xs.rank() == 2 { xs.unsqueeze(0)? } else { xs.clone() };
        let (b, t, _) = batch.dims3()?;
        // The projections, and before them the K - 1 inputs of the convolutions, also of sequences without tokens.
        let width = cfg.projection_rows().all().iter().map(|rows| rows.count).sum();
        if !fits_in_memory(&[b, t.saturating_add(cfg.conv_kernel_dim()), width]) {
            bail!("[{OP}] input has shape {:?}, which does not fit in memory", xs.dims())
        }
        let tokens = self.check_padding(b, t)?;
        if let Some(n) = (0..b).find(|&n| tokens.before[n] > 0 && tokens.tokens[n].start > 0) {
            bail!("[{OP}] sequence {n} has padding between its tokens and those in the cache, expected none")
        }
        let has_padding = self.attention_mask.is_some() || self.valid_lens.is_some();
        if self.packed.is_some() && (self.cache.is_some() || has_padding) {
            bail!("[{OP}] packed sequences were given with a cache or with padding, expected neither")
        }
        let has_others = self.cache.is_some() || has_padding || self.packed.is_some();
        if self.pages.is_some() && has_others {
            bail!("[{OP}] pages were given with a cache, padding or packed sequences, expected none of them")
        }
        let trees = match self.pages {
            Some(pages) => {
                pages.check_trees(self.trees)?;
                None
            }
            None => self.check_trees(&tokens)?,
        };
        Ok(CheckedInput { xs: tokens.without_padding(batch)?, tokens, trees })
    }

    /// Returns the trees of the call, if one has a branch.
    fn check_trees(&self, tokens: &NewTokens) -> Result<Option<Trees<'a>>> {
        let Some(all) = self.trees else { return Ok(None) };
        if self.packed.is_some() {
            bail!("[{OP}] packed sequences were given with a tree, expected a batch")
        }
        let trees = Trees::new(all, tokens)?;
        if trees.are_rows() {
            return Ok(None);
        }
        if let Some(cache) = &self.cache {
            let most = tokens.tokens.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
            if most > cache.drafts() {
                bail!(
                    "[{OP}] a tree has {most} tokens, of which one path is kept, expected a cache made \
                     `with_drafts({most})`, found `with_drafts({})`",
                    cache.drafts()
                )
            }
        }
        Ok(Some(trees))
    }

    /// Returns which of the inputs (B, T) are tokens.
    fn check_padding(&self, b: usize, t: usize) -> Result<NewTokens> {
        let before = self.cache.as_ref().map(|cache| cache.lens()).unwrap_or_default();
        let Some(mask) = self.attention_mask else {
            return NewTokens::new(OP, before, (b, t), Padding { starts: None, valid_lens: self.valid_lens }, |_| {
                String::new()
            });
        };
        if self.valid_lens.is_some() {
            bail!("[{OP}] both attention_mask and valid_lens were given, expected one of the two")
        }
        Expect::one(OP, "attention_mask", mask).shape(&[Named("B", b), Named("T", t)])?;
        let mut starts = Vec::with_capacity(b);
        let mut ends = Vec::with_capacity(b);
        for (sequence, row) in rows_of_ones(OP, mask)?.iter().enumerate() {
            if row.has_gaps {
                bail!("[{OP}] attention_mask has zeros between ones in sequence {sequence}, expected one run of ones")
            }
            starts.push(row.start);
            ends.push(row.end);
        }
        NewTokens::new(OP, before, (b, t), Padding { starts: Some(&starts), valid_lens: Some(&ends) }, |_| {
            String::new()
        })
    }
}
