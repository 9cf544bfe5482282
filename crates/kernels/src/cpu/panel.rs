//! The operands of a matrix product over one panel of columns.

use std::fmt;

use half::f16;

use super::code_format::CodeFormat;

/// The most columns that a panel of any kernel has.
pub(crate) const MAX_COLUMNS: usize = 64;

/// The steps of depth that a word of two bf16 stores.
pub(super) const BF16_PAIR: usize = 2;

/// A matrix product over one panel of columns: `C = A B`, or `C = C · factors + A B`. Strides and sizes count 32-bit
/// words. C is (rows, panel) and contiguous.
pub struct PanelProduct {
    pub a: LeftOperand,
    pub b: RightOperand,
    pub c: *mut f32,
    pub rows: usize,
    pub depth: usize,
    /// The vectors of the panel that are computed. The columns beyond them keep their values, except where B is codes:
    /// all columns are computed then.
    pub vectors: usize,
    /// A factor for each column of C, or `None` if C is overwritten.
    pub factors: Option<*const f32>,
    /// The bytes that are prefetched meanwhile.
    pub next: NextBytes,
}

/// The bytes that the next product reads, which a product prefetches while it computes. They need not be valid.
#[derive(Clone, Copy)]
pub struct NextBytes {
    pub at: *const u8,
    pub count: usize,
}

impl NextBytes {
    /// Nothing is prefetched.
    pub const NONE: Self = Self { at: std::ptr::null(), count: 0 };

    /// Returns part `index` of `parts` equal parts.
    #[inline(always)]
    pub fn part(self, index: usize, parts: usize) -> Self {
        let each = self.count.div_ceil(parts);
        let start = self.count.min(index * each);
        Self { at: self.at.wrapping_add(start), count: each.min(self.count - start) }
    }
}

/// The left operand of a product, (rows, depth), in groups of [`ROWS`](super::Kernel::ROWS) rows. The last group may be
/// short. Row r of group g begins at `at + g · group + r · row`, and its words are `step` apart.
#[derive(Clone, Copy)]
pub struct LeftOperand {
    pub at: *const f32,
    pub group: usize,
    pub row: usize,
    pub step: usize,
}

impl LeftOperand {
    /// Returns the operand whose rows begin `words` further.
    #[inline(always)]
    pub fn offset(self, words: usize) -> Self {
        Self { at: self.at.wrapping_add(words), ..self }
    }
}

/// The right operand of a product, (depth, panel), contiguous.
#[derive(Clone, Copy)]
pub struct RightOperand {
    pub at: *const f32,
    /// The number of columns of the panel in memory: [`K::PANEL`](super::Kernel::PANEL), or fewer for pairs of bf16
    /// that were packed for another kernel.
    pub panel: usize,
    /// The format of the numbers. A kernel for words of two elements ignores it: its operand is words of two elements.
    pub format: Format,
}

impl RightOperand {
    /// Returns an operand of words of the kernel's elements.
    #[inline(always)]
    pub fn words(at: *const f32, panel: usize) -> Self {
        Self { at, panel, format: Format::F32 }
    }
}

/// The format of the numbers of a panel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Format {
    F32,
    /// Pairs of neighbouring steps of the depth. Kernels that multiply pairs of bf16 read them in place, and other
    /// kernels widen them in one instruction.
    BF16,
    F16,
    /// Blocks of codes, which [`code_columns`](super::code_columns) describes.
    Codes(CodeFormat),
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("F32"),
            Self::BF16 => f.write_str("BF16"),
            Self::F16 => f.write_str("F16"),
            Self::Codes(format) => write!(f, "{format}"),
        }
    }
}

impl Format {
    /// Returns the number of steps of depth that are stored together.
    pub fn step(self) -> usize {
        match self {
            Self::BF16 => BF16_PAIR,
            Self::F32 | Self::F16 => 1,
            Self::Codes(format) => format.block(),
        }
    }

    /// Returns the number of bytes of one column of the steps that are stored together.
    fn step_bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::BF16 | Self::F16 => self.step() * size_of::<f16>(),
            Self::Codes(format) => format.bytes_before_codes() + format.block() * format.bits / 8,
        }
    }

    /// Returns the number of bytes of one column of a panel that exists in memory. The depth is a multiple of
    /// [`step`](Self::step).
    pub fn bytes(self, depth: usize) -> usize {
        depth / self.step() * self.step_bytes()
    }

    /// Returns [`bytes`](Self::bytes) for any depth, or `None` if the bytes exceed a `usize`.
    pub fn checked_bytes(self, depth: usize) -> Option<usize> {
        (depth / self.step()).checked_mul(self.step_bytes())
    }
}
