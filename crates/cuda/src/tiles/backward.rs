//! Tiles of the backward kernels.

use super::{SMALL_BLOCK_THREADS, SMALL_BLOCK_WARPS, Width, no_tile};
use crate::element::Element;
use crate::program::{Define, KernelShape, Program};
use crate::specialization::Specialization;
use crate::unsupported::Unsupported;

/// A tile of the kernel of keys, and how the gradients of the queries are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BackwardTile {
    pub keys: KeyTile,
    pub queries: QueryGradient,
}

/// The kernels of a backward pass.
pub(crate) struct BackwardKernels {
    pub delta: KernelShape,
    pub sinks: KernelShape,
    pub tiles: KernelShape,
    /// The kernel of query gradients: one that computes them, or, after the fused kernel, one that converts its sums.
    pub query_gradients: KernelShape,
    pub key_gradients: KernelShape,
    pub bias: KernelShape,
    pub slopes: KernelShape,
    pub relative_bias: KernelShape,
}

/// A tile of the kernel that makes the gradients of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyTile {
    pub warps: usize,
    /// Rows of 16 keys of a warp.
    pub row_tiles: usize,
    /// Warps that share their keys.
    pub warps_per_keys: usize,
    /// Queries of a tile.
    pub queries: usize,
}

/// The kernel that makes the gradients of the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum QueryGradient {
    /// The kernel of keys, of whose warps `row_warps` divide a tile of queries by rows.
    Fused { row_warps: usize },
    /// A kernel for them alone.
    Separate(QueryTile),
}

/// A tile of the kernel that makes the gradients of queries alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct QueryTile {
    pub warps: usize,
    /// Rows of 16 queries of a warp.
    pub row_tiles: usize,
    /// Keys of a tile.
    pub keys: usize,
}

/// The shared memory of a kernel that sums over the warps of a block.
const SUM_BYTES: usize = SMALL_BLOCK_WARPS * size_of::<f32>();

const fn key_tile(warps: usize, row_tiles: usize, warps_per_keys: usize, queries: usize) -> KeyTile {
    KeyTile { warps, row_tiles, warps_per_keys, queries }
}

const fn fused(keys: KeyTile, row_warps: usize) -> BackwardTile {
    BackwardTile { keys, queries: QueryGradient::Fused { row_warps } }
}

const fn separate(keys: KeyTile, warps: usize, row_tiles: usize, query_keys: usize) -> BackwardTile {
    BackwardTile { keys, queries: QueryGradient::Separate(QueryTile { warps, row_tiles, keys: query_keys }) }
}

/// Tiles in 16 bits, the fastest first.
const NARROW: &[BackwardTile] = &[separate(key_tile(4, 2, 1, 48), 4, 2, 64), separate(key_tile(4, 1, 1, 32), 4, 1, 32)];
const MIDDLE: &[BackwardTile] = &[
    fused(key_tile(8, 2, 2, 64), 2),
    // The warps of columns divide the 6 matrices of a head dimension of 96.
    fused(key_tile(8, 2, 2, 64), 4),
    fused(key_tile(8, 2, 2, 32), 2),
    fused(key_tile(4, 2, 2, 32), 2),
    // An odd number of matrices, as in a head dimension of 80, cannot be shared.
    separate(key_tile(8, 1, 1, 64), 4, 2, 32),
    separate(key_tile(4, 1, 1, 32), 4, 1, 32),
];
const WIDE: &[BackwardTile] = &[
    fused(key_tile(8, 1, 2, 32), 2),
    fused(key_tile(4, 1, 2, 32), 2),
    fused(key_tile(2, 1, 2, 32), 2),
    separate(key_tile(4, 1, 1, 16), 4, 1, 16),
    separate(key_tile(2, 1, 1, 16), 2, 1, 16),
    separate(key_tile(1, 1, 1, 16), 1, 1, 16),
];

