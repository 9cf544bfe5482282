//! Sizes that do not fit each other, and sizes of any magnitude.

use half::{bf16, f16};

use super::{rows_of, weight_shape};
use crate::cpu::InstructionSet;
use crate::error::Error;
use crate::linear::{
    CODE_BLOCK, Codes, Epilogue, Matrix, NestedScales, PackedWeight, Product, Right, Scales, Up, Values, multiply,
    multiply_vec,
};

#[test]
fn packed_codes_with_wrong_sizes_are_errors() {
    let all = [15u8; 64];
    let ones = [f16::ONE; 2];
    let one = [1f32];
    let with = |scales, values| Codes { bits: 4, codes: &all, group: 32, values, scales: Scales::F16(scales) };
    let good = with(&ones, Values::Minimums(Scales::F16(&ones)));
    let nested_scales = |numbers| Scales::Nested(NestedScales { factors: &[f16::ONE], numbers });
    let nested = |group, numbers, values| Codes { group, values, scales: nested_scales(numbers), ..good };
    let minimums = Values::Minimums(nested_scales(&[1; 2]));
    let pack = |codes: Codes, shape| PackedWeight::from_codes(&codes, shape, InstructionSet::Scalar);
    let packed = pack(good, weight_shape(2, 32)).expect("a good call").expect("codes that are packed");
    let mut large = all;
    large[40] = 16;
    let cases = [
        (Codes { bits: 7, ..good }, weight_shape(2, 32), "expected codes of 2, 3, 4, 5, 6 or 8 bits, found 7"),
        (
            Codes { bits: 5, values: Values::Table(&[0.0; 16]), ..good },
            weight_shape(2, 32),
            "expected codes of up to 4 bits with a table, found 5",
        ),
        (Codes { values: Values::E4M3, ..good }, weight_shape(2, 32), "expected floats of 8 bits, found 4"),
        (good, weight_shape(4, 16), "expected groups that divide 16 inputs, found 32"),
        (Codes { group: 0, ..good }, weight_shape(2, 32), "expected groups that divide 32 inputs, found 0"),
        (good, weight_shape(1, 32), "codes has 64 elements, expected 32"),
        (with(&ones[..1], Values::Signed), weight_shape(2, 32), "scales has 1 elements, expected 2"),
        (with(&ones, Values::Minimums(Scales::BF16(&[]))), weight_shape(2, 32), "minimums has 0 elements, expected 2"),
        (with(&ones, Values::Zeros(&one)), weight_shape(2, 32), "zeros has 1 elements, expected 2"),
        (nested(8, &[1; 8], Values::Signed), weight_shape(1, 64), "expected groups of 16 or 32 codes, found 8"),
        (nested(16, &[1; 4], Values::Signed), weight_shape(2, 32), "expected inputs in blocks of 64, found 32"),
        (nested(16, &[1; 2], Values::Signed), weight_shape(1, 64), "scales has 2 elements, expected 4"),
        (nested(16, &[1; 4], minimums), weight_shape(1, 64), "minimums has 2 elements, expected 4"),
        (
            nested(16, &[1; 4], Values::Minimums(Scales::F32(&[1.0; 4]))),
            weight_shape(1, 64),
            "expected signed codes, a table or nested minimums with nested scales",
        ),
        (
            nested(32, &[1, 64], minimums),
            weight_shape(1, 64),
            "with minimums, expected codes up to 127 and scales up to 63, found 15 and 64",
        ),
        (Codes { codes: &large, ..good }, weight_shape(2, 32), "expected codes of 4 bits, found 16"),
        (
            good,
            weight_shape(usize::MAX, 32),
            &format!("a packed weight of ({}, 32) does not fit in memory", usize::MAX),
        ),
    ];
    for (codes, shape, expected) in cases {
        assert_eq!(pack(codes, shape).expect_err(expected).to_string(), expected);
    }
    let as_half = packed.unpack::<f16>().expect_err("f32");
    assert_eq!(as_half.to_string(), "expected a weight of F16, found codes of 4 bits with minimums");
    let error = packed.unpack_rows::<f32>(&[1, 2]).expect_err("two outputs");
    assert_eq!(error.to_string(), "expected outputs below 2, found 2");
}

