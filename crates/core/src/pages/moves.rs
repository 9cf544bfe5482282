//! The rows of pools that move.

/// The rows that move in every [`KvPool`](crate::KvPool) of a table after
/// [`PageTable::keep`](crate::PageTable::keep).
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "every pool of keys and values has to move the rows"]
pub struct RowMoves {
    pub(super) table: u64,
    /// The number of this call among those that moved rows.
    pub(super) number: u64,
    /// The rows (page · page size + position in the page) that are read, and those that they are written to.
    pub(super) from: Vec<u32>,
    pub(super) to: Vec<u32>,
}

impl RowMoves {
    /// Returns the rows of a pool (pages · page size, ..) that are read, before the first is written.
    pub fn from(&self) -> &[u32] {
        &self.from
    }

    /// Returns the rows that are written, in the same order.
    pub fn to(&self) -> &[u32] {
        &self.to
    }
}
