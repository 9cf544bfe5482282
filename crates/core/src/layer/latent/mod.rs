//! Multi-head latent attention: keys and values are computed from one narrow latent for each token.

mod config;
#[cfg(test)]
mod tests;
mod up;

pub use config::MultiHeadLatentAttentionConfig;

use std::sync::Arc;

use candle_core::{DType, Module, ModuleT, Result, Tensor, bail};
use candle_nn::VarBuilder;

use super::LayerOutput;
use super::forward::{AttendedKeys, PreparedCall};
use super::indexer::{DeepSeekIndexer, IndexQueries, IndexedTokens, IndexerShape, KeyIndexer};
use super::input::{AttentionInput, KeysFrom};
use super::validate::ExpectedInput;
use super::warnings;
use super::whole_mask::MaskedCall;
use crate::cache::{KvFloats, NewTokens};
use crate::mask::AttentionMask;
use crate::position::{RotaryEmbedding, Rotation};
use crate::sdpa::{Attended, AttentionOutput, AttentionStatistics, FunctionKeys, OwnKeys, Plan, StatisticsOptions};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{
    HeadCounts, HeadShard, Heads, ParameterReader, Share, WholeTensors, is_addressable, part, reshape_linked,
    transpose_linked,
};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

const OP: &str = "multi_head_latent_attention";

/// The rows and the columns of a weight (out, in) that belong to heads.
const ROWS: Share = Share::Heads { heads: Heads::Query, dim: 0 };
const COLUMNS: Share = Share::Heads { heads: Heads::Query, dim: 1 };

/// Multi-head latent attention of DeepSeek-V2 (<https://arxiv.org/abs/2405.04434>, section 2.1) and V3.
///
/// A token is compressed to a latent of width `kv_lora_rank`, from which each head's key and value are computed by
/// linear functions, and to one key of width `rope_head_dim` with rotary positions that all heads share. A head's query
/// has a part for each of the two, and its score is the sum of both products. A cache stores only latents and shared
/// keys:
///
/// ```
/// use candle_attention::{AttentionCache, AttentionInput, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = MultiHeadLatentAttentionConfig::new(64, 4).with_kv_lora_rank(32).with_rope_head_dim(8);
/// let layer = MultiHeadLatentAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let prompt = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
/// let mut cache = AttentionCache::default();
/// let ys = layer.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache))?;
/// assert_eq!(ys.dims(), [2, 5, 64]);
/// // In bytes: sequences, positions, the latent and the shared key, f32.
/// assert_eq!(cache.memory(), 2 * cache.capacity() * (32 + 8) * 4);
/// # Ok(()) }
/// ```
///
/// A short call with a cache multiplies the key's part of `kv_b_proj` with its queries, and the value's part with its
/// attention outputs (the paper's "absorbed" matrices). All heads then attend to the latents in place, as to one key
/// head of width `kv_lora_rank + rope_head_dim` whose values are its own first `kv_lora_rank` columns. A long call, and
/// any call without a cache, computes keys and values of each head from the latents first. A call with a cache uses the
/// form with fewer multiplications. Both have the same numbers, up to rounding.
///
/// A cache of 8 bits has one scale for the latent and the shared key of a token together.
///
/// With an [indexer](MultiHeadLatentAttentionConfig::with_indexer), each query attends to the keys that it chooses. A
/// cache then stores the key of the indexer too.
///
/// Weights that are plain tensors on a CPU are packed ([`PackedLinear`]), and the key's part of `kv_b_proj` is stored
/// twice, in both directions. A layer has no state. Inputs are (B, T, E), or (T, E) for one sequence.
#[doc(alias = "MLA")]
#[derive(Debug, Clone)]
pub struct MultiHeadLatentAttention {
    config: MultiHeadLatentAttentionConfig,
    /// The compression of the queries, if they are compressed.
    compression: Option<QueryCompression>,
    /// The projection to queries, (H · D, ..).
    queries: PackedLinear,
    /// The projection to latents and shared keys, (rank + rope, E).
    down: PackedLinear,
    norm: Norm,
    /// The projection from latents to the keys and values of all heads, (H · (nope + D_v), rank): for each head the
    /// rows of its key, then those of its value.
    up: PackedLinear,
    /// The transposed rows of each head's key, (rank, nope), if `up` is packed.
    absorbing: Vec<PackedLinear>,
    out: PackedLinear,
    rotary: RotaryEmbedding,
    indexer: Option<LayerIndexer>,
    mask: AttentionMask,
    /// The dtype of inputs.
    dtype: DType,
}

