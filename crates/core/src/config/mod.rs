//! The config of a [`MultiHeadAttention`](crate::MultiHeadAttention): everything that belongs to the architecture.

mod attention;
mod block_indexer;
mod projections;
mod stored;
mod validate;

pub use block_indexer::{BlockIndexerConfig, BlockScores};
pub(crate) use stored::synonyms;

use serde::{Deserialize, Serialize};

use crate::position::{AlibiConfig, AttentionTemperature, ContentPositions, RelativeBiasConfig, RopeConfig};
use candle_attention_modules::gate::OutputGate;
use candle_attention_modules::norm::{OutputNorm, QkNorm};

const OP: &str = "multi_head_attention";

/// The shape and options of a [`MultiHeadAttention`](crate::MultiHeadAttention).
///
/// A config has what belongs to the architecture of a model. What belongs to the data of one call (padding, masks, a
/// cache, positions) is an [`AttentionInput`](crate::AttentionInput).
///
/// [`new`](Self::new) is self-attention with an output projection and no biases, masks or positions. Every `with_*`
/// method changes one option and returns the config; the method of the same name without `with_` reads it. An option
/// that a layer may lack takes a value or an `Option`, such as a field that a `config.json` may lack.
///
/// ```
/// use candle_attention::{MultiHeadAttentionConfig, RopeConfig};
/// // Llama 3: 32 query heads in groups of 4, rotary positions.
/// let cfg = MultiHeadAttentionConfig::new(4096, 32)
///     .with_num_kv_heads(8)
///     .with_causal(true)
///     .with_rope(RopeConfig::new(500_000.0));
/// assert_eq!((cfg.head_dim(), cfg.out_dim()), (128, 4096));
///
/// let sliding_window: Option<usize> = None;
/// assert_eq!(cfg.clone().with_window(sliding_window), cfg);
/// ```
///
/// [`validate`](Self::validate) checks that the options fit together. Every constructor of a layer calls it, so model
/// code does not have to. A config is serialised with the names of its options:
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use candle_attention::MultiHeadAttentionConfig;
/// let cfg: MultiHeadAttentionConfig = serde_json::from_str(r#"{"embed_dim": 512, "num_heads": 8, "causal": true}"#)?;
/// assert_eq!(cfg, MultiHeadAttentionConfig::new(512, 8).with_causal(true));
/// # Ok(()) }
/// ```
///
/// An unknown name is an error that says which option is meant: the one with the nearest name, or the one that has
/// this name in PyTorch, transformers or other libraries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
#[must_use]
pub struct MultiHeadAttentionConfig {
    embed_dim: usize,
    num_heads: usize,
    num_kv_heads: Option<usize>,
    head_dim: Option<usize>,
    value_head_dim: Option<usize>,
    out_dim: Option<usize>,
    kdim: Option<usize>,
    vdim: Option<usize>,
    #[serde(default)]
    q_bias: bool,
    #[serde(default)]
    k_bias: bool,
    #[serde(default)]
    v_bias: bool,
    #[serde(default)]
    out_bias: bool,
    #[serde(default = "has_out_proj")]
    out_proj: bool,
    #[serde(default)]
    bias_kv: bool,
    #[serde(default)]
    num_mem_kv: usize,
    #[serde(default)]
    add_zero_attn: bool,
    #[serde(default)]
    causal: bool,
    context_length: Option<usize>,
    window: Option<usize>,
    local_window: Option<LocalWindow>,
    chunk: Option<usize>,
    clip_qkv: Option<f64>,
    softcap: Option<f64>,
    scale: Option<f64>,
    #[serde(default)]
    sinks: bool,
    qk_norm: Option<QkNorm>,
    rope: Option<RopeConfig>,
    #[serde(default)]
    norm_after_rope: bool,
    value_norm: Option<f64>,
    attention_temperature: Option<AttentionTemperature>,
    #[serde(default, deserialize_with = "stored::alibi")]
    alibi: Option<AlibiConfig>,
    relative_bias: Option<RelativeBiasConfig>,
    #[serde(default, deserialize_with = "stored::content_positions")]
    content_positions: Option<ContentPositions>,
    output_gate: Option<OutputGate>,
    output_norm: Option<OutputNorm>,
    #[serde(default, deserialize_with = "stored::kv_sharing")]
    kv_sharing: KvSharing,
    #[serde(default)]
    dropout: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    indexer: Option<BlockIndexerConfig>,
}

/// Returns the default of [`MultiHeadAttentionConfig::out_proj`].
fn has_out_proj() -> bool {
    true
}

/// A window on both sides of a query: it attends to the keys from `left` before its own position to `right` after it.
/// See [`MultiHeadAttentionConfig::with_local_window`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalWindow {
    /// The number of keys before the query's own.
    pub left: usize,
    /// The number of keys after the query's own.
    pub right: usize,
}

