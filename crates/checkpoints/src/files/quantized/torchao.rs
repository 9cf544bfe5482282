//! torchao, as its support of safetensors saves weights: `_weight_qdata` with `_weight_scale` and, for whole numbers,
//! `_weight_zero_point`. The metadata of the header names the class of a weight.
//!
//! | class | codes | scales | a number |
//! | --- | --- | --- | --- |
//! | `Int8Tensor`, `IntxUnpackedToInt8Tensor` | I8 (out, in) | (out, in / group) | `(code - zero_point) · scale` |
//! | `Float8Tensor` | floats of 8 bits (out, in) | (out, in / group) | `float · scale` |
//! | `Int4Tensor` | two in a byte, the first in the low half | (in / group, out) | `code · scale + zero_point` |

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;
use serde_json::Value;

use super::bits::append_stream;
use super::float8::ScaleGrid;
use super::floats::float8_of;
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
use candle_attention_modules::base::{CodeValues, Float8, GroupNumbers, QuantizedWeight};

const CODES: &str = "_weight_qdata";
const SCALES: &str = "_weight_scale";
const ZEROS: &str = "_weight_zero_point";

/// Whole numbers or floats of 8 bits, with scales by row or by group of a row.
#[derive(Debug)]
struct Plain {
    grid: ScaleGrid,
    numbers: ByteNumbers,
    has_zeros: bool,
}

/// The numbers that the bytes of a weight are.
#[derive(Debug, Clone, Copy)]
enum ByteNumbers {
    /// Whole numbers that have this many bits.
    Whole(usize),
    Float8(Float8),
}

/// Whole numbers from -8 to 7, two in a byte.
#[derive(Debug)]
struct Int4 {
    outputs: usize,
    inputs: usize,
    group: usize,
}

/// Finds a weight of torchao.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let Some(codes) = tensors.get(CODES) else { return Ok(None) };
    let Some(metadata) = module.metadata else {
        bail!("the header of the file has no metadata of the weight, expected the class that torchao saved")
    };
    let metadata: Value = match serde_json::from_str(metadata) {
        Ok(metadata) => metadata,
        Err(error) => bail!("the metadata of the weight cannot be read: {error}"),
    };
    if tensors.get("_weight_act_pre_scale").is_some() {
        bail!("_weight_act_pre_scale multiplies the inputs of the layer, which is not supported")
    }
    let class = metadata["_type"].as_str().unwrap_or_default();
    let numbers = match (class, codes.dtype) {
        ("Int4Tensor", Dtype::I8 | Dtype::U8) => return int4(tensors).map(Some),
        ("Int8Tensor", Dtype::I8) => ByteNumbers::Whole(8),
        ("IntxUnpackedToInt8Tensor", Dtype::I8) => ByteNumbers::Whole(bits_of(&metadata["_data"]["target_dtype"])?),
        ("Float8Tensor", dtype) if let Some(float) = float8_of(dtype) => ByteNumbers::Float8(float),
        (_, dtype) => bail!(
            "the weight is an {class} of {dtype:?}, expected Int4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor or \
             Float8Tensor"
        ),
    };
    let Some(scales) = tensors.get(SCALES) else { bail!("{SCALES} is not there, expected the scales of the weight") };
    let Some(grid) = ScaleGrid::new(&codes.shape, &scales.shape, None).filter(|_| codes.shape.len() == 2) else {
        bail!("{SCALES} has shape {:?}, which does not fit {CODES} of shape {:?}", scales.shape, codes.shape)
    };
    let mut used = vec![CODES, SCALES];
    let zeros = tensors.get(ZEROS);
    if let Some(zeros) = zeros {
        if zeros.dtype != Dtype::I8 {
            bail!("{ZEROS} has dtype {:?}, expected I8", zeros.dtype)
        }
        tensors.expect_count(ZEROS, scales.shape.iter().product())?;
        used.push(ZEROS);
    }
    let format = Arc::new(Plain { grid, numbers, has_zeros: zeros.is_some() });
    Ok(Some(Found { outputs: grid.all_rows, inputs: grid.columns, format, tensors: used }))
}

