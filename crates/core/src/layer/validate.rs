//! The checks of a call's inputs, and the source of its keys and values.

use std::fmt;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::adapter_names::ChosenAdapters;
use super::input::{AttentionInput, KeysFrom};
use super::memory::ProjectedMemory;
use super::positions::CallPositions;
use super::whole_mask::MaskedCall;
use super::{MultiHeadAttention, OP, warnings};
use crate::cache::NewTokens;
use crate::config::KvSharing;
use crate::mask::AttentionMask;
use crate::position::RopeConfig;
use crate::sdpa::PackedSequences;
use candle_attention_modules::base::{Dim, Expect, check_keys_and_values, is_addressable};

pub(super) const NO_KEYS: &str =
    "this layer has no key and value projections, expected `with_shared_cache` or `with_memory` of an earlier layer";

/// The expected rank, dtype and device of a layer's inputs.
#[derive(Clone, Copy)]
pub(super) struct ExpectedInput<'a> {
    pub op: &'static str,
    /// Whether the queries have a batch dimension.
    pub batched: bool,
    pub dtype: DType,
    pub device: &'a Device,
}

impl ExpectedInput<'_> {
    /// Returns the queries of a call as (B, T_q, width) after checking them.
    pub fn queries(&self, queries: &Tensor, width: usize) -> Result<Tensor> {
        let found = Expect::many(self.op, "queries", queries).embeddings()?;
        let batch = [Dim::Any("B"), Dim::Any("T"), Dim::Is(width)];
        let found = match self.batched {
            true => found.shape(&batch)?,
            false => found.shape_of(&[&batch, &batch[1..]])?,
        };
        found.dtype(self.dtype, "the weights'")?.same_device("the weights", self.device)?;
        self.with_batch(queries)
    }

    /// Returns another input of a call as (B, T, width) after checking it: it has a batch dimension if the queries have
    /// one.
    pub fn other(&self, name: &str, xs: &Tensor, width: usize) -> Result<Tensor> {
        let batch = [Dim::Any("B"), Dim::Any("T"), Dim::Is(width)];
        let found = Expect::many(self.op, name, xs).embeddings()?;
        let found = found.shape(if self.batched { &batch } else { &batch[1..] })?;
        found.dtype(self.dtype, "the weights'")?.same_device("the weights", self.device)?;
        self.with_batch(xs)
    }

    /// Returns the residual of a call as (B, T_q, width) after checking it.
    pub fn residual(&self, input: &AttentionInput, width: usize) -> Result<Option<Tensor>> {
        let Some(residual) = input.residual else { return Ok(None) };
        let output_dims = [&input.queries.dims()[..input.queries.rank() - 1], &[width]].concat();
        Expect::many(self.op, "residuals", residual).sizes(&output_dims)?;
        self.other("residuals", residual, width).map(Some)
    }

    fn with_batch(&self, xs: &Tensor) -> Result<Tensor> {
        if self.batched { Ok(xs.clone()) } else { xs.unsqueeze(0) }
    }
}

impl AttentionInput<'_> {
    /// Checks that packed sequences fit the queries (1, total_q, ..) and `t_kv` keys, and that the call has no input
    /// that packed sequences do not support.
    pub(super) fn check_packed(&self, op: &str, queries: &Tensor, t_kv: usize) -> Result<()> {
        let Some(sequences) = self.packed else { return Ok(()) };
        Expect::many(op, "packed queries", self.queries).shape(&["total_q", "E"].map(Dim::Any))?;
        if self.any_cache().is_some() {
            bail!("[{op}] packed sequences were given with a cache, expected one of the two")
        }
        let t_q = queries.dim(1)?;
        let total_queries = sequences.total_queries();
        let total_keys = sequences.total_keys();
        if total_queries != t_q || total_keys != t_kv {
            bail!(
                "[{op}] the packed sequences have {total_queries} queries and {total_keys} keys, expected the {t_q} \
                 and {t_kv} of the inputs"
            )
        }
        if self.is_cross() {
            return Ok(());
        }
        for s in 0..sequences.len() {
            let query_range = sequences.queries(s);
            let key_range = sequences.keys(s);
            if query_range != key_range {
                bail!(
                    "[{op}] packed sequence {s} has queries {query_range:?} and keys {key_range:?}, expected the same \
                     in self-attention"
                )
            }
        }
        Ok(())
    }
}

