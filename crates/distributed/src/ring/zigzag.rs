//! The order in which the positions of a sequence are divided among ranks.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::communicator::Communicator;

/// Division of a sequence into 2·N parts for N ranks. The shard of a rank is one part from the front and one part from
/// the back, so a causal mask leads to equal work on all ranks:
///
/// ```text
/// rank  0 1 2 2 1 0
/// part  0 1 2 3 4 5
/// ```
///
/// Parts differ in length by at most one position.
#[derive(Debug, Clone, Copy)]
pub struct ZigZag {
    pub(super) len: usize,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl ZigZag {
    /// Returns the division of a sequence of `len` positions.
    pub fn new(len: usize, processes: &dyn Communicator) -> Self {
        Self { len, rank: processes.rank(), size: processes.size() }
    }

    /// Returns the positions of a rank: its part from the front and its part from the back.
    pub fn parts(&self, rank: usize) -> [Range<usize>; 2] {
        let start = |index: usize| index * self.len / (2 * self.size);
        let part = |index: usize| start(index)..start(index + 1);
        [part(rank), part(2 * self.size - 1 - rank)]
    }

    /// Returns the positions of a rank as runs of successive positions.
    pub(crate) fn runs(&self, rank: usize) -> Vec<Range<usize>> {
        let [front, back] = self.parts(rank);
        let runs = if front.end == back.start { [front.start..back.end, 0..0] } else { [front, back] };
        runs.into_iter().filter(|run| !run.is_empty()).collect()
    }

    /// Returns the number of positions of all ranks.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the positions of this rank, in the order of its tensors.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.parts(self.rank).into_iter().flatten()
    }

    /// Returns the number of positions of a rank.
    pub(crate) fn count(&self, rank: usize) -> usize {
        self.parts(rank).iter().map(ExactSizeIterator::len).sum()
    }

    /// Checks on CUDA that no part is empty, since Candle has no empty tensors there.
    pub(crate) fn check_parts(&self, xs: &Tensor) -> Result<()> {
        if xs.device().is_cuda() && self.len < 2 * self.size {
            bail!("[zigzag] expected at least {} positions on CUDA, found {}", 2 * self.size, self.len)
        }
        Ok(())
    }

    /// Returns this rank's shard of a tensor whose dimension `dim` is the sequence.
    ///
    /// # Errors
    /// If the dimension does not have the length of the sequence, or, on CUDA, if a part is empty.
    pub fn split(&self, xs: &Tensor, dim: usize) -> Result<Tensor> {
        self.check_parts(xs)?;
        if xs.dim(dim)? != self.len {
            bail!("[zigzag] expected {} positions in dimension {dim}, found {:?}", self.len, xs.dims())
        }
        let [front, back] = self.parts(self.rank);
        Tensor::cat(&[xs.narrow(dim, front.start, front.len())?, xs.narrow(dim, back.start, back.len())?], dim)
    }

    /// Gathers the shards of all ranks and returns the whole tensor in the order of the sequence on every rank. It is
    /// the inverse of [`split`](Self::split).
    ///
    /// # Errors
    /// If the shard does not have this rank's number of positions, or with the errors of the communicator.
    pub fn gather(&self, own: &Tensor, dim: usize, processes: &dyn Communicator) -> Result<Tensor> {
        let count = self.count(self.rank);
        if own.dim(dim)? != count {
            bail!("[zigzag] expected {count} positions in dimension {dim}, found {:?}", own.dims())
        }
        let longest = (0..self.size).map(|rank| self.count(rank)).max().unwrap_or(0);
        let all = processes.all_gather(&own.pad_with_zeros(dim, 0, longest - count)?)?;
        let mut in_order = Vec::with_capacity(2 * self.size);
        for (rank, shard) in all.iter().enumerate() {
            let [front, _] = self.parts(rank);
            in_order.push(shard.narrow(dim, 0, front.len())?);
        }
        for (rank, shard) in all.iter().enumerate().rev() {
            let [front, back] = self.parts(rank);
            in_order.push(shard.narrow(dim, front.len(), back.len())?);
        }
        Tensor::cat(&in_order, dim)
    }
}
