//! The computation of one call of a layer.

use candle_core::{Result, Tensor, bail};

use super::choice::{CallChoice, ChoiceOf, PagedChoice};
use super::projections::{CompressedQueries, PositionsOfQueries, ProjectedQueries};
use super::{LatentPages, LayerIndexer, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OP};
use crate::cache::{KeyChoice, KvFloats, NewTokens};
use crate::layer::forward::{AttendedKeys, PreparedCall};
use crate::layer::indexer::{ChoiceRecord, ChosenKeys, IndexedTokens};
use crate::layer::input::{AttentionInput, KeysFrom};
use crate::layer::paged_batch::PagedBatch;
use crate::layer::temperature;
use crate::layer::validate::ExpectedInput;
use crate::layer::warnings;
use crate::layer::whole_mask::MaskedCall;
use crate::mask::AttentionMask;
use crate::position::Rotation;
use crate::sdpa::{Attended, FunctionKeys, OwnKeys};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{is_addressable, part};

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
        if runs_pages_as_batch(&input) {
            let batch = self.paged_batch(&input)?;
            return Ok(batch.run(OP, &input, wanted, |own| self.forward_with(own))?.into());
        }
        self.prepare(&input, None)?.finish(input.cache, wanted)
    }

    /// Returns the batch of a call with pages, after checking what the batch has in another form.
    pub(super) fn paged_batch<'a>(&self, input: &AttentionInput<'a>) -> Result<PagedBatch<'a>> {
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
        self.prepare_recording(input, absorbs, &ChoiceRecord::default())
    }

    /// Prepares a call as [`prepare`](Self::prepare) does. The call writes the keys that are chosen for its queries into
    /// a record.
    pub(super) fn prepare_recording<'a>(
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
        let earlier = input.chosen_keys.and_then(ChosenKeys::most_keys);
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
            let of_sequences = input.chosen_keys.and_then(|chosen| chosen.of_sequences.clone());
            let choice = match (choice, of_sequences) {
                (Some(CallChoice { of: ChoiceOf::Indexer(queries), .. }), _) => Some(PagedChoice::Indexer(queries)),
                (_, Some(lists)) => Some(PagedChoice::EarlierLayer(lists)),
                (_, None) => None,
            };
            record.begin_sequences(pages.step.sequences().len());
            let record = record.clone();
            AttendedKeys::Latents(LatentPages {
                layer: self,
                pages,
                absorbs: absorbs_in_pages,
                choice,
                most_keys,
                record,
            })
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

    /// Checks that keys were chosen in a call with pages if this call has some, and for its number of sequences.
    fn check_chosen_keys(&self, input: &AttentionInput, chosen: &ChosenKeys) -> Result<()> {
        let sequences = input.any_pages().map(|step| step.sequences().len());
        let found = chosen.of_sequences.as_ref().map(Vec::len);
        if found == sequences {
            return Ok(());
        }
        let call = |number: Option<usize>| match number {
            Some(count) => format!("a call with pages of {count} sequences"),
            None => "a call without pages".to_string(),
        };
        bail!("[{OP}] the keys were chosen in {}, expected {} as this one", call(found), call(sequences))
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
            Some(chosen) => self.check_chosen_keys(input, chosen)?,
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

/// Returns whether a call with pages runs as a batch over a copy of its latents.
pub(super) fn runs_pages_as_batch(input: &AttentionInput) -> bool {
    input.pages.is_some() && input.has_pages_of_batch()
}
