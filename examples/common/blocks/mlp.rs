//! The MLP of a block.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Activation, seq};

pub struct Mlp {
    /// What comes before `down`, with its activation.
    up: Box<dyn Module>,
    down: PackedLinear,
}

impl Mlp {
    /// `down(up(x))`.
    pub fn new(up: impl Module + 'static, down: PackedLinear) -> Self {
        Self { up: Box::new(up), down }
    }

    /// `down(activation(up(x)))`.
    pub fn plain([up, down]: [PackedLinear; 2], activation: Activation) -> Self {
        match up.clone().with_activation(activation) {
            Ok(up) => Self::new(up, down),
            // One that does not run within the product.
            Err(_) => Self::new(seq().add(up).add(activation), down),
        }
    }

    /// `down(activation(gate(x)) * up(x))`.
    pub fn gated([gate, up, down]: [PackedLinear; 3], activation: Activation) -> Result<Self> {
        Ok(Self::new(PackedGatedLinear::new(gate, up, activation)?, down))
    }

    pub fn inner_width(&self) -> usize {
        self.down.in_dim()
    }

    /// Plus a residual, if there is one.
    pub fn forward(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let hidden = self.up.forward(xs)?;
        match residual {
            Some(residual) => self.down.forward_with_residual(&hidden, residual),
            None => self.down.forward(&hidden),
        }
    }
}
