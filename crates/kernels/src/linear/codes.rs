//! Weights of 4 and 8 bits.

use half::f16;

use super::PackedWeight;
use super::weight::{Format, no_memory};
pub use crate::cpu::CODE_BLOCK;
use crate::cpu::{Kernel, Scratch, SimdTask, Tier, dispatch_f32};
use crate::error::{Error, check_len, check_tier};

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
