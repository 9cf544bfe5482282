//! Rows of input times a packed weight.
//!
//! ```text
//! for each chunk of rows and of panels:                        a task
//!     for each block of inputs:
//!         copy the rows' inputs                                (rows, block)
//!         for each panel:  sums = sums + inputs · weight       (rows, panel)
//!     outputs = sums + bias
//! ```
//!
//! The same loops serve one row and thousands. A block of a panel is read once for all rows of a task, so for few rows the
//! weight streams through once, and for many it stays in the second cache while rows pass. The inputs of an output are
//! summed in blocks of one length from the first to the last, whatever the rows, the columns and the threads, so its bits
//! depend on its own row and weights alone.

use std::ops::Range;

use super::weight::{PackedWeight, Shared};
use crate::Scalar;
use crate::cpu::{
    Element, ForKernel, Job, Kernel, MOST_COLUMNS, Product, Scratch, Vector, Workers, for_each_task, load_first,
    on_kernel, reserve, store_first,
};

/// The words of depth of a block: with 48 columns 37 KB of weight, which the second cache holds beside the rest. The sums
/// are read and written once a block. Rounding errors grow with the sum that is being added to, so that shorter blocks err
/// less: sums of f32 err as MKL's do, where blocks of 256 words would by 1.15 times as much.
const BLOCK: usize = 192;
/// The words from one copied row to the next: rows a power of two apart would meet in the same sets of the first cache.
const BLOCK_ROW: usize = BLOCK + 16;
/// The most rows of a task: 160 KB of copied inputs.
const MOST_ROWS: usize = 192;
/// The bytes that a task's sums may take, beside its inputs and the weight that passes.
const SUMS_BYTES: usize = 256 << 10;
/// A thread should find this many tasks, so that the last one is short.
const TASKS_PER_THREAD: usize = 8;

/// `xs · weightᵀ + bias` for some of the weight's outputs.
pub struct Projection<'a, X> {
    pub weight: &'a PackedWeight,
    /// One for each output of the weight.
    pub bias: Option<&'a [f32]>,
    /// `rows` rows of the weight's inputs, `xs_row` elements apart.
    pub xs: &'a [X],
    pub xs_row: usize,
    pub rows: usize,
    /// The outputs that are wanted.
    pub columns: Range<usize>,
}

impl<X: Element> Projection<'_, X> {
    /// (rows, columns), computed on the threads of the current pool; `None` where there is no memory for it.
    ///
    /// # Panics
    /// If a row lies outside of its slice, or the columns outside of the weight.
    pub fn run(self) -> Option<Vec<X>>
    where
        X: Scalar,
    {
        X::project(self)
    }

    pub(crate) fn run_generic(self) -> Option<Vec<X>> {
        let Self { weight, rows, .. } = self;
        let count = rows.checked_mul(self.columns.len())?;
        let mut out = reserve(count)?;
        if count == 0 {
            return Some(out);
        }
        assert!(self.columns.end <= weight.outputs && self.bias.is_none_or(|bias| bias.len() == weight.outputs));
        assert!((rows - 1) * self.xs_row + weight.inputs <= self.xs.len());
        let to = Shared(out.as_mut_ptr());
        on_kernel(weight.tier, weight.multiplies_pairs::<X>(), Run { projection: &self, out: &to });
        // SAFETY: every row and column belongs to a task, which wrote it.
        unsafe { out.set_len(count) };
        Some(out)
    }
}

struct Run<'a, X> {
    projection: &'a Projection<'a, X>,
    out: &'a Shared<X>,
}

impl<X: Element> ForKernel for Run<'_, X> {
    unsafe fn run<K: Kernel>(self) {
        let Self { projection, out } = self;
        let &Projection { weight, rows, ref columns, .. } = projection;
        let panels = columns.start / weight.panel..columns.end.div_ceil(weight.panel);
        let workers = Workers::of(rows.saturating_mul(columns.len()).saturating_mul(weight.inputs));
        let cut = Cut::new::<K>(rows, panels.len(), workers.count);
        let scratch = || TaskScratch::new::<K>(&cut);
        for_each_task(cut.row_chunks * cut.panel_chunks, workers, scratch, |scratch, index| {
            // Tasks of the same panels follow each other, and find them in a cache.
            let (row, panel) = (index % cut.row_chunks * cut.rows, index / cut.row_chunks * cut.panels);
            let first = panels.start + panel;
            let task = Task::<X> {
                projection,
                rows: row..rows.min(row + cut.rows),
                panels: first..panels.end.min(first + cut.panels),
                out,
                scratch,
            };
            // SAFETY: the caller's promise.
            unsafe { K::vectorize(task) };
        });
    }
}

/// How rows and panels are cut into tasks.
struct Cut {
    rows: usize,
    row_chunks: usize,
    panels: usize,
    panel_chunks: usize,
}

impl Cut {
    fn new<K: Kernel>(rows: usize, panels: usize, workers: usize) -> Self {
        let groups = rows.div_ceil(K::ROWS);
        let row_chunks = groups.div_ceil(MOST_ROWS / K::ROWS);
        let groups_each = groups.div_ceil(row_chunks);
        let rows_each = groups_each * K::ROWS;
        let row_chunks = groups.div_ceil(groups_each);
        let fit = SUMS_BYTES / (4 * K::PANEL * rows_each);
        let even = (panels * row_chunks).div_ceil(TASKS_PER_THREAD * workers);
        let panel_chunks = panels.div_ceil(fit.min(even).max(1));
        let panels_each = panels.div_ceil(panel_chunks);
        Self { rows: rows_each, row_chunks, panels: panels_each, panel_chunks: panels.div_ceil(panels_each) }
    }
}

