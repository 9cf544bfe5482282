//! The loops of every product, and what follows its sums while they are in a cache.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::operands::{BLOCK, BLOCK_ROW, Left, MAX_ROWS, Right};
use super::{PackedWeight, Product};
use crate::cpu::{
    Format, Kernel, LeftOperand, MAX_COLUMNS, Product as PanelProduct, Scratch, SharedPtr, SimdTask, Vector, Workers,
    dispatch_f32, erfc, for_each_task, second_cache, sigmoid,
};
use crate::error::{Error, check_len};
use crate::number::{Number, load_first, store_first};

/// The part of the second cache that a task's sums may take, besides its inputs and a block of the weight.
const SUMS_PART: usize = 4;
/// The words of the left operand that are copied together, if they are more than one block of each row: few rows then
/// read each panel of the right operand from end to end, which the processor's own prefetching follows.
const LEFT_WORDS: usize = 8 << 10;
/// A thread should find this many tasks, so that the last one is short.
const TASKS_PER_THREAD: usize = 8;

/// [`multiply`](super::multiply), compiled once.
pub(super) fn run<X: Number>(product: &Product<X>, output: &mut [MaybeUninit<X>]) -> Result<(), Error> {
    check_len("output", output.len(), product.check()?)?;
    if output.is_empty() {
        return Ok(());
    }
    let right = &product.right;
    let up = product.epilogue.up.map(|up| Right::Weight(up.weight, right.wanted()));
    let rights: Vec<_> = [Some(right.clone()), up].into_iter().flatten().collect();
    let run = Run { product, rights: &rights, output: SharedPtr(output.as_mut_ptr().cast()) };
    match right.is_bf16() {
        true => X::dispatch(right.instruction_set(), run),
        false => dispatch_f32(right.instruction_set(), run),
    }
    Ok(())
}

/// A call, all of whose sizes fit.
struct Run<'a, X> {
    product: &'a Product<'a, X>,
    /// The operand on the right, and that of the epilogue's second product.
    rights: &'a [Right<'a, X>],
    output: SharedPtr<X>,
}

impl<X: Number> SimdTask for Run<'_, X> {
    unsafe fn run<K: Kernel>(self) {
        let (Product { left, executor, .. }, rights) = (self.product, self.rights);
        let (right, rows) = (&rights[0], left.rows);
        let (columns, width) = (right.wanted(), right.panel::<K>());
        let panels = columns.start / width..columns.end.div_ceil(width);
        let products = rows.saturating_mul(columns.len()).saturating_mul(left.columns).saturating_mul(rights.len());
        let workers = Workers::of(products, rights.len() * right.bytes(), *executor);
        let split = TaskSplit::new::<K>(rows, panels.len(), rights.len(), workers.count);
        let multiple = if left.is_transposed { K::Vector::LANES } else { K::MIN_ROWS };
        let most_rows = split.rows.min(rows).next_multiple_of(multiple);
        let blocks = blocks_together(most_rows, right.padded::<K>() / K::ELEMENTS);
        let block_words = most_rows * BLOCK_ROW;
        let scratch = || TaskScratch {
            blocks,
            block_words,
            left: Scratch::zeros(blocks * block_words),
            right: Scratch::zeros(if right.is_copied::<K>(most_rows) { BLOCK * K::PANEL } else { 0 }),
            sums: Scratch::zeros(rights.len() * split.panels * most_rows * K::PANEL),
        };
        for_each_task(split.row_chunks * split.panel_chunks, workers, &scratch, &|scratch, index| {
            // Tasks of the same panels follow each other, and find them in a cache.
            let (row, panel) = (index % split.row_chunks * split.rows, index / split.row_chunks * split.panels);
            let (rows, first) = (row..rows.min(row + split.rows), panels.start + panel);
            let panels = first..panels.end.min(first + split.panels);
            // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
            unsafe { K::run_simd(Task { run: &self, rows, panels, scratch }) };
        });
    }
}

