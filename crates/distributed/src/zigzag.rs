//! Which positions of a sequence a process has.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::communicator::Communicator;

/// A sequence in twice as many parts as there are processes, of which each process has one from the front and one from
/// the back, so that a causal mask leaves all of them the same work:
///
/// ```text
/// process  0 1 2 2 1 0
/// part     0 1 2 3 4 5
/// ```
///
/// Parts differ in length by at most one position.
#[derive(Debug, Clone, Copy)]
pub struct ZigZag {
    len: usize,
    rank: usize,
    size: usize,
}

impl ZigZag {
    /// The order of a sequence of `len` positions.
    pub fn new(len: usize, processes: &dyn Communicator) -> Self {
        Self { len, rank: processes.rank(), size: processes.size() }
    }

    /// The positions of a process: those of its part from the front and of its part from the back.
    pub fn parts(&self, rank: usize) -> [Range<usize>; 2] {
        let part = |i: usize| {
            let first = |i: usize| i * self.len / (2 * self.size);
            first(i)..first(i + 1)
        };
        [part(rank), part(2 * self.size - 1 - rank)]
    }

    /// The positions of a process as runs of successive ones.
    pub(crate) fn runs(&self, rank: usize) -> Vec<Range<usize>> {
        let [front, back] = self.parts(rank);
        let runs = if front.end == back.start { [front.start..back.end, 0..0] } else { [front, back] };
        runs.into_iter().filter(|run| !run.is_empty()).collect()
    }

    /// The positions of all processes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The positions of this process, in the order of its tensors.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.parts(self.rank).into_iter().flatten()
    }

    /// The number of positions of a process.
    pub(crate) fn count(&self, rank: usize) -> usize {
        self.parts(rank).iter().map(ExactSizeIterator::len).sum()
    }

    /// Candle has no empty tensors on CUDA.
    pub(crate) fn check_parts(&self, xs: &Tensor) -> Result<()> {
        if xs.device().is_cuda() && self.len < 2 * self.size {
            bail!("[zigzag] expected at least {} positions on CUDA, found {}", 2 * self.size, self.len)
        }
        Ok(())
    }

    /// This process's part of a tensor whose dimension `dim` is the sequence.
    ///
    /// # Errors
    /// If it is not as long, and on CUDA if a part is empty.
    pub fn split(&self, xs: &Tensor, dim: usize) -> Result<Tensor> {
        self.check_parts(xs)?;
        if xs.dim(dim)? != self.len {
            bail!("[zigzag] expected {} positions in dimension {dim}, found {:?}", self.len, xs.dims())
        }
        let [front, back] = self.parts(self.rank);
        Tensor::cat(&[xs.narrow(dim, front.start, front.len())?, xs.narrow(dim, back.start, back.len())?], dim)
    }

    /// The inverse of [`split`](Self::split): the parts of all processes, in the order of the sequence, in each of
    /// them.
    ///
    /// # Errors
    /// If the part is not as long as this process's, and those of the processes.
    pub fn gather(&self, own: &Tensor, dim: usize, processes: &dyn Communicator) -> Result<Tensor> {
        let count = self.count(self.rank);
        if own.dim(dim)? != count {
            bail!("[zigzag] expected {count} positions in dimension {dim}, found {:?}", own.dims())
        }
        let longest = (0..self.size).map(|rank| self.count(rank)).max().unwrap_or(0);
        let all = processes.all_gather(&own.pad_with_zeros(dim, 0, longest - count)?)?;
        let part = |(rank, at): (usize, usize)| {
            let parts = self.parts(rank);
            all[rank].narrow(dim, at * parts[0].len(), parts[at].len())
        };
        let in_order = (0..self.size).map(|rank| (rank, 0)).chain((0..self.size).rev().map(|rank| (rank, 1)));
        Tensor::cat(&in_order.map(part).collect::<Result<Vec<_>>>()?, dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_is_one_processs_and_causal_work_is_equal() {
        for size in 1..6 {
            for len in [0, 1, 7, 12, 60, 61] {
                let order = ZigZag { len, rank: 0, size };
                let mut all: Vec<_> = (0..size).flat_map(|rank| order.parts(rank)).flatten().collect();
                all.sort_unstable();
                assert_eq!(all, (0..len).collect::<Vec<_>>());
                if len.is_multiple_of(2 * size) {
                    let work =
                        |rank| order.parts(rank).into_iter().flatten().map(|position| position + 1).sum::<usize>();
                    assert!((1..size).all(|rank| work(rank) == work(0)), "{len} over {size}");
                }
            }
        }
    }
}
