//! K-quants, the types of GGUF files with blocks of 256 numbers, as codes with nested scales.
//!
//! A block has a scale of 16 bits and perhaps a minimum of 16 bits. Each 16 or 32 of its numbers have a whole number of
//! 4 to 8 bits by which the scale is multiplied, and another one for the minimum. llama.cpp's `ggml-quants.c`
//! defines the order of the bits.

use candle_attention_kernels::linear::{Codes, NESTED_BLOCK, NestedScales, Scales, Values};
use candle_core::quantized::GgmlDType;
use half::f16;

/// The numbers of a block.
const BLOCK: usize = 256;

/// The whole number without a sign that a packed weight reads as 0.
const ZERO: u8 = 128;

/// The numbers of a weight of K-quants. Codes of 2 and 3 bits are stored in 4 bits, codes of 5 and 6 bits in 8.
pub(super) struct KQuantCodes {
    bits: usize,
    /// The numbers that share a scale.
    group: usize,
    codes: Vec<u8>,
    scales: FactorsAndNumbers,
    minimums: Option<FactorsAndNumbers>,
}

/// The scales, or the minimums, of a weight.
#[derive(Default)]
struct FactorsAndNumbers {
    factors: Vec<f16>,
    numbers: Vec<u8>,
}

impl FactorsAndNumbers {
    /// Appends the factor of a block, once for each [`NESTED_BLOCK`] of its numbers.
    fn push_factor(&mut self, factor: f16) {
        self.factors.extend([factor; BLOCK / NESTED_BLOCK]);
    }

    fn as_scales(&self) -> Scales<'_> {
        Scales::Nested(NestedScales { factors: &self.factors, numbers: &self.numbers })
    }
}

impl KQuantCodes {
    /// Reads the blocks of a weight, or returns `None` for another type than Q2_K to Q6_K.
    pub(super) fn read(dtype: GgmlDType, data: &[u8]) -> Option<Self> {
        let mut codes = match dtype {
            GgmlDType::Q2K => Self::with_minimums(4, 16),
            GgmlDType::Q3K => Self::without_minimums(4),
            GgmlDType::Q4K => Self::with_minimums(4, 32),
            GgmlDType::Q5K => Self::with_minimums(8, 32),
            GgmlDType::Q6K => Self::without_minimums(8),
            _ => return None,
        };
        codes.codes.reserve(data.len() / dtype.type_size() * BLOCK);
        for block in data.chunks_exact(dtype.type_size()) {
            match dtype {
                GgmlDType::Q2K => codes.append_q2(block),
                GgmlDType::Q3K => codes.append_q3(block),
                GgmlDType::Q4K => codes.append_q4(block),
                GgmlDType::Q5K => codes.append_q5(block),
                _ => codes.append_q6(block),
            }
        }
        Some(codes)
    }

    fn with_minimums(bits: usize, group: usize) -> Self {
        Self { bits, group, codes: Vec::new(), scales: Default::default(), minimums: Some(Default::default()) }
    }

    fn without_minimums(bits: usize) -> Self {
        Self { bits, group: 16, codes: Vec::new(), scales: Default::default(), minimums: None }
    }

