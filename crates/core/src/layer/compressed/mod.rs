//! Attention to a window of tokens, and to keys that compress the tokens before.

mod cache;
mod compressor;
mod config;
mod forward;
mod indexer;
mod input;
mod load;
mod sequence;

pub use cache::CompressedKeyCache;
pub use config::{CompressedKeyAttentionConfig, CompressedKeyIndexerConfig, KeyCompression};
pub use input::CompressedKeyInput;

use candle_core::{DType, ModuleT, Result, Tensor};

use crate::position::{RotaryEmbedding, Rotation};
use candle_attention_modules::base::{Parameter, part};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::Norm;
use compressor::Compressor;
use indexer::CompressedKeyIndexer;

const OP: &str = "compressed_key_attention";

/// Attention of DeepSeek V4: to the last tokens, and to compressed keys of all tokens before.
///
/// A token has one key, which all heads share and which is its value too. A query attends to the keys in its window.
/// With a [compression](KeyCompression), it attends to one more key for each `rate` tokens up to its own, or to those
/// of these keys that an indexer chooses. One softmax is over both, with a sink of each head.
///
/// The last entries of queries and keys rotate, compressed keys by the position of the first token of their window.
/// Since keys are values, outputs have rotated entries, which rotate back by the position of the query: an output
/// depends on distances alone. Groups of heads are then projected to narrow vectors, and these together to the output.
///
/// Each sequence of a batch attends by itself, so that padding and lengths do not matter to its numbers. A call of one
/// token with a [cache](CompressedKeyCache) reads the compressed keys that its queries attend to alone.
///
/// Weights that are plain tensors on a CPU are packed ([`PackedLinear`]).
#[doc(alias("DeepSeek V4", "CSA", "HCA"))]
#[derive(Debug, Clone)]
pub struct CompressedKeyAttention {
    config: CompressedKeyAttentionConfig,
    /// The projection that compresses queries, (q_lora_rank, E).
    query_compression: PackedLinear,
    query_norm: Norm,
    /// The projection to queries, (H · D, q_lora_rank).
    queries: PackedLinear,
    /// The norm of each query head, without a weight.
    head_norm: Norm,
    /// The projection to keys, (D, E).
    keys: PackedLinear,
    key_norm: Norm,
    /// (H,).
    sinks: Parameter,
    /// The projections of the groups of heads, (groups · output_rank, H · D / groups).
    groups: PackedLinear,
    /// The output projection, (E, groups · output_rank).
    out: PackedLinear,
    compression: Option<LayerCompression>,
    rotary: RotaryEmbedding,
    /// The dtype of inputs.
    dtype: DType,
}

/// The modules that compress tokens to keys, and choose among these.
#[derive(Debug, Clone)]
struct LayerCompression {
    config: KeyCompression,
    compressor: Compressor,
    indexer: Option<CompressedKeyIndexer>,
}

impl LayerCompression {
    fn freeze(&self) -> Result<Self> {
        let indexer = self.indexer.as_ref().map(CompressedKeyIndexer::freeze).transpose()?;
        Ok(Self { config: self.config, compressor: self.compressor.freeze()?, indexer })
    }
}

impl CompressedKeyAttention {
    /// Replaces the layer's tables of cosines and sines by those that it shares with other layers.
    ///
    /// # Errors
    /// If the tables do not have the layer's config, for heads of `rope_head_dim`.
    pub fn with_rotary(self, rotary: RotaryEmbedding) -> Result<Self> {
        rotary.check_config(OP, &self.config.rope, self.config.rope_head_dim)?;
        Ok(Self { rotary, ..self })
    }

    /// Returns a copy for inference: the current weights are packed, and gradients are not tracked.
    ///
    /// # Errors
    /// If the weights do not fit in memory.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self {
            query_compression: self.query_compression.freeze()?,
            query_norm: self.query_norm.freeze()?,
            queries: self.queries.freeze()?,
            keys: self.keys.freeze()?,
            key_norm: self.key_norm.freeze()?,
            sinks: self.sinks.freeze()?,
            groups: self.groups.freeze()?,
            out: self.out.freeze()?,
            compression: self.compression.as_ref().map(LayerCompression::freeze).transpose()?,
            ..self.clone()
        })
    }

    /// Returns the config of the layer.
    pub fn config(&self) -> &CompressedKeyAttentionConfig {
        &self.config
    }

    /// Computes causal self-attention without padding: (B, T, E) to (B, T, E). For training, see
    /// [`forward_t`](candle_core::ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// Computes the layer for any input: with a cache, with padding, in training. (B, T, E) to (B, T, E).
    ///
    /// # Errors
    /// For an input whose shape, dtype or device does not fit the layer, padding that does not fit the input, another
    /// number of sequences than the cache has, and a call with a cache in which keys are tracked for gradients. An
    /// error does not change the cache.
    pub fn forward_with<'a>(&self, input: impl Into<CompressedKeyInput<'a>>) -> Result<Tensor> {
        self.run(input.into())
    }
}

/// Implements `ModuleT` and not `Module`, for which Candle provides a `forward_t` that ignores `train`.
impl ModuleT for CompressedKeyAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(CompressedKeyInput::new(xs).with_train(train))
    }
}

/// Rotates the last `rope` entries of heads (B, T, heads, width).
fn rotated_last(heads: &Tensor, rope: usize, rotation: &Rotation) -> Result<Tensor> {
    let width = heads.dim(3)?;
    if rope == width {
        return rotation.apply(heads);
    }
    let first = width - rope;
    let rotated = rotation.apply(&part(heads, 3, first..width)?)?;
    Tensor::cat(&[part(heads, 3, 0..first)?.contiguous()?, rotated], 3)
}
