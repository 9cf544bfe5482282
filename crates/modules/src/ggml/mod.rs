//! The types of numbers in GGUF files.
//!
//! A row of a tensor is a sequence of blocks. A block of a quantised type has codes of a few bits and their scales;
//! llama.cpp's `ggml-common.h` and `ggml-quants.c` define the blocks. Each type is read without rounding into a
//! [`QuantizedWeight`](crate::base::QuantizedWeight); codes of fewer than 4 bits may be widened to 4.

mod blocks;
mod codebooks;
mod k_quants;
mod plain;
mod ternary;
mod types;

pub use types::{GgmlNumbers, GgmlType};

#[cfg(test)]
mod tests {
    use candle_core::Result;
    use candle_core::quantized::GgmlDType;

    use super::*;

    /// The numbers that the package gguf and llama.cpp compute; `crates/compare/conformance/gguf_types.py` writes it.
    const RECORDED: &str = include_str!("recorded.txt");

    /// Returns bytes of the generator that the recording script has.
    fn pseudo_random(count: usize, mut state: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count);
        for _ in 0..count {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.push((state >> 56) as u8);
        }
        bytes
    }

    /// Returns the hash FNV-1a of the bits of numbers, with one pattern for each NaN.
    fn hash(numbers: &[f32]) -> u64 {
        let mut state = 0xcbf2_9ce4_8422_2325;
        for number in numbers {
            let bits = if number.is_nan() { 0x7fc0_0000 } else { number.to_bits() };
            for byte in bits.to_le_bytes() {
                state = (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        state
    }

    #[test]
    fn ggml_types_have_the_numbers_of_gguf_and_llama_cpp() -> Result<()> {
        let mut recorded = Vec::new();
        for line in RECORDED.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<_> = line.split(' ').collect();
            let number = words[0].parse().expect("the number of a type");
            recorded.push(number);
            let kind = GgmlType::find(number).expect("a type that is read");
            assert_eq!(kind.name, words[1]);
            let blocks = 256;
            let data = pseudo_random(blocks * kind.bytes, number.into());
            let numbers = kind.read(&data, 1, blocks * kind.block)?.dequantize()?.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(format!("{:016x}", hash(&numbers)), words[2], "{}", kind.name);
        }
        assert_eq!(recorded, GgmlType::all().map(|kind| kind.number).collect::<Vec<_>>());
        Ok(())
    }

    #[test]
    fn ggml_types_have_the_sizes_of_candles_blocks() {
        use GgmlDType::*;
        for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, Q8K] {
            let kind = GgmlType::find(GgmlType::number_of(dtype)).expect("a type that is read");
            assert_eq!(
                (kind.block, kind.bytes, kind.in_candle()),
                (dtype.block_size(), dtype.type_size(), Some(dtype))
            );
        }
    }

    #[test]
    fn ggml_data_of_another_size_is_an_error() {
        let q8_0 = GgmlType::find(8).expect("Q8_0");
        for (bytes, rows, columns) in [(33, 1, 32), (34, 2, 32), (34, 1, 31), (34, 32, 1), (34, usize::MAX, 32)] {
            assert!(q8_0.read(&vec![0; bytes], rows, columns).is_err(), "{bytes} bytes for {rows} by {columns}");
        }
        assert_eq!(GgmlType::describe(4), "type 4 (Q4_2, which llama.cpp removed)");
        assert_eq!(GgmlType::describe(99), "type 99, which is not known");
    }
}
