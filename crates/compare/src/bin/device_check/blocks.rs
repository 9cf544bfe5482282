//! The parts around attention in a block (norms, rotary positions and gated norms) on a device, with gradients,
//! compared with the CPU in f64.

use candle_attention::init::TorchSeed;
use candle_attention::{GateActivation, LayerNorm, RmsNorm, RopeConfig, RopeStyle, RotaryEmbedding};
use candle_core::{DType, Device, Module, Result, Tensor, Var};

use super::check::{Checked, DTYPES, allowed, gradients, largest_error};
use super::table::Row;

const EPS: f64 = 1e-6;

#[derive(Debug, Clone, Copy)]
enum Part {
    RmsNorm,
    RmsNormPlusOne,
    LayerNorm,
    GatedRmsNorm,
    /// Rotary positions from 3 on, by halves of a head.
    RotaryHalves,
    RotaryInterleaved,
}

/// The tensors of a part: its input (B, T, H, D), and parameters (D,) and a gate that not every part has.
struct Operands {
    xs: Tensor,
    weight: Tensor,
    bias: Tensor,
    gate: Tensor,
}

/// Checks outputs and gradients.
pub fn check(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("norms and rotation");
    let parts = [
        Part::RmsNorm,
        Part::RmsNormPlusOne,
        Part::LayerNorm,
        Part::GatedRmsNorm,
        Part::RotaryHalves,
        Part::RotaryInterleaved,
    ];
    for dtype in DTYPES {
        for part in parts {
            for shape in [[1, 1, 4, 64], [2, 37, 3, 128], [1, 9, 2, 80]] {
                let checked = compare(part, shape, dtype, device);
                row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("{part:?} of {shape:?}"));
            }
        }
    }
    Ok(row)
}

fn compare(part: Part, shape: [usize; 4], dtype: DType, device: &Device) -> Result<Checked> {
    let seed = TorchSeed::new(10);
    let draw = |dims: &[usize]| seed.randn(dims.to_vec())?.to_dtype(dtype);
    let d = shape[3];
    let operands = Operands { xs: draw(&shape)?, weight: draw(&[d])?, bias: draw(&[d])?, gate: draw(&shape)? };
    let found = part.run(&operands.moved(dtype, device)?)?;
    let expected = part.run(&operands.moved(DType::F64, &Device::Cpu)?)?;
    Ok(Checked { error: largest_error(&found, &expected)?, plan: None })
}

impl Operands {
    /// Returns variables on a device.
    fn moved(&self, dtype: DType, device: &Device) -> Result<Self> {
        let variable = |tensor: &Tensor| -> Result<Tensor> {
            Ok(Var::from_tensor(&tensor.to_dtype(dtype)?.to_device(device)?)?.into_inner())
        };
        Ok(Self {
            xs: variable(&self.xs)?,
            weight: variable(&self.weight)?,
            bias: variable(&self.bias)?,
            gate: variable(&self.gate)?,
        })
    }
}

impl Part {
    /// Returns the output, and the gradients of the sum of its squares.
    fn run(self, operands: &Operands) -> Result<Vec<Tensor>> {
        let Operands { xs, weight, bias, gate } = operands;
        let rotary = |style| {
            let config = RopeConfig::new(10_000.0).with_style(style);
            RotaryEmbedding::new(&config, xs.dim(3)?)?.apply_from(&xs.transpose(1, 2)?, 3)
        };
        let weight = || weight.clone();
        let (output, variables) = match self {
            Self::RmsNorm => (RmsNorm::new(weight(), EPS)?.forward(xs)?, vec![xs, &operands.weight]),
            Self::RmsNormPlusOne => (RmsNorm::plus_one(weight(), EPS)?.forward(xs)?, vec![xs, &operands.weight]),
            Self::LayerNorm => {
                let norm = LayerNorm::new(weight(), bias.clone(), EPS)?;
                (norm.forward(xs)?, vec![xs, &operands.weight, bias])
            }
            Self::GatedRmsNorm => {
                let norm = RmsNorm::new(weight(), EPS)?;
                (norm.forward_gated(xs, gate, GateActivation::Silu)?, vec![xs, &operands.weight, gate])
            }
            Self::RotaryHalves => (rotary(RopeStyle::RotateHalf)?, vec![xs]),
            Self::RotaryInterleaved => (rotary(RopeStyle::Interleaved)?, vec![xs]),
        };
        let mut results = vec![output.detach()];
        results.extend(gradients(&output.sqr()?.sum_all()?, &variables)?);
        Ok(results)
    }
}
