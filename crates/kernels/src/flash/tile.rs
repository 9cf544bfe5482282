//! A tile: as many query rows as a panel has columns, or few of them several times over, and the keys that they see.

use std::ops::Range;

use super::problem::{KvHead, ScoreInputs};
use crate::cpu::{Layout, MAX_COLUMNS};

/// The queries of one panel.
pub(super) struct Tile {
    pub kv: KvHead,
    /// Rows of the key head, see [`Dims::rows`](super::problem::Dims::rows).
    pub rows: Range<usize>,
    /// The columns of the panel.
    pub panel: usize,
    /// The columns of one key: those of the panel, or of a narrow tile a part of them, and the next ones are those of
    /// the next key.
    pub width: usize,
    /// The vectors of the panel that hold a query.
    pub vectors: usize,
    /// The keys that some query sees: all within, not all of them.
    pub some: Range<usize>,
    /// The keys that every query sees.
    pub every: Range<usize>,
    /// The keys that some query of each vector sees.
    seen: [Range<usize>; MAX_VECTORS],
    /// The keys that each query sees.
    ranges: Vec<Range<usize>>,
}

/// A block's keys from about the first that a tile sees to the last.
pub(super) struct Overlap {
    /// The first key of the block.
    pub block: usize,
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
    pub fn new(layout: Layout, inputs: &ScoreInputs, kv: KvHead, rows: Range<usize>) -> Self {
        let vectors = rows.len().div_ceil(layout.lanes);
        Self { vectors, ..Self::narrow(layout, inputs, kv, rows, 0..inputs.dims.t_kv, layout.panel) }
    }

    /// Of at most `width` rows, which divides a vector, and some of the keys.
    pub fn narrow(
        layout: Layout,
        inputs: &ScoreInputs,
        kv: KvHead,
        rows: Range<usize>,
        keys: Range<usize>,
        width: usize,
    ) -> Self {
        let mut ranges = Vec::with_capacity(rows.len());
        let (mut first, mut end, mut every) = (usize::MAX, 0, keys.clone());
        let mut seen = [NOTHING; MAX_VECTORS];
        for (column, row) in rows.clone().enumerate() {
            let range = inputs.range(inputs.dims.row(kv, row));
            let range = range.start.max(keys.start)..range.end.min(keys.end);
            if !range.is_empty() {
                (first, end) = (first.min(range.start), end.max(range.end));
                let seen = &mut seen[column / layout.lanes];
                *seen = seen.start.min(range.start)..seen.end.max(range.end);
            }
            every = every.start.max(range.start)..every.end.min(range.end);
            ranges.push(range);
        }
        let (panel, vectors) = (layout.panel, layout.panel / layout.lanes);
        Self { kv, rows, panel, width, vectors, some: first.min(end)..end, every, seen, ranges }
    }

    /// The columns of a panel that are of one of the rows, with the row and how many keys its key is after the first.
    pub fn columns(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let of_key = move |(after, first)| self.rows.clone().enumerate().map(move |(n, row)| (first + n, row, after));
        (0..self.panel).step_by(self.width).enumerate().flat_map(of_key)
    }

    /// The keys from the first to the last that some query of some tiles sees.
    pub fn seen_keys(tiles: &[Self]) -> Range<usize> {
        let seen = tiles.iter().map(|tile| &tile.some).filter(|some| !some.is_empty());
        let start = seen.clone().map(|some| some.start).min().unwrap_or(0);
        start..seen.map(|some| some.end).max().unwrap_or(0)
    }

    /// Splits keys where the vectors that see some of them change, in multiples of `step` from the first: along the
    /// edge of a mask, products over the part of a panel that sees anything are enough. Parts that nothing sees are
    /// left out.
    pub fn parts(&self, keys: Range<usize>, step: usize) -> Parts {
        let mut parts = Parts::NONE;
        if self.sees_all(&keys) {
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

    /// Where each column begins and ends to see keys, counted from `first` and bounded by `keys`: exact in f32. Of a
    /// narrow tile, where the keys of the first columns of its row of the panel do.
    pub fn bounds(&self, first: usize, keys: usize) -> [[f32; MAX_COLUMNS]; 2] {
        // A column without a query sees no key.
        let mut bounds = [[0f32; MAX_COLUMNS]; 2];
        for (column, row, after) in self.columns() {
            let seen = &self.ranges[row - self.rows.start];
            bounds[0][column] = seen.start.saturating_sub(first + after).min(keys) as f32;
            bounds[1][column] = seen.end.saturating_sub(first + after).min(keys) as f32;
        }
        bounds
    }

    /// What this tile and a block of keys have to do with each other, if it sees any of them.
    pub fn overlap(&self, layout: Layout, block: &Range<usize>, inputs: &ScoreInputs) -> Option<Overlap> {
        // Keys are rows of one product and depth of another, and begin at whole multiples of both; the ones before the
        // first that is seen are hidden.
        let Layout { elements, depth, .. } = layout;
        let step = layout.rows.max(depth * elements);
        let skipped = self.some.start.saturating_sub(block.start) / step * step;
        let keys = block.start + skipped..self.some.end.min(block.end);
        if keys.is_empty() {
            return None;
        }
        let depth = keys.len().div_ceil(elements).next_multiple_of(depth);
        // A product over these keys reads `depth` words of them, of which those past the end weigh nothing.
        let read = (keys.start + depth * elements).min(block.end);
        let all_seen = self.sees_all(&(keys.start..read)) && inputs.options.keep.is_none();
        let parts = self.parts(keys.clone(), step);
        Some(Overlap { block: block.start, keys, depth, is_masked: !all_seen, parts })
    }

    /// Whether a column has no query, or one that sees no key.
    pub fn is_empty(&self, column: usize) -> bool {
        self.ranges.get(column).is_none_or(Range::is_empty)
    }

    /// Whether every query sees all of some keys, but for those that are not kept.
    pub fn sees_all(&self, keys: &Range<usize>) -> bool {
        self.every.start <= keys.start && keys.end <= self.every.end
    }

    /// Those of some keys that a row of the tile sees.
    pub fn seen_by(&self, inputs: &ScoreInputs, column: usize, keys: &Range<usize>) -> impl Iterator<Item = usize> {
        let (row, seen) = (inputs.dims.row(self.kv, self.rows.start + column), &self.ranges[column]);
        (keys.start.max(seen.start)..keys.end.min(seen.end)).filter(move |&key| inputs.is_kept(row, key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(seen: &[Range<usize>]) -> Tile {
        let mut whole = [NOTHING; MAX_VECTORS];
        whole[..seen.len()].clone_from_slice(seen);
        let kv = KvHead { b: 0, head: 0 };
        Tile {
            kv,
            rows: 0..1,
            panel: MAX_COLUMNS,
            width: MAX_COLUMNS,
            vectors: seen.len(),
            some: 0..0,
            every: 0..0,
            seen: whole,
            ranges: Vec::new(),
        }
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
