//! A forward pass: check, project, normalise and rotate, add the terms of the scores, attend, project.

use candle_core::{Result, Tensor, bail};

use super::checks::NO_KEYS;
use super::heads::split_heads;
use super::input::KeysFrom;
use super::{AttentionInput, LayerOutput, MultiHeadAttention, OP};
use crate::cache::{AttentionCache, KvSizes};
use crate::mask::AttentionMask;
use crate::position::{Scores, TermCall};
use crate::sdpa::{Attended, AttentionStatistics, Keys, Outputs, OwnKeys, Plan, SdpaOptions, StatisticsOptions};
use candle_attention_modules::base::accumulation_dtype;
use candle_attention_modules::linear::{KeysAndValues, Projected};

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
        Ok(self.attended(input.into(), Outputs::Context)?.context)
    }

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q,
    /// T_kv) for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<LayerOutput> {
        let (output, weights) = self.attended(input.into(), Outputs::Weights)?.with(|found| found.weights.take())?;
        Ok(LayerOutput { output, weights })
    }

    /// [`forward_with`](Self::forward_with) that also returns statistics of the weights: for each query its largest
    /// weights and its entropy, for each key the weight that it receives, (B, H, ..); (H, ..) for an input (T, E), and
    /// for packed sequences. The kernel finds them without having the weights as a whole, see
    /// [`scaled_dot_product_attention_with_statistics`](crate::scaled_dot_product_attention_with_statistics). Indices of
    /// keys count those that are attended to; with a cache, from the first that it holds.
    ///
    /// ```
    /// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, StatisticsOptions};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
    /// let (ys, found) = mha.forward_with_statistics(&xs, &StatisticsOptions::default().with_top_keys(3))?;
    /// assert_eq!((ys.dims(), found.top_keys.dims()), (&[2, 6, 64][..], &[2, 4, 6, 3][..]));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with), and if `wanted` does not fit the call.
    pub fn forward_with_statistics<'a>(
        &self,
        input: impl Into<AttentionInput<'a>>,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        self.attended(input.into(), Outputs::Statistics(wanted))?.with(|found| found.statistics.take())
    }

    fn attended(&self, input: AttentionInput, outputs: Outputs) -> Result<Attended> {
        self.call(&input)?.finish(input.cache, outputs)
    }

    /// The path that [`forward_with`](Self::forward_with) takes for an input, and why. It costs the input's
    /// projections, and larger buffers where the cache has to grow; the cache stays as it is.
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
        self.call(input)?.plan()
    }

    /// Everything before attention.
    pub(super) fn call<'a>(&'a self, input: &AttentionInput<'a>) -> Result<AttentionCall<'a>> {
        let (cfg, inputs) = (&self.config, self.check(input)?);
        let Projected { q, kv, gate } = self.project(input, &inputs)?;
        // No context is computed for padding, and zero times what it holds is to be zero.
        let gate = gate.map(|gate| inputs.tokens.without_padding(gate)).transpose()?;
        let (cached, staged) = match (inputs.keys_from, &kv) {
            (KeysFrom::Cache(cache), Some(KeysAndValues { keys, values })) => cache
                .stage(&inputs.tokens, keys, Some(values), values.dim(3)?)
                .map(|(cached, cache)| (Some(cached), Some(cache)))?,
            (KeysFrom::EarlierLayer(cache), _) => {
                let sizes = KvSizes { h_kv: cfg.num_kv_heads(), d: cfg.head_dim(), d_v: cfg.value_head_dim() };
                (Some(cache.reading(&inputs.tokens, &q, sizes)?), None)
            }
            _ => (None, None),
        };
        let cache = staged.as_ref().or(input.shared_cache);

        let options = input.options(cfg.dropout()).with_scale(cfg.score_scale());
        let options = SdpaOptions { softcap: cfg.softcap(), sinks: self.parameters.tensor("sinks")?, ..options };
        let mut mask = input.mask_with(&self.mask);
        if cfg.appended_keys() > 0 {
            let dims = [q.dim(0)?, cfg.num_heads(), q.dim(2)?, inputs.t_kv];
            mask = mask.with_appended_keys(cfg.appended_keys(), dims, accumulation_dtype(q.dtype()), q.device())?;
        }
        let cached = cached.map(|cached| Box::new(cached) as Box<dyn Keys + 'a>);
        let own = kv.filter(|_| cache.is_none()).map(|own| [own.keys, own.values]);
        let mut scores = Scores { q, own, mask, options, keys: cached };
        let takes_positions = self.terms_take_positions();
        let of_cache = cache.filter(|_| takes_positions).map(AttentionCache::key_positions).transpose()?;
        let call = TermCall {
            positions: inputs.positions.as_ref().map(|at| {
                let of_call = at.keys.as_ref().unwrap_or(&at.queries);
                [&at.queries, of_cache.as_ref().unwrap_or(of_call)]
            }),
            has_given_positions: input.positions.is_some() || input.key_positions.is_some(),
            packed: input.packed,
            projections: &self.projections,
            others: input.others(),
        };
        self.terms().try_for_each(|term| term.add(&mut scores, &call))?;

        let Scores { q, own, mask, options, keys } = scores;
        let keys = match (keys, own) {
            (Some(keys), _) => keys,
            (None, Some([k, v])) => Box::new(OwnKeys { k, v, sequences: input.packed, function: input.function }),
            (None, None) => bail!("[{OP}] {NO_KEYS}"),
        };
        let (batched, residual) = (input.queries.rank() == 3, inputs.residual);
        let output = move |context: &Tensor| self.output(context, gate.as_ref(), residual.as_ref());
        Ok(AttentionCall { q, keys, cache: staged, mask, options, batched, output: Box::new(output) })
    }

    /// The context of a call (B, H, T, D_v), a view of (B, T, H, D_v), to (B, T, out_dim): by the projection of its
    /// gate, (B, T, H·D_v) or (B, T, H), and with a residual.
    fn output(&self, context: &Tensor, gate: Option<&Tensor>, residual: Option<&Tensor>) -> Result<Tensor> {
        let (b, h, t, d_v) = context.dims4()?;
        let context = context.transpose(1, 2)?;
        let gated = match (self.config.output_gate(), gate) {
            (Some(gate), Some(projected)) => gate.activation.gate(&context, &split_heads(projected, h)?)?,
            _ => context,
        };
        let [.., of_context] = &self.norms;
        let merged =
            of_context.iter().try_fold(gated.reshape((b, t, h * d_v))?, |merged, norm| norm.forward(&merged))?;
        self.projections.output(merged, residual)
    }
}

