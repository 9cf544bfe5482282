//! Tiles of the backward kernels.

use super::{KernelSet, SMALL_BLOCK_WARPS, Width, no_tile};
use crate::arguments::SMALL_BLOCK_THREADS;
use crate::element::ElementType;
use crate::memory_layout::MemoryLayout;
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
    /// The number of rows of 16 keys that a warp computes.
    pub row_tiles: usize,
    /// The number of warps that share their keys.
    pub warps_per_keys: usize,
    /// The number of queries of a tile.
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
    /// The number of rows of 16 queries that a warp computes.
    pub row_tiles: usize,
    /// The number of keys of a tile.
    pub keys: usize,
}

/// The shared memory of a kernel that sums over the warps of a block.
const SUM_BYTES: usize = SMALL_BLOCK_WARPS * size_of::<f32>();

/// Tiles in 16 bits, the fastest first.
const NARROW: &[BackwardTile] = &[
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 2, warps_per_keys: 1, queries: 48 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 2, keys: 64 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 1, queries: 32 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 1, keys: 32 }),
    },
];
const MIDDLE: &[BackwardTile] = &[
    BackwardTile {
        keys: KeyTile { warps: 8, row_tiles: 2, warps_per_keys: 2, queries: 64 },
        queries: QueryGradient::Fused { row_warps: 2 },
    },
    // The warps of columns divide the 6 matrices of a head dimension of 96.
    BackwardTile {
        keys: KeyTile { warps: 8, row_tiles: 2, warps_per_keys: 2, queries: 64 },
        queries: QueryGradient::Fused { row_warps: 4 },
    },
    BackwardTile {
        keys: KeyTile { warps: 8, row_tiles: 2, warps_per_keys: 2, queries: 32 },
        queries: QueryGradient::Fused { row_warps: 2 },
    },
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 2, warps_per_keys: 2, queries: 32 },
        queries: QueryGradient::Fused { row_warps: 2 },
    },
    // An odd number of matrices, as in a head dimension of 80, cannot be shared.
    BackwardTile {
        keys: KeyTile { warps: 8, row_tiles: 1, warps_per_keys: 1, queries: 64 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 2, keys: 32 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 1, queries: 32 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 1, keys: 32 }),
    },
];
const WIDE: &[BackwardTile] = &[
    BackwardTile {
        keys: KeyTile { warps: 8, row_tiles: 1, warps_per_keys: 2, queries: 32 },
        queries: QueryGradient::Fused { row_warps: 2 },
    },
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 2, queries: 32 },
        queries: QueryGradient::Fused { row_warps: 2 },
    },
    BackwardTile {
        keys: KeyTile { warps: 2, row_tiles: 1, warps_per_keys: 2, queries: 32 },
        queries: QueryGradient::Fused { row_warps: 2 },
    },
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 1, keys: 16 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 2, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 2, row_tiles: 1, keys: 16 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 1, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 1, row_tiles: 1, keys: 16 }),
    },
];

/// Tiles in f32.
const F32: &[BackwardTile] = &[
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Fused { row_warps: 1 },
    },
    BackwardTile {
        keys: KeyTile { warps: 2, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Fused { row_warps: 1 },
    },
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 1, keys: 16 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 2, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 2, row_tiles: 1, keys: 16 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 1, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 1, row_tiles: 1, keys: 16 }),
    },
];
const F32_WIDE: &[BackwardTile] = &[
    // The fused kernel spills five times the bytes of registers.
    BackwardTile {
        keys: KeyTile { warps: 4, row_tiles: 1, warps_per_keys: 2, queries: 32 },
        queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 1, keys: 16 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 2, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Fused { row_warps: 1 },
    },
    BackwardTile {
        keys: KeyTile { warps: 2, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 2, row_tiles: 1, keys: 16 }),
    },
    BackwardTile {
        keys: KeyTile { warps: 1, row_tiles: 1, warps_per_keys: 1, queries: 16 },
        queries: QueryGradient::Separate(QueryTile { warps: 1, row_tiles: 1, keys: 16 }),
    },
];

