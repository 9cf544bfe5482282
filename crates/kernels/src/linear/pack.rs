//! Rows of a weight on their way into panels.

use crate::cpu::{Kernel, MAX_LANES, SimdTask, Vector};
use crate::number::{Dtype, Number};

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
        for (word, columns) in square.chunks_exact(lanes).take(filled).enumerate() {
            let input = first + word * of_word;
            // SAFETY: as this method's contract; inputs below `padded` are rows of the panel.
            unsafe {
                if E::DTYPE != Dtype::F16 {
                    let to = self.to.add(input / of_word * self.panel + column);
                    K::Vector::load(columns.as_ptr()).store(to);
                    continue;
                }
                let to = self.to.cast::<u16>().add(input * self.panel + column);
                for (at, pair) in columns.iter().enumerate() {
                    *to.add(at) = pair.to_bits() as u16;
                }
                if input + 1 < self.padded {
                    for (at, pair) in columns.iter().enumerate() {
                        *to.add(self.panel + at) = (pair.to_bits() >> 16) as u16;
                    }
                }
            }
        }
    }
}
