//! Loading of a layer: its weights by name, some of its heads, or projections that a caller has.

use candle_core::Result;
use candle_nn::VarBuilder;

use super::additions::Additions;
use super::{LayerIndexer, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OP, QueryCompression};
use crate::layer::indexer::{IndexerShape, load_indexer};
use crate::mask::AttentionMask;
use crate::position::{RopeConfig, RotaryEmbedding};
use candle_attention_modules::base::{HeadCounts, HeadShard, Heads, ParameterReader, Share, WholeTensors};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

/// The rows and the columns of a weight (out, in) that belong to heads.
const ROWS: Share = Share::Heads { heads: Heads::Query, dim: 0 };
const COLUMNS: Share = Share::Heads { heads: Heads::Query, dim: 1 };

/// The projections of a layer, or of one rank's heads.
#[derive(Debug, Clone)]
pub struct LatentProjections {
    /// The projection that compresses queries, if the config has one.
    pub compression: Option<PackedLinear>,
    /// The projection to queries, (H · D, ..).
    pub queries: PackedLinear,
    /// The projection to latents and shared keys, (rank + rope, E).
    pub down: PackedLinear,
    /// The projection from latents to the keys and values of all heads, (H · (nope + D_v), rank).
    pub up: PackedLinear,
    /// The output projection, (E, H · D_v).
    pub out: PackedLinear,
}

impl MultiHeadLatentAttention {
    /// Loads a layer with DeepSeek's names below the builder's prefix: `q_proj`, or `q_a_proj`, `q_a_layernorm` and
    /// `q_b_proj` where queries are compressed; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`. The
    /// options of the config name their own parameters.
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// For a config that is not valid, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &MultiHeadLatentAttentionConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, ParameterReader::new(OP, "latent", vb)?)
    }

    /// Loads one rank's shard of a layer, some of its heads, from Candle's sharded builder or one of whole tensors:
    /// tensor parallelism as in [`MultiHeadAttention::load_shard`](crate::MultiHeadAttention::load_shard). Every rank
    /// has the whole projections that compress tokens, and a whole cache. [`config`](Self::config) returns the config
    /// of the shard.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for more ranks than heads.
    pub fn load_shard(cfg: &MultiHeadLatentAttentionConfig, shard: HeadShard, vb: &impl WholeTensors) -> Result<Self> {
        Self::load(cfg, ParameterReader::sharded(OP, "latent", vb, shard)?)
    }

    /// Makes a layer of the weights of a GGUF file. The builder has the weights of the norms, `q_a_layernorm` and
    /// `kv_a_layernorm`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[doc(hidden)]
    pub fn of_gguf(
        cfg: &MultiHeadLatentAttentionConfig,
        projections: LatentProjections,
        vb: VarBuilder,
    ) -> Result<Self> {
        Self::build(cfg, ParameterReader::new(OP, "gguf", vb)?, |_| Ok(projections))
    }

    /// Loads all heads, or the heads of a shard.
    fn load(cfg: &MultiHeadLatentAttentionConfig, source: ParameterReader) -> Result<Self> {
        let h = cfg.num_heads();
        let embed_dim = cfg.embed_dim();
        let rank = cfg.kv_lora_rank();
        let query_width = h.saturating_mul(cfg.query_row_width());
        let down_shape = (rank.saturating_add(cfg.rope_head_dim()), embed_dim);
        let up_shape = (h.saturating_mul(cfg.nope_head_dim().saturating_add(cfg.value_head_dim())), rank);
        let out_shape = (embed_dim, h.saturating_mul(cfg.value_head_dim()));
        // Published checkpoints of Mistral Large 4 and A.X K2 have other names than transformers.
        Self::build(cfg, source, |heads| {
            let (compression, queries) = match cfg.q_lora_rank() {
                Some(q_rank) => {
                    // A gate that is fused with the queries reads them before their norm too.
                    let (name, width) = if cfg.has_fused_gate() {
                        (heads.stored_module(&["q_gate_proj", "q_b_proj"]), q_rank.saturating_mul(2))
                    } else {
                        ("q_b_proj", q_rank)
                    };
                    (
                        Some(heads.linear("q_a_proj", (q_rank, embed_dim), cfg.bias(), None)?.try_into()?),
                        heads.linear(name, (query_width, width), false, Some(ROWS))?.try_into()?,
                    )
                }
                None => {
                    let name = heads.stored_module(&["q_proj", "wq"]);
                    (None, heads.linear(name, (query_width, embed_dim), false, Some(ROWS))?.try_into()?)
                }
            };
            let down = heads.stored_module(&["kv_a_proj_with_mqa", "wkv_a_with_mqa"]);
            let up = heads.stored_module(&["kv_b_proj", "wkv_b"]);
            let out = heads.stored_module(&["o_proj", "wo", "dense"]);
            Ok(LatentProjections {
                compression,
                queries,
                down: heads.linear(down, down_shape, cfg.bias(), None)?.try_into()?,
                up: heads.linear(up, up_shape, false, Some(ROWS))?.try_into()?,
                out: heads.linear(out, out_shape, cfg.bias(), Some(COLUMNS))?.try_into()?,
            })
        })
    }

    /// Makes a layer with all heads, or the heads of a shard, of its projections and the norms of the source.
    fn build(
        cfg: &MultiHeadLatentAttentionConfig,
        source: ParameterReader,
        projections: impl FnOnce(&ParameterReader) -> Result<LatentProjections>,
    ) -> Result<Self> {
        cfg.validate()?;
        let h = cfg.num_heads();
        let source = source.with_heads(HeadCounts { query: h, key: h })?;
        let norm = |name, size| Norm::load(QkNormKind::Rms, cfg.norm_eps(), size, false, &source.pp(name));
        let LatentProjections { compression, queries, down, up, out } = projections(&source)?;
        let compression = match (compression, cfg.q_lora_rank()) {
            (Some(narrowing), Some(q_rank)) => {
                Some(QueryCompression { down: narrowing, norm: norm("q_a_layernorm", q_rank)? })
            }
            _ => None,
        };
        let mut config = cfg.clone();
        config.num_heads = source.shard.rank_range(h).len();
        let layer = Self {
            compression,
            queries,
            down,
            norm: norm(source.stored_module(&["kv_a_layernorm", "kv_a_norm"]), cfg.kv_lora_rank())?,
            up,
            absorbing: Vec::new(),
            out,
            rotary: rotary(cfg.rope(), cfg.rope_head_dim())?,
            additions: Additions::load(cfg, &source)?,
            indexer: LayerIndexer::load(cfg, &source)?,
            mask: layer_mask(cfg),
            dtype: source.vb.dtype(),
            config,
        };
        layer.prepared()
    }
}