/// Tiles in f32.
const F32: &[BackwardTile] = &[
    fused(key_tile(4, 1, 1, 16), 1),
    fused(key_tile(2, 1, 1, 16), 1),
    separate(key_tile(4, 1, 1, 16), 4, 1, 16),
    separate(key_tile(2, 1, 1, 16), 2, 1, 16),
    separate(key_tile(1, 1, 1, 16), 1, 1, 16),
];
const F32_WIDE: &[BackwardTile] = &[
    // The fused kernel spills five times the bytes of registers.
    separate(key_tile(4, 1, 2, 32), 4, 1, 16),
    fused(key_tile(2, 1, 1, 16), 1),
    separate(key_tile(2, 1, 1, 16), 2, 1, 16),
    separate(key_tile(1, 1, 1, 16), 1, 1, 16),
];

impl BackwardTile {
    /// Returns the fastest tile that fits a device.
    ///
    /// # Errors
    /// If none does.
    pub fn choose(specialization: &Specialization, shared_bytes: usize) -> Result<Self, Unsupported> {
        let fits = |tile: &Self| {
            let largest = tile.key_shared_bytes(specialization).max(tile.query_shared_bytes(specialization));
            tile.divides(specialization) && largest <= shared_bytes
        };
        Self::rows(specialization)
            .into_iter()
            .find(fits)
            .ok_or_else(|| no_tile("backward", specialization, shared_bytes))
    }

    /// Returns the tiles in the order in which they are tried.
    pub(super) fn rows(specialization: &Specialization) -> Vec<Self> {
        let tiles = match (specialization.element, Width::of(specialization)) {
            (Element::F32, Width::Narrow | Width::Middle) => F32,
            (Element::F32, Width::Wide) => F32_WIDE,
            (_, Width::Narrow) => NARROW,
            (_, Width::Middle) => MIDDLE,
            (_, Width::Wide) => WIDE,
        };
        Self::fastest(specialization).into_iter().chain(tiles.iter().copied()).collect()
    }

    /// Returns the tile that is tried first, if there is one. The shares of the time were measured on an H200.
    fn fastest(specialization: &Specialization) -> Option<Self> {
        let Specialization { element, head_dim, value_dim, alignment, .. } = *specialization;
        match (element, Width::of(specialization)) {
            // 0.71 of the time of 4 warps without shared keys.
            (Element::F32, Width::Middle) => Some(fused(key_tile(8, 1, 2, 32), 1)),
            (Element::F32, _) | (_, Width::Middle | Width::Wide) => None,
            (_, Width::Narrow) => {
                // 0.97 of the time of 48 queries. With score modifiers, kernels would spill more registers.
                let plain = Specialization { alignment, ..Specialization::plain(element, head_dim, value_dim) };
                (*specialization == plain).then_some(separate(key_tile(4, 2, 1, 64), 4, 2, 64))
            }
        }
    }

    /// Returns whether the warps divide the columns.
    pub(super) fn divides(&self, specialization: &Specialization) -> bool {
        let KeyTile { warps, warps_per_keys, queries, .. } = self.keys;
        let (head_columns, value_columns) = (specialization.head_columns(), specialization.value_columns());
        let shared_columns = 16 * warps_per_keys;
        let groups = warps.is_multiple_of(warps_per_keys) && queries.is_multiple_of(shared_columns);
        let columns = head_columns.is_multiple_of(shared_columns) && value_columns.is_multiple_of(shared_columns);
        let fused = match self.queries {
            QueryGradient::Separate(_) => true,
            QueryGradient::Fused { row_warps } => {
                (queries / 16).is_multiple_of(row_warps)
                    && warps.is_multiple_of(row_warps)
                    && (head_columns / 16).is_multiple_of(warps / row_warps)
            }
        };
        groups && columns && fused
    }

    /// Returns whether the kernel of keys makes the gradients of the queries.
    pub fn is_fused(&self) -> bool {
        matches!(self.queries, QueryGradient::Fused { .. })
    }

    /// Returns the keys of a block.
    pub fn key_block(&self) -> usize {
        self.keys.warps / self.keys.warps_per_keys * self.keys.row_tiles * 16
    }

