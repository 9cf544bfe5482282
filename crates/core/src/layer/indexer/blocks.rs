//! The indexer of MiniMax M3, which scores blocks of keys.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor};

use super::scores::PRODUCTS;
use super::sequence_keys::SequenceKeys;
use super::top_k::Scores;
use super::{IndexQueries, IndexedTokens, KeyIndexer};
use crate::config::BlockIndexerConfig;
use crate::mask::{AttentionMask, KeyLists};
use candle_attention_modules::base::ParameterReader;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::Norm;

/// The layer that has the indexer, for errors.
const OP: &str = "multi_head_attention";

/// An indexer of blocks of keys, whose queries and keys are projected from the input of the layer.
#[derive(Debug, Clone)]
pub(in crate::layer) struct BlockIndexer {
    config: BlockIndexerConfig,
    /// (heads · width, E).
    queries: PackedLinear,
    /// (width, E).
    keys: PackedLinear,
    query_norm: Norm,
    key_norm: Norm,
}

impl BlockIndexer {
    /// Reads `q_proj`, `k_proj`, `q_norm` and `k_norm` below `indexer` of the layer, or as published with names that
    /// begin with `index_`.
    pub fn load(config: BlockIndexerConfig, embed_dim: usize, layer: &ParameterReader) -> Result<Self> {
        let BlockIndexerConfig { num_heads, head_dim, norm, .. } = config;
        let prefix = if layer.has("index_q_proj.weight") { "index_" } else { "indexer." };
        let name = |module: &str| format!("{prefix}{module}");
        let read = |module: &str| Norm::load(norm.kind, norm.eps, head_dim, false, &layer.pp(name(module)));
        let linear = |module: &str, outputs: usize| -> Result<PackedLinear> {
            layer.linear(&name(module), (outputs, embed_dim), false, None)?.try_into()
        };
        Ok(Self {
            config,
            queries: linear("q_proj", num_heads * head_dim)?,
            keys: linear("k_proj", head_dim)?,
            query_norm: read("q_norm")?,
            key_norm: read("k_norm")?,
        })
    }

    /// Returns the heads (B, T, heads, width) after their norm and rotation.
    fn normed(&self, heads: &Tensor, norm: &Norm, tokens: &IndexedTokens) -> Result<Tensor> {
        let normed = norm.forward(heads)?;
        match tokens.rotation {
            Some(rotation) => rotation.apply(&normed),
            None => Ok(normed),
        }
    }

    /// Returns the numbers of the chosen blocks of the queries of one sequence, (heads, T_q, entries), counted from the
    /// first key. `q` is (T_q, heads, width), `keys` are (T_kv, width), both in f32.
    fn blocks_for_sequence(&self, q: &Tensor, keys: &Tensor, own: &SequenceKeys) -> Result<Vec<i64>> {
        let BlockIndexerConfig { num_heads, block, top_blocks, local_blocks, .. } = self.config;
        let (t_q, heads, _) = q.dims3()?;
        let blocks = own.count.div_ceil(block);
        let mut chosen = vec![-1; num_heads * t_q * top_blocks];
        if blocks == 0 {
            return Ok(chosen);
        }
        let keys = keys.narrow(0, own.first, own.count)?.t()?.contiguous()?;
        let step = (PRODUCTS / (heads * own.count)).clamp(1, t_q);
        for start in (0..t_q).step_by(step) {
            let n = step.min(t_q - start);
            let of_heads = q.narrow(0, start, n)?.transpose(0, 1)?.contiguous()?.flatten_to(1)?;
            let products = to_vec::<f32>(&of_heads.matmul(&keys)?)?;
            let mut best = vec![f32::NEG_INFINITY; heads * n * blocks];
            let mut ranges = Vec::with_capacity(heads * n);
            for (row, (to, of_row)) in best.chunks_exact_mut(blocks).zip(products.chunks_exact(own.count)).enumerate() {
                let visible = own.visible(start + row % n);
                let own_blocks = visible.start / block..visible.end.div_ceil(block);
                for number in own_blocks.clone() {
                    let of_block = (number * block).max(visible.start)..((number + 1) * block).min(visible.end);
                    to[number] = of_row[of_block].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                }
                to[own_blocks.end.saturating_sub(local_blocks)..own_blocks.end].fill(f32::INFINITY);
                ranges.push(own_blocks);
            }
            let scores = Scores { scores: &best, keys: 0..blocks, ranges: &ranges, allowed: None };
            for (row, entries) in scores.largest(top_blocks).chunks_exact(top_blocks).enumerate() {
                let (head, query) = (row / n, start + row % n);
                chosen[(head * t_q + query) * top_blocks..][..top_blocks].copy_from_slice(entries);
            }
        }
        Ok(chosen)
    }
}

