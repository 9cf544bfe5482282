//! The indexer of DeepSeek V3.2.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor};

use super::scores::PRODUCTS;
use super::top_k::Scores;
use super::{IndexQueries, IndexedTokens, IndexerConfig, IndexerQueries, IndexerShape, KeyIndexer};
use crate::layer::temperature::LearnedTemperature;
use crate::mask::{AttentionMask, KeyLists, union_of};
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{ParameterReader, part};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

/// The layer that has the indexer, for errors.
const OP: &str = "multi_head_latent_attention";

/// An indexer of DeepSeek V3.2: its queries are projected from the compressed queries of the layer, its keys and the
/// weights of its heads from the input.
#[derive(Debug, Clone)]
pub(in crate::layer) struct DeepSeekIndexer {
    config: IndexerConfig,
    rope_head_dim: usize,
    /// The norm and the temperature of queries that are projected from the input of the layer.
    of_input: Option<QueriesOfInput>,
    /// The projection of the queries, (heads · width, q_lora_rank), or (heads · width, E).
    queries: PackedLinear,
    /// The projection of the keys, (width, E).
    keys: PackedLinear,
    norm: Norm,
    /// The projection of the weights of the heads, (heads, E).
    weights: PackedLinear,
}

/// The norm and the temperature of queries that are projected from the input of the layer.
#[derive(Debug, Clone)]
struct QueriesOfInput {
    norm: Norm,
    temperature: LearnedTemperature,
}

impl DeepSeekIndexer {
    /// Reads `wq_b`, `wk`, `k_norm` and `weights_proj`, and for queries of the input `q_input_norm` and
    /// `softmax_scaling`.
    pub fn load(config: IndexerConfig, shape: IndexerShape, source: &ParameterReader) -> Result<Self> {
        let IndexerConfig { num_heads, head_dim, .. } = config;
        let IndexerShape { embed_dim, q_lora_rank, rope_head_dim } = shape;
        let mut of_input = None;
        let mut query_width = q_lora_rank.unwrap_or(embed_dim);
        if config.queries == IndexerQueries::NormalizedInput {
            query_width = embed_dim;
            of_input = Some(QueriesOfInput {
                norm: Norm::load(QkNormKind::Layer, 1e-6, embed_dim, true, &source.pp("q_input_norm"))?,
                temperature: LearnedTemperature::load(num_heads, false, source)?,
            });
        }
        Ok(Self {
            config,
            rope_head_dim,
            of_input,
            queries: source.linear("wq_b", (num_heads * head_dim, query_width), false, None)?.try_into()?,
            keys: source.linear("wk", (head_dim, embed_dim), false, None)?.try_into()?,
            norm: Norm::load(QkNormKind::Layer, config.norm_eps, head_dim, true, &source.pp("k_norm"))?,
            weights: source.linear("weights_proj", (num_heads, embed_dim), false, None)?.try_into()?,
        })
    }

    /// Rotates the first or the last entries of heads (B, T, heads, width).
    fn rotated(&self, heads: &Tensor, tokens: &IndexedTokens) -> Result<Tensor> {
        let Some(rotation) = tokens.rotation else { return Ok(heads.clone()) };
        let head_dim = self.config.head_dim;
        let rope = self.rope_head_dim;
        if rope == head_dim {
            return rotation.apply(heads);
        }
        if self.config.rotates_last {
            let first = head_dim - rope;
            let rotated = rotation.apply(&part(heads, 3, first..head_dim)?)?;
            return Tensor::cat(&[part(heads, 3, 0..first)?.contiguous()?, rotated], 3);
        }
        let rotated = rotation.apply(&part(heads, 3, 0..rope)?)?;
        Tensor::cat(&[rotated, part(heads, 3, rope..head_dim)?.contiguous()?], 3)
    }

    /// Returns a copy for inference.
    pub fn frozen(&self) -> Result<Self> {
        let of_input = match &self.of_input {
            Some(QueriesOfInput { norm, temperature }) => {
                Some(QueriesOfInput { norm: norm.freeze()?, temperature: temperature.freeze()? })
            }
            None => None,
        };
        Ok(Self {
            of_input,
            queries: self.queries.freeze()?,
            keys: self.keys.freeze()?,
            norm: self.norm.freeze()?,
            weights: self.weights.freeze()?,
            ..self.clone()
        })
    }
}

impl KeyIndexer for DeepSeekIndexer {
    fn key_width(&self) -> usize {
        self.config.head_dim
    }

