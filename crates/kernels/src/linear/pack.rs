//! Packing of weights into panels, and of rows of elements.

use super::matrix::{Matrix, Square};
use super::weight::{PackedWeight, WeightShape};
use crate::cpu::{
    Format, InstructionSet, Kernel, Scratch, SharedPtr, SimdTask, Vector, WorkSize, Workers, dispatch_f32,
    for_each_index, kernel_layout,
};
use crate::error::{Error, check_instruction_set, check_len};
use crate::number::Number;

/// Packs a matrix, as [`PackedWeight::new`] says. It is compiled once for each element.
pub(super) fn pack_weight<E: Number>(
    rows: &[E],
    shape: WeightShape,
    instruction_set: InstructionSet,
) -> Result<PackedWeight, Error> {
    check_len("the weight", rows.len(), shape.count()?)?;
    let WeightShape { outputs, inputs } = shape;
    let matrix = Matrix { data: rows, rows: outputs, columns: inputs, stride: inputs, is_transposed: false };
    // SAFETY: a task writes its whole panel.
    unsafe {
        PackedWeight::filled_by(E::FORMAT, shape, instruction_set, &|weight, index, to| {
            dispatch_f32(instruction_set, PackPanel { matrix, weight, index, to });
        })
    }
}

/// The sizes of a packed weight.
struct PanelSizes {
    /// The number of panels.
    panels: usize,
    /// The number of 32-bit words of a panel.
    panel_words: usize,
    /// The number of 32-bit words of all panels.
    words: usize,
}

impl PackedWeight {
    /// Returns a weight without its words, and the sizes of its panels.
    fn empty(format: Format, shape: WeightShape, instruction_set: InstructionSet) -> Result<(Self, PanelSizes), Error> {
        check_instruction_set(instruction_set)?;
        let WeightShape { outputs, inputs } = shape;
        let layout = kernel_layout(instruction_set, format == Format::BF16);
        // A product takes whole steps of the format, and an instruction set may take more.
        let step = (layout.elements * layout.depth).max(format.step());
        let panels = outputs.div_ceil(layout.panel);
        let padded = inputs.checked_next_multiple_of(step).ok_or_else(|| shape.no_memory())?;
        let all_sizes = || {
            let panel_bytes = format.checked_bytes(padded)?.checked_mul(layout.panel)?;
            let panel_words = panel_bytes / size_of::<f32>();
            Some(PanelSizes { panels, panel_words, words: panel_words.checked_mul(panels)? })
        };
        let sizes = all_sizes().ok_or_else(|| shape.no_memory())?;
        let weight =
            Self { words: Scratch::zeros(0), format, instruction_set, inputs, outputs, panel: layout.panel, padded };
        Ok((weight, sizes))
    }

    /// Returns a weight whose panels `write` fills, each by its index.
    ///
    /// # Safety
    /// `write` writes all words of a panel.
    pub(super) unsafe fn filled_by(
        format: Format,
        shape: WeightShape,
        instruction_set: InstructionSet,
        write: &(dyn Fn(&Self, usize, *mut f32) + Sync),
    ) -> Result<Self, Error> {
        let (mut weight, PanelSizes { panel_words, words, panels }) = Self::empty(format, shape, instruction_set)?;
        let without_words = &weight;
        let write_all = |to: *mut f32| {
            let tasks = if panel_words == 0 { 0 } else { panels };
            let all_panels = SharedPtr(to);
            let work = WorkSize { multiply_adds: shape.outputs.saturating_mul(shape.inputs), bytes: 0 };
            for_each_index(tasks, Workers::for_call(work), &|index| {
                // SAFETY: the index is that of a panel.
                write(without_words, index, unsafe { all_panels.add(index * panel_words) });
            });
        };
        // SAFETY: every panel is written, by this function's contract.
        let packed = unsafe { Scratch::filled_by(words, &write_all) };
        weight.words = packed.ok_or_else(|| shape.no_memory())?;
        Ok(weight)
    }
}

/// A task that copies rows into one panel. It transposes squares of [`Vector::LANES`] rows by words, so that memory is
/// read and written in whole cache lines. Rows and inputs that do not exist become zeros.
struct PackPanel<'a, E> {
    /// The weight in memory, (out, in).
    matrix: Matrix<'a, E>,
    weight: &'a PackedWeight,
    index: usize,
    /// The panel, (padded, panel). The words of bf16 are pairs of neighbouring inputs.
    to: *mut f32,
}

impl<E: Number> SimdTask for PackPanel<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { matrix, weight: &PackedWeight { panel, padded, .. }, index, to } = self;
        let lanes = K::Vector::LANES;
        let word_elements = size_of::<f32>() / size_of::<E>();
        let mut square: Square = [0.0; _];
        for column in (0..panel).step_by(lanes) {
            for first in (0..padded).step_by(lanes * word_elements) {
                let filled = (padded - first).div_ceil(word_elements);
                let output = index * panel + column;
                // SAFETY: the processor has the instruction set of K; columns and inputs below `padded` lie in the
                // panel.
                unsafe {
                    matrix.transpose::<K::Vector>(output, first, word_elements, square.as_mut_ptr(), lanes);
                    for (word, words) in square.chunks_exact(lanes).take(lanes.min(filled)).enumerate() {
                        let first_input = first + word * word_elements;
                        if const { !matches!(E::FORMAT, Format::F16) } {
                            let word_to = to.add(first_input / word_elements * panel + column);
                            K::Vector::load(words.as_ptr()).store(word_to);
                            continue;
                        }
                        // The lower halves of the words are one row of the panel, and the upper halves the next.
                        for (half, input) in (first_input..padded.min(first_input + word_elements)).enumerate() {
                            let row_to = to.cast::<u16>().add(input * panel + column);
                            for (at, pair) in words.iter().enumerate() {
                                *row_to.add(at) = (pair.to_bits() >> (16 * half)) as u16;
                            }
                        }
                    }
                }
            }
        }
    }
}
