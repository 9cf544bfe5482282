//! Weights of codes, compared with weights of the same numbers in f32.

use half::f16;

use super::{numbers, rows_of, weight_shape};
use crate::cpu::InstructionSet;
use crate::cpu::tests::Sequence;
use crate::linear::{
    Activation, CODE_BLOCK, Codes, Epilogue, NESTED_BLOCK, NestedScales, PackedWeight, Product, Right, Scales, Up,
    WeightShape, multiply_vec,
};

/// The kinds of codes: the bits of a code, whether blocks have minimums, and the group of nested scales.
#[derive(Clone, Copy)]
struct CodeKind {
    bits: usize,
    has_minimums: bool,
    nested_group: Option<usize>,
}

impl CodeKind {
    /// Returns every kind.
    fn all() -> Vec<Self> {
        let mut kinds = Vec::new();
        for nested_group in [None, Some(16), Some(32)] {
            for (bits, has_minimums) in [(4, false), (4, true), (8, false), (8, true)] {
                kinds.push(Self { bits, has_minimums, nested_group });
            }
        }
        kinds
    }

    /// Returns the number of inputs that share numbers in f16.
    fn block(self) -> usize {
        if self.nested_group.is_some() { NESTED_BLOCK } else { CODE_BLOCK }
    }
}

/// The numbers of a weight of codes.
struct OwnCodes {
    kind: CodeKind,
    codes: Vec<u8>,
    /// The scales of blocks, or the factors of nested scales.
    scales: Vec<f16>,
    minimums: Vec<f16>,
    /// The whole numbers of nested scales and minimums.
    nested_scales: Vec<u8>,
    nested_minimums: Vec<u8>,
}

impl OwnCodes {
    /// Draws codes, and scales and minimums by `half`.
    fn new(kind: CodeKind, shape: WeightShape, sequence: &mut Sequence, half: impl Fn(&mut Sequence) -> f16) -> Self {
        let count = shape.outputs * shape.inputs;
        let groups = count / kind.nested_group.unwrap_or(count);
        let is_exact = kind.has_minimums && kind.nested_group.is_some();
        let mut bytes =
            |len: usize, bits: usize| (0..len).map(|_| (sequence.bits() as u8) >> (8 - bits)).collect::<Vec<_>>();
        let codes = bytes(count, if is_exact { kind.bits.min(7) } else { kind.bits });
        let nested_scales = bytes(groups, if is_exact { 6 } else { 8 });
        let nested_minimums = bytes(groups, 8);
        let mut halves = || (0..count / kind.block()).map(|_| half(sequence)).collect::<Vec<_>>();
        Self { kind, codes, scales: halves(), minimums: halves(), nested_scales, nested_minimums }
    }

    fn scales(&self) -> Scales<'_> {
        let has_minimums = self.kind.has_minimums;
        let Some(group) = self.kind.nested_group else {
            let minimums = has_minimums.then_some(self.minimums.as_slice());
            return Scales::F16 { scales: &self.scales, minimums };
        };
        let scales = NestedScales { factors: &self.scales, numbers: &self.nested_scales };
        let minimums = NestedScales { factors: &self.minimums, numbers: &self.nested_minimums };
        Scales::Nested { group, scales, minimums: has_minimums.then_some(minimums) }
    }

    /// Returns the numbers in f32, as the files of these types define them: each is rounded once.
    fn numbers(&self) -> Vec<f32> {
        let CodeKind { bits, has_minimums, nested_group } = self.kind;
        let number = |(at, &code): (usize, &u8)| {
            let mut scale = self.scales[at / self.kind.block()].to_f32();
            let mut minimum = self.minimums[at / self.kind.block()].to_f32();
            if let Some(group) = nested_group {
                let zero = if has_minimums { 0.0 } else { 128.0 };
                scale *= f32::from(self.nested_scales[at / group]) - zero;
                minimum *= f32::from(self.nested_minimums[at / group]);
            }
            match has_minimums {
                true => f32::from(code) * scale + minimum,
                false => (f32::from(code) - (1 << (bits - 1)) as f32) * scale,
            }
        };
        self.codes.iter().enumerate().map(number).collect()
    }

    fn pack(&self, shape: WeightShape, instruction_set: InstructionSet) -> PackedCodes {
        let codes = Codes { bits: self.kind.bits, codes: &self.codes, scales: self.scales() };
        let packed = PackedWeight::from_codes(&codes, shape, instruction_set).expect("sizes fit");
        PackedCodes { packed, numbers: self.numbers() }
    }
}

/// Packed codes, and their numbers in f32.
struct PackedCodes {
    packed: PackedWeight,
    numbers: Vec<f32>,
}

/// Packs arbitrary codes with scales and minimums between -1 and 1.
fn codes(kind: CodeKind, shape: WeightShape, instruction_set: InstructionSet, salt: u64) -> PackedCodes {
    let half = |sequence: &mut Sequence| f16::from_f32(sequence.fraction());
    OwnCodes::new(kind, shape, &mut Sequence(salt), half).pack(shape, instruction_set)
}

/// Checks products of codes with any number of rows and an epilogue.
#[test]
fn packed_codes_product_has_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 2, 3, 8, 17, 40, 193] };
    let shape = if cfg!(miri) { weight_shape(18, 64) } else { weight_shape(103, 448) };
    let WeightShape { outputs, inputs } = shape;
    let bias = numbers::<f32>(outputs, 9);
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for kind in CodeKind::all() {
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

/// Packs codes with scales and minimums of every kind.
fn codes_with_any_scale(kind: CodeKind, shape: WeightShape, instruction_set: InstructionSet) -> PackedCodes {
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
    let half = |sequence: &mut Sequence| match sequence.bits() % 3 {
        0 => SPECIAL[sequence.bits() as usize % SPECIAL.len()],
        1 => f16::from_f32(sequence.fraction()),
        _ => f16::from_bits(sequence.bits() as u16),
    };
    OwnCodes::new(kind, shape, &mut Sequence(kind.bits as u64), half).pack(shape, instruction_set)
}

/// Checks products with dense rows, with rows so small that products round to zeros of either sign, and with rows of a
/// single 1, which show each number of the weight alone.
#[test]
fn packed_codes_with_any_scale_have_bits_of_f32_weight() {
    let row_counts = if cfg!(miri) { vec![2] } else { vec![1, 3, 40] };
    let shape = if cfg!(miri) { weight_shape(18, 64) } else { weight_shape(103, 128) };
    let WeightShape { outputs, inputs } = shape;
    for instruction_set in if cfg!(miri) { vec![InstructionSet::Scalar] } else { InstructionSet::available() } {
        for kind in CodeKind::all() {
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
    // The bytes of 32 inputs: codes, and 2 bytes for each number in f16, or 1 for each two of 64 inputs' numbers.
    let bytes_of_kinds = [18, 20, 34, 36, 19, 22, 35, 38, 18, 20, 34, 36];
    for instruction_set in InstructionSet::available() {
        for (kind, bytes) in CodeKind::all().into_iter().zip(bytes_of_kinds) {
            // Whole panels of every instruction set.
            let PackedCodes { packed, .. } = codes(kind, weight_shape(96, 64), instruction_set, 1);
            assert_eq!(packed.memory(), 96 * 2 * bytes, "{packed:?}");
        }
    }
}
