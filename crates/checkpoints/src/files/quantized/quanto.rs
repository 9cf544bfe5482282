//! optimum-quanto, as its version 0.2 saves models.
//!
//! 8 bits: `weight._data` (out, in) of I8 or of floats of 8 bits, with `weight._scale`: `code · scale`.
//!
//! 2 and 4 bits: `weight._data._data` U8 has the codes of a matrix of groups, (out · in / group, group), whose rows are
//! in parts one after the other: a byte has a code of each part, the first in the lowest bits. A number is
//! `code · scale - shift`, with `weight._scale` and `weight._shift` (out · in / group, 1), rounded once here. quanto
//! rounds the product too, which changes the last bit of some numbers where scales are in f32. The file does not have
//! the shape of the weight; the number of its inputs comes from the config of the model.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::signed_to_codes;
use super::float8::ScaleGrid;
use super::floats::float8_of;
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat, passed_over};
use candle_attention_modules::base::{CodeValues, Float8, GroupNumbers, QuantizedWeight};

const CODES: &str = "weight._data";
const PACKED_CODES: &str = "weight._data._data";
const SCALES: &str = "weight._scale";
const SHIFTS: &str = "weight._shift";

/// Codes of 8 bits.
#[derive(Debug)]
struct QuantoCodes {
    grid: ScaleGrid,
    /// The floats that codes are; `None` for whole numbers.
    float: Option<Float8>,
}

/// Codes of 2 or 4 bits.
#[derive(Debug)]
struct FewBits {
    outputs: usize,
    inputs: usize,
    bits: usize,
    group: usize,
    groups: usize,
}

/// Finds a layer of quanto.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let mut found = if tensors.get(PACKED_CODES).is_some() {
        few_bits(module)?
    } else if let Some(codes) = tensors.get(CODES) {
        let float = float8_of(codes.dtype);
        if float.is_none() && codes.dtype != Dtype::I8 {
            bail!("{CODES} has dtype {:?}, expected I8 or floats of 8 bits", codes.dtype)
        }
        let Some(scales) = tensors.get(SCALES) else { bail!("{SCALES} is not there, expected the scales") };
        let Some(grid) = ScaleGrid::new(&codes.shape, &scales.shape, None).filter(|_| codes.shape.len() == 2) else {
            bail!("{SCALES} has shape {:?}, which does not fit {CODES} of shape {:?}", scales.shape, codes.shape)
        };
        let format = Arc::new(QuantoCodes { grid, float });
        Found { outputs: grid.all_rows, inputs: grid.columns, format, tensors: vec![CODES, SCALES] }
    } else {
        return Ok(None);
    };
    found.tensors.extend(scales_of_activations(module));
    Ok(Some(found))
}

/// Returns the scales of activations that a layer has. They are 1 where activations are not quantised.
fn scales_of_activations(module: &Module) -> Vec<&'static str> {
    let is_one = |name: &str| module.tensors.f32(name).is_ok_and(|numbers| numbers == [1.0]);
    let both = ["input_scale", "output_scale"];
    if both.into_iter().all(is_one) { both.to_vec() } else { passed_over(module) }
}

fn few_bits(module: &Module) -> Result<Found> {
    let tensors = module.tensors;
    let (Some([rows, group]), Some([groups, 1])) = (tensors.matrix(PACKED_CODES), tensors.matrix(SCALES)) else {
        bail!("{PACKED_CODES} and {SCALES} are not both there, expected matrices, the latter (groups, 1)")
    };
    tensors.expect_count(SHIFTS, groups)?;
    if tensors.dtype(PACKED_CODES)? != Dtype::U8 {
        bail!("{PACKED_CODES} has dtype {:?}, expected U8", tensors.dtype(PACKED_CODES)?)
    }
    let bits = match (rows == groups.div_ceil(2), rows == groups.div_ceil(4)) {
        (true, false) => 4,
        (false, true) => 2,
        _ => bail!("{PACKED_CODES} has {rows} rows for {groups} groups, expected rows of 2 or 4 bits"),
    };
    let Some(inputs) = module.settings.inputs_of(module.name) else {
        bail!("the shape of the weight is not in the file, expected a config.json with the sizes of the model")
    };
    let count = groups.checked_mul(group).filter(|count| count.is_multiple_of(inputs) && inputs.is_multiple_of(group));
    let Some(count) = count else {
        bail!("{groups} groups of {group} numbers do not have rows of {inputs}, which the config says")
    };
    let outputs = count / inputs;
    let format = Arc::new(FewBits { outputs, inputs, bits, group, groups });
    Ok(Found { outputs, inputs, format, tensors: vec![PACKED_CODES, SCALES, SHIFTS] })
}

impl QuantizedFormat for QuantoCodes {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let grid = self.grid;
        let mut codes = tensors.bytes(CODES)?;
        let values = match self.float {
            Some(float) => CodeValues::Float8(float),
            None => {
                signed_to_codes(&mut codes);
                CodeValues::Signed
            }
        };
        Ok(QuantizedWeight {
            outputs: grid.all_rows,
            inputs: grid.columns,
            bits: 8,
            codes,
            group: grid.group(),
            values,
            scales: GroupNumbers::F32(grid.of_groups(&tensors.f32(SCALES)?)),
            input_order: None,
        })
    }
}

impl QuantizedFormat for FewBits {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, bits, group, groups } = self;
        let stored = tensors.bytes(PACKED_CODES)?;
        let rows = stored.len() / group;
        let mask = (1u8 << bits) - 1;
        let mut codes = Vec::with_capacity(outputs * inputs);
        for row in 0..groups {
            let shift = bits * (row / rows);
            codes.extend(stored[row % rows * group..][..group].iter().map(|byte| byte >> shift & mask));
        }
        let values = match tensors.dtype(SHIFTS)? {
            // Whole numbers are subtracted from the codes.
            Dtype::U8 => CodeValues::Zeros(GroupNumbers::Whole(tensors.bytes(SHIFTS)?)),
            _ => {
                CodeValues::Minimums(GroupNumbers::F32(tensors.f32(SHIFTS)?.into_iter().map(|shift| -shift).collect()))
            }
        };
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits,
            codes,
            group,
            values,
            scales: tensors.numbers(SCALES)?,
            input_order: None,
        })
    }
}
