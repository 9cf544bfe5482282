//! BitNet: `weight` U8 (out / 4, in) of codes of 2 bits, and `weight_scale`, a number.
//!
//! A byte has the codes of 4 outputs: of one in each quarter of the outputs, the first in the lowest bits. A number is
//! -1, 0 or 1, the code less one, times the scale in layers of the class `autobitlinear`, and divided by it in
//! layers of `bitlinear`. Activations, which the library rounds to 8 bits, stay floats.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;
use serde_json::Value;

use super::floats::is_float;
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

/// The number of codes in a byte.
const CODES: usize = 4;

/// How the scale belongs to the numbers of a layer.
#[derive(Debug, Clone, Copy)]
enum ScaleUse {
    Factor,
    Divisor,
}

#[derive(Debug)]
struct BitNet {
    outputs: usize,
    inputs: usize,
    scale: ScaleUse,
}

/// Finds a layer of BitNet.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let config = module.settings.object();
    let tensors = module.tensors;
    if config["quant_method"] != "bitnet" {
        return Ok(None);
    }
    let Some(weight) = tensors.get("weight") else { return Ok(None) };
    if weight.dtype != Dtype::U8 {
        check_plain(module, config)?;
        return Ok(None);
    }
    if config["use_rms_norm"] == true {
        bail!("the config says `use_rms_norm` of BitNet, a norm in front of each layer, expected layers without one")
    }
    let scale = match config["linear_class"].as_str() {
        None | Some("bitlinear") => ScaleUse::Divisor,
        Some("autobitlinear") => ScaleUse::Factor,
        Some(other) => {
            bail!("the config says `linear_class` {other:?} of BitNet, expected \"bitlinear\" or \"autobitlinear\"")
        }
    };
    let is_one = tensors.get("weight_scale").is_some_and(|own| own.shape.iter().product::<usize>() == 1);
    let sizes = tensors.matrix("weight").and_then(|[rows, inputs]| Some([rows.checked_mul(CODES)?, inputs]));
    let Some([outputs, inputs]) = sizes.filter(|sizes| is_one && !sizes.contains(&0)) else {
        bail!("expected `weight` (out / 4, in) of U8 and `weight_scale`, one number, found {}", tensors.described())
    };
    let format = Arc::new(BitNet { outputs, inputs, scale });
    Ok(Some(Found { outputs, inputs, format, tensors: vec!["weight", "weight_scale"] }))
}

/// Refuses the floats of a projection that the model makes ternary in each call.
fn check_plain(module: &Module, config: &Value) -> Result<()> {
    let is_float_matrix = module.tensors.get("weight").is_some_and(|own| own.shape.len() == 2 && is_float(own.dtype));
    if config["quantization_mode"] == "online" && module.name.ends_with("_proj") && is_float_matrix {
        bail!(
            "the config says `quantization_mode` \"online\" of BitNet, weights in floats that are made ternary in each \
             call, expected \"offline\", codes"
        )
    }
    Ok(())
}

impl QuantizedFormat for BitNet {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, scale } = self;
        let stored = tensors.bytes("weight")?;
        let mut codes = Vec::with_capacity(outputs * inputs);
        for part in 0..CODES {
            codes.extend(stored.iter().map(|byte| byte >> (2 * part) & 3));
        }
        let [number] = tensors.f32("weight_scale")?[..] else { bail!("weight_scale is not one number") };
        let number = match scale {
            ScaleUse::Factor => number,
            ScaleUse::Divisor => 1.0 / number,
        };
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: 2,
            codes,
            group: inputs,
            values: CodeValues::Zeros(GroupNumbers::Whole(vec![1; outputs])),
            scales: GroupNumbers::F32(vec![number; outputs]),
            input_order: None,
        })
    }
}
