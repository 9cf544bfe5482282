//! Two projections of one input, one of which gates the other.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::Activation;

use super::forward::{Columns, kernel_activation};
use super::{Kind, PackedLinear};

const OP: &str = "packed_gated_linear";

/// `activation(gate(x)) · up(x)`: the first half of a gated feed-forward layer (SwiGLU, GeGLU), as one pass over `x`.
///
/// Where both are packed, a tile of the gate and the same tile of the other are multiplied out of a cache, in f32, and
/// rounded once. Otherwise, and for an input that is tracked for gradients, it is three operations.
///
/// ```
/// use candle_attention::{PackedGatedLinear, PackedLinear};
/// use candle_core::{Device, Module, Tensor};
/// use candle_nn::{Activation, Linear};
/// # fn main() -> candle_core::Result<()> {
/// let linear = || Ok::<_, candle_core::Error>(Linear::new(Tensor::randn(0f32, 1., (48, 16), &Device::Cpu)?, None));
/// let (gate, up) = (linear()?, linear()?);
/// let both = PackedGatedLinear::new(gate.clone().try_into()?, up.clone().try_into()?, Activation::Silu)?;
///
/// let xs = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let expected = (gate.forward(&xs)?.silu()? * up.forward(&xs)?)?;
/// let difference = (both.forward(&xs)? - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-3);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PackedGatedLinear {
    gate: PackedLinear,
    up: PackedLinear,
}

impl PackedGatedLinear {
    /// Of two projections without activations, of one shape, dtype and device.
    ///
    /// # Errors
    /// For projections that differ or have activations of their own, and for an activation that
    /// [`PackedLinear::with_activation`] does not take.
    pub fn new(gate: PackedLinear, up: PackedLinear, activation: Activation) -> Result<Self> {
        for (name, linear) in [("gate", &gate), ("up", &up)] {
            if let Some(own) = linear.activation() {
                bail!("[{OP}] {name} has the activation {own:?} of its own, expected none")
            }
        }
        let found =
            |linear: &PackedLinear| (linear.out_dim(), linear.in_dim(), linear.dtype(), linear.device().location());
        if found(&gate) != found(&up) {
            bail!("[{OP}] up is {:?}, expected the gate's {:?}", found(&up), found(&gate))
        }
        Ok(Self { gate: gate.with_activation(activation)?, up })
    }

    /// The same with what variables hold now, packed, and nothing tracked for gradients.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { gate: self.gate.freeze()?, up: self.up.freeze()? })
    }

    /// The width of the output.
    pub fn out_dim(&self) -> usize {
        self.gate.out_dim()
    }

    /// The width of the input.
    pub fn in_dim(&self) -> usize {
        self.gate.in_dim()
    }
}

/// (.., in) gives (.., out) in the input's dtype, which is the weights', or f32 over weights in half precision.
impl Module for PackedGatedLinear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let columns = 0..self.out_dim();
        if let (Kind::Packed(gate), Kind::Packed(up), Some(activation)) =
            (&self.gate.kind, &self.up.kind, self.gate.activation)
            && gate.is_like(up)
            && !xs.track_op()
        {
            self.gate.check(xs, &columns)?;
            let activation = Some(kernel_activation(activation)?);
            return Columns { packed: gate.clone(), columns, activation, up: Some(up.clone()) }.forward(xs, None);
        }
        self.gate.forward(xs)?.mul(&self.up.forward(xs)?)
    }
}
