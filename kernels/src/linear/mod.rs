//! Rows of input times a packed weight.
//!
//! ```text
//! for each chunk of rows and of panels:                        a task
//!     for each block of inputs:
//!         copy the rows' inputs                                (rows, block)
//!         for each panel:  sums = sums + inputs · weight       (rows, panel)
//!     outputs = epilogue(sums)
//! ```
//!
//! The same loops serve one row and thousands. A block of a panel is read once for all rows of a task, so for few rows the
//! weight streams through once, and for many it stays in the second cache while rows pass. The inputs of an output are
//! summed in blocks of one length from the first to the last, whatever the rows, the columns and the threads, so its bits
//! depend on its own row and weights alone.

mod codes;
mod epilogue;
mod format;
mod pack;
#[cfg(test)]
mod tests;
mod weight;

pub use codes::{CODE_BLOCK, Codes};
pub use epilogue::{Activation, Epilogue, Up};
pub use weight::PackedWeight;
pub(crate) use weight::{pack_weight, unpack_weight};

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::cpu::{
    Kernel, MAX_COLUMNS, Product as MatrixProduct, Scratch, SharedPtr, SimdTask, Vector, Workers, dispatch_f32,
    for_each_task, large_page_vec,
};
use crate::element::{Kernels, load_first, store_first, widen_row};
use crate::error::check_len;
use crate::{Element, Error, Executor};

/// The words of depth of a block: with 48 columns 37 KB of weight, which the second cache holds beside the rest. The sums
/// are read and written once a block. Rounding errors grow with the sum that is being added to, so that shorter blocks err
/// less: sums of f32 err as MKL's do, where blocks of 256 words would by 1.15 times as much.
const BLOCK: usize = 192;
/// The words from one copied row to the next: rows a power of two apart would share the same sets of the first cache.
const BLOCK_ROW: usize = BLOCK + 16;
/// The most rows of a task: 160 KB of copied inputs.
const MAX_ROWS: usize = 192;
/// The bytes that a task's sums may take, besides its inputs and a block of the weight.
const SUMS_BYTES: usize = 256 << 10;
/// A thread should find this many tasks, so that the last one is short.
const TASKS_PER_THREAD: usize = 8;

/// The operands of [`project`]: `xs · weightᵀ` for some of the weight's outputs, and what follows.
#[derive(Clone, Debug)]
pub struct Projection<'a, X> {
    /// The weight, of any element.
    pub weight: &'a PackedWeight,
    /// `rows` rows of the weight's inputs, `xs_row` elements apart.
    pub xs: &'a [X],
    /// The elements from the beginning of one row of `xs` to the next.
    pub xs_row: usize,
    /// The rows of `xs`.
    pub rows: usize,
    /// The outputs that are computed.
    pub columns: Range<usize>,
    /// Bias, activation, gate and residual.
    pub epilogue: Epilogue<'a, X>,
    /// Runs the call if it is brief; rayon otherwise.
    pub executor: Option<Executor>,
}

impl<'a, X> Projection<'a, X> {
    /// The weight, and the one of the epilogue.
    fn weights(&self) -> impl Iterator<Item = &'a PackedWeight> + use<'a, X> {
        [Some(self.weight), self.epilogue.up.map(|up| up.weight)].into_iter().flatten()
    }

    /// The elements of the result.
    ///
    /// # Errors
    /// If the columns lie outside of the weight or a row outside of its slice, if the epilogue does not fit, or if no
    /// memory can hold as many.
    fn output_len(&self) -> Result<usize, Error> {
        let Self { weight, xs, xs_row, rows, ref columns, ref epilogue, .. } = *self;
        let (inputs, outputs) = (weight.inputs(), weight.outputs());
        if columns.start > columns.end || columns.end > outputs {
            return Err(Error::Shape(format!("expected columns within {outputs} outputs, found {columns:?}")));
        }
        let count = rows.checked_mul(columns.len()).filter(|&count| count.checked_mul(size_of::<X>()).is_some());
        let Some(count) = count else {
            return Err(Error::Memory(format!("an output of {rows} rows of {}", columns.len())));
        };
        let end = (rows.saturating_sub(1)).checked_mul(xs_row).and_then(|last| last.checked_add(inputs));
        if count > 0 && end.is_none_or(|end| end > xs.len()) {
            let found = xs.len();
            return Err(Error::Shape(format!(
                "expected {rows} rows of {inputs} elements, {xs_row} apart, found {found} elements"
            )));
        }
        epilogue.check(weight, count)?;
        Ok(count)
    }
}

