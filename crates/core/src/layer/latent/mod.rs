//! Multi-head latent attention: keys and values are computed from one narrow latent for each token.

mod additions;
mod choice;
mod config;
mod forward;
mod load;
mod options;
mod pages;
mod projections;
#[cfg(test)]
mod tests;
mod up;
mod validate;

pub use config::{LatentScales, MultiHeadLatentAttentionConfig};
pub use load::LatentProjections;

pub(super) use pages::LatentPages;

use std::sync::Arc;

use candle_core::{DType, ModuleT, Result, Tensor};

use super::LayerOutput;
use super::indexer::KeyIndexer;
use super::input::AttentionInput;
use crate::mask::AttentionMask;
use crate::position::RotaryEmbedding;
use crate::sdpa::{AttentionOutput, AttentionStatistics, Plan, StatisticsOptions};
use additions::Additions;
use candle_attention_call::RequestedResults;
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::Norm;
use forward::runs_pages_as_batch;

const OP: &str = "multi_head_latent_attention";

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
/// A cache of 8 bits or E4M3 has one scale for the latent and the shared key of a token together, one of 4 bits a scale
/// for each 64 numbers of both, or one if their width is no multiple of 64. For 4 bits, `kv_lora_rank` and
/// `rope_head_dim` are multiples of 32.
///
/// In [pages](AttentionInput::with_pages) of a pool made by
/// [`KvPoolConfig::for_latent_layer`](crate::KvPoolConfig::for_latent_layer), sequences whose queries absorb the matrix
/// of keys attend to the latents in place. For a long chunk of a prompt, keys and values are computed from a copy of
/// its latents, and so they are for every sequence of a layer whose keys an indexer chooses, its own or an earlier
/// layer's.
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
    /// The tables of the parts that rotate, if there are such.
    rotary: Option<RotaryEmbedding>,
    additions: Additions,
    indexer: Option<LayerIndexer>,
    mask: AttentionMask,
    /// The dtype of inputs.
    dtype: DType,
}

/// The module that chooses keys, with its rotary positions.
#[derive(Debug, Clone)]
struct LayerIndexer {
    module: Arc<dyn KeyIndexer>,
    rotary: Option<RotaryEmbedding>,
}

/// The projection that compresses queries, and the norm after it.
#[derive(Debug, Clone)]
struct QueryCompression {
    down: PackedLinear,
    norm: Norm,
}

impl QueryCompression {
    /// Returns a copy that does not follow variables.
    fn freeze(&self) -> Result<Self> {
        Ok(Self { down: self.down.freeze()?, norm: self.norm.freeze()? })
    }
}

impl MultiHeadLatentAttention {
    /// Replaces the layer's tables of cosines and sines by those that it shares with other layers. A layer with
    /// [frequency factors](Self::with_frequency_factors) keeps them, and shares no tables.
    ///
    /// # Errors
    /// If the tables do not have the layer's config, for heads of `rope_head_dim`.
    pub fn with_rotary(self, rotary: RotaryEmbedding) -> Result<Self> {
        rotary.check_config(OP, self.config.rope(), self.config.rope_head_dim())?;
        let rotary = match &self.rotary {
            Some(own) => rotary.with_factors_of(own),
            None => rotary,
        };
        Ok(Self { rotary: Some(rotary), ..self })
    }

    /// Multiplies the rotary frequencies of the layer, and of its indexer, by factors (rope_head_dim / 2,) that the
    /// layers of a model share ([`RotaryEmbedding::with_frequency_factors`]).
    ///
    /// # Errors
    /// As there.
    pub fn with_frequency_factors(mut self, factors: &Tensor) -> Result<Self> {
        if let Some(rotary) = self.rotary.take() {
            self.rotary = Some(rotary.with_frequency_factors(factors)?);
        }
        if let Some(indexer) = &mut self.indexer
            && let Some(rotary) = indexer.rotary.take()
        {
            indexer.rotary = Some(rotary.with_frequency_factors(factors)?);
        }
        Ok(self)
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
            additions: self.additions.freeze()?,
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
        if !runs_pages_as_batch(input) {
            return self.prepare(input, None)?.plan();
        }
        self.paged_batch(input)?.plan(input, |own| self.prepare(&own, None)?.plan())
    }
}

/// Implements `ModuleT` and not `Module`, for which Candle provides a `forward_t` that ignores `train`.
impl ModuleT for MultiHeadLatentAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
