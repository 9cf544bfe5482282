//! What the inputs of a call have to be like, and the positions of its queries and keys.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::input::KeysFrom;
use super::{AttentionInput, MultiHeadAttention, OP};
use crate::cache::NewTokens;
use crate::config::KvSource;
use crate::position::{Positions, RopeConfig};
use crate::sdpa::PackedSequences;
use candle_attention_modules::base::{Dim, Expect, check_keys_and_values, is_addressable};

pub(super) const NO_KEYS: &str =
    "the layer has no keys and values of its own, expected an earlier layer's, `with_shared_cache` or `with_memory`";

/// What the inputs of a layer have to be like.
#[derive(Clone, Copy)]
pub(super) struct Expected<'a> {
    pub op: &'static str,
    pub width: usize,
    pub batched: bool,
    pub dtype: DType,
    pub device: &'a Device,
}

impl Expected<'_> {
    /// An input as (B, T, width), after its shape, dtype and device were checked.
    pub fn check(&self, what: &str, xs: &Tensor) -> Result<Tensor> {
        let &Self { op, width, batched, dtype, device } = self;
        let (one, batch) = ([Dim::Any("T"), Dim::Is(width)], [Dim::Any("B"), Dim::Any("T"), Dim::Is(width)]);
        let xs_in = Expect::many(op, what, xs);
        let xs_in = match (batched, what) {
            (true, _) => xs_in.shape(&batch)?,
            (false, "queries") => xs_in.shape_of(&[&batch, &one])?,
            // Those of one sequence, as the queries are.
            (false, _) => xs_in.shape(&one)?,
        };
        xs_in.dtype(dtype, "the weights'")?.beside("the weights", device)?;
        if batched { Ok(xs.clone()) } else { xs.unsqueeze(0) }
    }

    /// The residual of a call, as (B, T, width), if it has one.
    pub fn check_residual(&self, input: &AttentionInput) -> Result<Option<Tensor>> {
        let Some(residual) = input.residual else { return Ok(None) };
        let of_output = [&input.queries.dims()[..input.queries.rank() - 1], &[self.width]].concat();
        Expect::many(self.op, "residuals", residual).sizes(&of_output)?;
        self.check("residuals", residual).map(Some)
    }
}

impl AttentionInput<'_> {
    /// That keys come from one place.
    pub(super) fn check_keys(&self, op: &str) -> Result<()> {
        match self.conflict {
            Some([one, other]) => bail!("[{op}] both {one} and {other} were given, expected one of the two"),
            None => Ok(()),
        }
    }

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
        let is_of_both = |s| sequences.queries(s) == sequences.keys(s);
        if let Some(s) = (0..sequences.len()).find(|&s| !self.is_cross() && !is_of_both(s)) {
            let (queries, keys) = (sequences.queries(s), sequences.keys(s));
            bail!(
                "[{op}] packed sequence {s} has queries {queries:?} and keys {keys:?}, expected the same in self-attention"
            )
        }
        Ok(())
    }
}

/// The inputs of a call, checked.
pub(super) struct Inputs {
    /// (B, T_q, embed_dim).
    pub queries: Tensor,
    /// What keys (B, T_kv, key_size) and values (B, T_kv, value_size) are projected from: clones of the queries or of
    /// each other where the caller's are one tensor. `None` for a memory and for an earlier layer's.
    pub key_value: Option<[Tensor; 2]>,
    /// The tokens that the call adds to its cache, if it has one.
    pub new_tokens: Option<NewTokens>,
    /// (B, T_q, out_dim).
    pub residual: Option<Tensor>,
    pub b: usize,
    pub t_q: usize,
    pub t_kv: usize,
}

