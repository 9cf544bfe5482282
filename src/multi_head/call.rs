//! One call of a layer: its inputs checked, projected and split into heads.

use candle_core::{Result, Tensor, bail};

use super::memory::CallKeys;
use super::modules::ProjectionPlace;
use super::project::Inputs;
use super::{AttentionInput, Expected, MultiHeadAttention, ProjectedMemory};
use crate::cache::{NewTokens, StagedAppend, Values};
use crate::position::{Alibi, Positions};
use crate::sdpa::accumulation_dtype;
use crate::size::is_addressable;
use crate::{
    AttentionMask, AttentionOutput, OutputOrder, SdpaOptions, scaled_dot_product_attention,
    scaled_dot_product_attention_with_weights,
};

const OP: &str = "multi_head_attention";

/// Queries, keys and values of one call, ready to attend.
pub(super) struct Call<'a> {
    /// (B, H, T_q, D); like k and v of an input, a view of (B, T, ..).
    pub q: Tensor,
    /// (B, H_kv, T_kv, D).
    pub k: Tensor,
    /// (B, H_kv, T_kv, D_v).
    pub v: Tensor,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
    /// The keys and values of this call beside those of the calls before.
    staged: Option<StagedAppend<'a>>,
    /// Whether the input had a batch dimension.
    pub batched: bool,
}

impl<'a> Call<'a> {
    pub(super) fn new(layer: &MultiHeadAttention, mut input: AttentionInput<'a>) -> Result<Self> {
        let cfg = &layer.config;
        let batched = input.queries.rank() == 3;
        let q_in = layer.checked("queries", input.queries, cfg.embed_dim(), batched)?;
        let (b, t_q, _) = q_in.dims3()?;
        let keys = layer.call_keys(&input, (b, batched))?;
        let t_kv = keys.t_kv();
        let what = || format!("queries {:?} and keys {:?}", input.queries.dims(), keys.dims());
        layer.check_lengths((b, t_q.max(t_kv)), what)?;
        if cfg.relative_bias().is_some() && layer.relative_bias.is_none() {
            bail!(
                "[multi_head_attention] the config has a relative bias, expected the stack's one in `with_relative_bias`"
            )
        }
        let new_tokens = layer.new_tokens(&input, (b, t_q))?;
        let positions = layer.positions(&input, (b, t_q, t_kv), new_tokens.as_ref())?;

        let at = |positions: &Positions| layer.rotary.as_ref().map(|rotary| rotary.at(positions));
        let at_queries = positions.as_ref().and_then(|positions| at(&positions.queries));
        let at_keys = positions.as_ref().and_then(|positions| positions.keys.as_ref()).and_then(at);
        let at_keys = at_keys.as_ref().or(at_queries.as_ref());
        let (q, k, v) = match keys {
            CallKeys::Inputs { k_in, v_in, one, .. } => {
                let inputs = Inputs { queries: q_in, keys: k_in, values: v_in, one };
                let [q, k, v] = layer.projections.project_inputs(&inputs)?;
                let (k, v) = layer.key_value_heads(k, v, at_keys)?;
                (q, k, v)
            }
            CallKeys::Memory(ProjectedMemory { k, v, .. }) => {
                (layer.projections.project(ProjectionPlace::Query, &q_in)?, k.clone(), v.clone())
            }
        };
        let q = layer.query_heads(q, at_queries.as_ref())?;
        let mut mask = match input.mask {
            Some(mask) => layer.mask.lifted_by(mask).and(mask),
            None => layer.mask.clone(),
        };
        if layer.bias_kv.is_some() {
            let dims = (b, cfg.num_heads(), t_q, t_kv);
            mask = mask.with_appended_keys(1, dims, accumulation_dtype(q.dtype()), q.device())?;
        }
        if let Some(positions) = &positions {
            mask = layer.with_position_biases(mask, positions)?;
        }

        let mut options = SdpaOptions::default()
            .with_dropout(cfg.dropout(), input.train)
            .with_backend(input.backend)
            .with_output_order(OutputOrder::Bthd);
        options.scale = cfg.scale();
        options.softcap = cfg.softcap();
        options.sinks = layer.sinks.clone();
        if let Some(Alibi::Distances(slopes)) = &layer.alibi {
            options.alibi_slopes = Some(slopes.clone());
        }
        options.dropout_seed = input.dropout_seed.cloned();
        let staged = match (input.cache.take(), new_tokens) {
            (Some(cache), Some(new_tokens)) => Some(cache.stage(new_tokens, &k, Values::Own(&v))?),
            _ => None,
        };
        Ok(Self { q, k, v, mask, options, staged, batched })
    }

    /// The context (B, H, T_q, D_v), in the order of the options.
    pub(super) fn attend(&self) -> Result<Tensor> {
        match &self.staged {
            Some(staged) => staged.attend(&self.q, &self.mask, &self.options),
            None => scaled_dot_product_attention(&self.q, &self.k, &self.v, &self.mask, &self.options),
        }
    }

    /// [`attend`](Self::attend), and the weights (B, H, T_q, T_kv).
    pub(super) fn attend_with_weights(&self) -> Result<AttentionOutput> {
        match &self.staged {
            Some(staged) => staged.attend_with_weights(&self.q, &self.mask, &self.options),
            None => scaled_dot_product_attention_with_weights(&self.q, &self.k, &self.v, &self.mask, &self.options),
        }
    }

    /// Keeps the call's keys and values, if there is a cache: the last thing that is done.
    pub(super) fn commit(self) -> Result<()> {
        self.staged.map_or(Ok(()), StagedAppend::commit)
    }
}

impl MultiHeadAttention {
    /// The tokens that a call of `dims` (B, T) adds to its cache, if it has one.
    fn new_tokens(&self, input: &AttentionInput, dims: (usize, usize)) -> Result<Option<NewTokens>> {
        let Some(new_tokens) = input.new_tokens(OP, dims)? else { return Ok(None) };
        if self.bias_kv.is_some() {
            bail!(
                "[multi_head_attention] the layer has a learned key (bias_kv), which stands behind the last of a call, not in a cache"
            )
        }
        if let Some(context_length) = self.config.context_length().filter(|&most| new_tokens.longest() > most) {
            bail!(
                "[attention_cache] {} positions with those of the calls before are more than the context length {context_length}",
                new_tokens.longest()
            )
        }
        Ok(Some(new_tokens))
    }

    /// Of B sequences with T positions of queries or keys; `what` they are is worked out for an error.
    pub(super) fn check_lengths(&self, (b, t): (usize, usize), what: impl Fn() -> String) -> Result<()> {
        let cfg = &self.config;
        if let Some(context_length) = cfg.context_length().filter(|&most| t > most) {
            bail!("[multi_head_attention] {t} positions are more than the context length {context_length}")
        }
        let (h, h_kv, d, d_v) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim());
        if !is_addressable(&[b, t, h * d + h_kv * (d + d_v)]) {
            bail!("[multi_head_attention] {} are too large to address", what())
        }
        Ok(())
    }

    /// An input as (B, T, width), after its shape, dtype and device were checked.
    pub(super) fn checked(&self, what: &str, xs: &Tensor, width: usize, batched: bool) -> Result<Tensor> {
        let (dtype, device) = (self.projections.dtype(), self.projections.device());
        Expected { op: OP, width, batched, dtype, device }.check(what, xs)
    }
}
