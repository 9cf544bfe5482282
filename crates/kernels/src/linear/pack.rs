//! Rows of a weight on their way into panels.

use super::PackedWeight;
use super::weight::{Format, no_memory};
use crate::cpu::{Kernel, MAX_LANES, Scratch, SharedPtr, SimdTask, Tier, Vector, Workers, for_each_index};
use crate::error::{Error, check_len, check_tier};
use crate::number::{Dtype, Number};

/// [`PackedWeight::new`], compiled once.
pub(super) fn pack_weight<E: Number>(rows: &[E], shape: (usize, usize), tier: Tier) -> Result<PackedWeight, Error> {
    struct Pack<'a, E> {
        rows: &'a [E],
        weight: PackedWeight,
        packed: &'a mut Option<PackedWeight>,
    }
    impl<E: Number> SimdTask for Pack<'_, E> {
        unsafe fn run<K: Kernel>(self) {
            let Self { rows, weight, packed } = self;
            // Steps are whole, and a tier may take more.
            let (inputs, panel) = (weight.inputs, K::PANEL);
            let padded = inputs.next_multiple_of((K::ELEMENTS * K::DEPTH).max(weight.format.step()));
            let outputs = panel * inputs;
            *packed = PackedWeight { panel, padded, ..weight }.fill(&|index, to| {
                let rows = &rows[index * outputs..rows.len().min((index + 1) * outputs)];
                // SAFETY: the processor has the tier of K, which includes that of its kernel for f32; the panel is
                // this task's.
                unsafe { K::F32::run_simd(PackPanel { rows, inputs, to, padded, panel }) };
            });
        }
    }
    let (outputs, inputs) = shape;
    let no_memory = || no_memory(outputs, inputs);
    check_tier(tier)?;
    check_len("the weight", rows.len(), outputs.checked_mul(inputs).ok_or_else(no_memory)?)?;
    let (words, format) = (Scratch::zeros(0), Format::Elements(E::DTYPE));
    let weight = PackedWeight { words, format, tier, inputs, outputs, panel: 0, padded: 0 };
    let mut packed = None;
    E::dispatch(tier, Pack { rows, weight, packed: &mut packed });
    packed.ok_or_else(no_memory)
}

impl PackedWeight {
    /// Calls `write` for every panel with its words, all of which it initialises. `None` where there is no memory for
    /// them.
    pub(super) fn fill(mut self, write: &(dyn Fn(usize, *mut f32) + Sync)) -> Option<Self> {
        let Self { inputs, outputs, panel, padded, .. } = self;
        let panels = outputs.div_ceil(panel);
        panels.checked_mul(padded)?.checked_mul(panel)?.checked_mul(size_of::<f32>())?;
        let words = self.format.bytes(padded) * panel / size_of::<f32>();
        let tasks = if words == 0 { 0 } else { panels };
        let write_all = |to: *mut f32| {
            let to = SharedPtr(to);
            for_each_index(tasks, Workers::of(outputs * inputs, 0, None), &|index| {
                // SAFETY: there are as many panels.
                write(index, unsafe { to.add(index * words) });
            });
        };
        // SAFETY: every panel is written from its beginning to its end.
        self.words = unsafe { Scratch::written(panels * words, &write_all) }?;
        Some(self)
    }
}

/// Copies the rows of one panel into it: [`Vector::LANES`] rows and as many words of each at a time are transposed, so
/// that memory is read and written in whole cache lines. What the panel has beyond the rows and their inputs becomes
/// zeros.
pub(super) struct PackPanel<'a, E> {
    /// At most a panel of rows, of `inputs` each.
    pub rows: &'a [E],
    pub inputs: usize,
    /// (padded, panel); pairs of neighbouring inputs are the words of bf16.
    pub to: *mut f32,
    pub padded: usize,
    pub panel: usize,
}

/// LANES by LANES words.
type Square = [f32; MAX_LANES * MAX_LANES];

impl<E: Number> SimdTask for PackPanel<'_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        let steps = lanes * (size_of::<f32>() / size_of::<E>());
        let (mut rows, mut words): (Square, Square) = ([0.0; _], [0.0; _]);
        for column in (0..self.panel).step_by(lanes) {
            for first in (0..self.padded).step_by(steps) {
                // SAFETY: the processor has the tier of K; the columns and the inputs from `first` begin within the
                // panel.
                unsafe {
                    self.read::<K>(column, first, &mut rows);
                    K::Vector::transpose(rows.as_ptr(), lanes, words.as_mut_ptr(), lanes);
                    self.write::<K>(column, first, &words);
                }
            }
        }
    }
}

impl<E: Number> PackPanel<'_, E> {
    /// LANES rows from `column`, as many words of each from the input `first`.
    #[inline(always)]
    fn read<K: Kernel>(&self, column: usize, first: usize, square: &mut Square) {
        let steps = K::Vector::LANES * (size_of::<f32>() / size_of::<E>());
        let filled = steps.min(self.inputs.saturating_sub(first));
        for row in 0..K::Vector::LANES {
            // SAFETY: the row's part of the square lies in it, and so does every element that is read in the rows.
            unsafe {
                let to = square.as_mut_ptr().cast::<E>().add(row * steps);
                let from = (column + row) * self.inputs + first;
                if from + filled > self.rows.len() {
                    to.write_bytes(0, steps);
                } else if filled == steps {
                    // The length is known to the compiler.
                    std::ptr::copy_nonoverlapping(self.rows.as_ptr().add(from), to, steps);
                } else {
                    std::ptr::copy_nonoverlapping(self.rows.as_ptr().add(from), to, filled);
                    to.add(filled).write_bytes(0, steps - filled);
                }
            }
        }
    }

    /// The words of LANES columns from `column`, of the inputs from `first` on.
    ///
    /// # Safety
    /// The processor has the tier of K; the columns and the first input lie in the panel.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, column: usize, first: usize, square: &Square) {
        let lanes = K::Vector::LANES;
        let of_word = size_of::<f32>() / size_of::<E>();
        let filled = lanes.min((self.padded - first).div_ceil(of_word));
        for word in 0..filled {
            let (input, columns) = (first + word * of_word, square.as_ptr().wrapping_add(word * lanes));
            // SAFETY: as this method's contract; inputs below `padded` are rows of the panel.
            unsafe {
                if const { !matches!(E::DTYPE, Dtype::F16) } {
                    K::Vector::load(columns).store(self.to.add(input / of_word * self.panel + column));
                    continue;
                }
                // The lower halves are one row, the upper ones the next.
                let to = self.to.cast::<u16>().add(input * self.panel + column);
                for half in 0..2.min(self.padded - input) {
                    for at in 0..lanes {
                        *to.add(half * self.panel + at) = *columns.cast::<u16>().add(2 * at + half);
                    }
                }
            }
        }
    }
}