impl MultiHeadAttention {
    pub(super) fn check(&self, input: &AttentionInput) -> Result<Inputs> {
        let cfg = &self.config;
        input.check_keys(OP)?;
        let batched = input.queries.rank() == 3;
        let queries = self.expected(cfg.embed_dim(), batched).check("queries", input.queries)?;
        let (b, t_q, _) = queries.dims3()?;
        let residual = self.expected(cfg.out_dim(), batched).check_residual(input)?;
        let is_of_earlier_layer = cfg.kv_source() == KvSource::EarlierLayer;
        let (key_value, t_kv, key_dims) = match &input.keys {
            KeysFrom::EarlierLayer(_) if !is_of_earlier_layer => {
                bail!("[{OP}] the cache of an earlier layer was given, but the layer has keys of its own")
            }
            KeysFrom::EarlierLayer(cache) => (None, cache.len(), input.queries.dims()),
            KeysFrom::Memory(memory) => {
                self.check_memory(input, memory, b)?;
                (None, memory.t_kv, memory.k.dims())
            }
            _ if is_of_earlier_layer => bail!("[{OP}] {NO_KEYS}"),
            &KeysFrom::Cross { keys, values } => {
                let mut key_value = self.check_key_value(Some(b), batched, [keys, values])?;
                for (own, given) in key_value.iter_mut().zip([keys, values]) {
                    if given.id() == input.queries.id() {
                        *own = queries.clone();
                    }
                }
                let t_kv = key_value[0].dim(1)?;
                (Some(key_value), t_kv, keys.dims())
            }
            KeysFrom::Own | KeysFrom::Cache(_) => {
                if [cfg.key_size(), cfg.value_size()] != [cfg.embed_dim(); 2] {
                    bail!(
                        "[{OP}] queries are {} wide, the inputs of keys {} and of values {}; expected a \
                         call `with_key_value` or `with_memory` (cross-attention)",
                        cfg.embed_dim(),
                        cfg.key_size(),
                        cfg.value_size()
                    )
                }
                (Some([queries.clone(), queries.clone()]), t_q, input.queries.dims())
            }
        };
        let what = || format!("queries {:?} and keys {key_dims:?}", input.queries.dims());
        self.check_lengths(b, t_q.max(t_kv), input.longest(t_q, t_kv), what)?;
        input.check_packed(OP, &queries, t_kv)?;
        if cfg.appended_keys() > 0 && (input.packed.is_some() || input.is_cached()) {
            bail!("[{OP}] the layer appends keys to those of a call, which neither a cache nor packed sequences take")
        }
        if input.packed.is_some() && matches!(input.keys, KeysFrom::Memory(_)) && self.rotary.is_some() {
            bail!(
                "[{OP}] packed sequences were given with a memory, whose keys stand at 0..T_kv; expected keys and \
                 values"
            )
        }
        if cfg.relative_bias().is_some() && self.relative_bias.is_none() {
            bail!("[{OP}] the config has a relative bias, expected the stack's one in `with_relative_bias`")
        }
        let new_tokens = input.new_tokens(OP, (b, t_q), &self.mask)?;
        new_tokens.iter().try_for_each(|new_tokens| self.check_context(new_tokens.longest()))?;
        Ok(Inputs { queries, key_value, new_tokens, residual, b, t_q, t_kv })
    }

