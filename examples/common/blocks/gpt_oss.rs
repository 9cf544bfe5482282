//! The experts of GPT-OSS: stacked, with biases, with outputs of gate and up in turn, and published in MXFP4, 32
//! numbers of 4 bits with a power of two for all of them
//! (<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).

use candle_attention::PackedLinear;
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_nn::ops;
use serde_json::Value;

use super::mlp::Mlp;
use super::weights::{Dimension, Divided, Weights};

/// The experts of a layer.
pub fn experts(json: &Value, all: &Weights, count: usize) -> Result<Vec<Mlp>> {
    let number = |key: &str, default| json[key].as_f64().unwrap_or(default);
    let [alpha, limit] = [number("swiglu_alpha", 1.702), number("swiglu_limit", 7.0)];
    let gate_up = Stacked::read(all, "gate_up_proj", Divided::Outputs)?;
    let down = Stacked::read(all, "down_proj", Divided::Inputs)?;
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
    /// Those of this process, of which outputs go in pairs of gate and up, and of MXFP4 in as many as a block has
    /// inputs in the next weight.
    fn read(vb: &Weights, name: &str, divided: Divided) -> Result<Self> {
        let blocks = format!("{name}_blocks");
        let is_mxfp4 = vb.contains_tensor(&blocks);
        let (outputs, inputs) = if is_mxfp4 { (1, 2) } else { (2, 1) };
        let unit = if is_mxfp4 { 2 * BLOCK } else { 2 };
        let of = match divided {
            Divided::Inputs => Dimension::new(inputs),
            _ => Dimension { unit, ..Dimension::new(outputs) },
        };
        let bytes = |name: &str| vb.own(name, Dimension { dtype: Some(DType::U8), ..of });
        let bias = format!("{name}_bias");
        Ok(Self {
            weights: if is_mxfp4 { bytes(&blocks)? } else { vb.own(name, of)? },
            scales: is_mxfp4.then(|| bytes(&format!("{name}_scales"))).transpose()?,
            biases: match divided {
                Divided::Inputs if vb.is_first() => vb.get_unchecked(&bias)?,
                Divided::Inputs => vb.get_unchecked(&bias)?.zeros_like()?,
                _ => vb.own(&bias, Dimension { unit, ..Dimension::new(1) })?,
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

/// What 4 bits mean, without the sign, which is the highest bit.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// MXFP4: blocks (rows, blocks, 16) and their scales (rows, blocks), both u8, give (rows, 32 blocks) in f32 on the CPU.
/// A byte has two numbers, that of the low bits first; a scale is the exponent of 2 plus 127.
fn dequantize(blocks: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let (rows, count) = match *blocks.dims() {
        [rows, count, 16] if scales.dims() == [rows, count] => (rows, count),
        _ => bail!(
            "[causal_lm] MXFP4 blocks and scales have shapes {:?} and {:?}, expected (.., rows, blocks, 16) and (.., rows, blocks)",
            blocks.dims(),
            scales.dims()
        ),
    };
    let (bytes, scales) = (blocks.flatten_all()?.to_vec1::<u8>()?, scales.flatten_all()?.to_vec1::<u8>()?);
    let mut numbers = Vec::with_capacity(2 * bytes.len());
    for (block, &scale) in bytes.chunks(16).zip(&scales) {
        let scale = (f32::from(scale) - 127.0).exp2();
        for bits in block.iter().flat_map(|byte| [byte & 15, byte >> 4]) {
            let magnitude = scale * MAGNITUDES[usize::from(bits & 7)];
            numbers.push(if bits & 8 == 0 { magnitude } else { -magnitude });
        }
    }
    Tensor::from_vec(numbers, (rows, BLOCK * count), &Device::Cpu)
}
