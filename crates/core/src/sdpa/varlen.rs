//! Attention over packed sequences, one after the other in one tensor: each attends to its own keys, and no padding is
//! computed.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::{Outputs, SdpaOptions, attend};
use crate::mask::AttentionMask;
use candle_attention_modules::base::{Dim, Expect, check_entries};

const OP: &str = "packed_sequences";

/// [`scaled_dot_product_attention`](crate::scaled_dot_product_attention) over sequences of different lengths, packed
/// one after the other: flash-attention's `varlen`.
///
/// Shapes: q (total_q, H, D), k (total_kv, H_kv, D), v (total_kv, H_kv, D_v) give a contiguous (total_q, H, D_v) in q's
/// dtype, on q's device. Any strides are accepted. The sequences say which positions belong together; each has the
/// numbers of a call by itself.
///
/// The mask holds for each sequence by itself, as for an entry of a batch: alignment, windows and bands count within
/// the sequence; lengths, starts and prefixes are (n,), or a list of T_q entries for each of the n sequences. `keep`
/// and `bias` tensors have no shape here, and are refused. PyTorch's generator draws the dropout of one sequence after
/// the other; the output order of the options has no meaning here.
///
/// ```
/// use candle_attention::{AttentionMask, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let sequences = PackedSequences::from_lens(&[5, 3], &[5, 3])?; // cumulative: 0, 5, 8
/// let q = Tensor::randn(0f32, 1., (8, 4, 64), &Device::Cpu)?;
/// let kv = Tensor::randn(0f32, 1., (8, 2, 64), &Device::Cpu)?;
/// let causal = AttentionMask::causal();
/// let y = scaled_dot_product_attention_varlen(&q, &kv, &kv, &sequences, &causal, &SdpaOptions::default())?;
/// assert_eq!(y.dims(), [8, 4, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), and for cumulative lengths that end
/// elsewhere than the tensors, and for a mask with `keep` or `bias` tensors.
pub fn scaled_dot_product_attention_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<Tensor> {
    Ok(attend(Outputs::Context, [q, k, v], Some(sequences), mask, options)?.context)
}

/// [`scaled_dot_product_attention_varlen`] that also returns the log-sum-exp of each query's scores: (H, total_q) in
/// f32 (f64 for f64 inputs), `-inf` for a query that sees no key. A sink counts as one more score.
///
/// # Errors
/// As [`scaled_dot_product_attention_varlen`].
pub fn scaled_dot_product_attention_varlen_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<(Tensor, Tensor)> {
    attend(Outputs::LogSumExp, [q, k, v], Some(sequences), mask, options)?.with(|found| found.lse.take())
}

/// Where each sequence of a packed batch begins and ends, among the queries and among the keys.
///
/// Sequence s has the queries `cu_seqlens_q[s]..cu_seqlens_q[s + 1]` and the keys `cu_seqlens_kv[s]..cu_seqlens_kv[s +
/// 1]`: the cumulative lengths of flash-attention's variable-length calls. A sequence may be without queries or without
/// keys.
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
    /// Of the queries, and of the keys.
    cu_seqlens: [Arc<[usize]>; 2],
    longest: [usize; 2],
}

impl PackedSequences {
    /// From cumulative lengths: 0, and then the end of each sequence.
    ///
    /// # Errors
    /// For lengths that do not begin with 0 or that decrease, and if there are more sequences of one kind than of the
    /// other.
    pub fn new(cu_seqlens_q: Vec<usize>, cu_seqlens_kv: Vec<usize>) -> Result<Self> {
        let longest = [longest("cu_seqlens_q", &cu_seqlens_q)?, longest("cu_seqlens_kv", &cu_seqlens_kv)?];
        let [of_q, of_kv] = [cu_seqlens_q.len(), cu_seqlens_kv.len()];
        check_entries(OP, "cu_seqlens_kv", of_kv, of_q, "entries of cu_seqlens_q")?;
        Ok(Self { cu_seqlens: [cu_seqlens_q.into(), cu_seqlens_kv.into()], longest })
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
        check_entries(OP, "lens_kv", lens_kv.len(), lens_q.len(), "entries of lens_q")?;
        Self::new(accumulate("lens_q", lens_q)?, accumulate("lens_kv", lens_kv)?)
    }

    /// n, the number of sequences.
    pub fn len(&self) -> usize {
        self.cu_seqlens[0].len() - 1
    }

    /// Whether there is no sequence.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The packed queries of sequence `s`; `0..0` where there is no such sequence.
    pub fn queries(&self, s: usize) -> Range<usize> {
        self.range(0, s)
    }

    /// The packed keys of sequence `s`; `0..0` where there is no such sequence.
    pub fn keys(&self, s: usize) -> Range<usize> {
        self.range(1, s)
    }

    fn range(&self, of: usize, s: usize) -> Range<usize> {
        match self.cu_seqlens[of].get(s..).unwrap_or_default() {
            [start, end, ..] => *start..*end,
            _ => 0..0,
        }
    }

    /// The queries and the keys of each sequence.
    pub(crate) fn parts(&self) -> impl Iterator<Item = [Range<usize>; 2]> {
        (0..self.len()).map(|s| [self.queries(s), self.keys(s)])
    }

    /// The most queries and the most keys of a sequence.
    pub(crate) fn longest(&self) -> [usize; 2] {
        self.longest
    }

    /// The queries of all sequences.
    pub fn total_queries(&self) -> usize {
        self.cu_seqlens[0].last().copied().unwrap_or(0)
    }

    /// The keys of all sequences.
    pub fn total_keys(&self) -> usize {
        self.cu_seqlens[1].last().copied().unwrap_or(0)
    }
}

/// The longest sequence, where each begins with the end of the one before.
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

fn read(name: &str, cu_seqlens: &Tensor) -> Result<Vec<usize>> {
    Expect::one(OP, name, cu_seqlens).shape(&[Dim::Any("n + 1")])?.counts()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

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
}
