//! Kinds of weights of codes, with their numbers by plain loops.

use half::{bf16, f16};

use crate::cpu::InstructionSet;
use crate::cpu::tests::Sequence;
use crate::linear::{Codes, NESTED_BLOCK, NestedScales, Scales, Values, WeightShape};

/// The numbers of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    Signed,
    /// Zeros that are whole numbers from 0 to 15.
    WholeZeros,
    /// Zeros with two digits after the point, in binary.
    ShortZeros,
    /// Arbitrary zeros.
    Zeros,
    Minimums,
    Table,
    /// A table of whole numbers of eighths.
    EighthsTable,
    E4M3,
    E5M2,
}

/// The format of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleKind {
    F16,
    BF16,
    F32,
    /// Bytes that are E4M3 times a factor.
    BytesE4M3,
    /// Bytes that are powers of two.
    BytesE8M0,
    Nested,
}

/// A kind of weight.
#[derive(Clone, Copy, Debug)]
pub struct CodeKind {
    pub bits: usize,
    pub group: usize,
    pub values: ValueKind,
    pub scales: ScaleKind,
}

impl CodeKind {
    /// Returns every kind whose groups divide the inputs, a multiple of 64.
    pub fn all(inputs: usize) -> Vec<Self> {
        use ScaleKind::{BF16, BytesE4M3, BytesE8M0, F16, F32, Nested};
        use ValueKind::{E4M3, E5M2, EighthsTable, Minimums, ShortZeros, Signed, Table, WholeZeros, Zeros};
        let mut kinds = Vec::new();
        for (group, scales) in [(32, F16), (16, Nested), (32, Nested)] {
            for (bits, values) in [(4, Signed), (4, Minimums), (8, Signed), (8, Minimums)] {
                kinds.push(Self { bits, group, values, scales });
            }
        }
        for (bits, group, values, scales) in [
            (2, 16, Signed, F16),
            (3, 16, Signed, Nested),
            (4, 32, Table, Nested),
            (3, 32, Minimums, F16),
            (5, 32, Signed, F16),
            (5, 32, Minimums, Nested),
            (5, 64, WholeZeros, F16),
            (5, 64, Minimums, BF16),
            (6, 16, Signed, Nested),
            (6, 32, Minimums, F16),
            (6, 64, Minimums, BF16),
            (6, 64, Signed, BF16),
            (4, 128, WholeZeros, F16),
            (3, 64, WholeZeros, BF16),
            (8, 128, WholeZeros, F16),
            (4, 64, WholeZeros, F32),
            (4, 64, ShortZeros, F16),
            (4, 64, Zeros, F16),
            (8, 64, Zeros, F32),
            (4, inputs, Signed, F16),
            (8, inputs, Signed, F32),
            (8, inputs, Signed, BF16),
            (4, 32, Minimums, BF16),
            (4, 64, Minimums, F16),
            (4, 64, Minimums, F32),
            (8, 128, Minimums, BytesE8M0),
            (4, 32, Table, BytesE8M0),
            (4, 16, Table, BytesE4M3),
            (4, 16, Signed, BytesE4M3),
            (4, 64, Table, F32),
            (4, 32, EighthsTable, F16),
            (4, 32, EighthsTable, Nested),
            (4, 32, EighthsTable, BytesE8M0),
            (4, 64, EighthsTable, F32),
            (8, inputs, E4M3, F32),
            (8, 128, E4M3, BF16),
            (8, 64, E5M2, F16),
        ] {
            if inputs.is_multiple_of(group) {
                kinds.push(Self { bits, group, values, scales });
            }
        }
        kinds
    }

    /// Returns whether the scalar instruction set would round numbers twice, with scales of at most 1 or of any size.
    pub fn is_refused_by_scalar(self, has_any_scale: bool) -> bool {
        let is_rounded = self.scales == ScaleKind::F32 || has_any_scale && self.scales == ScaleKind::BF16;
        self.values == ValueKind::Minimums && is_rounded
    }

