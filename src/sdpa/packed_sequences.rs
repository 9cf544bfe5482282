//! Sequences of different lengths, one after the other in one tensor: where each begins and ends.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::AttentionMask;
use crate::size::fits_in_memory;

/// Where each sequence of a packed batch begins and ends, among the queries and among the keys.
///
/// Sequence s has the queries `cu_seqlens_q[s]..cu_seqlens_q[s + 1]` and the keys `cu_seqlens_kv[s]..cu_seqlens_kv[s + 1]`:
/// the cumulative lengths of flash-attention's variable-length calls. A sequence may be without queries or without keys.
///
/// ```
/// use candle_attention::PackedSequences;
/// # fn main() -> candle_core::Result<()> {
/// let sequences = PackedSequences::from_lens(&[3, 1], &[5, 1])?;
/// assert_eq!(sequences, PackedSequences::new(vec![0, 3, 4], vec![0, 5, 6])?);
/// assert_eq!((sequences.queries(1), sequences.keys(1)), (3..4, 5..6));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedSequences {
    cu_seqlens_q: Vec<usize>,
    cu_seqlens_kv: Vec<usize>,
}

/// What a kernel reads in the place of a mask: for each packed query, in terms of packed keys.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PackedRanges {
    /// The keys that a query sees; empty where it sees none.
    pub keys: Vec<Range<usize>>,
    /// The key position at which a query stands, which ALiBi counts from. It may lie outside of the query's own sequence.
    pub positions: Vec<i64>,
}

impl PackedSequences {
    /// From cumulative lengths: 0, and then the end of each sequence.
    ///
    /// # Errors
    /// For lengths that do not begin with 0 or that decrease, and if there are more sequences of one kind than of the other.
    pub fn new(cu_seqlens_q: Vec<usize>, cu_seqlens_kv: Vec<usize>) -> Result<Self> {
        check("cu_seqlens_q", &cu_seqlens_q)?;
        check("cu_seqlens_kv", &cu_seqlens_kv)?;
        if cu_seqlens_q.len() != cu_seqlens_kv.len() {
            bail!(
                "[packed_sequences] cu_seqlens_q has {} entries and cu_seqlens_kv has {}, expected the same",
                cu_seqlens_q.len(),
                cu_seqlens_kv.len()
            )
        }
        Ok(Self { cu_seqlens_q, cu_seqlens_kv })
    }

    /// Self-attention: queries and keys have the same cumulative lengths.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn self_attention(cu_seqlens: Vec<usize>) -> Result<Self> {
        Self::new(cu_seqlens.clone(), cu_seqlens)
    }

    /// From integer tensors (n + 1,) of cumulative lengths. They are read back from their device.
    ///
    /// # Errors
    /// As [`new`](Self::new), for another rank, for a float tensor and for a negative entry.
    pub fn from_tensors(cu_seqlens_q: &Tensor, cu_seqlens_kv: &Tensor) -> Result<Self> {
        Self::new(read("cu_seqlens_q", cu_seqlens_q)?, read("cu_seqlens_kv", cu_seqlens_kv)?)
    }

    /// From the length of each sequence.
    ///
    /// # Errors
    /// For more lengths of one kind than of the other, and for a sum that no tensor has.
    pub fn from_lens(lens_q: &[usize], lens_kv: &[usize]) -> Result<Self> {
        if lens_q.len() != lens_kv.len() {
            bail!(
                "[packed_sequences] lens_q has {} entries and lens_kv has {}, expected the same",
                lens_q.len(),
                lens_kv.len()
            )
        }
        Self::new(accumulate("lens_q", lens_q)?, accumulate("lens_kv", lens_kv)?)
    }

    /// n, the number of sequences.
    pub fn len(&self) -> usize {
        self.cu_seqlens_q.len() - 1
    }

    /// Whether there is no sequence.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The packed queries of sequence `s`; `0..0` where there is no such sequence.
    pub fn queries(&self, s: usize) -> Range<usize> {
        range(&self.cu_seqlens_q, s)
    }

    /// The packed keys of sequence `s`; `0..0` where there is no such sequence.
    pub fn keys(&self, s: usize) -> Range<usize> {
        range(&self.cu_seqlens_kv, s)
    }

    /// The queries of all sequences.
    pub fn total_queries(&self) -> usize {
        self.cu_seqlens_q.last().copied().unwrap_or(0)
    }

    /// The keys of all sequences.
    pub fn total_keys(&self) -> usize {
        self.cu_seqlens_kv.last().copied().unwrap_or(0)
    }

    /// The structural constraints of a mask, whose batch entries are the sequences, for a kernel over all keys at once.
    ///
    /// # Errors
    /// As [`AttentionMask::resolve`] for each sequence.
    pub(crate) fn ranges(&self, mask: &AttentionMask) -> Result<PackedRanges> {
        let total = self.total_queries();
        if !fits_in_memory(&[total, size_of::<Range<usize>>() + size_of::<i64>()]) {
            bail!("[packed_sequences] the ranges of {total} queries do not fit in memory")
        }
        let (mut keys, mut positions) = (Vec::with_capacity(total), Vec::with_capacity(total));
        for s in 0..self.len() {
            let (own_queries, own_keys) = (self.queries(s), self.keys(s));
            let own = mask.of_sequence(s, self.len(), own_queries.len())?;
            let bound = own.resolve(1, own_queries.len(), own_keys.len())?;
            let first = own_keys.start;
            for i in 0..own_queries.len() {
                let seen = bound.kv_range(0, i);
                keys.push(first + seen.start..first + seen.end);
                positions.push(bound.query_position(i).saturating_add(i64::try_from(first).unwrap_or(i64::MAX)));
            }
        }
        Ok(PackedRanges { keys, positions })
    }
}

