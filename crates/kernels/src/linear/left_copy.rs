//! A copy of the left operand that all tasks of a product share.

use std::ops::Range;

use super::operands::{BLOCK, BLOCK_ROW, Left};
use super::split::TaskSplit;
use crate::cpu::{CacheLine, KeptLines, Kernel, SharedPtr, SimdTask, WorkSize, Workers, for_each_index};
use crate::number::Number;

/// The blocks of some chunks of rows of the left operand, (chunks, blocks, rows, [`BLOCK_ROW`]). Without it, each task
/// copies the blocks of its rows, which takes a twentieth of the time of a product of 512 rows with 2,048 columns.
pub(super) struct LeftCopy {
    start: SharedPtr<f32>,
    /// The memory of the words, which begins at `start`.
    _lines: KeptLines,
    chunk_words: usize,
}

impl LeftCopy {
    /// Copies some `chunks` of rows on several threads; `None` if there is no memory. A chunk has `rows` rows in the
    /// copy.
    ///
    /// # Safety
    /// The processor has the instruction set of K, and `rows` is what [`Left::copy`] writes.
    pub unsafe fn new<K: Kernel, X: Number>(
        left: &Left<X>,
        split: &TaskSplit,
        chunks: Range<usize>,
        rows: usize,
        depth: usize,
    ) -> Option<Self> {
        let blocks = depth.div_ceil(BLOCK);
        let block_words = rows * BLOCK_ROW;
        let chunk_words = blocks.checked_mul(block_words)?;
        let count = chunk_words.checked_mul(chunks.len())?;
        let mut lines = KeptLines::new(count.div_ceil(CacheLine::WORDS))?;
        let start = SharedPtr(lines.as_mut_ptr().cast::<f32>());
        let workers = Workers::for_call(WorkSize { multiply_adds: 0, bytes: size_of::<f32>() * count });
        for_each_index(chunks.len() * blocks, workers, &|index| {
            let first = index % blocks * BLOCK;
            let task = CopyBlock {
                left,
                rows: split.rows_of(chunks.start + index / blocks),
                first,
                steps: BLOCK.min(depth - first),
                // SAFETY: the copy has this block.
                to: unsafe { start.add(index * block_words) },
            };
            // SAFETY: the processor has the instruction set of K, by this function's contract.
            unsafe { K::run_simd(task) };
        });
        Some(Self { start, _lines: lines, chunk_words })
    }

    /// Returns the blocks of a chunk of rows.
    pub fn chunk(&self, chunk: usize) -> *const f32 {
        self.start.0.wrapping_add(chunk * self.chunk_words)
    }
}

/// A task that copies a block of some rows.
struct CopyBlock<'a, X> {
    left: &'a Left<'a, X>,
    rows: Range<usize>,
    /// The first word of depth.
    first: usize,
    /// The number of words of depth.
    steps: usize,
    to: *mut f32,
}

impl<X: Number> SimdTask for CopyBlock<'_, X> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { left, rows, first, steps, to } = self;
        // SAFETY: the processor has the instruction set of K; the block of the copy has these rows.
        unsafe { left.copy::<K>(&rows, first * K::ELEMENTS, steps, to) }
    }
}
