//! Linear layers whose weights are codes: their outputs for few and for many rows, and the gradients of their inputs,
//! compared with the CPU in f64, and the number of kernels of this project that few rows launch on CUDA.

use candle_attention::weights::{CodeValues, Float8, GroupNumbers};
use candle_attention::{PackedLinear, QuantizedWeight};
use candle_attention_cuda::{LinearCodesCall, is_available, launches_of_thread};
use candle_core::{DType, Device, Module, Result, Tensor, Var, bail};
use half::{bf16, f16};

use super::check::{Checked, DTYPES, allowed, relative_error};
use super::table::Row;

/// A format of codes.
#[derive(Debug, Clone, Copy)]
enum Format {
    /// GPTQ and AWQ of 4 bits.
    Zeros4,
    /// HQQ of 3 bits.
    Zeros3,
    /// The K-quants with minimums, of 2, 4 and 5 bits.
    Minimums { bits: usize, group: usize },
    /// The K-quants of 3 and 6 bits.
    Nested { bits: usize },
    /// Integers of 8 bits with a scale for each output.
    Int8,
    /// Numbers of a table of 16, as NF4.
    Table,
    /// Floats of 8 bits.
    E4M3,
}

const FORMATS: [Format; 10] = [
    Format::Zeros4,
    Format::Zeros3,
    Format::Minimums { bits: 2, group: 16 },
    Format::Minimums { bits: 4, group: 32 },
    Format::Minimums { bits: 5, group: 32 },
    Format::Nested { bits: 3 },
    Format::Nested { bits: 6 },
    Format::Int8,
    Format::Table,
    Format::E4M3,
];

/// The sizes of a weight (out, in).
#[derive(Debug, Clone, Copy)]
struct Size {
    outputs: usize,
    inputs: usize,
}

const SIZES: [Size; 3] =
    [Size { outputs: 256, inputs: 2048 }, Size { outputs: 1001, inputs: 256 }, Size { outputs: 5, inputs: 11_008 }];

/// The numbers of rows: one more than the kernel computes, and fewer.
const ROWS: [usize; 4] = [1, 3, LinearCodesCall::MAX_ROWS, LinearCodesCall::MAX_ROWS + 1];

/// Numbers of a fixed sequence.
struct Draws(u64);

impl Draws {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }

    /// Returns numbers of up to `largest` in magnitude.
    fn floats(&mut self, count: usize, largest: f32) -> Vec<f32> {
        (0..count).map(|_| (self.next(2001) as f32 / 1000.0 - 1.0) * largest).collect()
    }

    fn halves(&mut self, count: usize) -> Vec<f16> {
        self.floats(count, 0.01).into_iter().map(f16::from_f32).collect()
    }

    fn bytes(&mut self, count: usize, below: usize) -> Vec<u8> {
        (0..count).map(|_| self.next(below) as u8).collect()
    }

    fn nested(&mut self, count: usize, group: usize, middle: u8) -> GroupNumbers {
        let groups_of_factor = 256 / group;
        GroupNumbers::Nested {
            numbers: self.bytes(count, 64),
            middle,
            factors: self.halves(count / groups_of_factor),
            groups_of_factor,
        }
    }
}

