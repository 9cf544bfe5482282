//! The loops of a product.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::epilogue::Up;
use super::left_copy::LeftCopy;
use super::operands::{BLOCK, BLOCK_ROW, Left, Right};
use super::product::Product;
use super::split::TaskSplit;
use crate::cpu::{
    Kernel, LeftOperand, MAX_COLUMNS, NextBytes, PanelProduct, RightOperand, Scratch, SharedPtr, SimdTask, Vector,
    WorkSize, Workers, dispatch_f32, for_each_task, prefetch_bytes,
};
use crate::error::{Error, check_len};
use crate::number::{Number, load_first, store_first};

/// The words of the left operand that are copied together, if they are more than one block of each row. Few rows then
/// read each panel of the right operand from end to end, so that the processor prefetches it.
const LEFT_WORDS: usize = 8 << 10;
/// The words of the left operand that tasks share at a time, 8 MB. The next rows are copied to the same memory, which
/// is in a cache then. Tests share fewer, so that small products are computed in several rounds.
const SHARED_WORDS: usize = if cfg!(test) { 1 << 17 } else { 2 << 20 };
/// The rows before which an output and a residual are prefetched. No cache has an output that was allocated for the
/// call, and the writes of its rows would wait for memory.
const ROWS_AHEAD: usize = 8;

/// Computes a product, as [`multiply`](super::multiply) says. It is compiled once for each element.
pub(super) fn run<X: Number>(product: &Product<X>, output: &mut [MaybeUninit<X>]) -> Result<(), Error> {
    check_len("output", output.len(), product.check()?)?;
    if output.is_empty() {
        return Ok(());
    }
    let right = &product.right;
    let mut rights = vec![right.clone()];
    if let Some(up) = product.epilogue.up {
        rights.push(Right::Weight { weight: up.weight, outputs: right.computed_columns() });
    }
    let run = ProductRun { product, rights: &rights, output: SharedPtr(output.as_mut_ptr().cast()) };
    if right.is_bf16() {
        X::dispatch(right.instruction_set(), run);
    } else {
        dispatch_f32(right.instruction_set(), run);
    }
    Ok(())
}

/// A call whose sizes were checked.
struct ProductRun<'a, X> {
    product: &'a Product<'a, X>,
    /// The right operand, and then the right operand of the epilogue's second product.
    rights: &'a [Right<'a, X>],
    output: SharedPtr<X>,
}

impl<X: Number> SimdTask for ProductRun<'_, X> {
    type Output = ();

    unsafe fn run<K: Kernel>(self) {
        let left = &self.product.left;
        let rights = self.rights;
        let right = &rights[0];
        let rows = left.rows;
        let columns = right.computed_columns();
        let width = right.panel::<K>();
        let panels = columns.start / width..columns.end.div_ceil(width);
        let products = rows.saturating_mul(columns.len()).saturating_mul(left.columns).saturating_mul(rights.len());
        let work = WorkSize { multiply_adds: products, bytes: rights.len() * right.bytes() };
        let workers = Workers::for_call(work);
        let split = TaskSplit::new::<K>(rows, panels.len(), rights.len(), workers.count);
        let multiple = if left.is_transposed { K::Vector::LANES } else { K::MIN_ROWS };
        let most_rows = split.rows.min(rows).next_multiple_of(multiple);
        let depth = right.padded::<K>() / K::ELEMENTS;
        let all_left = Left { matrix: left, leading_zeros: right.leading_zeros() };
        let is_in_place = all_left.is_in_place::<K>(depth);
        // Few rows, and rows that one task takes, are copied by the task.
        let is_shared = !is_in_place && split.panel_chunks > 1 && rows > 2 * K::ROWS;
        let blocks = blocks_together(most_rows, depth);
        let block_words = most_rows * BLOCK_ROW;
        let chunk_words = block_words.saturating_mul(depth.div_ceil(BLOCK)).max(1);
        let together =
            if is_shared { (SHARED_WORDS / chunk_words).clamp(1, split.row_chunks) } else { split.row_chunks };
        for first in (0..split.row_chunks).step_by(together) {
            let chunks = first..split.row_chunks.min(first + together);
            let left_copy = if is_shared {
                // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
                unsafe { LeftCopy::new::<K, X>(&all_left, &split, chunks.clone(), most_rows, depth) }
            } else {
                None
            };
            let make_scratch = || TaskScratch {
                blocks,
                block_words,
                left: Scratch::zeros(if is_in_place || left_copy.is_some() { 0 } else { blocks * block_words }),
                right: Scratch::zeros(if right.is_copied::<K>(most_rows) { BLOCK * K::PANEL } else { 0 }),
                sums: Scratch::zeros(rights.len() * split.most_panels() * most_rows * K::PANEL),
            };
            for_each_task(chunks.len() * split.panel_chunks, workers, &make_scratch, &|scratch, index| {
                // Tasks of the same panels follow each other, so that these are in a cache.
                let row_chunk = index % chunks.len();
                let own_panels = split.panels_of(index / chunks.len());
                let task = Task {
                    run: &self,
                    rows: split.rows_of(first + row_chunk),
                    panels: panels.start + own_panels.start..panels.start + own_panels.end,
                    left_rows: match &left_copy {
                        _ if is_in_place => LeftRows::InPlace,
                        Some(copy) => LeftRows::Shared(copy.chunk(row_chunk)),
                        None => LeftRows::Copied,
                    },
                    scratch,
                };
                // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
                unsafe { K::run_simd(task) };
            });
        }
    }
}

