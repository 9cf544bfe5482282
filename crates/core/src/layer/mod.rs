//! Layers: project, split into heads, attend, merge, project. [`forward`] is the order of a call; latent attention ends
//! in the same [`AttentionCall`](forward::AttentionCall).

mod additive;
mod checks;
mod forward;
mod heads;
mod input;
mod latent;
mod shard;
#[cfg(test)]
mod tests;
mod warnings;

pub use additive::{AdditiveAttention, AdditiveAttentionConfig, AdditiveInput};
pub use heads::ProjectedMemory;
pub use input::AttentionInput;
pub use latent::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig};

use candle_core::{ModuleT, Result, Tensor, bail};
use candle_nn::var_builder::ShardedVarBuilder;
use candle_nn::{Linear, VarBuilder};

use crate::config::{LocalWindow, MultiHeadAttentionConfig};
use crate::mask::AttentionMask;
use crate::params::{WeightLayout, load_projections, projection_shape, state_dict};
use crate::position::{
    AlibiConfig, ContentPositions, RelativeBias, RelativeEmbeddings, RotaryEmbedding, ScoreTerm, Term, alibi,
};
use candle_attention_modules::base::{Dim, Expect, HeadShard, Heads, ParameterList, ParameterReader, save};
use candle_attention_modules::linear::{Projection, ProjectionModule, ProjectionModules, Projections};
use candle_attention_modules::norm::{Norm, ShardedDimension};
use checks::Expected;

const OP: &str = "multi_head_attention";

/// What a layer gives when the weights are asked for too.
#[derive(Debug, Clone)]
pub struct LayerOutput {
    /// The output, projected: (B, T_q, out_dim); (T_q, out_dim) for an input (T_q, E).
    pub output: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv); (H, T_q, T_kv) for an input (T_q, E).
    pub weights: Tensor,
}

/// Multi-head attention: self or cross, of any head count down to one.
///
/// ```
/// use candle_attention::{AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
/// let mha = MultiHeadAttention::new(&cfg, vb.pp("self_attn"))?;
///
/// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
/// let ys = mha.forward(&xs)?;
/// assert_eq!(ys.dims(), [2, 6, 64]);
///
/// let padding = AttentionMask::none().with_valid_lens(vec![6, 4]);
/// let seen = mha.forward_with_weights(AttentionInput::new(&xs).with_mask(&padding))?;
/// assert_eq!((seen.output.dims(), seen.weights.dims()), (&[2, 6, 64][..], &[2, 4, 6, 6][..]));
/// # Ok(()) }
/// ```
///
/// A layer is a value without state. Inputs are (B, T, E), or (T, E) for one sequence, which then gives (T, out_dim).
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    config: MultiHeadAttentionConfig,
    projections: Projections,
    parameters: ParameterList,
    norm_spans: [Option<ShardedDimension>; 2],
    /// Of queries, keys, values and the context.
    norms: [Option<Norm>; 4],
    rotary: Option<RotaryEmbedding>,
    /// What is added to the scores, in this order.
    content: Option<Term>,
    alibi: Option<Term>,
    /// The stack's, as is the bias.
    relative_embeddings: Option<RelativeEmbeddings>,
    relative_bias: Option<RelativeBias>,
    mask: AttentionMask,
}

