//! The indexer of GLM-5.3, which scores pools of keys.

use std::sync::Arc;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Init, ops};

use super::deepseek::DeepSeekIndexer;
use super::pools::{Pools, QueryPart};
use super::sequence_keys::SequenceKeys;
use super::{IndexQueries, IndexedTokens, IndexerConfig, IndexerShape, KeyIndexer};
use crate::mask::{AttentionMask, KeyLists};
use candle_attention_modules::base::{Parameter, ParameterReader, WeightAndBias, part};
use candle_attention_modules::linear::PackedLinear;

/// The layer that has the indexer, for errors.
const OP: &str = "multi_head_latent_attention";

/// An indexer whose queries are scored with pools of consecutive keys, from the first key of each sequence on. The key
/// of a pool is the mean of the keys of its tokens, each entry weighted by a softmax over the pool.
///
/// A query attends to the tokens of the best pools among those that end before it or with it, and to the tokens after
/// the last of them.
#[derive(Debug, Clone)]
pub(super) struct PooledIndexer {
    scored: DeepSeekIndexer,
    config: IndexerConfig,
    /// The number of tokens in a pool.
    pool: usize,
    /// The projection of the inputs to logits of the weights, (width, E).
    logits: PackedLinear,
    /// The logits by place in a pool, (pool, width).
    by_place: Parameter,
}

impl PooledIndexer {
    /// Reads the parameters of [`DeepSeekIndexer`], `index_kpool_compress_gate` and `index_kpool_compress_ape`.
    pub fn load(config: IndexerConfig, pool: usize, shape: IndexerShape, source: &ParameterReader) -> Result<Self> {
        let width = config.head_dim;
        let logits = source.get((width, shape.embed_dim), "index_kpool_compress_gate", Init::Const(0.0))?;
        let by_place = source.get((pool, width), "index_kpool_compress_ape", Init::Const(0.0))?;
        Ok(Self {
            scored: DeepSeekIndexer::load(config, shape, source)?,
            config,
            pool,
            logits: WeightAndBias { weight: logits.into(), bias: None }.try_into()?,
            by_place: by_place.into(),
        })
    }

    /// Returns the keys (1, width, P) of the P whole pools of stored rows (T, 2 · width), in f32.
    fn pool_keys(&self, rows: &Tensor) -> Result<Tensor> {
        let width = self.config.head_dim;
        let pools = rows.dim(0)? / self.pool;
        let whole = rows.narrow(0, 0, pools * self.pool)?.contiguous()?.reshape((pools, self.pool, 2 * width))?;
        let by_place = self.by_place.tensor()?.detach().to_dtype(DType::F32)?;
        let logits = part(&whole, 2, width..2 * width)?.broadcast_add(&by_place)?;
        let weights = ops::softmax(&logits, 1)?;
        let keys = (weights * part(&whole, 2, 0..width)?)?.sum(1)?;
        keys.t()?.unsqueeze(0)
    }
}

impl KeyIndexer for PooledIndexer {
    fn key_width(&self) -> usize {
        self.config.stored_width()
    }

    fn keys(&self, tokens: &IndexedTokens) -> Result<Tensor> {
        let logits = self.logits.forward(&tokens.xs.detach())?.detach();
        Tensor::cat(&[self.scored.keys(tokens)?, logits], D::Minus1)
    }

    fn queries(&self, tokens: &IndexedTokens) -> Result<IndexQueries> {
        self.scored.queries(tokens)
    }

    fn choose(&self, queries: &IndexQueries, keys: &Tensor, mask: &AttentionMask) -> Result<Option<KeyLists>> {
        let (b, t_q, ..) = queries.q.dims4()?;
        let t_kv = keys.dim(1)?;
        if t_kv <= self.config.top_k || b * t_q == 0 {
            return Ok(None);
        }
        let keys = keys.to_dtype(DType::F32)?;
        let ranges_of_call = mask.of_all_heads().ranges_of_batch(b, t_q, t_kv)?;
        let ranges = &ranges_of_call.rows(OP)?.keys;
        let mut chosen = Vec::with_capacity(b * t_q * self.config.most_keys());
        for (sequence, own) in ranges.chunks_exact(t_q).enumerate() {
            let chosen_pools = self.config.top_k / self.pool;
            let pools = Pools { pool: self.pool, chosen: chosen_pools, keys: SequenceKeys::new(own) };
            let rows = keys.get(sequence)?.narrow(0, pools.keys.first, pools.keys.count)?;
            let pool_keys = self.pool_keys(&rows)?;
            let own_queries = queries.select(|xs| xs.narrow(0, sequence, 1))?;
            let scores = |part: QueryPart| own_queries.scores(&pool_keys, part.start, part.count);
            chosen.extend(pools.choose(t_q, self.config.num_heads, scores)?);
        }
        let lists = Tensor::from_vec(chosen, (b, 1, t_q, self.config.most_keys()), &Device::Cpu)?;
        Ok(Some(KeyLists::new(&lists)?))
    }

    fn freeze(&self) -> Result<Arc<dyn KeyIndexer>> {
        Ok(Arc::new(Self {
            scored: self.scored.frozen()?,
            logits: self.logits.freeze()?,
            by_place: self.by_place.freeze()?,
            ..self.clone()
        }))
    }
}
