//! A forward pass: check, project, normalise and rotate, mask, cache, attend, project.

use candle_core::{Result, Tensor, bail};

use super::by_heads::ByHeads;
use super::call::{AttentionCall, CallKeys};
use super::checks::{Inputs, Keys, NO_KEYS};
use super::heads::{Projected, split_heads};
use super::packed_bias::PackedBias;
use super::{AttentionInput, LayerOutput, MultiHeadAttention};
use crate::base::accumulation_dtype;
use crate::cache::AttentionCache;
use crate::mask::AttentionMask;
use crate::position::{Alibi, AxisPositions, ContentTables, Positions, RopeConfig};
use crate::sdpa::{AttentionOutput, PackedSequences, Plan, SdpaOptions};

/// The positions of a call's tokens.
pub(super) struct CallPositions {
    pub queries: Positions,
    /// Those of the call's own keys; `None` where they are the queries'.
    pub keys: Option<Positions>,
    /// Those of the calls before too; `None` where there are none.
    pub cached: Option<Positions>,
    /// Those by which queries and keys are rotated, where these are on several axes.
    pub axes: Option<AxisPositions>,
}

impl MultiHeadAttention {
    /// Self-attention under the layer's own mask: (B, T, E) gives (B, T, out_dim). Training is
    /// [`forward_t`](candle_core::ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// The layer over any input: with a mask, cross-attention, training. (B, T_q, E) gives (B, T_q, out_dim).
    ///
    /// # Errors
    /// For inputs whose shape, dtype or device does not fit the layer or each other, more positions than the context
    /// length, a mask that does not fit, and a cache that does not take the call's keys.
    pub fn forward_with<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        let call = self.call(input.into())?;
        let ys = self.output(&call.attend()?, &call)?;
        call.commit()?;
        Ok(ys)
    }

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q,
    /// T_kv) for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<LayerOutput> {
        let call = self.call(input.into())?;
        let AttentionOutput { context, weights } = call.attend_with_weights()?;
        let output = self.output(&context, &call)?;
        call.commit()?;
        Ok(LayerOutput { output, weights })
    }

    /// The path that [`forward_with`](Self::forward_with) takes for an input, and why. It costs the input's projections
    /// and a copy of its cache, which stays as it is.
    ///
    /// ```
    /// use candle_attention::{AttentionInput, Backend, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
    /// let plan = mha.plan(&AttentionInput::new(&xs))?;
    /// assert_eq!(plan.backend, Backend::Fused);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn plan(&self, input: &AttentionInput) -> Result<Plan> {
        let mut cache = input.cache.as_deref().map(AttentionCache::fork).transpose()?;
        self.call(input.with_other_cache(cache.as_mut()))?.plan()
    }

    /// Everything before attention.
    pub(super) fn call<'a>(&self, mut input: AttentionInput<'a>) -> Result<AttentionCall<'a>> {
        let inputs = self.check(&input)?;
        let positions = self.positions(&input, &inputs)?;
        let Projected { q, kv, gate } = self.project(&inputs, positions.as_ref())?;
        // No context is computed for padding, and zero times what it holds is to be zero.
        let gate = match (gate, &inputs.new_tokens) {
            (Some(gate), Some(new_tokens)) => Some(new_tokens.without_padding(gate)?),
            (gate, _) => gate,
        };
        let scale = self.config.score_scale();
        let (q, kv, terms) = match (&self.content, kv) {
            (Some(ContentTables::Grid(grid)), Some((k, v))) => {
                let [q, k] = grid.widen(&q, &k, scale)?;
                (q, Some((k, v)), None)
            }
            (Some(ContentTables::Window(tables)), Some((k, v))) => {
                let [q, k] = tables.scaled(q, k)?;
                (q, Some((k, v)), None)
            }
            (Some(ContentTables::Distances(tables)), Some((k, v))) => {
                let (q, terms) = tables.terms(&q, &k, scale, &self.projections)?;
                (q, Some((k, v)), Some(terms))
            }
            (_, kv) => (q, kv, None),
        };
        let mask = self.mask(&input, &inputs, positions.as_ref())?;
        let keys = match (kv, input.cache.take(), inputs.keys, inputs.new_tokens) {
            (Some((k, v)), Some(cache), _, Some(new_tokens)) => {
                CallKeys::Cached(cache.stage(new_tokens, &k, &v)?.into())
            }
            (Some((k, v)), ..) => match (input.packed, terms) {
                (_, Some(terms)) => CallKeys::ByHeads(ByHeads { k, v, terms }),
                (Some(sequences), None) => match &self.relative_bias {
                    Some(bias) => CallKeys::PackedBias(PackedBias::new(k, v, sequences, bias)?),
                    None => CallKeys::Packed { k, v, sequences },
                },
                (None, None) => CallKeys::Own { k, v },
            },
            (None, _, Keys::Earlier(cache), Some(new_tokens)) => {
                let cfg = &self.config;
                let sizes = [cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim()];
                CallKeys::Cached(cache.read(new_tokens, &q, sizes)?.into())
            }
            (None, ..) => bail!("[multi_head_attention] {NO_KEYS}"),
        };
        let batched = input.queries.rank() == 3;
        let (options, function) = (self.options(&input), input.function);
        Ok(AttentionCall { q, keys, mask, options, batched, residual: inputs.residual, gate, function })
    }

    /// Whether scores get a bias that follows from positions.
    fn adds_bias(&self) -> bool {
        matches!(self.alibi, Some(Alibi::Falcon(_))) || self.relative_bias.is_some()
    }

    /// `None` for a layer that has no use for positions; their shape is checked all the same.
    fn positions(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Option<CallPositions>> {
        let Inputs { b, t_q, t_kv, .. } = *inputs;
        let new_tokens = inputs.new_tokens.as_ref();
        let queries = if new_tokens.is_some() { None } else { input.given_positions((b, t_q))? };
        let keys = input.key_positions.map(|given| Positions::from_tensor("key positions", given, b, t_kv));
        let keys = keys.transpose()?;
        if keys.is_some() && !input.is_cross() {
            bail!("[multi_head_attention] key positions are given, but the keys are the queries")
        }
        let axes = self.axis_positions(input, b, t_q)?;
        let adds_bias = self.adds_bias();
        if self.rotary.is_none() && self.config.query_scaling().is_none() && !adds_bias {
            return Ok(None);
        }
        let queries = match (queries, new_tokens) {
            (None, Some(new_tokens)) => new_tokens.positions()?,
            (Some(given), _) => given,
            (None, None) => input.default_positions(PackedSequences::queries, t_q)?,
        };
        let or_default = || input.default_positions(PackedSequences::keys, t_kv);
        let keys = input.is_cross().then(|| keys.map_or_else(or_default, Ok)).transpose()?;
        let length = keys.iter().map(Positions::length).fold(queries.length(), usize::max);
        if let Some(context_length) = self.config.context_length().filter(|&most| length > most) {
            bail!("[multi_head_attention] position {} is not below the context length {context_length}", length - 1)
        }
        let cache = input.cache.as_deref().or(input.shared_cache).filter(|_| adds_bias);
        // An earlier layer's has the call's tokens already.
        let added = new_tokens.filter(|_| input.cache.is_some());
        let cached = cache.map(|cache| cache.key_positions(added)).transpose()?;
        Ok(Some(CallPositions { queries, keys, cached, axes }))
    }

    fn axis_positions(&self, input: &AttentionInput, b: usize, t: usize) -> Result<Option<AxisPositions>> {
        let axes = self.config.rope().and_then(RopeConfig::axes);
        match (axes, input.axis_positions) {
            (None, None) => Ok(None),
            (None, Some(_)) => {
                bail!("[multi_head_attention] axis positions were given, but the config's rope has no axes")
            }
            (Some(_), Some(_)) if input.is_cross() => {
                bail!("[multi_head_attention] axis positions were given beside keys, expected self-attention")
            }
            (Some(axes), Some(given)) => AxisPositions::from_tensor(given, axes.sections().len(), b, t).map(Some),
            (Some(axes), None) if axes.is_axial() => bail!(
                "[multi_head_attention] rotary positions are on {} axes, expected a call `with_axis_positions`",
                axes.sections().len()
            ),
            (Some(_), None) => Ok(None),
        }
    }

    /// The layer's own mask and the call's, and the biases that follow from positions.
    fn mask(&self, input: &AttentionInput, inputs: &Inputs, at: Option<&CallPositions>) -> Result<AttentionMask> {
        let mut mask = input.mask_with(&self.mask);
        let (dtype, device) = (accumulation_dtype(self.projections.dtype()), self.projections.device());
        let appended = self.config.appended_keys();
        if appended > 0 {
            let dims = (inputs.b, self.config.num_heads(), inputs.t_q, inputs.t_kv);
            mask = mask.with_appended_keys(appended, dims, dtype, device)?;
        }
        if let Some(ContentTables::Window(tables)) = &self.content {
            mask = mask.with_bias(&tables.bias(inputs.t_q)?);
        }
        let Some(at) = at else { return Ok(mask) };
        let keys = at.cached.as_ref().or(at.keys.as_ref()).unwrap_or(&at.queries);
        if let Some(Alibi::Falcon(bias)) = &self.alibi {
            mask = mask.with_bias(&bias.at(keys, dtype)?);
        }
        // That of packed sequences is a part of one for each of them.
        if let Some(bias) = self.relative_bias.as_ref().filter(|_| input.packed.is_none()) {
            mask = mask.with_bias(&bias.between(&at.queries, keys)?);
        }
        Ok(mask)
    }

    fn options(&self, input: &AttentionInput) -> SdpaOptions {
        let mut options = input.options(self.config.dropout());
        options.scale = match &self.content {
            Some(ContentTables::Window(tables)) if tables.is_cosine() => Some(1.0),
            // Not that of wider queries.
            Some(_) => Some(self.config.score_scale()),
            None => self.config.scale(),
        };
        options.softcap = self.config.softcap();
        options.sinks = self.sinks.clone();
        if let Some(Alibi::Distances(slopes)) = &self.alibi {
            options.alibi_slopes = Some(slopes.clone());
        }
        options
    }

    /// The context of a call (B, H, T, D_v), a view of (B, T, H, D_v), to (B, T, out_dim).
    pub(super) fn output(&self, context: &Tensor, call: &AttentionCall) -> Result<Tensor> {
        let (b, h, t, d_v) = context.dims4()?;
        let context = context.transpose(1, 2)?;
        let gated = match (self.config.output_gate(), &call.gate) {
            (Some(gate), Some(projected)) => gate.apply(&context, &split_heads(projected, h)?)?,
            _ => context,
        };
        let merged = gated.reshape((b, t, h * d_v))?;
        let merged = match &self.context_norm {
            Some(norm) => norm.forward(&merged)?,
            None => merged,
        };
        let ys = self.projections.output(merged, call.residual.as_ref())?;
        if call.batched { Ok(ys) } else { ys.squeeze(0) }
    }
}
