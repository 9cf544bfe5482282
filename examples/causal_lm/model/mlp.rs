//! Linear layers as a checkpoint stores them, and the MLP of a block.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Activation, seq};

use super::weights::{Divided, Weights};

/// The projections of Llama's MLP: gate, up and down.
pub const LLAMA_MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

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
    pub fn new(up: PackedLinear, between: Between, down: PackedLinear) -> Result<Self> {
        let up: Box<dyn Module> = match between {
            Between::Plain(activation) => match up.clone().with_activation(activation) {
                Ok(up) => Box::new(up),
                Err(_) => Box::new(seq().add(up).add(activation)),
            },
            Between::Gated(activation) => Box::new(JointGlu { gate: up.clone().with_activation(activation)?, up }),
            Between::Clamped { alpha, limit } => Box::new(ClampedGlu { gate_up: up, alpha, limit }),
        };
        Ok(Self { up, down })
    }

    /// An MLP whose gate is a weight of its own.
    pub fn gated([gate, up, down]: [PackedLinear; 3], activation: Activation) -> Result<Self> {
        Ok(Self { up: Box::new(PackedGatedLinear::new(gate, up, activation)?), down })
    }

    /// An MLP whose gate is a weight of its own or has one with `up`, `gate_up_proj`.
    pub fn read_gated(weights: &Weights, names: [&str; 3], activation: Activation) -> Result<Self> {
        let down = weights.pp(names[2]).linear(Divided::Inputs)?;
        if weights.contains_tensor("gate_up_proj.weight") {
            let joint = weights.pp("gate_up_proj");
            // Halves of their own, so that one pass takes both.
            return Self::gated([joint.joint_linear([0, 2])?, joint.joint_linear([1, 2])?, down], activation);
        }
        let [gate, up] = [names[0], names[1]].map(|name| weights.pp(name).linear(Divided::Outputs));
        Self::gated([gate?, up?, down], activation)
    }

    pub fn forward_with_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.down.forward_with_residual(&self.up.forward(xs)?, residual)
    }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(xs)?)
    }
}

/// [`Between::Gated`], and the product before it, a weight of which `up` has no activation.
struct JointGlu {
    gate: PackedLinear,
    up: PackedLinear,
}

impl Module for JointGlu {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let inner = self.up.out_dim() / 2;
        self.gate.forward_columns(xs, 0..inner)? * self.up.forward_columns(xs, inner..2 * inner)?
    }
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
