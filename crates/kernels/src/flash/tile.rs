//! A tile: as many query rows as a panel has columns, and the keys that they see.

use std::ops::Range;

use super::problem::{KvHead, ScoreInputs};
use crate::cpu::{Kernel, MAX_COLUMNS};

/// The queries of one panel.
pub(super) struct Tile {
    pub kv: KvHead,
    /// Rows of the key head, see [`Dims::rows`](super::problem::Dims::rows).
    pub rows: Range<usize>,
    /// The vectors of the panel that hold a query.
    pub vectors: usize,
    /// The keys that some query sees: all within, not all of them.
    pub some: Range<usize>,
    /// The keys that every query sees.
    pub every: Range<usize>,
    /// The keys that some query of each vector sees.
    seen: [Range<usize>; MAX_VECTORS],
    starts: [usize; MAX_COLUMNS],
    ends: [usize; MAX_COLUMNS],
}

/// A block's keys from about the first that a tile sees to the last.
pub(super) struct Overlap {
    pub keys: Range<usize>,
    /// The words of depth of a product over them.
    pub depth: usize,
    /// Whether some query does not see some of them.
    pub is_masked: bool,
    pub parts: Parts,
}

/// What the least and the largest of keys begin with.
const NOTHING: Range<usize> = Range { start: usize::MAX, end: 0 };
/// The most vectors that a panel of any kernel has.
const MAX_VECTORS: usize = 4;
/// The most parts between the starts and ends of what as many vectors see.
const MAX_PARTS: usize = 2 * MAX_VECTORS + 1;

/// Keys, and the vectors of a tile of which some query sees one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub keys: Range<usize>,
    pub vectors: Range<usize>,
}

/// Some parts, from the first key to the last.
pub(super) struct Parts {
    parts: [Part; MAX_PARTS],
    count: usize,
}

impl Parts {
    const NONE: Self = Self { parts: [const { Part { keys: 0..0, vectors: 0..0 } }; MAX_PARTS], count: 0 };

