//! Some of a layer's heads, for tensor parallelism.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use candle_nn::var_builder::Shard;

/// The heads of one process of several that compute a layer together: the share of `rank` of `world_size`.
///
/// Key heads are divided in their order, as evenly as can be, each with all query heads that read it: nine query heads
/// over three key heads are six and three in two processes. Where there are more processes than key heads, several hold
/// a copy of one key head, and its query heads are divided among them.
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

    /// The shares of all processes, in the order of their ranks.
    pub fn all(self) -> impl Iterator<Item = Self> {
        (0..self.world_size).map(move |rank| Self { rank, ..self })
    }

    /// This process's part of `len` entries that are divided in their order and as evenly as can be: inner columns of
    /// an MLP, a vocabulary. Candle's [`Shard`] of as many where these divide the entries.
    pub fn part_of(&self, len: usize) -> Range<usize> {
        part(self.rank, len, self.world_size)
    }

    /// The shares of the query heads and of the key heads, of which there are no fewer query heads than processes.
    #[doc(hidden)]
    pub fn shares(&self, h: usize, h_kv: usize) -> (Share, Share) {
        let (n, group) = (self.world_size, h / h_kv);
        if n <= h_kv {
            let keys = self.part_of(h_kv);
            return (Share::new(keys.start * group..keys.end * group, h), Share::new(keys, h_kv));
        }
        let key = self.rank * h_kv / n;
        let readers = part(key, n, h_kv);
        let own = part(self.rank - readers.start, group, readers.len());
        (Share::new(key * group + own.start..key * group + own.end, h), Share::new(key..key + 1, h_kv))
    }

    /// Of its key heads those that no process before this one has.
    pub(crate) fn counted_keys(self, h: usize, h_kv: usize) -> Share {
        let keys = |shard: Self| shard.shares(h, h_kv).1.range(h_kv);
        let before = self.rank.checked_sub(1).map_or(0, |rank| keys(Self { rank, ..self }).end);
        let own = keys(self);
        Share::new(own.start.max(before)..own.end, h_kv)
    }
}

/// The entries of `len` that belong to part `i` of `of`.
fn part(i: usize, len: usize, of: usize) -> Range<usize> {
    (i * len).div_ceil(of)..((i + 1) * len).div_ceil(of)
}

/// The units `start..end` of the `of` equal ones, each a head or several, that a dimension is divided into.
#[derive(Debug, Clone, Copy)]
pub struct Share {
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
    pub(crate) fn units(self, dim: usize) -> impl Iterator<Item = Shard> {
        (self.start..self.end).map(move |rank| Shard { dim, rank, world_size: self.of })
    }

    /// A copy of the entries of a tensor along a dimension.
    pub(crate) fn copy(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let Range { start, end } = self.range(tensor.dim(dim)?);
        tensor.narrow(dim, start, end - start)?.force_contiguous()
    }
}