#[test]
fn linear_product_with_wrong_sizes_is_an_error() {
    let rows = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let weight = PackedWeight::new(&rows, weight_shape(3, 2), InstructionSet::Scalar).expect("a small weight");
    let other = PackedWeight::new(&rows, weight_shape(2, 3), InstructionSet::Scalar).expect("a small weight");
    let epilogue = Epilogue::default();
    let left = rows_of(&rows, 2);
    let good = Product { left, right: Right::Weight { weight: &weight, outputs: 0..3 }, epilogue };
    let with = |changed: Epilogue<'static, f32>| Product { epilogue: changed, ..good.clone() };
    let up = |up_weight, bias| Epilogue { up: Some(Up { weight: up_weight, bias }), ..epilogue };
    let with_columns = |columns| Product { right: Right::Weight { weight: &weight, outputs: columns }, ..good.clone() };
    let transposed = Right::Transposed { weight: &weight, outputs: 0..2 };
    let matrix = |matrix: Matrix<'static, f32>| Product {
        right: Right::Matrix { matrix, instruction_set: InstructionSet::Scalar },
        ..good.clone()
    };
    assert_eq!(multiply_vec(&good).expect("a good call").len(), 9);
    let start = 2;
    let end = 1;
    let cases = [
        (with_columns(1..4), "expected columns within 3 outputs, found 1..4"),
        (with_columns(start..end), "expected columns within 3 outputs, found 2..1"),
        (with(Epilogue { bias: Some(&[1.0, 2.0]), ..epilogue }), "bias has 2 elements, expected 3"),
        (with(Epilogue { residual: Some(&[1.0, 2.0]), ..epilogue }), "residual has 2 elements, expected 9"),
        (
            Product { epilogue: up(&other, None), ..good.clone() },
            "expected the up product's weight to be 3 x 2, F32, scalar, found 2 x 3, F32, scalar",
        ),
        (
            Product { epilogue: up(&weight, Some(&rows)), ..good.clone() },
            "the up product's bias has 6 elements, expected 3",
        ),
        (
            Product { right: transposed, epilogue: up(&weight, None), ..good.clone() },
            "expected a packed weight together with that of the up product",
        ),
        (
            Product { left: Matrix { rows: 4, ..left }, ..good.clone() },
            "the left operand of [4] entries of 2 elements with strides [2] ends past the 6 elements of its slice",
        ),
        (
            Product { left: Matrix { stride: 3, ..left }, ..good.clone() },
            "the left operand of [3] entries of 2 elements with strides [3] ends past the 6 elements of its slice",
        ),
        (
            matrix(Matrix { data: &[1.0, 2.0, 3.0], rows: 2, columns: 2, stride: 2, is_transposed: true }),
            "the right operand of [2] entries of 2 elements with strides [2] ends past the 3 elements of its slice",
        ),
        (
            matrix(Matrix { data: &[1.0, 2.0, 3.0], rows: 3, columns: 1, stride: 1, is_transposed: false }),
            "expected a depth of 3, found 2",
        ),
        (
            Product { left: Matrix { rows: usize::MAX, stride: 0, ..left }, ..good.clone() },
            &format!("an output of {} rows of 3 does not fit in memory", usize::MAX),
        ),
    ];
    for (product, expected) in cases {
        assert_eq!(multiply_vec(&product).expect_err(expected).to_string(), expected);
    }
    let error = multiply(&good, &mut Box::new_uninit_slice(8)).expect_err("too short");
    assert_eq!(error.to_string(), "output has 8 elements, expected 9");
    let too_large = PackedWeight::new::<f32>(&[], weight_shape(0, usize::MAX), InstructionSet::Scalar)
        .expect_err("too many inputs");
    assert_eq!(too_large.to_string(), format!("a packed weight of (0, {}) does not fit in memory", usize::MAX));
    let wrong_shape = PackedWeight::new(&rows, weight_shape(2, 2), InstructionSet::Scalar).expect_err("a wrong shape");
    assert_eq!(wrong_shape.to_string(), "the weight has 6 elements, expected 4");
    assert_eq!(weight.unpack::<bf16>().expect_err("f32").to_string(), "expected a weight of BF16, found F32");
    let missing = InstructionSet::ALL
        .into_iter()
        .find(|instruction_set| !instruction_set.is_available())
        .expect("of another processor");
    assert!(matches!(PackedWeight::new(&rows, weight_shape(3, 2), missing), Err(Error::InstructionSet(_))));
    let on_missing = Product { right: Right::Matrix { matrix: rows_of(&rows, 3), instruction_set: missing }, ..good };
    assert!(matches!(multiply_vec(&on_missing), Err(Error::InstructionSet(_))));
}