    /// Adds to the last part what continues it.
    fn push(&mut self, part: Part) {
        match self.parts[..self.count].last_mut() {
            Some(last) if last.vectors == part.vectors && last.keys.end == part.keys.start => {
                last.keys.end = part.keys.end;
            }
            _ => {
                self.parts[self.count] = part;
                self.count += 1;
            }
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Part> {
        self.parts[..self.count].iter()
    }
}

impl Tile {
    pub fn new(inputs: &ScoreInputs, kv: KvHead, rows: Range<usize>, lanes: usize) -> Self {
        // A column without a query sees no key, and does not count among those that have to see every key.
        let (mut starts, mut ends) = ([0; MAX_COLUMNS], [0; MAX_COLUMNS]);
        let (mut first, mut end, mut every) = (usize::MAX, 0, 0..usize::MAX);
        let mut seen = [NOTHING; MAX_VECTORS];
        for (column, row) in rows.clone().enumerate() {
            let range = inputs.range(inputs.dims.row(kv, row));
            (starts[column], ends[column]) = (range.start, range.end);
            if !range.is_empty() {
                (first, end) = (first.min(range.start), end.max(range.end));
                let seen = &mut seen[column / lanes];
                *seen = seen.start.min(range.start)..seen.end.max(range.end);
            }
            every = every.start.max(range.start)..every.end.min(range.end);
        }
        let vectors = rows.len().div_ceil(lanes);
        Self { kv, rows, vectors, some: first.min(end)..end, every, seen, starts, ends }
    }

    /// The tiles of some rows of a key head, `panel` of them each.
    pub fn of_rows(inputs: &ScoreInputs, kv: KvHead, rows: Range<usize>, panel: usize, lanes: usize) -> Vec<Self> {
        let tile = |first| Self::new(inputs, kv, first..rows.end.min(first + panel), lanes);
        rows.clone().step_by(panel).map(tile).collect()
    }

    /// The keys from the first to the last that some query of some tiles sees.
    pub fn seen_keys(tiles: &[Self]) -> Range<usize> {
        let start = tiles.iter().map(|tile| tile.some.start).min().unwrap_or(0);
        start..tiles.iter().map(|tile| tile.some.end).max().unwrap_or(0)
    }

    /// Splits keys where the vectors that see some of them change, in multiples of `step` from the first: along the
    /// edge of a mask, products over the part of a panel that sees anything are enough. Parts that nothing sees are
    /// left out.
    pub fn parts(&self, keys: Range<usize>, step: usize) -> Parts {
        let mut parts = Parts::NONE;
        if self.every.start <= keys.start && keys.end <= self.every.end {
            parts.push(Part { keys, vectors: 0..self.vectors });
            return parts;
        }
        let within = |key: usize| (keys.start + key).min(keys.end);
        let mut edges = [keys.end; MAX_PARTS + 1];
        edges[0] = keys.start;
        for (vector, seen) in self.seen[..self.vectors].iter().enumerate() {
            edges[1 + 2 * vector] = within(seen.start.saturating_sub(keys.start) / step * step);
            edges[2 + 2 * vector] = within(seen.end.saturating_sub(keys.start).next_multiple_of(step));
        }
        edges.sort_unstable();
        let vectors = |keys: &Range<usize>| {
            let sees = |vector: &usize| self.seen[*vector].start < keys.end && keys.start < self.seen[*vector].end;
            let first = (0..self.vectors).find(sees)?;
            Some(first..(first..self.vectors).rev().find(sees)? + 1)
        };
        for edge in edges.windows(2).filter(|edge| edge[0] < edge[1]) {
            let keys = edge[0]..edge[1];
            if let Some(vectors) = vectors(&keys) {
                parts.push(Part { keys, vectors });
            }
        }
        parts
    }

    /// Where each column begins and ends to see keys, counted from `first` and bounded by `keys`: exact in f32.
    pub fn bounds(&self, first: usize, keys: usize) -> ([f32; MAX_COLUMNS], [f32; MAX_COLUMNS]) {
        let within = |key: usize| key.saturating_sub(first).min(keys) as f32;
        (self.starts.map(within), self.ends.map(within))
    }

    /// What this tile and a block of keys have to do with each other, if it sees any of them.
    pub fn overlap<K: Kernel>(&self, block: &Range<usize>, inputs: &ScoreInputs) -> Option<Overlap> {
        // Keys are rows of one product and depth of another, and begin at whole multiples of both; the ones before the
        // first that is seen are hidden.
        let step = K::ROWS.max(K::DEPTH * K::ELEMENTS);
        let skipped = self.some.start.saturating_sub(block.start) / step * step;
        let keys = block.start + skipped..self.some.end.min(block.end);
        if keys.is_empty() {
            return None;
        }
        let depth = keys.len().div_ceil(K::ELEMENTS).next_multiple_of(K::DEPTH);
        // A product over these keys reads `depth` words of them, of which those past the end weigh nothing.
        let read = (keys.start + depth * K::ELEMENTS).min(block.end);
        let all_seen = self.every.start <= keys.start && read <= self.every.end && inputs.options.keep.is_none();
        Some(Overlap { parts: self.parts(keys.clone(), step), keys, depth, is_masked: !all_seen })
    }

    /// Whether a column has no query, or one that sees no key.
    pub fn is_empty(&self, column: usize) -> bool {
        self.starts[column] >= self.ends[column]
    }

    pub fn sees(&self, column: usize, key: usize) -> bool {
        (self.starts[column]..self.ends[column]).contains(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(seen: &[Range<usize>]) -> Tile {
        let mut whole = [NOTHING; MAX_VECTORS];
        whole[..seen.len()].clone_from_slice(seen);
        let (starts, ends) = ([0; MAX_COLUMNS], [usize::MAX; MAX_COLUMNS]);
        let kv = KvHead { b: 0, head: 0 };
        Tile { kv, rows: 0..1, vectors: seen.len(), some: 0..0, every: 0..0, seen: whole, starts, ends }
    }

    fn parts(seen: &[Range<usize>], keys: Range<usize>) -> Vec<(Range<usize>, Range<usize>)> {
        tile(seen).parts(keys, 8).iter().map(|part| (part.keys.clone(), part.vectors.clone())).collect()
    }

    #[test]
    fn parts_follow_the_edges_of_a_window() {
        let window = [10..40, 26..56, 42..72];
        assert_eq!(
            parts(&window, 8..72),
            [(8..24, 0..1), (24..40, 0..2), (40..56, 1..3), (56..72, 2..3)].map(|(keys, vectors)| (keys, vectors))
        );
        assert_eq!(parts(&window, 40..50), [(40..50, 1..3)]);
    }

    #[test]
    fn what_nothing_sees_is_left_out() {
        assert_eq!(parts(&[0..3, NOTHING, 40..41], 0..64), [(0..8, 0..1), (40..48, 2..3)]);
        assert_eq!(parts(&[NOTHING], 0..64), []);
        // Vectors between two that see something are multiplied too.
        assert_eq!(parts(&[0..9, 30..31, 0..5], 0..64), [(0..8, 0..3), (8..16, 0..1), (24..32, 1..2)]);
    }
}
