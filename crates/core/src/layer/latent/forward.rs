//! The computation of one call of a layer.

use candle_core::{Module, Result, Tensor, bail};

use super::{LatentPages, LayerIndexer, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OP};
use crate::cache::{KeyChoice, KvFloats, NewTokens};
use crate::layer::forward::{AttendedKeys, PreparedCall};
use crate::layer::indexer::{IndexQueries, IndexedTokens, IndexerConfig};
use crate::layer::input::{AttentionInput, KeysFrom};
use crate::layer::paged_batch::PagedBatch;
use crate::layer::validate::ExpectedInput;
use crate::layer::warnings;
use crate::layer::whole_mask::MaskedCall;
use crate::mask::AttentionMask;
use crate::position::Rotation;
use crate::sdpa::{Attended, FunctionKeys, OwnKeys};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{is_addressable, part, reshape_linked, transpose_linked};

impl MultiHeadLatentAttentionConfig {
    /// Returns whether `t_q` queries need fewer multiplications to attend to `t_kv` latents than to each head's own
    /// keys and values.
    ///
    /// With W_k and W_v for the maps from a latent c to keys and values, a score is `q · (W_k c) = (W_kᵀ q) · c`, and
    /// an output `Σ w (W_v c) = W_v (Σ w c)`: either queries absorb W_k and outputs W_v, or keys and values are
    /// computed from the latents.
    ///
    /// With an indexer, queries that absorb W_k read the latents of their chosen keys alone, which all heads share.
    /// Keys of each head would be read once for each query of the head, which takes longer than computing with all keys
    /// under a mask; half of the scores of the call's own tokens are masked then.
    pub(super) fn absorbs(&self, t_q: usize, t_kv: usize) -> bool {
        let rank = self.kv_lora_rank as f64;
        let nope = self.nope_head_dim as f64;
        let rope = self.rope_head_dim as f64;
        let value = self.value_head_dim as f64;
        let mut pairs = t_q as f64 * t_kv as f64;
        let mut absorbed_pairs = pairs;
        if let Some(IndexerConfig { top_k, .. }) = self.indexer()
            && top_k < t_kv
        {
            absorbed_pairs = t_q as f64 * top_k as f64;
            pairs -= (t_q as f64 - 1.0) * t_q as f64 / 2.0;
        }
        // Multiplications for one head.
        let between = rank * (nope + value);
        let expanded = t_kv as f64 * between + pairs * (nope + rope + value);
        let absorbed = t_q as f64 * between + absorbed_pairs * (rank + rope + rank);
        absorbed < expanded
    }
}

