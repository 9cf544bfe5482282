//! Loading of a layer by the names of its weights.

use candle_core::Result;
use candle_nn::{Init, VarBuilder};

use super::compressor::Compressor;
use super::indexer::CompressedKeyIndexer;
use super::{CompressedKeyAttention, CompressedKeyAttentionConfig, LayerCompression, OP};
use crate::position::RotaryEmbedding;
use candle_attention_modules::base::ParameterReader;
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

impl CompressedKeyAttention {
    /// Loads a layer with the names of transformers below the builder's prefix (`q_a_proj`, `q_a_norm`, `q_b_proj`,
    /// `kv_proj`, `kv_norm`, `sinks`, `o_a_proj`, `o_b_proj`, `compressor`, `compressor.indexer`), or the names
    /// of published checkpoints (`wq_a`, `q_norm`, `wq_b`, `wkv`, `kv_norm`, `attn_sink`, `wo_a`, `wo_b`, `compressor`,
    /// `indexer`).
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// For a config that is not valid, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &CompressedKeyAttentionConfig, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let source = ParameterReader::new(OP, "compressed keys", vb)?;
        let linear = |names: &[&str], shape: (usize, usize)| -> Result<PackedLinear> {
            source.linear(source.stored_module(names), shape, false, None)?.try_into()
        };
        let norm = |names: &[&str], size: usize| {
            Norm::load(QkNormKind::Rms, cfg.norm_eps, size, false, &source.pp(source.stored_module(names)))
        };
        let heads = cfg.num_heads * cfg.head_dim;
        let of_groups = cfg.output_groups * cfg.output_rank;
        let sinks_name = if source.has("attn_sink") { "attn_sink" } else { "sinks" };
        Ok(Self {
            query_compression: linear(&["q_a_proj", "wq_a"], (cfg.q_lora_rank, cfg.embed_dim))?,
            query_norm: norm(&["q_a_norm", "q_norm"], cfg.q_lora_rank)?,
            queries: linear(&["q_b_proj", "wq_b"], (heads, cfg.q_lora_rank))?,
            head_norm: Norm::without_weight(cfg.norm_eps, cfg.head_dim, source.vb.dtype(), source.vb.device())?,
            keys: linear(&["kv_proj", "wkv"], (cfg.head_dim, cfg.embed_dim))?,
            // transformers writes the second name.
            key_norm: norm(&["kv_norm", "norm"], cfg.head_dim)?,
            sinks: source.get(cfg.num_heads, sinks_name, Init::Const(0.0))?.into(),
            groups: linear(&["o_a_proj", "wo_a"], (of_groups, heads / cfg.output_groups))?,
            out: linear(&["o_b_proj", "wo_b"], (cfg.embed_dim, of_groups))?,
            compression: LayerCompression::load(cfg, &source)?,
            rotary: RotaryEmbedding::new(&cfg.rope, cfg.rope_head_dim)?,
            dtype: source.vb.dtype(),
            config: cfg.clone(),
        })
    }
}

impl LayerCompression {
    /// Reads the modules of a layer that compresses tokens. A file has none of them for other layers.
    fn load(cfg: &CompressedKeyAttentionConfig, source: &ParameterReader) -> Result<Option<Self>> {
        let of_indexer = ["compressor.indexer.kv_norm.weight", "indexer.wq_b.weight"];
        let Some(config) = cfg.compression else {
            let of_compressor = ["compressor.kv_norm.weight", "compressor.norm.weight"];
            source.refuse(of_compressor, "the config says that the layer does not compress keys")?;
            return Ok(None);
        };
        let mut indexer = None;
        if let Some(own) = config.indexer {
            indexer = Some(CompressedKeyIndexer::load(cfg, config, own, source)?);
        } else {
            source.refuse(of_indexer, "the config says that the layer has no indexer")?;
        }
        let compressor = Compressor::load(cfg, config, cfg.head_dim, &source.pp("compressor"))?;
        Ok(Some(Self { config, compressor, indexer }))
    }
}
