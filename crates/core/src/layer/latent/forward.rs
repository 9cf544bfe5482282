//! The computation of one call of a layer.

use std::ops::Range;

use candle_core::{Module, Result, Tensor, bail};

use super::additions::gated;
use super::{
    LatentPages, LayerIndexer, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OP, QueryCompression,
};
use crate::cache::{KeyChoice, KvFloats, NewTokens};
use crate::layer::forward::{AttendedKeys, PreparedCall};
use crate::layer::indexer::{ChoiceRecord, IndexQueries, IndexedTokens, OutputWithChoice};
use crate::layer::input::{AttentionInput, KeysFrom};
use crate::layer::paged_batch::PagedBatch;
use crate::layer::temperature;
use crate::layer::validate::ExpectedInput;
use crate::layer::warnings;
use crate::layer::whole_mask::MaskedCall;
use crate::mask::{AttentionMask, KeyLists};
use crate::position::Rotation;
use crate::sdpa::{Attended, AttentionStatistics, FunctionKeys, OwnKeys, StatisticsOptions};
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
    /// With at most `most_keys` chosen keys, queries that absorb W_k read the latents of their chosen keys alone, which
    /// all heads share. Keys of each head would be read once for each query of the head, which takes longer than
    /// computing with all keys under a mask; half of the scores of the call's own tokens are masked then.
    pub(super) fn absorbs(&self, t_q: usize, t_kv: usize, most_keys: Option<usize>) -> bool {
        let rank = self.kv_lora_rank as f64;
        let nope = self.nope_head_dim as f64;
        let rope = self.rope_head_dim as f64;
        let value = self.value_head_dim as f64;
        let mut pairs = t_q as f64 * t_kv as f64;
        let mut absorbed_pairs = pairs;
        if let Some(chosen) = most_keys
            && chosen < t_kv
        {
            absorbed_pairs = t_q as f64 * chosen as f64;
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

    /// Computes [`forward_with`](Self::forward_with), and returns the keys that the layer's indexer chose for the
    /// queries, or those that the call was given, for later layers.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_choice<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<OutputWithChoice> {
        let record = ChoiceRecord::default();
        let output = self.run_recording(input.into(), RequestedResults::default(), &record)?.output;
        Ok(OutputWithChoice { output, chosen: record.get() })
    }

    /// Computes [`forward_with_choice`](Self::forward_with_choice) and the
    /// [statistics](Self::forward_with_statistics) of the weights.
    ///
    /// # Errors
    /// As [`forward_with_statistics`](Self::forward_with_statistics).
    pub fn forward_with_choice_and_statistics<'a>(
        &'a self,
        input: impl Into<AttentionInput<'a>>,
        wanted: &StatisticsOptions,
    ) -> Result<(OutputWithChoice, AttentionStatistics)> {
        let results = RequestedResults { statistics: Some(wanted.requested()), ..RequestedResults::default() };
        let record = ChoiceRecord::default();
        let (output, statistics) = self.run_recording(input.into(), results, &record)?.output_and_statistics()?;
        Ok((OutputWithChoice { output, chosen: record.get() }, statistics))
    }

    /// Computes some results, and records the keys that are chosen for the queries.
    fn run_recording<'a>(
        &'a self,
        input: AttentionInput<'a>,
        wanted: RequestedResults,
        record: &ChoiceRecord,
    ) -> Result<Attended> {
        if input.any_pages().is_some() {
            bail!("[{OP}] a choice of keys was requested from a call with pages, expected a cache or none")
        }
        self.prepare_recording(&input, None, record)?.finish(input.cache, wanted)
    }

    /// Validates and projects an input: everything that comes before attention. With a cache, `absorbs` says whether
    /// queries absorb the matrix of keys; the default is the form with fewer multiplications. If they absorb it, the
    /// attention output is of latents (B, H, T, rank), and otherwise of values (B, H, T, D_v). With pages, `absorbs` is
    /// for all sequences whose pages were not released, and the attention output is of values.
    pub(super) fn prepare<'a>(&'a self, input: &AttentionInput<'a>, absorbs: Option<bool>) -> Result<PreparedCall<'a>> {
        self.prepare_recording(input, absorbs, &ChoiceRecord::default())
    }

    /// Prepares a call as [`prepare`](Self::prepare) does. The call writes the keys that are chosen for its queries into
    /// a record.
    fn prepare_recording<'a>(
        &'a self,
        input: &AttentionInput<'a>,
        absorbs: Option<bool>,
        record: &ChoiceRecord,
    ) -> Result<PreparedCall<'a>> {
        let cfg = &self.config;
        let CheckedLatentInput { xs, tokens, mut mask, rotation, index_rotation, log_positions, residual } =
            self.validate(input)?;
        let t = xs.dim(1)?;
        let is_cached = input.any_cache().is_some();
        let absorbs_in_pages = absorbs;
        let earlier = input.chosen_keys.and_then(|chosen| chosen.lists.as_ref()).map(KeyLists::most_entries);
        let most_keys = earlier.or_else(|| cfg.indexer().map(|indexer| indexer.most_keys()));
        let absorbs = is_cached && absorbs.unwrap_or_else(|| cfg.absorbs(t, tokens.longest(), most_keys));
        let CompressedQueries { latents, with_gate } = self.compress_queries(&xs)?;
        let mut rows = self.latent_rows(&xs, rotation.as_ref())?;
        // The indexer's keys follow the latent and the shared key of a token.
        let index_columns = rows.dim(3)?..rows.dim(3)? + self.indexer.as_ref().map_or(0, |own| own.module.key_width());
        let mut choice = None;
        if let Some(lists) = input.chosen_keys.and_then(|chosen| chosen.lists.clone()) {
            // The lists are the same for any columns.
            choice = Some(CallChoice { of: ChoiceOf::EarlierLayer(lists), columns: 0..1 });
        }
        if let Some(LayerIndexer { module, .. }) = &self.indexer {
            let indexed = IndexedTokens {
                xs: &xs,
                compressed: &latents,
                rotation: index_rotation.as_ref(),
                log_positions: log_positions.as_ref(),
            };
            rows = Tensor::cat(&[&rows, &module.keys(&indexed)?.unsqueeze(1)?], 3)?;
            choice = Some(CallChoice { of: ChoiceOf::Indexer(module.queries(&indexed)?), columns: index_columns });
        }
        let of_queries = PositionsOfQueries { rotation: rotation.as_ref(), logs: log_positions.as_ref() };
        let ProjectedQueries { q, fused_gate } = self.project_queries(&with_gate, of_queries, absorbs)?;
        let gate = if fused_gate.is_some() { fused_gate } else { self.additions.gate(&xs)? };
        // The output for padding is 0, and 0 · NaN of padding's gate must not reach it.
        let gate = gate.map(|gate| tokens.without_padding(gate)).transpose()?;
        let mut cache_after = None;
        let keys = if let Some(pages) = input.pages {
            pages.write_latents(&rows, cfg.kv_lora_rank())?;
            let index_queries = match choice {
                Some(CallChoice { of: ChoiceOf::Indexer(queries), .. }) => Some(queries),
                _ => None,
            };
            AttendedKeys::Latents(LatentPages { layer: self, pages, absorbs: absorbs_in_pages, index_queries })
        } else if let Some(cache) = &input.cache {
            let mut staged = cache.stage(&tokens, &rows, None, cfg.kv_lora_rank())?;
            if !absorbs {
                staged.call.expansion = Some(Box::new(|stored| self.expand(&stored.k)));
            } else if self.indexer.is_some() {
                staged.call.expansion = Some(Box::new(|stored| self.without_index_keys(&stored.k)));
            }
            if let Some(CallChoice { of, columns }) = choice {
                let record = record.clone();
                let choose = Box::new(move |keys: &Tensor, own| self.with_chosen_keys(own, &of, keys, &record));
                staged.call.choice = Some(KeyChoice { columns, choose });
            }
            cache_after = Some(staged.cache);
            AttendedKeys::Cached(staged.call)
        } else {
            if let Some(CallChoice { of, columns }) = choice {
                mask = self.with_chosen_keys(mask, &of, &part(&rows, 3, columns)?, record)?;
            }
            let KvFloats { k, v } = self.expand(&rows)?;
            match input.function {
                Some(function) => AttendedKeys::Function(FunctionKeys { k, v, function }),
                None => AttendedKeys::Own(OwnKeys { k, v, sequences: input.packed }),
            }
        };
        let mut options = input.options(cfg.dropout()).with_scale(cfg.scale());
        options.sinks = self.additions.sinks()?;
        Ok(PreparedCall {
            q,
            keys,
            cache: cache_after,
            mask,
            options,
            batched: input.queries.rank() == 3,
            output: Box::new(move |output| self.project_output(output, absorbs, gate.as_ref(), residual.as_ref())),
        })
    }

    /// Returns a mask with the keys that the layer's indexer chooses for each query by its keys (B, 1, T_kv, width).
    pub(super) fn with_keys_of_indexer(
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

    /// Returns a mask with the keys that are chosen for each query, by the keys (B, 1, T_kv, width) of the layer's
    /// indexer if it has one, and writes them into a record.
    fn with_chosen_keys(
        &self,
        mask: AttentionMask,
        choice: &ChoiceOf,
        keys: &Tensor,
        record: &ChoiceRecord,
    ) -> Result<AttentionMask> {
        let lists = match (choice, &self.indexer) {
            (ChoiceOf::EarlierLayer(lists), _) => Some(lists.clone()),
            (ChoiceOf::Indexer(queries), Some(LayerIndexer { module, .. })) => {
                module.choose(queries, &keys.detach().squeeze(1)?, &mask)?
            }
            (ChoiceOf::Indexer(_), None) => None,
        };
        record.set(lists.as_ref());
        Ok(match lists {
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
        let drops_keys = input.any_cache().is_some_and(|cache| cache.config().window().is_some());
        if drops_keys && cfg.indexer().is_some_and(|indexer| indexer.pool.is_some()) {
            bail!("[{OP}] a cache that drops keys was given to a layer whose indexer pools them, expected all keys")
        }
        match input.chosen_keys {
            Some(_) if !cfg.shared_choice() => {
                bail!("[{OP}] keys that another layer chose were given, expected a layer that asks for them")
            }
            _ if cfg.shared_choice() && input.any_pages().is_some() => bail!(
                "[{OP}] pages were given to a layer that attends to the keys that an earlier layer chose, expected a cache"
            ),
            None if cfg.shared_choice() => bail!(
                "[{OP}] the layer attends to the keys that an earlier layer chose, expected a call `with_chosen_keys`"
            ),
            _ => {}
        }
        let (b, t, _) = xs.dims3()?;
        input.check_packed(OP, &xs, t)?;
        input.check_pages(OP, &xs)?;
        warnings::about_lengths(OP, input, t);
        let tokens = input.tokens(OP, b, t, &self.mask)?;
        let mut positions = input.call_positions(OP, &tokens, t, None, cfg.rotates() || cfg.learned_temperature())?;
        let counts_positions = cfg.rope().scaling().depends_on_length() || cfg.learned_temperature();
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
        let mut log_positions = None;
        if let Some(positions) = positions {
            let length = positions.length_of_sequences();
            if let Some(rotary) = self.rotary.as_ref().filter(|_| cfg.rotates()) {
                rotation = Some(rotary.at_length(&positions.queries, length)?);
            }
            if let Some(LayerIndexer { rotary: Some(rotary), .. }) = &self.indexer {
                index_rotation = Some(rotary.at_length(&positions.queries, length)?);
            }
            if cfg.learned_temperature() {
                log_positions = Some(temperature::log_positions(positions.counted(), &xs)?);
            }
        }
        Ok(CheckedLatentInput { xs, tokens, mask, rotation, index_rotation, log_positions, residual })
    }

    /// Returns the normalised latent and the rotated shared key of each token, (B, 1, T, rank + rope): the rows that a
    /// cache stores.
    fn latent_rows(&self, xs: &Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
        let rank = self.config.kv_lora_rank();
        let rope = self.config.rope_head_dim();
        let compressed = self.down.forward(xs)?;
        let mut latents = self.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        if let Some(scales) = self.config.latent_scales() {
            latents = (latents * scales.keys_and_values)?;
        }
        if rope == 0 {
            return latents.unsqueeze(1);
        }
        let shared_keys = self.additions.normalised(part(&compressed, 2, rank..rank + rope)?.unsqueeze(2)?)?;
        Tensor::cat(&[&latents, &rotated(shared_keys, rotation)?.squeeze(2)?], 2)?.unsqueeze(1)
    }

    /// Compresses the inputs (B, T, E) of queries, if the layer does that.
    fn compress_queries(&self, xs: &Tensor) -> Result<CompressedQueries> {
        let Some(QueryCompression { down, norm }) = &self.compression else {
            return Ok(CompressedQueries { latents: xs.clone(), with_gate: xs.clone() });
        };
        let narrow = down.forward(xs)?;
        let mut latents = norm.forward(&narrow)?;
        if let Some(scales) = self.config.latent_scales() {
            latents = (latents * scales.queries)?;
        }
        let with_gate =
            if self.config.has_fused_gate() { Tensor::cat(&[&latents, &narrow], 2)? } else { latents.clone() };
        Ok(CompressedQueries { latents, with_gate })
    }

    /// Returns the queries of compressed queries, or of inputs if these are not compressed, and the projection of a
    /// gate that is fused with them.
    fn project_queries(
        &self,
        inputs: &Tensor,
        positions: PositionsOfQueries,
        absorbs: bool,
    ) -> Result<ProjectedQueries> {
        let cfg = &self.config;
        let (b, t, _) = inputs.dims3()?;
        let (h, width) = (cfg.num_heads(), cfg.head_dim());
        let q = self.queries.forward(inputs)?.reshape((b, t, h, cfg.query_row_width()))?;
        let mut fused_gate = None;
        if cfg.has_fused_gate() {
            let gate = part(&q, 3, width..width + cfg.value_head_dim())?;
            fused_gate = Some(gate.contiguous()?.reshape((b, t, h * cfg.value_head_dim()))?);
        }
        let nope = part(&q, 3, 0..cfg.nope_head_dim())?;
        let mut heads = if absorbs { self.absorb(&nope)? } else { nope.contiguous()? };
        if cfg.rope_head_dim() > 0 {
            let rope = rotated(part(&q, 3, cfg.nope_head_dim()..width)?, positions.rotation)?;
            heads = Tensor::cat(&[heads, rope], 3)?;
        }
        if let (Some(temperature), Some(logs)) = (&self.additions.temperature, positions.logs) {
            heads = temperature.scaled(&heads, logs)?;
        }
        Ok(ProjectedQueries { q: heads.transpose(1, 2)?, fused_gate })
    }

    /// Returns queries (B, T, H, nope + rope) as (B, T, H, rank + rope), which absorb the matrix of keys.
    pub(super) fn absorbing_queries(&self, queries: &Tensor) -> Result<Tensor> {
        let cfg = &self.config;
        let nope = self.absorb(&part(queries, 3, 0..cfg.nope_head_dim())?)?;
        if cfg.rope_head_dim() == 0 {
            return Ok(nope);
        }
        Tensor::cat(&[nope, part(queries, 3, cfg.nope_head_dim()..cfg.head_dim())?.contiguous()?], 3)
    }

    /// Projects the attention output of a call to the layer's output (B, T, E), with the layer's gate, whose projection
    /// is (B, T, H · D_v) or (B, T, H).
    fn project_output(
        &self,
        output: &Tensor,
        absorbs: bool,
        gate: Option<&Tensor>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let heads = transpose_linked(output, 1, 2)?;
        let mut values = if absorbs { self.values_of(&heads)? } else { heads };
        if let (Some(gate), Some(projected)) = (self.config.output_gate(), gate) {
            values = gated(&values, gate, projected)?;
        }
        let (b, t, h, d_v) = values.dims4()?;
        self.out.product(&reshape_linked(&values, (b, t, h * d_v))?, 0..self.out.out_dim(), residual)
    }
}

/// The source of the keys that the queries of a call attend to.
enum ChoiceOf {
    /// The layer's indexer, by these queries.
    Indexer(IndexQueries),
    /// The indexer of an earlier layer, which chose these.
    EarlierLayer(KeyLists),
}

/// A choice of the keys of a call, which reads some columns of the stored rows.
struct CallChoice {
    of: ChoiceOf,
    columns: Range<usize>,
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
    /// The logarithms of the positions, (1, T, 1, 1) or (B, T, 1, 1), if the layer has a learned temperature.
    log_positions: Option<Tensor>,
    /// (B, T, E).
    residual: Option<Tensor>,
}

/// The inputs of the projection to queries.
struct CompressedQueries {
    /// (B, T, q_lora_rank) after the norm; the input of the layer, if queries are not compressed.
    latents: Tensor,
    /// These latents, followed by the compressed queries before the norm if a gate is fused with the queries.
    with_gate: Tensor,
}

/// The queries of a call.
struct ProjectedQueries {
    /// (B, H, T, nope + rope), or (B, H, T, rank + rope) if queries absorb the matrix of keys.
    q: Tensor,
    /// The projection of a gate that is fused with the queries, (B, T, H · D_v).
    fused_gate: Option<Tensor>,
}

/// The rotation and the logarithms of positions of the queries of a call.
#[derive(Clone, Copy)]
struct PositionsOfQueries<'a> {
    rotation: Option<&'a Rotation>,
    /// The logarithms of the positions.
    logs: Option<&'a Tensor>,
}

/// Returns heads (B, T, heads, rope) after their rotation, if the layer rotates, as a contiguous tensor.
fn rotated(xs: Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
    match rotation {
        Some(rotation) => rotation.apply(&xs),
        None => xs.contiguous(),
    }
}
