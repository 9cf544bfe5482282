//! Codes of a few bits in bytes and words.

/// The bytes of a word.
const WORD: usize = 4;

/// The number of codes in a block of planes.
const PLANE_CODES: usize = 32;

/// Appends codes that follow each other from the lowest bit of the first byte on, without gaps, as long as there are
/// whole codes. `bits` is 8 at most.
pub(super) fn append_stream(bytes: &[u8], bits: usize, codes: &mut Vec<u8>) {
    match bits {
        8 => return codes.extend_from_slice(bytes),
        4 => return codes.extend(bytes.iter().flat_map(|byte| [byte & 15, byte >> 4])),
        2 => return codes.extend(bytes.iter().flat_map(|byte| [byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6])),
        _ => {}
    }
    let mask = ((1u32 << bits) - 1) as u8;
    let mut word = 0u32;
    let mut available = 0;
    for &byte in bytes {
        word |= u32::from(byte) << available;
        available += 8;
        while available >= bits {
            codes.push(word as u8 & mask);
            word >>= bits;
            available -= bits;
        }
    }
}

/// Appends codes of 4 bits, the first in the high half of a byte.
pub(super) fn append_nibbles_from_high(bytes: &[u8], codes: &mut Vec<u8>) {
    for &byte in bytes {
        codes.extend([byte >> 4, byte & 15]);
    }
}

/// Makes codes of whole numbers from -128 to 127, in two's complement: the number plus 128.
pub(super) fn signed_to_codes(bytes: &mut [u8]) {
    for byte in bytes {
        *byte ^= 0x80;
    }
}

/// Returns the largest number that divides both.
pub(super) fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Appends codes that are in planes: in each `bits` words are 32 codes, first the low bits of all of them, then the
/// higher ones. Words that are not a whole block are passed over.
pub(super) fn append_planes(bytes: &[u8], bits: usize, codes: &mut Vec<u8>) {
    for block in bytes.chunks_exact(bits * WORD) {
        let start = codes.len();
        codes.resize(start + PLANE_CODES, 0);
        let own = &mut codes[start..];
        let mut plane = block;
        let mut lowest = 0;
        // A plane has the largest number of bits that divides a byte.
        for width in [8, 4, 2, 1] {
            if bits & width == 0 {
                continue;
            }
            let (now, rest) = plane.split_at(width * WORD);
            for (index, code) in own.iter_mut().enumerate() {
                let at = index * width;
                let part = u16::from(now[at / 8]) >> (at % 8) & ((1 << width) - 1);
                *code |= (part as u8) << lowest;
            }
            plane = rest;
            lowest += width;
        }
    }
}

/// Returns the words of a matrix (rows, columns) as a matrix (columns, rows).
pub(super) fn transpose_words(bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    // The words of a cache line, so that each line is read once.
    const BLOCK: usize = 16;
    let mut transposed = vec![0; bytes.len()];
    for first in (0..columns).step_by(BLOCK) {
        let last = columns.min(first + BLOCK);
        for row in 0..rows {
            for column in first..last {
                let from = (row * columns + column) * WORD;
                let to = (column * rows + row) * WORD;
                transposed[to..to + WORD].copy_from_slice(&bytes[from..from + WORD]);
            }
        }
    }
    transposed
}

/// Adds 1 to each code of words, as one addition of each word: the inverse of the subtraction with which GPTQ stores
/// zeros, in which a code of 0 borrows from the next one. `bits` divides 32.
pub(super) fn add_one_to_codes(bytes: &mut [u8], bits: usize) {
    let ones = (0..32).step_by(bits).fold(0u32, |ones, at| ones | 1 << at);
    for word in bytes.chunks_exact_mut(WORD) {
        let number = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        word.copy_from_slice(&number.wrapping_add(ones).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes_of(bits: usize, count: usize) -> Vec<u8> {
        (0..count).map(|n| (n * 7 % (1 << bits)) as u8).collect()
    }

    #[test]
    fn codes_of_any_bits_follow_each_other() {
        for bits in 1..=8 {
            let expected = codes_of(bits, 16);
            let mut bytes = vec![0u8; 2 * bits];
            for (n, code) in expected.iter().enumerate() {
                for bit in 0..bits {
                    let at = n * bits + bit;
                    bytes[at / 8] |= (code >> bit & 1) << (at % 8);
                }
            }
            let mut codes = Vec::new();
            append_stream(&bytes, bits, &mut codes);
            assert_eq!(codes, expected, "{bits} bits");
        }
    }

    #[test]
    fn codes_in_planes_have_their_high_bits_after_the_low_ones() {
        // 5 bits: four words of the low 4 bits, then one word of the highest.
        let expected = codes_of(5, 32);
        let mut bytes = vec![0u8; 20];
        for (n, code) in expected.iter().enumerate() {
            bytes[n / 2] |= (code & 15) << (n % 2 * 4);
            bytes[16 + n / 8] |= (code >> 4) << (n % 8);
        }
        let mut codes = Vec::new();
        append_planes(&bytes, 5, &mut codes);
        assert_eq!(codes, expected);
    }

    #[test]
    fn transposed_words_are_at_their_columns() {
        let (rows, columns) = (3, 35);
        let bytes: Vec<u8> = (0..rows * columns).flat_map(|n| (n as u32).to_le_bytes()).collect();
        let transposed = transpose_words(&bytes, rows, columns);
        for column in 0..columns {
            for row in 0..rows {
                let at = (column * rows + row) * 4;
                assert_eq!(transposed[at..at + 4], ((row * columns + column) as u32).to_le_bytes());
            }
        }
    }

    #[test]
    fn a_code_of_zero_that_borrowed_is_found_again() {
        let zeros: [u32; 8] = [0, 3, 15, 0, 0, 7, 1, 0];
        let word = zeros.iter().enumerate().fold(0u32, |word, (n, zero)| word | zero << (4 * n));
        let mut stored = word.wrapping_sub(0x1111_1111).to_le_bytes();
        add_one_to_codes(&mut stored, 4);
        assert_eq!(u32::from_le_bytes(stored), word);
    }
}
