//! One call of a layer: its input checked, compressed, and made queries and keys.

use candle_core::{Module, Result, Tensor, bail};

use super::form::Form;
use super::{MultiHeadLatentAttention, OP};
use crate::cache::{Expand, NewTokens, StagedAppend, Values};
use crate::multi_head::Expected;
use crate::position::Positions;
use crate::size::{is_addressable, part};
use crate::{
    AttentionInput, AttentionMask, AttentionOutput, OutputOrder, SdpaOptions, scaled_dot_product_attention,
    scaled_dot_product_attention_with_weights,
};

/// Queries of one call, and what they attend to.
pub(super) struct Call<'a> {
    layer: &'a MultiHeadLatentAttention,
    form: Form,
    /// (B, H, T, nope + rope), or (B, H, T, rank + rope) where they are absorbed.
    q: Tensor,
    /// Latents and rotated keys (B, 1, T, rank + rope).
    rows: Tensor,
    mask: AttentionMask,
    options: SdpaOptions,
    /// The rows of this call beside those of the calls before.
    staged: Option<StagedAppend<'a>>,
    /// Whether the input had a batch dimension.
    batched: bool,
}

impl<'a> Call<'a> {
    /// Goes one way in particular, or the one that takes less.
    pub fn new(layer: &'a MultiHeadLatentAttention, mut input: AttentionInput<'a>, form: Option<Form>) -> Result<Self> {
        let cfg = &layer.config;
        if input.is_cross() {
            bail!("[{OP}] keys and values were given, expected self-attention")
        }
        if input.key_positions.is_some() {
            bail!("[{OP}] key positions are given, but the keys are the queries")
        }
        let batched = input.queries.rank() == 3;
        let (dtype, device) = (layer.down.dtype(), layer.down.device());
        let xs = Expected { op: OP, width: cfg.embed_dim(), batched, dtype, device }.check("queries", input.queries)?;
        let (b, t, _) = xs.dims3()?;
        let new_tokens = input.new_tokens(OP, (b, t))?;
        let positions = positions(&input, (b, t), new_tokens.as_ref())?;
        let (h, rank, nope) = (cfg.num_heads(), cfg.kv_lora_rank(), cfg.nope_head_dim());
        if !is_addressable(&[b, t, h * (2 * cfg.head_dim() + cfg.value_head_dim() + rank)]) {
            bail!("[{OP}] queries {:?} are too large to address", input.queries.dims())
        }
        let form = form.unwrap_or_else(|| match &new_tokens {
            Some(new_tokens) => Form::of(cfg, t, new_tokens.longest()),
            None => Form::Expanded,
        });

        let rotation = layer.rotary.at(&positions);
        let compressed = layer.down.forward(&xs)?;
        let latents = layer.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        let keys = part(&compressed, 2, rank..rank + cfg.rope_head_dim())?.unsqueeze(2)?;
        let rows = Tensor::cat(&[&latents, &rotation.apply(&keys)?.squeeze(2)?], 2)?.unsqueeze(1)?;

        let q = layer.queries.forward(&xs)?.reshape((b, t, h, cfg.head_dim()))?;
        let own = part(&q, 3, 0..nope)?;
        let own = match form {
            Form::Expanded => own.contiguous()?,
            Form::Absorbed => layer.up.absorb(&own)?,
        };
        let q = Tensor::cat(&[own, rotation.apply(&part(&q, 3, nope..cfg.head_dim())?)?], 3)?.transpose(1, 2)?;

        let mask = match input.mask {
            Some(mask) => layer.mask.lifted_by(mask).and(mask),
            None => layer.mask.clone(),
        };
        let mut options = SdpaOptions::default()
            .with_scale(cfg.scale())
            .with_dropout(cfg.dropout(), input.train)
            .with_backend(input.backend)
            .with_output_order(OutputOrder::Bthd);
        options.dropout_seed = input.dropout_seed.cloned();
        let staged = match (input.cache.take(), new_tokens) {
            (Some(cache), Some(new_tokens)) => {
                let staged = cache.stage(new_tokens, &rows, Values::KeyColumns(rank))?;
                Some(if form == Form::Expanded { staged.expanded_by(&layer.up) } else { staged })
            }
            _ => None,
        };
        Ok(Self { layer, form, q, rows, mask, options, staged, batched })
    }

    /// The context (B, H, T, D_v), or of latents (B, H, T, rank).
    pub fn attend(&self) -> Result<Tensor> {
        match &self.staged {
            Some(staged) => staged.attend(&self.q, &self.mask, &self.options),
            None => {
                let (k, v) = self.keys_and_values()?;
                scaled_dot_product_attention(&self.q, &k, &v, &self.mask, &self.options)
            }
        }
    }

    /// [`attend`](Self::attend), and the weights (B, H, T_q, T_kv), or (H, T_q, T_kv) for one sequence.
    pub fn attend_with_weights(&self) -> Result<AttentionOutput> {
        let AttentionOutput { context, weights } = match &self.staged {
            Some(staged) => staged.attend_with_weights(&self.q, &self.mask, &self.options)?,
            None => {
                let (k, v) = self.keys_and_values()?;
                scaled_dot_product_attention_with_weights(&self.q, &k, &v, &self.mask, &self.options)?
            }
        };
        Ok(AttentionOutput { context, weights: if self.batched { weights } else { weights.squeeze(0)? } })
    }

    /// Those of this call alone.
    fn keys_and_values(&self) -> Result<(Tensor, Tensor)> {
        match self.form {
            Form::Expanded => self.layer.up.expand(&self.rows),
            Form::Absorbed => Ok((self.rows.clone(), part(&self.rows, 3, 0..self.layer.config.kv_lora_rank())?)),
        }
    }

    /// A context to the layer's output (B, T, E). Keeps what the call brought, if there is a cache: the last thing that is
    /// done.
    pub fn finish(self, context: &Tensor) -> Result<Tensor> {
        let context = context.transpose(1, 2)?;
        let context = match self.form {
            Form::Expanded => context,
            Form::Absorbed => self.layer.up.values_of(&context)?,
        };
        let (b, t, h, d_v) = context.dims4()?;
        let ys = self.layer.out.forward(&context.reshape((b, t, h * d_v))?)?;
        let ys = if self.batched { ys } else { ys.squeeze(0)? };
        if let Some(staged) = self.staged {
            staged.commit()?;
        }
        Ok(ys)
    }
}

fn positions(input: &AttentionInput, (b, t): (usize, usize), new_tokens: Option<&NewTokens>) -> Result<Positions> {
    match (input.positions, new_tokens) {
        (Some(given), _) => Positions::from_tensor("positions", given, b, t),
        (None, Some(new_tokens)) => new_tokens.positions(),
        (None, None) => Positions::starting_at(&[0], t),
    }
}