/// How many blocks of so many rows are copied together.
fn blocks_together(rows: usize, depth: usize) -> usize {
    (LEFT_WORDS / (rows * BLOCK_ROW)).clamp(1, depth.div_ceil(BLOCK).max(1))
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
        let fit = second_cache() / SUMS_PART / (4 * K::PANEL * rows_each * weights);
        let even = (panels * row_chunks).div_ceil(TASKS_PER_THREAD * workers);
        let panel_chunks = panels.div_ceil(fit.min(even).max(1));
        let panels_each = panels.div_ceil(panel_chunks);
        Self { rows: rows_each, row_chunks, panels: panels_each, panel_chunks: panels.div_ceil(panels_each) }
    }
}

/// What a thread works in.
struct TaskScratch {
    /// Blocks of the left operand that are copied together, and the words of each.
    blocks: usize,
    block_words: usize,
    /// (blocks, rows, [`BLOCK_ROW`]).
    left: Scratch,
    /// A block of a panel, if it is copied.
    right: Scratch,
    /// (rights, panels, rows, panel).
    sums: Scratch,
}

struct Task<'a, X> {
    run: &'a Run<'a, X>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: &'a mut TaskScratch,
}

impl<X: Number> SimdTask for Task<'_, X> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(mut self) {
        let Self { run: Run { product, rights, .. }, rows: ref own, ref panels, ref mut scratch } = self;
        let rows = own.len().next_multiple_of(K::MIN_ROWS);
        let depth = rights[0].padded::<K>() / K::ELEMENTS;
        let ones = [1f32; MAX_COLUMNS];
        let sums = scratch.sums.as_mut_ptr();
        if depth == 0 {
            scratch.sums.words_mut().fill(0.0);
        }
        let panel_words = rows * K::PANEL;
        let right_words = panels.len() * panel_words;
        let left = Left { matrix: &product.left, lead: rights[0].lead() };
        // SAFETY: the processor has the instruction set of K; the scratch was made for these sizes, and each operand
        // has these panels.
        unsafe {
            let _tiles = K::configure_tiles();
            let (to, right_copy) = (scratch.left.as_mut_ptr(), scratch.right.as_mut_ptr());
            let copied = LeftOperand { at: to, group: K::ROWS * BLOCK_ROW, row: BLOCK_ROW, step: 1 };
            let together = scratch.blocks * BLOCK;
            for start in (0..depth).step_by(together) {
                let blocks = (start..depth.min(start + together)).step_by(BLOCK);
                let steps = |first: usize| BLOCK.min(depth - first);
                let words_before = |first: usize| (first - start) / BLOCK * scratch.block_words;
                for first in blocks.clone() {
                    left.copy::<K>(own, first * K::ELEMENTS, steps(first), to.add(words_before(first)));
                }
                for (index, panel) in panels.clone().enumerate() {
                    for (at, right) in rights.iter().enumerate() {
                        for first in blocks.clone() {
                            let block = PanelProduct {
                                a: copied.offset(words_before(first)),
                                b: std::ptr::null(),
                                c: sums.add(at * right_words + index * panel_words),
                                rows,
                                depth: steps(first),
                                vectors: right.columns_of::<K>(panel).len().div_ceil(K::Vector::LANES),
                                factors: (first > 0).then_some(ones.as_ptr()),
                                format: Format::F32,
                            };
                            right.multiply::<K>(panel, first * K::ELEMENTS, right_copy, block);
                        }
                    }
                }
            }
            for (index, panel) in self.panels.clone().enumerate() {
                let own_sums = sums.add(index * panel_words);
                self.write::<K>(panel, own_sums, own_sums.wrapping_add(right_words));
            }
        }
    }
}

