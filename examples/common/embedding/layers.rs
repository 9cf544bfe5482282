//! Layers after the model, on the vectors of texts or of tokens: Dense, LayerNorm.

use std::path::Path;

use candle_attention::weights::Checkpoint;
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Activation, LayerNorm, Linear, VarBuilder, layer_norm};

use super::fields::Fields;
use crate::common::EXAMPLE;

/// The activations of torch that are known, by the last name of their class.
const ACTIVATIONS: [&str; 6] = ["GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh"];

/// A projection with an activation, and with a residual if the module has one.
pub struct Dense {
    linear: Linear,
    activation: &'static str,
    residual: Residual,
}

enum Residual {
    None,
    Input,
    Projected(Linear),
}

/// The keys of a Dense module, without its input and output.
pub const DENSE_KEYS: [&str; 5] = ["in_features", "out_features", "bias", "activation_function", "use_residual"];

impl Dense {
    /// Makes a projection by a weight (out, in), without a bias and an activation.
    pub fn projection(weight: Tensor) -> Self {
        Self { linear: Linear::new(weight, None), activation: "Identity", residual: Residual::None }
    }

    /// Loads a module from its folder.
    pub fn load(fields: &Fields, folder: &Path, device: &Device) -> Result<Self> {
        let vb = weights(folder, device)?;
        let Some(inputs) = fields.count("in_features", "inputs")? else {
            return fields.fail("in_features", "a number");
        };
        let Some(outputs) = fields.count("out_features", "outputs")? else {
            return fields.fail("out_features", "a number");
        };
        let class = fields.text("activation_function")?.unwrap_or("torch.nn.modules.activation.Tanh");
        let name = class.rsplit('.').next().unwrap_or_default();
        let Some(activation) = ACTIVATIONS.into_iter().find(|known| *known == name) else {
            return fields.fail("activation_function", &format!("one of {}", ACTIVATIONS.join(", ")));
        };
        let at = vb.pp("linear");
        let linear = if fields.flag("bias", true)? {
            candle_nn::linear(inputs, outputs, at)?
        } else {
            candle_nn::linear_no_bias(inputs, outputs, at)?
        };
        let residual = match fields.flag("use_residual", false)? {
            false => Residual::None,
            true if inputs == outputs => Residual::Input,
            true => Residual::Projected(candle_nn::linear_no_bias(inputs, outputs, vb.pp("residual"))?),
        };
        Ok(Self { linear, activation, residual })
    }

    /// Computes vectors (N, out) of vectors (N, in), both in f32.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (_, inputs) = self.linear.weight().dims2()?;
        if xs.dim(1)? != inputs {
            bail!("[{EXAMPLE}] a Dense module has vectors of {} numbers, expected {inputs}", xs.dim(1)?)
        }
        let projected = self.linear.forward(xs)?;
        let activated = match self.activation {
            "GELU" => projected.gelu_erf()?,
            "ReLU" => projected.relu()?,
            "SiLU" => projected.silu()?,
            "Sigmoid" => Activation::Sigmoid.forward(&projected)?,
            "Tanh" => projected.tanh()?,
            _ => projected, // Identity
        };
        match &self.residual {
            Residual::None => Ok(activated),
            Residual::Input => activated + xs,
            Residual::Projected(residual) => activated + residual.forward(xs)?,
        }
    }
}

/// Loads a LayerNorm module from its folder.
pub fn load_layer_norm(fields: &Fields, folder: &Path, device: &Device) -> Result<LayerNorm> {
    fields.only(&["dimension"])?;
    let Some(width) = fields.count("dimension", "numbers")? else { return fields.fail("dimension", "a number") };
    layer_norm(width, 1e-5, weights(folder, device)?.pp("norm"))
}

/// Normalises vectors (N, E) to length 1; zeros stay zeros.
pub fn normalized(vectors: &Tensor) -> Result<Tensor> {
    // The smallest norm in PyTorch's `normalize`.
    let norms = vectors.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12)?;
    vectors.broadcast_div(&norms)
}

/// Opens the weights of a module, in f32.
fn weights(folder: &Path, device: &Device) -> Result<VarBuilder<'static>> {
    Checkpoint::open(folder)?.var_builder(DType::F32, device)
}
