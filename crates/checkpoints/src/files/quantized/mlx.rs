//! MLX: `weight` (out, in · bits / 32) of U32 with `scales` (out, in / group), as mlx-lm saves layers and embeddings.
//!
//! | mode | codes | scales | a number |
//! | --- | --- | --- | --- |
//! | `affine` | whole numbers of 2, 3, 4, 5, 6 or 8 bits | floats, with `biases` | `code · scale + bias` |
//! | `mxfp4` | E2M1 | E8M0 for groups of 32 | `float · scale` |
//! | `mxfp8` | E4M3 | E8M0 for groups of 32 | `float · scale` |
//! | `nvfp4` | E2M1 | E4M3 for groups of 16 | `float · scale` |
//!
//! transformers' method `metal` saves layers of the mode `affine` with `qbiases` instead of `biases`.
//!
//! `code · scale + bias` is rounded once here. MLX rounds the product too, which changes the last bit of some numbers
//! where scales are in f32; products of codes with scales in f16 or bf16 are exact.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;
use serde_json::Value;

use super::bits::append_stream;
use super::floats::{E2M1, e4m3_times, e8m0};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
use candle_attention_modules::base::{CodeValues, Float8, GroupNumbers, QuantizedWeight};

/// A way of quantising.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Affine,
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

/// A layer with its settings.
#[derive(Debug)]
struct MlxLayer {
    outputs: usize,
    inputs: usize,
    bits: usize,
    group: usize,
    mode: Mode,
    /// The name of the biases.
    biases: &'static str,
}

impl Mode {
    fn of(settings: &Value) -> Result<Self> {
        match settings["mode"].as_str() {
            None | Some("affine") => Ok(Self::Affine),
            Some("mxfp4") => Ok(Self::Mxfp4),
            Some("mxfp8") => Ok(Self::Mxfp8),
            Some("nvfp4") => Ok(Self::Nvfp4),
            Some(other) => bail!("the config has the mode {other:?}, expected affine, mxfp4, mxfp8 or nvfp4"),
        }
    }

    /// Returns the number of bits of codes where the config does not name it.
    fn usual_bits(self) -> u64 {
        if self == Self::Mxfp8 { 8 } else { 4 }
    }

    /// Returns the size of groups where the config does not say it.
    fn usual_group(self) -> u64 {
        match self {
            Self::Affine => 64,
            Self::Mxfp4 | Self::Mxfp8 => 32,
            Self::Nvfp4 => 16,
        }
    }

    fn has_bits(self, bits: usize) -> bool {
        match self {
            Self::Affine => matches!(bits, 2..=6 | 8),
            Self::Mxfp4 | Self::Nvfp4 => bits == 4,
            Self::Mxfp8 => bits == 8,
        }
    }
}

/// Finds a layer of MLX.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let is_words = tensors.get("weight").is_some_and(|weight| weight.dtype == Dtype::U32);
    let (Some([outputs, words]), Some([rows, groups])) = (tensors.matrix("weight"), tensors.matrix("scales")) else {
        return Ok(None);
    };
    if !is_words {
        return Ok(None);
    }
    let settings = module.settings.object();
    if !settings.is_object() {
        bail!("expected `bits` and `group_size` in `quantization` of the config.json next to the file")
    }
    // The settings of a module replace the settings of the model.
    let own = if settings[module.name].is_object() { &settings[module.name] } else { settings };
    let mode = Mode::of(own)?;
    let bits = own["bits"].as_u64().unwrap_or(mode.usual_bits()) as usize;
    let group = own["group_size"].as_u64().unwrap_or(mode.usual_group()) as usize;
    let inputs = groups.saturating_mul(group);
    if !mode.has_bits(bits) || inputs.checked_mul(bits) != words.checked_mul(32) || rows != outputs {
        bail!(
            "the config says {bits} bits in groups of {group}, which does not fit `weight` of shape ({outputs}, {words}) \
             and `scales` of shape ({rows}, {groups})"
        )
    }
    if tensors.get("global_scale").is_some() {
        bail!("`global_scale` multiplies the weight, which is not supported")
    }
    let mut used = vec!["weight", "scales"];
    let biases = if settings["quant_method"] == "metal" { "qbiases" } else { "biases" };
    if mode == Mode::Affine {
        if tensors.matrix(biases) != Some([rows, groups]) {
            bail!(
                "`{biases}` is not a matrix of shape ({rows}, {groups}), as `scales` is, expected one in the mode affine"
            )
        }
        used.push(biases);
    } else if tensors.dtype("scales")? != Dtype::U8 {
        bail!("`scales` has dtype {:?}, expected U8 in the mode {mode:?}", tensors.dtype("scales")?)
    }
    let format = Arc::new(MlxLayer { outputs, inputs, bits, group, mode, biases });
    Ok(Some(Found { outputs, inputs, format, tensors: used }))
}

impl QuantizedFormat for MlxLayer {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, bits, group, mode, biases } = self;
        let mut codes = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes("weight")?, bits, &mut codes);
        let bytes = |table| Ok::<_, candle_core::Error>(GroupNumbers::Bytes { bytes: tensors.bytes("scales")?, table });
        let scales = match mode {
            Mode::Affine => tensors.numbers("scales")?,
            Mode::Mxfp4 | Mode::Mxfp8 => bytes(e8m0())?,
            Mode::Nvfp4 => bytes(e4m3_times(1.0))?,
        };
        let values = match mode {
            Mode::Affine => CodeValues::Minimums(tensors.numbers(biases)?),
            Mode::Mxfp4 | Mode::Nvfp4 => CodeValues::Table(E2M1),
            Mode::Mxfp8 => CodeValues::Float8(Float8::E4M3),
        };
        Ok(QuantizedWeight { outputs, inputs, bits, codes, group, values, scales, input_order: None })
    }
}