impl KeyIndexer for BlockIndexer {
    fn key_width(&self) -> usize {
        self.config.head_dim
    }

    fn keys(&self, tokens: &IndexedTokens) -> Result<Tensor> {
        let heads = self.keys.forward(&tokens.xs.detach())?.unsqueeze(2)?;
        Ok(self.normed(&heads, &self.key_norm, tokens)?.squeeze(2)?.detach())
    }

    fn queries(&self, tokens: &IndexedTokens) -> Result<IndexQueries> {
        let BlockIndexerConfig { num_heads, head_dim, .. } = self.config;
        let (b, t, _) = tokens.xs.dims3()?;
        let heads = self.queries.forward(&tokens.xs.detach())?.reshape((b, t, num_heads, head_dim))?;
        let q = self.normed(&heads, &self.query_norm, tokens)?.detach().to_dtype(DType::F32)?;
        Ok(IndexQueries { q, weights: None })
    }

    fn choose(&self, queries: &IndexQueries, keys: &Tensor, mask: &AttentionMask) -> Result<Option<KeyLists>> {
        let BlockIndexerConfig { num_heads, block, top_blocks, .. } = self.config;
        let (b, t_q, ..) = queries.q.dims4()?;
        let t_kv = keys.dim(1)?;
        if t_kv.div_ceil(block) <= top_blocks || b * t_q == 0 {
            return Ok(None);
        }
        let keys = keys.to_dtype(DType::F32)?;
        let ranges_of_call = mask.of_all_heads().ranges_of_batch(b, t_q, t_kv)?;
        let ranges = &ranges_of_call.rows(OP)?.keys;
        let sequences: Vec<_> = ranges.chunks_exact(t_q).map(SequenceKeys::new).collect();
        let mut chosen = Vec::with_capacity(b * num_heads * t_q * top_blocks);
        for (sequence, own) in sequences.iter().enumerate() {
            chosen.push(self.blocks_for_sequence(&queries.q.get(sequence)?, &keys.get(sequence)?, own)?);
        }
        if sequences.iter().all(|own| own.first == 0) {
            let lists = Tensor::from_vec(chosen.concat(), (b, num_heads, t_q, top_blocks), &Device::Cpu)?;
            return Ok(Some(KeyLists::new(&lists)?.with_key_blocks(block)?));
        }
        // Blocks that begin elsewhere are listed key by key.
        let mut listed = Vec::with_capacity(b * num_heads * t_q * top_blocks * block);
        for (own, of_sequence) in sequences.iter().zip(&chosen) {
            for number in of_sequence {
                for i in 0..block {
                    let place = usize::try_from(*number).map(|number| number * block + i);
                    listed.push(match place {
                        Ok(place) if place < own.count => (own.first + place) as i64,
                        _ => -1,
                    });
                }
            }
        }
        let lists = Tensor::from_vec(listed, (b, num_heads, t_q, top_blocks * block), &Device::Cpu)?;
        Ok(Some(KeyLists::new(&lists)?))
    }

    fn freeze(&self) -> Result<Arc<dyn KeyIndexer>> {
        Ok(Arc::new(Self {
            queries: self.queries.freeze()?,
            keys: self.keys.freeze()?,
            query_norm: self.query_norm.freeze()?,
            key_norm: self.key_norm.freeze()?,
            ..self.clone()
        }))
    }
}