impl MultiHeadAttention {
    /// A layer with the canonical names `q_proj`, `k_proj`, `v_proj` and `o_proj` below the builder's prefix.
    ///
    /// # Errors
    /// For a config that does not fit together, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &MultiHeadAttentionConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, WeightLayout::Canonical, vb)
    }

    /// A layer from weights in any layout; see [`WeightLayout::detect`]. Parameters that belong to no projection
    /// (`q_norm`, `k_norm`, `sinks`, `bias_k`, `bias_v`) have the same names in every layout.
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for a config that the layout cannot hold.
    pub fn load(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, vb: VarBuilder) -> Result<Self> {
        Self::build(cfg, ParameterReader::new(OP, layout, vb)?, |source| load_projections(cfg, layout, source))
    }

    /// A layer whose projections are modules of any kind, such as Candle's `QMatMul` over a quantised checkpoint, or
    /// one module in the place of several. Their biases are their own, and the config's are not looked at.
    ///
    /// Parameters that belong to no projection (`q_norm`, `k_norm`, `sinks`, `bias_k`, `bias_v`) are read from the
    /// builder, and its dtype and device are those of the layer's inputs: each module gets contiguous inputs in that
    /// dtype and gives the shape of its [`Projection`] in the same dtype.
    ///
    /// [`state_dict`](Self::state_dict), [`projections`](Self::projections) and [`save`](Self::save) of such a layer
    /// are errors.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for an output projection that the config does not want, or a missing one.
    pub fn from_modules(cfg: &MultiHeadAttentionConfig, modules: ProjectionModules, vb: VarBuilder) -> Result<Self> {
        Self::build(cfg, ParameterReader::new(OP, "of modules", vb)?, |source| {
            let width = |place| projection_shape(cfg, place).0;
            Projections::from_modules(width, &modules, source.vb.dtype(), source.vb.device())
        })
    }

    /// A layer of a GGUF file, or a process's share of it if the projections are that; the other parameters of the
    /// whole layer are in the builder.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    #[doc(hidden)]
    pub fn of_gguf(
        cfg: &MultiHeadAttentionConfig,
        projections: Projections,
        vb: VarBuilder,
        shard: HeadShard,
    ) -> Result<Self> {
        let mut source = ParameterReader::new(OP, "gguf", vb)?;
        source.shard = shard;
        Self::build(cfg, source, |_| Ok(projections))
    }

    /// The heads of one process of several, from weights in any layout and Candle's sharded builder: tensor
    /// parallelism.
    ///
    /// The sum of what all processes give for an input is what the whole layer gives: after each call the caller adds
    /// them up, by NCCL through `cudarc` for example, as Candle's own multi-process Llama does. The bias of the output
    /// projection is that of rank 0. Without an output projection a process gives the columns of its own heads.
    ///
    /// Each tensor is read whole, and the part of this rank is kept.
    /// [`config`](Self::config) is that of the process's own layer, with ALiBi as the slopes of its heads, but for
    /// Falcon's. A relative bias is divided by [`RelativeBias::shard`](crate::RelativeBias::shard).
    ///
    /// ```no_run
    /// use candle_attention::{HeadShard, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
    /// use candle_core::{DType, Device};
    /// use candle_nn::var_builder::ShardedSafeTensors;
    /// # fn main() -> candle_core::Result<()> {
    /// # let (rank, world_size) = (0, 2);
    /// let cfg = MultiHeadAttentionConfig::new(4096, 32).with_num_kv_heads(8).with_causal(true);
    /// // SAFETY: nobody writes to the file while it is mapped.
    /// let vb = unsafe { ShardedSafeTensors::var_builder(&["model.safetensors"], DType::BF16, &Device::Cpu)? };
    /// let shard = HeadShard::new(rank, world_size)?;
    /// let vb = vb.pp("model.layers.0.self_attn");
    /// let mha = MultiHeadAttention::load_shard(&cfg, WeightLayout::Canonical, shard, &vb)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`load`](Self::load); for more processes than query heads; and for layer norms of whole projections. Root
    /// mean squares of these (OLMo 2) are sums over all processes, which a call is [given](AttentionInput::with_all_reduce).
    pub fn load_shard(
        cfg: &MultiHeadAttentionConfig,
        layout: WeightLayout,
        shard: HeadShard,
        vb: &ShardedVarBuilder<'static>,
    ) -> Result<Self> {
        let source = ParameterReader::sharded(OP, layout, vb, shard)?;
        Self::build(cfg, source, |source| load_projections(cfg, layout, source))
    }

    /// A layer, or a process's share of it, where the config is the whole layer's.
    fn build(
        cfg: &MultiHeadAttentionConfig,
        source: ParameterReader,
        projections: impl FnOnce(&ParameterReader) -> Result<Projections>,
    ) -> Result<Self> {
        cfg.validate()?;
        let (h, h_kv, d) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim());
        let config = cfg.for_shard(source.shard)?;
        let source = source.with_heads([h, h_kv])?;
        let projections = projections(&source)?;
        let parameters = ParameterList::load(&shard::specs(cfg, &source)?, &source)?;
        let own = source.own_range(Heads::Query, h);
        let alibi = cfg.alibi().map(|config| alibi(config, h, own, source.vb.device())).transpose()?;
        let mask = if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() };
        let mask = cfg.window().into_iter().fold(mask, AttentionMask::with_window);
        let mask = match cfg.local_window() {
            Some(LocalWindow { left, right }) => mask.with_local_window(left, right),
            None => mask,
        };
        let mask = cfg.chunk().into_iter().fold(mask, AttentionMask::with_chunk);
        let layer = Self {
            config,
            projections,
            parameters: ParameterList::default(),
            norm_spans: cfg.norm_spans(source.shard),
            norms: [const { None }; 4],
            rotary: cfg.rope().map(|rope| RotaryEmbedding::new(rope, d)).transpose()?,
            content: None,
            alibi,
            relative_embeddings: None,
            relative_bias: None,
            mask,
        };
        layer.with_parameters(parameters)
    }

    /// The same layer with tables of cosines and sines that it shares with others, in the place of its own.
    ///
    /// # Errors
    /// If the tables are not those of the layer's config.
    pub fn with_rotary(self, rotary: RotaryEmbedding) -> Result<Self> {
        match self.config.rope() {
            None => bail!("[{OP}] rotary tables are given, but the config has no rope"),
            Some(rope) => rotary.check_config(OP, rope, self.config.head_dim())?,
        }
        Ok(Self { rotary: Some(rotary), ..self })
    }

    /// The same layer with the relative bias that it shares with the other layers of its stack. A layer whose config
    /// has one cannot be called without it.
    ///
    /// # Errors
    /// If the bias is not that of the layer's config, or is for another number of heads, dtype or device.
    pub fn with_relative_bias(mut self, bias: RelativeBias) -> Result<Self> {
        let h = self.config.num_heads();
        match self.config.relative_bias() {
            None => bail!("[{OP}] a relative bias is given, but the config has none"),
            Some(buckets) if buckets != bias.config() || h != bias.num_heads() => bail!(
                "[{OP}] the relative bias is of {:?} and {} heads, expected {buckets:?} and {h} heads",
                bias.config(),
                bias.num_heads()
            ),
            Some(_) => {}
        }
        let weight = Expect::one(OP, "the relative bias", bias.weight());
        weight.dtype(self.projections.dtype, "the weights'")?.same_device("the weights", &self.projections.device)?;
        self.relative_bias = Some(bias);
        Ok(self)
    }

    /// The same layer with the vectors of distances that it shares with the other layers of its stack, as
    /// [`DisentangledConfig`](crate::DisentangledConfig) wants them. A layer whose config has that cannot be called
    /// without them.
    ///
    /// # Errors
    /// If the config has no such positions, and for vectors of another shape, dtype or device.
    pub fn with_relative_embeddings(mut self, embeddings: RelativeEmbeddings) -> Result<Self> {
        let weight = Expect::many(OP, "the relative embeddings", embeddings.weight());
        weight.dtype(self.projections.dtype, "the weights'")?.same_device("the weights", &self.projections.device)?;
        let Some(ContentPositions::Disentangled(config)) = self.config.content_positions() else {
            bail!("[{OP}] relative embeddings are given, but the config has no disentangled positions")
        };
        weight.shape(&[Dim::Named("2 · span", 2 * config.span()), Dim::Named("E", self.config.embed_dim())])?;
        self.relative_embeddings = Some(embeddings);
        let parameters = self.parameters.clone();
        self.with_parameters(parameters)
    }

    /// The same layer with another module in a projection's place, made by `change` from the one that is there: an
    /// adapter around it, as in LoRA (arXiv:2106.09685), or something else altogether.
    ///
    /// What `change` is given computes the layer's own projection without a copy of its weights. The module gets
    /// contiguous inputs in the dtype of the layer's weights, and gives the shape of [`Projection`] in the same
    /// dtype. Its parameters are its own: [`state_dict`](Self::state_dict), [`projections`](Self::projections) and
    /// [`save`](Self::save) are errors from now on.
    ///
    /// # Errors
    /// For the output projection of a layer without one, and those of `change`.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, Projection};
    /// use candle_core::{DType, Device, Module, Result, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// # fn main() -> Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    ///
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let down = candle_nn::linear_no_bias(64, 8, vb.pp("lora_a"))?;
    /// let up = candle_nn::linear_no_bias(8, 64, vb.pp("lora_b"))?;
    /// let mha = mha.map_projection(Projection::Query, |own| {
    ///     Ok(Arc::new(move |xs: &Tensor| own.forward(xs)? + up.forward(&down.forward(xs)?)? * 0.5))
    /// })?;
    /// # let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
    /// # assert_eq!(mha.forward(&xs)?.dims(), [2, 6, 64]);
    /// # Ok(()) }
    /// ```
    pub fn map_projection(
        mut self,
        place: Projection,
        change: impl FnOnce(ProjectionModule) -> Result<ProjectionModule>,
    ) -> Result<Self> {
        self.projections = self.projections.map(projection_shape(&self.config, place).0, place, change)?;
        Ok(self)
    }

    /// The same layer with what its variables hold now as plain packed weights, so that nothing is tracked for
    /// gradients: for inference after training. Modules of the caller's stay as they are.
    ///
    /// ```
    /// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// # fn main() -> candle_core::Result<()> {
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let mha = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(64, 4), vb)?;
    /// // ... training ...
    /// let frozen = mha.freeze()?;
    /// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
    /// assert!(mha.forward(&xs)?.track_op() && !frozen.forward(&xs)?.track_op());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let layer = Self {
            projections: self.projections.freeze()?,
            relative_embeddings: self.relative_embeddings.as_ref().map(RelativeEmbeddings::freeze).transpose()?,
            relative_bias: self.relative_bias.as_ref().map(RelativeBias::freeze).transpose()?,
            ..self.clone()
        };
        layer.with_parameters(self.parameters.freeze()?)
    }

    /// What the layer was built from.
    pub fn config(&self) -> &MultiHeadAttentionConfig {
        &self.config
    }

    /// The query, key, value and output projections, as they were loaded, with what variables hold now; a gate is in
    /// [`state_dict`](Self::state_dict) alone.
    ///
    /// A layer over plain tensors on a CPU holds packed weights ([`PackedLinear`]), which this copies back; those of q,
    /// k and v that read inputs of one width are views of one weight. Candle's `QTensor::quantize` reads the buffer of
    /// a view from its beginning, and so the weight of q for all three, without an error: give it a copy
    /// (`force_contiguous`). Where values are the keys' projection, it stands in both places.
    ///
    /// # Errors
    /// If a projection is a module of the caller's, for a layer without projections of keys and values, and if memory
    /// is short.
    ///
    /// [`PackedLinear`]: candle_attention_modules::linear::PackedLinear
    pub fn projections(&self) -> Result<(Linear, Linear, Linear, Option<Linear>)> {
        let mut all = self.projections.to_linears()?;
        let mut take = |place| all.remove(&place);
        let (Some(q), Some(k)) = (take(Projection::Query), take(Projection::Key)) else {
            bail!("[{OP}] keys and values are those of an earlier layer, which has their projections")
        };
        Ok((q, k.clone(), take(Projection::Value).unwrap_or(k), take(Projection::Output)))
    }

    /// The layer's parameters under the names and in the shapes of a layout, as a state dict that PyTorch reads.
    ///
    /// A relative bias is not among them: it belongs to the stack of layers. Tensors may be views of one weight, as
    /// in [`projections`](Self::projections).
    ///
    /// A causal layer with a context length gets the persistent `mask` buffer in the layouts whose modules register one
    /// (`book`, `short` and their stacks), so that a strict `load_state_dict` succeeds.
    ///
    /// # Errors
    /// If the layout cannot hold the layer, and why; and if a projection is a module of the caller's.
    pub fn state_dict(&self, layout: WeightLayout) -> Result<Vec<(String, Tensor)>> {
        let mut tensors = state_dict(&self.config, layout, &self.projections.to_linears()?)?;
        tensors.extend(self.parameters.named()?);
        Ok(tensors)
    }

    /// Writes [`state_dict`](Self::state_dict) as a safetensors file.
    ///
    /// # Errors
    /// As that, and if the file cannot be written.
    pub fn save(&self, path: impl AsRef<std::path::Path>, layout: WeightLayout) -> Result<()> {
        save(self.state_dict(layout)?, path.as_ref())
    }

    fn terms(&self) -> impl Iterator<Item = &dyn ScoreTerm> {
        let bias = self.relative_bias.as_ref().map(|bias| bias as &dyn ScoreTerm);
        [&self.content, &self.alibi].into_iter().flatten().map(|term| &**term).chain(bias)
    }

    fn terms_take_positions(&self) -> bool {
        self.config.relative_bias().is_some() || self.config.alibi() == Some(&AlibiConfig::Falcon)
    }

    /// What inputs have to be like.
    fn expected(&self, batched: bool) -> Expected<'_> {
        Expected { op: OP, batched, dtype: self.projections.dtype, device: &self.projections.device }
    }
}

/// Not `Module`: Candle gives every `Module` a `forward_t` that ignores `train`, and dropout would be lost in silence.
impl ModuleT for MultiHeadAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
