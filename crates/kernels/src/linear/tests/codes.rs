//! Weights of codes, compared with weights of the same numbers in f32.

use std::ops::Range;

use super::code_kinds::{CodeKind, OwnCodes, ScaleKind, ValueKind};
use super::{numbers, rows_of, weight_shape};
use crate::cpu::tests::Sequence;
use crate::cpu::{CodeValues, Format, InstructionSet};
use crate::error::Error;
use crate::linear::{
    Activation, Codes, Epilogue, NESTED_BLOCK, NestedScales, PackedWeight, PanelPacker, Product, Right, Scales, Up,
    Values, WeightShape,
};
use crate::linear::{multiply_vec, tests::instruction_sets};

/// Returns the instruction sets whose products in f32 differ. Codes are multiplied in f32.
fn instruction_sets_of_codes() -> Vec<InstructionSet> {
    let mut all = instruction_sets();
    all.retain(|set| !matches!(set, InstructionSet::NeonBf16 | InstructionSet::Avx512Bf16 | InstructionSet::Amx));
    all
}

/// Packed codes, and their numbers in f32.
struct PackedCodes {
    packed: PackedWeight,
    numbers: Vec<f32>,
}

/// Packs arbitrary codes with scales and minimums between -1 and 1; `None` where they are not packed.
fn codes(kind: CodeKind, shape: WeightShape, instruction_set: InstructionSet, salt: u64) -> Option<PackedCodes> {
    let own = OwnCodes::new(kind, shape, &mut Sequence(salt), &|sequence| sequence.fraction());
    let packed = PackedWeight::from_codes(&own.as_codes(), shape, instruction_set).expect("sizes fit")?;
    Some(PackedCodes { packed, numbers: own.numbers() })
}

/// Checks products of codes with any number of rows and an epilogue.
#[test]
fn packed_codes_product_has_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 2, 7, 17, 40] };
    let shape = if cfg!(miri) { weight_shape(18, 64) } else { weight_shape(103, 640) };
    let WeightShape { outputs, inputs } = shape;
    let bias = numbers::<f32>(outputs, 9);
    for instruction_set in instruction_sets_of_codes() {
        for kind in CodeKind::all(inputs) {
            let [Some(first), Some(second)] = [10, 20].map(|salt| codes(kind, shape, instruction_set, salt)) else {
                assert!(kind.is_refused_by_scalar(false) && instruction_set == InstructionSet::Scalar, "{kind:?}");
                continue;
            };
            let both = [first, second];
            let plain =
                both.each_ref().map(|own| PackedWeight::new(&own.numbers, shape, instruction_set).expect("memory"));
            let packed = both.map(|PackedCodes { packed, numbers }| {
                assert_eq!(packed.unpack::<f32>().expect("memory"), numbers, "{instruction_set}: {kind:?}");
                let rows = packed.unpack_rows::<f32>(&[17, 3]).expect("memory");
                assert_eq!(rows, [&numbers[17 * inputs..18 * inputs], &numbers[3 * inputs..4 * inputs]].concat());
                packed
            });
            for &rows in &row_counts {
                let xs = numbers::<f32>(rows * inputs, 4);
                for (columns, is_gated) in [(0..outputs, false), (0..outputs, true), (5..outputs - 1, false)] {
                    let product = |weights: &[PackedWeight; 2]| {
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
                    let is_equal = product(&packed) == product(&plain);
                    assert!(is_equal, "{instruction_set}: {rows} rows of {kind:?}, {columns:?}, {is_gated}");
                }
            }
        }
    }
}

/// Returns the codes of some outputs.
fn codes_of_outputs<'a>(all: &Codes<'a>, inputs: usize, outputs: Range<usize>) -> Codes<'a> {
    let numbers = outputs.start * inputs..outputs.end * inputs;
    let groups = numbers.start / all.group..numbers.end / all.group;
    let blocks = numbers.start / NESTED_BLOCK..numbers.end / NESTED_BLOCK;
    let part = |scales: Scales<'a>| match scales {
        Scales::F16(own) => Scales::F16(&own[groups.clone()]),
        Scales::BF16(own) => Scales::BF16(&own[groups.clone()]),
        Scales::F32(own) => Scales::F32(&own[groups.clone()]),
        Scales::Bytes { bytes, table } => Scales::Bytes { bytes: &bytes[groups.clone()], table },
        Scales::Nested(own) => Scales::Nested(NestedScales {
            factors: &own.factors[blocks.clone()],
            numbers: &own.numbers[groups.clone()],
        }),
    };
    let values = match all.values {
        Values::Zeros(zeros) => Values::Zeros(&zeros[groups.clone()]),
        Values::Minimums(minimums) => Values::Minimums(part(minimums)),
        other => other,
    };
    Codes { codes: &all.codes[numbers], values, scales: part(all.scales), ..*all }
}

