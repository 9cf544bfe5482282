//! Weights of codes, compared with weights of the same numbers in f32.

use half::f16;

use super::{numbers, rows_of, weight_shape};
use crate::cpu::InstructionSet;
use crate::cpu::tests::Sequence;
use crate::linear::{
    Activation, CODE_BLOCK, Codes, Epilogue, PackedWeight, Product, Right, Up, WeightShape, multiply_vec,
};

/// The kinds of codes: the bits of a code, and whether blocks have minimums.
#[derive(Clone, Copy)]
struct CodeKind {
    bits: usize,
    has_minimums: bool,
}

impl CodeKind {
    const ALL: [Self; 4] = [
        Self { bits: 4, has_minimums: false },
        Self { bits: 4, has_minimums: true },
        Self { bits: 8, has_minimums: false },
        Self { bits: 8, has_minimums: true },
    ];
}

/// Packed codes, and their numbers in f32.
struct PackedCodes {
    packed: PackedWeight,
    numbers: Vec<f32>,
}

/// Packs arbitrary codes.
fn codes(kind: CodeKind, shape: WeightShape, instruction_set: InstructionSet, salt: u64) -> PackedCodes {
    let CodeKind { bits, has_minimums } = kind;
    let WeightShape { outputs, inputs } = shape;
    let blocks = outputs * inputs / CODE_BLOCK;
    let own: Vec<u8> =
        numbers::<f32>(outputs * inputs, salt).iter().map(|x| (((x + 1.0) * 128.0) as u8) >> (8 - bits)).collect();
    let scales = numbers::<f16>(blocks, salt + 1);
    let minimums = numbers::<f16>(blocks, salt + 2);
    let minimums = has_minimums.then_some(&minimums[..]);
    let number = |(at, &code): (usize, &u8)| {
        let scale = f64::from(scales[at / CODE_BLOCK]);
        let minimum = minimums.map(|minimums| f64::from(minimums[at / CODE_BLOCK]));
        (f64::from(code) * scale + minimum.unwrap_or(scale * -f64::from(1u8 << (bits - 1)))) as f32
    };
    let exact = own.iter().enumerate().map(number).collect();
    let packed =
        PackedWeight::from_codes(&Codes { bits, codes: &own, scales: &scales, minimums }, shape, instruction_set);
    PackedCodes { packed: packed.expect("sizes fit"), numbers: exact }
}

/// Checks products of codes with any number of rows and an epilogue.
#[test]
fn packed_codes_product_has_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 2, 3, 8, 17, 40, 193] };
    let shape = if cfg!(miri) { weight_shape(18, 32) } else { weight_shape(103, 480) };
    let WeightShape { outputs, inputs } = shape;
    let bias = numbers::<f32>(outputs, 9);
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for kind in CodeKind::ALL {
            let both = [10, 20].map(|salt| codes(kind, shape, instruction_set, salt));
            let plain =
                both.each_ref().map(|own| PackedWeight::new(&own.numbers, shape, instruction_set).expect("memory"));
            let packed = both.map(|PackedCodes { packed, numbers }| {
                assert_eq!(packed.unpack::<f32>().expect("memory"), numbers, "{instruction_set}: {packed:?}");
                let rows = packed.unpack_rows::<f32>(&[17, 3]).expect("memory");
                assert_eq!(rows, [&numbers[17 * inputs..18 * inputs], &numbers[3 * inputs..4 * inputs]].concat());
                packed
            });
            for &rows in &row_counts {
                let xs = numbers::<f32>(rows * inputs, 4);
                for columns in [0..outputs, 5..outputs - 1] {
                    let product = |weights: &[PackedWeight; 2], is_gated: bool| {
                        let [weight, up] = weights;
                        let epilogue = Epilogue {
                            bias: Some(&bias[..]),
                            activation: is_gated.then_some(Activation::Silu),
                            up: is_gated.then_some(Up { weight: up, bias: None }),
                            residual: None,
                        };
                        let left = rows_of(&xs, inputs);
                        let right = Right::Weight { weight, outputs: columns.clone() };
                        multiply_vec(&Product { left, right, epilogue })
                    };
                    for is_gated in [false, true] {
                        let found = product(&packed, is_gated);
                        let expected = product(&plain, is_gated);
                        assert!(
                            found == expected,
                            "{instruction_set}: {rows} rows of {:?}, {columns:?}, {is_gated}",
                            packed[0]
                        );
                    }
                }
            }
        }
    }
}

/// Compares the bits of numbers. All NaNs count as equal.
fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (x, y)) in found.iter().zip(expected).enumerate() {
        let are_same = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
        assert!(are_same, "{what}: {x:?} at {at}, expected {y:?}");
    }
}