/// Checks sizes whose products exceed a `usize` while no slice does: such weights and products are computed, or errors.
#[test]
fn linear_sizes_of_any_magnitude_are_computed_or_errors() {
    let data = [0.5f32; 96];
    let halves = [f16::ONE; 96];
    let code = [1u8; 96];
    // The largest that is a multiple of a block is the last one.
    let counts = [0, 1, 3, 32, usize::MAX / 4, usize::MAX, usize::MAX - 31];
    let mut computed = 0;
    let mut refused = 0;
    let mut note = |is_ok: bool| if is_ok { computed += 1 } else { refused += 1 };
    for (outputs, inputs) in counts.iter().flat_map(|&outputs| counts.map(|inputs| (outputs, inputs))) {
        let count = outputs.saturating_mul(inputs).min(96);
        for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
            let shape = weight_shape(outputs, inputs);
            let scales = &halves[..count / CODE_BLOCK];
            let codes = |bits, values| {
                let own = Codes { bits, codes: &code[..count], group: 32, values, scales: Scales::F16(scales) };
                PackedWeight::from_codes(&own, shape, instruction_set)
                    .map(|packed| packed.expect("codes that are packed"))
            };
            for packed in [
                PackedWeight::new(&data[..count], shape, instruction_set),
                PackedWeight::new(&halves[..count], shape, instruction_set),
                PackedWeight::new(&vec![bf16::ONE; count], shape, instruction_set),
                codes(4, Values::Signed),
                codes(8, Values::Minimums(Scales::F16(scales))),
            ] {
                note(packed.is_ok());
                let Ok(weight) = packed else { continue };
                assert_eq!(weight_shape(weight.outputs(), weight.inputs()), shape);
                note(weight.unpack::<f32>().is_ok());
                for rows in counts {
                    let left = |columns| Matrix { data: &data[..], rows, columns, stride: 0, is_transposed: false };
                    let by = |matrix, right| {
                        let epilogue = Epilogue::default();
                        multiply_vec(&Product { left: matrix, right, epilogue }).is_ok()
                    };
                    note(by(left(inputs), Right::Weight { weight: &weight, outputs: 0..outputs }));
                    note(by(left(outputs), Right::Transposed { weight: &weight, outputs: 0..outputs }));
                }
            }
        }
    }
    // A product takes as long as its depth: 0, a few, or a depth that is too large and refused.
    for (rows, depth, columns) in counts
        .iter()
        .flat_map(|&rows| [0, 1, 3, usize::MAX].map(|depth| (rows, depth)))
        .flat_map(|(rows, depth)| counts.map(|columns| (rows, depth, columns)))
    {
        let matrix = |height, width, is_transposed| Matrix {
            data: &data[..],
            rows: height,
            columns: width,
            stride: 0,
            is_transposed,
        };
        for (left_transposed, right_transposed) in [(false, false), (false, true), (true, false), (true, true)] {
            for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
                let right = Right::Matrix { matrix: matrix(depth, columns, right_transposed), instruction_set };
                let left = matrix(rows, depth, left_transposed);
                let product = Product { left, right, epilogue: Epilogue::default() };
                note(multiply_vec(&product).is_ok());
            }
        }
    }
    assert!(computed > 0 && refused > 0, "{computed} computed, {refused} refused");
}
