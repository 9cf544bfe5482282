//! Packed queries of several sequences whose keys and values are in pages of pools.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::packed::PackedSequences;
use candle_attention_modules::base::{Dim, Expect, check_entries};

const OP: &str = "paged_sequences";

/// The sequences of a call whose keys and values are in pages: the queries of each sequence among all packed queries,
/// the length of each sequence with these queries, and the pages that store it.
///
/// A pool of keys is (pages, page size, H_kv, D). Position p of sequence s is row `p % page size` of page
/// `pages(s)[p / page size]`. Several sequences may share pages. A [`PageTable`](crate::PageTable) makes these lists;
/// they can also come from another program.
///
/// ```
/// use candle_attention::PagedSequences;
/// # fn main() -> candle_core::Result<()> {
/// // A chunk of 20 tokens that ends a prompt of 40, and one token of a sequence of 17; pages of 16 positions.
/// let sequences = PagedSequences::new(vec![0, 20, 21], vec![40, 17], vec![vec![3, 0, 4], vec![3, 1]])?;
/// assert_eq!((sequences.queries(1), sequences.keys(1), sequences.pages(1)), (20..21, 0..17, &[3, 1][..]));
/// # Ok(()) }
/// ```
#[doc(alias("block_table", "block_tables", "page_table"))]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagedSequences {
    /// The queries, and the keys as if they were packed one sequence after the other.
    packed: PackedSequences,
    /// The first position of each sequence that is stored.
    first_positions: Arc<[usize]>,
    /// The pages of each sequence, from position 0 on.
    pages: Arc<[Vec<u32>]>,
}

impl PagedSequences {
    /// Makes sequences of the cumulative numbers of queries (0, and then the end of each sequence's), of the length of
    /// each sequence and of its pages, from position 0 on. Pages past the length are not read.
    ///
    /// # Errors
    /// For cumulative numbers that do not begin with 0 or that decrease, for lists of different lengths, and for a sum
    /// of lengths that no tensor can have.
    pub fn new(cu_seqlens_q: Vec<usize>, lens_kv: Vec<usize>, pages: Vec<Vec<u32>>) -> Result<Self> {
        if let Some(n) = cu_seqlens_q.len().checked_sub(1) {
            check_entries(OP, "lens_kv", lens_kv.len(), n, "sequences")?;
        }
        let mut cu_seqlens_kv = vec![0];
        let mut sum = 0usize;
        for &len in &lens_kv {
            let Some(next) = sum.checked_add(len) else { bail!("[{OP}] lens_kv add up to more than {}", usize::MAX) };
            sum = next;
            cu_seqlens_kv.push(sum);
        }
        let packed = PackedSequences::new(cu_seqlens_q, cu_seqlens_kv)?;
        check_entries(OP, "pages", pages.len(), packed.len(), "sequences")?;
        let first_positions = vec![0; packed.len()].into();
        Ok(Self { packed, first_positions, pages: pages.into() })
    }

    /// Makes sequences of integer tensors, which are copied to the CPU: the cumulative numbers of queries (n + 1,), the
    /// lengths (n,), and the table of pages (n, most pages), `block_table` of flash-attention. Entries of the table
    /// past the length of a sequence are not read.
    ///
    /// # Errors
    /// As [`new`](Self::new), for another rank, for a float tensor and for a negative entry.
    pub fn from_tensors(cu_seqlens_q: &Tensor, lens_kv: &Tensor, table: &Tensor) -> Result<Self> {
        let queries = Expect::many(OP, "cu_seqlens_q", cu_seqlens_q).shape(&[Dim::Any("n + 1")])?.counts()?;
        let lens = Expect::many(OP, "lens_kv", lens_kv).shape(&[Dim::Any("n")])?.counts()?;
        let n = Dim::Named("n", lens.len());
        let entries = Expect::one(OP, "the table", table).shape(&[n, Dim::Any("most pages")])?.counts()?;
        let most = table.dim(1)?;
        let mut pages = Vec::with_capacity(lens.len());
        for s in 0..lens.len() {
            let mut row = Vec::with_capacity(most);
            for &page in &entries[s * most..][..most] {
                let Ok(page) = u32::try_from(page) else {
                    bail!("[{OP}] the table has page {page} for sequence {s}, expected at most {}", u32::MAX)
                };
                row.push(page);
            }
            pages.push(row);
        }
        Self::new(queries, lens, pages)
    }

    /// Sets the first position of each sequence that is stored. The pages before were released, since no query attends
    /// to them any more: their entries in the lists are not read, and a mask that allows a query to attend to a
    /// position before is an error.
    ///
    /// # Errors
    /// For another number of sequences, and for a position past the length.
    pub fn with_first_positions(self, first_positions: Vec<usize>) -> Result<Self> {
        check_entries(OP, "first_positions", first_positions.len(), self.len(), "sequences")?;
        for (s, &first) in first_positions.iter().enumerate() {
            let len = self.packed.keys(s).len();
            if first > len {
                bail!("[{OP}] the first position of sequence {s} is {first}, expected at most its length {len}")
            }
        }
        Ok(Self { first_positions: first_positions.into(), ..self })
    }

