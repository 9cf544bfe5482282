//! Calls with pages that no kernel computes from pages: with trees, masks of new tokens and tensors of masks, and of
//! layers with modifiers that count from the positions of keys. Their sequences are a padded batch, over a copy of the
//! keys and values in a cache.

use candle_core::{Result, Tensor, bail};

use super::input::AttentionInput;
use crate::cache::AttentionCache;
use crate::mask::AttentionMask;
use crate::pages::{PagedKeys, PagedTokens};
use crate::sdpa::Plan;
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::rows_of;

/// The tokens of a step as a batch (n, T), each sequence padded on the right, with a cache of their sequences.
pub(super) struct PagedBatch<'a> {
    keys: PagedKeys<'a>,
    /// Whether the keys and values are an earlier layer's.
    is_of_earlier_layer: bool,
    /// (n, T, E).
    queries: Tensor,
    residual: Option<Tensor>,
    positions: Option<Tensor>,
    axis_positions: Option<Tensor>,
    /// The number of tokens of each sequence.
    lens: Vec<usize>,
    cache: AttentionCache,
}

impl<'a> PagedBatch<'a> {
    /// Returns the batch of a call whose queries (total, E) and residual were checked. `layer_mask` is that of the
    /// layer.
    pub fn new(op: &str, input: &AttentionInput<'a>, layer_mask: &AttentionMask) -> Result<Self> {
        let Some(keys) = input.pages.or(input.shared_pages) else { bail!("[{op}] the call has no pages") };
        input.check_pages_alone(op)?;
        if input.positions.is_some() && input.mask_with(layer_mask).has_chunks() {
            bail!(
                "[{op}] positions were given with pages and a mask that has chunks, expected no positions or a mask \
                 without chunks"
            )
        }
        let is_of_earlier_layer = input.pages.is_none();
        let lens = token_counts(keys.step);
        let longest = lens.iter().copied().max().unwrap_or(0);
        let pad = |tensor: &Tensor, dim: usize| padded(tensor, dim, &lens, longest);
        Ok(Self {
            queries: pad(input.queries, 0)?,
            residual: input.residual.map(|residual| pad(residual, 0)).transpose()?,
            positions: input.positions.map(|positions| pad(positions, 0)).transpose()?,
            axis_positions: input.axis_positions.map(|positions| pad(positions, 1)).transpose()?,
            cache: keys.copied(input.queries.dtype(), is_of_earlier_layer)?,
            keys,
            is_of_earlier_layer,
            lens,
        })
    }

    /// Runs a function with the call over the batch, stores the new tokens in the pages, and returns the output (total,
    /// ..) that it returns as (n, T, ..).
    pub fn run(
        mut self,
        op: &str,
        input: &AttentionInput<'a>,
        wanted: RequestedResults,
        run: impl FnOnce(AttentionInput) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if wanted != RequestedResults::default() {
            bail!(
                "[{op}] weights or statistics were requested of a call with pages that runs as a batch, expected the \
                 output alone"
            )
        }
        let mut cache = std::mem::take(&mut self.cache);
        let output = run(self.input(input, &mut cache))?;
        if !self.is_of_earlier_layer {
            self.keys.write_from(&cache)?;
        }
        self.without_padding(&output)
    }

    /// Returns the path of attention that `plan` returns for the call over the batch.
    pub fn plan(
        mut self,
        input: &AttentionInput<'a>,
        plan: impl FnOnce(AttentionInput) -> Result<Plan>,
    ) -> Result<Plan> {
        let mut cache = std::mem::take(&mut self.cache);
        let mut found = plan(self.input(input, &mut cache))?;
        found.reason.push_str(", over a copy of the pages");
        Ok(found)
    }

    /// Returns the input of the batch, with its cache.
    fn input<'b>(&'b self, input: &AttentionInput<'a>, cache: &'b mut AttentionCache) -> AttentionInput<'b> {
        let mut batch = input.for_batch(&self.queries);
        batch.residual = self.residual.as_ref();
        batch.positions = self.positions.as_ref();
        batch.axis_positions = self.axis_positions.as_ref();
        batch.valid_lens = Some(&self.lens);
        if self.is_of_earlier_layer { batch.with_shared_cache(&*cache) } else { batch.with_cache(cache) }
    }

    /// Returns the rows (total, ..) of the tokens in (n, T, ..).
    fn without_padding(&self, output: &Tensor) -> Result<Tensor> {
        let longest = output.dim(1)?;
        let mut rows = Vec::new();
        for (s, &len) in self.lens.iter().enumerate() {
            rows.extend((0..len).map(|i| (s * longest + i) as u32));
        }
        rows_of(&output.flatten(0, 1)?, 0, &rows)
    }
}

/// Returns the number of tokens of each sequence.
fn token_counts(step: &PagedTokens) -> Vec<usize> {
    (0..step.sequences().len()).map(|s| step.sequences().queries(s).len()).collect()
}

/// Returns a tensor with the dimension `total` of packed tokens as one with two, (n, T): sequences of `lens` tokens,
/// each padded on the right with a copy of another token.
fn padded(tensor: &Tensor, dim: usize, lens: &[usize], longest: usize) -> Result<Tensor> {
    let mut rows = Vec::with_capacity(lens.len() * longest);
    let mut first = 0;
    for &len in lens {
        rows.extend((0..longest).map(|i| if i < len { (first + i) as u32 } else { 0 }));
        first += len;
    }
    let dims = [&tensor.dims()[..dim], &[lens.len(), longest], &tensor.dims()[dim + 1..]].concat();
    rows_of(tensor, dim, &rows)?.reshape(dims)
}
