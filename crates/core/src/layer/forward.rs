//! A forward pass: validate the input, project it to heads, apply the score modifiers, attend, project the output.

use candle_core::{Result, Tensor, bail};

use super::chosen_keys::IndexedCall;
use super::heads::{ProjectedHeads, split_heads};
use super::input::{AttentionInput, KeysFrom};
use super::latent::LatentPages;
use super::paged_batch::PagedBatch;
use super::validate::{CheckedLayerInput, NO_KEYS};
use super::{LayerOutput, MultiHeadAttention, OP};
use crate::cache::{AttentionCache, CachedCall, KvSizes};
use crate::mask::AttentionMask;
use crate::pages::PagedKeys;
use crate::position::{AlibiConfig, CallContext, KeyValueHeads, KeysByHeads, QueryKeyPositions, ScoreArguments};
use crate::sdpa::{
    Attended, AttentionOutput, AttentionStatistics, FunctionKeys, OwnKeys, Plan, SdpaOptions, StatisticsOptions,
};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{accumulation_dtype, reshape_linked, transpose_linked};

impl MultiHeadAttention {
    /// Computes self-attention under the layer's own mask: (B, T, E) to (B, T, out_dim). For training, see
    /// [`forward_t`](candle_core::ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// Computes the layer for any input: with a mask, a cache, cross-attention, training. (B, T_q, E) to (B, T_q,
    /// out_dim).
    ///
    /// # Errors
    /// For inputs whose shape, dtype or device does not fit the layer or each other, more positions than the context
    /// length, a mask that does not fit, and a cache that cannot store the call's keys.
    pub fn forward_with<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        Ok(self.run(input.into(), RequestedResults::default())?.output)
    }

    /// Computes [`forward_with`](Self::forward_with), and returns the weights (B, H, T_q, T_kv) after dropout too; (H,
    /// T_q, T_kv) for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    #[doc(alias("need_weights", "output_attentions"))]
    pub fn forward_with_weights<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<LayerOutput> {
        let wanted = RequestedResults { weights: true, ..RequestedResults::default() };
        let AttentionOutput { output, weights } = self.run(input.into(), wanted)?.output_and_weights()?;
        Ok(LayerOutput { output, weights })
    }

    /// Computes [`forward_with`](Self::forward_with), and returns statistics of the weights too, (B, H, ..): for each
    /// query its largest weights and its entropy, for each key the sum of its weights. They are (H, ..) for an input
    /// (T, E), and for packed sequences.
    ///
    /// The CPU kernel computes them without storing the weights, see
    /// [`scaled_dot_product_attention_with_statistics`](crate::scaled_dot_product_attention_with_statistics). The index
    /// of the call's first key is 0; with a cache, the index of the first key that it stores.
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
        let results = RequestedResults { statistics: Some(wanted.requested()), ..RequestedResults::default() };
        self.run(input.into(), results)?.output_and_statistics()
    }

    /// Returns the backend that [`forward_with`](Self::forward_with) would use for an input, and the reason. The cache
    /// is not changed, but the input is projected, and a larger buffer may be allocated.
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
        if !self.runs_pages_as_batch(input) {
            return self.prepare(input)?.plan();
        }
        self.paged_batch(input)?.plan(input, |own| self.prepare(&own)?.plan())
    }

    fn run(&self, input: AttentionInput, wanted: RequestedResults) -> Result<Attended> {
        if self.runs_pages_as_batch(&input) {
            let batch = self.paged_batch(&input)?;
            return Ok(batch.run(OP, &input, wanted, |own| self.forward_with(own))?.into());
        }
        self.prepare(&input)?.finish(input.cache, wanted)
    }

    /// Returns whether a call with pages runs as a batch over a copy of its keys and values.
    fn runs_pages_as_batch(&self, input: &AttentionInput) -> bool {
        let cfg = &self.config;
        let counts_keys = cfg.appended_keys() > 0
            || cfg.relative_bias().is_some()
            || matches!(cfg.alibi(), Some(AlibiConfig::Falcon));
        input.any_pages().is_some() && (counts_keys || input.has_pages_of_batch())
    }

    /// Returns the batch of a call with pages, after checking what the batch has in another form.
    fn paged_batch<'a>(&self, input: &AttentionInput<'a>) -> Result<PagedBatch<'a>> {
        let keys_from = input.keys_from(OP)?;
        let expected = self.expected(input.queries.rank() == 3);
        let queries = expected.queries(input.queries, self.config.embed_dim())?;
        expected.residual(input, self.config.out_dim())?;
        input.check_pages(OP, &queries)?;
        self.check_shared_pages(keys_from)?;
        if input.positions.is_some() && self.has_modifier_with_positions(input) {
            bail!(
                "[{OP}] positions were given with pages to a layer whose biases follow from the positions of keys, \
                 expected none"
            )
        }
        if let Some(pages) = input.pages {
            pages.check_sizes("the pool's", self.stored_sizes())?;
        }
        if let Some(earlier) = input.shared_pages {
            earlier.check_written(self.kv_sizes())?;
        }
        PagedBatch::new(OP, input, &self.mask)
    }

    /// Validates and projects an input, and applies the score modifiers: everything that comes before attention.
    pub(super) fn prepare<'a>(&'a self, input: &AttentionInput<'a>) -> Result<PreparedCall<'a>> {
        let checked = self.validate(input)?;
        let ProjectedHeads { q, sink_queries, kv, gate, rotation } = self.project(&checked, input)?;
        let indexed = self.index(&checked.queries, rotation.as_ref())?;
        let mut arguments = ScoreArguments {
            mask: self.mask_of_call(&q, &checked)?,
            options: self.options_of_call(input)?,
            content_scores: None,
            q,
        };
        let mut cache_after = None;
        let keys = match checked.keys_from {
            KeysFrom::Cache(cache) => {
                let KeyValueHeads { keys, values } = kv.ok_or_else(no_keys)?;
                self.refuse_tracked_module(input, cache, &[&keys, &values])?;
                let rows = match &indexed {
                    Some(indexed) => indexed.rows(&keys)?,
                    None => keys,
                };
                let mut staged = cache.stage(&checked.tokens, &rows, Some(&values), values.dim(3)?)?;
                if let Some(indexed) = indexed {
                    indexed.choose_in(&mut staged.call, self.config.num_kv_heads(), self.config.head_dim());
                }
                staged.call.appended = self.appended_heads()?;
                staged.call.attend_to_sinks_from(sink_queries);
                self.modify_for_cache(&mut arguments, input, &checked, &staged.cache)?;
                cache_after = Some(staged.cache);
                AttendedKeys::Cached(staged.call)
            }
            KeysFrom::EarlierLayer(cache) => {
                let mut cached = cache.reading(&checked.tokens, &arguments.q, self.kv_sizes())?;
                cached.attend_to_sinks_from(sink_queries);
                self.modify_for_cache(&mut arguments, input, &checked, cache)?;
                AttendedKeys::Cached(cached)
            }
            KeysFrom::Pages | KeysFrom::EarlierPages => self.prepare_pages(&mut arguments, kv, indexed, input)?,
            KeysFrom::Own | KeysFrom::Cross { .. } | KeysFrom::Memory(_) => {
                if let Some(indexed) = indexed {
                    arguments.mask = indexed.choose(arguments.mask)?;
                }
                self.modify_for_projected_keys(&mut arguments, kv.ok_or_else(no_keys)?, input, &checked)?
            }
        };
        let residual = checked.residual;
        let train = input.train;
        let chosen = checked.adapters.queries;
        Ok(PreparedCall {
            q: arguments.q,
            keys,
            cache: cache_after,
            mask: arguments.mask,
            options: arguments.options,
            batched: input.queries.rank() == 3,
            output: Box::new(move |output| {
                let merged = self.merge_heads(output, gate.as_ref())?;
                self.projections.output(merged, residual.as_ref(), &chosen, train)
            }),
        })
    }

    /// Refuses keys and values that a module of the caller tracks for gradients, in a call with a cache that would lose
    /// them. Other reasons for gradients are errors of the cache, which asks for `freeze`.
    fn refuse_tracked_module(&self, input: &AttentionInput, cache: &AttentionCache, kv: &[&Tensor]) -> Result<()> {
        let is_tracked = kv.iter().any(|tensor| tensor.track_op());
        if !is_tracked || cache.config().detached() || input.queries.track_op() {
            return Ok(());
        }
        let Some(projection) = self.projections.module_of_caller() else { return Ok(()) };
        bail!(
            "[attention_cache] keys or values are tracked for gradients, which a cache would lose: the {projection} \
             projection is a module of the caller, which `freeze()` keeps with its variables; expected a module \
             without variables, or a cache made `with_detached(true)`"
        )
    }

    /// Returns the layer's mask combined with the call's, over the keys that the layer appends too.
    fn mask_of_call(&self, q: &Tensor, checked: &CheckedLayerInput) -> Result<AttentionMask> {
        let mask = checked.mask.clone();
        let appended = self.config.appended_keys();
        // The rows that a cache reads are known later, and their mask with them.
        if appended == 0 || matches!(checked.keys_from, KeysFrom::Cache(_)) {
            return Ok(mask);
        }
        let dims = [q.dim(0)?, self.config.num_heads(), q.dim(2)?, checked.t_kv];
        mask.with_appended_keys(appended, dims, accumulation_dtype(q.dtype()), q.device())
    }

    /// Returns the options of attention that the call and the layer set.
    fn options_of_call(&self, input: &AttentionInput) -> Result<SdpaOptions> {
        let cfg = &self.config;
        let mut options = cfg.with_score_numbers(input.options(cfg.dropout()));
        options.sinks = self.parameters.tensor("sinks")?;
        Ok(options)
    }

    /// Applies the score modifiers to a call that attends to the keys in a cache.
    fn modify_for_cache(
        &self,
        arguments: &mut ScoreArguments,
        input: &AttentionInput,
        checked: &CheckedLayerInput,
        cache: &AttentionCache,
    ) -> Result<()> {
        // The cache knows the positions of earlier calls too.
        let key_positions = if self.has_modifier_with_positions(input) { Some(cache.key_positions()?) } else { None };
        let positions = match (&checked.positions, &key_positions) {
            (Some(positions), Some(keys)) => Some(QueryKeyPositions { queries: &positions.queries, keys }),
            _ => None,
        };
        let context = self.call_context(input, positions);
        for modifier in self.score_modifiers() {
            modifier.modify(arguments, None, &context)?;
        }
        Ok(())
    }

    /// Stores the keys and values of a call in its pages, if they are not an earlier layer's, and applies the score
    /// modifiers. `validate` refuses those that depend on the positions of keys.
    fn prepare_pages<'a>(
        &self,
        arguments: &mut ScoreArguments,
        kv: Option<KeyValueHeads>,
        indexed: Option<IndexedCall>,
        input: &AttentionInput<'a>,
    ) -> Result<AttendedKeys<'a>> {
        let pages = if let Some(own) = input.pages {
            let KeyValueHeads { keys, values } = kv.ok_or_else(no_keys)?;
            match indexed {
                Some(indexed) => {
                    own.write(&indexed.rows(&keys)?, &values)?;
                    indexed.choose_in_pages(arguments, own, self.config.num_kv_heads(), self.config.head_dim())?;
                }
                None => own.write(&keys, &values)?,
            }
            own
        } else {
            let earlier = input.shared_pages.ok_or_else(no_keys)?;
            earlier.check_written(self.kv_sizes())?;
            earlier
        };
        let context = self.call_context(input, None);
        for modifier in self.score_modifiers() {
            modifier.modify(arguments, None, &context)?;
        }
        Ok(AttendedKeys::Paged(pages))
    }

    /// Returns the sizes of the rows that a pool of the layer stores.
    fn stored_sizes(&self) -> KvSizes {
        let own = self.kv_sizes();
        KvSizes { d: own.d + self.config.index_columns(), ..own }
    }

    /// Returns the sizes of the layer's keys and values.
    fn kv_sizes(&self) -> KvSizes {
        let cfg = &self.config;
        KvSizes { h_kv: cfg.num_kv_heads(), d: cfg.head_dim(), d_v: cfg.value_head_dim() }
    }

    /// Applies the score modifiers to a call without a cache, and returns the keys and values that it attends to.
    fn modify_for_projected_keys<'a>(
        &self,
        arguments: &mut ScoreArguments,
        mut kv: KeyValueHeads,
        input: &AttentionInput<'a>,
        checked: &CheckedLayerInput,
    ) -> Result<AttendedKeys<'a>> {
        let positions = checked.positions.as_ref().map(|positions| QueryKeyPositions {
            queries: &positions.queries,
            keys: positions.keys.as_ref().unwrap_or(&positions.queries),
        });
        let context = self.call_context(input, positions);
        for modifier in self.score_modifiers() {
            modifier.modify(arguments, Some(&mut kv), &context)?;
        }
        if let Some(scores) = arguments.content_scores.take() {
            return Ok(AttendedKeys::ByHeads(KeysByHeads { kv, scores }));
        }
        let KeyValueHeads { keys: k, values: v } = kv;
        Ok(match input.function {
            Some(function) => AttendedKeys::Function(FunctionKeys { k, v, function }),
            None => AttendedKeys::Own(OwnKeys { k, v, sequences: input.packed }),
        })
    }

    /// Returns the facts about a call on which score modifiers depend.
    fn call_context<'c>(
        &'c self,
        input: &'c AttentionInput,
        positions: Option<QueryKeyPositions<'c>>,
    ) -> CallContext<'c> {
        CallContext {
            positions,
            has_given_positions: input.positions.is_some() || input.key_positions.is_some(),
            has_tree: input.has_tree(),
            packed: input.packed,
            projections: &self.projections,
            train: input.train,
            unsupported_by_content: input.unsupported_by_content_positions(),
        }
    }

    /// Returns the attention output (B, H, T, D_v), a view of (B, T, H, D_v), as (B, T, H·D_v), with the layer's gate
    /// and norm. The gate is (B, T, H·D_v) or (B, T, H).
    fn merge_heads(&self, output: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
        let (b, h, t, d_v) = output.dims4()?;
        let heads = transpose_linked(output, 1, 2)?;
        let gated = match (self.config.output_gate(), gate) {
            (Some(gate), Some(projected)) => gate.activation.gate(&heads, &split_heads(projected, h)?)?,
            _ => heads,
        };
        let merged = reshape_linked(&gated, (b, t, h * d_v))?;
        match &self.norms.output {
            Some(norm) => norm.forward(&merged),
            None => Ok(merged),
        }
    }
}

