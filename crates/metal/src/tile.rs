//! The tile of the forward kernel, and its places in threadgroup memory.

use candle_attention_cuda::shared::Define;

/// The most bytes of threadgroup memory on every device (Metal Feature Set Tables, "maximum threadgroup memory
/// allocation").
pub(crate) const MOST_SHARED_BYTES: usize = 32 * 1024;

/// The simdgroups of a threadgroup.
pub(crate) const SIMDGROUPS: usize = 4;

/// The most columns of queries that stay in registers.
const MOST_REGISTER_COLUMNS: usize = 128;

/// The rows of a threadgroup of the decode kernel: queries of the heads that share a key head.
pub(crate) const DECODE_ROWS: usize = 8;

/// The bytes behind a row, which keep rows that are read together in different banks.
pub(crate) const ROW_PADDING: usize = 16;

/// The columns of tiles: head dimensions rounded up to a multiple of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileColumns {
    pub of_keys: usize,
    pub of_values: usize,
}

/// The tile of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MetalTile {
    columns: TileColumns,
    element_bytes: usize,
    /// The number of keys of a tile.
    keys: usize,
}

impl MetalTile {
    /// Returns the tile for some columns: 32 keys, or 16 where these need too much memory.
    pub fn of(columns: TileColumns, element_bytes: usize) -> Self {
        let tile = Self { columns, element_bytes, keys: 32 };
        if tile.decode_shared_bytes() <= MOST_SHARED_BYTES { tile } else { Self { keys: 16, ..tile } }
    }

    /// Returns the number of queries of a threadgroup.
    pub fn queries(&self) -> usize {
        8 * SIMDGROUPS
    }

    /// Returns the number of threads of a threadgroup.
    pub fn threads(&self) -> usize {
        32 * SIMDGROUPS
    }

    /// Returns the number of bytes of threadgroup memory.
    pub fn shared_bytes(&self) -> usize {
        self.answers_at() + 4 * SIMDGROUPS
    }

    /// Returns the number of elements from row to row of a tile with some columns.
    fn pitch(&self, columns: usize) -> usize {
        columns + ROW_PADDING / self.element_bytes
    }

    /// Returns the place of the intervals behind the tile: two numbers for each simdgroup.
    fn intervals_at(&self) -> usize {
        self.keys * self.pitch(self.columns.of_keys.max(self.columns.of_values)) * self.element_bytes
    }

    /// Returns the place of an answer of each simdgroup.
    fn answers_at(&self) -> usize {
        self.intervals_at() + 8 * SIMDGROUPS
    }

    /// Returns the number of keys of a tile.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Returns the place of the decode kernel's sums: a maximum and a sum for each row of each simdgroup.
    fn decode_sums_at(&self) -> usize {
        self.shared_bytes()
    }

    /// Returns the number of bytes of threadgroup memory of the decode kernel.
    pub fn decode_shared_bytes(&self) -> usize {
        self.decode_sums_at() + SIMDGROUPS * DECODE_ROWS * 8
    }

    /// Returns the macros of the tile.
    pub fn defines(&self) -> Vec<Define> {
        let define = |name, value: usize| Define { name, value: value as i64 };
        vec![
            define("FORWARD_WARPS", SIMDGROUPS),
            define("FORWARD_QUERIES", self.queries()),
            define("FORWARD_KEYS", self.keys),
            define("FORWARD_QUERIES_IN_REGISTERS", (self.columns.of_keys <= MOST_REGISTER_COLUMNS).into()),
            define("FORWARD_KEY_PITCH", self.pitch(self.columns.of_keys)),
            define("FORWARD_VALUE_PITCH", self.pitch(self.columns.of_values)),
            define("FORWARD_TILE_AT", 0),
            define("FORWARD_INTERVALS_AT", self.intervals_at()),
            define("FORWARD_ANSWERS_AT", self.answers_at()),
            define("FORWARD_SHARED_BYTES", self.shared_bytes()),
            define("DECODE_SUMS_AT", self.decode_sums_at()),
            define("DECODE_SHARED_BYTES", self.decode_shared_bytes()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metal_tiles_fit_threadgroup_memory_for_every_head_dimension_and_type() {
        for element_bytes in [2, 4] {
            for of_keys in (16..=256).step_by(16) {
                for of_values in (16..=256).step_by(16) {
                    let tile = MetalTile::of(TileColumns { of_keys, of_values }, element_bytes);
                    assert!(tile.decode_shared_bytes() <= MOST_SHARED_BYTES, "{tile:?}");
                    assert!(4 * DECODE_ROWS * of_values <= tile.intervals_at(), "{tile:?}");
                    assert!(tile.shared_bytes().is_multiple_of(16), "{tile:?}");
                }
            }
        }
        let keys = |of_keys, element_bytes| MetalTile::of(TileColumns { of_keys, of_values: 16 }, element_bytes).keys;
        assert_eq!([keys(128, 4), keys(256, 2), keys(256, 4)], [32, 32, 16]);
    }
}
