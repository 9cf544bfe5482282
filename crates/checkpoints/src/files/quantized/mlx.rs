//! MLX: `weight` (out, in · bits / 32) of U32 with `scales` and `biases` (out, in / group).
//!
//! mlx-lm saves layers so. In the mode `affine`, a number is `code · scale + bias`.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::append_stream;
use super::tensors::Tensors;
use super::{Format, Found, Module};
use candle_attention_modules::base::{CodeValues, QuantizedWeight};

/// The mode `affine`.
#[derive(Debug)]
struct Affine {
    outputs: usize,
    inputs: usize,
    bits: usize,
    group: usize,
}

/// Finds a layer of the mode `affine`.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let is_words = tensors.get("weight").is_some_and(|weight| weight.dtype == Dtype::U32);
    let (Some([outputs, words]), Some([rows, groups])) = (tensors.matrix("weight"), tensors.matrix("scales")) else {
        return Ok(None);
    };
    if !is_words || tensors.matrix("biases") != Some([rows, groups]) {
        return Ok(None);
    }
    let settings = module.settings.object();
    // Settings by module have priority.
    let own = &settings[module.name];
    let number = |key: &str| own[key].as_u64().or_else(|| settings[key].as_u64());
    let (Some(bits), Some(group)) = (number("bits"), number("group_size")) else {
        bail!("expected `bits` and `group_size` in `quantization` of the config.json next to the file")
    };
    let (bits, group) = (bits as usize, group as usize);
    let inputs = groups.saturating_mul(group);
    if !matches!(bits, 2..=6 | 8) || inputs.checked_mul(bits) != words.checked_mul(32) || rows != outputs {
        bail!(
            "the config says {bits} bits in groups of {group}, which does not fit `weight` of shape ({outputs}, {words}) \
             and `scales` of shape ({rows}, {groups})"
        )
    }
    let format = Arc::new(Affine { outputs, inputs, bits, group });
    Ok(Some(Found { outputs, inputs, format, tensors: vec!["weight", "scales", "biases"] }))
}

impl Format for Affine {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, bits, group } = self;
        let mut codes = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes("weight")?, bits, &mut codes);
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits,
            codes,
            group,
            values: CodeValues::Minimums(tensors.numbers("biases")?),
            scales: tensors.numbers("scales")?,
            input_order: None,
        })
    }
}
