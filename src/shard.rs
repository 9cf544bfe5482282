//! Some of a layer's heads, for tensor parallelism.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use candle_nn::var_builder::Shard;

use crate::{AlibiConfig, MultiHeadAttentionConfig, QkNormScope};

/// The heads of one process of several that compute a layer together: the share of `rank` of `world_size`.
///
/// Key heads are divided in their order, and query heads with them. Where there are fewer key heads than processes,
/// those that read one key head hold a copy each and divide its query heads. Shares that cannot be equal differ by one
/// head of those that are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadShard {
    rank: usize,
    world_size: usize,
}

impl HeadShard {
    /// The share of process `rank`, from 0 on.
    ///
    /// # Errors
    /// If `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size {
            bail!("[head_shard] rank is {rank}, expected less than the world size {world_size}")
        }
        Ok(Self { rank, world_size })
    }

    /// Which process this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes there are.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The shares of the query heads and of the key heads, of which there are no fewer query heads than processes.
    pub(crate) fn shares(&self, h: usize, h_kv: usize) -> (Share, Share) {
        let (rank, n) = (self.rank, self.world_size);
        // The first of the entries of `len` that belong to part `i` of `of`.
        let first = |i: usize, len: usize, of: usize| (i * len).div_ceil(of);
        let keys = if n <= h_kv {
            first(rank, h_kv, n)..first(rank + 1, h_kv, n)
        } else {
            let key = rank * h_kv / n;
            key..key + 1
        };
        let group = h / h_kv;
        let mut queries = keys.start * group..keys.end * group;
        if n > h_kv {
            // The processes that read this key head.
            let readers = first(keys.start, n, h_kv)..first(keys.end, n, h_kv);
            let at = |rank: usize| queries.start + first(rank - readers.start, group, readers.len());
            queries = at(rank)..at(rank + 1);
        }
        (Share::new(queries, h), Share::new(keys, h_kv))
    }

    /// The config of a process's own layer.
    ///
    /// # Errors
    /// For more processes than query heads, for norms that span all heads, and for unequal shares of a relative bias.
    pub(crate) fn config(&self, cfg: &MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        let (h, h_kv, n) = (cfg.num_heads(), cfg.num_kv_heads(), self.world_size);
        if n > h {
            bail!("[multi_head_attention] a world size of {n} is more than the {h} query heads")
        }
        if cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection) && n > 1 {
            bail!("[multi_head_attention] norms of whole projections span the heads of all processes")
        }
        let is_equal = h.is_multiple_of(n) && (h_kv.is_multiple_of(n) || n.is_multiple_of(h_kv));
        if cfg.relative_bias().is_some() && !is_equal {
            bail!(
                "[multi_head_attention] a world size of {n} does not divide the {h} query heads and {h_kv} key heads of a relative bias equally"
            )
        }
        let (queries, keys) = self.shares(h, h_kv);
        let (queries, keys) = (queries.range(h), keys.range(h_kv));
        // What follows from the number of heads is as in the whole layer.
        let mut own = cfg
            .clone()
            .with_head_dim(cfg.head_dim())
            .with_value_head_dim(cfg.value_head_dim())
            .with_out_dim(if cfg.out_proj() { cfg.out_dim() } else { cfg.out_dim() / h * queries.len() })
            .with_key_size(cfg.key_size())
            .with_value_size(cfg.value_size());
        if let Some(alibi) = cfg.alibi().filter(|&alibi| *alibi != AlibiConfig::Falcon) {
            own = own.with_alibi(AlibiConfig::Slopes(alibi.slopes(h)?[queries.clone()].to_vec()));
        }
        Ok(own.with_heads(queries.len(), keys.len()))
    }
}

/// The units `start..end` of the `of` equal ones, each a head or several, that a dimension is divided into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    start: usize,
    end: usize,
    of: usize,
}

impl Share {
    /// Some of `of` heads, as one unit where the others can be divided into units like it.
    fn new(heads: Range<usize>, of: usize) -> Self {
        let Range { start, end } = heads;
        let len = end - start;
        if start.is_multiple_of(len) && of.is_multiple_of(len) {
            return Self { start: start / len, end: end / len, of: of / len };
        }
        Self { start, end, of }
    }

    /// The entries of a dimension of `len`.
    pub fn range(self, len: usize) -> Range<usize> {
        let unit = len / self.of;
        self.start * unit..self.end * unit
    }

    /// The units, as Candle's sharded builders are asked for them.
    pub fn units(self, dim: usize) -> impl Iterator<Item = Shard> {
        (self.start..self.end).map(move |rank| Shard { dim, rank, world_size: self.of })
    }

    /// A copy of the entries of a tensor along a dimension.
    pub fn copy(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let Range { start, end } = self.range(tensor.dim(dim)?);
        tensor.narrow(dim, start, end - start)?.force_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_heads_stay_with_their_queries() -> Result<()> {
        for (h, h_kv) in [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (12, 4), (9, 3), (5, 5), (7, 1)] {
            for world_size in 1..=h {
                let mut next = 0;
                for rank in 0..world_size {
                    let shard = HeadShard::new(rank, world_size)?;
                    let (queries, keys) = shard.shares(h, h_kv);
                    let (queries, keys) = (queries.range(h), keys.range(h_kv));
                    let own = shard.config(&MultiHeadAttentionConfig::new(h * 2, h).with_num_kv_heads(h_kv))?;
                    assert_eq!((own.num_heads(), own.num_kv_heads()), (queries.len(), keys.len()));
                    assert!(queries.start == next && !queries.is_empty(), "{h}, {h_kv}, {rank} of {world_size}");
                    next = queries.end;
                    for (n, query) in queries.clone().enumerate() {
                        let local = n * keys.len() / queries.len();
                        assert_eq!(keys.start + local, query * h_kv / h, "query head {query}");
                    }
                }
                assert_eq!(next, h);
            }
        }
        Ok(())
    }
}