    /// Returns some of the sequences, in this order, as if there were no others.
    pub(crate) fn of_sequences(&self, chosen: &[usize]) -> Result<Self> {
        let mut cu_seqlens_q = vec![0];
        let mut queries = 0;
        for &s in chosen {
            queries += self.queries(s).len();
            cu_seqlens_q.push(queries);
        }
        let lens = chosen.iter().map(|&s| self.packed.keys(s).len()).collect();
        let pages = chosen.iter().map(|&s| self.pages(s).to_vec()).collect();
        let first_positions = chosen.iter().map(|&s| self.keys(s).start).collect();
        Self::new(cu_seqlens_q, lens, pages)?.with_first_positions(first_positions)
    }

    /// Returns n, the number of sequences.
    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// Returns whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Returns the range of the packed queries of sequence `s`; `0..0` if there is no such sequence.
    pub fn queries(&self, s: usize) -> Range<usize> {
        self.packed.queries(s)
    }

    /// Returns the positions of sequence `s` that are stored; `0..0` if there is no such sequence.
    pub fn keys(&self, s: usize) -> Range<usize> {
        let first = self.first_positions.get(s).copied().unwrap_or(0);
        first..self.packed.keys(s).len()
    }

    /// Returns the pages of sequence `s` from position 0 on; none if there is no such sequence.
    pub fn pages(&self, s: usize) -> &[u32] {
        self.pages.get(s).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of queries of all sequences.
    pub fn total_queries(&self) -> usize {
        self.packed.total_queries()
    }

    /// Returns the sequences as if their keys were packed, each from position 0 on.
    pub(crate) fn packed(&self) -> &PackedSequences {
        &self.packed
    }

    /// Checks that all positions are in `pages` pages of `page_size` positions.
    pub(super) fn check_pages(&self, op: &str, pages: usize, page_size: usize) -> Result<()> {
        for s in 0..self.len() {
            let Range { start: first, end: len } = self.keys(s);
            let needed = len.div_ceil(page_size);
            let own = self.pages(s);
            if own.len() < needed {
                bail!(
                    "[{op}] sequence {s} has {} pages, expected {needed} for its {len} positions in pages of \
                     {page_size}",
                    own.len()
                )
            }
            let read = first / page_size..needed;
            if let Some(page) = own[read].iter().find(|&&page| page as usize >= pages) {
                bail!("[{op}] sequence {s} has page {page}, expected one of the pools' {pages} pages")
            }
        }
        Ok(())
    }

    /// Returns the row of each position of all sequences, one after the other, in pools of pages of `page_size` rows. A
    /// position whose page was released has row 0.
    pub(super) fn rows(&self, page_size: usize) -> impl Iterator<Item = u32> {
        (0..self.len()).flat_map(move |s| {
            let Range { start: first, end: len } = self.keys(s);
            let own = self.pages(s);
            (0..len).map(move |position| {
                if position < first {
                    return 0;
                }
                own[position / page_size] * page_size as u32 + (position % page_size) as u32
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn paged_sequences_from_tensors_of_any_integer_dtype_equal_those_from_lists() -> Result<()> {
        let expected = PagedSequences::new(vec![0, 2, 3], vec![20, 1], vec![vec![2, 1], vec![0, 0]])?;
        for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
            let queries = Tensor::new(&[0u32, 2, 3], &Device::Cpu)?.to_dtype(dtype)?;
            let lens = Tensor::new(&[20u32, 1], &Device::Cpu)?.to_dtype(dtype)?;
            let table = Tensor::new(&[[2u32, 1], [0, 0]], &Device::Cpu)?.to_dtype(dtype)?;
            assert_eq!(PagedSequences::from_tensors(&queries, &lens, &table)?, expected);
        }
        assert_eq!((expected.queries(0), expected.keys(0), expected.pages(0)), (0..2, 0..20, &[2, 1][..]));
        assert_eq!((expected.queries(2), expected.keys(2), expected.pages(2)), (0..0, 0..0, &[][..]));
        Ok(())
    }

    #[test]
    fn paged_rows_follow_the_pages_and_pass_over_released_ones() -> Result<()> {
        let sequences = PagedSequences::new(vec![0, 0, 1], vec![18, 17], vec![vec![2, 1], vec![9, 0]])?;
        let sequences = sequences.with_first_positions(vec![0, 16])?;
        let expected: Vec<u32> = (32..48).chain(16..18).chain([0; 16]).chain([0]).collect();
        assert_eq!(sequences.rows(16).collect::<Vec<_>>(), expected);
        // Page 9 is not read.
        sequences.check_pages("test", 3, 16)?;
        Ok(())
    }
}
