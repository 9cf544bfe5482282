//! Tests of the kernels alone, without tensors. They are small enough for Miri, which finds reads and writes out of
//! bounds on the scalar instruction set. `tests/attention/linear` compares every instruction set with f64.

mod gradients;

use std::ops::Range;

use half::{bf16, f16};

use super::{
    Activation, CODE_BLOCK, Codes, Epilogue, Matrix, PackedWeight, Product, Right, Up, WeightShape, multiply,
    multiply_vec,
};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::cpu::tests::{Sequence, erfc, numbers};
use crate::error::Error;

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    columns: Range<usize>,
    /// Elements of the input between one row and the next.
    gap: usize,
    bias: bool,
}

impl Case {
    /// Returns the largest difference between a product and plain loops in f64, relative to the sum of the magnitudes.
    fn difference<W: Element + PartialEq + Into<f32>, X: Element + Into<f32>>(
        &self,
        instruction_set: InstructionSet,
    ) -> f64 {
        let Self { rows, inputs, outputs, ref columns, gap, bias } = *self;
        let weight: Vec<W> = numbers(outputs * inputs, 1);
        let xs_row = inputs + gap;
        let xs: Vec<X> = numbers((rows * xs_row).saturating_sub(gap), 2);
        let bias: Option<Vec<f32>> = bias.then(|| numbers(outputs, 3));
        let packed = PackedWeight::new(&weight, weight_shape(outputs, inputs), instruction_set).expect("memory");
        assert!(
            packed.unpack::<W>().expect("memory") == weight,
            "{instruction_set}: {self:?} is not unpacked as it was"
        );
        let left = Matrix { data: &xs[..], rows, columns: inputs, stride: xs_row, is_transposed: false };
        let right = Right::Weight { weight: &packed, outputs: columns.clone() };
        let epilogue = Epilogue { bias: bias.as_deref(), ..Default::default() };
        let out = multiply_vec(&Product { left, right, epilogue }).expect("memory");
        assert_eq!(out.len(), rows * columns.len());
        let number = |x: f32| f64::from(x);
        let entry = |(at, &found): (usize, &X)| {
            let row = at / columns.len();
            let column = columns.start + at % columns.len();
            let terms = (0..inputs)
                .map(|input| number(xs[row * xs_row + input].into()) * number(weight[column * inputs + input].into()));
            let bias = bias.as_ref().map_or(0.0, |bias| number(bias[column]));
            let (sum, size) = terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()));
            let difference = (number(found.into()) - sum).abs();
            if difference == 0.0 { 0.0 } else { difference / size }
        };
        out.iter().enumerate().map(entry).fold(0.0, f64::max)
    }
}

fn weight_shape(outputs: usize, inputs: usize) -> WeightShape {
    WeightShape { outputs, inputs }
}

/// Returns a matrix of contiguous rows.
fn rows_of<X>(data: &[X], columns: usize) -> Matrix<'_, X> {
    Matrix { data, rows: data.len() / columns, columns, stride: columns, is_transposed: false }
}

fn case(rows: usize, inputs: usize, outputs: usize) -> Case {
    Case { rows, inputs, outputs, columns: 0..outputs, gap: rows % 3, bias: outputs.is_multiple_of(2) }
}

#[test]
fn linear_product_on_each_instruction_set_matches_plain_loops() {
    let mut cases = vec![case(1, 3, 2), case(3, 18, 17), Case { columns: 1..18, ..case(2, 5, 19) }, case(2, 0, 3)];
    if !cfg!(miri) {
        cases.extend([
            case(0, 4, 4),
            case(3, 4, 0),
            case(17, 33, 49),
            case(5, 513, 97),
            case(8, 1700, 5),
            case(193, 40, 50),
        ]);
        cases.push(Case { columns: 47..97, ..case(20, 257, 100) });
    }
    // Interpreted, a product takes seconds.
    let instruction_sets = if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() };
    for instruction_set in instruction_sets {
        for case in &cases {
            for (difference, most) in [
                (case.difference::<f32, f32>(instruction_set), 1e-6),
                (case.difference::<bf16, bf16>(instruction_set), 4e-3),
                (case.difference::<f16, f16>(instruction_set), 5e-4),
                (case.difference::<bf16, f32>(instruction_set), 1e-6),
                (case.difference::<f16, f32>(instruction_set), 1e-6),
            ] {
                assert!(difference < most, "{instruction_set}: {case:?} is off by {difference:e}, more than {most:e}");
            }
        }
    }
}

/// Computes a product's epilogue in f64.
fn exact_epilogue(activation: Option<Activation>, sum: f64, up: f64, residual: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let activated = match activation {
        None => sum,
        Some(Activation::Gelu) => 0.5 * sum * erfc(-sum / 2f64.sqrt()),
        Some(Activation::GeluTanh) => {
            0.5 * sum * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (sum + 0.044715 * sum.powi(3))).tanh())
        }
        Some(Activation::Silu) => sum * sigmoid(sum),
        Some(Activation::Relu) => sum.max(0.0),
    };
    activated * up + residual
}

