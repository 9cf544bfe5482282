//! The inputs of a call as a layer reads them: the source of its keys and values, its masks and its options.

use candle_core::{Result, Tensor, bail};

use super::{AttentionInput, KeyValueTensors};
use crate::cache::{AttentionCache, NewTokens};
use crate::layer::memory::ProjectedMemory;
use crate::mask::{AttentionMask, NewTokenMask};
use crate::sdpa::{OutputLayout, PackedSequences, SdpaOptions};

/// The source of the keys and values of a call.
#[derive(Clone, Copy)]
pub(in crate::layer) enum KeysFrom<'a> {
    /// The inputs of the queries.
    Own,
    /// Inputs of keys and of values.
    Cross { keys: &'a Tensor, values: &'a Tensor },
    /// Keys and values that were projected before.
    Memory(&'a ProjectedMemory),
    /// The cache's keys and values, and the inputs of the queries after them.
    Cache(&'a AttentionCache),
    /// The keys and values in an earlier layer's cache.
    EarlierLayer(&'a AttentionCache),
    /// The pages' keys and values, and the inputs of the queries after them.
    Pages,
    /// The keys and values in an earlier layer's pages.
    EarlierPages,
}

impl KeysFrom<'_> {
    /// Returns the name of the source in errors.
    fn name(&self) -> &'static str {
        match self {
            Self::Own => "the queries",
            Self::Cross { .. } => "keys and values",
            Self::Memory(_) => "a memory",
            Self::Cache(_) => "a cache",
            Self::EarlierLayer(_) => "the cache of an earlier layer",
            Self::Pages => "pages",
            Self::EarlierPages => "the pages of an earlier layer",
        }
    }
}

impl<'a> AttentionInput<'a> {
    /// Returns the source of the call's keys and values.
    ///
    /// # Errors
    /// If the caller passed two sources.
    pub(in crate::layer) fn keys_from(&self, op: &str) -> Result<KeysFrom<'_>> {
        let mut sources = Vec::new();
        if let Some(memory) = self.memory {
            sources.push(KeysFrom::Memory(memory));
        }
        if let Some(KeyValueTensors { keys, values }) = self.key_value {
            sources.push(KeysFrom::Cross { keys, values });
        }
        if let Some(cache) = self.cache.as_deref() {
            sources.push(KeysFrom::Cache(cache));
        }
        if let Some(cache) = self.shared_cache {
            sources.push(KeysFrom::EarlierLayer(cache));
        }
        if self.pages.is_some() {
            sources.push(KeysFrom::Pages);
        }
        if self.shared_pages.is_some() {
            sources.push(KeysFrom::EarlierPages);
        }
        match sources[..] {
            [] => Ok(KeysFrom::Own),
            [source] => Ok(source),
            [one, other, ..] => {
                bail!("[{op}] both {} and {} were given, expected one of the two", one.name(), other.name())
            }
        }
    }

    /// Returns whether the call says which of its new tokens attend to each other.
    pub(in crate::layer) fn has_new_token_mask(&self) -> bool {
        self.trees.is_some() || self.new_token_mask.is_some()
    }

    /// Returns whether keys and values come from other inputs than the queries.
    pub(in crate::layer) fn is_cross(&self) -> bool {
        self.memory.is_some() || self.key_value.is_some()
    }

    /// Returns the layer's own cache, or an earlier layer's.
    pub(in crate::layer) fn any_cache(&self) -> Option<&AttentionCache> {
        self.cache.as_deref().or(self.shared_cache)
    }

    /// Returns the queries of packed sequences or of sequences in pages.
    pub(in crate::layer) fn packed_queries(&self) -> Option<&'a PackedSequences> {
        self.packed.or(self.any_pages().map(|step| step.packed()))
    }

    /// Returns the first input that content-based positions do not support, for an error.
    pub(in crate::layer) fn unsupported_by_content_positions(&self) -> Option<&'static str> {
        if self.is_cross() {
            return Some("keys of others");
        }
        if self.any_cache().is_some() {
            return Some("earlier tokens");
        }
        if self.packed.is_some() {
            return Some("packed sequences");
        }
        if self.any_pages().is_some() {
            return Some("pages");
        }
        if self.positions.is_some() {
            return Some("positions");
        }
        if self.has_tree() {
            return Some("a tree");
        }
        self.function.is_some().then_some("other functions")
    }

    /// Returns whether the call has pages and an input that only a batch supports: a tree, a mask of new tokens, or a
    /// mask with tensors.
    pub(in crate::layer) fn has_pages_of_batch(&self) -> bool {
        let has_tensors = self.mask.is_some_and(|mask| mask.tensor_kind().is_some());
        self.any_pages().is_some() && (self.has_new_token_mask() || has_tensors)
    }

    /// Returns the input of a call over a batch (n, T, E) of the same sequences: what is for all tokens.
    pub(in crate::layer) fn for_batch<'b>(&self, queries: &'b Tensor) -> AttentionInput<'b>
    where
        'a: 'b,
    {
        AttentionInput {
            mask: self.mask,
            chosen_keys: self.chosen_keys,
            train: self.train,
            dropout_seed: self.dropout_seed,
            trees: self.trees,
            new_token_mask: self.new_token_mask,
            adapters: self.adapters,
            all_reduce: self.all_reduce,
            backend: self.backend,
            ..AttentionInput::new(queries)
        }
    }

    /// Returns the mask of the call, without the layer's own.
    pub(in crate::layer) fn mask(&self) -> Option<&'a AttentionMask> {
        self.mask
    }

    /// Returns the layer's mask combined with the call's, whose prefix lifts the layer's causal constraint.
    pub(in crate::layer) fn mask_with(&self, layer_mask: &AttentionMask) -> AttentionMask {
        match self.mask {
            Some(mask) => layer_mask.with_prefixes_of(mask).and(mask),
            None => layer_mask.clone(),
        }
    }

    /// Returns whether the tokens of the call are the nodes of trees.
    pub(in crate::layer) fn has_tree(&self) -> bool {
        self.trees.is_some()
    }

    /// Returns the mask among the new tokens of a call of `b` sequences, if it has one.
    ///
    /// # Errors
    /// For a tree or a mask that does not fit the call, for both, and for keys of other inputs or packed sequences.
    pub(in crate::layer) fn new_token_mask(
        &self,
        op: &str,
        tokens: &NewTokens,
        b: usize,
    ) -> Result<Option<NewTokenMask>> {
        let mask = match (self.trees, self.new_token_mask) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => {
                bail!("[{op}] both a tree and a mask of the new tokens were given, expected one of the two")
            }
            (Some(trees), None) => NewTokenMask::of_trees(trees, b, tokens.of_mask())?,
            (None, Some(mask)) => NewTokenMask::from_tensor(mask, b, tokens.of_mask())?,
        };
        if self.is_cross() || self.packed.is_some() {
            bail!(
                "[{op}] a mask of the new tokens was given with keys of other inputs or packed sequences, expected \
                 self-attention"
            )
        }
        Ok(Some(mask))
    }

    /// Returns the options of attention that the call sets, for a layer with this probability of dropout.
    pub(in crate::layer) fn options(&self, dropout: f64) -> SdpaOptions {
        SdpaOptions::default()
            .with_dropout(dropout, self.train)
            .with_dropout_seed(self.dropout_seed)
            .with_backend(self.backend)
            .with_output_layout(OutputLayout::Bthd)
    }
}
