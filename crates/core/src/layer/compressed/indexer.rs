//! The indexer that chooses compressed keys.

use candle_core::{DType, Module, Result, Tensor};

use super::compressor::Compressor;
use super::{CompressedKeyAttentionConfig, CompressedKeyIndexerConfig, KeyCompression, rotated_last};
use crate::layer::indexer::{IndexQueries, PRODUCTS, Scores};
use crate::position::Rotation;
use candle_attention_modules::base::ParameterReader;
use candle_attention_modules::linear::PackedLinear;

/// An indexer whose queries are projected from the compressed queries of the layer, and whose keys it compresses from
/// the inputs as the layer does. Its choice has no gradient.
#[derive(Debug, Clone)]
pub(super) struct CompressedKeyIndexer {
    config: CompressedKeyIndexerConfig,
    rope_head_dim: usize,
    pub compressor: Compressor,
    /// (heads · width, q_lora_rank).
    queries: PackedLinear,
    /// The projection of the weights of the heads, (heads, E).
    weights: PackedLinear,
}

impl CompressedKeyIndexer {
    /// Reads an indexer below the layer, by the names of transformers or of published checkpoints.
    pub fn load(
        cfg: &CompressedKeyAttentionConfig,
        compression: KeyCompression,
        config: CompressedKeyIndexerConfig,
        source: &ParameterReader,
    ) -> Result<Self> {
        let CompressedKeyIndexerConfig { num_heads, head_dim, .. } = config;
        let published = source.pp("indexer");
        let is_published = published.has("wq_b.weight");
        let own = if is_published { published } else { source.pp("compressor").pp("indexer") };
        let of_compressor = if is_published { own.pp("compressor") } else { own.clone() };
        let weights = own.stored_module(&["scorer.weights_proj", "weights_proj"]);
        let queries = own.stored_module(&["q_b_proj", "wq_b"]);
        Ok(Self {
            config,
            rope_head_dim: cfg.rope_head_dim,
            compressor: Compressor::load(cfg, compression, head_dim, &of_compressor)?,
            queries: own.linear(queries, (num_heads * head_dim, cfg.q_lora_rank), false, None)?.try_into()?,
            weights: own.linear(weights, (num_heads, cfg.embed_dim), false, None)?.try_into()?,
        })
    }

    /// Returns the queries of inputs (B, T, E), whose compressed queries are (B, T, q_lora_rank).
    pub fn queries(&self, xs: &Tensor, compressed: &Tensor, rotation: &Rotation) -> Result<IndexQueries> {
        let CompressedKeyIndexerConfig { num_heads, head_dim, .. } = self.config;
        let (b, t, _) = xs.dims3()?;
        let q = self.queries.forward(&compressed.detach())?.reshape((b, t, num_heads, head_dim))?;
        let q = rotated_last(&q, self.rope_head_dim, rotation)?.detach().to_dtype(DType::F32)?;
        let weights = self.weights.forward(&xs.detach())?.detach().to_dtype(DType::F32)?;
        let scale = 1.0 / (num_heads as f64 * head_dim as f64).sqrt();
        Ok(IndexQueries { q, weights: Some((weights * scale)?) })
    }

    /// Returns the best keys of each of the queries (1, n, ..) of a sequence, of compressed keys (count, width): (n,
    /// `top_k`), or `None` if all are chosen. `visible` has the number of keys that each query may attend to.
    pub fn choose(&self, queries: &IndexQueries, keys: &Tensor, visible: &[usize]) -> Result<Option<Vec<i64>>> {
        let CompressedKeyIndexerConfig { num_heads, top_k, .. } = self.config;
        let count = keys.dim(0)?;
        if count <= top_k {
            return Ok(None);
        }
        let keys = keys.detach().to_dtype(DType::F32)?.t()?.unsqueeze(0)?;
        let mut chosen = Vec::with_capacity(visible.len() * top_k);
        let step = (PRODUCTS / (num_heads * count)).max(1);
        for (chunk, own) in visible.chunks(step).enumerate() {
            let scores = queries.scores(&keys, chunk * step, own.len())?;
            let ranges: Vec<_> = own.iter().map(|&end| 0..end).collect();
            let of_rows = Scores { scores: &scores, keys: 0..count, ranges: &ranges, allowed: None };
            chosen.extend(of_rows.largest(top_k));
        }
        Ok(Some(chosen))
    }

    /// Returns a copy for inference.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self {
            compressor: self.compressor.freeze()?,
            queries: self.queries.freeze()?,
            weights: self.weights.freeze()?,
            ..self.clone()
        })
    }
}