/// Compares every epilogue with the product alone and f64, for some of the columns, at the edges of vectors and panels.
fn check_epilogues<W: Element, X: Element + Into<f32>>(instruction_set: InstructionSet, most: f64) {
    let number = |x: f32| f64::from(x);
    let (rows, inputs, outputs, columns) = if cfg!(miri) { (2, 3, 18, 1..18) } else { (5, 70, 103, 5..102) };
    let weights = [1, 2].map(|salt| numbers::<W>(outputs * inputs, salt));
    let weights = weights
        .map(|numbers| PackedWeight::new(&numbers, weight_shape(outputs, inputs), instruction_set).expect("memory"));
    let biases = [3, 4].map(|salt| numbers::<f32>(outputs, salt));
    let xs: Vec<X> = numbers(rows * inputs, 5);
    let residual: Vec<X> = numbers(rows * columns.len(), 6);
    let wide_xs: Vec<f32> = xs.iter().map(|&x| x.into()).collect();
    let plain = [0, 1].map(|at| {
        let epilogue = Epilogue { bias: Some(&biases[at][..]), ..Default::default() };
        let (left, right) =
            (rows_of(&wide_xs, inputs), Right::Weight { weight: &weights[at], outputs: columns.clone() });
        multiply_vec(&Product { left, right, epilogue }).expect("fits")
    });
    let all = [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Relu].map(Some);
    for activation in [None].into_iter().chain(all) {
        for n in 0..4 {
            let is_gated = n % 2 == 1;
            let is_added = n / 2 == 1;
            let epilogue = Epilogue {
                bias: Some(&biases[0][..]),
                activation,
                up: is_gated.then_some(Up { weight: &weights[1], bias: Some(&biases[1]) }),
                residual: is_added.then_some(&residual[..]),
            };
            let left = rows_of(&xs, inputs);
            let right = Right::Weight { weight: &weights[0], outputs: columns.clone() };
            let product = Product { left, right, epilogue };
            for (at, &found) in multiply_vec(&product).expect("fits").iter().enumerate() {
                let up = if is_gated { number(plain[1][at]) } else { 1.0 };
                let added = if is_added { number(residual[at].into()) } else { 0.0 };
                let sum = number(plain[0][at]);
                let found = number(found.into());
                let exact = exact_epilogue(activation, sum, up, added);
                let bound = most * (sum.abs() * up.abs() + up.abs() + added.abs() + 1.0);
                let what = format!("{instruction_set}: {activation:?} of {sum} by {up} and {added}");
                assert!((found - exact).abs() <= bound, "{what} is {found:e}, expected {exact:e} within {bound:e}");
            }
        }
    }
}

#[test]
fn linear_epilogue_on_each_instruction_set_matches_f64() {
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        check_epilogues::<f32, f32>(instruction_set, 1e-6);
        check_epilogues::<bf16, f32>(instruction_set, 1e-6);
        // Instruction sets that multiply pairs of bf16 sum them in another order.
        check_epilogues::<bf16, bf16>(instruction_set, 5e-3);
        check_epilogues::<f16, f16>(instruction_set, 1e-3);
    }
}

/// Returns packed codes, and their numbers in f32.
fn codes(
    bits: usize,
    has_minimums: bool,
    shape: WeightShape,
    instruction_set: InstructionSet,
    salt: u64,
) -> (PackedWeight, Vec<f32>) {
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
    (packed.expect("sizes fit"), exact)
}