/// Packs codes panel by panel; `None` where they are not packed.
fn packed_by_panels(all: &Codes, shape: WeightShape, instruction_set: InstructionSet) -> Option<PackedWeight> {
    let read = |outputs, packer: PanelPacker| packer.pack(&codes_of_outputs(all, shape.inputs, outputs));
    PackedWeight::from_panels::<Error>(shape, instruction_set, &read).expect("sizes fit")
}

#[test]
fn codes_packed_panel_by_panel_are_packed_as_the_whole() {
    let shape = if cfg!(miri) { weight_shape(18, 64) } else { weight_shape(150, 256) };
    for instruction_set in instruction_sets_of_codes() {
        for kind in CodeKind::all(shape.inputs) {
            let own = OwnCodes::new(kind, shape, &mut Sequence(30), &|sequence| sequence.fraction());
            let whole = PackedWeight::from_codes(&own.as_codes(), shape, instruction_set).expect("sizes fit");
            let parts = packed_by_panels(&own.as_codes(), shape, instruction_set);
            assert_eq!(whole.is_some(), parts.is_some(), "{instruction_set}: {kind:?}");
            let (Some(whole), Some(parts)) = (whole, parts) else { continue };
            assert_eq!(whole.format, parts.format, "{instruction_set}: {kind:?}");
            let bits = |weight: &PackedWeight| Vec::from_iter(weight.words.words().iter().map(|word| word.to_bits()));
            assert!(bits(&whole) == bits(&parts), "{instruction_set}: {kind:?}");
        }
    }
}

#[test]
fn codes_packed_panel_by_panel_need_one_format() {
    let shape = weight_shape(40, 32);
    let codes = vec![3; 40 * 32];
    let mut scales = vec![0.5; 40];
    // f16 does not have the digits.
    scales[39] = 0.1;
    let all = Codes { bits: 4, codes: &codes, group: 32, values: Values::Signed, scales: Scales::F32(&scales) };
    assert!(packed_by_panels(&all, shape, InstructionSet::Scalar).is_none());
    let empty = Codes { codes: &[], scales: Scales::F32(&[]), ..all };
    let none = packed_by_panels(&empty, weight_shape(0, 32), InstructionSet::Scalar).expect("codes that are packed");
    assert_eq!(none.memory(), 0);
}

#[test]
fn codes_packed_panel_by_panel_return_the_error_of_the_first_panel_that_has_one() {
    let shape = weight_shape(40, 32);
    let codes = [3; 16 * 32];
    let scales = [0.5; 16];
    let all = Codes { bits: 4, codes: &codes, group: 32, values: Values::Signed, scales: Scales::F32(&scales) };
    let error = |first_wrong: usize| {
        let read = |outputs: Range<usize>, packer: PanelPacker| {
            let given = if outputs.start < first_wrong { outputs.len() } else { 3 };
            packer.pack(&codes_of_outputs(&all, 32, 0..given))
        };
        PackedWeight::from_panels::<Error>(shape, InstructionSet::Scalar, &read).expect_err("3 outputs").to_string()
    };
    // A panel has 16 outputs, and the last one 8.
    assert_eq!(error(0), "codes has 96 elements, expected 512");
    assert_eq!(error(16), "codes has 96 elements, expected 512");
    assert_eq!(error(32), "codes has 96 elements, expected 256");
}

/// Compares the bits of numbers. All NaNs count as equal.
fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (x, y)) in found.iter().zip(expected).enumerate() {
        let are_same = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
        assert!(are_same, "{what}: {x:?} at {at}, expected {y:?}");
    }
}

