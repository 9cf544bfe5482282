//! The indexer of GLM-5.3, which scores pools of keys.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Init, ops};

use super::deepseek::DeepSeekIndexer;
use super::scores::PRODUCTS;
use super::sequence_keys::SequenceKeys;
use super::top_k::Scores;
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

    /// Returns the chosen keys of the queries of one sequence, (T_q, entries), whose queries attend to these ranges.
    fn choose_for_sequence(&self, queries: &IndexQueries, rows: &Tensor, ranges: &[Range<usize>]) -> Result<Vec<i64>> {
        let pool = self.pool;
        let own = SequenceKeys::new(ranges);
        let pools = own.count / pool;
        let chosen_pools = self.config.top_k / pool;
        let entries = self.config.most_keys();
        let mut chosen = vec![-1; ranges.len() * entries];
        if pools > 0 {
            let keys = self.pool_keys(&rows.narrow(0, own.first, own.count)?)?;
            let step = (PRODUCTS / (self.config.num_heads * pools)).clamp(1, ranges.len().max(1));
            for start in (0..ranges.len()).step_by(step) {
                let n = step.min(ranges.len() - start);
                let scores = queries.scores(&keys, start, n)?;
                let whole_pools = |query: usize| {
                    let visible = own.visible(query);
                    let before = visible.start.div_ceil(pool);
                    before..(visible.end / pool).max(before)
                };
                let pools_of_rows: Vec<_> = (start..start + n).map(whole_pools).collect();
                let of_rows = Scores { scores: &scores, keys: 0..pools, ranges: &pools_of_rows, allowed: None };
                let best = of_rows.largest(chosen_pools);
                for (row, best_pools) in best.chunks_exact(chosen_pools).enumerate() {
                    let to = &mut chosen[(start + row) * entries..][..entries];
                    for (place, &number) in to.chunks_exact_mut(pool).zip(best_pools) {
                        let Ok(number) = usize::try_from(number) else { continue };
                        for (i, entry) in place.iter_mut().enumerate() {
                            *entry = (own.first + number * pool + i) as i64;
                        }
                    }
                }
            }
        }
        for (query, to) in chosen.chunks_exact_mut(entries).enumerate() {
            // The tokens after the last whole pool.
            let end = own.visible(query).end;
            for (entry, key) in to[chosen_pools * pool..].iter_mut().zip(end / pool * pool..end) {
                *entry = (own.first + key) as i64;
            }
        }
        Ok(chosen)
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
            let weights = queries.weights.as_ref().map(|weights| weights.narrow(0, sequence, 1)).transpose()?;
            let own_queries = IndexQueries { q: queries.q.narrow(0, sequence, 1)?, weights };
            chosen.extend(self.choose_for_sequence(&own_queries, &keys.get(sequence)?, own)?);
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