/// Returns the error of a layer without key and value projections. `validate` returns it first.
fn no_keys() -> candle_core::Error {
    candle_core::Error::Msg(format!("[{OP}] {NO_KEYS}"))
}

/// The keys and values that the queries of a call attend to.
pub(super) enum AttendedKeys<'a> {
    /// Keys and values of the call.
    Own(OwnKeys<'a>),
    /// Keys and values of the call, to which a caller's function attends.
    Function(FunctionKeys<'a>),
    /// Keys and values of the call, with scores by content.
    ByHeads(KeysByHeads),
    /// Keys and values in a cache.
    Cached(CachedCall<'a>),
    /// Keys and values in pages.
    Paged(PagedKeys<'a>),
    /// Latents in pages.
    Latents(LatentPages<'a>),
}

/// Projects the attention output (B, H, T_q, D_v), a view of (B, T_q, H, D_v), to (B, T_q, out_dim).
type OutputProjection<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;

/// The arguments of attention that a layer computed from its input.
pub(super) struct PreparedCall<'a> {
    /// (B, H, T_q, D), a view of (B, T_q, ..).
    pub q: Tensor,
    pub keys: AttendedKeys<'a>,
    /// The call's cache after the call, if it has one.
    pub cache: Option<AttentionCache>,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
    /// Whether the input had a batch dimension.
    pub batched: bool,
    pub output: OutputProjection<'a>,
}

impl PreparedCall<'_> {
    /// Attends, projects the output to (B, T_q, out_dim), and stores the keys and values in the call's cache, if it has
    /// one.
    pub fn finish(self, cache: Option<&mut AttentionCache>, wanted: RequestedResults) -> Result<Attended> {
        let mut attended = self.attend(wanted)?;
        let is_in_graph = attended.output.track_op();
        attended.output = (self.output)(&attended.output)?;
        if !self.batched {
            attended = attended.map(|result| result.squeeze(0))?;
        }
        if let (Some(cache), Some(staged)) = (cache, self.cache) {
            // Later calls write to the buffers of a cache in place. A graph that refers to them needs them for its
            // backward pass, so the cache continues with a copy.
            *cache = if is_in_graph { staged.fork()? } else { staged };
        }
        Ok(attended)
    }

    /// Returns the attention output (B, H, T_q, D_v), and the other requested results.
    pub fn attend(&self, wanted: RequestedResults) -> Result<Attended> {
        let Self { q, mask, options, .. } = self;
        match &self.keys {
            AttendedKeys::Own(keys) => keys.attend(q, mask, options, wanted),
            AttendedKeys::Function(keys) => keys.attend(q, mask, options, wanted),
            AttendedKeys::ByHeads(keys) => keys.attend(q, mask, options, wanted),
            AttendedKeys::Cached(keys) => keys.attend(q, mask, options, wanted),
            AttendedKeys::Paged(keys) => keys.attend(q, mask, options, wanted),
            AttendedKeys::Latents(keys) => keys.attend(q, mask, options, wanted),
        }
    }

    /// Returns the path that attention takes, and the reason.
    pub fn plan(&self) -> Result<Plan> {
        let Self { q, mask, options, .. } = self;
        match &self.keys {
            AttendedKeys::Own(keys) => keys.plan(q, mask, options),
            AttendedKeys::Function(_) => {
                bail!("[attention_function] a plan was requested, which a caller's function does not return")
            }
            AttendedKeys::ByHeads(keys) => keys.plan(q, mask, options),
            AttendedKeys::Cached(keys) => keys.plan(q, mask, options),
            AttendedKeys::Paged(keys) => keys.plan(q, mask, options),
            AttendedKeys::Latents(keys) => keys.plan(q, mask, options),
        }
    }
}