/// The shape of the layer.
impl MultiHeadAttentionConfig {
    /// Returns the config of self-attention over inputs (B, T, `embed_dim`) with `num_heads` heads of width
    /// `embed_dim / num_heads`, an output projection, no biases and no mask.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: None,
            head_dim: None,
            value_head_dim: None,
            out_dim: None,
            kdim: None,
            vdim: None,
            q_bias: false,
            k_bias: false,
            v_bias: false,
            out_bias: false,
            out_proj: true,
            bias_kv: false,
            num_mem_kv: 0,
            add_zero_attn: false,
            causal: false,
            context_length: None,
            window: None,
            local_window: None,
            chunk: None,
            clip_qkv: None,
            softcap: None,
            scale: None,
            sinks: false,
            qk_norm: None,
            rope: None,
            norm_after_rope: false,
            value_norm: None,
            attention_temperature: None,
            alibi: None,
            relative_bias: None,
            content_positions: None,
            output_gate: None,
            output_norm: None,
            kv_sharing: KvSharing::None,
            dropout: 0.0,
            indexer: None,
        }
    }

    /// Sets the width of the layer's input (E), of which [`new`](Self::new) has another.
    pub fn with_embed_dim(mut self, embed_dim: usize) -> Self {
        self.embed_dim = embed_dim;
        self
    }

    /// Sets the numbers of query heads and of key and value heads, for one layer of a model or one rank of a layer.
    pub fn with_heads(mut self, num_heads: usize, num_kv_heads: usize) -> Self {
        self.num_heads = num_heads;
        self.num_kv_heads = Some(num_kv_heads);
        self
    }

    /// Sets the number of key and value heads (H_kv), for grouped-query attention: each is shared by
    /// `num_heads / num_kv_heads` query heads, which must be a whole number. One head is multi-query attention. The
    /// default is `num_heads`.
    #[doc(alias("repeat_kv", "num_key_value_heads", "enable_gqa", "grouped_query_attention", "multi_query"))]
    pub fn with_num_kv_heads(mut self, num_kv_heads: impl Into<Option<usize>>) -> Self {
        self.num_kv_heads = num_kv_heads.into();
        self
    }

    /// Sets the width of one query head and of one key head (D). The default is `out_dim / num_heads`, or
    /// `embed_dim / num_heads` without an `out_dim`.
    pub fn with_head_dim(mut self, head_dim: impl Into<Option<usize>>) -> Self {
        self.head_dim = head_dim.into();
        self
    }

    /// Sets the width of one value head (D_v). The default is the head dimension of queries and keys.
    pub fn with_value_head_dim(mut self, value_head_dim: impl Into<Option<usize>>) -> Self {
        self.value_head_dim = value_head_dim.into();
        self
    }

    /// Sets the width of the layer's output. The default is `embed_dim`, or `num_heads · value_head_dim` without an
    /// output projection.
    pub fn with_out_dim(mut self, out_dim: impl Into<Option<usize>>) -> Self {
        self.out_dim = out_dim.into();
        self
    }

    /// Sets the width of the input that keys are projected from, in cross-attention: `kdim` of
    /// `torch.nn.MultiheadAttention`. The default is `embed_dim`.
    pub fn with_kdim(mut self, kdim: impl Into<Option<usize>>) -> Self {
        self.kdim = kdim.into();
        self
    }

    /// Sets the width of the input that values are projected from, in cross-attention: `vdim` of
    /// `torch.nn.MultiheadAttention`. The default is `kdim`.
    pub fn with_vdim(mut self, vdim: impl Into<Option<usize>>) -> Self {
        self.vdim = vdim.into();
        self
    }

    /// Returns the width of the layer's input (E).
    pub fn embed_dim(&self) -> usize {
        self.embed_dim
    }

    /// Returns the number of query heads (H).
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Returns the number of key and value heads (H_kv).
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// Returns the width of one query head and of one key head (D).
    pub fn head_dim(&self) -> usize {
        let out_dim = self.out_dim.unwrap_or(self.embed_dim);
        self.head_dim.unwrap_or_else(|| out_dim.checked_div(self.num_heads).unwrap_or(0))
    }

    /// Returns the width of one value head (D_v).
    pub fn value_head_dim(&self) -> usize {
        self.value_head_dim.unwrap_or_else(|| self.head_dim())
    }

    /// Returns the width of the layer's output.
    pub fn out_dim(&self) -> usize {
        match self.out_dim {
            Some(out_dim) => out_dim,
            None if self.out_proj => self.embed_dim,
            None => self.num_heads.saturating_mul(self.value_head_dim()),
        }
    }

    /// Returns the width of the input that keys are projected from.
    pub fn kdim(&self) -> usize {
        self.kdim.unwrap_or(self.embed_dim)
    }

    /// Returns the width of the input that values are projected from.
    pub fn vdim(&self) -> usize {
        self.vdim.unwrap_or_else(|| self.kdim())
    }
}

/// The keys and values that a layer shares with other uses or with an earlier layer.
///
/// ```
/// use candle_attention::{KvSharing, MultiHeadAttentionConfig};
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_kv_sharing(KvSharing::KeysAsValues);
/// cfg.validate().expect("keys and values have one width");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KvSharing {
    /// Nothing is shared: keys and values have a projection each.
    #[default]
    None,
    /// One projection for both: values are the keys before these are normalised and rotated (`attention_k_eq_v` of
    /// Gemma 4).
    KeysAsValues,
    /// The layer has no key and value projections. It reads what an earlier layer stored in its
    /// [cache](crate::AttentionInput::with_shared_cache) or projected to a
    /// [memory](crate::AttentionInput::with_memory) (`num_kv_shared_layers` of Gemma 3n and Gemma 4).
    EarlierLayer,
}
