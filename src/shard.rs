//! Some of a layer's heads, for tensor parallelism.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::{AlibiConfig, MultiHeadAttentionConfig, QkNormScope};

/// The heads of one process of several that compute a layer together: those of `rank` of `world_size` equal shares.
///
/// Query heads are divided in their order, and key heads with them. Where there are fewer key heads than processes, those
/// that read one key head hold a copy each.
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

    /// The share of the query heads.
    pub(crate) fn query_share(&self) -> Share {
        Share { index: self.rank, of: self.world_size }
    }

    /// The share of the key heads.
    pub(crate) fn key_share(&self, num_kv_heads: usize) -> Share {
        let of = self.world_size.min(num_kv_heads);
        Share { index: self.rank * of / self.world_size, of }
    }

    /// The config of a process's own layer.
    ///
    /// # Errors
    /// If the heads cannot be divided, and for norms that span all heads.
    pub(crate) fn config(&self, cfg: &MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        let (h, h_kv, n) = (cfg.num_heads(), cfg.num_kv_heads(), self.world_size);
        if !h.is_multiple_of(n) {
            bail!("[multi_head_attention] a world size of {n} does not divide the {h} query heads")
        }
        if !h_kv.is_multiple_of(n) && !n.is_multiple_of(h_kv) {
            bail!(
                "[multi_head_attention] a world size of {n} does not divide the {h_kv} key heads, and is no multiple of them"
            )
        }
        if cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection) && n > 1 {
            bail!("[multi_head_attention] norms of whole projections span the heads of all processes")
        }
        let shares = self.key_share(h_kv).of;
        // What follows from the number of heads is as in the whole layer.
        let mut own = cfg
            .clone()
            .with_head_dim(cfg.head_dim())
            .with_value_head_dim(cfg.value_head_dim())
            .with_out_dim(if cfg.out_proj() { cfg.out_dim() } else { cfg.out_dim() / n })
            .with_key_size(cfg.key_size())
            .with_value_size(cfg.value_size());
        if let Some(alibi) = cfg.alibi().filter(|&alibi| *alibi != AlibiConfig::Falcon) {
            own = own.with_alibi(AlibiConfig::Slopes(alibi.slopes(h)?[self.query_share().range(h)].to_vec()));
        }
        Ok(own.with_heads(h / n, h_kv / shares))
    }
}

/// One of several equal parts of a dimension.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    pub index: usize,
    pub of: usize,
}

impl Share {
    /// The entries of a dimension of `len`.
    pub fn range(self, len: usize) -> Range<usize> {
        let each = len / self.of;
        self.index * each..(self.index + 1) * each
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
        for (h, h_kv, world_size) in [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 1, 8), (6, 3, 6), (12, 4, 2), (5, 5, 1)] {
            for rank in 0..world_size {
                let shard = HeadShard::new(rank, world_size)?;
                let queries = shard.query_share().range(h);
                let keys = shard.key_share(h_kv).range(h_kv);
                let own = shard.config(&MultiHeadAttentionConfig::new(h * 2, h).with_num_kv_heads(h_kv))?;
                assert_eq!((own.num_heads(), own.num_kv_heads()), (queries.len(), keys.len()));
                for (n, query) in queries.clone().enumerate() {
                    let local = n * keys.len() / queries.len();
                    assert_eq!(keys.start + local, query * h_kv / h, "query head {query}");
                }
            }
        }
        Ok(())
    }
}
