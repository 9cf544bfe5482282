//! A cache of rows that were stored elsewhere, and the rows that a call added to it.

use std::ops::Range;

use candle_core::{DType, Result};

use super::storage::{Buffer, KvBuffers};
use super::{AttentionCache, AttentionCacheConfig};

/// The keys (n, H_kv, rows, D) of sequences and their values, in the format of a config.
pub(crate) struct GatheredRows {
    pub keys: Buffer,
    /// `None` if the values are the first `d_v` columns of the keys.
    pub values: Option<Buffer>,
    pub d_v: usize,
    /// The positions of each sequence that the rows store, the first one in row 0.
    pub stored: Vec<Range<usize>>,
}

/// The rows (1, H_kv, n, ..) of one sequence.
pub(crate) struct CachedRows {
    pub keys: Buffer,
    pub values: Option<Buffer>,
}

impl AttentionCache {
    /// Returns a cache of rows whose layer has keys of a dtype.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of_rows(config: &AttentionCacheConfig, rows: GatheredRows, dtype: DType) -> Result<Self> {
        let GatheredRows { keys, values, d_v, stored } = rows;
        let buffers = Some(KvBuffers::of(keys, values, d_v));
        Ok(Self { buffers, stored, dtype: Some(dtype), ..Self::new(config)? })
    }

    /// Returns the stored rows of some positions of a sequence, as views; `None` before the first call.
    pub(crate) fn rows_of(&self, sequence: usize, positions: &Range<usize>) -> Result<Option<CachedRows>> {
        let Some(buffers) = &self.buffers else { return Ok(None) };
        let first = self.stored[sequence].start;
        let rows = buffers.rows_of_sequence(sequence, &(positions.start - first..positions.end - first))?;
        let (keys, values) = rows.into_parts();
        Ok(Some(CachedRows { keys, values }))
    }
}