/// Checks products of codes with any number of rows and an epilogue.
#[test]
fn packed_codes_product_has_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 2, 3, 8, 17, 40, 193] };
    let shape = if cfg!(miri) { weight_shape(18, 32) } else { weight_shape(103, 480) };
    let WeightShape { outputs, inputs } = shape;
    let bias = numbers::<f32>(outputs, 9);
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for (bits, has_minimums) in [(4, false), (4, true), (8, false), (8, true)] {
            let both = [10, 20].map(|salt| codes(bits, has_minimums, shape, instruction_set, salt));
            let plain = [0, 1].map(|at| PackedWeight::new(&both[at].1, shape, instruction_set).expect("memory"));
            let packed = both.map(|(packed, exact)| {
                assert_eq!(packed.unpack::<f32>().expect("memory"), exact, "{instruction_set}: {packed:?}");
                let one = packed.unpack_rows::<f32>(&[17, 3]).expect("memory");
                assert_eq!(one, [&exact[17 * inputs..18 * inputs], &exact[3 * inputs..4 * inputs]].concat());
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

/// Compares the bits of numbers, of which all NaNs are alike.
fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (x, y)) in found.iter().zip(expected).enumerate() {
        let are_same = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
        assert!(are_same, "{what}: {x:?} at {at}, expected {y:?}");
    }
}

/// Returns packed codes with scales and minimums of every kind, and their numbers as GGUF files define them.
fn codes_with_any_scale(
    bits: usize,
    has_minimums: bool,
    shape: WeightShape,
    instruction_set: InstructionSet,
) -> (PackedWeight, Vec<f32>) {
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
    let (scales, minimums): (Vec<_>, Vec<_>) = (0..blocks).map(|_| (half(), half())).unzip();
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
    let codes = Codes { bits, codes: &codes, scales: &scales, minimums: has_minimums.then_some(&minimums) };
    (PackedWeight::from_codes(&codes, shape, instruction_set).expect("sizes fit"), numbers)
}

/// Checks products with dense rows, with rows so small that products round to zeros of either sign, and with rows of a
/// single 1, which show each number of the weight alone.
#[test]
fn packed_codes_with_any_scale_have_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 3, 40] };
    let shape = if cfg!(miri) { weight_shape(18, 32) } else { weight_shape(103, 96) };
    let WeightShape { outputs, inputs } = shape;
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for (bits, has_minimums) in [(4, false), (4, true), (8, false), (8, true)] {
            let (packed, numbers_of_codes) = codes_with_any_scale(bits, has_minimums, shape, instruction_set);
            let plain = PackedWeight::new(&numbers_of_codes, shape, instruction_set).expect("memory");
            let unpacked = packed.unpack::<f32>().expect("memory");
            assert_same_bits(&unpacked, &numbers_of_codes, &format!("{packed:?}"));
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
                // The gradient of the inputs reads the weight the other way round.
                let gradients = numbers::<f32>(rows * outputs, 5);
                let transposed = |weight: &PackedWeight| {
                    let (left, right) =
                        (rows_of(&gradients, outputs), Right::Transposed { weight, outputs: 0..outputs });
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
        for (bits, has_minimums, bytes) in [(4, false, 18), (4, true, 20), (8, false, 34), (8, true, 36)] {
            // Whole panels of every instruction set.
            let (packed, _) = codes(bits, has_minimums, weight_shape(96, 64), instruction_set, 1);
            assert_eq!(packed.memory(), 96 * 2 * bytes, "{packed:?}");
        }
    }
}

#[test]
fn packed_codes_with_wrong_sizes_are_errors() {
    let all = [15u8; 64];
    let scales = [f16::ONE; 2];
    let good = Codes { bits: 4, codes: &all, scales: &scales, minimums: Some(&scales) };
    let pack = |codes: Codes, shape| PackedWeight::from_codes(&codes, shape, InstructionSet::Scalar);
    let packed = pack(good, weight_shape(2, 32)).expect("a good call");
    let mut large = all;
    large[40] = 16;
    let cases = [
        (Codes { bits: 5, ..good }, weight_shape(2, 32), "expected codes of 4 or 8 bits, found 5"),
        (good, weight_shape(4, 16), "expected inputs in blocks of 32, found 16"),
        (good, weight_shape(1, 32), "codes has 64 elements, expected 32"),
        (Codes { scales: &scales[..1], ..good }, weight_shape(2, 32), "scales has 1 elements, expected 2"),
        (Codes { minimums: Some(&[]), ..good }, weight_shape(2, 32), "minimums has 0 elements, expected 2"),
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
    let of_half = packed.unpack::<f16>().expect_err("f32");
    assert_eq!(of_half.to_string(), "expected a weight of F16, found codes of 4 bits with minimums");
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
    let of_columns = |columns| Product { right: Right::Weight { weight: &weight, outputs: columns }, ..good.clone() };
    let transposed = Right::Transposed { weight: &weight, outputs: 0..2 };
    let matrix = |matrix: Matrix<'static, f32>| Product {
        right: Right::Matrix { matrix, instruction_set: InstructionSet::Scalar },
        ..good.clone()
    };
    assert_eq!(multiply_vec(&good).expect("a good call").len(), 9);
    let start = 2;
    let end = 1;
    let cases = [
        (of_columns(1..4), "expected columns within 3 outputs, found 1..4"),
        (of_columns(start..end), "expected columns within 3 outputs, found 2..1"),
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
    let of_missing = Product { right: Right::Matrix { matrix: rows_of(&rows, 3), instruction_set: missing }, ..good };
    assert!(matches!(multiply_vec(&of_missing), Err(Error::InstructionSet(_))));
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
            let codes = |bits, minimums| Codes { bits, codes: &code[..count], scales, minimums };
            for packed in [
                PackedWeight::new(&data[..count], shape, instruction_set),
                PackedWeight::new(&halves[..count], shape, instruction_set),
                PackedWeight::new(&vec![bf16::ONE; count], shape, instruction_set),
                PackedWeight::from_codes(&codes(4, None), shape, instruction_set),
                PackedWeight::from_codes(&codes(8, Some(scales)), shape, instruction_set),
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
    // A depth of lines that repeat takes as long as it is: none, a few, or more than can be counted.
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