    fn keys(&self, tokens: &IndexedTokens) -> Result<Tensor> {
        let keys = self.norm.forward(&self.keys.forward(&tokens.xs.detach())?)?.unsqueeze(2)?;
        Ok(self.rotated(&keys, tokens)?.squeeze(2)?.detach())
    }

    fn queries(&self, tokens: &IndexedTokens) -> Result<IndexQueries> {
        let IndexerConfig { num_heads, head_dim, .. } = self.config;
        let (b, t, _) = tokens.xs.dims3()?;
        let xs = tokens.xs.detach();
        let input = match &self.of_input {
            Some(QueriesOfInput { norm, .. }) => norm.forward(&xs)?,
            None => tokens.compressed.detach(),
        };
        let mut q = self.queries.forward(&input)?.reshape((b, t, num_heads, head_dim))?;
        if let (Some(QueriesOfInput { temperature, .. }), Some(logs)) = (&self.of_input, tokens.log_positions) {
            q = temperature.scaled(&q, logs)?;
        }
        let weights = self.weights.forward(&xs)?.detach().to_dtype(DType::F32)?;
        let scale = 1.0 / (num_heads as f64 * head_dim as f64).sqrt();
        Ok(IndexQueries {
            q: self.rotated(&q, tokens)?.detach().to_dtype(DType::F32)?,
            weights: Some((weights * scale)?),
        })
    }

    fn choose(&self, queries: &IndexQueries, keys: &Tensor, mask: &AttentionMask) -> Result<Option<KeyLists>> {
        let k = self.config.top_k;
        let (b, t_q, num_heads, _) = queries.q.dims4()?;
        let t_kv = keys.dim(1)?;
        if t_kv <= k || b * t_q == 0 {
            return Ok(None);
        }
        let device = queries.q.device();
        let dims = [b, 1, t_q, t_kv];
        let keys = keys.to_dtype(DType::F32)?.transpose(1, 2)?;
        // A mask for each head says nothing about the keys of all heads.
        let mask = mask.of_all_heads();
        let ranges_of_call = mask.ranges_of_batch(b, t_q, t_kv)?;
        let ranges_of_queries = &ranges_of_call.rows(OP)?.keys;
        let bool_mask = mask.bool_mask(dims, device)?;
        let bias = mask.bias_tensor(dims, DType::F32, device)?;
        let mut chosen = vec![Vec::new(); b];
        let step = (PRODUCTS / (b * num_heads * t_kv)).clamp(1, t_q);
        for start in (0..t_q).step_by(step) {
            let n = step.min(t_q - start);
            let of_sequence = |sequence: usize| &ranges_of_queries[sequence * t_q + start..][..n];
            let ranges: Vec<_> = (0..b).flat_map(of_sequence).cloned().collect();
            let attended = union_of(ranges.iter().cloned());
            let of_chunk = |tensor: &Tensor| -> Result<Tensor> {
                let rows = if tensor.dim(2)? == 1 { tensor.clone() } else { tensor.narrow(2, start, n)? };
                rows.broadcast_as((b, 1, n, t_kv))?.squeeze(1)?.narrow(2, attended.start, attended.len())
            };
            let mut scores = vec![0f32; b * n * attended.len()];
            // Queries that attend to few keys choose them all.
            if ranges.iter().any(|range| range.len() > k) {
                let own_keys = keys.narrow(2, attended.start, attended.len())?;
                scores = queries.scores(&own_keys, start, n)?;
                if let Some(bias) = &bias {
                    for (score, term) in scores.iter_mut().zip(to_vec::<f32>(&of_chunk(bias)?)?) {
                        *score += term;
                    }
                }
            }
            let allowed = match &bool_mask {
                Some(bool_mask) => Some(to_vec::<u8>(&of_chunk(bool_mask)?)?),
                None => None,
            };
            let of_rows = Scores { scores: &scores, keys: attended, ranges: &ranges, allowed: allowed.as_deref() };
            for (own, rows) in chosen.iter_mut().zip(of_rows.largest(k).chunks(n * k)) {
                own.extend_from_slice(rows);
            }
        }
        let lists = Tensor::from_vec(chosen.concat(), (b, 1, t_q, k), &Device::Cpu)?;
        Ok(Some(KeyLists::new(&lists)?))
    }

    fn freeze(&self) -> Result<Arc<dyn KeyIndexer>> {
        Ok(Arc::new(self.frozen()?))
    }
}