    /// Returns the shared memory of a block of the kernel that finds the intervals of tiles.
    fn tiles_shared_bytes(&self) -> usize {
        self.keys.queries * 8 + SMALL_BLOCK_THREADS / 2
    }

    /// Returns the shared memory of a block of the kernel of keys.
    fn key_shared_bytes(&self, specialization: &Specialization) -> usize {
        let KeyTile { warps_per_keys, queries, .. } = self.keys;
        let pitches = specialization.head_pitch() + specialization.value_pitch();
        let keys = self.key_block();
        let scores = keys * (queries * specialization.element.bytes() + specialization.row_padding());
        let gradients = specialization.gradients;
        // Keys and values, two tiles of queries and of gradients of the output, and some numbers for each of these
        // queries.
        let statistics = if specialization.has_natural_scores() { 20 } else { 16 };
        let mut bytes = keys * pitches + 2 * queries * pitches + 2 * queries * statistics;
        if self.is_fused() || warps_per_keys > 1 || gradients.relative_bias {
            bytes += scores;
        }
        if warps_per_keys > 1 {
            bytes += scores;
        }
        if gradients.relative_bias && specialization.softcap {
            bytes += scores;
        }
        bytes
    }

    /// Returns the shared memory of a block of the kernel of queries; 0 if there is none.
    fn query_shared_bytes(&self, specialization: &Specialization) -> usize {
        let QueryGradient::Separate(tile) = self.queries else { return 0 };
        let pitches = specialization.head_pitch() + specialization.value_pitch();
        tile.block() * pitches + 2 * tile.keys * pitches + tile.block() * 8 + tile.warps * 16
    }

    /// Returns the kernels of a backward pass.
    pub fn kernels(&self, specialization: &Specialization) -> BackwardKernels {
        let small = |name, shared_bytes| KernelShape { name, threads: SMALL_BLOCK_THREADS, shared_bytes };
        let key_threads = self.keys.warps * 32;
        let query_gradients = match self.queries {
            QueryGradient::Fused { .. } => {
                KernelShape { name: "attention_backward_finish", threads: key_threads, shared_bytes: 0 }
            }
            QueryGradient::Separate(tile) => KernelShape {
                name: "attention_backward_queries",
                threads: tile.warps * 32,
                shared_bytes: self.query_shared_bytes(specialization),
            },
        };
        BackwardKernels {
            delta: small("attention_backward_delta", 0),
            sinks: small("attention_backward_sinks", SUM_BYTES),
            tiles: small("attention_backward_tiles", self.tiles_shared_bytes()),
            query_gradients,
            key_gradients: KernelShape {
                name: "attention_backward_keys",
                threads: key_threads,
                shared_bytes: self.key_shared_bytes(specialization),
            },
            bias: small("attention_backward_bias", SUM_BYTES),
            slopes: small("attention_backward_slopes", SUM_BYTES),
            relative_bias: small("attention_backward_relative_bias", 0),
        }
    }

    /// Returns the program of all kernels of a backward pass.
    pub fn program(&self, specialization: &Specialization) -> Program {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let KeyTile { warps, row_tiles, warps_per_keys, queries } = self.keys;
        let mut defines = specialization.defines();
        defines.extend([
            define("KERNEL_SET", 4),
            define("KEY_WARPS", warps),
            define("KEY_ROW_TILES", row_tiles),
            define("WARPS_PER_KEYS", warps_per_keys),
            define("BACKWARD_QUERIES", queries),
            define("FUSED_BACKWARD", self.is_fused().into()),
        ]);
        match self.queries {
            QueryGradient::Fused { row_warps } => defines.push(define("FUSED_ROW_WARPS", row_warps)),
            QueryGradient::Separate(tile) => defines.extend([
                define("QUERY_WARPS", tile.warps),
                define("QUERY_ROW_TILES", tile.row_tiles),
                define("QUERY_KEYS", tile.keys),
            ]),
        }
        super::program(defines)
    }
}

impl QueryTile {
    /// Returns the queries of a block.
    pub fn block(&self) -> usize {
        self.warps * self.row_tiles * 16
    }
}
