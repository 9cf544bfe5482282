//! Biases by the distance of a query and a key: one vector for each head, which the scores read along their diagonals.

use std::cell::Cell;

use super::problem::{Dims, KvHead, Row, Strided};
use super::tile::Tile;
use crate::cpu::{MAX_LANES, Scratch, SharedPtr};
use crate::error::{Error, check_len};

/// A bias for each distance of a query and a key.
///
/// The score of a query and key `j` gets entry `origin + j` of its head, and nothing where there is no such entry. With
/// `T_q - 1 - i` as the origin of query i, entry n is that of the n-th diagonal of the scores.
#[derive(Debug, Clone, Copy)]
pub struct DistanceBias<'a> {
    /// (B, H) rows of `len` contiguous biases. Sequences whose stride is 0 share them.
    pub rows: Strided<'a, f32, 2>,
    /// Biases of a head.
    pub len: usize,
    /// (B, T_q).
    pub origins: &'a [i64],
}

impl DistanceBias<'_> {
    pub(super) fn check(&self, dims: &Dims) -> Result<(), Error> {
        self.rows.check("distance biases", [dims.b, dims.h], self.len)?;
        check_len("origins", self.origins.len(), dims.b * dims.t_q)
    }

    /// The sequences that have biases of their own: B, or 1.
    pub(super) fn sequences(&self, dims: &Dims) -> usize {
        if self.rows.strides[0] == 0 { dims.b.min(1) } else { dims.b }
    }

    /// The biases of a row.
    pub(super) fn of_row(&self, row: Row) -> &[f32] {
        let start = row.b * self.rows.strides[0] + row.head * self.rows.strides[1];
        &self.rows.data[start..start + self.len]
    }

    /// The entry of key 0, which lies outside the biases for every key if it does for one.
    pub(super) fn origin(&self, dims: &Dims, row: Row) -> i64 {
        let beyond = -(dims.t_kv as i64) - 1;
        self.origins[row.b * dims.t_q + row.query].clamp(beyond, self.len as i64)
    }
}

/// Biases as tiles of queries read them: of each key head from the last entry to the first, those of the heads of a
/// group side by side. The entries of one key and successive query rows are then successive too. Zeros stand before
/// and behind them. Sums of their gradients have the same places.
pub(super) struct DistanceTable<'a> {
    bias: DistanceBias<'a>,
    group: usize,
    words: Scratch,
    /// B·H_kv, or H_kv where sequences share biases.
    heads: usize,
}

/// Columns of a tile whose biases of one key are successive words.
pub(super) struct DistanceRun {
    /// The first column, and how many there are: at most a vector.
    pub column: usize,
    pub width: usize,
    /// The word of the first column for key 0, which counts down with keys by the heads of a group.
    first: i64,
    group: i64,
    last: i64,
}

impl DistanceRun {
    /// The word of the first column for a key. Those of the others follow.
    #[inline(always)]
    pub fn word(&self, key: usize) -> usize {
        (self.first - key as i64 * self.group).clamp(0, self.last) as usize
    }
}

impl<'a> DistanceTable<'a> {
    /// `None` where there is no memory for it.
    pub fn new(bias: DistanceBias<'a>, dims: &Dims) -> Option<Self> {
        let (group, heads) = (dims.group(), bias.sequences(dims) * dims.h_kv);
        let size = bias.len * group + 2 * MAX_LANES;
        let mut words = Scratch::try_zeros(&[heads, size])?;
        for (index, of_head) in words.words_mut().chunks_exact_mut(size).take(heads).enumerate() {
            let kv = dims.kv_head(index);
            for g in 0..group {
                let row = Row { b: kv.b, head: kv.head * group + g, query: 0 };
                let places = of_head[MAX_LANES..].chunks_exact_mut(group);
                places.zip(bias.of_row(row).iter().rev()).for_each(|(place, &value)| place[g] = value);
            }
        }
        Some(Self { bias, group, words, heads })
    }

    /// The words of a key head.
    pub fn size(&self) -> usize {
        self.bias.len * self.group + 2 * MAX_LANES
    }

    #[inline(always)]
    pub fn of_head(&self, dims: &Dims, kv: KvHead) -> &[f32] {
        let head = (kv.b * dims.h_kv + kv.head) % self.heads;
        &self.words.words()[head * self.size()..][..self.size()]
    }

    /// The runs of a tile: a vector each where the origins of its queries count down by one, which all do but for those
    /// of packed sequences that begin elsewhere among the queries than among the keys.
    pub fn runs(&self, dims: &Dims, tile: &Tile, lanes: usize) -> impl Iterator<Item = DistanceRun> {
        let (kv, group) = (tile.kv, self.group);
        tile.rows.clone().step_by(lanes).flat_map(move |first| {
            let rows = first..tile.rows.end.min(first + lanes);
            let queries = rows.start / group..rows.end.div_ceil(group);
            let origins = &self.bias.origins[kv.b * dims.t_q..][queries];
            let are_successive = origins.windows(2).all(|pair| pair[0].checked_sub(1) == Some(pair[1]));
            let width = if are_successive { rows.len() } else { 1 };
            rows.step_by(width).map(move |row| {
                let from_last = self.bias.len as i64 - 1 - self.bias.origin(dims, dims.row(kv, row));
                DistanceRun {
                    column: row - tile.rows.start,
                    width,
                    first: MAX_LANES as i64 + from_last * group as i64 + (row % group) as i64,
                    group: group as i64,
                    last: (self.size() - MAX_LANES) as i64,
                }
            })
        })
    }

    /// Adds sums of gradients, a task's for the heads of a group from `row` on, to those of the entries.
    ///
    /// # Safety
    /// No other thread uses the gradients of these heads.
    pub unsafe fn add_to(&self, output: &DistanceOutput, sums: &[Cell<f32>], row: Row) {
        let len = self.bias.len;
        for g in 0..self.group {
            let to = output.at.0.wrapping_add(row.b * output.of_sequence + (row.head + g) * len);
            for (entry, sums) in (0..len).rev().zip(sums[MAX_LANES..].chunks_exact(self.group)) {
                // SAFETY: as this method's contract; the gradient has an element for each entry of each head.
                unsafe { *to.add(entry) += sums[g].get() };
            }
        }
    }
}

/// The gradient of distance biases: (B or 1, H) rows of `len`.
#[derive(Clone, Copy)]
pub(super) struct DistanceOutput {
    pub at: SharedPtr<f32>,
    /// The elements from one sequence to the next, 0 where sequences share them.
    pub of_sequence: usize,
}

impl DistanceOutput {
    /// Whether sequences share gradients.
    pub fn is_shared(&self, dims: &Dims) -> bool {
        self.of_sequence == 0 && dims.b > 1
    }
}
