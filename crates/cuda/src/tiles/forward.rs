//! Tiles of the forward kernel.

use super::{KernelSet, Width, no_tile};
use crate::element::ElementType;
use crate::memory_layout::MemoryLayout;
use crate::program::{Define, KernelShape, Program};
use crate::specialization::Specialization;
use crate::unsupported::Unsupported;

/// A tile of the forward kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ForwardTile {
    pub warps: usize,
    /// The number of rows of 16 queries that a warp computes.
    pub row_tiles: usize,
    /// The number of keys of a tile.
    pub keys: usize,
    /// The number of tiles of keys, and of values, in shared memory.
    pub stages: usize,
    pub queries_in_registers: bool,
}

/// The length of a call, on which the fastest tile depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForwardLength {
    /// Every query attends to thousands of keys, for which larger blocks of queries are faster.
    Long,
    Other,
}

impl ForwardLength {
    /// Returns the length of a call.
    pub fn of(longest_keys: usize, is_causal: bool) -> Self {
        if longest_keys >= 2048 && !is_causal { Self::Long } else { Self::Other }
    }
}

/// The tile for narrow heads without a bias or a boolean mask.
const NARROW: ForwardTile = ForwardTile { warps: 4, row_tiles: 2, keys: 48, stages: 2, queries_in_registers: true };

/// Tiles in the order in which they are tried if the faster ones do not fit.
const SMALLER: [ForwardTile; 6] = [
    ForwardTile { warps: 8, row_tiles: 1, keys: 64, stages: 1, queries_in_registers: false },
    ForwardTile { warps: 4, row_tiles: 1, keys: 48, stages: 1, queries_in_registers: false },
    ForwardTile { warps: 4, row_tiles: 1, keys: 32, stages: 1, queries_in_registers: false },
    ForwardTile { warps: 4, row_tiles: 1, keys: 16, stages: 1, queries_in_registers: false },
    ForwardTile { warps: 2, row_tiles: 1, keys: 16, stages: 1, queries_in_registers: false },
    ForwardTile { warps: 1, row_tiles: 1, keys: 16, stages: 1, queries_in_registers: false },
];

impl ForwardTile {
    /// Returns the fastest tile that fits a device.
    ///
    /// # Errors
    /// If none does.
    pub fn choose(
        specialization: &Specialization,
        length: ForwardLength,
        shared_bytes: usize,
    ) -> Result<Self, Unsupported> {
        let fits = |tile: &Self| tile.shared_bytes(specialization) <= shared_bytes;
        let found = Self::candidates(specialization, length).into_iter().find(fits);
        found.ok_or_else(|| no_tile("forward", specialization, shared_bytes))
    }

    /// Returns the tiles in the order in which they are tried.
    pub(super) fn candidates(specialization: &Specialization, length: ForwardLength) -> Vec<Self> {
        let mut tiles = Self::fastest(specialization, length);
        tiles.extend(Self::smaller(specialization));
        tiles
    }

    /// Returns the tiles that were timed for a call, the fastest first.
    fn fastest(specialization: &Specialization, length: ForwardLength) -> Vec<Self> {
        if specialization.element == ElementType::F32 {
            return match Width::of(specialization) {
                Width::Narrow => {
                    vec![ForwardTile { warps: 4, row_tiles: 1, keys: 32, stages: 1, queries_in_registers: false }]
                }
                Width::Middle => vec![
                    ForwardTile { warps: 8, row_tiles: 1, keys: 32, stages: 1, queries_in_registers: false },
                    ForwardTile { warps: 4, row_tiles: 1, keys: 32, stages: 1, queries_in_registers: false },
                ],
                // With 32 keys, the registers do not suffice.
                Width::Wide => {
                    vec![ForwardTile { warps: 4, row_tiles: 1, keys: 16, stages: 1, queries_in_registers: false }]
                }
            };
        }
        let has_bias = specialization.bias.is_some();
        let reads_scores = has_bias || specialization.boolean_mask;
        match Width::of(specialization) {
            // The products of each scale of a row take registers besides the scores.
            Width::Wide if specialization.key_scales() > 1 => {
                vec![ForwardTile { warps: 4, row_tiles: 1, keys: 32, stages: 1, queries_in_registers: false }]
            }
            _ if specialization.key_scales() > 1 => Vec::new(),
            Width::Narrow if specialization.key_codes.is_some() => {
                vec![ForwardTile { warps: 4, row_tiles: 2, keys: 64, stages: 1, queries_in_registers: false }]
            }
            Width::Narrow if reads_scores => {
                vec![ForwardTile { warps: 4, row_tiles: 2, keys: 64, stages: 2, queries_in_registers: false }]
            }
            // With the queries and the relative bias, a kernel would spill registers.
            Width::Narrow if specialization.relative_bias => {
                vec![ForwardTile { queries_in_registers: false, ..NARROW }]
            }
            Width::Narrow => vec![NARROW],
            Width::Middle if has_bias && specialization.boolean_mask => {
                vec![ForwardTile { warps: 4, row_tiles: 2, keys: 32, stages: 1, queries_in_registers: false }]
            }
            Width::Middle if reads_scores => vec![
                ForwardTile { warps: 4, row_tiles: 2, keys: 64, stages: 1, queries_in_registers: false },
                ForwardTile { warps: 4, row_tiles: 2, keys: 32, stages: 1, queries_in_registers: false },
            ],
            Width::Middle if length == ForwardLength::Long => vec![
                ForwardTile { warps: 8, row_tiles: 2, keys: 64, stages: 1, queries_in_registers: false },
                ForwardTile { warps: 4, row_tiles: 2, keys: 48, stages: 1, queries_in_registers: false },
            ],
            Width::Middle => {
                vec![ForwardTile { warps: 4, row_tiles: 2, keys: 48, stages: 1, queries_in_registers: false }]
            }
            Width::Wide => Vec::new(),
        }
    }

