//! Relative position biases: one number for each head and each distance between a query and a key. Tiles of queries
//! read them, along the diagonals of the scores, from a table in which these entries are successive.

use std::ops::Range;

use crate::cpu::{MAX_LANES, Scratch};
use crate::error::{Error, check_len};
use crate::number::Strided;
use candle_attention_call::{AttentionDims, KvHead, QueryRow};

/// A bias for each distance between a query and a key, in [rows of entries](super::problem::Diagonals).
#[derive(Debug, Clone, Copy)]
pub(super) struct TileRelativeBias<'a> {
    /// (B, H) rows of `len` contiguous biases. Sequences whose stride is 0 share them.
    pub rows: Strided<'a, f32, 2>,
    pub len: usize,
    pub origins: &'a [i64],
}

/// An entry of one of the heads that share a key head.
pub(super) struct GroupEntry {
    /// The number of the head in its group.
    pub head: usize,
    pub entry: usize,
}

impl TileRelativeBias<'_> {
    /// Checks that the slices have the sizes of the call, and that there is an entry for every key that a query attends
    /// to. `ranges` are the keys of each query, (B, T_q).
    pub(super) fn check(&self, dims: &AttentionDims, ranges: &[Range<usize>]) -> Result<(), Error> {
        self.rows.check("relative bias", [dims.b, dims.h], self.len)?;
        check_len("origins", self.origins.len(), dims.b * dims.t_q)?;
        for (index, (&origin, keys)) in self.origins.iter().zip(ranges).enumerate() {
            // Wider than both, so that no origin overflows.
            let entries = i128::from(origin) + keys.start as i128..i128::from(origin) + keys.end as i128;
            if !keys.is_empty() && (entries.start < 0 || entries.end > self.len as i128) {
                let sequence = index / dims.t_q;
                let query = index % dims.t_q;
                return Err(Error::Shape(format!(
                    "query {query} of sequence {sequence} (origin {origin}, keys {keys:?}) reads entries {entries:?} of \
                     the relative bias, expected entries within 0..{}",
                    self.len
                )));
            }
        }
        Ok(())
    }

    /// Returns the number of sequences with separate biases: B, or 1 where all share them.
    pub(super) fn sequences(&self, dims: &AttentionDims) -> usize {
        if self.rows.strides[0] == 0 { dims.b.min(1) } else { dims.b }
    }

    /// Returns the entry of each word of a key head in a [`RelativeBiasTable`], from word [`MAX_LANES`] on.
    pub(super) fn table_entries(&self, group: usize) -> impl Iterator<Item = GroupEntry> {
        (0..self.len).rev().flat_map(move |entry| (0..group).map(move |head| GroupEntry { head, entry }))
    }

    /// Returns the biases of a head of a sequence.
    pub(super) fn head_biases(&self, b: usize, head: usize) -> &[f32] {
        if self.len == 0 {
            // Rows without entries may have any stride.
            return &[];
        }
        let start = b * self.rows.strides[0] + head * self.rows.strides[1];
        &self.rows.data[start..start + self.len]
    }

    /// Returns the entry of a query for a key: outside of `0..len` for some masked keys.
    pub(super) fn entry(&self, dims: &AttentionDims, row: QueryRow, key: usize) -> i128 {
        i128::from(self.origins[row.b * dims.t_q + row.query]) + key as i128
    }
}

/// Biases in the order in which tiles of queries read them: for each key head from the last entry to the first, with
/// the heads of a group next to each other. So the entries of one key and successive query rows are successive too.
/// There are zeros before and after them. The sums of their gradients have the same order.
pub(super) struct RelativeBiasTable<'a> {
    bias: TileRelativeBias<'a>,
    group: usize,
    words: Scratch,
    /// B·H_kv, or H_kv where sequences share biases.
    heads: usize,
}

