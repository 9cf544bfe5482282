//! Linear layers as a checkpoint stores them, and the MLP of a block.

use candle_attention::PackedLinear;
use candle_core::{Module, Result, Tensor};
use candle_nn::{Activation, Linear, VarBuilder};

/// The projections of Llama's MLP: gate, up and down.
pub const LLAMA_MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A weight (out, in), and the bias if the checkpoint has one.
pub fn linear(vb: &VarBuilder) -> Result<Linear> {
    with_bias(vb.get_unchecked("weight")?, vb)
}

/// The same of a weight that is stored as (in, out).
pub fn transposed_linear(vb: &VarBuilder) -> Result<Linear> {
    with_bias(vb.get_unchecked("weight")?.t()?.contiguous()?, vb)
}

fn with_bias(weight: Tensor, vb: &VarBuilder) -> Result<Linear> {
    let bias = if vb.contains_tensor("bias") { Some(vb.get(weight.dim(0)?, "bias")?) } else { None };
    Ok(Linear::new(weight, bias))
}

/// What happens between the two products of an MLP.
#[derive(Clone, Copy)]
pub enum Between {
    /// `activation(up)`.
    Plain(Activation),
    /// `activation(gate) * up`, where the rows of `gate` and then those of `up` are one weight.
    Gated(Activation),
    /// `gate * sigmoid(alpha * gate) * (up + 1)`, where `gate` is at most `limit`, and `up` between `-limit` and `limit`.
    Clamped { alpha: f64, limit: f64 },
}

pub struct Mlp {
    up: PackedLinear,
    between: Between,
    down: PackedLinear,
}

impl Mlp {
    pub fn new(up: &Linear, between: Between, down: &Linear) -> Result<Self> {
        Ok(Self { up: PackedLinear::from_linear(up)?, between, down: PackedLinear::from_linear(down)? })
    }

    /// An MLP whose gate is a weight of its own or has one with `up`, `gate_up_proj`.
    pub fn gated(vb: &VarBuilder, names: [&str; 3], activation: Activation) -> Result<Self> {
        let [gate, up, down] = names;
        let both = if vb.contains_tensor("gate_up_proj.weight") {
            linear(&vb.pp("gate_up_proj"))?
        } else {
            let (gate, up) = (linear(&vb.pp(gate))?, linear(&vb.pp(up))?);
            let bias = gate.bias().zip(up.bias()).map(|(gate, up)| Tensor::cat(&[gate, up], 0)).transpose()?;
            Linear::new(Tensor::cat(&[gate.weight(), up.weight()], 0)?, bias)
        };
        Self::new(&both, Between::Gated(activation), &linear(&vb.pp(down))?)
    }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let inner = self.down.in_dim();
        let gate = || self.up.forward_columns(xs, 0..inner);
        let up = || self.up.forward_columns(xs, inner..2 * inner);
        self.down.forward(&match self.between {
            Between::Plain(activation) => activation.forward(&self.up.forward(xs)?)?,
            Between::Gated(activation) => (activation.forward(&gate()?)? * up()?)?,
            Between::Clamped { alpha, limit } => {
                let gate = gate()?.minimum(limit)?;
                let sigmoid = candle_nn::ops::sigmoid(&(&gate * alpha)?)?;
                ((gate * sigmoid)? * (up()?.clamp(-limit, limit)? + 1.0)?)?
            }
        })
    }
}
