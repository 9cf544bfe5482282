//! The gate of a layer's output: a factor on each head's context, computed from the queries' input.

use candle_core::{Result, Tensor};
use candle_nn::ops;
use serde::{Deserialize, Serialize};

use crate::base::accumulation_dtype;

/// What a gate's projection becomes before it multiplies the context.
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
    /// Of each number, in the dtype of `xs`.
    pub fn of(self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Sigmoid => ops::sigmoid(xs),
            // max(x, 0) + ln(1 + e^-|x|), which does not overflow.
            Self::Softplus => xs.relu()? + (xs.abs()?.neg()?.exp()? + 1.0)?.log()?,
            Self::Silu => xs.silu(),
        }
    }

    /// Of one number, and its derivative.
    pub fn with_slope(self, x: f32) -> (f32, f32) {
        let sigmoid = 1.0 / (1.0 + (-x).exp());
        match self {
            Self::Sigmoid => (sigmoid, sigmoid * (1.0 - sigmoid)),
            Self::Softplus => (x.max(0.0) + (-x.abs()).exp().ln_1p(), sigmoid),
            Self::Silu => (x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))),
        }
    }

    /// A context (B, T, H, D_v) times the gate whose projection is (B, T, H, D_v) or (B, T, H, 1), in the context's
    /// dtype.
    pub fn gate(self, context: &Tensor, projected: &Tensor) -> Result<Tensor> {
        let dtype = accumulation_dtype(context.dtype());
        let factors = self.of(&projected.to_dtype(dtype)?)?;
        context.to_dtype(dtype)?.broadcast_mul(&factors)?.to_dtype(context.dtype())
    }
}

/// What one number of a gate multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GateScope {
    /// One entry of one head's context: a gate has H·D_v numbers.
    Elementwise,
    /// A head's whole context: a gate has H numbers.
    PerHead,
}

/// Where a checkpoint keeps the projection of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GateLayout {
    /// In the query projection, whose rows are, head by head, the D of the query and then those of the gate. It has a
    /// bias where the query projection has one.
    FusedWithQuery,
    /// In one of its own, `gate_proj` (also read as `g_proj`).
    Separate {
        /// Whether it has a bias.
        bias: bool,
    },
}

/// A gate on a layer's output: `context · activation(W x)` before the output projection, where x is the input that
/// queries are made from (Qwen3-Next, AFMoE; <https://arxiv.org/abs/2505.06708>).
///
/// ```
/// use candle_attention::{GateActivation, GateLayout, GateScope, MultiHeadAttentionConfig, OutputGate};
/// let gate = OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::Elementwise, layout: GateLayout::FusedWithQuery };
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_output_gate(gate);
/// cfg.validate().expect("the numbers fit together");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputGate {
    /// Sigmoid or softplus.
    pub activation: GateActivation,
    /// A number for each entry or for each head.
    pub scope: GateScope,
    /// The projection that computes it.
    pub layout: GateLayout,
}

impl OutputGate {
    /// The numbers of a gate for each head, whose values are `value_head_dim` wide.
    pub fn width(self, value_head_dim: usize) -> usize {
        if self.scope == GateScope::PerHead { 1 } else { value_head_dim }
    }
}
