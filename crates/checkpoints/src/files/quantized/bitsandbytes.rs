//! bitsandbytes, as transformers saves its layers.
//!
//! 4 bits: the codes of `weight`, the first in the high half of a byte, select numbers of `weight.quant_map` (NF4
//! or FP4). Blocks of numbers of the flattened weight share a scale, `weight.absmax`. With double quantisation, the
//! scales are codes for the numbers of `weight.nested_quant_map`, in blocks that have scales too. The JSON of
//! `weight.quant_state.bitsandbytes__nf4` (or `__fp4`) has the shape and the sizes of the blocks.
//!
//! 8 bits: `weight` I8 (out, in) with `SCB` (out,), the largest magnitude of each row. A number is
//! `code · (SCB / 127)`, as bitsandbytes computes embeddings.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;
use serde::Deserialize;

use super::bits::{append_nibbles_from_high, greatest_common_divisor, signed_to_codes};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

const NF4: &str = "weight.quant_state.bitsandbytes__nf4";
const FP4: &str = "weight.quant_state.bitsandbytes__fp4";

/// The values of `weight_format` that bitsandbytes knows, by their numbers. Today's version writes the first.
const WEIGHT_FORMATS: [&str; 4] = ["row", "col32", "col_turing", "col_ampere"];

/// The JSON of a `quant_state`.
#[derive(Deserialize)]
struct QuantState {
    shape: Vec<usize>,
    blocksize: usize,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Codes of 4 bits.
#[derive(Debug)]
struct FourBits {
    outputs: usize,
    inputs: usize,
    /// The size of the blocks of the flattened weight that share a scale.
    block: usize,
    nested: Option<QuantizedScales>,
}

/// Scales that are quantised themselves.
#[derive(Debug)]
struct QuantizedScales {
    block: usize,
    /// A number that is added to all scales.
    offset: f32,
}

/// Codes of 8 bits.
#[derive(Debug)]
struct EightBits {
    outputs: usize,
    inputs: usize,
}

/// Finds a layer of bitsandbytes.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    for state in [NF4, FP4] {
        if module.tensors.get(state).is_some() && module.tensors.get("weight").is_some() {
            return four_bits(module.tensors, state).map(Some);
        }
    }
    match module.tensors.get("weight") {
        Some(weight) if weight.dtype == Dtype::I8 && module.tensors.get("SCB").is_some() => {
            eight_bits(module.tensors).map(Some)
        }
        _ => Ok(None),
    }
}

fn four_bits(tensors: &Tensors, state_name: &'static str) -> Result<Found> {
    let state: QuantState = match serde_json::from_slice(&tensors.bytes(state_name)?) {
        Ok(state) => state,
        Err(error) => bail!("{state_name} cannot be read: {error}"),
    };
    let [outputs, inputs] = state.shape[..] else {
        bail!("{state_name} has shape {:?}, expected a matrix", state.shape)
    };
    let Some(count) = outputs.checked_mul(inputs).filter(|&count| count > 0) else {
        bail!("{state_name} has shape {:?}, expected numbers that fit in memory", state.shape)
    };
    if state.blocksize == 0 || state.nested_blocksize == Some(0) {
        bail!("{state_name} has blocks of 0 numbers, expected at least 1")
    }
    // The codes may be stored as any dtype (`bnb_4bit_quant_storage`).
    tensors.expect_bytes("weight", count.div_ceil(2))?;
    tensors.expect_count("weight.quant_map", 16)?;
    let blocks = count.div_ceil(state.blocksize);
    tensors.expect_count("weight.absmax", blocks)?;
    let mut used = vec!["weight", "weight.absmax", "weight.quant_map", state_name];
    let nested = if tensors.get("weight.nested_absmax").is_some() {
        let (Some(block), Some(offset)) = (state.nested_blocksize, state.nested_offset) else {
            bail!("{state_name} has no nested_blocksize or nested_offset, expected both for weight.nested_absmax")
        };
        tensors.expect_bytes("weight.absmax", blocks)?;
        tensors.expect_count("weight.nested_quant_map", 256)?;
        tensors.expect_count("weight.nested_absmax", blocks.div_ceil(block))?;
        used.extend(["weight.nested_absmax", "weight.nested_quant_map"]);
        Some(QuantizedScales { block, offset })
    } else {
        None
    };
    let format = Arc::new(FourBits { outputs, inputs, block: state.blocksize, nested });
    Ok(Found { outputs, inputs, format, tensors: used })
}

impl QuantizedFormat for FourBits {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, block, .. } = self;
        let count = outputs * inputs;
        let mut codes = Vec::with_capacity(count + 1);
        append_nibbles_from_high(&tensors.bytes("weight")?, &mut codes);
        codes.truncate(count);
        let mut table = [0.0; 16];
        table.copy_from_slice(&tensors.f32("weight.quant_map")?);
        let of_blocks = self.scales(tensors)?;
        // A block may end in the middle of a row.
        let group = greatest_common_divisor(block, inputs);
        let scales = (0..count / group).map(|at| of_blocks[at * group / block]).collect();
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: 4,
            codes,
            group,
            values: CodeValues::Table(table),
            scales: GroupNumbers::F32(scales),
            input_order: None,
        })
    }
}

impl FourBits {
    /// Returns the scales of the blocks.
    fn scales(&self, tensors: &Tensors) -> Result<Vec<f32>> {
        let Some(nested) = &self.nested else { return tensors.f32("weight.absmax") };
        let codes = tensors.bytes("weight.absmax")?;
        let table = tensors.f32("weight.nested_quant_map")?;
        let factors = tensors.f32("weight.nested_absmax")?;
        let mut scales = Vec::with_capacity(codes.len());
        for (own, factor) in codes.chunks(nested.block).zip(factors) {
            scales.extend(own.iter().map(|&code| table[usize::from(code)] * factor + nested.offset));
        }
        Ok(scales)
    }
}

fn eight_bits(tensors: &Tensors) -> Result<Found> {
    let Some([outputs, inputs]) = tensors.matrix("weight") else { bail!("weight is no matrix, expected one") };
    tensors.expect_count("SCB", outputs)?;
    let mut used = vec!["weight", "SCB"];
    if tensors.get("weight_format").is_some() {
        used.push("weight_format");
        match tensors.bytes("weight_format")?[..] {
            [0] => {}
            [number] if usize::from(number) < WEIGHT_FORMATS.len() => {
                let name = WEIGHT_FORMATS[usize::from(number)];
                bail!("weight_format is {name}, expected row; load it with bitsandbytes and save it again")
            }
            _ => bail!("weight_format is not known, expected row (0)"),
        }
    }
    Ok(Found { outputs, inputs, format: Arc::new(EightBits { outputs, inputs }), tensors: used })
}

impl QuantizedFormat for EightBits {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs } = self;
        let mut codes = tensors.bytes("weight")?;
        signed_to_codes(&mut codes);
        let scales = tensors.f32("SCB")?.into_iter().map(|largest| largest / 127.0).collect();
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: 8,
            codes,
            group: inputs.max(1),
            values: CodeValues::Signed,
            scales: GroupNumbers::F32(scales),
            input_order: None,
        })
    }
}
