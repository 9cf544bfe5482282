//! The constructors of a layer.

use std::sync::Arc;

use candle_core::{Result, bail};
use candle_nn::VarBuilder;

use super::indexer::{BlockIndexer, KeyIndexer, MeanBlockIndexer};
use super::shard::{self, LayerNorms};
use super::{MultiHeadAttention, OP};
use crate::config::{BlockScores, LocalWindow, MultiHeadAttentionConfig};
use crate::mask::AttentionMask;
use crate::params::{WeightLayout, load_projections, projection_shape};
use crate::position::{RotaryEmbedding, alibi};
use candle_attention_modules::base::{HeadCounts, HeadShard, Heads, ParameterList, ParameterReader, WholeTensors};
use candle_attention_modules::linear::{ProjectionModules, Projections};

impl MultiHeadAttention {
    /// Loads a layer with the canonical names `q_proj`, `k_proj`, `v_proj` and `o_proj` below the builder's prefix.
    ///
    /// # Errors
    /// For a config that is not valid, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &MultiHeadAttentionConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, WeightLayout::Canonical, vb)
    }

    /// Loads a layer from weights in any layout; see [`WeightLayout::detect`]. Parameters that belong to no projection
    /// (`q_norm`, `k_norm`, `sinks`, `bias_k`, `bias_v`) have the same names in every layout, except the norms of flax
    /// (`query_ln.scale`) and torchtune (`q_norm.scale`).
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for a config that the layout cannot store.
    #[doc(alias("from_pretrained", "load_state_dict"))]
    pub fn load(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, vb: VarBuilder) -> Result<Self> {
        Self::build(cfg, ParameterReader::new(OP, layout, vb)?, |source| load_projections(cfg, layout, source))
    }

    /// Makes a layer whose projections are modules of any kind, such as Candle's `QMatMul` over a quantised checkpoint,
    /// or one fused module. Biases belong to the modules; the config's bias flags are ignored.
    ///
    /// Parameters that belong to no projection (`q_norm`, `k_norm`, `sinks`, `bias_k`, `bias_v`) are read from the
    /// builder, whose dtype and device are those of the layer's inputs. Each module is called with contiguous inputs in
    /// that dtype, and has to return the shape of its [`Projection`](candle_attention_modules::linear::Projection) in
    /// the same dtype.
    ///
    /// [`state_dict`](Self::state_dict), [`projections`](Self::projections) and [`save`](Self::save) of such a layer
    /// are errors.
    ///
    /// # Errors
    /// As [`new`](Self::new), for an output projection that the config does not have, and for a missing one.
    pub fn from_modules(cfg: &MultiHeadAttentionConfig, modules: ProjectionModules, vb: VarBuilder) -> Result<Self> {
        Self::build(cfg, ParameterReader::new(OP, "of modules", vb)?, |source| {
            let width = |projection| projection_shape(cfg, projection).outputs;
            Projections::from_modules(width, &modules, source.vb.dtype(), source.vb.device())
        })
    }

    /// Makes a layer of a GGUF file, or one rank's shard of it if the projections are a shard. The builder has the
    /// other parameters of the whole layer.
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

    /// Loads one rank's shard of a layer, some of its heads, from weights in any layout: tensor parallelism. The
    /// builder is Candle's sharded one, or one of whole tensors, as quantised weights need.
    ///
    /// The outputs of all ranks sum to the output of the whole layer. After each call the caller adds them, by NCCL
    /// through `cudarc` for example, as Candle's own multi-process Llama does. Rank 0 has the bias of the output
    /// projection. Without an output projection, a rank returns the columns of its own heads.
    ///
    /// Each tensor is read whole, and the rank's shard is kept. [`config`](Self::config) returns the config of the
    /// shard. ALiBi is listed in it as the slopes of the shard's heads, except for Falcon's. Shard a relative bias by
    /// [`RelativeBias::shard`](crate::RelativeBias::shard).
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
    /// As [`load`](Self::load), for more ranks than query heads, and for layer norms of whole projections. Root mean
    /// squares of whole projections (OLMo 2) are sums over all ranks, for which calls need
    /// [`AttentionInput::with_all_reduce`](crate::AttentionInput::with_all_reduce).
    pub fn load_shard(
        cfg: &MultiHeadAttentionConfig,
        layout: WeightLayout,
        shard: HeadShard,
        vb: &impl WholeTensors,
    ) -> Result<Self> {
        let source = ParameterReader::sharded(OP, layout, vb, shard)?;
        Self::build(cfg, source, |source| load_projections(cfg, layout, source))
    }

    /// Makes a layer, or one rank's shard of it, from the config of the whole layer.
    fn build(
        cfg: &MultiHeadAttentionConfig,
        source: ParameterReader,
        projections: impl FnOnce(&ParameterReader) -> Result<Projections>,
    ) -> Result<Self> {
        cfg.validate()?;
        let h = cfg.num_heads();
        let h_kv = cfg.num_kv_heads();
        let d = cfg.head_dim();
        let config = cfg.for_shard(source.shard)?;
        let source = source.with_heads(HeadCounts { query: h, key: h_kv })?;
        let projections = projections(&source)?;
        let parameters = ParameterList::load(&shard::specs(cfg, &source)?, &source)?;
        let alibi = match cfg.alibi() {
            Some(alibi_config) => Some(alibi(alibi_config, h, source.own_range(Heads::Query, h), source.vb.device())?),
            None => None,
        };
        let layer = Self {
            config,
            projections,
            parameters: ParameterList::default(),
            norm_spans: cfg.norm_spans(source.shard),
            norms: LayerNorms::default(),
            rotary: cfg.rope().map(|rope| RotaryEmbedding::new(rope, d)).transpose()?,
            content: None,
            alibi,
            relative_embeddings: None,
            relative_bias: None,
            mask: layer_mask(cfg),
            indexer: indexer(cfg, &source)?,
            adapter: None,
        };
        layer.with_parameters(parameters)
    }
}

/// Reads the indexer of a layer, if it has one.
fn indexer(cfg: &MultiHeadAttentionConfig, source: &ParameterReader) -> Result<Option<Arc<dyn KeyIndexer>>> {
    let Some(own) = cfg.indexer() else { return Ok(None) };
    if source.shard.world_size() > 1 {
        bail!("[{OP}] the layer has an indexer, which is not sharded, expected a world size of 1")
    }
    Ok(Some(match own.scores {
        BlockScores::LargestKey => Arc::new(BlockIndexer::load(own, cfg.embed_dim(), source)?),
        BlockScores::MeanKey => Arc::new(MeanBlockIndexer::load(own, cfg, source)?),
    }))
}

/// Returns the mask that a layer's config describes.
fn layer_mask(cfg: &MultiHeadAttentionConfig) -> AttentionMask {
    let mut mask = if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() };
    if let Some(window) = cfg.window() {
        mask = mask.with_window(window);
    }
    if let Some(LocalWindow { left, right }) = cfg.local_window() {
        mask = mask.with_local_window(left, right);
    }
    if let Some(chunk) = cfg.chunk() {
        mask = mask.with_chunk(chunk);
    }
    mask
}
