//! The config of attention to compressed keys.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::OP;
use crate::position::{RopeConfig, RopeStyle};
use candle_attention_modules::base::number;

/// The shape and options of a [`CompressedKeyAttention`](crate::CompressedKeyAttention).
///
/// ```
/// use candle_attention::{CompressedKeyAttentionConfig, KeyCompression};
/// // The layers of DeepSeek V4 that compress 128 tokens to one key. The other numbers are the defaults.
/// let cfg = CompressedKeyAttentionConfig {
///     compression: Some(KeyCompression { rate: 128, overlaps: false, indexer: None }),
///     ..CompressedKeyAttentionConfig::new(4096, 64)
/// };
/// assert!(cfg.validate().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressedKeyAttentionConfig {
    /// E, the width of the layer's input and output.
    pub embed_dim: usize,
    /// H, the number of heads. They share one key of each token, which is its value too.
    pub num_heads: usize,
    /// D, the width of a head and of a key.
    pub head_dim: usize,
    /// The width that queries are compressed to (`q_lora_rank`).
    pub q_lora_rank: usize,
    /// The number of last entries of each query and key that rotate.
    pub rope_head_dim: usize,
    /// The number of last tokens that a query attends to, with its own (`sliding_window`).
    pub window: usize,
    /// The number of groups of heads that are projected to outputs separately (`o_groups`).
    pub output_groups: usize,
    /// The width that each group is projected to (`o_lora_rank`).
    pub output_rank: usize,
    /// The rotary positions, for heads of `rope_head_dim`.
    pub rope: RopeConfig,
    /// The number that norms add to the mean square.
    pub norm_eps: f64,
    /// The probability with which an attention weight is dropped in training.
    pub dropout: f64,
    /// The compression of the tokens before a query to fewer keys; without it, a query attends to its window alone.
    pub compression: Option<KeyCompression>,
}

/// The compression of consecutive tokens to one key: a sum of their projections, each entry weighted by a softmax over
/// the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyCompression {
    /// The number of tokens from one key to the next (`compress_rates`).
    pub rate: usize,
    /// Whether a key is of the `rate` tokens before its own too, by other projections.
    pub overlaps: bool,
    /// The indexer that chooses the compressed keys of each query; without it, a query attends to all of them.
    pub indexer: Option<CompressedKeyIndexerConfig>,
}

/// The sizes of an indexer of compressed keys: the scores of [`IndexerConfig`](crate::IndexerConfig), for keys that the
/// indexer compresses too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompressedKeyIndexerConfig {
    /// The number of heads of the indexer (`index_n_heads`).
    pub num_heads: usize,
    /// The width of its heads (`index_head_dim`), of which the last `rope_head_dim` entries rotate.
    pub head_dim: usize,
    /// The number of compressed keys that a query attends to (`index_topk`).
    pub top_k: usize,
}

impl CompressedKeyAttentionConfig {
    /// Makes the config of a layer over inputs (B, T, `embed_dim`) with `num_heads` heads, without compression, and the
    /// widths of DeepSeek V4: heads of 512, 64 entries of which rotate as neighbours with the base 10,000, queries
    /// compressed to 1024, a window of 128 tokens, outputs in 8 groups of 1024.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            head_dim: 512,
            q_lora_rank: 1024,
            rope_head_dim: 64,
            window: 128,
            output_groups: 8,
            output_rank: 1024,
            rope: RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved),
            norm_eps: 1e-6,
            dropout: 0.0,
            compression: None,
        }
    }

    /// Checks that the numbers fit together.
    ///
    /// # Errors
    /// Names the option, the number found and the number expected.
    pub fn validate(&self) -> Result<()> {
        number::size(OP, "embed_dim", self.embed_dim)?;
        number::size(OP, "num_heads", self.num_heads)?;
        number::size(OP, "head_dim", self.head_dim)?;
        number::size(OP, "q_lora_rank", self.q_lora_rank)?;
        number::size(OP, "rope_head_dim", self.rope_head_dim)?;
        number::size(OP, "window", self.window)?;
        number::size(OP, "output_groups", self.output_groups)?;
        number::size(OP, "output_rank", self.output_rank)?;
        number::epsilon(OP, "norm_eps", self.norm_eps)?;
        number::probability(OP, "dropout", self.dropout)?;
        self.check_width("head_dim", self.head_dim)?;
        self.check_product("num_heads", self.num_heads, "head_dim", self.head_dim)?;
        self.check_product("output_groups", self.output_groups, "output_rank", self.output_rank)?;
        if !self.num_heads.is_multiple_of(self.output_groups) {
            bail!(
                "[{OP}] num_heads is {}, expected a multiple of output_groups, {}",
                self.num_heads,
                self.output_groups
            )
        }
        if self.rope.axes().is_some() {
            bail!("[{OP}] rope has several axes, expected one")
        }
        self.rope.validate(self.rope_head_dim)?;
        let Some(KeyCompression { rate, indexer, .. }) = self.compression else { return Ok(()) };
        number::size(OP, "the compression's rate", rate)?;
        self.check_product("the compression's rate", rate, "head_dim", self.head_dim)?;
        let Some(CompressedKeyIndexerConfig { num_heads, head_dim, top_k }) = indexer else { return Ok(()) };
        number::size(OP, "the indexer's num_heads", num_heads)?;
        number::size(OP, "the indexer's head_dim", head_dim)?;
        number::size(OP, "the indexer's top_k", top_k)?;
        self.check_width("the indexer's head_dim", head_dim)?;
        self.check_product("the indexer's num_heads", num_heads, "head_dim", head_dim)
    }

    /// Checks that heads have the entries that rotate.
    fn check_width(&self, name: &str, width: usize) -> Result<()> {
        if width < self.rope_head_dim {
            bail!("[{OP}] {name} is {width}, expected at least the rope_head_dim of {}", self.rope_head_dim)
        }
        Ok(())
    }

    /// Checks that a product of sizes can be a dimension, twice as large in projections of two kinds.
    fn check_product(&self, name: &str, size: usize, other: &str, width: usize) -> Result<()> {
        if size.saturating_mul(width).saturating_mul(4) > u32::MAX as usize {
            bail!("[{OP}] {name} is {size} and {other} is {width}, expected a product of at most {}", u32::MAX / 4)
        }
        Ok(())
    }
}