    /// Returns the bytes of 64 inputs of an output in memory.
    pub fn bytes_of_64_inputs(self, instruction_set: InstructionSet) -> usize {
        let is_linear = match self.values {
            ValueKind::Signed | ValueKind::Minimums => true,
            // The zeros become minimums where the scales have few digits.
            ValueKind::WholeZeros | ValueKind::ShortZeros => self.scales != ScaleKind::F32,
            ValueKind::Zeros | ValueKind::Table | ValueKind::EighthsTable | ValueKind::E4M3 | ValueKind::E5M2 => false,
        };
        let has_split_codes = is_linear && instruction_set >= InstructionSet::Avx512;
        let codes = match self.bits {
            ..=4 => 32,
            5 | 6 if has_split_codes => 8 * self.bits,
            _ => 64,
        };
        let groups = 64 / self.group.min(64);
        let scale = match self.scales {
            ScaleKind::Nested => {
                let kinds = if self.values == ValueKind::Minimums { 2 } else { 1 };
                return codes + kinds * (2 + groups);
            }
            ScaleKind::F16 | ScaleKind::BF16 | ScaleKind::BytesE8M0 => 2,
            ScaleKind::F32 => 4,
            ScaleKind::BytesE4M3 => 1,
        };
        let offset = match self.values {
            ValueKind::WholeZeros => 1,
            ValueKind::ShortZeros => 2,
            ValueKind::Zeros => 4,
            ValueKind::Minimums => scale,
            ValueKind::Signed | ValueKind::Table | ValueKind::EighthsTable | ValueKind::E4M3 | ValueKind::E5M2 => 0,
        };
        codes + groups * (scale + offset)
    }
}

/// Scales, or minimums, with the memory that [`Scales`] refers to.
enum OwnScales {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    Bytes {
        bytes: Vec<u8>,
        table: Box<[f32; 256]>,
    },
    Nested {
        factors: Vec<f16>,
        numbers: Vec<u8>,
        /// The whole number that is subtracted.
        zero: f32,
    },
}

impl OwnScales {
    fn as_scales(&self) -> Scales<'_> {
        match self {
            Self::F16(numbers) => Scales::F16(numbers),
            Self::BF16(numbers) => Scales::BF16(numbers),
            Self::F32(numbers) => Scales::F32(numbers),
            Self::Bytes { bytes, table } => Scales::Bytes { bytes, table },
            Self::Nested { factors, numbers, .. } => Scales::Nested(NestedScales { factors, numbers }),
        }
    }

    /// Returns the number of a group of some inputs.
    fn number(&self, at: usize, group: usize) -> f32 {
        match self {
            Self::F16(numbers) => numbers[at].to_f32(),
            Self::BF16(numbers) => numbers[at].to_f32(),
            Self::F32(numbers) => numbers[at],
            Self::Bytes { bytes, table } => table[usize::from(bytes[at])],
            Self::Nested { factors, numbers, zero } => {
                factors[at * group / NESTED_BLOCK].to_f32() * (f32::from(numbers[at]) - zero)
            }
        }
    }
}

/// Returns the table of the bytes that are E4M3 times a factor, from the definition of the format.
fn e4m3_table(factor: f32) -> Box<[f32; 256]> {
    let mut table = Box::new([0.0; 256]);
    for (code, number) in table.iter_mut().enumerate() {
        *number = float8(code as u8, 3, 7) * factor;
    }
    table
}

/// Returns the table of the powers of two from 2^-127 on.
fn e8m0_table() -> Box<[f32; 256]> {
    let mut table = Box::new([0.0; 256]);
    for (code, number) in table.iter_mut().enumerate() {
        *number = if code == 255 { f32::NAN } else { 2f64.powi(code as i32 - 127) as f32 };
    }
    table
}

