//! A tile: the query rows of a panel, one for each column, or a few rows repeated for several keys, and the keys that
//! the queries attend to.

use std::ops::Range;

use super::inputs::CheckedCall;
use crate::cpu::{Layout, MAX_COLUMNS};
use candle_attention_call::KvHead;

/// The queries of one panel.
pub(super) struct Tile {
    pub kv: KvHead,
    /// Rows of the key head, as [`AttentionDims::rows`](candle_attention_call::AttentionDims::rows) counts them.
    pub rows: Range<usize>,
    /// The number of columns of the panel.
    pub panel: usize,
    /// The number of columns that belong to one key. In most tiles it is the whole panel. In a narrow tile, a row of
    /// the panel has several keys, one after the other.
    pub width: usize,
    /// The number of vectors of the panel that contain a query.
    pub vectors: usize,
    /// The smallest range that contains every key that some query attends to.
    pub some_attend: Range<usize>,
    /// The keys that every query attends to.
    pub all_attend: Range<usize>,
    /// The smallest range of keys for the queries of each vector.
    vector_ranges: [Range<usize>; MAX_VECTORS],
    /// The keys that each query attends to.
    ranges: Vec<Range<usize>>,
}

/// A column of a panel that contains a query.
pub(super) struct TileColumn {
    pub column: usize,
    /// The row of the key head.
    pub row: usize,
    /// The distance of the column's key from the key of the first columns in the same row of the panel.
    pub key_offset: usize,
}

/// The first key and the end of the keys of each column, as numbers of f32.
pub(super) struct ColumnBounds {
    pub starts: [f32; MAX_COLUMNS],
    pub ends: [f32; MAX_COLUMNS],
}

/// The keys of a block that a tile is multiplied with: from the first to the last that it attends to, in whole steps of
/// the products.
pub(super) struct Overlap {
    /// The first key of the block.
    pub block_start: usize,
    pub keys: Range<usize>,
    /// The depth of a product over the keys, in words.
    pub depth: usize,
    /// Whether some key is masked for some query.
    pub is_masked: bool,
    pub parts: TileParts,
}

/// An empty range, whose union with another range is the other range.
const NO_KEYS: Range<usize> = Range { start: usize::MAX, end: 0 };
/// The most vectors that a panel of any kernel has.
const MAX_VECTORS: usize = 4;
/// The most parts between the starts and ends of the ranges of these vectors.
const MAX_PARTS: usize = 2 * MAX_VECTORS + 1;

/// Some keys, and the vectors of a tile in which some query attends to one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TilePart {
    pub keys: Range<usize>,
    pub vectors: Range<usize>,
}

/// Some parts, from the first key to the last.
pub(super) struct TileParts {
    parts: [TilePart; MAX_PARTS],
    count: usize,
}

impl TileParts {
    const NONE: Self = Self { parts: [const { TilePart { keys: 0..0, vectors: 0..0 } }; MAX_PARTS], count: 0 };

    /// Appends a part, or extends the last part if the new one continues it.
    fn push(&mut self, part: TilePart) {
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

    /// Iterates over the parts.
    pub fn iter(&self) -> impl Iterator<Item = &TilePart> {
        self.parts[..self.count].iter()
    }
}

/// Returns the keys that are in both ranges.
pub(super) fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Returns the smallest range that contains both ranges.
fn union(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.min(b.start)..a.end.max(b.end)
}

impl Tile {
    /// Creates a tile of some rows of a key head.
    pub fn new(layout: Layout, inputs: &CheckedCall, kv: KvHead, rows: Range<usize>) -> Self {
        let vectors = rows.len().div_ceil(layout.lanes);
        Self { vectors, ..Self::narrow(layout, inputs, kv, rows, 0..inputs.dims.t_kv, layout.panel) }
    }

