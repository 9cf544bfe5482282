//! Keys and values of one layer on several processes, for decoding.

use candle_attention::merge_attention;
use candle_core::{D, DType, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;

use crate::communicator::expect_untracked;
use crate::{Communicator, RingAttention, ZigZag};

/// The keys and values of a layer, of which each process holds some: those of its positions of the prompt, and of the
/// tokens after it one in as many as there are processes.
#[derive(Debug, Clone)]
pub struct ContextCache {
    own: KvCache,
    /// The positions that this process holds, which increase.
    positions: Vec<usize>,
    /// Positions in all processes, and how many of them were decoded.
    len: usize,
    decoded: usize,
}

impl ContextCache {
    /// A cache with room for `capacity` positions of this process, which grows beyond them.
    pub fn new(capacity: usize) -> Self {
        Self { own: KvCache::new(2, capacity), positions: Vec::new(), len: 0, decoded: 0 }
    }

    /// The positions that this process holds.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether this process holds none.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Keeps the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of this process's part of a prompt, which is the
    /// beginning of the sequence.
    ///
    /// # Errors
    /// If they are not of the positions that the order gives this process, or not the first ones, and if they are
    /// tracked for gradients, which the cache would lose.
    pub fn append_prompt(&mut self, k: &Tensor, v: &Tensor, order: &ZigZag) -> Result<()> {
        expect_untracked("context_cache", &[k, v])?;
        let positions: Vec<_> = order.positions().collect();
        if self.len > 0 || k.dim(2)? != positions.len() {
            bail!(
                "[context_cache] expected {} positions of a prompt in an empty cache, found k {:?} and {} positions \
                 before",
                positions.len(),
                k.dims(),
                self.len
            )
        }
        (self.len, self.positions) = (order.len(), positions);
        self.own.append(&k.contiguous()?, &v.contiguous()?).map(drop)
    }

    /// Attends from the last token, of which every process has the query (B, H, 1, D), key (B, H_kv, 1, D) and value,
    /// to the keys of all processes and its own, which one of them keeps. Every process gets the same context (B, H, 1,
    /// D_v).
    ///
    /// # Errors
    /// For more than one token, for tensors that are tracked for gradients, and those of [`RingAttention::attend`].
    pub fn decode(&mut self, qkv: [&Tensor; 3], ring: &RingAttention, processes: &dyn Communicator) -> Result<Tensor> {
        let [q, k, v] = qkv;
        if q.dim(2)? != 1 || k.dim(2)? != 1 || v.dim(2)? != 1 {
            bail!("[context_cache] expected one token, found q {:?}, k {:?} and v {:?}", q.dims(), k.dims(), v.dims())
        }
        expect_untracked("context_cache", &qkv)?;
        let (position, keeps) = (self.len, self.decoded % processes.size() == processes.rank());
        if keeps {
            self.own.append(&k.contiguous()?, &v.contiguous()?)?;
            self.positions.push(position);
        }
        (self.len, self.decoded) = (self.len + 1, self.decoded + 1);
        let (keys, values) = match (self.own.k()?, self.own.v()?) {
            (Some(keys), Some(values)) => (keys, values),
            _ => (k.narrow(2, 0, 0)?, v.narrow(2, 0, 0)?),
        };
        let (context, lse) = ring.attend_from(position, [q, &keys, &values], &self.positions, keeps)?;
        // One message for both.
        let own = Tensor::cat(&[context.to_dtype(DType::F32)?, lse.to_dtype(DType::F32)?.unsqueeze(D::Minus1)?], 3)?;
        let d_v = context.dim(3)?;
        let parts = processes.all_gather(&own)?;
        let parts = parts.iter().map(|part| Ok((part.narrow(3, 0, d_v)?, part.narrow(3, d_v, 1)?.squeeze(3)?)));
        merge_attention(&parts.collect::<Result<Vec<_>>>()?)?.0.to_dtype(q.dtype())
    }
}