impl BackwardTile {
    /// Returns the fastest tile that fits a device.
    ///
    /// # Errors
    /// If none does.
    pub fn choose(specialization: &Specialization, shared_bytes: usize) -> Result<Self, Unsupported> {
        let fits = |tile: &Self| {
            let largest = tile.key_layout(specialization).size().max(tile.query_shared_bytes(specialization));
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
            (ElementType::F32, Width::Narrow | Width::Middle) => F32,
            (ElementType::F32, Width::Wide) => F32_WIDE,
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
            (ElementType::F32, Width::Middle) => Some(BackwardTile {
                keys: KeyTile { warps: 8, row_tiles: 1, warps_per_keys: 2, queries: 32 },
                queries: QueryGradient::Fused { row_warps: 1 },
            }),
            (ElementType::F32, _) | (_, Width::Middle | Width::Wide) => None,
            (_, Width::Narrow) => {
                // 0.97 of the time of 48 queries. With score modifiers, kernels would spill more registers.
                let plain = Specialization { alignment, ..Specialization::plain(element, head_dim, value_dim) };
                (*specialization == plain).then_some(BackwardTile {
                    keys: KeyTile { warps: 4, row_tiles: 2, warps_per_keys: 1, queries: 64 },
                    queries: QueryGradient::Separate(QueryTile { warps: 4, row_tiles: 2, keys: 64 }),
                })
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

    /// Returns the number of keys of a block.
    pub fn key_block(&self) -> usize {
        self.keys.warps / self.keys.warps_per_keys * self.keys.row_tiles * 16
    }

    /// Returns the shared memory of a block of the kernel that finds the intervals of tiles.
    fn tiles_layout(&self) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        layout.add("TILES_INTERVALS_AT", self.keys.queries * 8);
        layout.add("TILES_WARP_INTERVALS_AT", SMALL_BLOCK_WARPS * 16);
        layout
    }

    /// Returns the number of bytes from row to row of scores or of their gradients in shared memory.
    fn score_pitch(&self, specialization: &Specialization) -> usize {
        self.keys.queries * specialization.element.bytes() + specialization.row_padding()
    }

    /// Returns whether a block has the gradients of its scores in shared memory.
    fn shares_score_gradients(&self, specialization: &Specialization) -> bool {
        self.is_fused() || self.keys.warps_per_keys > 1 || specialization.gradients.relative_bias
    }

    /// Returns whether a block has the gradients of relative biases besides: the gradients of scores, where products
    /// have other gradients.
    fn shares_bias_gradients(specialization: &Specialization) -> bool {
        specialization.gradients.relative_bias && specialization.has_product_derivative()
    }

    /// Returns the number of bytes of the statistics, the deltas and the intervals of a tile of queries.
    fn statistics_bytes(&self, specialization: &Specialization) -> usize {
        self.keys.queries * if specialization.has_natural_scores() { 20 } else { 16 }
    }

    /// Returns the shared memory of a block of the kernel of keys.
    fn key_layout(&self, specialization: &Specialization) -> MemoryLayout {
        let KeyTile { warps_per_keys, queries, .. } = self.keys;
        let (head_pitch, value_pitch) = (specialization.head_pitch(), specialization.value_pitch());
        let scores = self.key_block() * self.score_pitch(specialization);
        let score_gradients = if self.shares_score_gradients(specialization) { scores } else { 0 };
        let bias_gradients = if Self::shares_bias_gradients(specialization) { scores } else { 0 };
        let mut layout = MemoryLayout::default();
        layout.add("KEY_KEYS_AT", self.key_block() * head_pitch);
        layout.add("KEY_VALUES_AT", self.key_block() * value_pitch);
        // Two tiles of queries, of gradients of the output, and of some numbers for each of these queries.
        layout.add("KEY_QUERIES_AT", 2 * queries * head_pitch);
        layout.add("KEY_GRADIENTS_AT", 2 * queries * value_pitch);
        layout.add("KEY_STATISTICS_AT", 2 * self.statistics_bytes(specialization));
        layout.add("KEY_SCORE_GRADIENTS_AT", score_gradients);
        layout.add("KEY_WEIGHTS_AT", if warps_per_keys > 1 { scores } else { 0 });
        layout.add("KEY_BIAS_GRADIENTS_AT", bias_gradients);
        layout
    }

    /// Returns the shared memory of a block of the kernel of queries; 0 if there is none.
    fn query_shared_bytes(&self, specialization: &Specialization) -> usize {
        match self.queries {
            QueryGradient::Fused { .. } => 0,
            QueryGradient::Separate(tile) => tile.shared_layout(specialization).size(),
        }
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
            tiles: small("attention_backward_tiles", self.tiles_layout().size()),
            query_gradients,
            key_gradients: KernelShape {
                name: "attention_backward_keys",
                threads: key_threads,
                shared_bytes: self.key_layout(specialization).size(),
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
            KernelSet::define(&[KernelSet::Backward]),
            define("KEY_WARPS", warps),
            define("KEY_ROW_TILES", row_tiles),
            define("WARPS_PER_KEYS", warps_per_keys),
            define("BACKWARD_QUERIES", queries),
            define("FUSED_BACKWARD", self.is_fused().into()),
            define("KEY_BLOCK", self.key_block()),
            define("KEY_STATISTICS_BYTES", self.statistics_bytes(specialization)),
            define("SCORE_PITCH", self.score_pitch(specialization)),
            define("SHARES_SCORE_GRADIENTS", self.shares_score_gradients(specialization).into()),
            define("SHARES_BIAS_GRADIENTS", Self::shares_bias_gradients(specialization).into()),
        ]);
        defines.extend(self.tiles_layout().defines("TILES_SHARED_BYTES"));
        defines.extend(self.key_layout(specialization).defines("KEY_SHARED_BYTES"));
        match self.queries {
            QueryGradient::Fused { row_warps } => defines.push(define("FUSED_ROW_WARPS", row_warps)),
            QueryGradient::Separate(tile) => {
                defines.extend([
                    define("QUERY_WARPS", tile.warps),
                    define("QUERY_ROW_TILES", tile.row_tiles),
                    define("QUERY_KEYS", tile.keys),
                    define("QUERY_BLOCK", tile.block()),
                ]);
                defines.extend(tile.shared_layout(specialization).defines("QUERY_SHARED_BYTES"));
            }
        }
        super::program(defines)
    }
}

impl QueryTile {
    /// Returns the number of queries of a block.
    pub fn block(&self) -> usize {
        self.warps * self.row_tiles * 16
    }

    /// Returns the shared memory of a block.
    fn shared_layout(&self, specialization: &Specialization) -> MemoryLayout {
        let (head_pitch, value_pitch) = (specialization.head_pitch(), specialization.value_pitch());
        let mut layout = MemoryLayout::default();
        layout.add("QUERY_QUERIES_AT", self.block() * head_pitch);
        layout.add("QUERY_GRADIENTS_AT", self.block() * value_pitch);
        layout.add("QUERY_KEYS_AT", 2 * self.keys * head_pitch);
        layout.add("QUERY_VALUES_AT", 2 * self.keys * value_pitch);
        layout.add("QUERY_INTERVALS_AT", self.block() * 8);
        layout.add("QUERY_WARP_INTERVALS_AT", self.warps * 16);
        layout
    }
}
