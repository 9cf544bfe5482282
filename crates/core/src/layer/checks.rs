//! What the inputs of a call have to be like.

use std::fmt;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::input::{CallPositions, KeysFrom};
use super::{AttentionInput, MultiHeadAttention, OP, warnings};
use crate::cache::NewTokens;
use crate::config::KvSharing;
use crate::position::RopeConfig;
use crate::sdpa::PackedSequences;
use candle_attention_modules::base::{Dim, Expect, check_keys_and_values, is_addressable};

pub(super) const NO_KEYS: &str =
    "the layer has no keys and values of its own, expected an earlier layer's, `with_shared_cache` or `with_memory`";

/// What the inputs of a call have to be like.
#[derive(Clone, Copy)]
pub(super) struct Expected<'a> {
    pub op: &'static str,
    pub batched: bool,
    pub dtype: DType,
    pub device: &'a Device,
}

impl Expected<'_> {
    /// The queries of a call as (B, T_q, width), and what is added to its output as (B, T_q, out_width), if anything.
    pub fn queries(&self, input: &AttentionInput, width: usize, out_width: usize) -> Result<(Tensor, Option<Tensor>)> {
        let queries = self.check("queries", input.queries, width)?;
        let Some(residual) = input.residual else { return Ok((queries, None)) };
        let of_output = [&input.queries.dims()[..input.queries.rank() - 1], &[out_width]].concat();
        Expect::many(self.op, "residuals", residual).sizes(&of_output)?;
        Ok((queries, Some(self.check("residuals", residual, out_width)?)))
    }

    /// An input as (B, T, width), after its shape, dtype and device were checked.
    pub fn check(&self, what: &str, xs: &Tensor, width: usize) -> Result<Tensor> {
        let &Self { op, batched, dtype, device } = self;
        let (one, batch) = ([Dim::Any("T"), Dim::Is(width)], [Dim::Any("B"), Dim::Any("T"), Dim::Is(width)]);
        let xs_in = Expect::many(op, what, xs);
        let xs_in = match (batched, what) {
            (true, _) => xs_in.shape(&batch)?,
            (false, "queries") => xs_in.shape_of(&[&batch, &one])?,
            // Those of one sequence, as the queries are.
            (false, _) => xs_in.shape(&one)?,
        };
        xs_in.dtype(dtype, "the weights'")?.same_device("the weights", device)?;
        if batched { Ok(xs.clone()) } else { xs.unsqueeze(0) }
    }
}

impl AttentionInput<'_> {
    /// That packed sequences fit the queries (1, total_q, ..) and `t_kv` keys, and that nothing else is asked for that
    /// has no shape for them.
    pub(super) fn check_packed(&self, op: &str, queries: &Tensor, t_kv: usize) -> Result<()> {
        let Some(sequences) = self.packed else { return Ok(()) };
        Expect::many(op, "packed queries", self.queries).shape(&["total_q", "E"].map(Dim::Any))?;
        if self.is_cached() {
            bail!("[{op}] packed sequences were given with a cache, expected one of the two")
        }
        let (t_q, all_queries, all_keys) = (queries.dim(1)?, sequences.total_queries(), sequences.total_keys());
        if [all_queries, all_keys] != [t_q, t_kv] {
            bail!(
                "[{op}] the packed sequences have {all_queries} queries and {all_keys} keys, expected the {t_q} and \
                 {t_kv} of the inputs"
            )
        }
        let mut parts = sequences.parts().enumerate().filter(|_| !self.is_cross());
        if let Some((s, [queries, keys])) = parts.find(|(_, [queries, keys])| queries != keys) {
            bail!(
                "[{op}] packed sequence {s} has queries {queries:?} and keys {keys:?}, expected the same in self-attention"
            )
        }
        Ok(())
    }
}

/// The inputs of a call, checked.
pub(super) struct Inputs<'a> {
    /// (B, T_q, embed_dim).
    pub queries: Tensor,
    /// What keys (B, T_kv, kdim) and values (B, T_kv, vdim) are projected from: clones of the queries or of
    /// each other where the caller's are one tensor. `None` for a memory and for an earlier layer's.
    pub key_value: Option<[Tensor; 2]>,
    pub keys_from: KeysFrom<'a>,
    pub t_kv: usize,
    pub tokens: NewTokens,
    /// Where the layer has a use for them.
    pub positions: Option<CallPositions>,
    /// (B, T_q, out_dim).
    pub residual: Option<Tensor>,
}