/// Computes the number of a float of 8 bits from its parts.
fn float8(code: u8, mantissa_bits: u32, bias: i32) -> f32 {
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let exponent = i32::from((code & 0x7f) >> mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    (if code >= 128 { -magnitude } else { magnitude }) as f32
}

/// The numbers of a weight of codes.
pub struct OwnCodes {
    kind: CodeKind,
    codes: Vec<u8>,
    scales: OwnScales,
    minimums: OwnScales,
    zeros: Vec<f32>,
    table: [f32; 16],
}

/// A source of scales and minimums.
type Draw<'a> = &'a dyn Fn(&mut Sequence) -> f32;

impl OwnCodes {
    /// Draws codes, and scales and minimums by `draw`.
    pub fn new(kind: CodeKind, shape: WeightShape, sequence: &mut Sequence, draw: Draw) -> Self {
        let CodeKind { bits, group, values, scales } = kind;
        let count = shape.outputs * shape.inputs;
        let groups = count / group;
        let is_exact = values == ValueKind::Minimums && scales == ScaleKind::Nested;
        let mut codes = draw_bytes(sequence, count, if is_exact { bits.min(7) } else { bits });
        let is_infinite = |code: u8| match values {
            ValueKind::E4M3 => code & 0x7f == 0x7f,
            ValueKind::E5M2 => code & 0x7f >= 0x7c,
            _ => false,
        };
        for code in codes.iter_mut().filter(|code| is_infinite(**code)) {
            *code ^= 0x40;
        }
        let zeros = (0..groups).map(|_| match values {
            ValueKind::WholeZeros => (sequence.bits() % 16) as f32,
            ValueKind::ShortZeros => (sequence.bits() % 64) as f32 / 4.0,
            _ => sequence.fraction() * 9.0,
        });
        let zeros = zeros.collect();
        let mut table = [0.0; 16];
        table.fill_with(|| match values {
            ValueKind::EighthsTable => f32::from(sequence.bits() as i8) / 8.0,
            _ => sequence.fraction(),
        });
        let scale_bits = if is_exact { 6 } else { 8 };
        let own_scales = draw_scales(kind, count, scale_bits, sequence, draw);
        let minimums = draw_scales(kind, count, 8, sequence, draw);
        Self { kind, codes, scales: own_scales, minimums, zeros, table }
    }

    pub fn as_codes(&self) -> Codes<'_> {
        let CodeKind { bits, group, values, .. } = self.kind;
        let values = match values {
            ValueKind::Signed => Values::Signed,
            ValueKind::WholeZeros | ValueKind::ShortZeros | ValueKind::Zeros => Values::Zeros(&self.zeros),
            ValueKind::Minimums => Values::Minimums(self.minimums.as_scales()),
            ValueKind::Table | ValueKind::EighthsTable => Values::Table(&self.table),
            ValueKind::E4M3 => Values::E4M3,
            ValueKind::E5M2 => Values::E5M2,
        };
        Codes { bits, codes: &self.codes, group, values, scales: self.scales.as_scales() }
    }

    /// Returns the numbers in f32.
    pub fn numbers(&self) -> Vec<f32> {
        let CodeKind { bits, group, values, .. } = self.kind;
        let number = |(at, &code): (usize, &u8)| {
            let scale = self.scales.number(at / group, group);
            let whole = f32::from(code);
            match values {
                ValueKind::Signed => (whole - (1 << (bits - 1)) as f32) * scale,
                ValueKind::WholeZeros | ValueKind::ShortZeros | ValueKind::Zeros => {
                    (whole - self.zeros[at / group]) * scale
                }
                ValueKind::Minimums => whole.mul_add(scale, self.minimums.number(at / group, group)),
                ValueKind::Table | ValueKind::EighthsTable => self.table[usize::from(code)] * scale,
                ValueKind::E4M3 => float8(code, 3, 7) * scale,
                ValueKind::E5M2 => float8(code, 2, 15) * scale,
            }
        };
        self.codes.iter().enumerate().map(number).collect()
    }
}

/// Draws whole numbers of some bits.
fn draw_bytes(sequence: &mut Sequence, count: usize, bits: usize) -> Vec<u8> {
    (0..count).map(|_| (sequence.bits() as u8) >> (8 - bits)).collect()
}

/// Draws the scales, or the minimums, of a number of codes.
fn draw_scales(kind: CodeKind, codes: usize, bits: usize, sequence: &mut Sequence, draw: Draw) -> OwnScales {
    let groups = codes / kind.group;
    // Scales of floats of 8 bits are multiplied by a large power of two.
    let is_limited = matches!(kind.values, ValueKind::E4M3 | ValueKind::E5M2);
    let mut number = || {
        let drawn = draw(sequence);
        if is_limited && drawn.is_finite() && drawn.abs() > 127.0 { drawn.signum() * 127.0 } else { drawn }
    };
    match kind.scales {
        ScaleKind::F16 => OwnScales::F16((0..groups).map(|_| f16::from_f32(number())).collect()),
        ScaleKind::BF16 => OwnScales::BF16((0..groups).map(|_| bf16::from_f32(number())).collect()),
        ScaleKind::F32 => OwnScales::F32((0..groups).map(|_| number()).collect()),
        ScaleKind::BytesE4M3 => {
            // Without NaN.
            let bytes = draw_bytes(sequence, groups, 8).into_iter().map(|byte| byte & 0xbf).collect();
            OwnScales::Bytes { bytes, table: e4m3_table(0.37) }
        }
        ScaleKind::BytesE8M0 => {
            let bytes = draw_bytes(sequence, groups, 5).into_iter().map(|byte| byte + 110).collect();
            OwnScales::Bytes { bytes, table: e8m0_table() }
        }
        ScaleKind::Nested => {
            let factors = (0..codes / NESTED_BLOCK).map(|_| f16::from_f32(number())).collect();
            let zero = if kind.values == ValueKind::Minimums { 0.0 } else { 128.0 };
            OwnScales::Nested { factors, numbers: draw_bytes(sequence, groups, bits), zero }
        }
    }
}
