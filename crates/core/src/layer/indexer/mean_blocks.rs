//! The indexer of Qwen 4, which scores the mean of the keys of each block.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};

use super::pools::{Pools, QueryPart};
use super::sequence_keys::SequenceKeys;
use super::{IndexQueries, IndexedTokens, KeyIndexer};
use crate::config::{BlockIndexerConfig, MultiHeadAttentionConfig};
use crate::mask::{AttentionMask, KeyLists};
use crate::position::{RopeConfig, Rotation};
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{ParameterReader, part};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::Norm;

/// The layer that has the indexer, for errors.
const OP: &str = "multi_head_attention";

/// An indexer of blocks of keys. The key of a block is the mean of the keys of its tokens, which is normalised, and
/// rotated as the first of them. A score is the sum over the heads of the indexer.
///
/// A cache stores the key of each token before its norm, and the cosines and sines of its rotation.
#[derive(Debug, Clone)]
pub(in crate::layer) struct MeanBlockIndexer {
    config: BlockIndexerConfig,
    /// The projection of the queries and of the key, (heads · width + width, E).
    projection: PackedLinear,
    query_norm: Norm,
    key_norm: Norm,
    rotary: Option<Rotary>,
}

/// The rotary positions of the layer.
#[derive(Debug, Clone)]
struct Rotary {
    config: RopeConfig,
    /// The number of entries that rotate.
    width: usize,
}

impl MeanBlockIndexer {
    /// Reads `index_qk_proj`, `q_layernorm` and `k_layernorm` below `indexer` of a layer.
    pub fn load(
        config: BlockIndexerConfig,
        layer_config: &MultiHeadAttentionConfig,
        layer: &ParameterReader,
    ) -> Result<Self> {
        let BlockIndexerConfig { num_heads, head_dim, norm, .. } = config;
        let source = layer.pp("indexer");
        let read = |name: &str| Norm::load(norm.kind, norm.eps, head_dim, false, &source.pp(name));
        let rotary = layer_config
            .rope()
            .map(|rope| Rotary { config: rope.clone(), width: rope.rotary_dim(layer_config.head_dim()) });
        let shape = ((num_heads + 1) * head_dim, layer_config.embed_dim());
        Ok(Self {
            config,
            projection: source.linear("index_qk_proj", shape, false, None)?.try_into()?,
            query_norm: read("q_layernorm")?,
            key_norm: read("k_layernorm")?,
            rotary,
        })
    }

    /// Returns the keys (width, P) of the P whole blocks of stored rows (T, key width), in f32.
    fn block_keys(&self, rows: &Tensor) -> Result<Tensor> {
        let BlockIndexerConfig { block, head_dim, .. } = self.config;
        let blocks = rows.dim(0)? / block;
        let whole = rows.narrow(0, 0, blocks * block)?.contiguous()?.reshape((blocks, block, self.key_width()))?;
        let means = part(&whole, 2, 0..head_dim)?.mean(1)?;
        let mut keys = self.key_norm.forward(&means.to_dtype(self.projection.dtype())?)?;
        if let Some(Rotary { config, .. }) = &self.rotary
            && blocks > 0
        {
            let first = part(&whole.narrow(1, 0, 1)?.squeeze(1)?, 1, head_dim..self.key_width())?;
            let heads = keys.reshape((1, blocks, 1, head_dim))?;
            keys = Rotation::of_stored_angles(config, &first)?.apply(&heads)?.reshape((blocks, head_dim))?;
        }
        keys.detach().to_dtype(DType::F32)?.t()?.contiguous()
    }

    /// Returns the scores (count, P) of some of the queries (T_q, heads, width) for the keys (width, P) of blocks.
    fn scores(&self, q: &Tensor, keys: &Tensor, part: QueryPart) -> Result<Vec<f32>> {
        let heads = self.config.num_heads;
        let rows = q.narrow(0, part.start, part.count)?.contiguous()?.flatten_to(1)?;
        let products = rows.matmul(keys)?.relu()?.reshape((part.count, heads, keys.dim(1)?))?;
        to_vec(&products.sum(1)?)
    }
}

impl KeyIndexer for MeanBlockIndexer {
    fn key_width(&self) -> usize {
        self.config.head_dim + self.rotary.as_ref().map_or(0, |rotary| rotary.width)
    }

    fn keys(&self, tokens: &IndexedTokens) -> Result<Tensor> {
        let BlockIndexerConfig { num_heads, head_dim, .. } = self.config;
        let columns = num_heads * head_dim..(num_heads + 1) * head_dim;
        let keys = self.projection.forward_columns(&tokens.xs.detach(), columns)?.detach();
        let Some(rotation) = tokens.rotation else { return Ok(keys) };
        let (b, t, _) = keys.dims3()?;
        let angles = rotation.angles_of_tokens(b, t, keys.device())?.to_dtype(keys.dtype())?;
        Tensor::cat(&[keys, angles], D::Minus1)
    }

    fn queries(&self, tokens: &IndexedTokens) -> Result<IndexQueries> {
        let BlockIndexerConfig { num_heads, head_dim, .. } = self.config;
        let (b, t, _) = tokens.xs.dims3()?;
        let projected = self.projection.forward_columns(&tokens.xs.detach(), 0..num_heads * head_dim)?;
        let mut q = self.query_norm.forward(&projected.reshape((b, t, num_heads, head_dim))?)?;
        if let Some(rotation) = tokens.rotation {
            q = rotation.apply(&q)?;
        }
        Ok(IndexQueries { q: q.detach().to_dtype(DType::F32)?, weights: None })
    }

    fn choose(&self, queries: &IndexQueries, keys: &Tensor, mask: &AttentionMask) -> Result<Option<KeyLists>> {
        let BlockIndexerConfig { num_heads, block, top_blocks, .. } = self.config;
        let (b, t_q, ..) = queries.q.dims4()?;
        let t_kv = keys.dim(1)?;
        // The keys after the last whole block are fewer than a block.
        if t_kv / block <= top_blocks || b * t_q == 0 {
            return Ok(None);
        }
        let keys = keys.to_dtype(DType::F32)?;
        let ranges_of_call = mask.of_all_heads().ranges_of_batch(b, t_q, t_kv)?;
        let ranges = &ranges_of_call.rows(OP)?.keys;
        let mut chosen = Vec::new();
        let mut entries = 0;
        for (sequence, own) in ranges.chunks_exact(t_q).enumerate() {
            let pools = Pools { pool: block, chosen: top_blocks, keys: SequenceKeys::new(own) };
            let rows = keys.get(sequence)?.narrow(0, pools.keys.first, pools.keys.count)?;
            let block_keys = self.block_keys(&rows)?;
            let q = queries.q.get(sequence)?;
            chosen.extend(pools.choose(t_q, num_heads, |part| self.scores(&q, &block_keys, part))?);
            entries = pools.entries();
        }
        let lists = Tensor::from_vec(chosen, (b, 1, t_q, entries), &Device::Cpu)?;
        Ok(Some(KeyLists::new(&lists)?))
    }

    fn freeze(&self) -> Result<Arc<dyn KeyIndexer>> {
        Ok(Arc::new(Self {
            projection: self.projection.freeze()?,
            query_norm: self.query_norm.freeze()?,
            key_norm: self.key_norm.freeze()?,
            ..self.clone()
        }))
    }
}
