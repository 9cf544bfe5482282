//! A tile: as many query rows as a panel has columns, and the keys that they see.

use std::ops::Range;

use super::params::{Problem, Row};
use crate::cpu::{Element, Kernel, MOST_COLUMNS, Vector};

/// The queries of one panel.
pub(super) struct Tile {
    /// Rows of the key head, see [`Dims::rows`](super::params::Dims::rows).
    pub rows: Range<usize>,
    /// The vectors of the panel that hold a query.
    pub vectors: usize,
    /// The keys that some query sees: all within, not all of them.
    pub some: Range<usize>,
    /// The keys that every query sees.
    pub every: Range<usize>,
    starts: [usize; MOST_COLUMNS],
    ends: [usize; MOST_COLUMNS],
}

impl Tile {
    pub fn new<K: Kernel, E: Element>(problem: &Problem<E>, b: usize, kv_head: usize, rows: Range<usize>) -> Self {
        // A column without a query sees all: it asks for no masking, and is never written.
        let (mut starts, mut ends) = ([0; MOST_COLUMNS], [usize::MAX; MOST_COLUMNS]);
        let (mut first, mut end, mut every) = (usize::MAX, 0, 0..usize::MAX);
        for (column, row) in rows.clone().enumerate() {
            let Row { query, .. } = problem.row(kv_head, row);
            let range = problem.range(b, query);
            (starts[column], ends[column]) = (range.start, range.end);
            if !range.is_empty() {
                (first, end) = (first.min(range.start), end.max(range.end));
            }
            every = every.start.max(range.start)..every.end.min(range.end);
        }
        let vectors = rows.len().div_ceil(K::Vector::LANES);
        Self { rows, vectors, some: first.min(end)..end, every, starts, ends }
    }

    /// Where each column begins and ends to see keys, counted from `first` and bounded by `keys`: exact in f32.
    pub fn bounds(&self, first: usize, keys: usize) -> ([f32; MOST_COLUMNS], [f32; MOST_COLUMNS]) {
        let within = |key: usize| key.saturating_sub(first).min(keys) as f32;
        (self.starts.map(within), self.ends.map(within))
    }

    pub fn sees(&self, column: usize, key: usize) -> bool {
        (self.starts[column]..self.ends[column]).contains(&key)
    }
}