    /// The inputs of cross-attention's keys and values, for `b` sequences of queries if these are there already: clones
    /// of each other where the caller's are one tensor.
    pub(super) fn check_key_value(
        &self,
        b: Option<usize>,
        batched: bool,
        [keys, values]: [&Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        let (cfg, is_one) = (&self.config, keys.id() == values.id());
        if cfg.kv_source() == KvSource::KeysAsValues && !is_one {
            bail!("[{OP}] values are the keys' projection, expected one tensor as the input of both")
        }
        let k_in = self.expected(cfg.key_size(), batched).check("keys", keys)?;
        let v_in = self.expected(cfg.value_size(), batched).check("values", values)?;
        check_keys_and_values(OP, b, &k_in, &v_in)?;
        Ok(if is_one { [k_in.clone(), k_in] } else { [k_in, v_in] })
    }

    /// That so many positions, those of calls before included, are within the context length.
    fn check_context(&self, positions: usize) -> Result<()> {
        match self.config.context_length().filter(|&most| positions > most) {
            Some(most) => bail!("[{OP}] {positions} positions are more than the context length {most}"),
            None => Ok(()),
        }
    }

    /// Of `b` rows with `t` queries or keys, of which a sequence has at most `longest`; `what` they are is for an
    /// error.
    pub(super) fn check_lengths(&self, b: usize, t: usize, longest: usize, what: impl Fn() -> String) -> Result<()> {
        let cfg = &self.config;
        self.check_context(longest)?;
        let (h, h_kv, d, d_v) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim());
        if !is_addressable(&[b, t, h * d + h_kv * (d + d_v)]) {
            bail!("[{OP}] {} are too large to address", what())
        }
        Ok(())
    }
}

/// The positions of a call's tokens.
pub(super) struct CallPositions {
    pub queries: Positions,
    /// Those of the call's own keys; `None` where they are the queries'.
    pub keys: Option<Positions>,
    /// Those of the calls before too; `None` where there are none.
    pub cached: Option<Positions>,
    /// Those by which queries and keys are rotated, where these are on several axes: axis by axis, row by row.
    pub axes: Option<Vec<f32>>,
}

impl CallPositions {
    /// Those of all keys that queries may see.
    pub fn all_keys(&self) -> &Positions {
        self.cached.as_ref().or(self.keys.as_ref()).unwrap_or(&self.queries)
    }
}

impl MultiHeadAttention {
    /// `None` for a layer that has no use for positions; their shape is checked all the same.
    pub(super) fn positions(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Option<CallPositions>> {
        let Inputs { b, t_q, t_kv, .. } = *inputs;
        let new_tokens = inputs.new_tokens.as_ref();
        let keys = input.key_positions.map(|given| Positions::from_tensor("key positions", given, b, t_kv));
        let keys = keys.transpose()?;
        if keys.is_some() && !input.is_cross() {
            bail!("[{OP}] key positions are given, but the keys are the queries")
        }
        let axes = self.axis_positions(input, inputs)?;
        let terms_take_positions = self.terms().any(|term| term.takes_positions());
        if self.rotary.is_none() && self.config.query_scaling().is_none() && !terms_take_positions {
            if new_tokens.is_none() {
                input.given_positions((b, t_q))?;
            }
            return Ok(None);
        }
        let queries = input.query_positions((b, t_q), new_tokens)?;
        let or_default = || input.default_positions(PackedSequences::keys, t_kv);
        let keys = input.is_cross().then(|| keys.map_or_else(or_default, Ok)).transpose()?;
        let length = keys.iter().map(|keys| keys.length).fold(queries.length, usize::max);
        if let Some(context_length) = self.config.context_length().filter(|&most| length > most) {
            bail!("[{OP}] position {} is not below the context length {context_length}", length - 1)
        }
        let cached = if terms_take_positions { input.cached_positions(new_tokens)? } else { None };
        Ok(Some(CallPositions { queries, keys, cached, axes }))
    }

    fn axis_positions(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Option<Vec<f32>>> {
        match (self.config.rope().and_then(RopeConfig::axes), input.axis_positions) {
            (None, None) => Ok(None),
            (None, Some(_)) => {
                bail!("[{OP}] axis positions were given, but the config's rope has no axes")
            }
            (Some(_), Some(_)) if input.is_cross() => {
                bail!("[{OP}] axis positions were given beside keys, expected self-attention")
            }
            (Some(axes), Some(positions)) => axes.positions(positions, inputs.b, inputs.t_q).map(Some),
            (Some(axes), None) if axes.is_axial() => bail!(
                "[{OP}] rotary positions are on {} axes, expected a call `with_axis_positions`",
                axes.sections().len()
            ),
            (Some(_), None) => Ok(None),
        }
    }
}