    /// Returns the tiles for devices with less shared memory, and for wide heads.
    fn smaller(specialization: &Specialization) -> Vec<Self> {
        let is_f32 = specialization.element == ElementType::F32;
        SMALLER.into_iter().filter(|tile| !is_f32 || tile.keys == 16).collect()
    }

    /// Returns the number of queries of a block.
    pub fn queries(&self) -> usize {
        self.warps * self.row_tiles * 16
    }

    /// Returns the number of bytes from row to row of the bias in shared memory.
    fn bias_pitch(&self, specialization: &Specialization) -> usize {
        self.keys * specialization.bias_bytes() + 16
    }

    /// Returns the number of bytes from row to row of the boolean mask in shared memory.
    fn mask_pitch(&self) -> usize {
        self.keys + 16
    }

    /// Returns the shared memory of a block.
    fn shared_layout(&self, specialization: &Specialization) -> MemoryLayout {
        let (queries, keys) = (self.queries(), self.keys);
        let bias_bytes = if specialization.bias.is_some() { queries * self.bias_pitch(specialization) } else { 0 };
        let mask_bytes = if specialization.boolean_mask { queries * self.mask_pitch() } else { 0 };
        let mut layout = MemoryLayout::default();
        layout.add("FORWARD_QUERIES_AT", queries * specialization.head_pitch());
        layout.add("FORWARD_KEYS_AT", self.stages * keys * specialization.head_pitch());
        layout.add("FORWARD_VALUES_AT", self.stages * keys * specialization.value_pitch());
        layout.add("FORWARD_BIAS_AT", bias_bytes);
        layout.add("FORWARD_MASK_AT", mask_bytes);
        layout.add("FORWARD_INTERVALS_AT", queries * 8);
        layout.add("FORWARD_WARP_INTERVALS_AT", self.warps * 16);
        if specialization.key_codes.is_some() {
            // Codes of keys and of values as they arrive, and two tiles of scales of each.
            layout.add("FORWARD_KEY_CODES_AT", keys * specialization.code_bytes(specialization.head_columns()));
            layout.add("FORWARD_VALUE_CODES_AT", keys * specialization.code_bytes(specialization.value_columns()));
            layout.add("FORWARD_KEY_SCALES_AT", 2 * keys * specialization.key_scales() * size_of::<f32>());
            layout.add("FORWARD_VALUE_SCALES_AT", 2 * keys * specialization.value_scales() * size_of::<f32>());
        }
        layout
    }

    /// Returns the number of bytes of the shared memory of a block.
    fn shared_bytes(&self, specialization: &Specialization) -> usize {
        self.shared_layout(specialization).size()
    }

    /// Returns the forward kernel.
    pub fn kernel(&self, specialization: &Specialization) -> KernelShape {
        KernelShape {
            name: "attention_forward",
            threads: self.warps * 32,
            shared_bytes: self.shared_bytes(specialization),
        }
    }

    /// Returns the program of the forward kernel.
    pub fn program(&self, specialization: &Specialization) -> Program {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let mut defines = specialization.defines();
        defines.extend([
            KernelSet::define(&[KernelSet::Forward]),
            define("FORWARD_WARPS", self.warps),
            define("FORWARD_ROW_TILES", self.row_tiles),
            define("FORWARD_KEYS", self.keys),
            define("FORWARD_STAGES", self.stages),
            define("FORWARD_QUERIES_IN_REGISTERS", self.queries_in_registers.into()),
            define("FORWARD_QUERIES", self.queries()),
            define("FORWARD_BIAS_PITCH", self.bias_pitch(specialization)),
            define("FORWARD_MASK_PITCH", self.mask_pitch()),
        ]);
        defines.extend(self.shared_layout(specialization).defines("FORWARD_SHARED_BYTES"));
        super::program(defines)
    }
}