/// Returns the bits of the codes of a dtype such as `int4`, of those that a weight can have here.
fn bits_of(dtype: &Value) -> Result<usize> {
    let name = dtype["_data"].as_str().unwrap_or_default();
    match name.strip_prefix("int").and_then(|bits| bits.parse().ok()) {
        Some(1 | 2) => Ok(2),
        Some(bits @ 3..=6) => Ok(bits),
        Some(7 | 8) => Ok(8),
        _ => bail!("target_dtype is {name:?}, expected int1 to int8"),
    }
}

impl QuantizedFormat for Plain {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let grid = self.grid;
        let mut codes = tensors.bytes(CODES)?;
        let (bits, values) = match self.numbers {
            ByteNumbers::Float8(float) => (8, CodeValues::Float8(float)),
            ByteNumbers::Whole(bits) => {
                let middle = 1i16 << (bits - 1);
                for code in &mut codes {
                    let number = i16::from(code.cast_signed()) + middle;
                    *code = match u8::try_from(number) {
                        Ok(moved) if number < 2 * middle => moved,
                        _ => bail!("{CODES} has the number {}, expected {bits} bits", number - middle),
                    };
                }
                (bits, self.values(tensors, middle)?)
            }
        };
        Ok(QuantizedWeight {
            outputs: grid.all_rows,
            inputs: grid.columns,
            bits,
            codes,
            group: grid.group(),
            values,
            scales: GroupNumbers::F32(grid.of_groups(&tensors.f32(SCALES)?)),
            input_order: None,
        })
    }
}

impl Plain {
    /// Returns the zeros of codes that are numbers plus `middle`.
    fn values(&self, tensors: &Tensors, middle: i16) -> Result<CodeValues> {
        if !self.has_zeros {
            return Ok(CodeValues::Signed);
        }
        let zeros = tensors.bytes(ZEROS)?;
        if zeros.iter().all(|&zero| zero == 0) {
            return Ok(CodeValues::Signed);
        }
        let moved: Vec<_> = zeros.iter().map(|zero| f32::from(i16::from(zero.cast_signed()) + middle)).collect();
        Ok(CodeValues::Zeros(GroupNumbers::F32(self.grid.of_groups(&moved))))
    }
}

fn int4(tensors: &Tensors) -> Result<Found> {
    let (Some([outputs, bytes]), Some([groups, columns])) = (tensors.matrix(CODES), tensors.matrix(SCALES)) else {
        bail!("{CODES} and {SCALES} are not both matrices, expected (out, in / 2) and (in / group, out)")
    };
    let Some(inputs) = bytes.checked_mul(2).filter(|inputs| groups > 0 && inputs.is_multiple_of(groups)) else {
        bail!("{SCALES} has {groups} rows, which do not divide the {bytes} bytes of a row")
    };
    if columns != outputs || tensors.matrix(ZEROS) != Some([groups, columns]) {
        bail!("{SCALES} and {ZEROS} are not both of shape ({groups}, {outputs})")
    }
    let format = Arc::new(Int4 { outputs, inputs, group: inputs / groups });
    Ok(Found { outputs, inputs, format, tensors: vec![CODES, SCALES, ZEROS] })
}

impl QuantizedFormat for Int4 {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, group } = self;
        let mut codes = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes(CODES)?, 4, &mut codes);
        // Two's complement becomes the number plus 8.
        codes.iter_mut().for_each(|code| *code ^= 8);
        let groups = inputs / group;
        let by_rows = |stored: &[f32]| -> Vec<f32> {
            (0..outputs * groups).map(|at| stored[at % groups * outputs + at / groups]).collect()
        };
        let scales = by_rows(&tensors.f32(SCALES)?);
        let mut minimums = by_rows(&tensors.f32(ZEROS)?);
        for (minimum, scale) in minimums.iter_mut().zip(&scales) {
            *minimum -= 8.0 * scale;
        }
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: 4,
            codes,
            group,
            values: CodeValues::Minimums(GroupNumbers::F32(minimums)),
            scales: GroupNumbers::F32(scales),
            input_order: None,
        })
    }
}