type Output<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;

/// The arguments of attention that a layer makes of an input.
pub(super) struct AttentionCall<'a> {
    /// (B, H, T_q, D), a view of (B, T_q, ..).
    pub q: Tensor,
    pub keys: Box<dyn Keys + 'a>,
    /// What the call's cache becomes, where it has one.
    pub cache: Option<AttentionCache>,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
    /// Whether the input had a batch dimension.
    pub batched: bool,
    /// Makes (B, T_q, out_dim) of the context (B, H, T_q, D_v), a view of (B, T_q, H, D_v).
    pub output: Output<'a>,
}

impl AttentionCall<'_> {
    /// Attends, and keeps the keys and values in the call's cache, if it has one. The output, (B, T_q, out_dim), stands
    /// in the place of the context.
    pub fn finish(self, cache: Option<&mut AttentionCache>, outputs: Outputs) -> Result<Attended> {
        let attended = self.keys.attend(&self.q, &self.mask, &self.options, outputs)?;
        let in_graph = attended.context.track_op();
        let in_rank = |tensor: Tensor| if self.batched { Ok(tensor) } else { tensor.squeeze(0) };
        let finished = attended.map(|context| in_rank((self.output)(&context)?), in_rank)?;
        if let (Some(cache), Some(staged)) = (cache, self.cache) {
            // Later calls write to the buffers of a cache in place. A graph that refers to them keeps them for its
            // `backward`, and the cache goes on with a copy.
            *cache = if in_graph { staged.fork()? } else { staged };
        }
        Ok(finished)
    }

    /// The path that attention takes, and why.
    pub fn plan(&self) -> Result<Plan> {
        let attended = self.keys.attend(&self.q, &self.mask, &self.options, Outputs::Plan)?;
        Ok(attended.with(|found| found.plan.take())?.1)
    }
}
