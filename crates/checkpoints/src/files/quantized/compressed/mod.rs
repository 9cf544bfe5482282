//! compressed-tensors, the format of llm-compressor: integers in words, integers of 8 bits, floats of 8 and of 4 bits.
//!
//! | format | tensors of a linear layer |
//! | --- | --- |
//! | `pack-quantized` | `weight_packed` (out, in · bits / 32) of I32, `weight_scale`, `weight_shape` (2), and where they are needed `weight_zero_point` in words along the outputs, `weight_g_idx` (in); for experts these with a dimension more, and `weight_shape` (3) |
//! | `int-quantized`, `naive-quantized` | `weight` of I8 with `weight_scale`, `weight_zero_point` |
//! | `float-quantized`, `naive-quantized` | `weight` of E4M3 with `weight_scale` |
//! | `mxfp8-quantized` | `weight` of E4M3 with `weight_scale` of E8M0 |
//! | `nvfp4-pack-quantized` | `weight_packed` (out, in / 2) of U8, `weight_scale` of E4M3, `weight_global_scale` |
//! | `mxfp4-pack-quantized` | `weight_packed` (out, in / 2) of U8, `weight_scale` of E8M0 |
//!
//! The tensors tell the format, so that a model may have several (`mixed-precision`). auto-round has the last two too.

mod scheme;
mod whole;
mod words;

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::append_stream;
use super::float8::ScaleBlock;
use super::floats::{E2M1, e4m3_over, e8m0};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat, passed_over};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};
use scheme::Scheme;

/// The names of the method, and of the one that writes the same floats of 4 bits.
const METHODS: [&str; 2] = ["compressed-tensors", "auto-round"];

/// A layer of compressed-tensors.
#[derive(Debug)]
struct CompressedSizes {
    outputs: usize,
    inputs: usize,
    /// The parts of the weight that share a scale.
    blocks: ScaleBlock,
    /// The number of columns of the scales.
    scale_columns: usize,
}

/// Finds a layer of compressed-tensors.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let config = module.settings.object();
    let method = config["quant_method"].as_str().unwrap_or_default();
    if !METHODS.contains(&method) {
        return Ok(None);
    }
    let dtype = |name: &str| module.tensors.get(name).map(|tensor| tensor.dtype);
    let [packed, weight, scale] = ["weight_packed", "weight", "weight_scale"].map(dtype);
    let is_sparse = ["bitmask", "weight.bitmask"].iter().any(|name| dtype(name).is_some());
    if packed.is_none() && scale.is_none() && !is_sparse {
        return Ok(None);
    }
    scheme::check(config)?;
    match (packed, weight) {
        (Some(Dtype::U8), None) => fp4(module).map(Some),
        _ if method != METHODS[0] => Ok(None),
        (Some(Dtype::I32), None) => words::find(module).map(Some),
        (None, Some(Dtype::I8 | Dtype::F8_E4M3 | Dtype::F8_E5M2)) => whole::find(module),
        _ => bail!(
            "expected a layer of compressed-tensors, `weight_packed` of I32 or U8 or `weight` of I8 or F8_E4M3, found {}",
            module.tensors.described()
        ),
    }
}

/// Returns the scheme of the module.
fn scheme_of(module: &Module) -> Result<Scheme> {
    scheme::scheme(module.settings.object(), module.name)
}

/// Returns the sizes of a layer by the shape of its scales.
fn sizes(module: &Module, outputs: usize, inputs: usize, scheme: &Scheme) -> Result<CompressedSizes> {
    let Some(scale) = module.tensors.get("weight_scale") else {
        bail!("expected `weight_scale`, found {}", module.tensors.described())
    };
    if outputs == 0 || inputs == 0 {
        bail!("expected a weight that is not empty, found {}", module.tensors.described())
    }
    let in_blocks = scheme.block.map(|[rows, columns]| ScaleBlock { rows, columns });
    let blocks = match (in_blocks, scale.shape.as_slice()) {
        (Some(blocks), shape) if shape == blocks.grid(outputs, inputs) => Some(blocks),
        // Experts: the outputs of all of them follow each other.
        (_, [matrices @ .., rows, columns]) if !matrices.is_empty() => {
            let all_rows = matrices.iter().product::<usize>().saturating_mul(*rows);
            ScaleBlock::of_shape(outputs, inputs, &[all_rows, *columns], scheme.group)
        }
        (_, shape) => ScaleBlock::of_shape(outputs, inputs, shape, scheme.group),
    };
    let Some(blocks) = blocks else {
        bail!(
            "expected scales of a weight ({outputs}, {inputs}), one, one for each output, group of inputs or block, \
             found {}",
            module.tensors.described()
        )
    };
    let [_, scale_columns] = blocks.grid(outputs, inputs);
    Ok(CompressedSizes { outputs, inputs, blocks, scale_columns })
}

/// Floats of 4 bits (E2M1), with scales of E4M3 below a scale of the weight, or with scales of E8M0.
#[derive(Debug)]
struct Fp4 {
    outputs: usize,
    inputs: usize,
    group: usize,
}

fn fp4(module: &Module) -> Result<Found> {
    let tensors = module.tensors;
    let [Some([outputs, bytes]), Some([rows, groups])] =
        ["weight_packed", "weight_scale"].map(|name| tensors.matrix(name))
    else {
        bail!("expected `weight_packed` and `weight_scale` of two dimensions, found {}", tensors.described())
    };
    let scale = tensors.get("weight_scale").map(|own| own.dtype);
    let of_weight = tensors.get("weight_global_scale").map(|own| own.shape.iter().product::<usize>());
    let inputs = bytes * 2;
    let fits = rows == outputs && groups > 0 && outputs > 0 && inputs > 0 && inputs.is_multiple_of(groups);
    let is_known = match scale {
        Some(Dtype::F8_E4M3) => of_weight == Some(1),
        Some(Dtype::U8 | Dtype::F8_E8M0) => of_weight.is_none(),
        _ => false,
    };
    if !fits || !is_known {
        bail!(
            "expected floats of 4 bits: `weight_packed` (out, in / 2) with `weight_scale` (out, groups) of F8_E4M3 and \
             `weight_global_scale` (1), or with `weight_scale` (out, groups) of U8, found {}",
            tensors.described()
        )
    }
    let format = Arc::new(Fp4 { outputs, inputs, group: inputs / groups });
    let mut used = vec!["weight_packed", "weight_scale", "weight_global_scale"];
    used.extend(passed_over(module));
    Ok(Found { outputs, inputs, format, tensors: used })
}

impl QuantizedFormat for Fp4 {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, group } = self;
        let mut codes = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes("weight_packed")?, 4, &mut codes);
        let table = match tensors.get("weight_global_scale") {
            Some(_) => e4m3_over(tensors.f32("weight_global_scale")?[0]),
            None => e8m0(),
        };
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: 4,
            codes,
            group,
            values: CodeValues::Table(E2M1),
            scales: GroupNumbers::Bytes { bytes: tensors.bytes("weight_scale")?, table },
            input_order: None,
        })
    }
}
