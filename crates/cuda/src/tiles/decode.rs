//! Tiles of the decode kernel.

use super::{SMALL_BLOCK_THREADS, SMALL_BLOCK_WARPS, no_tile};
use crate::program::{Define, KernelShape, Program};
use crate::specialization::Specialization;
use crate::unsupported::Unsupported;

/// A tile of the decode kernel. Warps share no tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DecodeTile {
    pub warps: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// Tiles of a warp in shared memory.
    pub stages: usize,
}

/// The pairs of a query and a head that a block works on.
const ROWS: usize = 16;

/// Tiles of keys and values of 8 bits in the order in which they are tried, before the others: twice the keys, which
/// take fewer instructions each. Their instructions take longer than their bytes, so that more warps save more time
/// than more tiles of each warp.
const CODES: [DecodeTile; 2] =
    [DecodeTile { warps: 8, keys: 32, stages: 2 }, DecodeTile { warps: 4, keys: 32, stages: 3 }];

/// Tiles in the order in which they are tried.
const TILES: [DecodeTile; 4] = [
    DecodeTile { warps: 4, keys: 16, stages: 3 },
    DecodeTile { warps: 4, keys: 16, stages: 2 },
    DecodeTile { warps: 2, keys: 16, stages: 2 },
    DecodeTile { warps: 1, keys: 16, stages: 2 },
];

impl DecodeTile {
    /// Returns the fastest tile that fits a device.
    ///
    /// # Errors
    /// If none does.
    pub fn choose(specialization: &Specialization, shared_bytes: usize) -> Result<Self, Unsupported> {
        let fits = |tile: &Self| tile.shared_bytes(specialization) <= shared_bytes;
        Self::rows(specialization).into_iter().find(fits).ok_or_else(|| no_tile("decode", specialization, shared_bytes))
    }

    /// Returns the tiles in the order in which they are tried.
    pub(super) fn rows(specialization: &Specialization) -> Vec<Self> {
        let codes: &[Self] = if specialization.key_codes { &CODES } else { &[] };
        [codes, &TILES].concat()
    }

    /// Returns the blocks of a key head for a number of queries that share it.
    pub fn row_blocks(queries: usize) -> usize {
        queries.div_ceil(ROWS)
    }

    /// Returns the columns of the output in registers. Codes are read four columns at a time.
    fn output_columns(specialization: &Specialization) -> usize {
        let columns = specialization.value_columns();
        if specialization.key_codes { columns.next_multiple_of(32) } else { columns }
    }

    /// Returns the shared memory of a block: queries, then tiles, in whose place the results of the warps come.
    fn shared_bytes(&self, specialization: &Specialization) -> usize {
        let output_columns = Self::output_columns(specialization);
        let tile = if specialization.key_codes {
            self.keys * (specialization.head_columns() + 16 + output_columns + 16 + 8)
        } else {
            self.keys * (specialization.head_pitch() + specialization.value_pitch())
        };
        let tiles = self.warps * self.stages * tile;
        let results = self.warps * ROWS * (output_columns + 2) * size_of::<f32>();
        ROWS * specialization.head_pitch() + tiles.max(results)
    }

    /// Returns the decode kernel.
    pub fn kernel(&self, specialization: &Specialization) -> KernelShape {
        KernelShape {
            name: "attention_decode",
            threads: self.warps * 32,
            shared_bytes: self.shared_bytes(specialization),
        }
    }

    /// Returns the kernel that combines parts.
    pub fn combine_kernel() -> KernelShape {
        KernelShape { name: "attention_combine", threads: SMALL_BLOCK_THREADS, shared_bytes: 0 }
    }

    /// Returns the blocks of the kernel that combines parts: a warp for each row of the output.
    pub fn combine_blocks(rows: usize) -> usize {
        rows.div_ceil(SMALL_BLOCK_WARPS)
    }

    /// Returns the program of the decode kernel and of the kernel that combines parts.
    pub fn program(&self, specialization: &Specialization) -> Program {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let mut defines = specialization.defines();
        defines.extend([
            define("KERNEL_SET", 2),
            define("DECODE_WARPS", self.warps),
            define("DECODE_KEYS", self.keys),
            define("DECODE_STAGES", self.stages),
        ]);
        super::program(defines)
    }
}
