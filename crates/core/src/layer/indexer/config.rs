//! The config of indexers of latent attention.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::position::RopeStyle;
use candle_attention_modules::base::number;

/// The sizes of an indexer, which chooses the keys that each query attends to: DeepSeek V3.2's lightning indexer
/// (<https://arxiv.org/abs/2512.02556>, section 2.1).
///
/// A query's score for a key is `Σ_h w_h · relu(q_h · k) / √(head_dim · num_heads)` over the heads of the indexer. Each
/// token has one key of the indexer, which all heads share. The query attends to the `top_k` keys with the largest
/// scores among those that the mask allows, for equal scores to the first ones.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerConfig {
    /// The number of heads of the indexer (`index_n_heads`).
    pub num_heads: usize,
    /// The width of its heads (`index_head_dim`), of which `rope_head_dim` entries rotate.
    pub head_dim: usize,
    /// The number of keys that a query attends to (`index_topk`).
    pub top_k: usize,
    /// The pairs of entries that rotate: halves in DeepSeek V3.2, neighbours in GLM-5.
    #[serde(default)]
    pub rope_style: RopeStyle,
    /// Whether the last entries of heads rotate (Hunyuan 4), and not the first ones.
    #[serde(default)]
    pub rotates_last: bool,
    /// The inputs of the projection of queries.
    #[serde(default)]
    pub queries: IndexerQueries,
    /// The number that the norm of the keys adds to the variance: 1e-6 in DeepSeek V3.2.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
    /// The number of consecutive keys that have one score (`index_kpool`, GLM-5.3). A query attends to the best pools
    /// of keys, `top_k / pool` of them, and to the last keys that fill no pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<usize>,
}

/// The inputs of the projection of an indexer's queries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum IndexerQueries {
    /// The compressed queries of the layer.
    #[default]
    Compressed,
    /// The input of the layer after a layer norm of the indexer (`q_input_norm`). The queries are multiplied by a
    /// learned temperature of the indexer (Mistral Large 4).
    NormalizedInput,
}

fn default_norm_eps() -> f64 {
    1e-6
}

/// The widths of a layer that has an indexer.
#[derive(Debug, Clone, Copy)]
pub(in crate::layer) struct IndexerShape {
    pub embed_dim: usize,
    /// The width of the compressed queries, if the layer compresses them.
    pub q_lora_rank: Option<usize>,
    /// The number of entries of heads that rotate, which may be 0.
    pub rope_head_dim: usize,
}

impl IndexerConfig {
    /// Makes the config of an indexer of DeepSeek V3.2.
    pub fn new(num_heads: usize, head_dim: usize, top_k: usize) -> Self {
        Self {
            num_heads,
            head_dim,
            top_k,
            rope_style: RopeStyle::RotateHalf,
            rotates_last: false,
            queries: IndexerQueries::Compressed,
            norm_eps: default_norm_eps(),
            pool: None,
        }
    }

    /// Checks the sizes for a layer whose rotated heads have this width.
    pub(in crate::layer) fn validate(&self, op: &str, rope_head_dim: usize) -> Result<()> {
        number::size(op, "the indexer's num_heads", self.num_heads)?;
        number::size(op, "the indexer's head_dim", self.head_dim)?;
        number::size(op, "the indexer's top_k", self.top_k)?;
        number::epsilon(op, "the indexer's norm_eps", self.norm_eps)?;
        number::size(op, "the indexer's pool", self.pool)?;
        if let Some(pool) = self.pool
            && !self.top_k.is_multiple_of(pool)
        {
            bail!("[{op}] the indexer's top_k is {}, expected a multiple of its pool of {pool} keys", self.top_k)
        }
        if self.head_dim < rope_head_dim {
            bail!(
                "[{op}] the indexer's head_dim is {}, expected at least the rope_head_dim of {rope_head_dim}",
                self.head_dim
            )
        }
        if self.num_heads.saturating_mul(self.head_dim) > u32::MAX as usize {
            bail!(
                "[{op}] the indexer has {} heads of {}, expected at most {} entries",
                self.num_heads,
                self.head_dim,
                u32::MAX
            )
        }
        Ok(())
    }

    /// Returns whether queries are projected from the compressed queries of the layer.
    pub(in crate::layer) fn reads_compressed_queries(&self) -> bool {
        self.queries == IndexerQueries::Compressed
    }

    /// Returns the number of entries that a cache stores for each token.
    pub(in crate::layer) fn stored_width(&self) -> usize {
        if self.pool.is_some() { self.head_dim.saturating_mul(2) } else { self.head_dim }
    }

    /// Returns the most keys that a query attends to.
    pub(in crate::layer) fn most_keys(&self) -> usize {
        self.top_k.saturating_add(self.pool.map_or(0, |pool| pool - 1))
    }
}
