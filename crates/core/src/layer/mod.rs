//! Layers: project, split into heads, attend, merge, project. [`forward`] has the order of a call. Latent attention
//! makes the same [`PreparedCall`](forward::PreparedCall).

mod adapter;
mod adapter_names;
mod additive;
mod build;
mod chosen_keys;
mod compressed;
mod forward;
mod heads;
mod indexer;
mod input;
mod latent;
mod memory;
mod paged_batch;
mod positions;
mod shard;
mod sink_tokens;
mod temperature;
#[cfg(test)]
mod tests;
mod validate;
mod warnings;
mod whole_mask;

pub use additive::{AdditiveAttention, AdditiveAttentionConfig, AdditiveInput};
pub use compressed::{
    CompressedKeyAttention, CompressedKeyAttentionConfig, CompressedKeyCache, CompressedKeyIndexerConfig,
    CompressedKeyInput, KeyCompression,
};
pub use indexer::{ChosenKeys, IndexerConfig, IndexerQueries, OutputWithChoice};
pub use input::AttentionInput;
pub use latent::{LatentProjections, LatentScales, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig};
pub use memory::ProjectedMemory;

use std::sync::Arc;

use candle_core::{ModuleT, Result, Tensor, bail};
use candle_nn::Linear;

use crate::config::MultiHeadAttentionConfig;
use crate::mask::AttentionMask;
use crate::params::{WeightLayout, projection_shape, state_dict};
use crate::position::{
    AlibiConfig, ContentPositions, RelativeBias, RelativeEmbeddings, RotaryEmbedding, ScoreTerm, SharedTerm,
};
use adapter::LoadedAdapter;
use candle_attention_modules::base::{Dim, Expect, ParameterList, save};
use candle_attention_modules::linear::{Projection, ProjectionModule, Projections};
use indexer::KeyIndexer;
use shard::{LayerNorms, NormSpans};
use validate::ExpectedInput;

const OP: &str = "multi_head_attention";

/// The output and the attention weights that `forward_with_weights` returns.
#[derive(Debug, Clone)]
pub struct LayerOutput {
    /// The projected output: (B, T_q, out_dim); (T_q, out_dim) for an input (T_q, E).
    pub output: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv); (H, T_q, T_kv) for an input (T_q, E).
    pub weights: Tensor,
}

/// Multi-head attention: self-attention or cross-attention, with any number of heads.
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
/// let found = mha.forward_with_weights(AttentionInput::new(&xs).with_mask(&padding))?;
/// assert_eq!((found.output.dims(), found.weights.dims()), (&[2, 6, 64][..], &[2, 4, 6, 6][..]));
/// # Ok(()) }
/// ```
///
/// A layer has no state. Inputs are (B, T, E) with outputs (B, T, out_dim), or (T, E) with outputs (T, out_dim) for one
/// sequence.
#[doc(alias("MultiheadAttention", "SelfAttention", "CausalSelfAttention", "CrossAttention"))]
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    config: MultiHeadAttentionConfig,
    projections: Projections,
    parameters: ParameterList,
    norm_spans: NormSpans,
    norms: LayerNorms,
    rotary: Option<RotaryEmbedding>,
    content: Option<SharedTerm>,
    alibi: Option<SharedTerm>,
    /// The vectors of distances that all layers of a stack share.
    relative_embeddings: Option<RelativeEmbeddings>,
    /// The bias that all layers of a stack share.
    relative_bias: Option<RelativeBias>,
    mask: AttentionMask,
    /// The module that chooses the keys of each query.
    indexer: Option<Arc<dyn KeyIndexer>>,
    adapter: Option<LoadedAdapter>,
}

impl MultiHeadAttention {
    /// Replaces the layer's tables of cosines and sines by those that it shares with other layers.
    ///
    /// # Errors
    /// If the tables do not have the layer's config.
    pub fn with_rotary(self, rotary: RotaryEmbedding) -> Result<Self> {
        match self.config.rope() {
            None => bail!("[{OP}] rotary tables are given, but the config has no rope"),
            Some(rope) => rotary.check_config(OP, rope, self.config.head_dim())?,
        }
        Ok(Self { rotary: Some(rotary), ..self })
    }