/// Multiplies rows with a packed weight, on the executor or on the threads of the current rayon pool: (rows, columns)
/// in `output`. On success every element of it is initialised.
///
/// # Errors
/// [`Error::Shape`] if a slice is shorter than the sizes need, the columns lie outside of the weight, the epilogue does
/// not fit it, or `output` has another length.
///
/// ```
/// use candle_attention_kernels::Tier;
/// use candle_attention_kernels::linear::{self, Activation, Epilogue, PackedWeight, Projection};
///
/// // Three outputs of two inputs.
/// let weight = PackedWeight::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2), Tier::choose(None, false)?)?;
/// let projection = Projection {
///     weight: &weight,
///     xs: &[1.0, 1.0, 2.0, 0.0],
///     xs_row: 2,
///     rows: 2,
///     columns: 0..3,
///     epilogue: Epilogue { bias: Some(&[0.5, 0.0, -20.0]), activation: Some(Activation::Relu), ..Default::default() },
///     executor: None,
/// };
/// assert_eq!(linear::project_vec(&projection)?, [3.5, 7.0, 0.0, 2.5, 6.0, 0.0]);
///
/// let mut output = Box::new_uninit_slice(4);
/// linear::project(&Projection { columns: 1..3, ..projection }, &mut output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn project<X: Element>(projection: &Projection<X>, output: &mut [MaybeUninit<X>]) -> Result<(), Error> {
    let count = projection.output_len()?;
    check_len("output", output.len(), count)?;
    if count > 0 {
        X::project(&CheckedProjection { projection, output: SharedPtr(output.as_mut_ptr().cast()) });
    }
    Ok(())
}

/// [`project`] into a vector that it allocates, in large pages if it is large.
///
/// # Errors
/// As [`project`], and [`Error::Memory`] if there is none for the output.
pub fn project_vec<X: Element>(projection: &Projection<X>) -> Result<Vec<X>, Error> {
    let count = projection.output_len()?;
    let (rows, columns) = (projection.rows, projection.columns.len());
    let mut output =
        large_page_vec(count).ok_or_else(|| Error::Memory(format!("an output of {rows} rows of {columns}")))?;
    project(projection, &mut output.spare_capacity_mut()[..count])?;
    // SAFETY: `project` initialised every element.
    unsafe { output.set_len(count) };
    Ok(output)
}

/// A projection whose sizes were checked, and where its results go.
pub struct CheckedProjection<'a, X> {
    projection: &'a Projection<'a, X>,
    /// (rows, columns).
    output: SharedPtr<X>,
}

/// A projection with at least one result.
pub(crate) fn run<X: Kernels>(checked: &CheckedProjection<X>) {
    let weight = checked.projection.weight;
    match weight.is_bf16() {
        true => X::dispatch(weight.tier(), Run(checked)),
        false => dispatch_f32(weight.tier(), Run(checked)),
    }
}

struct Run<'a, X>(&'a CheckedProjection<'a, X>);

impl<X: Kernels> SimdTask for Run<'_, X> {
    unsafe fn run<K: Kernel>(self) {
        let CheckedProjection { projection, output } = *self.0;
        let &Projection { weight, rows, ref columns, executor, .. } = projection;
        let panels = columns.start / weight.panel()..columns.end.div_ceil(weight.panel());
        let weights = projection.weights().count();
        let products = rows.saturating_mul(columns.len()).saturating_mul(weight.inputs()).saturating_mul(weights);
        let workers = Workers::of(products, weights * weight.bytes(columns.len()), executor);
        let split = TaskSplit::new::<K>(rows, panels.len(), weights, workers.count);
        let most_rows = split.rows.min(rows.next_multiple_of(K::MIN_ROWS));
        let scratch = || TaskScratch {
            inputs: Scratch::zeros(most_rows * BLOCK_ROW),
            weight: Scratch::zeros(if weight.is_widened::<K>(most_rows) { BLOCK * K::PANEL } else { 0 }),
            sums: Scratch::zeros(weights * split.panels * most_rows * K::PANEL),
        };
        for_each_task(split.row_chunks * split.panel_chunks, workers, scratch, |scratch, index| {
            // Tasks of the same panels follow each other, and find them in a cache.
            let (row, panel) = (index % split.row_chunks * split.rows, index / split.row_chunks * split.panels);
            let first = panels.start + panel;
            let task = Task::<X> {
                projection,
                rows: row..rows.min(row + split.rows),
                panels: first..panels.end.min(first + split.panels),
                output,
                scratch,
            };
            // SAFETY: the processor has the tier of K, by the contract of `SimdTask`.
            unsafe { K::run_simd(task) };
        });
    }
}

/// How rows and panels are split into tasks.
struct TaskSplit {
    rows: usize,
    row_chunks: usize,
    panels: usize,
    panel_chunks: usize,
}

