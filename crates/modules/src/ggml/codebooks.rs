//! The IQ1, IQ2 and IQ3 types. A code of 8 to 11 bits is the index of a row of 4 or 8 numbers in a codebook. Few sizes
//! of numbers occur: with the signs there are at most 16 numbers, a table of 4 bits.
//!
//! `grids/make.py` writes the codebooks.

use super::blocks::{Unpacked, WHOLE_ZERO, half, nibble, word};
use half::f16;

/// A codebook: the sizes of the numbers of each row.
struct Codebook<const ROWS: usize, const WIDTH: usize> {
    rows: [[u8; WIDTH]; ROWS],
}

static IQ1: Codebook<2048, 8> = Codebook::new(include_bytes!("grids/iq1_s.bin"), 2);
static IQ2_XXS: Codebook<256, 8> = Codebook::new(include_bytes!("grids/iq2_xxs.bin"), 2);
static IQ2_XS: Codebook<512, 8> = Codebook::new(include_bytes!("grids/iq2_xs.bin"), 2);
static IQ2_S: Codebook<1024, 8> = Codebook::new(include_bytes!("grids/iq2_s.bin"), 2);
static IQ3_XXS: Codebook<256, 4> = Codebook::new(include_bytes!("grids/iq3_xxs.bin"), 4);
static IQ3_S: Codebook<512, 4> = Codebook::new(include_bytes!("grids/iq3_s.bin"), 4);

impl<const ROWS: usize, const WIDTH: usize> Codebook<ROWS, WIDTH> {
    /// Returns the codebook of a file, which has 2 or 4 bits for each number.
    const fn new(bytes: &[u8], bits: usize) -> Self {
        let per_byte = 8 / bits;
        let mut rows = [[0; WIDTH]; ROWS];
        let mut at = 0;
        while at < ROWS * WIDTH {
            let size = bytes[at / per_byte] >> (at % per_byte * bits);
            rows[at / WIDTH][at % WIDTH] = size & ((1u16 << bits) - 1) as u8;
            at += 1;
        }
        Self { rows }
    }

    /// Appends the codes of a row. Their fourth bits are `signs`.
    fn append(&self, row: usize, signs: u8, codes: &mut Vec<u8>) {
        let mut own = self.rows[row];
        for (at, code) in own.iter_mut().enumerate() {
            *code |= (signs >> at & 1) << 3;
        }
        codes.extend_from_slice(&own);
    }
}

/// The values of IQ1: -1, 0 and 1, plus an eighth, or minus an eighth if the fourth bit is set.
pub(super) const IQ1_VALUES: [f32; 16] =
    [-0.875, 0.125, 1.125, 0., 0., 0., 0., 0., -1.125, -0.125, 0.875, 0., 0., 0., 0., 0.];

/// The values of IQ2, times an eighth, which is a factor of all scales. The fourth bit is the sign.
pub(super) const IQ2_VALUES: [f32; 16] =
    [1., 3.125, 5.375, 0., 0., 0., 0., 0., -1., -3.125, -5.375, 0., 0., 0., 0., 0.];

/// The values of IQ3_XXS, times a quarter, which is a factor of all scales. The fourth bit is the sign.
pub(super) const IQ3_XXS_VALUES: [f32; 16] =
    [1., 3., 5., 7., 9., 11., 13., 15.5, -1., -3., -5., -7., -9., -11., -13., -15.5];

/// The values of IQ3_S. The fourth bit is the sign.
pub(super) const IQ3_S_VALUES: [f32; 16] =
    [1., 3., 5., 7., 9., 11., 13., 15., -1., -3., -5., -7., -9., -11., -13., -15.];

/// Returns the nested scale of a number of 3 or 4 bits: twice the number, plus 1.
fn odd(number: u8) -> u8 {
    WHOLE_ZERO + 2 * number + 1
}

/// Returns eight signs from the first seven, in the lowest bits. The number of negative signs is even.
fn with_eighth_sign(seven: u32) -> u8 {
    let signs = (seven & 0x7f) as u8;
    signs | (signs.count_ones() as u8 & 1) << 7
}

