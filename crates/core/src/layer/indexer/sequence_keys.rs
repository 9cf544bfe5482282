//! The keys of a sequence that an indexer groups, from the first one on.

use std::ops::Range;

/// The keys of one sequence, and those that its queries attend to by the mask.
pub(super) struct SequenceKeys<'a> {
    /// The first key that a query attends to, where the first block or pool begins.
    pub first: usize,
    /// The number of keys from there on.
    pub count: usize,
    ranges: &'a [Range<usize>],
}

impl<'a> SequenceKeys<'a> {
    /// Finds the keys of a sequence whose queries attend to these ranges.
    pub fn new(ranges: &'a [Range<usize>]) -> Self {
        let first = ranges.iter().filter(|range| !range.is_empty()).map(|range| range.start).min().unwrap_or(0);
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0).max(first);
        Self { first, count: end - first, ranges }
    }

    /// Returns the keys of a query, counted from the first one.
    pub fn visible(&self, query: usize) -> Range<usize> {
        let range = &self.ranges[query];
        range.start.max(self.first) - self.first..range.end.max(self.first) - self.first
    }
}