impl AttentionInput<'_> {
    /// Checks that the queries (1, total, ..) are the new tokens of the call's pages, if it has some, and that the call
    /// has no packed sequences.
    pub(super) fn check_pages(&self, op: &str, queries: &Tensor) -> Result<()> {
        let Some(step) = self.any_pages() else { return Ok(()) };
        Expect::many(op, "queries with pages", self.queries).shape(&["total", "E"].map(Dim::Any))?;
        if self.packed.is_some() {
            bail!("[{op}] packed sequences were given with pages, expected one of the two")
        }
        let found = queries.dim(1)?;
        let expected = step.total_tokens();
        if found != expected {
            bail!("[{op}] there are {found} queries, expected the step's {expected} new tokens")
        }
        Ok(())
    }
}

/// The checked inputs of keys and values.
pub(super) struct KeyValueInputs {
    /// (B, T_kv, kdim): a clone of the queries, if the keys are projected from them.
    pub keys: Tensor,
    /// (B, T_kv, vdim): a clone of the queries or of the keys, if the values are projected from them.
    pub values: Tensor,
}

/// The checked inputs of a call.
pub(super) struct CheckedLayerInput<'a> {
    /// (B, T_q, embed_dim).
    pub queries: Tensor,
    pub keys_from: KeysFrom<'a>,
    /// The inputs to project keys and values from; `None` for a memory and for an earlier layer's keys and values.
    pub key_value: Option<KeyValueInputs>,
    pub t_kv: usize,
    pub tokens: NewTokens,
    /// The positions, if the layer uses them.
    pub positions: Option<CallPositions>,
    /// The mask of the layer and of the call together.
    pub mask: AttentionMask,
    /// (B, T_q, out_dim).
    pub residual: Option<Tensor>,
    /// The rows that have an adapter by name.
    pub adapters: ChosenAdapters,
}

