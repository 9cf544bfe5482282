//! Tiles of the decode kernel.

use super::{KernelSet, SMALL_BLOCK_WARPS, no_tile};
use crate::arguments::{DECODE_ROWS, SMALL_BLOCK_THREADS};
use crate::memory_layout::MemoryLayout;
use crate::program::{Define, KernelShape, Program};
use crate::specialization::Specialization;
use crate::unsupported::Unsupported;

/// A tile of the decode kernel. Warps share no tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DecodeTile {
    pub warps: usize,
    /// The number of keys of a tile.
    pub keys: usize,
    /// The number of tiles that a warp has in shared memory.
    pub stages: usize,
}

/// The bytes from row to row in shared memory.
struct Pitches {
    keys: usize,
    values: usize,
}

/// Tiles of codes of keys and values in the order in which they are tried, before the others: twice the keys, which
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
        let codes: &[Self] = if specialization.key_codes.is_some() { &CODES } else { &[] };
        [codes, &TILES].concat()
    }

    /// Returns the blocks of a key head for a number of queries that share it.
    pub fn row_blocks(queries: usize) -> usize {
        queries.div_ceil(DECODE_ROWS)
    }

    /// Returns the number of columns of the output in registers. Codes are read four bytes of each of 8 lanes at a
    /// time.
    fn output_columns(specialization: &Specialization) -> usize {
        let columns = specialization.value_columns();
        specialization.key_codes.map_or(columns, |format| columns.next_multiple_of(format.numbers(32)))
    }

    /// Returns the bytes from row to row of keys and of values in shared memory.
    fn pitches(specialization: &Specialization) -> Pitches {
        if specialization.key_codes.is_none() {
            return Pitches { keys: specialization.head_pitch(), values: specialization.value_pitch() };
        }
        Pitches {
            keys: specialization.code_bytes(specialization.head_columns()) + 16,
            values: specialization.code_bytes(Self::output_columns(specialization)) + 16,
        }
    }

    /// Returns the parts of a tile of a warp.
    fn tile_layout(&self, specialization: &Specialization) -> MemoryLayout {
        let pitches = Self::pitches(specialization);
        let mut layout = MemoryLayout::default();
        layout.add("DECODE_TILE_KEYS_AT", self.keys * pitches.keys);
        layout.add("DECODE_TILE_VALUES_AT", self.keys * pitches.values);
        // The scales of keys and of values.
        let scales = specialization.key_scales() + specialization.value_scales();
        layout.add("DECODE_TILE_SCALES_AT", self.keys * scales * size_of::<f32>());
        layout
    }

    /// Returns the shared memory of a block while it reads keys: the queries, and the tiles of each warp.
    fn reading_layout(&self, specialization: &Specialization) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        layout.add("DECODE_QUERIES_AT", DECODE_ROWS * specialization.head_pitch());
        layout.add("DECODE_RING_AT", self.warps * self.stages * self.tile_layout(specialization).size());
        layout
    }

    /// Returns the shared memory of a block with the results of the warps instead of their tiles: rows of the
    /// output, and of each row its maximum and its sum.
    fn result_layout(&self, specialization: &Specialization) -> MemoryLayout {
        let rows = self.warps * DECODE_ROWS;
        let mut layout = MemoryLayout::default();
        layout.add("DECODE_QUERIES_AT", DECODE_ROWS * specialization.head_pitch());
        layout.add("DECODE_OUTPUTS_AT", rows * Self::output_columns(specialization) * size_of::<f32>());
        layout.add("DECODE_STATISTICS_AT", rows * 2 * size_of::<f32>());
        layout
    }

    /// Returns the number of bytes of the shared memory of a block.
    fn shared_bytes(&self, specialization: &Specialization) -> usize {
        self.reading_layout(specialization).size().max(self.result_layout(specialization).size())
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

    /// Returns the number of blocks of the kernel that combines parts: a warp for each row of the output.
    pub fn combine_blocks(rows: usize) -> usize {
        rows.div_ceil(SMALL_BLOCK_WARPS)
    }

    /// Returns the program of the decode kernel and of the kernel that combines parts.
    pub fn program(&self, specialization: &Specialization) -> Program {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let pitches = Self::pitches(specialization);
        let mut defines = specialization.defines();
        defines.extend([
            KernelSet::define(&[KernelSet::Decode]),
            define("DECODE_WARPS", self.warps),
            define("DECODE_KEYS", self.keys),
            define("DECODE_STAGES", self.stages),
            define("DECODE_OUTPUT_COLUMNS", Self::output_columns(specialization)),
            define("DECODE_KEY_PITCH", pitches.keys),
            define("DECODE_VALUE_PITCH", pitches.values),
            define("DECODE_SHARED_BYTES", self.shared_bytes(specialization)),
        ]);
        defines.extend(self.tile_layout(specialization).defines("DECODE_TILE_BYTES"));
        defines.extend(self.reading_layout(specialization).defines("DECODE_READING_BYTES"));
        defines.extend(self.result_layout(specialization).defines("DECODE_RESULT_BYTES"));
        super::program(defines)
    }
}