/// Packs codes with scales and minimums of every kind. Their numbers are as GGUF files define them.
fn codes_with_any_scale(kind: CodeKind, shape: WeightShape, instruction_set: InstructionSet) -> PackedCodes {
    let CodeKind { bits, has_minimums } = kind;
    const SPECIAL: [f16; 9] = [
        f16::ZERO,
        f16::NEG_ZERO,
        f16::MIN_POSITIVE_SUBNORMAL,
        f16::MAX_SUBNORMAL,
        f16::MAX,
        f16::MIN,
        f16::INFINITY,
        f16::NEG_INFINITY,
        f16::NAN,
    ];
    let mut sequence = Sequence(bits as u64);
    let mut half = || match sequence.bits() % 3 {
        0 => SPECIAL[sequence.bits() as usize % SPECIAL.len()],
        1 => f16::from_f32(sequence.fraction()),
        _ => f16::from_bits(sequence.bits() as u16),
    };
    let blocks = shape.outputs * shape.inputs / CODE_BLOCK;
    let mut scales = Vec::new();
    let mut minimums = Vec::new();
    for _ in 0..blocks {
        scales.push(half());
        minimums.push(half());
    }
    let codes: Vec<u8> = (0..blocks * CODE_BLOCK).map(|_| sequence.bits() as u8 >> (8 - bits)).collect();
    let number = |(at, &code): (usize, &u8)| {
        let scale = scales[at / CODE_BLOCK].to_f32();
        let minimum = minimums[at / CODE_BLOCK].to_f32();
        if has_minimums {
            f32::from(code) * scale + minimum
        } else {
            (f32::from(code) - (1 << (bits - 1)) as f32) * scale
        }
    };
    let numbers = codes.iter().enumerate().map(number).collect();
    let own = Codes { bits, codes: &codes, scales: &scales, minimums: has_minimums.then_some(&minimums) };
    PackedCodes { packed: PackedWeight::from_codes(&own, shape, instruction_set).expect("sizes fit"), numbers }
}

/// Checks products with dense rows, with rows so small that products round to zeros of either sign, and with rows of a
/// single 1, which show each number of the weight alone.
#[test]
fn packed_codes_with_any_scale_have_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 3, 40] };
    let shape = if cfg!(miri) { weight_shape(18, 32) } else { weight_shape(103, 96) };
    let WeightShape { outputs, inputs } = shape;
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for kind in CodeKind::ALL {
            let PackedCodes { packed, numbers: exact } = codes_with_any_scale(kind, shape, instruction_set);
            let plain = PackedWeight::new(&exact, shape, instruction_set).expect("memory");
            let unpacked = packed.unpack::<f32>().expect("memory");
            assert_same_bits(&unpacked, &exact, &format!("{packed:?}"));
            for &rows in &row_counts {
                let dense = numbers::<f32>(rows * inputs, 4);
                let small = dense.iter().map(|x| x * 1e-40).collect();
                let single_ones = (0..rows * inputs).map(|at| f32::from(at % inputs == at / inputs)).collect();
                for xs in [dense, small, single_ones] {
                    let multiply_by = |weight: &PackedWeight| {
                        let left = rows_of(&xs, inputs);
                        let right = Right::Weight { weight, outputs: 0..outputs };
                        let product = Product { left, right, epilogue: Epilogue::default() };
                        multiply_vec(&product).expect("fits")
                    };
                    assert_same_bits(&multiply_by(&packed), &multiply_by(&plain), &format!("{packed:?}, {rows} rows"));
                }
                // The gradient of the inputs reads the weight transposed.
                let gradients = numbers::<f32>(rows * outputs, 5);
                let transposed = |weight: &PackedWeight| {
                    let left = rows_of(&gradients, outputs);
                    let right = Right::Transposed { weight, outputs: 0..outputs };
                    let product = Product { left, right, epilogue: Epilogue::default() };
                    multiply_vec(&product).expect("fits")
                };
                assert_same_bits(&transposed(&packed), &transposed(&plain), &format!("{packed:?}, {rows} rows"));
            }
        }
    }
}

#[test]
fn packed_codes_memory_is_bits_and_scales() {
    for instruction_set in InstructionSet::available() {
        for (kind, bytes) in CodeKind::ALL.into_iter().zip([18, 20, 34, 36]) {
            // Whole panels of every instruction set.
            let PackedCodes { packed, .. } = codes(kind, weight_shape(96, 64), instruction_set, 1);
            assert_eq!(packed.memory(), 96 * 2 * bytes, "{packed:?}");
        }
    }
}