/// What a thread works in.
struct TaskScratch {
    /// (rows, [`BLOCK_ROW`]).
    inputs: Scratch,
    /// A block of a panel, widened.
    weight: Scratch,
    /// (panels, rows, panel).
    sums: Scratch,
}

impl TaskScratch {
    fn new<K: Kernel>(cut: &Cut) -> Self {
        Self {
            inputs: Scratch::zeros(cut.rows * BLOCK_ROW),
            weight: Scratch::zeros(BLOCK * K::PANEL),
            sums: Scratch::zeros(cut.panels * cut.rows * K::PANEL),
        }
    }
}

struct Task<'a, X> {
    projection: &'a Projection<'a, X>,
    rows: Range<usize>,
    panels: Range<usize>,
    out: &'a Shared<X>,
    scratch: &'a mut TaskScratch,
}

impl<X: Element> Job for Task<'_, X> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let weight = self.projection.weight;
        let rows = self.rows.len().next_multiple_of(K::LEAST_ROWS);
        let depth = weight.padded / K::ELEMENTS;
        let ones = [1f32; MOST_COLUMNS];
        let sums = self.scratch.sums.as_mut_ptr();
        if depth == 0 {
            self.scratch.sums.words_mut().fill(0.0);
        }
        // SAFETY: the caller's promise; the scratch was made for these sizes.
        unsafe {
            for first in (0..depth).step_by(BLOCK) {
                let steps = BLOCK.min(depth - first);
                self.copy_inputs::<K>(first * K::ELEMENTS, steps);
                for (index, panel) in self.panels.clone().enumerate() {
                    let product = Product {
                        a: self.scratch.inputs.as_ptr(),
                        a_group: K::ROWS * BLOCK_ROW,
                        a_row: BLOCK_ROW,
                        a_step: 1,
                        b: std::ptr::null(),
                        c: sums.add(index * rows * K::PANEL),
                        rows,
                        depth: steps,
                        vectors: weight.columns_of(panel).len().div_ceil(K::Vector::LANES),
                        factors: (first > 0).then_some(ones.as_ptr()),
                    };
                    weight.multiply::<K>((panel, first * K::ELEMENTS), self.scratch.weight.as_mut_ptr(), product);
                }
            }
            for (index, panel) in self.panels.clone().enumerate() {
                self.write::<K>(panel, sums.add(index * rows * K::PANEL));
            }
        }
    }
}

impl<X: Element> Task<'_, X> {
    /// The inputs from `first`, as words, with zeros beyond the last input and below the last row.
    ///
    /// # Safety
    /// As [`Job`].
    #[inline(always)]
    unsafe fn copy_inputs<K: Kernel>(&mut self, first: usize, steps: usize) {
        let &Projection { weight, xs, xs_row, .. } = self.projection;
        let rows = &self.rows;
        let held = (steps * K::ELEMENTS).min(weight.inputs.saturating_sub(first));
        let (to, lanes) = (self.scratch.inputs.as_mut_ptr(), K::Vector::LANES);
        // SAFETY: the caller's promise; rows lie within the input.
        unsafe {
            for (index, row) in rows.clone().enumerate() {
                let (from, to) = (xs.as_ptr().add(row * xs_row + first), to.add(index * BLOCK_ROW));
                if K::ELEMENTS == 2 {
                    let to: *mut X = to.cast();
                    std::ptr::copy_nonoverlapping(from, to, held);
                    to.add(held).write_bytes(0, steps * K::ELEMENTS - held);
                    continue;
                }
                let whole = held / lanes * lanes;
                for at in (0..whole).step_by(lanes) {
                    X::load::<K::Vector>(from.add(at)).store(to.add(at));
                }
                if whole < held {
                    let rest: K::Vector = load_first(from.add(whole), held - whole);
                    store_first(rest, to.add(whole), held - whole);
                }
                to.add(held).write_bytes(0, steps - held);
            }
            let (filled, padded) = (rows.len(), rows.len().next_multiple_of(K::LEAST_ROWS));
            to.add(filled * BLOCK_ROW).write_bytes(0, (padded - filled) * BLOCK_ROW);
        }
    }

    /// The sums of a panel, with their biases, to the columns that are wanted.
    ///
    /// # Safety
    /// As [`Job`]; nobody else writes this task's rows and columns.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, panel: usize, sums: *const f32) {
        let Projection { weight, bias, columns, .. } = self.projection;
        let own = weight.columns_of(panel);
        let (start, end) = (own.start.max(columns.start), own.end.min(columns.end));
        // SAFETY: the caller's promise.
        unsafe {
            for (index, row) in self.rows.clone().enumerate() {
                let from = sums.add(index * K::PANEL);
                let to = self.out.at(row * columns.len());
                for column in (start..end).step_by(K::Vector::LANES) {
                    let held = K::Vector::LANES.min(end - column);
                    let mut sum: K::Vector = load_first(from.add(column - own.start), held);
                    if let Some(bias) = bias {
                        sum = sum.add(load_first(bias.as_ptr().add(column), held));
                    }
                    store_first(sum, to.add(column - columns.start), held);
                }
            }
        }
    }
}
