//! Output gates: factors of each head's attention output, computed from the queries' input.

use candle_core::{Result, Tensor};
use candle_nn::ops;
use serde::{Deserialize, Serialize};

use crate::base::accumulation_dtype;

/// The activation of a gate's projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GateActivation {
    /// 1 / (1 + e^-x) (Qwen3-Next, AFMoE).
    Sigmoid,
    /// ln(1 + e^x) (Laguna).
    Softplus,
    /// x / (1 + e^-x) (the linear attention of Qwen3-Next).
    Silu,
}

impl GateActivation {
    /// Applies the activation to each number, in the dtype of `xs`.
    pub fn apply(self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Sigmoid => ops::sigmoid(xs),
            // max(x, 0) + ln(1 + e^-|x|), which does not overflow.
            Self::Softplus => xs.relu()? + (xs.abs()?.neg()?.exp()? + 1.0)?.log()?,
            Self::Silu => xs.silu(),
        }
    }

    /// Returns the activation of one number and its derivative.
    #[inline]
    pub fn value_and_slope(self, x: f32) -> ValueAndSlope {
        let sigmoid = 1.0 / (1.0 + (-x).exp());
        match self {
            Self::Sigmoid => ValueAndSlope { value: sigmoid, slope: sigmoid * (1.0 - sigmoid) },
            Self::Softplus => ValueAndSlope { value: x.max(0.0) + (-x.abs()).exp().ln_1p(), slope: sigmoid },
            Self::Silu => ValueAndSlope { value: x * sigmoid, slope: sigmoid * (1.0 + x * (1.0 - sigmoid)) },
        }
    }

    /// Multiplies the attention output (B, T, H, D_v) by the activated gate. `projected`, the gate's projection, is
    /// (B, T, H, D_v) or (B, T, H, 1). The result has the dtype of `output`.
    pub fn gate(self, output: &Tensor, projected: &Tensor) -> Result<Tensor> {
        let dtype = accumulation_dtype(output.dtype());
        let factors = self.apply(&projected.to_dtype(dtype)?)?;
        output.to_dtype(dtype)?.broadcast_mul(&factors)?.to_dtype(output.dtype())
    }
}

/// The value and the derivative of an activation at one number.
#[derive(Debug, Clone, Copy)]
pub struct ValueAndSlope {
    /// f(x).
    pub value: f32,
    /// f'(x).
    pub slope: f32,
}

/// The part of the attention output that one entry of a gate multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GateScope {
    /// One entry of one head's attention output. The gate has H·D_v entries per token.
    Elementwise,
    /// The whole attention output of one head. The gate has H entries per token.
    PerHead,
}

/// How a checkpoint stores the projection of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GateLayout {
    /// In the rows of the query projection: for each head, first the D rows of the query, then the rows of the gate.
    /// The gate has a bias if the query projection has one.
    FusedWithQuery,
    /// In a separate projection, `gate_proj` (also read as `g_proj`).
    Separate {
        /// Whether the projection has a bias.
        bias: bool,
    },
}

/// A gate on the attention output: `output · activation(W x)`, before the output projection. x is the input of the
/// query projection (Qwen3-Next, AFMoE; <https://arxiv.org/abs/2505.06708>).
///
/// ```
/// use candle_attention::{GateActivation, GateLayout, GateScope, MultiHeadAttentionConfig, OutputGate};
/// let gate = OutputGate {
///     activation: GateActivation::Sigmoid,
///     scope: GateScope::Elementwise,
///     layout: GateLayout::FusedWithQuery,
/// };
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_output_gate(gate);
/// cfg.validate().expect("the numbers fit together");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputGate {
    /// The activation of the gate's projection.
    pub activation: GateActivation,
    /// Whether the gate has an entry for each entry of the output or for each head.
    pub scope: GateScope,
    /// How a checkpoint stores the gate's projection.
    pub layout: GateLayout,
}

impl OutputGate {
    /// Returns the number of gate entries for each head. `value_head_dim` is D_v.
    pub fn width(self, value_head_dim: usize) -> usize {
        if self.scope == GateScope::PerHead { 1 } else { value_head_dim }
    }
}
