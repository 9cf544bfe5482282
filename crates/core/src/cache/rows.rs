//! The rows of a cache's buffers that store the positions of a sequence: first its sink tokens, then its last ones.

use std::ops::Range;

use super::storage::StoredRows;

/// The order in which the buffers store the positions of a sequence. A sequence is described by the range of its last
/// positions, which begins at 0 or after the sink tokens; positions between these and the range have been dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowOrder {
    /// The number of first positions that are never dropped.
    pub sink_tokens: usize,
}

impl RowOrder {
    /// Returns the number of positions of a sequence that have been dropped.
    fn dropped(self, stored: &Range<usize>) -> usize {
        stored.start.saturating_sub(self.sink_tokens)
    }

    /// Returns the number of rows that store a sequence.
    pub fn count(self, stored: &Range<usize>) -> usize {
        stored.end - self.dropped(stored)
    }

    /// Returns the largest number of rows of a sequence.
    pub fn longest(self, sequences: &[Range<usize>]) -> usize {
        sequences.iter().map(|stored| self.count(stored)).max().unwrap_or(0)
    }

    /// Returns the row of a position that is in the range of last positions, or of a sink token in a sequence of which
    /// nothing has been dropped.
    pub fn row(self, stored: &Range<usize>, position: usize) -> usize {
        position - self.dropped(stored)
    }

    /// Returns all rows of a sequence.
    pub fn all(self, sequence: usize, stored: &Range<usize>) -> StoredRows {
        StoredRows { sequence, sinks: 0, rows: 0..self.count(stored) }
    }

    /// Returns the rows that store a part of the stored positions, for each sequence: sink tokens and last positions.
    pub fn rows_of(self, stored: &[Range<usize>], part: &[Range<usize>]) -> Vec<StoredRows> {
        let mut rows = Vec::with_capacity(stored.len());
        for (sequence, (whole, selected)) in stored.iter().zip(part).enumerate() {
            if self.dropped(whole) == self.dropped(selected) {
                rows.push(StoredRows { sequence, sinks: 0, rows: 0..self.count(selected) });
            } else {
                let selected_rows = self.row(whole, selected.start)..self.row(whole, selected.end);
                rows.push(StoredRows { sequence, sinks: self.sink_tokens, rows: selected_rows });
            }
        }
        rows
    }

    /// Returns the last n positions after the sink tokens; all positions if there are no more than these.
    pub fn last(self, stored: &Range<usize>, n: usize) -> Range<usize> {
        let start = stored.end - stored.len().min(n);
        if start <= self.sink_tokens { stored.clone() } else { start..stored.end }
    }
}
