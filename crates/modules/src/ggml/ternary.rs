//! Types whose numbers are -1, 0 or 1 times the scale of a block of 256.

use super::blocks::{Unpacked, half};
use super::k_quants::append_two_bits;

/// The code of -1 in 4 bits: codes are on both sides of 8.
const MINUS_ONE: u8 = 7;

/// Appends a block of codes of 2 bits, 0 to 3 for -1 to 2, and the scale.
pub(super) fn tq2_0(block: &[u8], to: &mut Unpacked) {
    let (codes, scale) = block.split_at(64);
    let first = to.codes.len();
    append_two_bits(codes, &mut to.codes);
    to.codes[first..].iter_mut().for_each(|code| *code += MINUS_ONE);
    to.halves.push(half(scale, 0));
}

/// Appends a block: 48 bytes of 5 digits of base 3 each, 4 bytes of 4 digits each, and the scale.
pub(super) fn tq1_0(block: &[u8], to: &mut Unpacked) {
    append_digits(&block[..32], 5, &mut to.codes);
    append_digits(&block[32..48], 5, &mut to.codes);
    append_digits(&block[48..52], 4, &mut to.codes);
    to.halves.push(half(block, 52));
}

/// Appends the first digits of base 3 of all bytes, then the second ones, and so on. A byte is a fraction of 256.
fn append_digits(bytes: &[u8], digits: u32, codes: &mut Vec<u8>) {
    for digit in 0..digits {
        let power = 3u8.pow(digit);
        codes.extend(bytes.iter().map(|byte| {
            let fraction = byte.wrapping_mul(power);
            MINUS_ONE + ((u16::from(fraction) * 3) >> 8) as u8
        }));
    }
}
