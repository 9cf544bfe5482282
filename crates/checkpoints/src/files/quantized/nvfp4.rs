//! NVFP4 of ModelOpt: `weight` U8 (out, in / 2) with `weight_scale` F8_E4M3 (out, in / group) and `weight_scale_2`, a
//! scale of the tensor.
//!
//! A number is that of the code (E2M1) times its scale, the product of both scales. Layers of NVFP4_AWQ have
//! `pre_quant_scale` (in) too, factors of the inputs: here they are factors of the columns of the weight.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::append_stream;
use super::floats::{E2M1, e4m3_times};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat, passed_over};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

#[derive(Debug)]
struct Nvfp4 {
    outputs: usize,
    inputs: usize,
    group: usize,
    /// Whether the inputs have factors.
    has_factors: bool,
}

/// Finds a layer of ModelOpt in NVFP4.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let is_packed = tensors.get("weight").is_some_and(|weight| weight.dtype == Dtype::U8);
    if !is_packed || tensors.get("weight_scale_2").is_none() {
        return Ok(None);
    }
    let (Some([outputs, bytes]), Some([rows, groups])) = (tensors.matrix("weight"), tensors.matrix("weight_scale"))
    else {
        bail!("weight and weight_scale are not both there as matrices, expected (out, in / 2) and (out, in / group)")
    };
    let Some(inputs) = bytes.checked_mul(2).filter(|inputs| groups > 0 && inputs.is_multiple_of(groups)) else {
        bail!("weight_scale has {groups} columns, expected groups of the {bytes} bytes of a row")
    };
    if rows != outputs || tensors.dtype("weight_scale")? != Dtype::F8_E4M3 {
        bail!("weight_scale is no matrix of F8_E4M3 with {outputs} rows, as weight has")
    }
    tensors.expect_count("weight_scale_2", 1)?;
    let has_factors = tensors.get("pre_quant_scale").is_some();
    if has_factors {
        tensors.expect_count("pre_quant_scale", inputs)?;
    }
    let mut used = vec!["weight", "weight_scale", "weight_scale_2", "pre_quant_scale"];
    used.extend(passed_over(module));
    let format = Arc::new(Nvfp4 { outputs, inputs, group: inputs / groups, has_factors });
    Ok(Some(Found { outputs, inputs, format, tensors: used }))
}

impl QuantizedFormat for Nvfp4 {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, group, has_factors } = self;
        let mut codes = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes("weight")?, 4, &mut codes);
        let [scale] = tensors.f32("weight_scale_2")?[..] else { bail!("weight_scale_2 is not one number") };
        // ModelOpt has no -0.
        let mut table = E2M1;
        table[8] = 0.0;
        let bytes = tensors.bytes("weight_scale")?;
        let of_bytes = e4m3_times(scale);
        let (group, scales) = if has_factors {
            // The scales of neighbouring inputs differ.
            let factors = tensors.f32("pre_quant_scale")?;
            let scale_of = |at: usize| of_bytes[usize::from(bytes[at / group])] * factors[at % inputs];
            (1, GroupNumbers::F32((0..outputs * inputs).map(scale_of).collect()))
        } else {
            (group, GroupNumbers::Bytes { bytes, table: of_bytes })
        };
        let values = CodeValues::Table(table);
        Ok(QuantizedWeight { outputs, inputs, bits: 4, codes, group, values, scales, input_order: None })
    }
}
