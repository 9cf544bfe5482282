//! A forward pass of latent attention.

use candle_core::{Module, Result, Tensor, bail};

use super::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OP};
use crate::cache::{Expand, NewTokens, Values};
use crate::layer::call::{AttentionCall, CallKeys};
use crate::layer::input::Expected;
use crate::position::Positions;
use crate::size::{is_addressable, part};
use crate::{AttentionCache, AttentionInput, AttentionOutput, PackedSequences, Plan};

/// How queries attend to latents. With W_k and W_v for the maps from a latent c to a head's key and value, a score is
/// `q · (W_k c) = (W_kᵀ q) · c`, and a context `Σ w (W_v c) = W_v (Σ w c)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Keys and values of each head are computed from the latents.
    Expanded,
    /// Queries take W_k to themselves and contexts W_v, so that latents are the keys and values of all heads.
    Absorbed,
}

impl Form {
    /// The form that takes fewer multiplications for `t_q` queries and `t_kv` keys.
    pub fn of(cfg: &MultiHeadLatentAttentionConfig, t_q: usize, t_kv: usize) -> Self {
        let widths = [cfg.kv_lora_rank(), cfg.nope_head_dim(), cfg.rope_head_dim(), cfg.value_head_dim()];
        let [rank, nope, rope, value] = widths.map(|width| width as f64);
        let (t_q, t_kv) = (t_q as f64, t_kv as f64);
        // Of one head.
        let between = rank * (nope + value);
        let expanded = t_kv * between + t_q * t_kv * (nope + rope + value);
        let absorbed = t_q * between + t_q * t_kv * (rank + rope + rank);
        if absorbed < expanded { Self::Absorbed } else { Self::Expanded }
    }
}