/// Returns the whole number of 32 bits that begins at a byte.
fn long(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Appends a block of the factor, and for each of eight groups of 32 numbers 4 rows of 8 bits, and 32 bits with the
/// signs and the scale.
pub(super) fn iq2_xxs(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    for group in block[2..].chunks_exact(8) {
        let signs_and_scale = long(group, 4);
        to.bytes.push(odd((signs_and_scale >> 28) as u8));
        for (at, &row) in group[..4].iter().enumerate() {
            IQ2_XXS.append(row.into(), with_eighth_sign(signs_and_scale >> (7 * at)), &mut to.codes);
        }
    }
}

/// Appends a block of the factor, 32 rows of 9 bits with 7 bits of signs, and 16 scales of 4 bits.
pub(super) fn iq2_xs(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    let (rows, scales) = block[2..].split_at(64);
    to.bytes.extend((0..16).map(|group| odd(nibble(scales, group))));
    for at in 0..32 {
        let row_and_signs = word(rows, at);
        let signs = with_eighth_sign(u32::from(row_and_signs >> 9));
        IQ2_XS.append(usize::from(row_and_signs & 0x1ff), signs, &mut to.codes);
    }
}

/// Appends a block of the factor, the lower 8 bits of 32 rows, 32 bytes of signs, the upper 2 bits of the rows, and 16
/// scales of 4 bits.
pub(super) fn iq2_s(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    let (rows, rest) = block[2..].split_at(32);
    let (signs, rest) = rest.split_at(32);
    let (upper_bits, scales) = rest.split_at(8);
    to.bytes.extend((0..16).map(|group| odd(nibble(scales, group))));
    for at in 0..32 {
        let upper = upper_bits[at / 4] >> (at % 4 * 2) & 3;
        IQ2_S.append(usize::from(upper) << 8 | usize::from(rows[at]), signs[at], &mut to.codes);
    }
}

/// Appends a block of the factor, 64 rows of 8 bits, and for each 32 numbers 32 bits of signs and the scale.
pub(super) fn iq3_xxs(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    let (rows, signs_and_scales) = block[2..].split_at(64);
    for group in 0..8 {
        let signs_and_scale = long(signs_and_scales, 4 * group);
        to.bytes.push(odd((signs_and_scale >> 28) as u8));
        for (at, pair) in rows[8 * group..8 * (group + 1)].chunks_exact(2).enumerate() {
            let signs = with_eighth_sign(signs_and_scale >> (7 * at));
            IQ3_XXS.append(pair[0].into(), signs, &mut to.codes);
            IQ3_XXS.append(pair[1].into(), signs >> 4, &mut to.codes);
        }
    }
}

/// Appends a block of the factor, the lower 8 bits of 64 rows, their ninth bits, 32 bytes of signs, and eight scales of
/// 4 bits.
pub(super) fn iq3_s(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    let (rows, rest) = block[2..].split_at(64);
    let (ninth_bits, rest) = rest.split_at(8);
    let (signs, scales) = rest.split_at(32);
    to.bytes.extend((0..8).map(|group| odd(nibble(scales, group))));
    for at in 0..64 {
        let ninth_bit = ninth_bits[at / 8] >> (at % 8) & 1;
        let own_signs = signs[at / 2] >> (at % 2 * 4);
        IQ3_S.append(usize::from(ninth_bit) << 8 | usize::from(rows[at]), own_signs, &mut to.codes);
    }
}

/// Appends a block of the factor, the lower 8 bits of 32 rows, and for each four rows their upper 3 bits, the scale and
/// the sign of the eighth.
pub(super) fn iq1_s(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    let (rows, rest) = block[2..].split_at(32);
    for group in 0..8 {
        let bits = word(rest, group);
        to.bytes.push(odd((bits >> 12 & 7) as u8));
        let signs = if bits & 0x8000 == 0 { 0 } else { 0xff };
        for at in 0..4 {
            let upper = usize::from(bits >> (3 * at) & 7);
            IQ1.append(upper << 8 | usize::from(rows[4 * group + at]), signs, &mut to.codes);
        }
    }
}

/// Appends a block of the lower 8 bits of 32 rows, for each row its upper 3 bits and the sign of the eighth, and four
/// words of four scales of 3 bits. The upper 4 bits of the words are the factor.
pub(super) fn iq1_m(block: &[u8], to: &mut Unpacked) {
    let (rows, rest) = block.split_at(32);
    let (upper_bits, scales) = rest.split_at(16);
    let mut factor = 0;
    for at in 0..4 {
        let bits = word(scales, at);
        factor |= bits >> 12 << (4 * at);
        to.bytes.extend((0..4).map(|group| odd((bits >> (3 * group) & 7) as u8)));
    }
    to.halves.push(f16::from_bits(factor));
    for (at, &row) in rows.iter().enumerate() {
        let bits = nibble(upper_bits, at);
        let signs = if bits & 8 == 0 { 0 } else { 0xff };
        IQ1.append(usize::from(bits & 7) << 8 | usize::from(row), signs, &mut to.codes);
    }
}
