//! A forward pass: check, project, normalise and rotate, mask, cache, attend, project.

use candle_core::{Result, Tensor, bail};

use super::by_heads::ByHeads;
use super::call::{AttentionCall, CallKeys};
use super::input::GivenSum;
use super::packed_bias::PackedBias;
use super::{AttentionInput, MultiHeadAttention, OP, ProjectedMemory};
use crate::cache::NewTokens;
use crate::norm::Norm;
use crate::position::{Alibi, AxisPositions, ContentTables, Positions, Rotation};
use crate::projection::Queries;
use crate::sdpa::accumulation_dtype;
use crate::size::is_addressable;
use crate::{AttentionCache, AttentionMask, AttentionOutput, KvSource, PackedSequences, Plan, RopeConfig, SdpaOptions};

const NO_KEYS: &str =
    "the layer has no keys and values of its own, expected an earlier layer's, `with_shared_cache` or `with_memory`";

/// The inputs of a call, checked.
struct Inputs<'a> {
    /// (B, T_q, embed_dim).
    queries: Tensor,
    keys: Keys<'a>,
    /// The tokens that the call adds to its cache, if it has one.
    new_tokens: Option<NewTokens>,
    /// (B, T_q, out_dim).
    residual: Option<Tensor>,
    sum: Option<GivenSum<'a>>,
    b: usize,
    t_q: usize,
    t_kv: usize,
}

/// What keys and values are made from.
enum Keys<'a> {
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

/// Projected inputs as heads.
struct Projected {
    /// (B, H, T_q, D).
    q: Tensor,
    /// (B, H_kv, T_kv, D) and (B, H_kv, T_kv, D_v), if the call does not take them from an earlier layer's cache.
    kv: Option<(Tensor, Tensor)>,
    /// (B, T_q, H·D_v) or (B, T_q, H).
    gate: Option<Tensor>,
}

