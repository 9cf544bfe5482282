//! Packing of weights into panels: of rows of elements, and of codes of 4 and 8 bits.

use std::ops::Range;

use half::f16;

use super::matrix::{Matrix, Square};
use super::weight::{PackedWeight, WeightShape};
use crate::cpu::{
    CODE_BLOCK, Format, InstructionSet, Kernel, Scratch, SharedPtr, SimdTask, Vector, WorkSize, Workers, dispatch_f32,
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
    /// The inputs with the zeros that pad them.
    padded: usize,
    /// The 32-bit words of a panel.
    panel_words: usize,
    /// The 32-bit words of all panels.
    words: usize,
}

impl PackedWeight {
    /// Returns a weight whose panels `write` fills, each by its index.
    ///
    /// # Safety
    /// `write` writes all words of a panel.
    unsafe fn filled_by(
        format: Format,
        shape: WeightShape,
        instruction_set: InstructionSet,
        write: &(dyn Fn(&Self, usize, *mut f32) + Sync),
    ) -> Result<Self, Error> {
        check_instruction_set(instruction_set)?;
        let WeightShape { outputs, inputs } = shape;
        let layout = kernel_layout(instruction_set, format == Format::BF16);
        // A product takes whole steps of the format, and an instruction set may take more.
        let step = (layout.elements * layout.depth).max(format.step());
        let panels = outputs.div_ceil(layout.panel);
        let sizes = || {
            let padded = inputs.checked_next_multiple_of(step)?;
            let panel_bytes = format.checked_bytes(padded)?.checked_mul(layout.panel)?;
            let panel_words = panel_bytes / size_of::<f32>();
            Some(PanelSizes { padded, panel_words, words: panel_words.checked_mul(panels)? })
        };
        let PanelSizes { padded, panel_words, words } = sizes().ok_or_else(|| shape.no_memory())?;
        let mut weight =
            Self { words: Scratch::zeros(0), format, instruction_set, inputs, outputs, panel: layout.panel, padded };
        let without_words = &weight;
        let write_all = |to: *mut f32| {
            let tasks = if panel_words == 0 { 0 } else { panels };
            let all_panels = SharedPtr(to);
            let work = WorkSize { multiply_adds: outputs.saturating_mul(inputs), bytes: 0 };
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

/// A weight (out, in) whose numbers are `code · scale + minimum`, or `(code - 2^(bits - 1)) · scale` without minimums,
/// with a scale and a minimum for each [`CODE_BLOCK`] inputs of an output. Products with it have the bits of products
/// with these numbers in f32, for any scales and minimums: zeros of either sign, subnormal, infinite and NaN.
///
/// ```
/// use candle_attention_kernels::{InstructionSet, linear::{Codes, PackedWeight, WeightShape}};
/// use half::f16;
///
/// // One output of 32 inputs, each of which is (code - 8) / 2.
/// let codes: Vec<u8> = (0..32).map(|input| input % 16).collect();
/// let codes = Codes { bits: 4, codes: &codes, scales: &[f16::from_f32(0.5)], minimums: None };
/// let shape = WeightShape { outputs: 1, inputs: 32 };
/// let weight = PackedWeight::from_codes(&codes, shape, InstructionSet::Scalar)?;
/// assert_eq!(weight.unpack::<f32>()?[..3], [-4.0, -3.5, -3.0]);
/// // A panel of the scalar instruction set has 16 outputs, and memory comes in lines of 64 bytes.
/// assert_eq!(weight.memory(), (16usize * (2 + 16)).next_multiple_of(64));
/// # Ok::<(), candle_attention_kernels::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// The bits of a code in the packed weight, 4 or 8.
    pub bits: usize,
    /// The codes, (out, in), each below 2^bits.
    pub codes: &'a [u8],
    /// The scale of each block, (out, in / [`CODE_BLOCK`]).
    pub scales: &'a [f16],
    /// The minimum of each block, (out, in / [`CODE_BLOCK`]), or `None` for codes on both sides of zero.
    pub minimums: Option<&'a [f16]>,
}

impl PackedWeight {
    /// Packs a weight of codes for products on an instruction set. The weight takes `bits / 8` bytes for each number,
    /// and 2 bytes for each scale and each minimum.
    ///
    /// # Errors
    /// [`Error::Shape`] for bits that are neither 4 nor 8, inputs that are not whole blocks, slices that do not have
    /// the lengths of the shape, and a code that exceeds its bits; [`Error::InstructionSet`] and [`Error::Memory`] as
    /// [`new`](Self::new).
    pub fn from_codes(codes: &Codes, shape: WeightShape, instruction_set: InstructionSet) -> Result<Self, Error> {
        codes.check(shape)?;
        let WeightShape { outputs, inputs } = shape;
        let format = Format::Codes { bits: codes.bits, has_minimums: codes.minimums.is_some() };
        // SAFETY: a task clears its whole panel first.
        unsafe {
            Self::filled_by(format, shape, instruction_set, &|&Self { panel, .. }, index, to| {
                let halves = format.bytes(inputs) * panel / size_of::<u16>();
                to.cast::<u16>().write_bytes(0, halves);
                let panel_halves = std::slice::from_raw_parts_mut(to.cast(), halves);
                codes.pack_panel(panel_halves, index * panel..outputs.min((index + 1) * panel), inputs, panel);
            })
        }
    }
}

impl Codes<'_> {
    /// Checks the bits, the lengths of the slices and the codes.
    fn check(&self, shape: WeightShape) -> Result<(), Error> {
        let &Self { bits, codes, scales, minimums } = self;
        let inputs = shape.inputs;
        if bits != 4 && bits != 8 {
            return Err(Error::Shape(format!("expected codes of 4 or 8 bits, found {bits}")));
        }
        if !inputs.is_multiple_of(CODE_BLOCK) {
            return Err(Error::Shape(format!("expected inputs in blocks of {CODE_BLOCK}, found {inputs}")));
        }
        let count = shape.count()?;
        check_len("codes", codes.len(), count)?;
        check_len("scales", scales.len(), count / CODE_BLOCK)?;
        if let Some(minimums) = minimums {
            check_len("minimums", minimums.len(), count / CODE_BLOCK)?;
        }
        let largest = codes.iter().max().copied().unwrap_or(0);
        if bits < 8 && largest >> bits > 0 {
            return Err(Error::Shape(format!("expected codes of {bits} bits, found {largest}")));
        }
        Ok(())
    }

    /// Writes some outputs to their panel, which is zeros before.
    fn pack_panel(&self, to: &mut [u16], outputs: Range<usize>, inputs: usize, panel: usize) {
        const WORD_HALVES: usize = 2;
        let &Self { bits, codes, scales, minimums } = self;
        let blocks = inputs / CODE_BLOCK;
        let block_len = to.len() / blocks;
        let half_codes = 16 / bits;
        // Codes on both sides of zero become numbers in two's complement.
        let sign = if minimums.is_some() { 0 } else { 1 << (bits - 1) };
        for (column, output) in outputs.enumerate() {
            for block in 0..blocks {
                let block_to = &mut to[block * block_len..][..block_len];
                block_to[column] = scales[output * blocks + block].to_bits();
                let mut numbers = panel;
                if let Some(minimums) = minimums {
                    block_to[panel + column] = minimums[output * blocks + block].to_bits();
                    numbers += panel;
                }
                let block_codes = &codes[output * inputs + block * CODE_BLOCK..][..CODE_BLOCK];
                for (at, codes_of_half) in block_codes.chunks_exact(half_codes).enumerate() {
                    // The first code is the highest of the word, and so in its second half.
                    let word = at / WORD_HALVES;
                    let half = 1 - at % WORD_HALVES;
                    let packed = codes_of_half.iter().fold(0, |packed, &code| packed << bits | u16::from(code ^ sign));
                    block_to[numbers + (word * panel + column) * WORD_HALVES + half] = packed;
                }
            }
        }
    }
}