/// Returns what a product reads of `right` after some words of a panel: these words of the next panel, or, after the
/// last panel, the words after them of the first one.
fn next_bytes<K: Kernel>(
    right: &Right<impl Number>,
    panels: &Range<usize>,
    panel: usize,
    words: Range<usize>,
) -> NextBytes {
    if panel + 1 < panels.end {
        return right.bytes_at::<K>(panel + 1, words);
    }
    let depth = right.padded::<K>() / K::ELEMENTS;
    right.bytes_at::<K>(panels.start, words.end..depth.min(words.end + words.len()))
}

/// Returns the number of blocks of `rows` rows that are copied together.
fn blocks_together(rows: usize, depth: usize) -> usize {
    (LEFT_WORDS / (rows * BLOCK_ROW)).clamp(1, depth.div_ceil(BLOCK).max(1))
}

/// The scratch buffers of a thread.
struct TaskScratch {
    /// The number of blocks of the left operand that are copied together.
    blocks: usize,
    /// The number of words of such a block.
    block_words: usize,
    /// The copied blocks, (blocks, rows, [`BLOCK_ROW`]).
    left: Scratch,
    /// A block of a panel, if blocks are copied.
    right: Scratch,
    /// The sums, (rights, panels, rows, panel).
    sums: Scratch,
}

/// The place of a task's rows of the left operand.
enum LeftRows {
    /// In the matrix.
    InPlace,
    /// In a copy that tasks share. Its blocks follow each other from here on.
    Shared(*const f32),
    /// In a copy that the task makes.
    Copied,
}

/// Some rows of some panels of a product.
struct Task<'a, X> {
    run: &'a ProductRun<'a, X>,
    rows: Range<usize>,
    panels: Range<usize>,
    left_rows: LeftRows,
    scratch: &'a mut TaskScratch,
}

