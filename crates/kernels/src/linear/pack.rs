//! Weights on their way into panels: rows of elements, and codes of 4 and 8 bits.

use half::f16;

use super::PackedWeight;
use super::operands::{Matrix, Square};
use super::weight::no_memory;
use crate::cpu::{
    CODE_BLOCK, Format, InstructionSet, Kernel, Layout, Scratch, SharedPtr, SimdTask, Vector, Workers, dispatch_f32,
    for_each_index,
};
use crate::error::{Error, check_instruction_set, check_len};
use crate::number::Number;

/// [`PackedWeight::new`], compiled once.
pub(super) fn pack_weight<E: Number>(
    rows: &[E],
    shape: (usize, usize),
    instruction_set: InstructionSet,
) -> Result<PackedWeight, Error> {
    let (outputs, inputs) = shape;
    check_len("the weight", rows.len(), outputs.checked_mul(inputs).ok_or_else(|| no_memory(outputs, inputs))?)?;
    let rows = Matrix { data: rows, rows: outputs, columns: inputs, stride: inputs, is_transposed: false };
    // SAFETY: a task writes its whole panel.
    unsafe {
        PackedWeight::written(E::FORMAT, shape, instruction_set, &|weight, index, to| {
            dispatch_f32(instruction_set, PackPanel { rows, weight, index, to });
        })
    }
}

impl PackedWeight {
    /// A weight whose panels `write` fills, each by its index.
    ///
    /// # Safety
    /// It writes all words of a panel.
    unsafe fn written(
        format: Format,
        (outputs, inputs): (usize, usize),
        instruction_set: InstructionSet,
        write: &(dyn Fn(&Self, usize, *mut f32) + Sync),
    ) -> Result<Self, Error> {
        check_instruction_set(instruction_set)?;
        let layout = Layout::new(instruction_set, format == Format::BF16);
        // Steps are whole, and an instruction set may take more.
        let step = (layout.elements * layout.depth).max(format.step());
        let panels = outputs.div_ceil(layout.panel);
        let sizes = || {
            let padded = inputs.checked_next_multiple_of(step)?;
            let panel_bytes = format.checked_bytes(padded)?.checked_mul(layout.panel)?;
            let panel_words = panel_bytes / size_of::<f32>();
            Some((padded, panel_words, panel_words.checked_mul(panels)?))
        };
        let (padded, panel_words, words) = sizes().ok_or_else(|| no_memory(outputs, inputs))?;
        let words_of_nothing = Scratch::zeros(0);
        let mut weight =
            Self { words: words_of_nothing, format, instruction_set, inputs, outputs, panel: layout.panel, padded };
        let unwritten = &weight;
        let write_all = |to: *mut f32| {
            let (to, tasks) = (SharedPtr(to), if panel_words == 0 { 0 } else { panels });
            for_each_index(tasks, Workers::of(outputs.saturating_mul(inputs), 0, None), &|index| {
                // SAFETY: there are as many panels.
                write(unwritten, index, unsafe { to.add(index * panel_words) });
            });
        };
        // SAFETY: every panel is written, by this function's contract.
        let written = unsafe { Scratch::written(words, &write_all) };
        weight.words = written.ok_or_else(|| no_memory(outputs, inputs))?;
        Ok(weight)
    }
}

/// Copies the rows of one panel into it: [`Vector::LANES`] rows and as many words of each at a time are transposed, so
/// that memory is read and written in whole cache lines. What the panel has beyond the rows and their inputs becomes
/// zeros.
struct PackPanel<'a, E> {
    /// (out, in).
    rows: Matrix<'a, E>,
    weight: &'a PackedWeight,
    index: usize,
    /// (padded, panel); pairs of neighbouring inputs are the words of bf16.
    to: *mut f32,
}

