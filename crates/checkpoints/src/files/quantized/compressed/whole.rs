//! Weights of one byte for each number: integers, and floats of 8 bits.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::super::bits::signed_to_codes;
use super::super::floats::e8m0;
use super::super::groups::Groups;
use super::super::tensors::Tensors;
use super::super::{Found, Module, QuantizedFormat, passed_over};
use super::{CompressedSizes, scheme_of, sizes};
use candle_attention_modules::base::{CodeValues, Float8, GroupNumbers, QuantizedWeight};

/// A weight of bytes.
#[derive(Debug)]
struct ByteWeight {
    sizes: CompressedSizes,
    dtype: Dtype,
}

/// Finds a layer of bytes. Floats of 8 bits with more dimensions, such as experts, are read as in other methods.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let (Some([outputs, inputs]), Some(dtype)) =
        (tensors.matrix("weight"), tensors.get("weight").map(|weight| weight.dtype))
    else {
        return Ok(None);
    };
    let sizes = sizes(module, outputs, inputs, &scheme_of(module)?)?;
    if let Some(zeros) = tensors.get("weight_zero_point") {
        let count = sizes.blocks.grid(outputs, inputs).iter().product::<usize>();
        if dtype != Dtype::I8 || zeros.dtype != Dtype::I8 || zeros.shape.iter().product::<usize>() != count {
            bail!("expected `weight` and `weight_zero_point` of I8, found {}", tensors.described())
        }
    }
    let format = Arc::new(ByteWeight { sizes, dtype });
    let mut used = vec!["weight", "weight_scale", "weight_zero_point"];
    used.extend(passed_over(module));
    Ok(Some(Found { outputs, inputs, format, tensors: used }))
}

impl QuantizedFormat for ByteWeight {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let CompressedSizes { outputs, inputs, blocks, scale_columns } = self.sizes;
        let groups = Groups::of_neighbours(inputs, blocks.columns);
        let of_blocks = |numbers: &GroupNumbers| blocks.numbers(outputs, &groups, numbers, scale_columns);
        let mut codes = tensors.bytes("weight")?;
        let values = match self.dtype {
            Dtype::F8_E4M3 => CodeValues::Float8(Float8::E4M3),
            Dtype::F8_E5M2 => CodeValues::Float8(Float8::E5M2),
            _ => {
                signed_to_codes(&mut codes);
                zeros(tensors, of_blocks)?
            }
        };
        let scales = match tensors.get("weight_scale").map(|scale| scale.dtype) {
            Some(Dtype::U8 | Dtype::F8_E8M0) => {
                GroupNumbers::Bytes { bytes: tensors.bytes("weight_scale")?, table: e8m0() }
            }
            _ => tensors.numbers("weight_scale")?,
        };
        let scales = of_blocks(&scales)?;
        Ok(QuantizedWeight { outputs, inputs, bits: 8, codes, group: groups.size, values, scales, input_order: None })
    }
}

/// Returns the values of integers plus 128.
fn zeros(tensors: &Tensors, of_blocks: impl Fn(&GroupNumbers) -> Result<GroupNumbers>) -> Result<CodeValues> {
    if tensors.get("weight_zero_point").is_none() {
        return Ok(CodeValues::Signed);
    }
    let mut stored = tensors.bytes("weight_zero_point")?;
    signed_to_codes(&mut stored);
    Ok(CodeValues::Zeros(of_blocks(&GroupNumbers::Whole(stored))?))
}