impl<X: Number> Task<'_, X> {
    /// The sums of a panel, and what follows them, to some rows of the columns that are wanted. `up` are those of the
    /// second operand, if there is one.
    ///
    /// # Safety
    /// As [`SimdTask::run`]; nobody else writes these rows and columns.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, panel: usize, sums: *const f32, up: *const f32) {
        let Self { run: Run { product: Product { right, epilogue, .. }, output, .. }, rows, .. } = self;
        let (own, columns) = (right.columns_of::<K>(panel), right.wanted());
        let (start, end) = (own.start.max(columns.start), own.end.min(columns.end));
        for row in rows.clone() {
            for column in (start..end).step_by(K::Vector::LANES) {
                let filled = K::Vector::LANES.min(end - column);
                let from = (row - rows.start) * K::PANEL + column - own.start;
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

/// `activation(sums + bias) · (up · xs + its bias) + residual`, as much of it as there is, in f32; the result is
/// rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, X> {
    /// One for each output of the weight.
    pub bias: Option<&'a [f32]>,
    /// Applied to each sum with its bias.
    pub activation: Option<Activation>,
    /// A second product of the same rows.
    pub up: Option<Up<'a>>,
    /// (rows, columns), as the result.
    pub residual: Option<&'a [X]>,
}

/// The second product of a gated one.
#[derive(Clone, Copy, Debug)]
pub struct Up<'a> {
    /// Of the shape, element and instruction set of the first weight.
    pub weight: &'a PackedWeight,
    /// One for each output of the weight.
    pub bias: Option<&'a [f32]>,
}

impl<X> Default for Epilogue<'_, X> {
    fn default() -> Self {
        Self { bias: None, activation: None, up: None, residual: None }
    }
}

impl<X> Epilogue<'_, X> {
    /// That all of it fits the right operand, of so many columns, and the `count` elements of the result.
    pub(super) fn check(&self, right: &Right<X>, columns: usize, count: usize) -> Result<(), Error> {
        if let Some(bias) = self.bias {
            check_len("bias", bias.len(), columns)?;
        }
        if let Some(Up { weight: up, bias }) = self.up {
            let Right::Weight(weight, _) = right else {
                return Err(Error::Shape("expected a packed weight beside that of the up product".into()));
            };
            if !up.is_like(weight) {
                return Err(Error::Shape(format!("expected the up product's weight to be {weight:?}, found {up:?}")));
            }
            if let Some(bias) = bias {
                check_len("the up product's bias", bias.len(), columns)?;
            }
        }
        match self.residual {
            Some(residual) => check_len("residual", residual.len(), count),
            None => Ok(()),
        }
    }
}

/// A function of each output, with the largest error on any instruction set. NaN stays NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x / 2 · (1 + erf(x / √2))`, to 3e-7 of `|x|`; NaN for -inf, as `-inf · 0`.
    Gelu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))`, to 5e-7 of `|x|`; NaN for -inf.
    GeluTanh,
    /// `x / (1 + exp(-x))`, to 3e-7 of `|x|`; NaN for -inf.
    Silu,
    /// The larger one of x and 0.
    Relu,
}

impl Activation {
    /// # Safety
    /// As [`Vector`].
    #[inline(always)]
    pub(crate) unsafe fn apply<V: Vector>(self, x: V) -> V {
        use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
        // SAFETY: the processor has the instruction set of V, by this method's contract.
        unsafe {
            match self {
                Self::Gelu => x.mul(V::splat(0.5)).mul(erfc(x.mul(V::splat(-FRAC_1_SQRT_2)))),
                // (1 + tanh u) / 2 = sigmoid(2 u), and 2 √(2/π) = √2 · 2/√π.
                Self::GeluTanh => {
                    const TWICE: f32 = std::f32::consts::SQRT_2 * FRAC_2_SQRT_PI;
                    let factor = x.mul(x).mul_add(V::splat(TWICE * 0.044715), V::splat(TWICE));
                    x.mul(sigmoid(x.mul(factor)))
                }
                Self::Silu => x.mul(sigmoid(x)),
                Self::Relu => V::splat(0.0).max(x),
            }
        }
    }
}