/// Packs codes with scales and minimums of every kind; `None` where they are not packed.
fn codes_with_any_scale(kind: CodeKind, shape: WeightShape, instruction_set: InstructionSet) -> Option<PackedCodes> {
    // The smallest and the largest numbers of each format.
    const SPECIAL: [f32; 14] = [
        0.0,
        -0.0,
        f32::from_bits(1),
        f32::from_bits(0x0033_8000),
        5.960_464_5e-8,
        6.097_555e-5,
        65504.0,
        -65504.0,
        448.0,
        3e38,
        -3e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let number = |sequence: &mut Sequence| match sequence.bits() % 3 {
        0 => SPECIAL[sequence.bits() as usize % SPECIAL.len()],
        1 => sequence.fraction(),
        _ => f32::from_bits(sequence.bits() as u32),
    };
    let own = OwnCodes::new(kind, shape, &mut Sequence(kind.bits as u64), &number);
    let packed = PackedWeight::from_codes(&own.as_codes(), shape, instruction_set).expect("sizes fit")?;
    Some(PackedCodes { packed, numbers: own.numbers() })
}

/// Checks products with dense rows, with rows so small that products round to zeros of either sign, and with rows of a
/// single 1, which show each number of the weight alone.
#[test]
fn packed_codes_with_any_scale_have_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 3, 40] };
    let shape = if cfg!(miri) { weight_shape(18, 64) } else { weight_shape(103, 128) };
    let WeightShape { outputs, inputs } = shape;
    for instruction_set in instruction_sets_of_codes() {
        for kind in CodeKind::all(inputs) {
            let Some(PackedCodes { packed, numbers: exact }) = codes_with_any_scale(kind, shape, instruction_set)
            else {
                assert!(kind.is_refused_by_scalar(true) && instruction_set == InstructionSet::Scalar, "{kind:?}");
                continue;
            };
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

/// Checks inputs that do not fill up the groups that are stored together.
#[test]
fn packed_codes_with_partial_last_group_have_bits_of_f32_weight() {
    let own = |values, scales, group| CodeKind { bits: 8, group, values, scales };
    for inputs in [1, 7, 48, 100, 200] {
        let shape = weight_shape(21, inputs);
        let mut kinds = vec![
            own(ValueKind::Signed, ScaleKind::F32, inputs),
            own(ValueKind::Minimums, ScaleKind::F16, inputs),
            own(ValueKind::WholeZeros, ScaleKind::BF16, inputs),
            own(ValueKind::E4M3, ScaleKind::F32, inputs),
        ];
        if inputs == 48 {
            kinds.push(own(ValueKind::Minimums, ScaleKind::BF16, 16));
        }
        for instruction_set in instruction_sets_of_codes() {
            for &kind in &kinds {
                let PackedCodes { packed, numbers: exact } =
                    codes(kind, shape, instruction_set, 3).expect("codes that are packed");
                let plain = PackedWeight::new(&exact, shape, instruction_set).expect("memory");
                assert_eq!(packed.unpack::<f32>().expect("memory"), exact);
                for (rows, is_transposed) in [(1, false), (40, false), (5, true)] {
                    let multiply_by = |weight: &PackedWeight| {
                        let columns = if is_transposed { 21 } else { inputs };
                        let xs = numbers::<f32>(rows * columns, 4);
                        let right = match is_transposed {
                            true => Right::Transposed { weight, outputs: 0..21 },
                            false => Right::Weight { weight, outputs: 0..21 },
                        };
                        let product = Product { left: rows_of(&xs, columns), right, epilogue: Epilogue::default() };
                        multiply_vec(&product).expect("fits")
                    };
                    assert_eq!(multiply_by(&packed), multiply_by(&plain), "{instruction_set}: {inputs} of {kind:?}");
                }
            }
        }
    }
}

/// Returns whether codes with some inputs are packed, for each instruction set.
fn pack(codes: Codes, inputs: usize) -> Vec<bool> {
    let shape = weight_shape(codes.codes.len() / inputs, inputs);
    let is_packed = |set| PackedWeight::from_codes(&codes, shape, set).expect("sizes fit").is_some();
    InstructionSet::available().into_iter().map(is_packed).collect()
}

#[test]
fn packed_codes_that_kernels_would_round_are_refused() {
    fn codes<'a>(codes: &'a [u8], group: usize, values: Values<'a>, scales: Scales<'a>) -> Codes<'a> {
        Codes { bits: 8, codes, group, values, scales }
    }
    let ones = [1f32; 4];
    let infinity = [f32::INFINITY];
    let everywhere = vec![true; InstructionSet::available().len()];
    let nowhere = vec![false; InstructionSet::available().len()];
    let f32s = |count: usize| Scales::F32(&ones[..count]);
    // Groups that are neither a multiple of 16 nor a whole output.
    assert_eq!(pack(codes(&[1; 48], 24, Values::Signed, f32s(2)), 48), nowhere);
    assert_eq!(pack(codes(&[1; 48], 48, Values::Signed, f32s(1)), 48), everywhere);
    // Floats that are infinite or NaN.
    for (values, largest, not_finite) in [(Values::E4M3, 0x7e, 0x7f), (Values::E5M2, 0x7b, 0x7c)] {
        for sign in [0, 0x80] {
            let finite = [sign | largest; 16];
            let infinite = [sign | not_finite; 16];
            assert_eq!(pack(codes(&finite, 16, values, f32s(1)), 16), everywhere);
            assert_eq!(pack(codes(&infinite, 16, values, f32s(1)), 16), nowhere);
        }
    }
    // Scales that exceed f32 when they are multiplied by the power of two of E4M3.
    assert_eq!(pack(codes(&[1; 16], 16, Values::E4M3, Scales::F32(&[127.0])), 16), everywhere);
    assert_eq!(pack(codes(&[1; 16], 16, Values::E4M3, Scales::F32(&[257.0])), 16), nowhere);
    // Zeros that fill up the last group, times infinity.
    assert_eq!(pack(codes(&[1; 64], 64, Values::Signed, Scales::F32(&infinity)), 64), everywhere);
    assert_eq!(pack(codes(&[1; 63], 63, Values::Signed, Scales::F32(&infinity)), 63), nowhere);
    assert_eq!(pack(codes(&[1; 63], 63, Values::Zeros(&infinity), f32s(1)), 63), nowhere);
    // A sum of products that the scalar instruction set rounds twice, or whose product exceeds f32.
    for scale in [1.0 / 3.0, 3e38] {
        let minimum = [-scale];
        let scale = [scale];
        let rounded = codes(&[1; 64], 64, Values::Minimums(Scales::F32(&minimum)), Scales::F32(&scale));
        let elsewhere = InstructionSet::available().into_iter().map(|set| set != InstructionSet::Scalar);
        assert_eq!(pack(rounded, 64), elsewhere.collect::<Vec<_>>());
    }
}