impl MultiHeadAttention {
    /// Checks the inputs of a call and finds out where its keys and values come from.
    pub(super) fn validate<'i>(&self, input: &'i AttentionInput) -> Result<CheckedLayerInput<'i>> {
        let cfg = &self.config;
        let keys_from = input.keys_from(OP)?;
        let expected = self.expected(input.queries.rank() == 3);
        let queries = expected.queries(input.queries, cfg.embed_dim())?;
        let residual = expected.residual(input, cfg.out_dim())?;
        let (b, t_q, _) = queries.dims3()?;
        self.check_sink_tokens(input)?;
        self.check_indexer_support(input, keys_from)?;
        let key_value = self.key_value_inputs(input, keys_from, &queries, &expected)?;
        let t_kv = match (&key_value, keys_from) {
            (Some(inputs), _) => inputs.keys.dim(1)?,
            (None, KeysFrom::EarlierLayer(cache)) => cache.len(),
            (None, KeysFrom::Memory(memory)) => memory.t_kv,
            (None, _) => t_q,
        };
        let what = format_args!("queries {:?} and {t_kv} keys", input.queries.dims());
        self.check_addressable(b, t_q.max(t_kv), what)?;
        input.check_packed(OP, &queries, t_kv)?;
        input.check_pages(OP, &queries)?;
        if input.any_pages().is_some() && cfg.content_positions().is_some() {
            bail!("[{OP}] the layer has content-based relative positions, which is not supported with pages")
        }
        if cfg.appended_keys() > 0 && input.packed.is_some() {
            bail!("[{OP}] the layer appends keys to those of a call, which is not supported with packed sequences")
        }
        if cfg.relative_bias().is_some() && self.relative_bias.is_none() {
            bail!(
                "[{OP}] the config has a relative bias, expected a call of `with_relative_bias` with the `RelativeBias` \
                 that all layers of the model share"
            )
        }
        warnings::about_lengths(OP, input, t_kv);
        let tokens = input.tokens(OP, b, t_q, &self.mask)?;
        let most_queries = input.packed.map_or(t_q, PackedSequences::most_queries);
        let most_keys = input.packed_queries().map_or(t_kv, PackedSequences::most_keys);
        let longest = tokens.longest().max(most_queries).max(most_keys);
        // Positions count in a cache that keeps sink tokens.
        self.check_context(input.sink_window().map_or(longest, |window| longest.min(window)))?;
        let mut positions = self.checked_positions(input, &tokens, t_kv)?;
        let counts_positions =
            cfg.attention_temperature().is_some() || cfg.rope().is_some_and(|rope| rope.scaling().depends_on_length());
        let device = &self.projections.device;
        let masked_call = MaskedCall { op: OP, tokens: &tokens, b, t_kv, device, counts_positions };
        let mask = input.mask_and_positions(&self.mask, &mut positions, masked_call)?;
        if input.train
            && cfg.dropout() > 0.0
            && let Some(cache) = input.any_cache()
        {
            warnings::about_dropout(OP, cache);
        }
        let adapters = self.chosen_adapters(input, b, t_q, t_kv)?;
        Ok(CheckedLayerInput { queries, keys_from, key_value, t_kv, tokens, positions, mask, residual, adapters })
    }

    /// Checks that the pages of a call are an earlier layer's if the layer projects no keys, and only then.
    pub(super) fn check_shared_pages(&self, keys_from: KeysFrom) -> Result<()> {
        let shares_earlier = self.config.kv_sharing() == KvSharing::EarlierLayer;
        match keys_from {
            KeysFrom::EarlierPages if !shares_earlier => {
                bail!("[{OP}] the pages of an earlier layer were given, but the layer has projections of keys")
            }
            KeysFrom::Pages if shares_earlier => bail!("[{OP}] {NO_KEYS}"),
            _ => Ok(()),
        }
    }

    /// Returns the inputs to project keys and values from; `None` for keys and values that were projected before.
    fn key_value_inputs(
        &self,
        input: &AttentionInput,
        keys_from: KeysFrom,
        queries: &Tensor,
        expected: &ExpectedInput,
    ) -> Result<Option<KeyValueInputs>> {
        let cfg = &self.config;
        let b = queries.dim(0)?;
        let shares_earlier = cfg.kv_sharing() == KvSharing::EarlierLayer;
        match keys_from {
            KeysFrom::EarlierLayer(_) | KeysFrom::EarlierPages => {
                if !shares_earlier {
                    let source = if input.any_pages().is_some() {
                        "pages of an earlier layer were"
                    } else {
                        "cache of an earlier layer was"
                    };
                    bail!("[{OP}] the {source} given, but the layer has keys of its own")
                }
                Ok(None)
            }
            KeysFrom::Memory(memory) => {
                self.check_projected_memory(input, memory, b)?;
                if !shares_earlier {
                    self.warn_of_cross_attention();
                }
                Ok(None)
            }
            KeysFrom::Cross { .. } | KeysFrom::Own | KeysFrom::Cache(_) | KeysFrom::Pages if shares_earlier => {
                bail!("[{OP}] {NO_KEYS}")
            }
            KeysFrom::Cross { keys, values } => {
                let mut inputs = self.check_key_value(Some(b), expected, keys, values)?;
                // One tensor is projected once.
                if keys.id() == input.queries.id() {
                    inputs.keys = queries.clone();
                } else {
                    self.warn_of_cross_attention();
                }
                if values.id() == input.queries.id() {
                    inputs.values = queries.clone();
                }
                Ok(Some(inputs))
            }
            KeysFrom::Own | KeysFrom::Cache(_) | KeysFrom::Pages => {
                if cfg.kdim() != cfg.embed_dim() || cfg.vdim() != cfg.embed_dim() {
                    bail!(
                        "[{OP}] queries are {} wide, the inputs of keys {} and of values {}; expected a \
                         call `with_key_value` or `with_memory` (cross-attention)",
                        cfg.embed_dim(),
                        cfg.kdim(),
                        cfg.vdim()
                    )
                }
                Ok(Some(KeyValueInputs { keys: queries.clone(), values: queries.clone() }))
            }
        }
    }

    fn warn_of_cross_attention(&self) {
        if self.mask.counts_from_queries() {
            warnings::about_cross_attention(OP);
        }
    }

    /// Checks the positions of a call, and that they are within the context length.
    fn checked_positions(
        &self,
        input: &AttentionInput,
        tokens: &NewTokens,
        t_kv: usize,
    ) -> Result<Option<CallPositions>> {
        let cfg = &self.config;
        let axes = cfg.rope().and_then(RopeConfig::axes);
        let is_used =
            self.rotary.is_some() || cfg.attention_temperature().is_some() || self.has_modifier_with_positions(input);
        let positions = input.call_positions(OP, tokens, t_kv, axes, is_used)?;
        let length = positions.as_ref().map_or(0, CallPositions::length);
        if let Some(context_length) = cfg.context_length()
            && length > context_length
        {
            bail!("[{OP}] position {} is not below the context length {context_length}", length - 1)
        }
        Ok(positions)
    }

    /// Checks the inputs of the keys and values of cross-attention, with a batch size of `b` if there are queries.
    /// Returns clones of each other if the caller's are one tensor.
    pub(super) fn check_key_value(
        &self,
        b: Option<usize>,
        expected: &ExpectedInput,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<KeyValueInputs> {
        let cfg = &self.config;
        let is_one_tensor = keys.id() == values.id();
        if cfg.kv_sharing() == KvSharing::KeysAsValues && !is_one_tensor {
            bail!("[{OP}] values are the keys' projection, expected one tensor as the input of both")
        }
        let keys = expected.other("keys", keys, cfg.kdim())?;
        let values = expected.other("values", values, cfg.vdim())?;
        check_keys_and_values(OP, b, &keys, &values)?;
        Ok(KeyValueInputs { values: if is_one_tensor { keys.clone() } else { values }, keys })
    }

    /// Checks that `memory` was projected by this layer, or by one whose keys it may read, and has one sequence or the
    /// queries' batch.
    fn check_projected_memory(&self, input: &AttentionInput, memory: &ProjectedMemory, b: usize) -> Result<()> {
        let cfg = &self.config;
        if self.rotary.is_some() {
            for (name, is_given) in
                [("key positions", input.key_positions.is_some()), ("packed sequences", input.packed.is_some())]
            {
                if is_given {
                    bail!(
                        "[{OP}] {name} were given with a memory, whose keys have the positions 0..T_kv; expected keys \
                         and values"
                    )
                }
            }
        }
        let batched = input.queries.rank() == 3;
        if memory.batched != batched {
            let name = |is_batch| if is_batch { "a batch" } else { "one sequence without a batch" };
            bail!("[{OP}] the memory is of {}, expected {} as the queries", name(memory.batched), name(batched))
        }
        let found = memory.batch_size();
        if found != b && found != 1 {
            let hint = match b.checked_rem(found) {
                Some(0) if b > 0 => format!("call memory.repeat({}) for the beams of each sequence", b / found),
                _ => "call memory.reorder with a sequence of the memory for each of the input".to_string(),
            };
            bail!("[{OP}] the memory has batch {found}, the input {b}: {hint}")
        }
        let rows = memory.t_kv + cfg.appended_keys();
        self.check_projected_tensor(
            "the memory's keys",
            &memory.k,
            &[found, cfg.num_kv_heads(), rows, cfg.head_dim()],
        )?;
        self.check_projected_tensor(
            "the memory's values",
            &memory.v,
            &[found, cfg.num_kv_heads(), rows, cfg.value_head_dim()],
        )
    }

    fn check_projected_tensor(&self, name: &str, tensor: &Tensor, sizes: &[usize]) -> Result<()> {
        let found = Expect::many(OP, name, tensor).sizes(sizes)?;
        found.dtype(self.projections.dtype, "the weights'")?.same_device("the weights", &self.projections.device)?;
        Ok(())
    }

    /// Checks that `positions`, including those in a cache, do not exceed the context length.
    pub(super) fn check_context(&self, positions: usize) -> Result<()> {
        if let Some(context_length) = self.config.context_length()
            && positions > context_length
        {
            bail!("[{OP}] {positions} positions are more than the context length {context_length}")
        }
        Ok(())
    }

    /// Checks that the projections of `b` sequences of `t` queries or keys can be addressed. `what` names these in the
    /// error.
    pub(super) fn check_addressable(&self, b: usize, t: usize, what: fmt::Arguments) -> Result<()> {
        let cfg = &self.config;
        let width = cfg.num_heads() * cfg.head_dim() + cfg.num_kv_heads() * (cfg.head_dim() + cfg.value_head_dim());
        if !is_addressable(&[b, t, width]) {
            bail!("[{OP}] {what} are too large to address")
        }
        Ok(())
    }
}
