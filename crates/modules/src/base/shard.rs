//! Shards for tensor parallelism: the heads of a layer that each rank computes.

use std::ops::Range;

use candle_core::{Result, bail};

/// The heads that entries of a parameter belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heads {
    /// The H heads of queries, outputs and gates.
    Query,
    /// The H_kv heads of keys and values.
    Key,
}

/// The numbers of heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadCounts {
    /// H, the number of query heads.
    pub query: usize,
    /// H_kv, the number of key heads.
    pub key: usize,
}

/// The division of a parameter among ranks.
#[derive(Debug, Clone, Copy)]
pub enum Share {
    /// Each rank has the entries of its heads. All heads have the same number of entries, one head after the other.
    Heads {
        /// The heads that the entries belong to.
        heads: Heads,
        /// The dimension of the entries, counted from 0.
        dim: usize,
    },
    /// The first rank has all of it and the others have zeros, since the outputs of all ranks are added up.
    Sum,
}

/// The heads of a layer that one rank of several computes.
///
/// Key heads are divided in their order, as evenly as possible, each with all query heads that read it: two ranks share
/// nine query heads over three key heads as six and three. Where there are more ranks than key heads, several ranks
/// have a copy of one key head, and its query heads are divided among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadShard {
    rank: usize,
    world_size: usize,
}

impl HeadShard {
    /// The shard of the only rank: all heads.
    pub const WHOLE: Self = Self { rank: 0, world_size: 1 };

    /// Returns the shard of `rank`, which counts from 0.
    ///
    /// # Errors
    /// If `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size {
            bail!("[head_shard] rank is {rank}, expected less than the world size {world_size}")
        }
        Ok(Self { rank, world_size })
    }

    /// Returns the rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the shards of all ranks in their order.
    pub fn all(self) -> impl Iterator<Item = Self> {
        (0..self.world_size).map(move |rank| Self { rank, ..self })
    }

    /// Returns this rank's shard of `len` entries that are divided in their order and as evenly as possible, such as
    /// the inner columns of an MLP or a vocabulary. Candle's `Shard` has the same where the ranks divide the entries.
    pub fn rank_range(&self, len: usize) -> Range<usize> {
        shard_range(self.rank, len, self.world_size)
    }

    /// Returns this rank's shard of `len` entries that the query heads or the key heads divide equally. There are no
    /// fewer query heads than ranks.
    #[doc(hidden)]
    pub fn range(&self, heads: Heads, counts: HeadCounts, len: usize) -> Range<usize> {
        let own = match heads {
            Heads::Query => self.query_heads(counts),
            Heads::Key => self.key_heads(counts),
        };
        let width = match heads {
            Heads::Query => len / counts.query,
            Heads::Key => len / counts.key,
        };
        own.start * width..own.end * width
    }

    /// Returns the key heads that this rank's query heads read.
    fn key_heads(&self, counts: HeadCounts) -> Range<usize> {
        if self.world_size <= counts.key {
            return self.rank_range(counts.key);
        }
        let key = self.first_key(counts.key);
        key..key + 1
    }

    /// Returns the query heads of this rank.
    fn query_heads(&self, counts: HeadCounts) -> Range<usize> {
        let group = counts.query / counts.key;
        let keys = self.key_heads(counts);
        if self.world_size <= counts.key {
            return keys.start * group..keys.end * group;
        }
        // The ranks that share the key head divide its query heads.
        let ranks = shard_range(keys.start, self.world_size, counts.key);
        let own = shard_range(self.rank - ranks.start, group, ranks.len());
        keys.start * group + own.start..keys.start * group + own.end
    }

    /// Returns whether this rank is the first that has its key heads.
    pub fn is_first_of_keys(self, h_kv: usize) -> bool {
        let before = Self { rank: self.rank.saturating_sub(1), ..self };
        self.world_size <= h_kv || self.rank == 0 || self.first_key(h_kv) != before.first_key(h_kv)
    }

    /// Returns the key head of this rank, where there are more ranks than key heads.
    fn first_key(&self, h_kv: usize) -> usize {
        (self.rank as u128 * h_kv as u128 / self.world_size as u128) as usize
    }
}

/// Returns the entries of shard `index` of `count` shards of `len` entries. The products do not overflow in u128.
fn shard_range(index: usize, len: usize, count: usize) -> Range<usize> {
    let start_of = |shard: u128| (shard * len as u128).div_ceil(count as u128) as usize;
    start_of(index as u128)..start_of(index as u128 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_any_world_size_divide_entries_in_their_order() -> Result<()> {
        let most = usize::MAX;
        for (rank, world_size, len, expected) in [
            (most - 2, most - 1, 7, 7..7),
            (0, most, 7, 0..1),
            (most - 1, most, most, most - 1..most),
            (1, 2, most, most / 2 + 1..most),
            (1, 3, most, most / 3..most / 3 * 2),
        ] {
            assert_eq!(HeadShard::new(rank, world_size)?.rank_range(len), expected, "{rank} of {world_size}");
        }
        for world_size in [1, 2, 3, 5, 8, 13] {
            let mut end = 0;
            for shard in HeadShard::new(0, world_size)?.all() {
                let own = shard.rank_range(8);
                assert_eq!(own.start, end, "{shard:?}");
                end = own.end;
            }
            assert_eq!(end, 8, "{world_size}");
        }
        assert_eq!(
            HeadShard::new(most - 2, most - 1)?.range(Heads::Key, HeadCounts { query: most - 1, key: 3 }, 3),
            2..3
        );
        assert!(!HeadShard::new(most - 2, most - 1)?.is_first_of_keys(3));
        Ok(())
    }
}