    /// Creates a narrow tile of at most `width` rows over some of the keys. `width` divides the number of lanes.
    pub fn narrow(
        layout: Layout,
        inputs: &CheckedCall,
        kv: KvHead,
        rows: Range<usize>,
        keys: Range<usize>,
        width: usize,
    ) -> Self {
        let mut ranges = Vec::with_capacity(rows.len());
        let mut some_attend = NO_KEYS;
        let mut all_attend = keys.clone();
        let mut vector_ranges = [NO_KEYS; MAX_VECTORS];
        for (column, row) in rows.clone().enumerate() {
            let range = intersection(inputs.range(inputs.dims.row(kv, row)), &keys);
            if !range.is_empty() {
                some_attend = union(&some_attend, &range);
                let vector_range = &mut vector_ranges[column / layout.lanes];
                *vector_range = union(vector_range, &range);
            }
            all_attend = intersection(&all_attend, &range);
            ranges.push(range);
        }
        some_attend.start = some_attend.start.min(some_attend.end);
        let vectors = layout.panel / layout.lanes;
        Self { kv, rows, panel: layout.panel, width, vectors, some_attend, all_attend, vector_ranges, ranges }
    }

    /// Iterates over the columns of the panel that contain one of the rows.
    pub fn columns(&self) -> impl Iterator<Item = TileColumn> {
        (0..self.panel).step_by(self.width).enumerate().flat_map(move |(key_offset, first)| {
            self.rows.clone().enumerate().map(move |(n, row)| TileColumn { column: first + n, row, key_offset })
        })
    }

    /// Returns the smallest range of the keys that the queries of some tiles attend to.
    pub fn attended_keys(tiles: &[Self]) -> Range<usize> {
        let ranges = tiles.iter().map(|tile| &tile.some_attend).filter(|some| !some.is_empty());
        let start = ranges.clone().map(|some| some.start).min().unwrap_or(0);
        start..ranges.map(|some| some.end).max().unwrap_or(0)
    }

    /// Splits keys where the vectors that attend to some of them change, in multiples of `step` from the first: along
    /// the edge of a mask, products over a part of the panel are enough. Keys that no vector attends to are
    /// left out.
    pub fn parts(&self, keys: Range<usize>, step: usize) -> TileParts {
        let mut parts = TileParts::NONE;
        if self.attends_to_all(&keys) {
            parts.push(TilePart { keys, vectors: 0..self.vectors });
            return parts;
        }
        let bounded = |key: usize| (keys.start + key).min(keys.end);
        let mut edges = [keys.end; MAX_PARTS + 1];
        edges[0] = keys.start;
        for (vector, range) in self.vector_ranges[..self.vectors].iter().enumerate() {
            edges[1 + 2 * vector] = bounded(range.start.saturating_sub(keys.start) / step * step);
            edges[2 + 2 * vector] = bounded(range.end.saturating_sub(keys.start).next_multiple_of(step));
        }
        edges.sort_unstable();
        for edge in edges.windows(2).filter(|edge| edge[0] < edge[1]) {
            let between = edge[0]..edge[1];
            if let Some(vectors) = self.vectors_of(&between) {
                parts.push(TilePart { keys: between, vectors });
            }
        }
        parts
    }

    /// Returns the vectors from the first to the last in which some query attends to one of some keys.
    fn vectors_of(&self, keys: &Range<usize>) -> Option<Range<usize>> {
        let overlaps = |vector: &usize| {
            let range = &self.vector_ranges[*vector];
            range.start < keys.end && keys.start < range.end
        };
        let first = (0..self.vectors).find(overlaps)?;
        let last = (first..self.vectors).rev().find(overlaps)?;
        Some(first..last + 1)
    }

    /// Returns the bounds of the keys of each column, counted from `first` and limited to `keys`: exact in f32. A row
    /// of a narrow tile has several keys, and bounds count from the key of its first columns.
    pub fn bounds(&self, first: usize, keys: usize) -> ColumnBounds {
        // A column without a query attends to no key.
        let mut bounds = ColumnBounds { starts: [0.0; MAX_COLUMNS], ends: [0.0; MAX_COLUMNS] };
        for TileColumn { column, row, key_offset } in self.columns() {
            let range = &self.ranges[row - self.rows.start];
            bounds.starts[column] = range.start.saturating_sub(first + key_offset).min(keys) as f32;
            bounds.ends[column] = range.end.saturating_sub(first + key_offset).min(keys) as f32;
        }
        bounds
    }