impl<E: Number> SimdTask for PackPanel<'_, E> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { rows, weight: &PackedWeight { panel, padded, .. }, index, to } = self;
        let (lanes, of_word, mut square): (_, _, Square) =
            (K::Vector::LANES, size_of::<f32>() / size_of::<E>(), [0.0; _]);
        for column in (0..panel).step_by(lanes) {
            for first in (0..padded).step_by(lanes * of_word) {
                let filled = (padded - first).div_ceil(of_word);
                // SAFETY: the processor has the instruction set of K; columns and inputs below `padded` lie in the
                // panel.
                unsafe {
                    let at = [index * panel + column, first];
                    rows.transpose::<K::Vector>(at, of_word, square.as_mut_ptr(), lanes);
                    for (word, words) in square.chunks_exact(lanes).take(lanes.min(filled)).enumerate() {
                        let input = first + word * of_word;
                        if const { !matches!(E::FORMAT, Format::F16) } {
                            K::Vector::load(words.as_ptr()).store(to.add(input / of_word * panel + column));
                            continue;
                        }
                        // The lower halves are one row, the upper ones the next.
                        for (half, input) in (input..padded.min(input + of_word)).enumerate() {
                            let to = to.cast::<u16>().add(input * panel + column);
                            for (at, word) in words.iter().enumerate() {
                                *to.add(at) = (word.to_bits() >> (16 * half)) as u16;
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
/// use candle_attention_kernels::{InstructionSet, linear::{Codes, PackedWeight}};
/// use half::f16;
///
/// // One output of 32 inputs, each of which is (code - 8) / 2.
/// let codes: Vec<u8> = (0..32).map(|input| input % 16).collect();
/// let codes = Codes { bits: 4, codes: &codes, scales: &[f16::from_f32(0.5)], minimums: None };
/// let weight = PackedWeight::from_codes(&codes, (1, 32), InstructionSet::Scalar)?;
/// assert_eq!(weight.unpack::<f32>()?[..3], [-4.0, -3.5, -3.0]);
/// // A panel of the scalar instruction set has 16 outputs, and memory comes in lines of 64 bytes.
/// assert_eq!(weight.memory(), (16usize * (2 + 16)).next_multiple_of(64));
/// # Ok::<(), candle_attention_kernels::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// What a code takes in the packed weight, 4 or 8.
    pub bits: usize,
    /// (out, in), each below 2^bits.
    pub codes: &'a [u8],
    /// (out, in / [`CODE_BLOCK`]).
    pub scales: &'a [f16],
    /// (out, in / [`CODE_BLOCK`]), or `None` for codes on both sides of zero.
    pub minimums: Option<&'a [f16]>,
}

impl PackedWeight {
    /// Packs a weight of codes for products on an instruction set. It takes `bits / 8` bytes a number, and 2 for each
    /// scale and each minimum.
    ///
    /// # Errors
    /// [`Error::Shape`] for bits that are neither 4 nor 8, inputs that are not whole blocks, slices of other lengths
    /// than the shape says, and a code of more than its bits; [`Error::InstructionSet`] and [`Error::Memory`] as
    /// [`new`](Self::new).
    pub fn from_codes(codes: &Codes, shape: (usize, usize), instruction_set: InstructionSet) -> Result<Self, Error> {
        let (outputs, inputs) = shape;
        codes.check(outputs, inputs)?;
        let format = Format::Codes { bits: codes.bits, has_minimums: codes.minimums.is_some() };
        // SAFETY: a task clears its whole panel first.
        unsafe {
            Self::written(format, shape, instruction_set, &|&Self { panel, .. }, index, to| {
                let words = format.bytes(inputs) * panel / size_of::<u16>();
                to.cast::<u16>().write_bytes(0, words);
                let own = std::slice::from_raw_parts_mut(to.cast(), words);
                codes.pack_panel(own, index * panel..outputs.min((index + 1) * panel), inputs, panel);
            })
        }
    }
}

impl Codes<'_> {
    fn check(&self, outputs: usize, inputs: usize) -> Result<(), Error> {
        let &Self { bits, codes, scales, minimums } = self;
        if bits != 4 && bits != 8 {
            return Err(Error::Shape(format!("expected codes of 4 or 8 bits, found {bits}")));
        }
        if !inputs.is_multiple_of(CODE_BLOCK) {
            return Err(Error::Shape(format!("expected inputs in blocks of {CODE_BLOCK}, found {inputs}")));
        }
        let count = outputs.checked_mul(inputs).ok_or_else(|| no_memory(outputs, inputs))?;
        check_len("codes", codes.len(), count)?;
        check_len("scales", scales.len(), count / CODE_BLOCK)?;
        if let Some(minimums) = minimums {
            check_len("minimums", minimums.len(), count / CODE_BLOCK)?;
        }
        match codes.iter().max() {
            Some(&code) if bits < 8 && code >> bits > 0 => {
                Err(Error::Shape(format!("expected codes of {bits} bits, found {code}")))
            }
            _ => Ok(()),
        }
    }

    /// Puts the outputs of a panel into it. What the panel has beyond them is zeros before.
    fn pack_panel(&self, to: &mut [u16], outputs: std::ops::Range<usize>, inputs: usize, panel: usize) {
        let &Self { bits, codes, scales, minimums } = self;
        let blocks = inputs / CODE_BLOCK;
        let block_len = to.len() / blocks;
        let (codes_of_half, halves_of_word) = (16 / bits, 2);
        // Codes on both sides of zero become numbers in two's complement.
        let sign = if minimums.is_some() { 0 } else { 1 << (bits - 1) };
        for (column, output) in outputs.enumerate() {
            for block in 0..blocks {
                let to = &mut to[block * block_len..][..block_len];
                to[column] = scales[output * blocks + block].to_bits();
                let mut numbers = panel;
                if let Some(minimums) = minimums {
                    to[panel + column] = minimums[output * blocks + block].to_bits();
                    numbers += panel;
                }
                let own = &codes[output * inputs + block * CODE_BLOCK..][..CODE_BLOCK];
                for (at, own) in own.chunks_exact(codes_of_half).enumerate() {
                    // The first code is the highest of the word, and so in its second half.
                    let (word, half) = (at / halves_of_word, 1 - at % halves_of_word);
                    let packed = own.iter().fold(0, |packed, &code| packed << bits | u16::from(code ^ sign));
                    to[numbers + (word * panel + column) * halves_of_word + half] = packed;
                }
            }
        }
    }
}