/// The module that chooses keys, with its rotary positions.
#[derive(Debug, Clone)]
struct LayerIndexer {
    module: Arc<dyn KeyIndexer>,
    rotary: RotaryEmbedding,
}

impl LayerIndexer {
    /// Reads the indexer of a layer, if it has one.
    fn load(cfg: &MultiHeadLatentAttentionConfig, source: &ParameterReader) -> Result<Option<Self>> {
        let (Some(own), Some(q_lora_rank)) = (cfg.indexer(), cfg.q_lora_rank()) else { return Ok(None) };
        let shape = IndexerShape { embed_dim: cfg.embed_dim(), q_lora_rank, rope_head_dim: cfg.rope_head_dim() };
        let module = DeepSeekIndexer::load(own, shape, &source.pp("indexer"))?;
        let rope = cfg.rope().clone().with_style(own.rope_style);
        Ok(Some(Self { module: Arc::new(module), rotary: RotaryEmbedding::new(&rope, cfg.rope_head_dim())? }))
    }
}

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

/// The projection that compresses queries, and the norm after it.
#[derive(Debug, Clone)]
struct QueryCompression {
    down: PackedLinear,
    norm: Norm,
}

impl QueryCompression {
    /// Returns (B, T, q_lora_rank) of inputs (B, T, E).
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.down.forward(xs)?)
    }

    /// Returns a copy that does not follow variables.
    fn freeze(&self) -> Result<Self> {
        Ok(Self { down: self.down.freeze()?, norm: self.norm.freeze()? })
    }
}

impl MultiHeadLatentAttention {
    /// Loads a layer with DeepSeek's names below the builder's prefix: `q_proj`, or `q_a_proj`, `q_a_layernorm` and
    /// `q_b_proj` where queries are compressed; `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`.
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
    /// has the whole projections that compress tokens, and a whole cache. [`config`](Self::config) returns the config of
    /// the shard.
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

    /// Loads all heads, or those of a shard.
    fn load(cfg: &MultiHeadLatentAttentionConfig, source: ParameterReader) -> Result<Self> {
        let h = cfg.num_heads();
        let embed_dim = cfg.embed_dim();
        let rank = cfg.kv_lora_rank();
        let query_width = h.saturating_mul(cfg.head_dim());
        let down_shape = (rank.saturating_add(cfg.rope_head_dim()), embed_dim);
        let up_shape = (h.saturating_mul(cfg.nope_head_dim().saturating_add(cfg.value_head_dim())), rank);
        let out_shape = (embed_dim, h.saturating_mul(cfg.value_head_dim()));
        Self::build(cfg, source, |heads| {
            let (compression, queries) = match cfg.q_lora_rank() {
                Some(q_rank) => (
                    Some(heads.linear("q_a_proj", (q_rank, embed_dim), cfg.bias(), None)?.try_into()?),
                    heads.linear("q_b_proj", (query_width, q_rank), false, Some(ROWS))?.try_into()?,
                ),
                None => (None, heads.linear("q_proj", (query_width, embed_dim), false, Some(ROWS))?.try_into()?),
            };
            Ok(LatentProjections {
                compression,
                queries,
                down: heads.linear("kv_a_proj_with_mqa", down_shape, cfg.bias(), None)?.try_into()?,
                up: heads.linear("kv_b_proj", up_shape, false, Some(ROWS))?.try_into()?,
                out: heads.linear("o_proj", out_shape, cfg.bias(), Some(COLUMNS))?.try_into()?,
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
            norm: norm("kv_a_layernorm", cfg.kv_lora_rank())?,
            up,
            absorbing: Vec::new(),
            out,
            rotary: RotaryEmbedding::new(cfg.rope(), cfg.rope_head_dim())?,
            indexer: LayerIndexer::load(cfg, &source)?,
            mask: if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() },
            dtype: source.vb.dtype(),
            config,
        };
        layer.prepared()
    }

    /// Replaces the layer's tables of cosines and sines by those that it shares with other layers.
    ///
    /// # Errors
    /// If the tables do not have the layer's config, for heads of `rope_head_dim`.
    pub fn with_rotary(self, rotary: RotaryEmbedding) -> Result<Self> {
        rotary.check_config(OP, self.config.rope(), self.config.rope_head_dim())?;
        Ok(Self { rotary, ..self })
    }

    /// Returns a copy for inference: the current weights are packed, and gradients are not tracked.
    ///
    /// # Errors
    /// If the weights do not fit in memory.
    pub fn freeze(&self) -> Result<Self> {
        let compression = match &self.compression {
            Some(compression) => Some(compression.freeze()?),
            None => None,
        };
        let indexer = match &self.indexer {
            Some(LayerIndexer { module, rotary }) => {
                Some(LayerIndexer { module: module.freeze()?, rotary: rotary.clone() })
            }
            None => None,
        };
        let layer = Self {
            compression,
            indexer,
            queries: self.queries.freeze()?,
            down: self.down.freeze()?,
            norm: self.norm.freeze()?,
            up: self.up.freeze()?,
            out: self.out.freeze()?,
            ..self.clone()
        };
        layer.prepared()
    }

    /// Returns the config of the layer.
    pub fn config(&self) -> &MultiHeadLatentAttentionConfig {
        &self.config
    }
}

impl MultiHeadLatentAttentionConfig {
    /// Returns whether `t_q` queries need fewer multiplications to attend to `t_kv` latents than to each head's own
    /// keys and values.
    ///
    /// With W_k and W_v for the maps from a latent c to keys and values, a score is `q · (W_k c) = (W_kᵀ q) · c`, and
    /// an output `Σ w (W_v c) = W_v (Σ w c)`: either queries absorb W_k and outputs W_v, or keys and values are
    /// computed from the latents.
    fn absorbs(&self, t_q: usize, t_kv: usize) -> bool {
        let rank = self.kv_lora_rank as f64;
        let nope = self.nope_head_dim as f64;
        let rope = self.rope_head_dim as f64;
        let value = self.value_head_dim as f64;
        let t_q = t_q as f64;
        let t_kv = t_kv as f64;
        // Multiplications for one head.
        let between = rank * (nope + value);
        let expanded = t_kv * between + t_q * t_kv * (nope + rope + value);
        let absorbed = t_q * between + t_q * t_kv * (rank + rope + rank);
        absorbed < expanded
    }
}

impl MultiHeadLatentAttention {
    /// Computes self-attention under the layer's own mask: (B, T, E) to (B, T, E). For training, see
    /// [`forward_t`](candle_core::ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// Computes the layer for any input: with a mask, a cache, positions, in training. (B, T, E) to (B, T, E).
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, inputs of keys and values, a mask that does
    /// not fit, and a cache that cannot store the call's rows.
    pub fn forward_with<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        Ok(self.run(input.into(), RequestedResults::default())?.output)
    }

    /// Computes [`forward_with`](Self::forward_with), and returns the weights (B, H, T_q, T_kv) after dropout too; (H,
    /// T_q, T_kv) for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<LayerOutput> {
        let wanted = RequestedResults { weights: true, ..RequestedResults::default() };
        let AttentionOutput { output, weights } = self.run(input.into(), wanted)?.output_and_weights()?;
        Ok(LayerOutput { output, weights })
    }