    /// Returns the keys of a block that the tile attends to; `None` if there are none.
    pub fn overlap(&self, layout: Layout, block: &Range<usize>, inputs: &CheckedCall) -> Option<Overlap> {
        // Keys are the rows of one product and the depth of another, and begin at whole multiples of both; the keys
        // before the first one of the tile are masked.
        let step = layout.rows.max(layout.depth * layout.elements);
        let skipped = self.some_attend.start.saturating_sub(block.start) / step * step;
        let keys = block.start + skipped..self.some_attend.end.min(block.end);
        if keys.is_empty() {
            return None;
        }
        let depth = keys.len().div_ceil(layout.elements).next_multiple_of(layout.depth);
        // A product over these keys reads `depth` words of them; words past the end have weights of zero.
        let read = (keys.start + depth * layout.elements).min(block.end);
        let is_masked = !self.attends_to_all(&(keys.start..read)) || inputs.options.boolean_mask.is_some();
        let parts = self.parts(keys.clone(), step);
        Some(Overlap { block_start: block.start, keys, depth, is_masked, parts })
    }

    /// Returns whether a column has no query, or a fully masked one.
    pub fn is_empty(&self, column: usize) -> bool {
        self.ranges.get(column).is_none_or(Range::is_empty)
    }

    /// Returns whether some keys are within the range of every query.
    pub fn attends_to_all(&self, keys: &Range<usize>) -> bool {
        self.all_attend.start <= keys.start && keys.end <= self.all_attend.end
    }

    /// Iterates over the keys among some that the query of a column attends to.
    pub fn keys_of(&self, inputs: &CheckedCall, column: usize, keys: &Range<usize>) -> impl Iterator<Item = usize> {
        let row = inputs.dims.row(self.kv, self.rows.start + column);
        intersection(keys, &self.ranges[column]).filter(move |&key| inputs.is_allowed(row, key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(ranges: &[Range<usize>]) -> Tile {
        let mut vector_ranges = [NO_KEYS; MAX_VECTORS];
        vector_ranges[..ranges.len()].clone_from_slice(ranges);
        let kv = KvHead { b: 0, head: 0 };
        Tile {
            kv,
            rows: 0..1,
            panel: MAX_COLUMNS,
            width: MAX_COLUMNS,
            vectors: ranges.len(),
            some_attend: 0..0,
            all_attend: 0..0,
            vector_ranges,
            ranges: Vec::new(),
        }
    }

    fn parts(ranges: &[Range<usize>], keys: Range<usize>) -> Vec<TilePart> {
        tile(ranges).parts(keys, 8).iter().cloned().collect()
    }

    fn part(keys: Range<usize>, vectors: Range<usize>) -> TilePart {
        TilePart { keys, vectors }
    }

    #[test]
    fn window_edges_split_tiles_into_parts() {
        let window = [10..40, 26..56, 42..72];
        assert_eq!(
            parts(&window, 8..72),
            [part(8..24, 0..1), part(24..40, 0..2), part(40..56, 1..3), part(56..72, 2..3)]
        );
        assert_eq!(parts(&window, 40..50), [part(40..50, 1..3)]);
    }

    #[test]
    fn masked_keys_are_in_no_part_of_a_tile() {
        assert_eq!(parts(&[0..3, NO_KEYS, 40..41], 0..64), [part(0..8, 0..1), part(40..48, 2..3)]);
        assert_eq!(parts(&[NO_KEYS], 0..64), []);
        // Vectors between two that attend to some keys are multiplied too.
        assert_eq!(parts(&[0..9, 30..31, 0..5], 0..64), [part(0..8, 0..3), part(8..16, 0..1), part(24..32, 1..2)]);
    }
}