impl Format {
    fn draw(self, size: Size, draws: &mut Draws) -> Result<QuantizedWeight> {
        let Size { outputs, inputs } = size;
        let (bits, group) = match self {
            Self::Zeros4 => (4, 128),
            Self::Zeros3 => (3, 64),
            Self::Minimums { bits, group } => (bits, group),
            Self::Nested { bits } => (bits, 16),
            Self::Int8 | Self::E4M3 => (8, inputs),
            Self::Table => (4, 64),
        };
        let groups = outputs * inputs / group;
        let values = match self {
            Self::Zeros4 => CodeValues::Zeros(GroupNumbers::Whole(draws.bytes(groups, 16))),
            Self::Zeros3 => {
                let zeros = draws.floats(groups, 4.0).into_iter().map(bf16::from_f32).collect();
                CodeValues::Zeros(GroupNumbers::BF16(zeros))
            }
            Self::Minimums { .. } => CodeValues::Minimums(draws.nested(groups, group, 0)),
            Self::Nested { .. } | Self::Int8 => CodeValues::Signed,
            Self::Table => {
                let table = draws.floats(16, 1.0);
                CodeValues::Table(std::array::from_fn(|code| table[code]))
            }
            Self::E4M3 => CodeValues::Float8(Float8::E4M3),
        };
        let scales = match self {
            Self::Zeros4 | Self::Zeros3 => GroupNumbers::F16(draws.halves(groups)),
            Self::Minimums { .. } => draws.nested(groups, group, 0),
            Self::Nested { .. } => draws.nested(groups, group, 32),
            Self::Int8 | Self::Table | Self::E4M3 => GroupNumbers::F32(draws.floats(groups, 0.01)),
        };
        let codes = match self {
            // Numbers of both signs, and no NaN.
            Self::E4M3 => {
                draws.bytes(outputs * inputs, 240).iter().map(|code| (code % 120) | ((code / 120) << 7)).collect()
            }
            _ => draws.bytes(outputs * inputs, 1 << bits),
        };
        QuantizedWeight { outputs, inputs, bits, codes, group, values, scales, input_order: None }.checked()
    }
}

/// Checks the numbers and the launches of layers.
pub fn check(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("linear layers of codes");
    let mut draws = Draws(1);
    for format in FORMATS {
        for size in SIZES {
            let weight = format.draw(size, &mut draws)?;
            let numbers = weight.dequantize()?.to_dtype(DType::F64)?;
            let all = draws.floats(ROWS[ROWS.len() - 1] * size.inputs, 1.0);
            let all = Tensor::from_vec(all, (ROWS[ROWS.len() - 1], size.inputs), &Device::Cpu)?;
            for dtype in DTYPES {
                let layer = PackedLinear::from_quantized_on(&weight, None, dtype, device)?;
                for rows in ROWS {
                    let xs = all.narrow(0, 0, rows)?.to_dtype(dtype)?;
                    let what = format!("{format:?} of {rows} rows, {size:?}");
                    row.add(dtype, compare(&layer, &xs, &numbers), tolerance * allowed(dtype), &what);
                }
            }
            let checked = compare_gradients(&weight, &all, &numbers, device);
            row.add(DType::F32, checked, tolerance * allowed(DType::F32), &format!("{format:?}, gradients, {size:?}"));
        }
    }
    Ok(row)
}

fn compare(layer: &PackedLinear, xs: &Tensor, numbers: &Tensor) -> Result<Checked> {
    let device = layer.device();
    let here = xs.to_device(device)?;
    let before = launches_of_thread();
    let found = layer.forward(&here)?;
    let launches = launches_of_thread() - before;
    let has_kernel = device.is_cuda() && is_available(device).is_ok();
    if has_kernel && launches != 1 {
        bail!("{launches} kernels of candle-attention, expected 1")
    }
    let expected = xs.to_dtype(DType::F64)?.matmul(&numbers.t()?)?;
    Ok(Checked { error: relative_error(&found, &expected)?, plan: None })
}

/// Compares the gradients of inputs in f32.
fn compare_gradients(weight: &QuantizedWeight, xs: &Tensor, numbers: &Tensor, device: &Device) -> Result<Checked> {
    let layer = PackedLinear::from_quantized_on(weight, None, DType::F32, device)?;
    let here = Var::from_tensor(&xs.to_device(device)?)?;
    let gradients = layer.forward(&here)?.sqr()?.backward()?;
    let Some(found) = gradients.get(&here) else { bail!("no gradient of the inputs") };
    let outputs = xs.to_dtype(DType::F64)?.matmul(&numbers.t()?)?;
    let expected = (outputs * 2.0)?.matmul(numbers)?;
    Ok(Checked { error: relative_error(found, &expected)?, plan: None })
}
