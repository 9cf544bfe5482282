//! Weights on their way into panels: rows of elements, and codes of 4 and 8 bits.

use half::f16;

use super::PackedWeight;
use super::weight::{Format, no_memory};
use crate::cpu::{
    CODE_BLOCK, Kernel, MAX_LANES, Scratch, SharedPtr, SimdTask, Tier, Vector, Workers, dispatch_f32, for_each_index,
};
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

/// A weight (out, in) whose numbers are `code · scale + minimum`, with a scale and a minimum for each [`CODE_BLOCK`]
/// inputs of an output. What is computed with it has the bits that the numbers in f32 would give.
///
/// ```
/// use candle_attention_kernels::{Tier, linear::{Codes, PackedWeight}};
/// use half::f16;
///
/// // One output of 32 inputs, each of which is (code - 8) / 2.
/// let codes: Vec<u8> = (0..32).map(|input| input % 16).collect();
/// let codes = Codes { bits: 4, codes: &codes, scales: &[f16::from_f32(0.5)], minimums: None };
/// let weight = PackedWeight::from_codes(&codes, (1, 32), Tier::Scalar)?;
/// assert_eq!(weight.unpack::<f32>()?[..3], [-4.0, -3.5, -3.0]);
/// // A panel of the scalar tier has 16 outputs, and memory comes in lines of 64 bytes.
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
    /// As many. Without them the minimum of a block is `-2^(bits - 1) · scale`, so that codes are on both sides of
    /// zero.
    pub minimums: Option<&'a [f16]>,
}

impl PackedWeight {
    /// Packs a weight of codes for products on a tier. It takes `bits / 8` bytes a number, and 2 for each scale and
    /// each minimum.
    ///
    /// # Errors
    /// [`Error::Shape`] for bits that are neither 4 nor 8, inputs that are not whole blocks, slices of other lengths
    /// than the shape says, and a code of more than its bits; [`Error::Tier`] and [`Error::Memory`] as
    /// [`new`](Self::new).
    pub fn from_codes(codes: &Codes, shape: (usize, usize), tier: Tier) -> Result<Self, Error> {
        let (outputs, inputs) = shape;
        check_tier(tier)?;
        codes.check(outputs, inputs)?;
        let format = Format::Codes { bits: codes.bits, has_minimums: codes.minimums.is_some() };
        let mut panel = 0;
        dispatch_f32(tier, ReadPanel(&mut panel));
        let words = format.bytes(inputs) * panel / size_of::<u16>();
        let weight = Self { words: Scratch::zeros(0), format, tier, inputs, outputs, panel, padded: inputs };
        let packed = weight.fill(&|index, to| {
            // SAFETY: the words of a panel are this task's; they were not initialised before.
            let own = unsafe {
                to.cast::<u16>().write_bytes(0, words);
                std::slice::from_raw_parts_mut(to.cast(), words)
            };
            codes.pack_panel(own, index * panel..outputs.min((index + 1) * panel), inputs, panel);
        });
        packed.ok_or_else(|| no_memory(outputs, inputs))
    }
}

/// Takes the outputs of a tier's panel.
struct ReadPanel<'a>(&'a mut usize);

impl SimdTask for ReadPanel<'_> {
    unsafe fn run<K: Kernel>(self) {
        *self.0 = K::PANEL;
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
                    let (word, half) = (at / halves_of_word, at % halves_of_word);
                    let packed = own.iter().rev().fold(0, |packed, &code| packed << bits | u16::from(code));
                    to[numbers + (word * panel + column) * halves_of_word + half] = packed;
                }
            }
        }
    }
}
