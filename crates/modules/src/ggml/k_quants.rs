//! K-quants: blocks of 256 numbers with a scale of 16 bits and perhaps a minimum of 16 bits. Each 16 or 32 of the
//! numbers have a whole number of 4 to 8 bits by which the scale is multiplied, and another one for the minimum.

use super::blocks::{Unpacked, WHOLE_ZERO, append_halves, half};
use half::f16;

/// The bytes whose numbers of 2 or 4 bits follow each other.
const RUN: usize = 32;

/// Appends numbers of 2 bits: each 32 bytes have 128 of them, the first 32 in the lowest bits.
pub(super) fn append_two_bits(bytes: &[u8], codes: &mut Vec<u8>) {
    for run in bytes.as_chunks::<RUN>().0 {
        for shift in [0, 2, 4, 6] {
            codes.extend_from_slice(&run.map(|byte| byte >> shift & 3));
        }
    }
}

/// Sets a bit of the codes of a block: bit n of byte i is that of number 32 n + i.
fn set_upper_bits(bits: &[u8], place: u32, codes: &mut [u8]) {
    for (n, run) in codes.chunks_exact_mut(RUN).enumerate() {
        for (code, bit) in run.iter_mut().zip(bits) {
            *code |= (bit >> n & 1) << place;
        }
    }
}

/// Appends the factors of a block with minimums. A minimum is subtracted in the file, and added in a weight.
fn append_factors(scale: f16, minimum: f16, to: &mut Unpacked) {
    to.halves.push(scale);
    to.minimum_halves.push(-minimum);
}

/// Appends a block of 16 bytes of scales and minimums of 4 bits, 64 bytes of codes, the scale and the minimum.
pub(super) fn q2_k(block: &[u8], to: &mut Unpacked) {
    let (scales, rest) = block.split_at(16);
    let (codes, factors) = rest.split_at(64);
    append_factors(half(factors, 0), half(factors, 2), to);
    to.bytes.extend(scales.iter().map(|number| number & 0xf));
    to.minimum_bytes.extend(scales.iter().map(|number| number >> 4));
    append_two_bits(codes, &mut to.codes);
}

/// Appends a block of 32 bytes of third bits, 64 bytes of lower bits, 12 bytes of scales of 6 bits, and the scale.
pub(super) fn q3_k(block: &[u8], to: &mut Unpacked) {
    let (third_bits, rest) = block.split_at(32);
    let (lower_bits, rest) = rest.split_at(64);
    let (scales, factor) = rest.split_at(12);
    to.halves.push(half(factor, 0));
    for group in 0..16 {
        let lower = scales[group % 8] >> (group / 8 * 4) & 0xf;
        let upper = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        to.bytes.push(WHOLE_ZERO - 32 + (upper << 4 | lower));
    }
    let first = to.codes.len();
    append_two_bits(lower_bits, &mut to.codes);
    set_upper_bits(third_bits, 2, &mut to.codes[first..]);
}

/// Appends a block of the scale, the minimum, 12 bytes of scales and minimums of 6 bits, and 128 bytes of codes.
pub(super) fn q4_k(block: &[u8], to: &mut Unpacked) {
    let (factors, rest) = block.split_at(4);
    let (scales, codes) = rest.split_at(12);
    append_factors(half(factors, 0), half(factors, 2), to);
    append_scales_of_6_bits(scales, to);
    append_halves::<RUN>(codes, &mut to.codes);
}

/// Appends a block of the scale, the minimum, 12 bytes of scales and minimums of 6 bits, 32 bytes of fifth bits, and
/// 128 bytes of lower bits.
pub(super) fn q5_k(block: &[u8], to: &mut Unpacked) {
    let (factors, rest) = block.split_at(4);
    let (scales, rest) = rest.split_at(12);
    let (fifth_bits, lower_bits) = rest.split_at(32);
    append_factors(half(factors, 0), half(factors, 2), to);
    append_scales_of_6_bits(scales, to);
    let first = to.codes.len();
    append_halves::<RUN>(lower_bits, &mut to.codes);
    set_upper_bits(fifth_bits, 4, &mut to.codes[first..]);
}

/// Appends a block of 128 bytes of lower bits, 64 bytes of upper bits, 16 signed scales, and the scale.
pub(super) fn q6_k(block: &[u8], to: &mut Unpacked) {
    let (lower_bits, rest) = block.split_at(128);
    let (upper_bits, rest) = rest.split_at(64);
    let (scales, factor) = rest.split_at(16);
    to.halves.push(half(factor, 0));
    to.bytes.extend(scales.iter().map(|number| number ^ WHOLE_ZERO));
    let first = to.codes.len();
    append_halves::<64>(lower_bits, &mut to.codes);
    for (n, run) in to.codes[first..].chunks_exact_mut(RUN).enumerate() {
        let upper = &upper_bits[n / 4 * RUN..][..RUN];
        for (code, bits) in run.iter_mut().zip(upper) {
            *code |= (bits >> (n % 4 * 2) & 3) << 4;
        }
    }
}

/// Appends eight scales and eight minimums of 6 bits. The first four of each are the lower bits of a byte. The others
/// have their lower bits in the last four bytes, and their upper bits in the first eight.
fn append_scales_of_6_bits(numbers: &[u8], to: &mut Unpacked) {
    for group in 0..4 {
        to.bytes.push(numbers[group] & 0x3f);
        to.minimum_bytes.push(numbers[4 + group] & 0x3f);
    }
    for group in 0..4 {
        to.bytes.push(numbers[8 + group] & 0xf | numbers[group] >> 6 << 4);
        to.minimum_bytes.push(numbers[8 + group] >> 4 | numbers[4 + group] >> 6 << 4);
    }
}