/// The positions of a call's tokens.
struct CallPositions {
    queries: Positions,
    /// Those of the call's own keys; `None` where they are the queries'.
    keys: Option<Positions>,
    /// Those of the calls before too; `None` where there are none.
    cached: Option<Positions>,
    /// Those by which queries and keys are rotated, where these are on several axes.
    axes: Option<AxisPositions>,
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

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q, T_kv)
    /// for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<AttentionOutput> {
        let call = self.call(input.into())?;
        let AttentionOutput { context, weights } = call.attend_with_weights()?;
        let context = self.output(&context, &call)?;
        call.commit()?;
        Ok(AttentionOutput { context, weights })
    }

    /// The path that [`forward_with`](Self::forward_with) takes for an input, and why. It costs the input's projections and a
    /// copy of its cache, which stays as it is.
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
            (Some(ContentTables::Distances(tables)), Some((k, v))) => {
                let (q, terms) = tables.terms(&q, &k, scale, &self.projections)?;
                (q, Some((k, v)), Some(terms))
            }
            (_, kv) => (q, kv, None),
        };
        let mask = self.mask(&input, &inputs, positions.as_ref())?;
        let keys = match (kv, input.cache.take(), inputs.keys, inputs.new_tokens) {
            (Some((k, v)), Some(cache), _, Some(new_tokens)) => CallKeys::Cached(cache.stage(new_tokens, &k, &v)?),
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
                CallKeys::Cached(cache.read(
                    new_tokens,
                    &q,
                    [cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim()],
                )?)
            }
            (None, ..) => bail!("[multi_head_attention] {NO_KEYS}"),
        };
        let batched = input.queries.rank() == 3;
        let (options, function) = (self.options(&input), input.function);
        Ok(AttentionCall { q, keys, mask, options, batched, residual: inputs.residual, gate, function })
    }

    fn check<'a>(&self, input: &AttentionInput<'a>) -> Result<Inputs<'a>> {
        let cfg = &self.config;
        let batched = input.queries.rank() == 3;
        let queries = self.expected(cfg.embed_dim(), batched).check("queries", input.queries)?;
        let (b, t_q, _) = queries.dims3()?;
        let residual = self.expected(cfg.embed_dim(), batched).check_residual(input, cfg.out_dim())?;
        let (keys, t_kv, key_dims) = match (input.memory, input.shared_cache) {
            (None, Some(cache)) => {
                if cfg.kv_source() != KvSource::EarlierLayer {
                    bail!(
                        "[multi_head_attention] the cache of an earlier layer was given, but the layer has keys of its own"
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
                let (given_keys, given_values) = input.key_value.unwrap_or((input.queries, input.queries));
                self.check_one_input(given_keys, given_values)?;
                let mut keys = self.expected(cfg.key_size(), batched).check("keys", given_keys)?;
                let mut values = self.expected(cfg.value_size(), batched).check("values", given_values)?;
                if [keys.dim(0)?, values.dim(0)?] != [b, b] || keys.dim(1)? != values.dim(1)? {
                    bail!(
                        "[multi_head_attention] queries {:?}, keys {:?} and values {:?} differ in batch size, or keys and values in length",
                        input.queries.dims(),
                        given_keys.dims(),
                        given_values.dims()
                    )
                }
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
                "[multi_head_attention] the config has a relative bias, expected the stack's one in `with_relative_bias`"
            )
        }
        self.check_content(input)?;
        let new_tokens = input.new_tokens(OP, (b, t_q))?;
        if let Some(new_tokens) = &new_tokens {
            self.check_cached(new_tokens)?;
        }
        Ok(Inputs { queries, keys, new_tokens, residual, sum: input.sum, b, t_q, t_kv })
    }

    /// That the layer has no part, and the call no memory, that knows of one sequence only.
    fn check_takes_packed(&self, input: &AttentionInput) -> Result<()> {
        if self.relative_bias.is_some() && (input.positions.is_some() || input.key_positions.is_some()) {
            bail!(
                "[multi_head_attention] positions were given beside packed sequences, expected none for a relative bias: each counts from 0"
            )
        }
        let has_falcons = matches!(self.alibi, Some(Alibi::Falcon(_)));
        let part = match (has_falcons, self.config.appended_keys()) {
            (true, _) => "a bias (T_q, T_kv) that follows from positions",
            (false, 1..) => "keys that it appends",
            (false, 0) if input.memory.is_some() && self.rotary.is_some() => {
                bail!(
                    "[multi_head_attention] packed sequences were given with a memory, whose keys stand at 0..T_kv; expected keys and values"
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
                "[multi_head_attention] {what} were given, but relative positions by content are between the tokens of a call"
            ),
            None => Ok(()),
        }
    }

    /// Whether scores get a bias that follows from positions.
    fn adds_bias(&self) -> bool {
        matches!(self.alibi, Some(Alibi::Falcon(_))) || self.relative_bias.is_some()
    }

    fn check_cached(&self, new_tokens: &NewTokens) -> Result<()> {
        if self.bias_kv.is_some() {
            bail!(
                "[multi_head_attention] the layer has a learned key (bias_kv), which stands behind the last of a call, not in a cache"
            )
        }
        if self.config.add_zero_attn() {
            bail!(
                "[multi_head_attention] the layer has a key of zeros (add_zero_attn), which stands behind the last of a call, not in a cache"
            )
        }
        if let Some(context_length) = self.config.context_length().filter(|&most| new_tokens.longest() > most) {
            bail!(
                "[attention_cache] {} positions with those of the calls before are more than the context length {context_length}",
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

    /// `None` for a layer that has no use for positions; their shape is checked all the same.
    fn positions(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Option<CallPositions>> {
        let Inputs { b, t_q, t_kv, .. } = *inputs;
        let given =
            |name, given: Option<&Tensor>, t| given.map(|given| Positions::from_tensor(name, given, b, t)).transpose();
        let queries = given("positions", input.positions, t_q)?;
        let keys = given("key positions", input.key_positions, t_kv)?;
        if keys.is_some() && !input.is_cross() {
            bail!("[multi_head_attention] key positions are given, but the keys are the queries")
        }
        let axes = self.axis_positions(input, b, t_q)?;
        let adds_bias = self.adds_bias();
        if self.rotary.is_none() && self.config.query_scaling().is_none() && !adds_bias {
            return Ok(None);
        }
        let new_tokens = inputs.new_tokens.as_ref();
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
        let all_cached = |new_tokens: &NewTokens| Positions::starting_at(&[0], new_tokens.longest());
        let cached = new_tokens.filter(|_| adds_bias).map(all_cached).transpose()?;
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

    /// Queries, keys and values, normalised and rotated.
    fn project(&self, inputs: &Inputs, positions: Option<&CallPositions>) -> Result<Projected> {
        let at = |positions: &Positions| self.rotary.as_ref().map(|rotary| rotary.at(positions));
        let on_axes = positions.and_then(|positions| positions.axes.as_ref()).zip(self.rotary.as_ref());
        let at_queries = match on_axes {
            Some((axes, rotary)) => Some(rotary.on_axes(axes)),
            None => positions.and_then(|positions| at(&positions.queries)),
        };
        let at_keys = positions.and_then(|positions| positions.keys.as_ref()).and_then(at);
        let (Queries { q, gate }, kv) = match &inputs.keys {
            Keys::Inputs { keys, values } => {
                let (own, kv) = self.projections.query_key_value(&inputs.queries, keys, values)?;
                let rotation = at_keys.as_ref().or(at_queries.as_ref());
                (own, kv.map(|[k, v]| self.key_value_heads([k, v], rotation, inputs.sum)).transpose()?)
            }
            Keys::Memory(memory) => {
                (self.projections.query(&inputs.queries)?, Some((memory.k.clone(), memory.v.clone())))
            }
            Keys::Earlier(_) => (self.projections.query(&inputs.queries)?, None),
        };
        let norm = self.qk_norm.as_ref().map(|norms| &norms.q);
        let q = self.heads(
            self.normed_projection(q, norm, inputs.sum)?,
            self.config.num_heads(),
            norm,
            at_queries.as_ref(),
        )?;
        let factors = match (self.config.query_scaling(), positions) {
            (Some(scaling), Some(at)) => scaling.factors(&at.queries, q.dtype(), q.device())?,
            _ => None,
        };
        let q = match factors {
            // In the order of q's memory, (B, T, H, D).
            Some(factors) => q.transpose(1, 2)?.broadcast_mul(&factors.transpose(1, 2)?)?.transpose(1, 2)?,
            None => q,
        };
        Ok(Projected { q, kv, gate })
    }

    /// Projected keys (B, T_kv, H_kv·D) and values (B, T_kv, H_kv·D_v), followed by those that the layer
    /// appends, as heads.
    pub(super) fn key_value_heads(
        &self,
        kv: [Tensor; 2],
        rotation: Option<&Rotation>,
        sum: Option<GivenSum>,
    ) -> Result<(Tensor, Tensor)> {
        let [k, v] = kv;
        let norm = self.qk_norm.as_ref().and_then(|norms| norms.k.as_ref());
        let (mut k, mut v) = (self.normed_projection(k, norm, sum)?, self.normed_projection(v, None, None)?);
        if self.config.appended_keys() > 0 {
            let (learned_k, learned_v) = self.bias_kv.as_ref().map_or((None, None), |(k, v)| (Some(k), Some(v)));
            (k, v) = (self.append_rows(k, learned_k)?, self.append_rows(v, learned_v)?);
        }
        let h_kv = self.config.num_kv_heads();
        let v = split_heads(&v, h_kv)?;
        let v = self.value_norm.as_ref().map_or_else(|| Ok(v.clone()), |norm| norm.forward(&v))?;
        Ok((self.heads(k, h_kv, norm, rotation)?, v.transpose(1, 2)?))
    }

    /// (B, T, width) and the rows that the layer appends to each sequence: the learned one, then that of zeros.
    fn append_rows(&self, xs: Tensor, learned: Option<&Tensor>) -> Result<Tensor> {
        let (b, _, width) = xs.dims3()?;
        let zeros = match self.config.add_zero_attn() {
            true => Some(Tensor::zeros((b, 1, width), xs.dtype(), xs.device())?),
            false => None,
        };
        let learned = learned.map(|row| row.broadcast_as((b, 1, width))?.contiguous()).transpose()?;
        Tensor::cat(&[Some(xs), learned, zeros].into_iter().flatten().collect::<Vec<_>>(), 1)
    }

    /// What happens to a projection before it is split into heads.
    fn normed_projection(&self, mut xs: Tensor, norm: Option<&Norm>, sum: Option<GivenSum>) -> Result<Tensor> {
        if let Some(norm) = norm.filter(|_| self.qk_norm.as_ref().is_some_and(|norms| norms.of_projections())) {
            xs = norm.forward_over(&xs, sum.map(|GivenSum(sum)| sum))?;
        }
        match self.config.clip_qkv() {
            Some(clip) => xs.clamp(-clip, clip),
            None => Ok(xs),
        }
    }

    /// (B, T, heads · width) as heads (B, heads, T, width), a view of (B, T, ..), normalised and rotated.
    fn heads(&self, xs: Tensor, heads: usize, norm: Option<&Norm>, rotation: Option<&Rotation>) -> Result<Tensor> {
        let mut xs = split_heads(&xs, heads)?;
        let norm = norm.filter(|_| self.qk_norm.as_ref().is_some_and(|norms| !norms.of_projections()));
        if let Some(norm) = norm.filter(|_| !self.config.norm_after_rope()) {
            xs = norm.forward(&xs)?;
        }
        if let Some(rotation) = rotation {
            xs = rotation.apply(&xs)?;
        }
        if let Some(norm) = norm.filter(|_| self.config.norm_after_rope()) {
            xs = norm.forward(&xs)?;
        }
        xs.transpose(1, 2)
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
        options.scale = match self.content {
            // Not that of wider queries.
            Some(_) => Some(self.config.score_scale()),
            None => self.config.scale(),
        };
        options.softcap = self.config.softcap();
        options.sinks = self.sinks.clone();
        options.groups = self.config.head_groups();
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

/// (B, T, heads · width) to (B, T, heads, width): a view, also of columns of a wider product.
pub(super) fn split_heads(xs: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, columns) = xs.dims3()?;
    let split = [b, t, heads, columns / heads];
    if !xs.is_contiguous() {
        let view = xs.unfold(2, split[3], split[3])?;
        // Candle counts the heads in f32, which holds no more than 2^24 columns.
        if view.dims() == split {
            return Ok(view);
        }
    }
    xs.reshape(&split)
}
