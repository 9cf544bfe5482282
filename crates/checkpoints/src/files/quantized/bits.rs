//! Codes of a few bits in bytes and words.

/// Appends codes that follow each other from the lowest bit of the first byte on, without gaps, as long as there are
/// whole codes. `bits` is 8 at most.
pub(super) fn append_stream(bytes: &[u8], bits: usize, codes: &mut Vec<u8>) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_any_bits_follow_each_other() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let expected: Vec<u8> = (0..16usize).map(|n| (n * 7 % (1 << bits)) as u8).collect();
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
}
