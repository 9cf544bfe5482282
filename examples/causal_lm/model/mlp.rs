//! Linear layers as a checkpoint stores them, and the MLP of a block.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Activation, Linear, VarBuilder, seq};

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
    /// `gate * sigmoid(alpha * gate) * (up + 1)`, where `gate` is at most `limit`, and `up` between `-limit` and
    /// `limit`.
    Clamped { alpha: f64, limit: f64 },
}

pub struct Mlp {
    /// What comes before `down`.
    up: Box<dyn Module>,
    down: PackedLinear,
}

impl Mlp {
    pub fn new(up: &Linear, between: Between, down: &Linear) -> Result<Self> {
        let up: Box<dyn Module> = match between {
            Between::Plain(activation) => {
                let up = PackedLinear::from_linear(up)?;
                match up.clone().with_activation(activation) {
                    Ok(up) => Box::new(up),
                    Err(_) => Box::new(seq().add(up).add(activation)),
                }
            }
            Between::Gated(activation) => {
                let inner = up.weight().dim(0)? / 2;
                Box::new(gated(&rows(up, 0, inner)?, &rows(up, inner, inner)?, activation)?)
            }
            Between::Clamped { alpha, limit } => {
                Box::new(ClampedGlu { gate_up: PackedLinear::from_linear(up)?, alpha, limit })
            }
        };
        Ok(Self { up, down: PackedLinear::from_linear(down)? })
    }

    /// An MLP whose gate is a weight of its own or has one with `up`, `gate_up_proj`.
    pub fn gated(vb: &VarBuilder, names: [&str; 3], activation: Activation) -> Result<Self> {
        let [gate, up, down] = names;
        let down = linear(&vb.pp(down))?;
        if vb.contains_tensor("gate_up_proj.weight") {
            return Self::new(&linear(&vb.pp("gate_up_proj"))?, Between::Gated(activation), &down);
        }
        let up = gated(&linear(&vb.pp(gate))?, &linear(&vb.pp(up))?, activation)?;
        Ok(Self { up: Box::new(up), down: PackedLinear::from_linear(&down)? })
    }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(xs)?)
    }
}

fn gated(gate: &Linear, up: &Linear, activation: Activation) -> Result<PackedGatedLinear> {
    PackedGatedLinear::new(PackedLinear::from_linear(gate)?, PackedLinear::from_linear(up)?, activation)
}

/// Some of the outputs of a linear layer.
fn rows(linear: &Linear, start: usize, len: usize) -> Result<Linear> {
    let bias = linear.bias().map(|bias| bias.narrow(0, start, len)).transpose()?;
    Ok(Linear::new(linear.weight().narrow(0, start, len)?, bias))
}

/// [`Between::Clamped`], and the product before it.
struct ClampedGlu {
    gate_up: PackedLinear,
    alpha: f64,
    limit: f64,
}

impl Module for ClampedGlu {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let inner = self.gate_up.out_dim() / 2;
        let gate = self.gate_up.forward_columns(xs, 0..inner)?.minimum(self.limit)?;
        let up = self.gate_up.forward_columns(xs, inner..2 * inner)?.clamp(-self.limit, self.limit)?;
        let sigmoid = candle_nn::ops::sigmoid(&(&gate * self.alpha)?)?;
        (gate * sigmoid)? * (up + 1.0)?
    }
}
