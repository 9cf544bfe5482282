//! The lengths of packed sequences.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use crate::mask::PackedRows;
use candle_attention_modules::base::{Dim, Expect, check_entries};

const OP: &str = "packed_sequences";

/// The lengths of packed sequences: sequences of different lengths, one after the other in one tensor.
///
/// Sequence s has the queries `cu_seqlens_q[s]..cu_seqlens_q[s + 1]` and the keys `cu_seqlens_kv[s]..cu_seqlens_kv[s +
/// 1]`: the cumulative lengths of flash-attention's variable-length calls. A sequence may have no queries or no keys.
///
/// ```
/// use candle_attention::PackedSequences;
/// # fn main() -> candle_core::Result<()> {
/// let sequences = PackedSequences::from_lens(&[3, 1], &[5, 1])?;
/// assert_eq!(sequences, PackedSequences::new(vec![0, 3, 4], vec![0, 5, 6])?);
/// assert_eq!((sequences.queries(1), sequences.keys(1)), (3..4, 5..6));
/// # Ok(()) }
/// ```
#[doc(alias("cu_seqlens", "nested_tensor"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedSequences {
    cu_seqlens_q: Arc<[usize]>,
    cu_seqlens_kv: Arc<[usize]>,
    most_queries: usize,
    most_keys: usize,
}

impl PackedSequences {
    /// Makes sequences of cumulative lengths: 0, and then the end of each sequence.
    ///
    /// # Errors
    /// For lengths that do not begin with 0 or that decrease, and for different numbers of sequences in the two lists.
    pub fn new(cu_seqlens_q: Vec<usize>, cu_seqlens_kv: Vec<usize>) -> Result<Self> {
        let most_queries = longest("cu_seqlens_q", &cu_seqlens_q)?;
        let most_keys = longest("cu_seqlens_kv", &cu_seqlens_kv)?;
        check_entries(OP, "cu_seqlens_kv", cu_seqlens_kv.len(), cu_seqlens_q.len(), "entries of cu_seqlens_q")?;
        Ok(Self { cu_seqlens_q: cu_seqlens_q.into(), cu_seqlens_kv: cu_seqlens_kv.into(), most_queries, most_keys })
    }

    /// Makes sequences of self-attention, whose queries and keys have the same cumulative lengths.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn self_attention(cu_seqlens: Vec<usize>) -> Result<Self> {
        Self::new(cu_seqlens.clone(), cu_seqlens)
    }

    /// Makes sequences of integer tensors (n + 1,) of cumulative lengths, which are copied to the CPU.
    ///
    /// # Errors
    /// As [`new`](Self::new), for another rank, for a float tensor and for a negative entry.
    pub fn from_tensors(cu_seqlens_q: &Tensor, cu_seqlens_kv: &Tensor) -> Result<Self> {
        Self::new(read("cu_seqlens_q", cu_seqlens_q)?, read("cu_seqlens_kv", cu_seqlens_kv)?)
    }

    /// Makes sequences from the number of queries and the number of keys of each sequence.
    ///
    /// # Errors
    /// For lists of different lengths, and for a sum that no tensor can have.
    pub fn from_lens(lens_q: &[usize], lens_kv: &[usize]) -> Result<Self> {
        check_entries(OP, "lens_kv", lens_kv.len(), lens_q.len(), "entries of lens_q")?;
        Self::new(accumulate("lens_q", lens_q)?, accumulate("lens_kv", lens_kv)?)
    }

    /// Returns n, the number of sequences.
    pub fn len(&self) -> usize {
        self.cu_seqlens_q.len() - 1
    }

    /// Returns whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the range of the packed queries of sequence `s`; `0..0` if there is no such sequence.
    pub fn queries(&self, s: usize) -> Range<usize> {
        range(&self.cu_seqlens_q, s)
    }

    /// Returns the range of the packed keys of sequence `s`; `0..0` if there is no such sequence.
    pub fn keys(&self, s: usize) -> Range<usize> {
        range(&self.cu_seqlens_kv, s)
    }

    /// Returns the rows of the queries and of the keys of each sequence.
    pub(crate) fn rows(&self) -> impl Iterator<Item = PackedRows> {
        (0..self.len()).map(|s| PackedRows { queries: self.queries(s), keys: self.keys(s) })
    }

    /// Returns the largest number of queries of a sequence.
    pub(crate) fn most_queries(&self) -> usize {
        self.most_queries
    }

    /// Returns the largest number of keys of a sequence.
    pub(crate) fn most_keys(&self) -> usize {
        self.most_keys
    }

    /// Returns the number of queries of all sequences.
    pub fn total_queries(&self) -> usize {
        self.cu_seqlens_q.last().copied().unwrap_or(0)
    }

    /// Returns the number of keys of all sequences.
    pub fn total_keys(&self) -> usize {
        self.cu_seqlens_kv.last().copied().unwrap_or(0)
    }
}

/// Returns the range of sequence `s`; `0..0` if there is no such sequence.
fn range(cu_seqlens: &[usize], s: usize) -> Range<usize> {
    match cu_seqlens.get(s..).unwrap_or_default() {
        [start, end, ..] => *start..*end,
        _ => 0..0,
    }
}

/// Returns the length of the longest sequence after checking that the cumulative lengths begin with 0 and never
/// decrease.
fn longest(name: &str, cu_seqlens: &[usize]) -> Result<usize> {
    match cu_seqlens.first() {
        Some(0) => {}
        Some(first) => bail!("[{OP}] {name} begins with {first}, expected 0"),
        None => bail!("[{OP}] {name} is empty, expected 0 and then the end of each sequence"),
    }
    if let Some((i, pair)) = cu_seqlens.windows(2).enumerate().find(|(_, pair)| pair[1] < pair[0]) {
        bail!("[{OP}] entry {} of {name} is {}, expected at least the {} before it", i + 1, pair[1], pair[0])
    }
    Ok(cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0))
}

/// Returns the cumulative lengths of sequences with these lengths.
fn accumulate(name: &str, lens: &[usize]) -> Result<Vec<usize>> {
    let mut cu_seqlens = vec![0];
    let mut sum = 0usize;
    for &len in lens {
        let Some(next) = sum.checked_add(len) else { bail!("[{OP}] {name} add up to more than {}", usize::MAX) };
        sum = next;
        cu_seqlens.push(sum);
    }
    Ok(cu_seqlens)
}

/// Returns the entries of a tensor of cumulative lengths.
fn read(name: &str, cu_seqlens: &Tensor) -> Result<Vec<usize>> {
    Expect::one(OP, name, cu_seqlens).shape(&[Dim::Any("n + 1")])?.counts()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn packed_sequences_from_tensors_of_any_integer_dtype_equal_those_from_lists() -> Result<()> {
        let expected = PackedSequences::new(vec![0, 2, 2, 7], vec![0, 1, 4, 4])?;
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            let tensor = |list: [u32; 4]| Tensor::new(&list, &Device::Cpu)?.to_dtype(dtype);
            assert_eq!(PackedSequences::from_tensors(&tensor([0, 2, 2, 7])?, &tensor([0, 1, 4, 4])?)?, expected);
        }
        assert_eq!((expected.len(), expected.total_queries(), expected.total_keys()), (3, 7, 4));
        assert_eq!((expected.queries(1), expected.keys(2), expected.queries(3)), (2..2, 4..4, 0..0));
        Ok(())
    }
}