impl TaskSplit {
    fn new<K: Kernel>(rows: usize, panels: usize, weights: usize, workers: usize) -> Self {
        let groups = rows.div_ceil(K::ROWS);
        let row_chunks = groups.div_ceil(MAX_ROWS / K::ROWS);
        let groups_each = groups.div_ceil(row_chunks);
        let rows_each = groups_each * K::ROWS;
        let row_chunks = groups.div_ceil(groups_each);
        let fit = SUMS_BYTES / (4 * K::PANEL * rows_each * weights);
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
    /// A block of a panel, widened, if that is needed.
    weight: Scratch,
    /// (weights, panels, rows, panel).
    sums: Scratch,
}

struct Task<'a, X> {
    projection: &'a Projection<'a, X>,
    rows: Range<usize>,
    panels: Range<usize>,
    output: SharedPtr<X>,
    scratch: &'a mut TaskScratch,
}

impl<X: Kernels> SimdTask for Task<'_, X> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let rows = self.rows.len().next_multiple_of(K::MIN_ROWS);
        let depth = self.projection.weight.padded() / K::ELEMENTS;
        let ones = [1f32; MAX_COLUMNS];
        let sums = self.scratch.sums.as_mut_ptr();
        if depth == 0 {
            self.scratch.sums.words_mut().fill(0.0);
        }
        let panel_words = rows * K::PANEL;
        let weight_words = self.panels.len() * panel_words;
        // SAFETY: the processor has the tier of K; the scratch was made for these sizes, and each weight has these
        // panels.
        unsafe {
            let _tiles = K::configure_tiles();
            for first in (0..depth).step_by(BLOCK) {
                let steps = BLOCK.min(depth - first);
                self.copy_inputs::<K>(first * K::ELEMENTS, steps);
                for (index, panel) in self.panels.clone().enumerate() {
                    for (at, weight) in self.projection.weights().enumerate() {
                        let product = MatrixProduct {
                            a: self.scratch.inputs.as_ptr(),
                            a_group: K::ROWS * BLOCK_ROW,
                            a_row: BLOCK_ROW,
                            a_step: 1,
                            b: std::ptr::null(),
                            c: sums.add(at * weight_words + index * panel_words),
                            rows,
                            depth: steps,
                            vectors: weight.columns_of(panel).len().div_ceil(K::Vector::LANES),
                            factors: (first > 0).then_some(ones.as_ptr()),
                            has_minimums: weight.has_minimums(),
                        };
                        weight.multiply::<K>(panel, first * K::ELEMENTS, self.scratch.weight.as_mut_ptr(), product);
                    }
                }
            }
            for (index, panel) in self.panels.clone().enumerate() {
                let own = sums.add(index * panel_words);
                self.write::<K>(panel, own, own.wrapping_add(weight_words));
            }
        }
    }
}

impl<X: Kernels> Task<'_, X> {
    /// The inputs from `first`, as words, with zeros beyond the last input and below the last row.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; the block begins within the padded inputs.
    #[inline(always)]
    unsafe fn copy_inputs<K: Kernel>(&mut self, first: usize, steps: usize) {
        let &Projection { weight, xs, xs_row, .. } = self.projection;
        let rows = &self.rows;
        let width = (steps * K::ELEMENTS).min(weight.inputs().saturating_sub(first));
        let to = self.scratch.inputs.as_mut_ptr();
        // SAFETY: as this method's contract; the rows lie within `xs`, and the scratch has as many.
        unsafe {
            for (index, row) in rows.clone().enumerate() {
                let (from, to) = (xs.as_ptr().add(row * xs_row + first), to.add(index * BLOCK_ROW));
                if K::ELEMENTS == 1 {
                    widen_row::<X, K::Vector>(from, width, to, steps, 1.0);
                    continue;
                }
                let to: *mut X = to.cast();
                std::ptr::copy_nonoverlapping(from, to, width);
                to.add(width).write_bytes(0, steps * K::ELEMENTS - width);
            }
            let (filled, padded) = (rows.len(), rows.len().next_multiple_of(K::MIN_ROWS));
            to.add(filled * BLOCK_ROW).write_bytes(0, (padded - filled) * BLOCK_ROW);
        }
    }

    /// The sums of a panel, and what follows them, to the columns that are wanted. `up` are those of the second weight,
    /// if there is one.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; nobody else writes this task's rows and columns.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, panel: usize, sums: *const f32, up: *const f32) {
        let Projection { weight, columns, epilogue, .. } = self.projection;
        let own = weight.columns_of(panel);
        let (start, end) = (own.start.max(columns.start), own.end.min(columns.end));
        for (index, row) in self.rows.clone().enumerate() {
            for column in (start..end).step_by(K::Vector::LANES) {
                let filled = K::Vector::LANES.min(end - column);
                let from = index * K::PANEL + column - own.start;
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
                    store_first(sum, self.output.add(to), filled);
                }
            }
        }
    }
}
