//! The config of indexers that choose blocks of keys.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::OP;
use candle_attention_modules::base::number;
use candle_attention_modules::norm::{QkNorm, check_epsilon};

/// The sizes of an indexer that chooses blocks of keys for each query: MiniMax M3's or Qwen 4's.
///
/// The query attends to the `top_blocks` blocks with the largest scores, for equal scores to the first ones. Blocks
/// begin at the first key of each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockIndexerConfig {
    /// The number of heads of the indexer (`index_n_heads`, or `indexer_n_heads`). They share the keys of the indexer.
    pub num_heads: usize,
    /// The width of its heads (`index_head_dim`, or `indexer_head_dim`), of which the layer's number of entries
    /// rotate.
    pub head_dim: usize,
    /// The number of keys in a block (`index_block_size`, or `indexer_compress_ratio`).
    pub block: usize,
    /// The number of blocks that a query attends to (`index_topk_blocks`; in Qwen 4 the number of keys,
    /// `indexer_budget`, divided by that of a block).
    pub top_blocks: usize,
    /// The number of blocks, the query's own and those before it, that every query attends to (`index_local_blocks`).
    /// It is 0 with scores of [mean keys](BlockScores::MeanKey).
    pub local_blocks: usize,
    /// The norm of queries and of keys, over each head.
    pub norm: QkNorm,
    /// The scores of blocks, by default MiniMax M3's.
    #[serde(default)]
    pub scores: BlockScores,
}

/// The score of a block of keys for a query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BlockScores {
    /// The largest product of the query with the keys of the indexer in the block, without the keys after the query.
    /// Each head of the indexer chooses for an equal number of key heads. The query's own block and the blocks before
    /// it that `local_blocks` counts are always chosen (MiniMax M3).
    #[default]
    LargestKey,
    /// The product of the query with one key of the block, summed over the heads of the indexer where it is positive:
    /// the mean of the keys of the indexer in the block, normalised, and rotated as the first of them. Whole blocks
    /// have scores, and all key heads the same choice. The query also attends to the keys after the last whole block
    /// (Qwen 4).
    MeanKey,
}

impl BlockIndexerConfig {
    /// Returns the number of entries that a cache or a pool stores for each token, in a layer of whose heads
    /// `rotary_dim` entries rotate.
    pub(crate) fn stored_width(&self, rotary_dim: usize) -> usize {
        match self.scores {
            BlockScores::LargestKey => self.head_dim,
            BlockScores::MeanKey => self.head_dim.saturating_add(rotary_dim),
        }
    }

    /// Checks the sizes for a layer with these key heads, of whose heads `rotary_dim` entries rotate.
    pub(super) fn validate(&self, num_kv_heads: usize, rotary_dim: usize) -> Result<()> {
        number::size(OP, "the indexer's num_heads", self.num_heads)?;
        number::size(OP, "the indexer's head_dim", self.head_dim)?;
        number::size(OP, "the indexer's block", self.block)?;
        number::size(OP, "the indexer's top_blocks", self.top_blocks)?;
        check_epsilon(OP, "the indexer's norm", Some(self.norm))?;
        if self.local_blocks > self.top_blocks {
            bail!("[{OP}] the indexer's local_blocks are {}, expected at most its top_blocks", self.local_blocks)
        }
        if self.scores == BlockScores::MeanKey && self.local_blocks > 0 {
            bail!("[{OP}] the indexer's local_blocks are {}, expected 0 with scores of mean keys", self.local_blocks)
        }
        if self.scores == BlockScores::LargestKey && !num_kv_heads.is_multiple_of(self.num_heads) {
            bail!(
                "[{OP}] the indexer's num_heads is {}, expected a divisor of the {num_kv_heads} key heads",
                self.num_heads
            )
        }
        if self.head_dim < rotary_dim {
            bail!("[{OP}] the indexer's head_dim is {}, expected at least the {rotary_dim} that rotate", self.head_dim)
        }
        if self.num_heads.saturating_mul(self.head_dim) > u32::MAX as usize {
            bail!(
                "[{OP}] the indexer has {} heads of {}, expected at most {} entries",
                self.num_heads,
                self.head_dim,
                u32::MAX
            )
        }
        Ok(())
    }
}
