//! The config of latent attention.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::synonyms;
use crate::layer::indexer::IndexerConfig;
use crate::position::{RopeConfig, RopeStyle, score_factor};
use candle_attention_modules::base::explain_unknown_field;
use candle_attention_modules::gate::{GateLayout, OutputGate};

/// The shape and options of a [`MultiHeadLatentAttention`](crate::MultiHeadLatentAttention). Lengths, padding and a
/// cache are inputs of a call.
///
/// ```
/// use candle_attention::MultiHeadLatentAttentionConfig;
/// // DeepSeek-V2-Lite: the defaults are the paper's.
/// let cfg = MultiHeadLatentAttentionConfig::new(2048, 16);
/// assert_eq!((cfg.kv_lora_rank(), cfg.head_dim(), cfg.value_head_dim()), (512, 192, 128));
/// // A token needs the memory of 2.25 key heads of width 128 and their values in a cache, for any number of heads.
/// assert_eq!(cfg.kv_lora_rank() + cfg.rope_head_dim(), 576);
/// ```
///
/// The constructor of the layer calls [`validate`](Self::validate).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
#[must_use]
pub struct MultiHeadLatentAttentionConfig {
    embed_dim: usize,
    pub(super) num_heads: usize,
    q_lora_rank: Option<usize>,
    pub(super) kv_lora_rank: usize,
    pub(super) nope_head_dim: usize,
    pub(super) rope_head_dim: usize,
    pub(super) value_head_dim: usize,
    #[serde(default)]
    bias: bool,
    rope: RopeConfig,
    #[serde(default = "enabled")]
    rotates: bool,
    scale: Option<f64>,
    #[serde(default = "default_norm_eps")]
    norm_eps: f64,
    #[serde(default = "enabled")]
    causal: bool,
    #[serde(default)]
    dropout: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    indexer: Option<IndexerConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) window: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) output_gate: Option<OutputGate>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) latent_scales: Option<LatentScales>,
    #[serde(default, skip_serializing_if = "is_off")]
    pub(super) sinks: bool,
    #[serde(default, skip_serializing_if = "is_off")]
    pub(super) shared_key_norm: bool,
    #[serde(default, skip_serializing_if = "is_off")]
    pub(super) learned_temperature: bool,
    #[serde(default, skip_serializing_if = "is_off")]
    pub(super) shared_choice: bool,
}

/// Factors on what latent attention compresses tokens to, after the norms (Dots 3).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentScales {
    /// The factor on compressed queries, those that an indexer reads too.
    pub queries: f64,
    /// The factor on the latent from which keys and values are computed.
    pub keys_and_values: f64,
}

// The derived functions are the methods `serialize` and `deserialize` of the config, because of `remote = "Self"`.

impl Serialize for MultiHeadLatentAttentionConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for MultiHeadLatentAttentionConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::deserialize(deserializer).map_err(|error| explain_unknown_field(error, &synonyms()))
    }
}

fn default_norm_eps() -> f64 {
    1e-6
}

/// Returns whether an option is off, as it is by default.
fn is_off(option: &bool) -> bool {
    !*option
}

/// Returns the default of options that are on unless a config turns them off.
fn enabled() -> bool {
    true
}

