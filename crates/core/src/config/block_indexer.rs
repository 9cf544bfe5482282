//! The config of indexers that choose blocks of keys.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::OP;
use candle_attention_modules::base::number;
use candle_attention_modules::norm::{QkNorm, check_epsilon};

/// The sizes of an indexer that chooses blocks of keys for each query: MiniMax M3's.
///
/// A query's score for a block is the largest of its products with the indexer's keys of the block, those after the
/// query left out. The query attends to the `top_blocks` blocks with the largest scores, for equal scores to the first
/// ones; its own block and those right before it are always among them. Blocks begin at the first key of each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockIndexerConfig {
    /// The number of heads of the indexer (`index_n_heads`), which divides the number of key heads. Each chooses for an
    /// equal number of key heads; the keys of the indexer are shared.
    pub num_heads: usize,
    /// The width of its heads (`index_head_dim`), of which the layer's number of entries rotate.
    pub head_dim: usize,
    /// The number of keys in a block (`index_block_size`).
    pub block: usize,
    /// The number of blocks that a query attends to (`index_topk_blocks`).
    pub top_blocks: usize,
    /// The number of blocks, the query's own and those before it, that every query attends to (`index_local_blocks`).
    pub local_blocks: usize,
    /// The norm of queries and of keys, over each head.
    pub norm: QkNorm,
}

impl BlockIndexerConfig {
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
        if !num_kv_heads.is_multiple_of(self.num_heads) {
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