impl MultiHeadAttention {
    pub(super) fn check<'i>(&self, input: &'i AttentionInput) -> Result<Inputs<'i>> {
        let cfg = &self.config;
        let (keys_from, expected) = (input.keys_from(OP)?, self.expected(input.queries.rank() == 3));
        let (queries, residual) = expected.queries(input, cfg.embed_dim(), cfg.out_dim())?;
        let (b, t_q, _) = queries.dims3()?;
        let is_of_earlier_layer = cfg.kv_sharing() == KvSharing::EarlierLayer;
        let (key_value, t_kv) = match keys_from {
            KeysFrom::EarlierLayer(_) if !is_of_earlier_layer => {
                bail!("[{OP}] the cache of an earlier layer was given, but the layer has keys of its own")
            }
            KeysFrom::EarlierLayer(cache) => (None, cache.len()),
            KeysFrom::Memory(memory) => {
                self.check_memory(input, memory, b)?;
                (None, memory.t_kv)
            }
            _ if is_of_earlier_layer => bail!("[{OP}] {NO_KEYS}"),
            KeysFrom::Cross([keys, values]) => {
                let mut key_value = self.check_key_value(Some(b), &expected, [keys, values])?;
                for (own, given) in key_value.iter_mut().zip([keys, values]) {
                    if given.id() == input.queries.id() {
                        *own = queries.clone();
                    }
                }
                let t_kv = key_value[0].dim(1)?;
                (Some(key_value), t_kv)
            }
            KeysFrom::Own | KeysFrom::Cache(_) => {
                if [cfg.kdim(), cfg.vdim()] != [cfg.embed_dim(); 2] {
                    bail!(
                        "[{OP}] queries are {} wide, the inputs of keys {} and of values {}; expected a \
                         call `with_key_value` or `with_memory` (cross-attention)",
                        cfg.embed_dim(),
                        cfg.kdim(),
                        cfg.vdim()
                    )
                }
                (Some([queries.clone(), queries.clone()]), t_q)
            }
        };
        let is_cross = match keys_from {
            KeysFrom::Cross([keys, _]) => keys.id() != input.queries.id(),
            KeysFrom::Memory(_) => !is_of_earlier_layer,
            KeysFrom::Own | KeysFrom::Cache(_) | KeysFrom::EarlierLayer(_) => false,
        };
        if is_cross && self.mask.counts_from_queries() {
            warnings::about_cross_attention();
        }
        let what = format_args!("queries {:?} and {t_kv} keys", input.queries.dims());
        self.check_addressable(b, t_q.max(t_kv), what)?;
        input.check_packed(OP, &queries, t_kv)?;
        if cfg.appended_keys() > 0 && (input.packed.is_some() || input.is_cached()) {
            bail!("[{OP}] the layer appends keys to those of a call, which neither a cache nor packed sequences take")
        }
        if cfg.relative_bias().is_some() && self.relative_bias.is_none() {
            bail!("[{OP}] the config has a relative bias, expected the stack's one in `with_relative_bias`")
        }
        let tokens = input.tokens(OP, (b, t_q), &self.mask)?;
        let longest = input.packed.map_or([t_q, t_kv], PackedSequences::longest);
        self.check_context(longest.into_iter().fold(tokens.longest(), usize::max))?;
        let axes = cfg.rope().and_then(RopeConfig::axes);
        let takes_positions =
            self.rotary.is_some() || cfg.attention_temperature().is_some() || self.terms_take_positions();
        let positions = input.positions(OP, &tokens, t_kv, axes, takes_positions)?;
        let all = positions.iter().flat_map(|at| [&at.queries].into_iter().chain(&at.keys));
        let length = all.map(|positions| positions.length).max().unwrap_or(0);
        if let Some(context_length) = cfg.context_length().filter(|&most| length > most) {
            bail!("[{OP}] position {} is not below the context length {context_length}", length - 1)
        }
        Ok(Inputs { queries, key_value, keys_from, t_kv, tokens, positions, residual })
    }

    /// The inputs of cross-attention's keys and values, for `b` sequences of queries if these are there already: clones
    /// of each other where the caller's are one tensor.
    pub(super) fn check_key_value(
        &self,
        b: Option<usize>,
        expected: &Expected,
        [keys, values]: [&Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        let (cfg, is_one) = (&self.config, keys.id() == values.id());
        if cfg.kv_sharing() == KvSharing::KeysAsValues && !is_one {
            bail!("[{OP}] values are the keys' projection, expected one tensor as the input of both")
        }
        let k_in = expected.check("keys", keys, cfg.kdim())?;
        let v_in = expected.check("values", values, cfg.vdim())?;
        check_keys_and_values(OP, b, &k_in, &v_in)?;
        Ok(if is_one { [k_in.clone(), k_in] } else { [k_in, v_in] })
    }

    /// That so many positions, those of calls before included, are within the context length.
    pub(super) fn check_context(&self, positions: usize) -> Result<()> {
        match self.config.context_length().filter(|&most| positions > most) {
            Some(most) => bail!("[{OP}] {positions} positions are more than the context length {most}"),
            None => Ok(()),
        }
    }

    /// Of `b` rows with `t` queries or keys; `what` they are is for an error.
    pub(super) fn check_addressable(&self, b: usize, t: usize, what: fmt::Arguments) -> Result<()> {
        let cfg = &self.config;
        let (h, h_kv, d, d_v) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim());
        if !is_addressable(&[b, t, h * d + h_kv * (d + d_v)]) {
            bail!("[{OP}] {what} are too large to address")
        }
        Ok(())
    }
}