    /// Computes [`forward_with`](Self::forward_with), and returns statistics of the weights too, as
    /// [`MultiHeadAttention::forward_with_statistics`](crate::MultiHeadAttention::forward_with_statistics) does.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with), and if `wanted` does not fit the call.
    pub fn forward_with_statistics<'a>(
        &'a self,
        input: impl Into<AttentionInput<'a>>,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        let results = RequestedResults { statistics: Some(wanted.requested()), ..RequestedResults::default() };
        self.run(input.into(), results)?.output_and_statistics()
    }

    /// Returns the backend that [`forward_with`](Self::forward_with) would use for an input, and the reason. The cache
    /// is not changed, but the input is projected, and a larger buffer may be allocated.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn plan(&self, input: &AttentionInput) -> Result<Plan> {
        self.prepare(input, None)?.plan()
    }

    fn run<'a>(&'a self, input: AttentionInput<'a>, wanted: RequestedResults) -> Result<Attended> {
        self.prepare(&input, None)?.finish(input.cache, wanted)
    }

    /// Validates and projects an input: everything that comes before attention. With a cache, `absorbs` says whether
    /// queries absorb the matrix of keys; the default is the form with fewer multiplications. If they absorb it, the
    /// attention output is of latents (B, H, T, rank), and otherwise of values (B, H, T, D_v).
    fn prepare<'a>(&'a self, input: &AttentionInput<'a>, absorbs: Option<bool>) -> Result<PreparedCall<'a>> {
        let cfg = &self.config;
        let CheckedLatentInput { xs, tokens, mut mask, rotation, index_rotation, residual } = self.validate(input)?;
        let t = xs.dim(1)?;
        let is_cached = input.any_cache().is_some();
        let absorbs = is_cached && absorbs.unwrap_or_else(|| cfg.absorbs(t, tokens.longest()));
        let compressed = match &self.compression {
            Some(compression) => compression.forward(&xs)?,
            None => xs.clone(),
        };
        let mut rows = self.latent_rows(&xs, rotation.as_ref())?;
        let mut index_queries = None;
        if let Some(LayerIndexer { module, .. }) = &self.indexer {
            let indexed = IndexedTokens { xs: &xs, compressed: &compressed, rotation: index_rotation.as_ref() };
            rows = Tensor::cat(&[&rows, &module.keys(&indexed)?.unsqueeze(1)?], 3)?;
            index_queries = Some(module.queries(&indexed)?);
        }
        let q = self.project_queries(&compressed, rotation.as_ref(), absorbs)?;
        let mut cache_after = None;
        let keys = if let Some(cache) = &input.cache {
            let mut staged = cache.stage(&tokens, &rows, None, cfg.kv_lora_rank())?;
            if !absorbs {
                staged.call.expansion = Some(Box::new(|latents| self.expand(latents)));
            } else if self.indexer.is_some() {
                staged.call.expansion = Some(Box::new(|latents| self.without_index_keys(latents)));
            }
            if let Some(queries) = index_queries {
                staged.call.choice = Some(Box::new(move |stored, own| self.with_chosen_keys(own, &queries, stored)));
            }
            cache_after = Some(staged.cache);
            AttendedKeys::Cached(staged.call)
        } else {
            if let Some(queries) = &index_queries {
                mask = self.with_chosen_keys(mask, queries, &rows)?;
            }
            let KvFloats { k, v } = self.expand(&rows)?;
            match input.function {
                Some(function) => AttendedKeys::Function(FunctionKeys { k, v, function }),
                None => AttendedKeys::Own(OwnKeys { k, v, sequences: input.packed }),
            }
        };
        Ok(PreparedCall {
            q,
            keys,
            cache: cache_after,
            mask,
            options: input.options(cfg.dropout()).with_scale(cfg.scale()),
            batched: input.queries.rank() == 3,
            output: Box::new(move |output| self.project_output(output, absorbs, residual.as_ref())),
        })
    }

    /// Returns a mask with the keys that the indexer chooses for each query among rows (B, 1, T_kv, width).
    fn with_chosen_keys(&self, mask: AttentionMask, queries: &IndexQueries, rows: &Tensor) -> Result<AttentionMask> {
        let Some(LayerIndexer { module, .. }) = &self.indexer else { return Ok(mask) };
        let width = rows.dim(3)?;
        let keys = part(&rows.detach(), 3, width - module.key_width()..width)?.squeeze(1)?;
        Ok(match module.choose(queries, &keys, &mask)? {
            Some(lists) => mask.with_key_lists(&lists),
            None => mask,
        })
    }

    /// Returns stored rows (B, 1, T, width) as keys and values of queries that absorb the matrix of keys: views.
    fn without_index_keys(&self, rows: &Tensor) -> Result<KvFloats> {
        let rank = self.config.kv_lora_rank();
        let k = part(rows, 3, 0..rank + self.config.rope_head_dim())?;
        Ok(KvFloats { v: part(&k, 3, 0..rank)?, k })
    }

    /// Checks the inputs of a call.
    fn validate(&self, input: &AttentionInput) -> Result<CheckedLatentInput> {
        let cfg = &self.config;
        let batched = input.queries.rank() == 3;
        let expected = ExpectedInput { op: OP, batched, dtype: self.dtype, device: self.down.device() };
        let keys_from = input.keys_from(OP)?;
        let xs = expected.queries(input.queries, cfg.embed_dim())?;
        let residual = expected.residual(input, cfg.embed_dim())?;
        match keys_from {
            KeysFrom::Own | KeysFrom::Cache(_) => {}
            KeysFrom::Cross { .. } | KeysFrom::Memory(_) => {
                bail!("[{OP}] keys and values were given, expected self-attention")
            }
            KeysFrom::Pages | KeysFrom::EarlierPages => {
                bail!("[{OP}] pages were given to latent attention, expected a cache")
            }
            KeysFrom::EarlierLayer(_) => {
                bail!("[{OP}] the cache of an earlier layer was given, but the layer has latents of its own")
            }
        }
        if input.adapters.is_some_and(|names| names.iter().any(Option::is_some)) {
            bail!("[{OP}] adapters by name were given, which latent attention does not have, expected none")
        }
        if input.sink_window().is_some() {
            bail!(
                "[{OP}] the cache keeps sink tokens, which latent attention does not support; expected a cache without"
            )
        }
        if self.indexer.is_some() && input.packed.is_some() {
            bail!("[{OP}] packed sequences were given to a layer with an indexer, expected a batch")
        }
        let (b, t, _) = xs.dims3()?;
        input.check_packed(OP, &xs, t)?;
        warnings::about_lengths(OP, input, t);
        let tokens = input.tokens(OP, b, t, &self.mask)?;
        let mut positions = input.call_positions(OP, &tokens, t, None, cfg.rotates())?;
        let counts_positions = cfg.rope().scaling().depends_on_length();
        let call = MaskedCall { op: OP, tokens: &tokens, b, t_kv: t, device: xs.device(), counts_positions };
        let mask = input.mask_and_positions(&self.mask, &mut positions, call)?;
        let width = cfg.num_heads() * (2 * cfg.head_dim() + cfg.value_head_dim() + cfg.kv_lora_rank());
        if !is_addressable(&[b, t, width]) {
            bail!("[{OP}] queries {:?} are too large to address", input.queries.dims())
        }
        if input.train
            && cfg.dropout() > 0.0
            && let Some(cache) = input.any_cache()
        {
            warnings::about_dropout(OP, cache);
        }
        let mut rotation = None;
        let mut index_rotation = None;
        if let Some(positions) = positions {
            let length = positions.length_of_sequences();
            rotation = Some(self.rotary.at_length(&positions.queries, length)?);
            if let Some(LayerIndexer { rotary, .. }) = &self.indexer {
                index_rotation = Some(rotary.at_length(&positions.queries, length)?);
            }
        }
        Ok(CheckedLatentInput { xs, tokens, mask, rotation, index_rotation, residual })
    }

    /// Returns the normalised latent and the rotated shared key of each token, (B, 1, T, rank + rope): the rows that a
    /// cache stores.
    fn latent_rows(&self, xs: &Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
        let rank = self.config.kv_lora_rank();
        let rope = self.config.rope_head_dim();
        let compressed = self.down.forward(xs)?;
        let latents = self.norm.forward(&part(&compressed, 2, 0..rank)?)?;
        let shared_keys = rotated(part(&compressed, 2, rank..rank + rope)?.unsqueeze(2)?, rotation)?.squeeze(2)?;
        Tensor::cat(&[&latents, &shared_keys], 2)?.unsqueeze(1)
    }

    /// Returns the queries (B, H, T, nope + rope) of compressed queries, or of inputs if these are not compressed; (B,
    /// H, T, rank + rope) if they absorb the matrix of keys.
    fn project_queries(&self, compressed: &Tensor, rotation: Option<&Rotation>, absorbs: bool) -> Result<Tensor> {
        let cfg = &self.config;
        let (b, t, _) = compressed.dims3()?;
        let q = self.queries.forward(compressed)?.reshape((b, t, cfg.num_heads(), cfg.head_dim()))?;
        let nope = part(&q, 3, 0..cfg.nope_head_dim())?;
        let nope = if absorbs { self.absorb(&nope)? } else { nope.contiguous()? };
        let rope = rotated(part(&q, 3, cfg.nope_head_dim()..cfg.head_dim())?, rotation)?;
        Tensor::cat(&[nope, rope], 3)?.transpose(1, 2)
    }

    /// Projects the attention output of a call to the layer's output (B, T, E).
    fn project_output(&self, output: &Tensor, absorbs: bool, residual: Option<&Tensor>) -> Result<Tensor> {
        let heads = transpose_linked(output, 1, 2)?;
        let values = if absorbs { self.values_of(&heads)? } else { heads };
        let (b, t, h, d_v) = values.dims4()?;
        self.out.product(&reshape_linked(&values, (b, t, h * d_v))?, 0..self.out.out_dim(), residual)
    }
}

/// The checked inputs of a call.
struct CheckedLatentInput {
    /// (B, T, E).
    xs: Tensor,
    tokens: NewTokens,
    /// The mask of the layer and of the call together.
    mask: AttentionMask,
    /// The rotation at the tokens' positions, if the layer rotates.
    rotation: Option<Rotation>,
    /// The rotation of the indexer, likewise.
    index_rotation: Option<Rotation>,
    /// (B, T, E).
    residual: Option<Tensor>,
}

/// Returns heads (B, T, heads, rope) after their rotation, if the layer rotates, as a contiguous tensor.
fn rotated(xs: Tensor, rotation: Option<&Rotation>) -> Result<Tensor> {
    match rotation {
        Some(rotation) => rotation.apply(&xs),
        None => xs.contiguous(),
    }
}

/// Implements `ModuleT` and not `Module`, for which Candle provides a `forward_t` that ignores `train`.
impl ModuleT for MultiHeadLatentAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