    /// Sets the relative bias, which the layer shares with the other layers of its stack. A layer whose config has one
    /// cannot be called without it.
    ///
    /// # Errors
    /// If the bias has another config, number of heads, dtype or device than the layer.
    pub fn with_relative_bias(mut self, bias: RelativeBias) -> Result<Self> {
        let h = self.config.num_heads();
        let Some(buckets) = self.config.relative_bias() else {
            bail!("[{OP}] a relative bias is given, but the config has none")
        };
        if buckets != bias.config() || h != bias.num_heads() {
            bail!(
                "[{OP}] the relative bias is of {:?} and {} heads, expected {buckets:?} and {h} heads",
                bias.config(),
                bias.num_heads()
            )
        }
        let weight = Expect::one(OP, "the relative bias", bias.weight());
        weight.dtype(self.projections.dtype, "the weights'")?.same_device("the weights", &self.projections.device)?;
        self.relative_bias = Some(bias);
        Ok(self)
    }

    /// Sets the vectors of distances of [`DisentangledConfig`](crate::DisentangledConfig), which the layer shares with
    /// the other layers of its stack. A layer whose config has these positions cannot be called without the vectors.
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

    /// Replaces a projection by `change(current)`, for example to wrap it in an adapter.
    ///
    /// LoRA (arXiv:2106.09685) in PEFT's files is loaded, trained and merged by `candle_attention::peft`. This function
    /// is for other adapters.
    ///
    /// The current module computes the layer's own projection, without a copy of its weights. The new module is called
    /// with contiguous inputs in the dtype of the layer's weights, and has to return the shape of its [`Projection`] in
    /// the same dtype. The layer does not know the module's parameters: [`state_dict`](Self::state_dict),
    /// [`projections`](Self::projections) and [`save`](Self::save) are errors afterwards, and [`freeze`](Self::freeze)
    /// keeps the module with its variables.
    ///
    /// # Errors
    /// For the output projection of a layer without one, for a layer with an adapter of PEFT, and if `change` fails.
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
        projection: Projection,
        change: impl FnOnce(ProjectionModule) -> Result<ProjectionModule>,
    ) -> Result<Self> {
        if self.adapter.is_some() {
            bail!(
                "[{OP}] the layer has an adapter, expected modules around its projections before the adapter is loaded"
            )
        }
        let outputs = projection_shape(&self.config, projection).outputs;
        self.projections = self.projections.map(outputs, projection, change)?;
        Ok(self)
    }

    /// Returns a copy for inference: the current weights are packed, and gradients are not tracked.
    ///
    /// Modules of the caller's are kept, with their variables. An adapter of PEFT is kept unmerged, with its current
    /// values; [`merge_and_unload`](Self::merge_and_unload) adds it to the weights.
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
    /// If the weights do not fit in memory.
    pub fn freeze(&self) -> Result<Self> {
        let layer = Self {
            projections: self.projections.freeze()?,
            relative_embeddings: self.relative_embeddings.as_ref().map(RelativeEmbeddings::freeze).transpose()?,
            relative_bias: self.relative_bias.as_ref().map(RelativeBias::freeze).transpose()?,
            adapter: self.adapter.as_ref().map(LoadedAdapter::freeze).transpose()?,
            indexer: self.indexer.as_ref().map(|own| own.freeze()).transpose()?,
            ..self.clone()
        };
        layer.with_parameters(self.parameters.freeze()?)
    }

    /// Returns the config of the layer.
    pub fn config(&self) -> &MultiHeadAttentionConfig {
        &self.config
    }

    /// Returns the query, key, value and output projections with the current weights. Only
    /// [`state_dict`](Self::state_dict) returns a gate.
    ///
    /// A layer over plain tensors on a CPU stores packed weights ([`PackedLinear`]), which are copied back; those of q,
    /// k and v with inputs of one width are views of one weight. Candle's `QTensor::quantize` reads the buffer of a
    /// view from its beginning, and so would quantise q's weight three times without an error: pass it a copy
    /// (`force_contiguous`). If the values are the keys' projection, it is returned for both.
    ///
    /// # Errors
    /// If a projection is a module of the caller's or the layer has an adapter, for a layer without projections of keys
    /// and values, and if the weights do not fit in memory.
    ///
    /// [`PackedLinear`]: candle_attention_modules::linear::PackedLinear
    pub fn projections(&self) -> Result<(Linear, Linear, Linear, Option<Linear>)> {
        self.refuse_adapter()?;
        let mut all = self.projections.to_linears()?;
        let (Some(q), Some(k)) = (all.remove(&Projection::Query), all.remove(&Projection::Key)) else {
            bail!("[{OP}] keys and values are those of an earlier layer, which has their projections")
        };
        let v = all.remove(&Projection::Value).unwrap_or_else(|| k.clone());
        Ok((q, k, v, all.remove(&Projection::Output)))
    }

    /// Returns the layer's parameters under the names and in the shapes of a layout, as a state dict that PyTorch
    /// reads.
    ///
    /// A relative bias is not included: it belongs to the stack of layers. Tensors may be views of one weight, as in
    /// [`projections`](Self::projections).
    ///
    /// For a causal layer with a context length, the state dict has the persistent `mask` buffer in the layouts whose
    /// modules register one (`book`, `short` and their stacks), so that a strict `load_state_dict` succeeds.
    ///
    /// # Errors
    /// If the layout cannot store the layer, with the reason, and if a projection is a module of the caller's or the
    /// layer has an adapter or an indexer.
    pub fn state_dict(&self, layout: WeightLayout) -> Result<Vec<(String, Tensor)>> {
        self.refuse_adapter()?;
        if self.indexer.is_some() {
            bail!("[{OP}] the layer has an indexer, which no layout stores, expected a layer without one")
        }
        let mut tensors = state_dict(&self.config, layout, &self.projections.to_linears()?)?;
        for (name, tensor) in self.parameters.named()? {
            tensors.push((layout.parameter_name(name), tensor));
        }
        Ok(tensors)
    }

    /// Writes [`state_dict`](Self::state_dict) as a safetensors file.
    ///
    /// # Errors
    /// As [`state_dict`](Self::state_dict), and if the file cannot be written.
    pub fn save(&self, path: impl AsRef<std::path::Path>, layout: WeightLayout) -> Result<()> {
        save(self.state_dict(layout)?, path.as_ref())
    }

    /// Returns the layer's score modifiers in the order in which they are applied.
    fn score_modifiers(&self) -> impl Iterator<Item = &dyn ScoreTerm> {
        let bias = self.relative_bias.as_ref().map(|bias| bias as &dyn ScoreTerm);
        [&self.content, &self.alibi].into_iter().flatten().map(|modifier| &**modifier).chain(bias)
    }

    /// Returns whether a score modifier of a call depends on positions.
    fn has_modifier_with_positions(&self, input: &AttentionInput) -> bool {
        let has_alibi_by_position = match self.config.alibi() {
            Some(AlibiConfig::Falcon) => true,
            // The order of a tree's tokens is not that of their positions.
            Some(_) => input.has_tree(),
            None => false,
        };
        self.config.relative_bias().is_some() || has_alibi_by_position
    }

    /// Returns the expected rank, dtype and device of the layer's inputs.
    fn expected(&self, batched: bool) -> ExpectedInput<'_> {
        ExpectedInput { op: OP, batched, dtype: self.projections.dtype, device: &self.projections.device }
    }
}

/// Implements `ModuleT` and not `Module`, for which Candle provides a `forward_t` that ignores `train`.
impl ModuleT for MultiHeadAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
