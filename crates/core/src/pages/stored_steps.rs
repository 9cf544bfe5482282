//! The steps of a table whose tokens the pool of a layer has stored.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Result, bail};

use super::moves::RowMoves;
use super::step::PagedTokens;
use super::table::PageTable;

/// The table of a pool, and the last step whose tokens the pool has stored.
#[derive(Debug)]
pub struct StoredSteps {
    table: u64,
    last: AtomicU64,
    /// The number of the last moves of rows that the pool has made.
    moved: AtomicU64,
}

impl StoredSteps {
    /// Returns that a pool of a table has stored nothing.
    pub fn new(table: &PageTable) -> Self {
        Self::of_table(table.id)
    }

    /// Returns that a pool of the table with this number has stored nothing.
    pub(super) fn of_table(table: u64) -> Self {
        Self { table, last: AtomicU64::new(0), moved: AtomicU64::new(0) }
    }

    /// Checks that a step is of the pool's table, and that the pool has stored the tokens of all steps before. `op` is
    /// for errors.
    pub fn check(&self, op: &str, step: &PagedTokens) -> Result<()> {
        if self.table != step.table {
            bail!("[{op}] the step is of another table, expected the one that the pool was made for")
        }
        if self.last.load(Ordering::Relaxed) < step.committed {
            bail!(
                "[{op}] the pool has not stored the tokens of an earlier step that was committed, expected a call of \
                 its layer in every step"
            )
        }
        Ok(())
    }

    /// Checks that the pool has moved the rows of all calls of [`PageTable::keep`] before a step. `op` is for errors.
    pub(super) fn check_moved(&self, op: &str, step: &PagedTokens) -> Result<()> {
        if self.moved.load(Ordering::Relaxed) < step.moved {
            bail!(
                "[{op}] the pool has not moved the rows that `PageTable::keep` kept, expected a call of `move_rows` \
                 of every pool"
            )
        }
        Ok(())
    }

    /// Checks that moves are of the pool's table, and that the pool has made all moves before. `op` is for errors.
    pub(super) fn check_moves(&self, op: &str, moves: &RowMoves) -> Result<()> {
        if self.table != moves.table {
            bail!("[{op}] the moves are of another table, expected the one that the pool was made for")
        }
        let moved = self.moved.load(Ordering::Relaxed);
        let expected = moves.number.saturating_sub(u64::from(!moves.to().is_empty()));
        if moved != expected {
            bail!("[{op}] the pool has moved rows {moved} times, expected {expected} before these moves: each once")
        }
        Ok(())
    }

    /// Notes that the pool has moved rows.
    pub(super) fn add_moves(&self, moves: &RowMoves) {
        self.moved.store(moves.number, Ordering::Relaxed);
    }

    /// Notes that the pool has stored the tokens of a step.
    pub fn add(&self, step: &PagedTokens) {
        self.last.store(step.number, Ordering::Relaxed);
    }

    /// Returns whether a step is the last one whose tokens the pool has stored.
    pub fn is_last(&self, step: &PagedTokens) -> bool {
        self.last.load(Ordering::Relaxed) == step.number
    }
}