impl<X: Number> SimdTask for Task<'_, X> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { run: ProductRun { product, rights, .. }, rows: ref task_rows, ref panels, ref left_rows, .. } = self;
        let scratch = &mut *self.scratch;
        let rows = task_rows.len().next_multiple_of(K::MIN_ROWS);
        let depth = rights[0].padded::<K>() / K::ELEMENTS;
        let ones = [1f32; MAX_COLUMNS];
        let sums = scratch.sums.as_mut_ptr();
        if depth == 0 {
            scratch.sums.words_mut().fill(0.0);
        }
        let panel_words = rows * K::PANEL;
        let right_words = panels.len() * panel_words;
        let left = Left { matrix: &product.left, leading_zeros: rights[0].leading_zeros() };
        // SAFETY: the processor has the instruction set of K; the scratch was made for these sizes, and each operand
        // has these panels.
        unsafe {
            let _tiles = K::configure_tiles();
            let own_copy = scratch.left.as_mut_ptr();
            let right_copy = scratch.right.as_mut_ptr();
            let together = scratch.blocks * BLOCK;
            for start in (0..depth).step_by(together) {
                let blocks = (start..depth.min(start + together)).step_by(BLOCK);
                let steps = |first: usize| BLOCK.min(depth - first);
                let words_before = |first: usize| match left_rows {
                    LeftRows::InPlace => first - start,
                    LeftRows::Shared(_) | LeftRows::Copied => (first - start) / BLOCK * scratch.block_words,
                };
                let copied = |at| LeftOperand { at, group: K::ROWS * BLOCK_ROW, row: BLOCK_ROW, step: 1 };
                let left_blocks = match *left_rows {
                    LeftRows::InPlace => left.rows_in_place::<K>(task_rows.start, start),
                    LeftRows::Shared(copy) => copied(copy.add(start / BLOCK * scratch.block_words)),
                    LeftRows::Copied => {
                        for first in blocks.clone() {
                            let to = own_copy.add(words_before(first));
                            left.copy::<K>(task_rows, first * K::ELEMENTS, steps(first), to);
                        }
                        copied(own_copy.cast_const())
                    }
                };
                for (index, panel) in panels.clone().enumerate() {
                    for (at, right) in rights.iter().enumerate() {
                        for first in blocks.clone() {
                            let block = PanelProduct {
                                a: left_blocks.offset(words_before(first)),
                                b: RightOperand::words(std::ptr::null(), K::PANEL),
                                c: sums.add(at * right_words + index * panel_words),
                                rows,
                                depth: steps(first),
                                vectors: right.columns_of::<K>(panel).len().div_ceil(K::Vector::LANES),
                                factors: (first > 0).then_some(ones.as_ptr()),
                                next: next_bytes::<K>(right, panels, panel, first..first + steps(first)),
                            };
                            right.multiply::<K>(panel, first * K::ELEMENTS, right_copy, block);
                        }
                    }
                }
            }
            for (index, panel) in panels.clone().enumerate() {
                let panel_sums = sums.add(index * panel_words);
                self.write::<K>(panel, panel_sums, panel_sums.wrapping_add(right_words));
            }
        }
    }
}

impl<X: Number> Task<'_, X> {
    /// Applies the epilogue to the sums of a panel, and writes the task's rows of the columns that are computed. `up`
    /// are the sums of the second product, if there is one.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; no other thread writes these rows and columns.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, panel: usize, sums: *const f32, up: *const f32) {
        let Self { run: ProductRun { product: Product { right, epilogue, .. }, output, .. }, rows, .. } = self;
        let panel_columns = right.columns_of::<K>(panel);
        let columns = right.computed_columns();
        let start = panel_columns.start.max(columns.start);
        let end = panel_columns.end.min(columns.end);
        for row in rows.clone() {
            let ahead = (row + ROWS_AHEAD) * columns.len() + start - columns.start;
            let bytes = (end - start) * size_of::<X>();
            // SAFETY: the processor has the instruction set; addresses that are prefetched need not be valid.
            unsafe {
                prefetch_bytes::<K::Vector>(output.0.wrapping_add(ahead).cast_const().cast(), bytes);
                if let Some(residual) = epilogue.residual {
                    prefetch_bytes::<K::Vector>(residual.as_ptr().wrapping_add(ahead).cast(), bytes);
                }
            }
            for column in (start..end).step_by(K::Vector::LANES) {
                let filled = K::Vector::LANES.min(end - column);
                let from = (row - rows.start) * K::PANEL + column - panel_columns.start;
                let to = row * columns.len() + column - columns.start;
                // SAFETY: as this method's contract; the columns lie within the panels, and within the epilogue, which
                // was checked, and the output.
                unsafe {
                    let mut sum: K::Vector = load_first(sums.add(from), filled);
                    if let Some(bias) = epilogue.bias {
                        sum = sum.add(load_first(bias.as_ptr().add(column), filled));
                    }
                    if let Some(activation) = epilogue.activation {
                        sum = activation.apply(sum);
                    }
                    if let Some(Up { bias, .. }) = epilogue.up {
                        let mut factor: K::Vector = load_first(up.add(from), filled);
                        if let Some(bias) = bias {
                            factor = factor.add(load_first(bias.as_ptr().add(column), filled));
                        }
                        sum = sum.mul(factor);
                    }
                    if let Some(residual) = epilogue.residual {
                        sum = sum.add(load_first(residual.as_ptr().add(to), filled));
                    }
                    store_first(sum, output.add(to), filled);
                }
            }
        }
    }
}