impl MultiHeadLatentAttentionConfig {
    /// Makes the config of a causal layer over inputs (B, T, `embed_dim`) with `num_heads` heads, queries that are not
    /// compressed, no biases, and the widths of DeepSeek-V2: a latent of 512, heads of 128 without and 64 with rotary
    /// positions, values of 128. Rotary positions are interleaved, with the base 10,000.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            q_lora_rank: None,
            kv_lora_rank: 512,
            nope_head_dim: 128,
            rope_head_dim: 64,
            value_head_dim: 128,
            bias: false,
            rope: RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved),
            rotates: true,
            scale: None,
            norm_eps: default_norm_eps(),
            causal: true,
            dropout: 0.0,
            indexer: None,
            window: None,
            output_gate: None,
            latent_scales: None,
            sinks: false,
            shared_key_norm: false,
            learned_temperature: false,
            shared_choice: false,
        }
    }

    /// Compresses queries to this width (`q_lora_rank`). Without it one projection computes them.
    pub fn with_q_lora_rank(mut self, q_lora_rank: impl Into<Option<usize>>) -> Self {
        self.q_lora_rank = q_lora_rank.into();
        self
    }

    /// Sets the width of the latent from which keys and values are computed (`kv_lora_rank`). The default is 512.
    pub fn with_kv_lora_rank(mut self, kv_lora_rank: usize) -> Self {
        self.kv_lora_rank = kv_lora_rank;
        self
    }

    /// Sets the width of the part of each query and key head without positions (`qk_nope_head_dim`). The default is
    /// 128.
    pub fn with_nope_head_dim(mut self, nope_head_dim: usize) -> Self {
        self.nope_head_dim = nope_head_dim;
        self
    }

    /// Sets the width of the part of each query head that rotates, and of the one key that all heads share for it
    /// (`qk_rope_head_dim`). The default is 64. It may be 0 in a layer that does not [rotate](Self::with_rotates): keys
    /// are computed from latents alone.
    pub fn with_rope_head_dim(mut self, rope_head_dim: usize) -> Self {
        self.rope_head_dim = rope_head_dim;
        self
    }

    /// Sets D_v, the width of one value head (`v_head_dim`). The default is 128.
    pub fn with_value_head_dim(mut self, value_head_dim: usize) -> Self {
        self.value_head_dim = value_head_dim;
        self
    }

    /// Sets whether the projections that compress and the output projection have biases (`attention_bias`). The other
    /// projections never have one. The default is false.
    pub fn with_bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Sets the rotary positions, for heads of `rope_head_dim`.
    pub fn with_rope(mut self, rope: RopeConfig) -> Self {
        self.rope = rope;
        self
    }

    /// Sets whether queries and shared keys rotate. The default is true. In Kimi Linear they have no positions.
    pub fn with_rotates(mut self, rotates: bool) -> Self {
        self.rotates = rotates;
        self
    }

    /// Sets the factor on the scores, which replaces the default of [`scale`](Self::scale).
    pub fn with_scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Sets the number that the norms of the compressed queries and of the latent add to the mean square. The default
    /// is 1e-6.
    pub fn with_norm_eps(mut self, norm_eps: f64) -> Self {
        self.norm_eps = norm_eps;
        self
    }

    /// Sets whether later keys are masked. The default is true.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the probability with which an attention weight is dropped in training. The default is 0.
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Sets the indexer that chooses the keys of each query (DeepSeek V3.2). Queries have to be compressed. The default
    /// is none: a query attends to all keys that the mask allows.
    #[doc(alias("index_topk", "sparse_attention"))]
    pub fn with_indexer(mut self, indexer: impl Into<Option<IndexerConfig>>) -> Self {
        self.indexer = indexer.into();
        self
    }

    /// Returns E, the width of the layer's input and output.
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// Returns H, the number of heads.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Returns the width that queries are compressed to, if they are compressed.
    pub fn q_lora_rank(&self) -> Option<usize> {
        self.q_lora_rank
    }

    /// Returns the width of the latent from which keys and values are computed.
    pub fn kv_lora_rank(&self) -> usize {
        self.kv_lora_rank
    }

    /// Returns the width of the part of each query and key head without positions.
    pub fn nope_head_dim(&self) -> usize {
        self.nope_head_dim
    }

    /// Returns the width of the part of each query head that rotates, and of the shared key.
    pub fn rope_head_dim(&self) -> usize {
        self.rope_head_dim
    }

    /// Returns D_v, the width of one value head.
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim
    }

    /// Returns whether the projections that compress and the output projection have biases.
    pub fn bias(&self) -> bool {
        self.bias
    }

    /// Returns the rotary positions.
    pub fn rope(&self) -> &RopeConfig {
        &self.rope
    }

    /// Returns whether queries and shared keys rotate.
    pub fn rotates(&self) -> bool {
        self.rotates
    }

    /// Returns the number that norms add to the mean square.
    pub fn norm_eps(&self) -> f64 {
        self.norm_eps
    }

    /// Returns whether later keys are masked.
    pub fn causal(&self) -> bool {
        self.causal
    }

    /// Returns the probability with which an attention weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Returns the indexer that chooses the keys of each query, if there is one.
    pub fn indexer(&self) -> Option<IndexerConfig> {
        self.indexer
    }

    /// Returns the width of a row that a cache stores: the latent, the shared key, and the key of the indexer.
    pub(super) fn row_width(&self) -> usize {
        let index_width = self.indexer.map_or(0, |indexer| indexer.stored_width());
        self.kv_lora_rank.saturating_add(self.rope_head_dim).saturating_add(index_width)
    }

    /// Returns the number of rows of each head in the projection to queries: the rows of its query, and of its gate
    /// where that is fused with the query.
    pub(super) fn query_row_width(&self) -> usize {
        self.head_dim().saturating_add(if self.has_fused_gate() { self.value_head_dim } else { 0 })
    }

    /// Returns whether the projection to queries has the rows of a gate.
    pub(super) fn has_fused_gate(&self) -> bool {
        self.output_gate.is_some_and(|gate| gate.layout == GateLayout::FusedWithQuery)
    }

    /// Returns the factor on the scores that replaces the default.
    pub(super) fn given_scale(&self) -> Option<f64> {
        self.scale
    }

    /// Returns D, the width of one query and key head: the sum of its parts.
    pub fn head_dim(&self) -> usize {
        self.nope_head_dim.saturating_add(self.rope_head_dim)
    }

    /// Returns the factor on the scores. The default is 1/sqrt(D), and with [yarn](crate::RopeScaling::Yarn) scaling
    /// that has an `mscale_all_dim`, times the square of `0.1 · mscale_all_dim · ln(factor) + 1`.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| score_factor(self.rope.scaling()) / (self.head_dim() as f64).sqrt())
    }
}
