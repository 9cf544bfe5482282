//! Codes and scales that are being read from blocks, and the types with blocks of 32 to 128 numbers.

use half::f16;

/// The codes and the scales of blocks, in the order of the numbers.
#[derive(Default)]
pub(super) struct Unpacked {
    /// A code for each number.
    pub codes: Vec<u8>,
    /// The scales in f16; of nested scales, the factor of each block.
    pub halves: Vec<f16>,
    /// The scales in f32.
    pub singles: Vec<f32>,
    /// The scales that a table has a number for; of nested scales, their whole numbers plus [`WHOLE_ZERO`].
    pub bytes: Vec<u8>,
    /// The minimums in f16; of nested minimums, the factor of each block.
    pub minimum_halves: Vec<f16>,
    /// The whole numbers of nested minimums.
    pub minimum_bytes: Vec<u8>,
}

/// The byte of the whole number 0 in nested scales without minimums.
pub(super) const WHOLE_ZERO: u8 = 128;

/// Returns the number in f16 that begins at a byte.
pub(super) fn half(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Returns the whole number of 16 bits with this index.
pub(super) fn word(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

/// Returns the whole number of 4 bits with this index. The lower half of a byte comes first.
pub(super) fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (index % 2 * 4) & 0xf
}

/// Appends the lower halves of N bytes, and then their upper halves. The compiler vectorises loops of a fixed length.
pub(super) fn append_halves<const N: usize>(bytes: &[u8], codes: &mut Vec<u8>) {
    for part in bytes.as_chunks::<N>().0 {
        codes.extend_from_slice(&part.map(|byte| byte & 0xf));
        codes.extend_from_slice(&part.map(|byte| byte >> 4));
    }
}

/// Appends codes of 5 bits: 4 bytes of fifth bits, and 16 bytes of lower bits.
fn append_five_bits(bytes: &[u8], codes: &mut Vec<u8>) {
    let (fifth_bits, lower_bits) = bytes.split_at(4);
    let first = codes.len();
    append_halves::<16>(lower_bits, codes);
    for (at, code) in codes[first..].iter_mut().enumerate() {
        *code |= (fifth_bits[at / 8] >> (at % 8) & 1) << 4;
    }
}

/// Appends a block of the scale and codes of 4 bits.
pub(super) fn q4_0(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    append_halves::<16>(&block[2..], &mut to.codes);
}

/// Appends a block of the scale, the minimum and codes of 4 bits.
pub(super) fn q4_1(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    to.minimum_halves.push(half(block, 2));
    append_halves::<16>(&block[4..], &mut to.codes);
}

/// Appends a block of the scale and codes of 5 bits.
pub(super) fn q5_0(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    append_five_bits(&block[2..], &mut to.codes);
}

/// Appends a block of the scale, the minimum and codes of 5 bits.
pub(super) fn q5_1(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    to.minimum_halves.push(half(block, 2));
    append_five_bits(&block[4..], &mut to.codes);
}

/// Appends a block of the scale and signed bytes.
pub(super) fn q8_0(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    to.codes.extend(block[2..].iter().map(|number| number ^ 0x80));
}

/// Appends a block of the scale in f32, 256 signed bytes, and their sums.
pub(super) fn q8_k(block: &[u8], to: &mut Unpacked) {
    to.singles.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]]));
    to.codes.extend(block[4..260].iter().map(|number| number ^ 0x80));
}

/// Appends a block of the scale and a bit for each number, which is the scale or its negative.
pub(super) fn q1_0(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    for byte in &block[2..] {
        // Codes of 4 bits are on both sides of 8.
        to.codes.extend((0..8).map(|bit| if byte >> bit & 1 == 1 { 9 } else { 7 }));
    }
}

/// Appends a block of the scale's exponent and codes of 4 bits.
pub(super) fn mxfp4(block: &[u8], to: &mut Unpacked) {
    to.bytes.push(block[0]);
    append_halves::<16>(&block[1..], &mut to.codes);
}

/// Appends a block of four scales, and of the codes of four groups of 16.
pub(super) fn nvfp4(block: &[u8], to: &mut Unpacked) {
    let (scales, codes) = block.split_at(4);
    to.bytes.extend_from_slice(scales);
    append_halves::<8>(codes, &mut to.codes);
}

/// Appends a block of the factor, eight scales of 6 bits (their upper bits, then their lower bits), and codes of 4 bits
/// in groups of 32.
pub(super) fn iq4_xs(block: &[u8], to: &mut Unpacked) {
    to.halves.push(half(block, 0));
    let upper_bits = word(block, 1);
    let (lower_bits, codes) = block[4..].split_at(4);
    for group in 0..8 {
        let upper = (upper_bits >> (2 * group) & 3) as u8;
        to.bytes.push(WHOLE_ZERO - 32 + (upper << 4 | nibble(lower_bits, group)));
    }
    append_halves::<16>(codes, &mut to.codes);
}

/// The values of codes of 4 bits in IQ4_NL and IQ4_XS.
pub(super) const IQ4_VALUES: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// Twice the values of codes of 4 bits (E2M1) in MXFP4 and NVFP4. Both zeros are positive, as in llama.cpp.
pub(super) const FP4_VALUES: [f32; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];

/// Returns half of the scale of a byte in MXFP4, an exponent of 2.
pub(super) fn half_of_e8m0(byte: u8) -> f32 {
    match byte {
        // 2^-128 and 2^-127 are below the normal numbers.
        0 | 1 => f32::from_bits(0x0020_0000 << byte),
        _ => f32::from_bits(u32::from(byte - 1) << 23),
    }
}

/// Returns half of the scale of a byte in NVFP4, which is E4M3 without a sign.
pub(super) fn half_of_e4m3(byte: u8) -> f32 {
    let exponent = i32::from(byte >> 3 & 0xf);
    let mantissa = f32::from(byte & 7);
    match (byte, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * 2f32.powi(-10),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8),
    }
}