#[test]
fn packed_codes_memory_is_bits_and_scales() {
    for instruction_set in InstructionSet::available() {
        for kind in CodeKind::all(128) {
            // Whole panels of every instruction set.
            let shape = weight_shape(96, 128);
            let Some(PackedCodes { packed, .. }) = codes(kind, shape, instruction_set, 1) else { continue };
            assert_eq!(packed.memory(), 96 * 2 * kind.bytes_of_64_inputs(instruction_set), "{kind:?}: {packed:?}");
        }
    }
}

#[test]
fn codes_of_a_table_are_looked_up_as_bytes_where_tables_of_f32_are_slow() {
    let shape = weight_shape(5, 64);
    let codes = vec![3; 5 * 64];
    let bytes: [f32; 16] = std::array::from_fn(|code| code as f32 - 7.5);
    let thirds: [f32; 16] = std::array::from_fn(|code| code as f32 / 3.0);
    for instruction_set in instruction_sets_of_codes() {
        for (table, scale, are_bytes) in [(&bytes, 0.1, true), (&thirds, 0.1, false), (&bytes, 1e-30, false)] {
            let scales = [scale; 5];
            let own =
                Codes { bits: 4, codes: &codes, group: 64, values: Values::Table(table), scales: Scales::F32(&scales) };
            let packed = PackedWeight::from_codes(&own, shape, instruction_set).expect("sizes fit").expect("packed");
            let Format::Codes(format) = packed.format else { panic!("{packed:?}") };
            let is_slow = instruction_set < InstructionSet::Avx512;
            assert_eq!(matches!(format.values, CodeValues::Bytes(_)), are_bytes && is_slow, "{packed:?}: {scale}");
            assert_eq!(packed.unpack::<f32>().expect("memory"), [table[3] * scale; 5 * 64], "{packed:?}");
        }
    }
}