impl LayerIndexer {
    /// Reads the indexer of a layer, if it has one.
    fn load(cfg: &MultiHeadLatentAttentionConfig, source: &ParameterReader) -> Result<Option<Self>> {
        let Some(own) = cfg.indexer() else { return Ok(None) };
        let shape = IndexerShape {
            embed_dim: cfg.embed_dim(),
            q_lora_rank: cfg.q_lora_rank(),
            rope_head_dim: if cfg.rotates() { cfg.rope_head_dim() } else { 0 },
        };
        let module = load_indexer(own, shape, &source.pp("indexer"))?;
        let rope = cfg.rope().clone().with_style(own.rope_style);
        Ok(Some(Self { module, rotary: rotary(&rope, shape.rope_head_dim)? }))
    }
}

/// Returns the tables of the parts of heads that rotate; `None` if no part does.
fn rotary(rope: &RopeConfig, rope_head_dim: usize) -> Result<Option<RotaryEmbedding>> {
    if rope_head_dim == 0 {
        return Ok(None);
    }
    RotaryEmbedding::new(rope, rope_head_dim).map(Some)
}

/// Returns the mask that a layer's config describes.
fn layer_mask(cfg: &MultiHeadLatentAttentionConfig) -> AttentionMask {
    let mask = if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() };
    match cfg.window() {
        Some(window) => mask.with_window(window),
        None => mask,
    }
}