impl MultiHeadLatentAttention {
    /// Self-attention under the layer's own mask: (B, T, E) gives (B, T, E). Training is [`forward_t`](candle_core::ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// The layer with a mask, a cache, positions, in training: (B, T, E) gives (B, T, E).
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, keys and values of their own, a mask that does not
    /// fit, and a cache that does not take the call's rows.
    pub fn forward_with<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        let (call, form) = self.call(input.into(), None)?;
        let ys = self.output(&call.attend()?, form, call.batched)?;
        call.commit()?;
        Ok(ys)
    }

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q, T_kv)
    /// for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<AttentionOutput> {
        let (call, form) = self.call(input.into(), None)?;
        let AttentionOutput { context, weights } = call.attend_with_weights()?;
        let context = self.output(&context, form, call.batched)?;
        call.commit()?;
        Ok(AttentionOutput { context, weights })
    }

    /// The path that [`forward_with`](Self::forward_with) takes for an input, and why. It costs the input's projections and a
    /// copy of its cache, which stays as it is.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn plan(&self, input: &AttentionInput) -> Result<Plan> {
        let mut cache = input.cache.as_deref().map(AttentionCache::fork).transpose()?;
        self.call(input.with_other_cache(cache.as_mut()), None)?.0.plan()
    }

    /// Everything before attention, in one form in particular or the one that takes less. The context is of values
    /// (B, H, T, D_v) if expanded and of latents (B, H, T, rank) if absorbed.
    pub(super) fn call<'a>(
        &'a self,
        mut input: AttentionInput<'a>,
        form: Option<Form>,
    ) -> Result<(AttentionCall<'a>, Form)> {
        let cfg = &self.config;
        if input.is_cross() {
            bail!("[{OP}] keys and values were given, expected self-attention")
        }
        if input.key_positions.is_some() {
            bail!("[{OP}] key positions are given, but the keys are the queries")
        }
        let batched = input.queries.rank() == 3;
        let (dtype, device) = (self.down.dtype(), self.down.device());
        let xs = Expected { op: OP, width: cfg.embed_dim(), batched, dtype, device }.check("queries", input.queries)?;
        let (b, t, _) = xs.dims3()?;
        input.check_packed(OP, &xs, t)?;
        let new_tokens = input.new_tokens(OP, (b, t))?;
        let positions = positions(&input, b, t, new_tokens.as_ref())?;
        let (h, rank, nope) = (cfg.num_heads(), cfg.kv_lora_rank(), cfg.nope_head_dim());
        if !is_addressable(&[b, t, h * (2 * cfg.head_dim() + cfg.value_head_dim() + rank)]) {
            bail!("[{OP}] queries {:?} are too large to address", input.queries.dims())
        }
        let form = form.unwrap_or_else(|| match &new_tokens {
            Some(new_tokens) => Form::of(cfg, t, new_tokens.longest()),
            None => Form::Expanded,
        });

        let rotation = self.rotary.at(&positions);
        let compressed = self.down.forward(&xs)?;
        let latents = self.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        let keys = part(&compressed, 2, rank..rank + cfg.rope_head_dim())?.unsqueeze(2)?;
        let rows = Tensor::cat(&[&latents, &rotation.apply(&keys)?.squeeze(2)?], 2)?.unsqueeze(1)?;

        let q = self.queries.forward(&xs)?.reshape((b, t, h, cfg.head_dim()))?;
        let own = part(&q, 3, 0..nope)?;
        let own = match form {
            Form::Expanded => own.contiguous()?,
            Form::Absorbed => self.up.absorb(&own)?,
        };
        let q = Tensor::cat(&[own, rotation.apply(&part(&q, 3, nope..cfg.head_dim())?)?], 3)?.transpose(1, 2)?;

        let mask = input.mask_with(&self.mask);
        let options = input.options(cfg.dropout()).with_scale(cfg.scale());
        let keys = match (input.cache.take(), new_tokens, form) {
            (Some(cache), Some(new_tokens), Form::Expanded) => {
                CallKeys::Cached(cache.stage(new_tokens, &rows, Values::KeyColumns(rank))?.expanded_by(&self.up))
            }
            (Some(cache), Some(new_tokens), Form::Absorbed) => {
                CallKeys::Cached(cache.stage(new_tokens, &rows, Values::KeyColumns(rank))?)
            }
            (_, _, Form::Expanded) => {
                let (k, v) = self.up.expand(&rows)?;
                match input.packed {
                    Some(sequences) => CallKeys::Packed { k, v, sequences },
                    None => CallKeys::Own { k, v },
                }
            }
            (_, _, Form::Absorbed) => CallKeys::Own { v: part(&rows, 3, 0..rank)?, k: rows },
        };
        Ok((AttentionCall { q, keys, mask, options, batched }, form))
    }

    /// A context to the layer's output (B, T, E).
    pub(super) fn output(&self, context: &Tensor, form: Form, batched: bool) -> Result<Tensor> {
        let context = context.transpose(1, 2)?;
        let context = match form {
            Form::Expanded => context,
            Form::Absorbed => self.up.values_of(&context)?,
        };
        let (b, t, h, d_v) = context.dims4()?;
        let ys = self.out.forward(&context.reshape((b, t, h * d_v))?)?;
        if batched { Ok(ys) } else { ys.squeeze(0) }
    }
}

fn positions(input: &AttentionInput, b: usize, t: usize, new_tokens: Option<&NewTokens>) -> Result<Positions> {
    match (input.positions, new_tokens) {
        (Some(given), _) => Positions::from_tensor("positions", given, b, t),
        (None, Some(new_tokens)) => new_tokens.positions(),
        (None, None) => input.default_positions(PackedSequences::queries, t),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_expand_and_short_calls_absorb() {
        let cfg = MultiHeadLatentAttentionConfig::new(2048, 16);
        for (t_q, t_kv, expected) in [
            (1, 2, Form::Absorbed),
            (1, 100_000, Form::Absorbed),
            (100, 4096, Form::Absorbed),
            (170, 1_000_000, Form::Absorbed),
            (171, 1_000_000, Form::Expanded),
            (200, 4096, Form::Expanded),
            (512, 512, Form::Expanded),
            (4096, 4096, Form::Expanded),
        ] {
            assert_eq!(Form::of(&cfg, t_q, t_kv), expected, "{t_q} queries, {t_kv} keys");
        }
    }
}
