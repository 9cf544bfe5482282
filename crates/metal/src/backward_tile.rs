//! The tiles of the backward kernels, and their places in threadgroup memory.

use candle_attention_cuda::shared::Define;

use crate::tile::{MOST_SHARED_BYTES, ROW_PADDING, SIMDGROUPS, TileColumns};

/// The most columns of rows of both sides that stay in registers.
const MOST_REGISTER_COLUMNS: usize = 128;

/// The rows of a tile that are tried, most first.
const ROWS: [usize; 3] = [32, 16, 8];

/// The tiles of a program: queries with gradients of outputs for the kernel of keys, keys with values for the kernel of
/// queries. Both have the same number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MetalBackwardTile {
    columns: TileColumns,
    element_bytes: usize,
    rows: usize,
}

impl MetalBackwardTile {
    /// Returns the tiles with the most rows that fit threadgroup memory.
    pub fn of(columns: TileColumns, element_bytes: usize) -> Self {
        let tile = |rows| Self { columns, element_bytes, rows };
        let fits = |own: &Self| own.key_shared_bytes() <= MOST_SHARED_BYTES;
        ROWS.into_iter().map(tile).find(fits).unwrap_or(tile(ROWS[ROWS.len() - 1]))
    }

    /// Returns the number of keys of a threadgroup of the kernel of keys, and of queries of one of the kernel of
    /// queries.
    pub fn block(&self) -> usize {
        8 * SIMDGROUPS
    }

    /// Returns the number of parts of the gradient of a slope that a threadgroup of the kernel of keys stores.
    pub fn slope_parts(&self) -> usize {
        SIMDGROUPS
    }

    /// Returns the number of threads of a threadgroup.
    pub fn threads(&self) -> usize {
        32 * SIMDGROUPS
    }

    /// Returns the number of bytes of one side of a tile.
    fn side_bytes(&self, columns: usize) -> usize {
        self.rows * (columns * self.element_bytes + ROW_PADDING)
    }

    /// Returns the place behind both sides of a tile.
    fn behind_tile(&self) -> usize {
        self.side_bytes(self.columns.of_keys) + self.side_bytes(self.columns.of_values)
    }

    /// Returns the place of the gradients of scores behind five numbers for each query.
    fn key_bias_gradients_at(&self) -> usize {
        self.behind_tile() + 20 * self.rows
    }

    /// Returns the place of an answer of each simdgroup.
    fn key_answers_at(&self) -> usize {
        (self.key_bias_gradients_at() + 4 * self.block() * (self.rows + 1)).next_multiple_of(16)
    }

    /// Returns the number of bytes of threadgroup memory of the kernel of keys.
    pub fn key_shared_bytes(&self) -> usize {
        self.key_answers_at() + 4 * SIMDGROUPS
    }

    /// Returns the place of the answers behind the intervals of simdgroups.
    fn query_answers_at(&self) -> usize {
        self.behind_tile() + 8 * SIMDGROUPS
    }

    /// Returns the number of bytes of threadgroup memory of the kernel of queries.
    pub fn query_shared_bytes(&self) -> usize {
        self.query_answers_at() + 4 * SIMDGROUPS
    }

    /// Returns the macros of the tiles.
    pub fn defines(&self) -> Vec<Define> {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let TileColumns { of_keys, of_values } = self.columns;
        let values_at = self.side_bytes(of_keys);
        vec![
            define("FUSED_BACKWARD", 0),
            define("BACKWARD_ROWS_IN_REGISTERS", (of_keys + of_values <= MOST_REGISTER_COLUMNS).into()),
            define("KEY_WARPS", SIMDGROUPS),
            define("KEY_BLOCK", self.block()),
            define("BACKWARD_QUERIES", self.rows),
            define("KEY_QUERIES_AT", 0),
            define("KEY_GRADIENTS_AT", values_at),
            define("KEY_STATISTICS_AT", self.behind_tile()),
            define("KEY_BIAS_GRADIENTS_AT", self.key_bias_gradients_at()),
            define("KEY_ANSWERS_AT", self.key_answers_at()),
            define("KEY_SHARED_BYTES", self.key_shared_bytes()),
            define("QUERY_WARPS", SIMDGROUPS),
            define("QUERY_BLOCK", self.block()),
            define("QUERY_KEYS", self.rows),
            define("QUERY_KEYS_AT", 0),
            define("QUERY_VALUES_AT", values_at),
            define("QUERY_INTERVALS_AT", self.behind_tile()),
            define("QUERY_ANSWERS_AT", self.query_answers_at()),
            define("QUERY_SHARED_BYTES", self.query_shared_bytes()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metal_backward_tiles_fit_threadgroup_memory_for_every_head_dimension_and_type() {
        for element_bytes in [2, 4] {
            for of_keys in (16..=256).step_by(16) {
                for of_values in (16..=256).step_by(16) {
                    let tile = MetalBackwardTile::of(TileColumns { of_keys, of_values }, element_bytes);
                    for bytes in [tile.key_shared_bytes(), tile.query_shared_bytes()] {
                        assert!(bytes <= MOST_SHARED_BYTES && bytes.is_multiple_of(16), "{tile:?}");
                    }
                    assert!(tile.behind_tile().is_multiple_of(16), "{tile:?}");
                }
            }
        }
        let rows = |columns, element_bytes| {
            MetalBackwardTile::of(TileColumns { of_keys: columns, of_values: columns }, element_bytes).rows
        };
        assert_eq!([rows(128, 2), rows(256, 2), rows(64, 4), rows(128, 4), rows(256, 4)], [32, 16, 32, 16, 8]);
    }
}
