//! Tiles of the forward kernel.

use super::{Width, no_tile};
use crate::element::Element;
use crate::program::{Define, KernelShape, Program};
use crate::specialization::Specialization;
use crate::unsupported::Unsupported;

/// A tile of the forward kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ForwardTile {
    pub warps: usize,
    /// Rows of 16 queries of a warp.
    pub row_tiles: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// Tiles of keys and values in shared memory.
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

const fn tile(warps: usize, row_tiles: usize, keys: usize, stages: usize) -> ForwardTile {
    ForwardTile { warps, row_tiles, keys, stages, queries_in_registers: false }
}

/// Narrow heads without a bias or a boolean mask.
const NARROW: ForwardTile = ForwardTile { warps: 4, row_tiles: 2, keys: 48, stages: 2, queries_in_registers: true };

/// Tiles in the order in which they are tried if the faster ones do not fit.
const SMALLER: [ForwardTile; 6] =
    [tile(8, 1, 64, 1), tile(4, 1, 48, 1), tile(4, 1, 32, 1), tile(4, 1, 16, 1), tile(2, 1, 16, 1), tile(1, 1, 16, 1)];

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
        if specialization.element == Element::F32 {
            return match Width::of(specialization) {
                Width::Narrow => vec![tile(4, 1, 32, 1)],
                Width::Middle => vec![tile(8, 1, 32, 1), tile(4, 1, 32, 1)],
                // With 32 keys, the registers do not suffice.
                Width::Wide => vec![tile(4, 1, 16, 1)],
            };
        }
        let has_bias = specialization.bias.is_some();
        let reads_scores = has_bias || specialization.boolean_mask;
        match Width::of(specialization) {
            Width::Narrow if specialization.key_codes => vec![tile(4, 2, 64, 1)],
            Width::Narrow if reads_scores => vec![tile(4, 2, 64, 2)],
            // With the queries and the relative bias, a kernel would spill registers.
            Width::Narrow if specialization.relative_bias => {
                vec![ForwardTile { queries_in_registers: false, ..NARROW }]
            }
            Width::Narrow => vec![NARROW],
            Width::Middle if has_bias && specialization.boolean_mask => vec![tile(4, 2, 32, 1)],
            Width::Middle if reads_scores => vec![tile(4, 2, 64, 1), tile(4, 2, 32, 1)],
            Width::Middle if length == ForwardLength::Long => vec![tile(8, 2, 64, 1), tile(4, 2, 48, 1)],
            Width::Middle => vec![tile(4, 2, 48, 1)],
            Width::Wide => Vec::new(),
        }
    }

    /// Returns the tiles for devices with less shared memory, and for wide heads.
    fn smaller(specialization: &Specialization) -> Vec<Self> {
        let is_f32 = specialization.element == Element::F32;
        SMALLER.into_iter().filter(|tile| !is_f32 || tile.keys == 16).collect()
    }

    /// Returns the queries of a block.
    pub fn queries(&self) -> usize {
        self.warps * self.row_tiles * 16
    }

    /// Returns the shared memory of a block.
    fn shared_bytes(&self, specialization: &Specialization) -> usize {
        let (queries, keys) = (self.queries(), self.keys);
        let (head_pitch, value_pitch) = (specialization.head_pitch(), specialization.value_pitch());
        let mut bytes = queries * head_pitch + self.stages * keys * (head_pitch + value_pitch);
        if specialization.bias.is_some() {
            bytes += queries * (keys * specialization.bias_bytes() + 16);
        }
        if specialization.boolean_mask {
            bytes += queries * (keys + 16);
        }
        // The intervals of the queries and of the warps.
        bytes += queries * 8 + self.warps * 16;
        if specialization.key_codes {
            bytes += keys * (specialization.head_columns() + specialization.value_columns() + 16);
        }
        bytes
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
            define("KERNEL_SET", 1),
            define("FORWARD_WARPS", self.warps),
            define("FORWARD_ROW_TILES", self.row_tiles),
            define("FORWARD_KEYS", self.keys),
            define("FORWARD_STAGES", self.stages),
            define("FORWARD_QUERIES_IN_REGISTERS", self.queries_in_registers.into()),
        ]);
        super::program(defines)
    }
}