impl MultiHeadLatentAttention {
    /// Computes a call, and returns the requested results.
    pub(super) fn run<'a>(&'a self, input: AttentionInput<'a>, wanted: RequestedResults) -> Result<Attended> {
        if input.pages.is_some() && input.has_pages_of_batch() {
            let batch = self.paged_batch(&input)?;
            return Ok(batch.run(OP, &input, wanted, |own| self.forward_with(own))?.into());
        }
        self.prepare(&input, None)?.finish(input.cache, wanted)
    }

    /// Returns the batch of a call with pages, after checking what the batch has in another form.
    fn paged_batch<'a>(&self, input: &AttentionInput<'a>) -> Result<PagedBatch<'a>> {
        let cfg = &self.config;
        input.keys_from(OP)?;
        let batched = input.queries.rank() == 3;
        let expected = ExpectedInput { op: OP, batched, dtype: self.dtype, device: self.down.device() };
        let queries = expected.queries(input.queries, cfg.embed_dim())?;
        expected.residual(input, cfg.embed_dim())?;
        input.check_pages(OP, &queries)?;
        if let Some(pages) = input.pages {
            pages.check_latents(cfg.row_width(), cfg.kv_lora_rank())?;
        }
        PagedBatch::new(OP, input, &self.mask)
    }

    /// Validates and projects an input: everything that comes before attention. With a cache, `absorbs` says whether
    /// queries absorb the matrix of keys; the default is the form with fewer multiplications. If they absorb it, the
    /// attention output is of latents (B, H, T, rank), and otherwise of values (B, H, T, D_v). With pages, `absorbs` is
    /// for all sequences whose pages were not released, and the attention output is of values.
    pub(super) fn prepare<'a>(&'a self, input: &AttentionInput<'a>, absorbs: Option<bool>) -> Result<PreparedCall<'a>> {
        let cfg = &self.config;
        let CheckedLatentInput { xs, tokens, mut mask, rotation, index_rotation, residual } = self.validate(input)?;
        let t = xs.dim(1)?;
        let is_cached = input.any_cache().is_some();
        let absorbs_in_pages = absorbs;
        let absorbs = is_cached && absorbs.unwrap_or_else(|| cfg.absorbs(t, tokens.longest()));
        let compressed = match &self.compression {
            Some(compression) => compression.forward(&xs)?,
            None => xs.clone(),
        };
        let mut rows = self.latent_rows(&xs, rotation.as_ref())?;
        // The indexer's keys follow the latent and the shared key of a token.
        let index_columns = rows.dim(3)?..rows.dim(3)? + self.indexer.as_ref().map_or(0, |own| own.module.key_width());
        let mut index_queries = None;
        if let Some(LayerIndexer { module, .. }) = &self.indexer {
            let indexed = IndexedTokens { xs: &xs, compressed: &compressed, rotation: index_rotation.as_ref() };
            rows = Tensor::cat(&[&rows, &module.keys(&indexed)?.unsqueeze(1)?], 3)?;
            index_queries = Some(module.queries(&indexed)?);
        }
        let q = self.project_queries(&compressed, rotation.as_ref(), absorbs)?;
        let mut cache_after = None;
        let keys = if let Some(pages) = input.pages {
            pages.write_latents(&rows, cfg.kv_lora_rank())?;
            AttendedKeys::Latents(LatentPages { layer: self, pages, absorbs: absorbs_in_pages, index_queries })
        } else if let Some(cache) = &input.cache {
            let mut staged = cache.stage(&tokens, &rows, None, cfg.kv_lora_rank())?;
            if !absorbs {
                staged.call.expansion = Some(Box::new(|latents| self.expand(latents)));
            } else if self.indexer.is_some() {
                staged.call.expansion = Some(Box::new(|latents| self.without_index_keys(latents)));
            }
            if let Some(queries) = index_queries {
                let columns = index_columns;
                let choose = Box::new(move |keys: &Tensor, own| self.with_chosen_keys(own, &queries, keys));
                staged.call.choice = Some(KeyChoice { columns, choose });
            }
            cache_after = Some(staged.cache);
            AttendedKeys::Cached(staged.call)
        } else {
            if let Some(queries) = &index_queries {
                mask = self.with_chosen_keys(mask, queries, &part(&rows, 3, index_columns)?)?;
            }
            let KvFloats { k, v } = self.expand(&rows)?;
            match input.function {
                Some(function) => AttendedKeys::Function(FunctionKeys { k, v, function }),
                None => AttendedKeys::Own(OwnKeys { k, v, sequences: input.packed }),
            }
        };
        Ok(PreparedCall {
            q,
            keys,
            cache: cache_after,
            mask,
            options: input.options(cfg.dropout()).with_scale(cfg.scale()),
            batched: input.queries.rank() == 3,
            output: Box::new(move |output| self.project_output(output, absorbs, residual.as_ref())),
        })
    }

    /// Returns a mask with the keys that the indexer chooses for each query by its keys (B, 1, T_kv, width).
    pub(super) fn with_chosen_keys(
        &self,
        mask: AttentionMask,
        queries: &IndexQueries,
        keys: &Tensor,
    ) -> Result<AttentionMask> {
        let Some(LayerIndexer { module, .. }) = &self.indexer else { return Ok(mask) };
        Ok(match module.choose(queries, &keys.detach().squeeze(1)?, &mask)? {
            Some(lists) => mask.with_key_lists(&lists),
            None => mask,
        })
    }

    /// Returns views of stored rows (B, 1, T, width), without the keys of an indexer, as keys and values for queries
    /// that were multiplied by the projection of the keys.
    pub(super) fn without_index_keys(&self, rows: &Tensor) -> Result<KvFloats> {
        let rank = self.config.kv_lora_rank();
        let k = part(rows, 3, 0..rank + self.config.rope_head_dim())?;
        Ok(KvFloats { v: part(&k, 3, 0..rank)?, k })
    }

    /// Returns the keys of the indexer in stored rows (B, 1, T, width): a view.
    pub(super) fn index_keys_of(&self, rows: &Tensor) -> Result<Tensor> {
        part(rows, 3, self.config.kv_lora_rank() + self.config.rope_head_dim()..rows.dim(3)?)
    }

    /// Checks the inputs of a call.
    fn validate(&self, input: &AttentionInput) -> Result<CheckedLatentInput> {
        let cfg = &self.config;
        let batched = input.queries.rank() == 3;
        let expected = ExpectedInput { op: OP, batched, dtype: self.dtype, device: self.down.device() };
        let keys_from = input.keys_from(OP)?;
        let xs = expected.queries(input.queries, cfg.embed_dim())?;
        let residual = expected.residual(input, cfg.embed_dim())?;
        match keys_from {
            KeysFrom::Own | KeysFrom::Cache(_) | KeysFrom::Pages => {}
            KeysFrom::Cross { .. } | KeysFrom::Memory(_) => {
                bail!("[{OP}] keys and values were given, expected self-attention")
            }
            KeysFrom::EarlierPages => {
                bail!("[{OP}] the pages of an earlier layer were given, but the layer has latents of its own")
            }
            KeysFrom::EarlierLayer(_) => {
                bail!("[{OP}] the cache of an earlier layer was given, but the layer has latents of its own")
            }
        }
        if input.adapters.is_some_and(|names| names.iter().any(Option::is_some)) {
            bail!("[{OP}] adapters by name were given, which latent attention does not have, expected none")
        }
        if input.sink_window().is_some() {
            bail!(
                "[{OP}] the cache keeps sink tokens, which latent attention does not support; expected a cache without"
            )
        }
        if self.indexer.is_some() && input.packed.is_some() {
            bail!("[{OP}] packed sequences were given to a layer with an indexer, expected a batch")
        }
        let (b, t, _) = xs.dims3()?;
        input.check_packed(OP, &xs, t)?;
        input.check_pages(OP, &xs)?;
        warnings::about_lengths(OP, input, t);
        let tokens = input.tokens(OP, b, t, &self.mask)?;
        let mut positions = input.call_positions(OP, &tokens, t, None, cfg.rotates())?;
        let counts_positions = cfg.rope().scaling().depends_on_length();
        let call = MaskedCall { op: OP, tokens: &tokens, b, t_kv: t, device: xs.device(), counts_positions };
        let mask = input.mask_and_positions(&self.mask, &mut positions, call)?;
        let width = cfg.num_heads() * (2 * cfg.head_dim() + cfg.value_head_dim() + cfg.kv_lora_rank());
        if !is_addressable(&[b, t, width]) {
            bail!("[{OP}] queries {:?} are too large to address", input.queries.dims())
        }
        if input.train
            && cfg.dropout() > 0.0
            && let Some(cache) = input.any_cache()
        {
            warnings::about_dropout(OP, cache);
        }
        let mut rotation = None;
        let mut index_rotation = None;
        if let Some(positions) = positions {
            let length = positions.length_of_sequences();
            rotation = Some(self.rotary.at_length(&positions.queries, length)?);
            if let Some(LayerIndexer { rotary, .. }) = &self.indexer {
                index_rotation = Some(rotary.at_length(&positions.queries, length)?);
            }
        }
        Ok(CheckedLatentInput { xs, tokens, mask, rotation, index_rotation, residual })
    }

    /// Returns the normalised latent and the rotated shared key of each token, (B, 1, T, rank + rope): the rows that a
    /// cache stores.
    fn latent_rows(&self, xs: &Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
        let rank = self.config.kv_lora_rank();
        let rope = self.config.rope_head_dim();
        let compressed = self.down.forward(xs)?;
        let latents = self.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        let shared_keys = rotated(part(&compressed, 2, rank..rank + rope)?.unsqueeze(2)?, rotation)?.squeeze(2)?;
        Tensor::cat(&[&latents, &shared_keys], 2)?.unsqueeze(1)
    }

    /// Returns the queries (B, H, T, nope + rope) of compressed queries, or of inputs if these are not compressed; (B,
    /// H, T, rank + rope) if they absorb the matrix of keys.
    fn project_queries(&self, compressed: &Tensor, rotation: Option<&Rotation>, absorbs: bool) -> Result<Tensor> {
        let cfg = &self.config;
        let (b, t, _) = compressed.dims3()?;
        let q = self.queries.forward(compressed)?.reshape((b, t, cfg.num_heads(), cfg.head_dim()))?;
        let nope = part(&q, 3, 0..cfg.nope_head_dim())?;
        let nope = if absorbs { self.absorb(&nope)? } else { nope.contiguous()? };
        let rope = rotated(part(&q, 3, cfg.nope_head_dim()..cfg.head_dim())?, rotation)?;
        Tensor::cat(&[nope, rope], 3)?.transpose(1, 2)
    }

    /// Returns queries (B, T, H, nope + rope) as (B, T, H, rank + rope), which absorb the matrix of keys.
    pub(super) fn absorbing_queries(&self, queries: &Tensor) -> Result<Tensor> {
        let cfg = &self.config;
        let nope = self.absorb(&part(queries, 3, 0..cfg.nope_head_dim())?)?;
        Tensor::cat(&[nope, part(queries, 3, cfg.nope_head_dim()..cfg.head_dim())?.contiguous()?], 3)
    }

    /// Projects the attention output of a call to the layer's output (B, T, E).
    fn project_output(&self, output: &Tensor, absorbs: bool, residual: Option<&Tensor>) -> Result<Tensor> {
        let heads = transpose_linked(output, 1, 2)?;
        let values = if absorbs { self.values_of(&heads)? } else { heads };
        let (b, t, h, d_v) = values.dims4()?;
        self.out.product(&reshape_linked(&values, (b, t, h * d_v))?, 0..self.out.out_dim(), residual)
    }
}

/// The checked inputs of a call.
struct CheckedLatentInput {
    /// (B, T, E).
    xs: Tensor,
    tokens: NewTokens,
    /// The mask of the layer and of the call together.
    mask: AttentionMask,
    /// The rotation at the tokens' positions, if the layer rotates.
    rotation: Option<Rotation>,
    /// The rotation of the indexer, likewise.
    index_rotation: Option<Rotation>,
    /// (B, T, E).
    residual: Option<Tensor>,
}

/// Returns heads (B, T, heads, rope) after their rotation, if the layer rotates, as a contiguous tensor.
fn rotated(xs: Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
    match rotation {
        Some(rotation) => rotation.apply(&xs),
        None => xs.contiguous(),
    }
}