fn check(name: &str, cu_seqlens: &[usize]) -> Result<()> {
    match cu_seqlens.first() {
        Some(0) => {}
        Some(first) => bail!("[packed_sequences] {name} begins with {first}, expected 0"),
        None => bail!("[packed_sequences] {name} is empty, expected 0 and then the end of each sequence"),
    }
    if let Some((i, pair)) = cu_seqlens.windows(2).enumerate().find(|(_, pair)| pair[1] < pair[0]) {
        bail!(
            "[packed_sequences] entry {} of {name} is {}, expected at least the {} before it",
            i + 1,
            pair[1],
            pair[0]
        )
    }
    Ok(())
}

fn accumulate(name: &str, lens: &[usize]) -> Result<Vec<usize>> {
    let mut cu_seqlens = vec![0];
    let mut sum = 0usize;
    for &len in lens {
        let Some(next) = sum.checked_add(len) else {
            bail!("[packed_sequences] {name} add up to more than {}", usize::MAX)
        };
        sum = next;
        cu_seqlens.push(sum);
    }
    Ok(cu_seqlens)
}

fn read(name: &str, cu_seqlens: &Tensor) -> Result<Vec<usize>> {
    if cu_seqlens.dtype().is_float() {
        bail!("[packed_sequences] {name} has dtype {:?}, expected integers", cu_seqlens.dtype())
    }
    let &[len] = cu_seqlens.dims() else {
        bail!("[packed_sequences] {name} has shape {:?}, expected (n + 1,)", cu_seqlens.dims())
    };
    // A view of nothing may begin past the end of its buffer, where Candle's copies panic.
    if len == 0 {
        return Ok(Vec::new());
    }
    let entries = cu_seqlens.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let non_negative = |(i, entry): (usize, i64)| match usize::try_from(entry) {
        Ok(entry) => Ok(entry),
        Err(_) => bail!("[packed_sequences] entry {i} of {name} is {entry}, expected zero or more"),
    };
    entries.into_iter().enumerate().map(non_negative).collect()
}

fn range(cu_seqlens: &[usize], s: usize) -> Range<usize> {
    match cu_seqlens.get(s..).unwrap_or_default() {
        [start, end, ..] => *start..*end,
        _ => 0..0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sequences of 2 and 3 queries against 4 and 2 keys, with an empty one of each kind between them.
    fn sequences() -> Result<PackedSequences> {
        PackedSequences::from_lens(&[2, 0, 1, 3], &[4, 3, 0, 2])
    }

    #[test]
    fn ranges_are_those_of_each_sequence_moved_to_its_keys() -> Result<()> {
        let PackedRanges { keys, positions } = sequences()?.ranges(&AttentionMask::none())?;
        assert_eq!(keys, [0..4, 0..4, 7..7, 7..9, 7..9, 7..9]);
        // The last query of a sequence stands at its last key.
        assert_eq!(positions, [2, 3, 6, 6, 7, 8]);

        let PackedRanges { keys, positions } = sequences()?.ranges(&AttentionMask::causal())?;
        assert_eq!(keys, [0..3, 0..4, 7..7, 7..7, 7..8, 7..9]);
        assert_eq!(positions, [2, 3, 6, 6, 7, 8]);

        let PackedRanges { keys, positions } = sequences()?.ranges(&AttentionMask::causal_upper_left())?;
        assert_eq!(keys, [0..1, 0..2, 7..7, 7..8, 7..9, 7..9]);
        assert_eq!(positions, [0, 1, 7, 7, 8, 9]);
        Ok(())
    }

    #[test]
    fn lengths_of_a_mask_are_of_each_sequence() -> Result<()> {
        let each = AttentionMask::none().with_valid_lens(vec![3, 1, 1, 1]).with_starts(vec![1, 0, 0, 0]);
        assert_eq!(sequences()?.ranges(&each)?.keys, [1..3, 1..3, 7..7, 7..8, 7..8, 7..8]);
        let rows = AttentionMask::none().with_valid_lens(vec![vec![1, 2], vec![], vec![5], vec![0, 1, 2]]);
        assert_eq!(sequences()?.ranges(&rows)?.keys, [0..1, 0..2, 7..7, 7..7, 7..8, 7..9]);
        let prefix = AttentionMask::causal_upper_left().with_prefix(vec![3, 0, 0, 2]);
        assert_eq!(sequences()?.ranges(&prefix)?.keys, [0..3, 0..3, 7..7, 7..9, 7..9, 7..9]);
        Ok(())
    }

    #[test]
    fn tensors_of_any_integer_dtype_are_lists() -> Result<()> {
        let expected = PackedSequences::new(vec![0, 2, 2, 7], vec![0, 1, 4, 4])?;
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            let tensor = |list: [u32; 4]| Tensor::new(&list, &Device::Cpu)?.to_dtype(dtype);
            assert_eq!(PackedSequences::from_tensors(&tensor([0, 2, 2, 7])?, &tensor([0, 1, 4, 4])?)?, expected);
        }
        assert_eq!((expected.len(), expected.total_queries(), expected.total_keys()), (3, 7, 4));
        assert_eq!((expected.queries(1), expected.keys(2), expected.queries(3)), (2..2, 4..4, 0..0));
        Ok(())
    }

    #[test]
    fn more_queries_than_any_memory_holds_are_an_error() -> Result<()> {
        let sequences = PackedSequences::from_lens(&[usize::MAX], &[1])?;
        let error = sequences.ranges(&AttentionMask::none()).expect_err("too many").to_string();
        assert!(error.contains("[packed_sequences] the ranges of 18446744073709551615 queries do not fit in memory"));
        Ok(())
    }
}
