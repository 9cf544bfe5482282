//! Rows of a weight on their way into panels.

use super::weight::{Kind, Packable};
use crate::cpu::{Job, Kernel, MOST_LANES, Vector};

/// Copies the rows of one panel into it: [`Vector::LANES`] rows and as many words of each at a time are transposed, so that
/// memory is read and written in whole cache lines. What the panel has beyond the rows and their inputs becomes zeros.
pub(super) struct PackPanel<'a, E> {
    /// At most a panel of rows, of `inputs` each.
    pub rows: &'a [E],
    pub inputs: usize,
    /// (padded, panel), as [`position`](super::weight::position) has it.
    pub to: *mut f32,
    pub padded: usize,
    pub panel: usize,
}

/// LANES by LANES words.
type Square = [f32; MOST_LANES * MOST_LANES];

impl<E: Packable> Job for PackPanel<'_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let lanes = K::Vector::LANES;
        let steps = lanes * E::KIND.elements_of_word();
        let (mut rows, mut words): (Square, Square) = ([0.0; _], [0.0; _]);
        for column in (0..self.panel).step_by(lanes) {
            for first in (0..self.padded).step_by(steps) {
                // SAFETY: the caller's promise; the columns and the inputs from `first` begin within the panel.
                unsafe {
                    self.read::<K>((column, first), &mut rows);
                    K::Vector::transpose(rows.as_ptr(), lanes, words.as_mut_ptr(), lanes);
                    self.write::<K>((column, first), &words);
                }
            }
        }
    }
}

impl<E: Packable> PackPanel<'_, E> {
    /// LANES rows from `column`, as many words of each from the input `first`.
    #[inline(always)]
    fn read<K: Kernel>(&self, (column, first): (usize, usize), square: &mut Square) {
        let steps = K::Vector::LANES * E::KIND.elements_of_word();
        let held = steps.min(self.inputs.saturating_sub(first));
        for row in 0..K::Vector::LANES {
            // SAFETY: the row's part of the square lies in it, and so does every element that is read in the rows.
            unsafe {
                let to = square.as_mut_ptr().cast::<E>().add(row * steps);
                let from = (column + row) * self.inputs + first;
                if from + held > self.rows.len() {
                    to.write_bytes(0, steps);
                } else if held == steps {
                    // The length is known to the compiler.
                    std::ptr::copy_nonoverlapping(self.rows.as_ptr().add(from), to, steps);
                } else {
                    std::ptr::copy_nonoverlapping(self.rows.as_ptr().add(from), to, held);
                    to.add(held).write_bytes(0, steps - held);
                }
            }
        }
    }

    /// The words of LANES columns from `column`, of the inputs from `first` on.
    ///
    /// # Safety
    /// As [`Kernel`]; the columns and the first input lie in the panel.
    #[inline(always)]
    unsafe fn write<K: Kernel>(&self, (column, first): (usize, usize), square: &Square) {
        let lanes = K::Vector::LANES;
        let of_word = E::KIND.elements_of_word();
        let held = lanes.min((self.padded - first).div_ceil(of_word));
        for (word, columns) in square.chunks_exact(lanes).take(held).enumerate() {
            let input = first + word * of_word;
            // SAFETY: the caller's promise; inputs below `padded` are rows of the panel.
            unsafe {
                if E::KIND != Kind::F16 {
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
