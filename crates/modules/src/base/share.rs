//! Some of a layer's heads, for tensor parallelism, and some of a tensor's rows.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

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
    /// an MLP, a vocabulary. Candle's `Shard` of as many where these divide the entries.
    pub fn part_of(&self, len: usize) -> Range<usize> {
        ith_of(self.rank, len, self.world_size)
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
        let readers = ith_of(key, n, h_kv);
        let own = ith_of(self.rank - readers.start, group, readers.len());
        (Share::new(key * group + own.start..key * group + own.end, h), Share::new(key..key + 1, h_kv))
    }

    /// Whether no process before this one has its key heads.
    pub fn is_first_of_keys(self, h_kv: usize) -> bool {
        let key = |rank: usize| rank * h_kv / self.world_size;
        self.world_size <= h_kv || self.rank == 0 || key(self.rank) != key(self.rank - 1)
    }
}

/// The entries of `len` that belong to part `i` of `of`.
fn ith_of(i: usize, len: usize, of: usize) -> Range<usize> {
    (i * len).div_ceil(of)..((i + 1) * len).div_ceil(of)
}

/// The heads `start..end` of the `of` that divide a dimension equally.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    start: usize,
    end: usize,
    of: usize,
}

impl Share {
    fn new(heads: Range<usize>, of: usize) -> Self {
        Self { start: heads.start, end: heads.end, of }
    }

    /// The entries of a dimension of `len`.
    pub fn range(self, len: usize) -> Range<usize> {
        let width = len / self.of;
        self.start * width..self.end * width
    }

    /// A copy of the entries of a tensor along a dimension.
    pub fn copy(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let Range { start, end } = self.range(tensor.dim(dim)?);
        tensor.narrow(dim, start, end - start)?.force_contiguous()
    }
}

/// Of the `groups` of equally many rows that a tensor (rows, ..) is divided into, `range` of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// The number of groups.
    pub groups: usize,
    /// Rows of each group, counted from its first.
    pub range: Range<usize>,
}

impl Rows {
    /// The first `len` rows.
    pub fn first(len: usize) -> Self {
        Self { groups: 1, range: 0..len }
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.groups * self.range.len()
    }

    /// The rows of a tensor, (len, ..): the tensor itself or a view of it where they lie side by side, or a copy.
    pub fn of(&self, tensor: &Tensor) -> Result<Tensor> {
        let Range { start, end } = self.range;
        let (rows, columns) = (tensor.dims()[0], &tensor.dims()[1..]);
        match self.groups {
            1 if end - start == rows => Ok(tensor.clone()),
            1 => tensor.narrow(0, start, end - start)?.contiguous(),
            groups => {
                let grouped = tensor.reshape([&[groups, rows / groups], columns].concat())?;
                grouped.narrow(1, start, end - start)?.contiguous()?.reshape([&[self.count()], columns].concat())
            }
        }
    }

    /// The inverse: for each of several rows of one tensor what they hold, (len, ..), to the whole tensor.
    pub fn join(parts: &[(&Self, Tensor)]) -> Result<Tensor> {
        let grouped = parts
            .iter()
            .map(|(rows, part)| part.reshape([&[rows.groups, rows.range.len()], &part.dims()[1..]].concat()));
        Tensor::cat(&grouped.collect::<Result<Vec<_>>>()?, 1)?.flatten(0, 1)
    }
}

/// `tensor.narrow` along a dimension, which an empty tensor allows too: a view of one may start past the end of its
/// buffer, where Candle's copies panic, so that it becomes a new tensor.
pub fn part(tensor: &Tensor, dim: usize, range: Range<usize>) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return tensor.narrow(dim, range.start, range.len());
    }
    let mut dims = tensor.dims().to_vec();
    dims[dim] = range.len();
    Tensor::zeros(dims, tensor.dtype(), tensor.device())
}
