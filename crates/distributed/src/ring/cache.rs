//! The cache of a layer's keys and values for decoding, divided among ranks.

use candle_attention::merge_attention;
use candle_core::{D, DType, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;

use super::{RingAttention, StoredKeys, ZigZag};
use crate::communicator::{Communicator, expect_untracked};

/// Cache of a layer's keys and values, divided among ranks. Each rank stores its positions of the prompt, and the ranks
/// store the tokens after it in turn.
#[derive(Debug)]
pub struct ContextCache {
    /// Keys and values of this rank. Clones share their buffers, so a clone of `ContextCache` would overwrite its
    /// tokens.
    own: KvCache,
    /// Positions that this rank stores, in increasing order.
    positions: Vec<usize>,
    /// Number of positions on all ranks.
    len: usize,
    /// Number of decoded positions on all ranks.
    decoded: usize,
}

impl ContextCache {
    /// Returns a cache with memory for `capacity` positions of this rank. It grows if there are more.
    pub fn new(capacity: usize) -> Self {
        // Candle's cache grows in steps of its first capacity, which is therefore not 0.
        Self { own: KvCache::new(2, capacity.max(1)), positions: Vec::new(), len: 0, decoded: 0 }
    }

    /// Returns the number of positions that this rank stores.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Returns whether this rank stores no positions.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Stores the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of this rank's shard of a prompt in an empty cache.
    ///
    /// # Errors
    /// If the number of positions is not this rank's in `order`, if the cache is not empty, or if keys or values are
    /// tracked for gradients, which would be lost. After an error, the cache is unchanged.
    pub fn append_prompt(&mut self, k: &Tensor, v: &Tensor, order: &ZigZag) -> Result<()> {
        expect_untracked("context_cache", &[k, v])?;
        let positions: Vec<_> = order.positions().collect();
        if self.len > 0 || !fits(k, v, positions.len()) {
            bail!(
                "[context_cache] expected {} positions of a prompt in an empty cache, found k {:?} and v {:?} in {:?} \
                 and {:?}, and {} positions before",
                positions.len(),
                k.dims(),
                v.dims(),
                k.dtype(),
                v.dtype(),
                self.len
            )
        }
        let own = self.appended(k, v)?;
        self.own = own;
        self.positions = positions;
        self.len = order.len();
        Ok(())
    }

    /// Returns this rank's keys and values with `k` and `v` appended. They share buffers with the cache, which ignores
    /// numbers after its own length, so the cache is unchanged.
    fn appended(&self, k: &Tensor, v: &Tensor) -> Result<KvCache> {
        let mut own = self.own.clone();
        own.append(&k.contiguous()?, &v.contiguous()?)?;
        Ok(own)
    }

    /// Attends from a new token to the keys of all ranks and to its own key. Every rank passes the token's query (B, H,
    /// 1, D), key (B, H_kv, 1, D) and value (B, H_kv, 1, D_v), and one rank stores the key and the value. Returns the
    /// attention output (B, H, 1, D_v), the same on every rank.
    ///
    /// # Errors
    /// If there is more than one token, if a tensor is tracked for gradients, or with the errors of
    /// [`RingAttention::attend`]. After an error, the cache is unchanged.
    pub fn decode(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        ring: &RingAttention,
        processes: &dyn Communicator,
    ) -> Result<Tensor> {
        if q.rank() != 4 || q.dim(2)? != 1 || !fits(k, v, 1) {
            bail!(
                "[context_cache] expected one token, found q {:?}, and k {:?} and v {:?} in {:?} and {:?}",
                q.dims(),
                k.dims(),
                v.dims(),
                k.dtype(),
                v.dtype()
            )
        }
        expect_untracked("context_cache", &[q, k, v])?;
        let position = self.len;
        let stores_token = self.decoded % processes.size() == processes.rank();
        let own_kv = if stores_token { self.appended(k, v)? } else { self.own.clone() };
        let mut positions = self.positions.clone();
        positions.extend(stores_token.then_some(position));
        // A cache without positions has no tensors.
        let keys = StoredKeys {
            k: own_kv.k()?.map_or_else(|| k.narrow(2, 0, 0), Ok)?,
            v: own_kv.v()?.map_or_else(|| v.narrow(2, 0, 0), Ok)?,
            positions,
        };
        let (output, lse) = ring.attend_from(position, q, &keys, stores_token)?;
        // One all-gather transfers both.
        let own = Tensor::cat(&[output.to_dtype(DType::F32)?, lse.to_dtype(DType::F32)?.unsqueeze(D::Minus1)?], 3)?;
        let d_v = output.dim(3)?;
        let gathered = processes.all_gather(&own)?;
        let parts = gathered.iter().map(|part| Ok((part.narrow(3, 0, d_v)?, part.narrow(3, d_v, 1)?.squeeze(3)?)));
        let merged = merge_attention(&parts.collect::<Result<Vec<_>>>()?)?.0.to_dtype(q.dtype())?;
        self.own = own_kv;
        self.positions = keys.positions;
        self.len += 1;
        self.decoded += 1;
        Ok(merged)
    }
}

/// Returns whether keys and values have `t` positions, and the same batch, heads and dtype.
fn fits(k: &Tensor, v: &Tensor, t: usize) -> bool {
    if k.rank() != 4 || v.rank() != 4 {
        return false;
    }
    k.dims()[..3] == v.dims()[..3] && k.dims()[2] == t && k.dtype() == v.dtype()
}
