//! The experts of GPT-OSS: stacked, with biases, with outputs of gate and up in turn, and published in MXFP4, 32
//! numbers of 4 bits with a power of two for all of them
//! (<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).

use candle_attention::PackedLinear;
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::ops;
use serde_json::Value;

use super::mlp::Mlp;
use super::weights::{Divided, INPUTS, OUTPUTS, Weights};

/// The experts of a layer.
pub fn experts(json: &Value, all: &Weights, count: usize) -> Result<Vec<Mlp>> {
    let number = |key: &str, default| json[key].as_f64().unwrap_or(default);
    let [alpha, limit] = [number("swiglu_alpha", 1.702), number("swiglu_limit", 7.0)];
    let gate_up = Stacked::read(all, "gate_up_proj", Divided { unit: 2, ..OUTPUTS })?;
    let down = Stacked::read(all, "down_proj", INPUTS)?;
    let expert = |expert: usize| {
        let [weight, bias] = gate_up.of(expert)?;
        let every_second = |first: usize| {
            let rows = Tensor::arange_step(first as u32, bias.dim(0)? as u32, 2, bias.device())?;
            PackedLinear::new(&weight.index_select(&rows, 0)?, Some(&bias.index_select(&rows, 0)?))
        };
        let [gate, up] = [every_second(0)?, every_second(1)?];
        let [weight, bias] = down.of(expert)?;
        Ok(Mlp::new(ClampedGlu { gate, up, alpha, limit }, PackedLinear::new(&weight, Some(&bias))?))
    };
    (0..count).map(expert).collect()
}

/// `gate * sigmoid(alpha * gate) * (up + 1)`, where `gate` is at most `limit`, and `up` between `-limit` and `limit`.
struct ClampedGlu {
    gate: PackedLinear,
    up: PackedLinear,
    alpha: f64,
    limit: f64,
}

impl Module for ClampedGlu {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let gate = self.gate.forward(xs)?.minimum(self.limit)?;
        let up = self.up.forward(xs)?.clamp(-self.limit, self.limit)?;
        let sigmoid = ops::sigmoid(&(&gate * self.alpha)?)?;
        (gate * sigmoid)? * (up + 1.0)?
    }
}

/// One weight of all experts and their biases (experts, out).
struct Stacked {
    /// (experts, in, out); as published, blocks in MXFP4 (experts, out, blocks of a row, 16).
    weights: Tensor,
    /// Of each block of MXFP4.
    scales: Option<Tensor>,
    biases: Tensor,
}

impl Stacked {
    /// Those of this process. Outputs are divided in units, and of MXFP4 so many of them together as a block has inputs
    /// in the next weight.
    fn read(vb: &Weights, name: &str, divided: Divided) -> Result<Self> {
        let (blocks, bias) = (format!("{name}_blocks"), format!("{name}_bias"));
        let (is_mxfp4, has_outputs) = (vb.contains_tensor(&blocks), divided.dim == OUTPUTS.dim);
        let of = Divided {
            dim: if is_mxfp4 { 1 + divided.dim } else { 2 - divided.dim },
            unit: if is_mxfp4 && has_outputs { BLOCK * divided.unit } else { divided.unit },
            ..divided
        };
        let bytes = |name: &str| vb.own_in(DType::U8, name, of);
        Ok(Self {
            weights: if is_mxfp4 { bytes(&blocks)? } else { vb.own(name, of)? },
            scales: is_mxfp4.then(|| bytes(&format!("{name}_scales"))).transpose()?,
            biases: match has_outputs {
                true => vb.own(&bias, Divided { dim: 1, ..of })?,
                false if vb.is_first() => vb.get_unchecked(&bias)?,
                false => vb.get_unchecked(&bias)?.zeros_like()?,
            },
        })
    }

    /// The weight (out, in) and the bias (out,) of one expert.
    fn of(&self, expert: usize) -> Result<[Tensor; 2]> {
        let (weight, bias) = (self.weights.i(expert)?, self.biases.i(expert)?);
        let weight = match &self.scales {
            Some(scales) => {
                dequantize(&weight, &scales.i(expert)?)?.to_dtype(bias.dtype())?.to_device(bias.device())?
            }
            None => weight.t()?.contiguous()?,
        };
        Ok([weight, bias])
    }
}

/// Numbers of MXFP4 that have one scale.
const BLOCK: usize = 32;

/// What 4 bits mean, of which the highest is the sign.
const NUMBERS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// MXFP4: blocks (rows, blocks, 16) and their scales (rows, blocks), both u8, give (rows, 32 blocks) in f32 on the CPU.
/// A byte has two numbers, that of the low bits first; a scale is the exponent of 2 plus 127.
fn dequantize(blocks: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let (rows, count) = scales.dims2()?;
    let (bytes, scales) = (blocks.flatten_all()?.to_vec1::<u8>()?, scales.flatten_all()?.to_vec1::<u8>()?);
    let mut numbers = Vec::with_capacity(2 * bytes.len());
    for (block, &scale) in bytes.chunks(BLOCK / 2).zip(&scales) {
        let scale = (f32::from(scale) - 127.0).exp2();
        let bits = block.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        numbers.extend(bits.map(|bits| scale * NUMBERS[usize::from(bits)]));
    }
    Tensor::from_vec(numbers, (rows, BLOCK * count), &Device::Cpu)
}
