//! The experts of GPT-OSS: stacked, with biases, with interleaved outputs of gate and up, and published in MXFP4, 32
//! numbers of 4 bits with a power of two for all of them
//! (<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).

use candle_attention::PackedLinear;
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::ops;
use serde_json::Value;

use super::mlp::Mlp;
use super::weights::{INPUTS, OUTPUTS, Sharding, Weights};

/// Loads the experts of a layer.
pub fn experts(json: &Value, all: &Weights, count: usize) -> Result<Vec<Mlp>> {
    let gate_up = Stacked::read(all, "gate_up_proj", Sharding { unit: 2, ..OUTPUTS })?;
    let down = Stacked::read(all, "down_proj", INPUTS)?;
    let clamp = Clamp::GPT_OSS.of(json);
    let mut experts = Vec::with_capacity(count);
    for index in 0..count {
        let own = gate_up.expert(index)?;
        let gate = own.every_second_row(0)?;
        let up = own.every_second_row(1)?;
        let down = down.expert(index)?;
        experts.push(clamp.mlp(gate, up, PackedLinear::new(&down.weight, Some(&down.bias))?));
    }
    Ok(experts)
}

/// The numbers of a clamped gate.
#[derive(Clone, Copy)]
pub struct Clamp {
    pub alpha: f64,
    pub limit: f64,
    /// The number that is added to `up`.
    pub shift: f64,
}

impl Clamp {
    pub const GPT_OSS: Self = Self { alpha: 1.702, limit: 7.0, shift: 1.0 };

    /// Reads the numbers from a `config.json`, whose defaults these are.
    pub fn of(self, json: &Value) -> Self {
        let number = |key: &str, default| json[key].as_f64().unwrap_or(default);
        Self { alpha: number("swiglu_alpha", self.alpha), limit: number("swiglu_limit", self.limit), ..self }
    }

    /// Makes an MLP of its projections.
    pub fn mlp(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> Mlp {
        Mlp::new(ClampedGlu { gate, up, clamp: self }, down)
    }
}

/// The weight (out, in) and the bias (out,) of one expert.
struct Expert {
    weight: Tensor,
    bias: Tensor,
}

impl Expert {
    /// Returns the projection of every second output from `first` on.
    fn every_second_row(&self, first: u32) -> Result<PackedLinear> {
        let rows = Tensor::arange_step(first, self.bias.dim(0)? as u32, 2, self.bias.device())?;
        PackedLinear::new(&self.weight.index_select(&rows, 0)?, Some(&self.bias.index_select(&rows, 0)?))
    }
}

/// The gated unit `gate * sigmoid(alpha * gate) * (up + shift)`, where `gate` is at most `limit`, and `up` between
/// `-limit` and `limit`.
struct ClampedGlu {
    gate: PackedLinear,
    up: PackedLinear,
    clamp: Clamp,
}

impl Module for ClampedGlu {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let Clamp { alpha, limit, shift } = self.clamp;
        let gate = self.gate.forward(xs)?.minimum(limit)?;
        let up = self.up.forward(xs)?.clamp(-limit, limit)?;
        let sigmoid = ops::sigmoid(&(&gate * alpha)?)?;
        (gate * sigmoid)? * (up + shift)?
    }
}

/// One weight of all experts and their biases (experts, out).
struct Stacked {
    /// (experts, in, out), or as published, blocks of MXFP4 (experts, out, blocks of a row, 16).
    weights: Tensor,
    /// The scale of each block of MXFP4.
    scales: Option<Tensor>,
    biases: Tensor,
}

impl Stacked {
    /// Reads the shard of this process. Outputs are divided in units; a unit of MXFP4 is as large as the block of
    /// inputs of the next weight.
    fn read(vb: &Weights, name: &str, sharding: Sharding) -> Result<Self> {
        let blocks = format!("{name}_blocks");
        let is_mxfp4 = vb.contains_tensor(&blocks);
        let shards_outputs = sharding.dim == OUTPUTS.dim;
        let of = Sharding {
            dim: if is_mxfp4 { 1 + sharding.dim } else { 2 - sharding.dim },
            unit: if is_mxfp4 && shards_outputs { BLOCK * sharding.unit } else { sharding.unit },
            ..sharding
        };
        let (weights, scales) = if is_mxfp4 {
            let scales = vb.sharded_in(DType::U8, &format!("{name}_scales"), of)?;
            (vb.sharded_in(DType::U8, &blocks, of)?, Some(scales))
        } else {
            (vb.sharded(name, of)?, None)
        };
        let bias = format!("{name}_bias");
        let biases = if shards_outputs {
            vb.sharded(&bias, Sharding { dim: 1, ..of })?
        } else if vb.is_first() {
            vb.get_unchecked(&bias)?
        } else {
            vb.get_unchecked(&bias)?.zeros_like()?
        };
        Ok(Self { weights, scales, biases })
    }

    /// Returns one expert's weight (out, in) and bias (out,).
    fn expert(&self, expert: usize) -> Result<Expert> {
        let weight = self.weights.i(expert)?;
        let bias = self.biases.i(expert)?;
        let weight = match &self.scales {
            Some(scales) => {
                dequantize(&weight, &scales.i(expert)?)?.to_dtype(bias.dtype())?.to_device(bias.device())?
            }
            None => weight.t()?.contiguous()?,
        };
        Ok(Expert { weight, bias })
    }
}

/// The numbers of MXFP4 that share a scale.
const BLOCK: usize = 32;

/// The values of 4 bits, of which the highest is the sign.
const NUMBERS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Dequantises MXFP4: blocks (rows, blocks, 16) and their scales (rows, blocks), both u8, to (rows, 32 blocks) in f32
/// on the CPU. A byte has two numbers, in its low and its high bits; a scale is the exponent of 2 plus 127.
fn dequantize(blocks: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let (rows, count) = scales.dims2()?;
    let bytes = blocks.flatten_all()?.to_vec1::<u8>()?;
    let scales = scales.flatten_all()?.to_vec1::<u8>()?;
    let mut numbers = Vec::with_capacity(2 * bytes.len());
    for (block, &scale) in bytes.chunks(BLOCK / 2).zip(&scales) {
        let scale = (f32::from(scale) - 127.0).exp2();
        let bits = block.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        numbers.extend(bits.map(|bits| scale * NUMBERS[usize::from(bits)]));
    }
    Tensor::from_vec(numbers, (rows, BLOCK * count), &Device::Cpu)
}