    /// Returns the codes for [`PackedWeight::from_codes`](candle_attention_kernels::linear::PackedWeight::from_codes).
    pub(super) fn as_codes(&self) -> Codes<'_> {
        let values = match &self.minimums {
            Some(minimums) => Values::Minimums(minimums.as_scales()),
            None => Values::Signed,
        };
        Codes { bits: self.bits, codes: &self.codes, group: self.group, values, scales: self.scales.as_scales() }
    }

    fn push_scale(&mut self, number: u8) {
        self.scales.numbers.push(number);
    }

    /// Appends the factors of a block with minimums. A minimum is subtracted in the file, and added in a packed weight.
    fn push_factors(&mut self, scale: f16, minimum: f16) {
        self.scales.push_factor(scale);
        if let Some(minimums) = &mut self.minimums {
            minimums.push_factor(-minimum);
        }
    }

    fn push_minimum(&mut self, number: u8) {
        if let Some(minimums) = &mut self.minimums {
            minimums.numbers.push(number);
        }
    }

    /// Appends a block of 16 bytes of scales and minimums of 4 bits, 64 bytes of codes, the scale and the minimum.
    fn append_q2(&mut self, block: &[u8]) {
        let (scales, rest) = block.split_at(16);
        let (codes, factors) = rest.split_at(64);
        self.push_factors(half(factors, 0), half(factors, 2));
        for &number in scales {
            self.push_scale(number & 0xf);
            self.push_minimum(number >> 4);
        }
        self.codes.extend((0..BLOCK).map(|at| two_bits(codes, at)));
    }

    /// Appends a block of 32 bytes of third bits, 64 bytes of lower bits, 12 bytes of scales of 6 bits, and the scale.
    fn append_q3(&mut self, block: &[u8]) {
        let (third_bits, rest) = block.split_at(32);
        let (lower_bits, rest) = rest.split_at(64);
        let (scales, factor) = rest.split_at(12);
        self.scales.push_factor(half(factor, 0));
        for group in 0..16 {
            let lower = scales[group % 8] >> (group / 8 * 4) & 0xf;
            let upper = scales[8 + group % 4] >> (group / 4 * 2) & 3;
            self.push_scale(ZERO - 32 + (upper << 4 | lower));
        }
        // Codes of 3 bits are on both sides of 4, and codes of 4 bits on both sides of 8.
        self.codes.extend((0..BLOCK).map(|at| {
            let third_bit = third_bits[at % 32] >> (at / 32) & 1;
            4 + (third_bit << 2 | two_bits(lower_bits, at))
        }));
    }

    /// Appends a block of the scale, the minimum, 12 bytes of scales and minimums of 6 bits, and 128 bytes of codes.
    fn append_q4(&mut self, block: &[u8]) {
        let (factors, rest) = block.split_at(4);
        let (scales, codes) = rest.split_at(12);
        self.append_scales_of_6_bits(factors, scales);
        self.codes.extend((0..BLOCK).map(|at| four_bits(codes, at)));
    }

    /// Appends a block of the scale, the minimum, 12 bytes of scales and minimums of 6 bits, 32 bytes of fifth bits,
    /// and 128 bytes of lower bits.
    fn append_q5(&mut self, block: &[u8]) {
        let (factors, rest) = block.split_at(4);
        let (scales, rest) = rest.split_at(12);
        let (fifth_bits, lower_bits) = rest.split_at(32);
        self.append_scales_of_6_bits(factors, scales);
        self.codes.extend((0..BLOCK).map(|at| {
            let fifth_bit = fifth_bits[at % 32] >> (at / 32) & 1;
            fifth_bit << 4 | four_bits(lower_bits, at)
        }));
    }

    /// Appends a block of 128 bytes of lower bits, 64 bytes of upper bits, 16 signed scales, and the scale.
    fn append_q6(&mut self, block: &[u8]) {
        let (lower_bits, rest) = block.split_at(128);
        let (upper_bits, rest) = rest.split_at(64);
        let (scales, factor) = rest.split_at(16);
        self.scales.push_factor(half(factor, 0));
        for &number in scales {
            self.push_scale(number ^ ZERO);
        }
        // Codes of 6 bits are on both sides of 32, and codes of 8 bits on both sides of 128.
        self.codes.extend((0..BLOCK).map(|at| {
            let lower = lower_bits[at / 128 * 64 + at % 64] >> (at % 128 / 64 * 4) & 0xf;
            ZERO - 32 + (two_bits(upper_bits, at) << 4 | lower)
        }));
    }

    /// Appends eight scales and eight minimums of 6 bits. The first four of each are the lower bits of a byte. The
    /// others have their lower bits in the last four bytes, and their upper bits in the first eight.
    fn append_scales_of_6_bits(&mut self, factors: &[u8], numbers: &[u8]) {
        self.push_factors(half(factors, 0), half(factors, 2));
        for group in 0..4 {
            self.push_scale(numbers[group] & 0x3f);
            self.push_minimum(numbers[4 + group] & 0x3f);
        }
        for group in 0..4 {
            self.push_scale(numbers[8 + group] & 0xf | numbers[group] >> 6 << 4);
            self.push_minimum(numbers[8 + group] >> 4 | numbers[4 + group] >> 6 << 4);
        }
    }
}

/// Returns the number in f16 that begins at a byte.
fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Returns a number of a block of 2-bit numbers: each 32 bytes have 128 of them, the first 32 in the lowest bits.
fn two_bits(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3
}

/// Returns a number of a block of 4-bit numbers: each 32 bytes have 64 of them, the first 32 in the lower halves.
fn four_bits(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 64 * 32 + at % 32] >> (at % 64 / 32 * 4) & 0xf
}