/// Neighbouring columns (queries) of a tile whose biases for one key are neighbours in memory.
pub(super) struct DiagonalRun {
    /// The first column.
    pub column: usize,
    /// The number of columns, at most a vector.
    pub width: usize,
    /// The word of the first column for the first key. It decreases from key to key by the heads of a group.
    first: i64,
    /// The number of heads of a group.
    group: i64,
    /// The last word from which a vector can be read.
    last: i64,
}

impl DiagonalRun {
    /// Returns the word of the first column for the key with this index. The words of the other columns follow.
    #[inline(always)]
    pub fn word(&self, index: usize) -> usize {
        (self.first - index as i64 * self.group).clamp(0, self.last) as usize
    }
}

impl<'a> RelativeBiasTable<'a> {
    /// Copies the biases of a call; `None` if there is no memory for them.
    pub fn new(bias: TileRelativeBias<'a>, dims: &AttentionDims) -> Option<Self> {
        let group = dims.group();
        let heads = bias.sequences(dims) * dims.h_kv;
        let size = bias.len.checked_mul(group)?.checked_add(2 * MAX_LANES)?;
        let mut words = Scratch::try_zeros(&[heads, size])?;
        for (index, head_words) in words.words_mut().chunks_exact_mut(size).take(heads).enumerate() {
            let kv = dims.kv_head(index);
            for (word, entry) in head_words[MAX_LANES..].iter_mut().zip(bias.table_entries(group)) {
                *word = bias.head_biases(kv.b, dims.query_head(kv, entry.head))[entry.entry];
            }
        }
        Some(Self { bias, group, words, heads })
    }

    /// Returns the number of words of a key head.
    pub fn size(&self) -> usize {
        self.bias.len * self.group + 2 * MAX_LANES
    }

    /// Returns the words of a key head.
    #[inline(always)]
    pub fn head_words(&self, dims: &AttentionDims, kv: KvHead) -> &[f32] {
        let head = dims.kv_index(kv) % self.heads;
        &self.words.words()[head * self.size()..][..self.size()]
    }

    /// Returns the runs of some rows of a key head over some keys: a vector each where the origins of the queries count
    /// down by one. They all do except for packed sequences whose queries and keys begin at different offsets.
    pub fn runs(
        &self,
        dims: &AttentionDims,
        kv: KvHead,
        rows: &Range<usize>,
        lanes: usize,
        keys: &Range<usize>,
    ) -> impl Iterator<Item = DiagonalRun> {
        let group = self.group;
        let tile = rows.clone();
        rows.clone().step_by(lanes).flat_map(move |first| {
            let vector = first..tile.end.min(first + lanes);
            let queries = vector.start / group..vector.end.div_ceil(group);
            let origins = &self.bias.origins[kv.b * dims.t_q..][queries];
            let are_successive = origins.windows(2).all(|pair| pair[0].checked_sub(1) == Some(pair[1]));
            let width = if are_successive { vector.len() } else { 1 };
            let column = first - tile.start;
            vector.step_by(width).enumerate().map(move |(n, row)| DiagonalRun {
                column: column + n * width,
                width,
                first: self.first_word(dims, kv, row, keys),
                group: group as i64,
                last: (self.size() - MAX_LANES) as i64,
            })
        })
    }

    /// Returns the word of a row for the first of some keys. It is outside of the table if no row of the vector that
    /// begins with this one has an entry for any of the keys.
    fn first_word(&self, dims: &AttentionDims, kv: KvHead, row: usize, keys: &Range<usize>) -> i64 {
        let from_last = self.bias.len as i128 - 1 - self.bias.entry(dims, dims.row(kv, row), keys.start);
        // Beyond these bounds no column has an entry for any key: all of its words are zeros.
        let least = -1 - MAX_LANES as i128;
        let largest = (self.bias.len + keys.len()) as i128;
        let from_last = from_last.clamp(least, largest) as i64;
        MAX_LANES as i64 + from_last * self.group as i64 + (row % self.group) as i64
    }
}
