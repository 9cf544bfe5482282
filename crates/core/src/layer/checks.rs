//! The inputs of a call, checked.

use candle_core::{Result, Tensor, bail};

use super::input::GivenSum;
use super::{AttentionInput, MultiHeadAttention, OP, ProjectedMemory};
use crate::base::{check_keys_and_values, is_addressable};
use crate::cache::{AttentionCache, NewTokens};
use crate::config::KvSource;
use crate::position::Alibi;

pub(super) const NO_KEYS: &str =
    "the layer has no keys and values of its own, expected an earlier layer's, `with_shared_cache` or `with_memory`";

/// The inputs of a call, checked.
pub(super) struct Inputs<'a> {
    /// (B, T_q, embed_dim).
    pub queries: Tensor,
    pub keys: Keys<'a>,
    /// The tokens that the call adds to its cache, if it has one.
    pub new_tokens: Option<NewTokens>,
    /// (B, T_q, out_dim).
    pub residual: Option<Tensor>,
    pub sum: Option<GivenSum<'a>>,
    pub b: usize,
    pub t_q: usize,
    pub t_kv: usize,
}

/// What keys and values are made from.
pub(super) enum Keys<'a> {
    /// (B, T_kv, key_size) and (B, T_kv, value_size): clones of the queries or of each other where the caller's are one
    /// tensor.
    Inputs {
        keys: Tensor,
        values: Tensor,
    },
    Memory(&'a ProjectedMemory),
    /// What an earlier layer's call of the same tokens left.
    Earlier(&'a AttentionCache),
}

impl MultiHeadAttention {
    pub(super) fn check<'a>(&self, input: &AttentionInput<'a>) -> Result<Inputs<'a>> {
        let cfg = &self.config;
        let batched = input.queries.rank() == 3;
        let queries = self.expected(cfg.embed_dim(), batched).check("queries", input.queries)?;
        let (b, t_q, _) = queries.dims3()?;
        let residual = self.expected(cfg.embed_dim(), batched).check_residual(input, cfg.out_dim())?;
        let (keys, t_kv, key_dims) = match (input.memory, input.shared_cache) {
            (None, Some(cache)) => {
                if cfg.kv_source() != KvSource::EarlierLayer {
                    bail!(
                        "[multi_head_attention] the cache of an earlier layer was given, but the layer has keys of \
                         its own"
                    )
                }
                (Keys::Earlier(cache), cache.len(), input.queries.dims())
            }
            (None, None) if cfg.kv_source() == KvSource::EarlierLayer => bail!("[multi_head_attention] {NO_KEYS}"),
            (Some(memory), _) => {
                self.check_memory(input, memory, b)?;
                (Keys::Memory(memory), memory.t_kv, memory.k.dims())
            }
            (None, None) => {
                let widths = [cfg.key_size(), cfg.value_size()];
                if input.key_value.is_none() && widths != [cfg.embed_dim(); 2] {
                    bail!(
                        "[multi_head_attention] queries are {} wide, the inputs of keys {} and of values {}; expected a \
                         call `with_key_value` or `with_memory` (cross-attention)",
                        cfg.embed_dim(),
                        widths[0],
                        widths[1]
                    )
                }
                let (given_keys, given_values) = input.key_value.unwrap_or((input.queries, input.queries));
                self.check_one_input(given_keys, given_values)?;
                let mut keys = self.expected(cfg.key_size(), batched).check("keys", given_keys)?;
                let mut values = self.expected(cfg.value_size(), batched).check("values", given_values)?;
                check_keys_and_values(OP, Some(b), &keys, &values)?;
                if given_keys.id() == input.queries.id() {
                    keys = queries.clone();
                }
                if given_values.id() == given_keys.id() {
                    values = keys.clone();
                }
                let t_kv = keys.dim(1)?;
                (Keys::Inputs { keys, values }, t_kv, given_keys.dims())
            }
        };
        let what = || format!("queries {:?} and keys {key_dims:?}", input.queries.dims());
        self.check_lengths(b, t_q.max(t_kv), input.longest(t_q, t_kv), what)?;
        input.check_packed(OP, &queries, t_kv)?;
        if input.packed.is_some() {
            self.check_takes_packed(input)?;
        }
        if cfg.relative_bias().is_some() && self.relative_bias.is_none() {
            bail!(
                "[multi_head_attention] the config has a relative bias, expected the stack's one in \
                 `with_relative_bias`"
            )
        }
        self.check_content(input)?;
        let new_tokens = input.new_tokens(OP, (b, t_q), &self.mask)?;
        if let Some(new_tokens) = &new_tokens {
            self.check_cached(new_tokens)?;
        }
        Ok(Inputs { queries, keys, new_tokens, residual, sum: input.sum, b, t_q, t_kv })
    }

    /// That the layer has no part, and the call no memory, that knows of one sequence only.
    fn check_takes_packed(&self, input: &AttentionInput) -> Result<()> {
        if self.relative_bias.is_some() && (input.positions.is_some() || input.key_positions.is_some()) {
            bail!(
                "[multi_head_attention] positions were given beside packed sequences, expected none for a relative \
                 bias: each counts from 0"
            )
        }
        let has_falcons = matches!(self.alibi, Some(Alibi::Falcon(_)));
        let part = match (has_falcons, self.config.appended_keys()) {
            (true, _) => "a bias (T_q, T_kv) that follows from positions",
            (false, 1..) => "keys that it appends",
            (false, 0) if input.memory.is_some() && self.rotary.is_some() => {
                bail!(
                    "[multi_head_attention] packed sequences were given with a memory, whose keys stand at 0..T_kv; \
                     expected keys and values"
                )
            }
            (false, 0) => return Ok(()),
        };
        bail!("[multi_head_attention] the layer has {part}, which packed sequences do not take")
    }

    /// That relative positions by content have the tokens that they are for.
    fn check_content(&self, input: &AttentionInput) -> Result<()> {
        let others = [
            ("keys of others", input.is_cross()),
            ("earlier tokens", input.cache.is_some()),
            ("packed sequences", input.packed.is_some()),
            ("positions", input.positions.is_some()),
            ("other functions", input.function.is_some()),
        ];
        match others.into_iter().find(|&(_, given)| given && self.content.is_some()) {
            Some((what, _)) => bail!(
                "[multi_head_attention] {what} were given, but relative positions by content are between the tokens \
                 of a call"
            ),
            None => Ok(()),
        }
    }

    fn check_cached(&self, new_tokens: &NewTokens) -> Result<()> {
        if self.bias_kv.is_some() {
            bail!(
                "[multi_head_attention] the layer has a learned key (bias_kv), which stands behind the last of a \
                 call, not in a cache"
            )
        }
        if self.config.add_zero_attn() {
            bail!(
                "[multi_head_attention] the layer has a key of zeros (add_zero_attn), which stands behind the last \
                 of a call, not in a cache"
            )
        }
        if let Some(context_length) = self.config.context_length().filter(|&most| new_tokens.longest() > most) {
            bail!(
                "[attention_cache] {} positions with those of the calls before are more than the context length \
                 {context_length}",
                new_tokens.longest()
            )
        }
        Ok(())
    }

    /// Of `b` rows with `t` queries or keys, of which a sequence has at most `longest`; `what` they are is for an
    /// error.
    pub(super) fn check_lengths(&self, b: usize, t: usize, longest: usize, what: impl Fn() -> String) -> Result<()> {
        let cfg = &self.config;
        if let Some(context_length) = cfg.context_length().filter(|&most| longest > most) {
            bail!("[multi_head_attention] {longest} positions are more than the context length {context_length}")
        }
        let (h, h_kv, d, d_v) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim());
        if !is_addressable(&[b, t, h * d + h_kv * (d + d_v)]) {
            bail!("[multi_head_attention] {} are too large to address", what())
        }
        Ok(())
    }
}
