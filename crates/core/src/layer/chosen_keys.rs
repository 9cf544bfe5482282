//! The keys that the indexer of a layer chooses for each query, and the keys of the indexer in a cache.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::indexer::{IndexQueries, IndexedTokens, KeyIndexer};
use super::input::{AttentionInput, KeysFrom};
use super::{MultiHeadAttention, OP};
use crate::cache::{CachedCall, KeyChoice, KvFloats};
use crate::mask::{AttentionMask, KeyLists, SequenceLists};
use crate::pages::PagedKeys;
use crate::position::{Rotation, ScoreArguments};
use candle_attention_modules::base::part;

/// The queries and keys of an indexer in one call.
pub(super) struct IndexedCall {
    module: Arc<dyn KeyIndexer>,
    queries: IndexQueries,
    /// (B, T, width).
    keys: Tensor,
}

impl MultiHeadAttention {
    /// Computes the queries and keys of the indexer, if the layer has one, from inputs (B, T, E).
    pub(super) fn index(&self, xs: &Tensor, rotation: Option<&Rotation>) -> Result<Option<IndexedCall>> {
        let Some(module) = &self.indexer else { return Ok(None) };
        let tokens = IndexedTokens { xs, compressed: xs, rotation, log_positions: None };
        Ok(Some(IndexedCall { queries: module.queries(&tokens)?, keys: module.keys(&tokens)?, module: module.clone() }))
    }

    /// Refuses inputs that a layer with an indexer does not support.
    pub(super) fn check_indexer_support(&self, input: &AttentionInput, keys_from: KeysFrom) -> Result<()> {
        if input.chosen_keys.is_some() {
            bail!(
                "[{OP}] keys that another layer chose were given, expected a layer of latent attention that asks for them"
            )
        }
        if self.indexer.is_none() {
            return Ok(());
        }
        let unsupported = match keys_from {
            KeysFrom::Own | KeysFrom::Cache(_) if input.packed.is_some() => "packed sequences were",
            KeysFrom::Own | KeysFrom::Cache(_) if input.sink_window().is_some() => "a cache with sink tokens was",
            KeysFrom::Cache(cache) if cache.config().window().is_some() => "a cache that drops keys was",
            KeysFrom::Own | KeysFrom::Cache(_) | KeysFrom::Pages => return Ok(()),
            KeysFrom::Cross { .. } | KeysFrom::Memory(_) => "keys and values of other inputs were",
            KeysFrom::EarlierPages => "pages of an earlier layer were",
            KeysFrom::EarlierLayer(_) => "a cache of an earlier layer was",
        };
        bail!("[{OP}] {unsupported} given to a layer with an indexer, expected self-attention of a batch")
    }
}

impl IndexedCall {
    /// Returns a mask with the keys that are chosen for each query of a call without a cache.
    pub fn choose(&self, mask: AttentionMask) -> Result<AttentionMask> {
        with_chosen(&*self.module, &self.queries, &self.keys, mask)
    }

    /// Returns the keys (B, H_kv, T, D) of a call, each head followed by an equal part of the indexer's keys: the rows
    /// that a cache stores.
    pub fn rows(&self, keys: &Tensor) -> Result<Tensor> {
        let (b, h_kv, t, _) = keys.dims4()?;
        let columns = self.module.key_width().div_ceil(h_kv);
        let (_, _, width) = self.keys.dims3()?;
        let mut own = self.keys.to_dtype(keys.dtype())?;
        if columns * h_kv > width {
            own = own.pad_with_zeros(2, 0, columns * h_kv - width)?;
        }
        let by_head = own.reshape((b, t, h_kv, columns))?.transpose(1, 2)?.contiguous()?;
        Tensor::cat(&[&keys.contiguous()?, &by_head], 3)
    }

    /// Chooses the keys of each sequence of a step whose rows are written, for a layer whose keys have width `d`.
    /// Since kernels read whole rows of a pool, queries are extended with zeros, which do not change the scores.
    pub fn choose_in_pages(
        self,
        arguments: &mut ScoreArguments,
        pages: PagedKeys,
        h_kv: usize,
        d: usize,
    ) -> Result<()> {
        let width = self.module.key_width();
        let columns = width.div_ceil(h_kv);
        let sequences = pages.step.sequences();
        let mut all = Vec::with_capacity(sequences.len());
        for s in 0..sequences.len() {
            let of_sequence = sequences.queries(s);
            let t_q = of_sequence.len();
            let mut lists = None;
            if t_q > 0 {
                let rows = pages.columns_of(s, d)?;
                let joined = rows.transpose(1, 2)?.contiguous()?.reshape((1, rows.dim(2)?, h_kv * columns))?;
                let keys = part(&joined, 2, 0..width)?.contiguous()?;
                let own = self.queries.select(|xs| xs.narrow(1, of_sequence.start, t_q))?;
                lists = self.module.choose(&own, &keys, &arguments.mask.of_sequences(&[s]))?;
            }
            all.push(SequenceLists { lists, t_q, t_kv: sequences.keys(s).end });
        }
        if let Some(lists) = KeyLists::of_packed(&all)? {
            arguments.mask = std::mem::take(&mut arguments.mask).with_key_lists(&lists);
        }
        if arguments.options.scale.is_none() {
            arguments.options.scale = Some(1.0 / (d as f64).sqrt());
        }
        // In the order of q's memory, (B, T, H, D).
        let by_token = arguments.q.transpose(1, 2)?.contiguous()?;
        arguments.q = by_token.pad_with_zeros(3, 0, columns)?.transpose(1, 2)?;
        Ok(())
    }

    /// Sets how a call with a cache chooses keys, from rows of heads of width `d`.
    pub fn choose_in(self, call: &mut CachedCall, h_kv: usize, d: usize) {
        let width = self.module.key_width();
        let columns = d..d + width.div_ceil(h_kv);
        call.expansion =
            Some(Box::new(move |stored| Ok(KvFloats { k: part(&stored.k, 3, 0..d)?, v: stored.v.clone() })));
        let Self { module, queries, .. } = self;
        let choose = Box::new(move |of_heads: &Tensor, mask: AttentionMask| {
            let (b, _, t, of_head) = of_heads.dims4()?;
            let joined = of_heads.transpose(1, 2)?.contiguous()?.reshape((b, t, h_kv * of_head))?;
            with_chosen(&*module, &queries, &part(&joined, 2, 0..width)?.contiguous()?, mask)
        });
        call.choice = Some(KeyChoice { columns, choose });
    }
}

/// Returns a mask with the keys that an indexer chooses for each query.
fn with_chosen(
    module: &dyn KeyIndexer,
    queries: &IndexQueries,
    keys: &Tensor,
    mask: AttentionMask,
) -> Result<AttentionMask> {
    Ok(match module.choose(queries, &keys.detach(), &mask)? {
        Some(lists) => mask.with_key_lists(&lists),
        None => mask,
    })
}
