//! Output gates: factors of each head's attention output, computed from the queries' input.

use candle_attention_cuda::Activation;
use candle_core::{Result, Tensor};
use candle_nn::ops;
use serde::{Deserialize, Deserializer, Serialize};

use crate::base::{accumulation_dtype, variant};
use crate::cuda_gate::CudaGate;
use crate::metal_rows;

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

    /// Returns the activation of the CUDA kernels.
    pub(crate) fn kernel(self) -> Activation {
        match self {
            Self::Sigmoid => Activation::Sigmoid,
            Self::Softplus => Activation::Softplus,
            Self::Silu => Activation::Silu,
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
        if output.device().is_cuda()
            && let Some(call) = CudaGate::plan(projected, output, self.kernel())
        {
            return call.run();
        }
        if output.device().is_metal()
            && let Some(gated) = metal_rows::gate(projected, output, self.kernel())
        {
            return gated;
        }
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
    #[serde(deserialize_with = "activation")]
    pub activation: GateActivation,
    /// Whether the gate has an entry for each entry of the output or for each head.
    #[serde(deserialize_with = "scope")]
    pub scope: GateScope,
    /// How a checkpoint stores the gate's projection.
    #[serde(deserialize_with = "layout")]
    pub layout: GateLayout,
}

/// Reads the option `activation`.
fn activation<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<GateActivation, D::Error> {
    variant(value, "activation")
}

/// Reads the option `scope`.
fn scope<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<GateScope, D::Error> {
    variant(value, "scope")
}

/// Reads the option `layout`.
fn layout<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<GateLayout, D::Error> {
    variant(value, "layout")
}

impl OutputGate {
    /// Returns the number of gate entries for each head. `value_head_dim` is D_v.
    pub fn width(self, value_head_dim: usize) -> usize {
        if self.scope == GateScope::PerHead { 1 } else { value_head_dim }
    }
}

#[cfg(test)]
mod tests {
    use candle_attention_cuda::without_programs;
    use candle_core::{D, DType, Device, Var};
    use candle_nn::Activation as Function;

    use super::*;

    /// The inputs of a test.
    struct GateInputs {
        gates: Var,
        values: Var,
        upstream: Tensor,
    }

    /// Returns the product and the gradients of gates and values.
    fn with_gradients(inputs: &GateInputs, output: Tensor) -> Result<Vec<Tensor>> {
        let gradients = (&output * &inputs.upstream)?.sum_all()?.backward()?;
        let of = |variable: &Var| gradients.get(variable).cloned().expect("a gradient");
        Ok(vec![of(&inputs.gates), of(&inputs.values), output])
    }

    /// Compares the kernels on the emulator with separate operations of Candle.
    fn compare(
        gate_width: usize,
        activation: Activation,
        separate: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let random = |width: usize| Tensor::randn(0f32, 1., (2, 5, 3, width), &Device::Cpu);
        let (gates, values) = (Var::from_tensor(&random(gate_width)?)?, Var::from_tensor(&random(70)?)?);
        let upstream = Tensor::randn(0f32, 1., (2, 3, 5, 70), &Device::Cpu)?;
        let inputs = GateInputs { gates, values, upstream };
        let (gate_view, value_view) = (inputs.gates.transpose(1, 2)?, inputs.values.transpose(1, 2)?);
        let call = CudaGate::plan(&gate_view, &value_view, activation).expect("the kernels run the call");
        let own = with_gradients(&inputs, call.run()?)?;
        let expected = with_gradients(&inputs, separate(&gate_view, &value_view)?)?;
        for (n, (result, exact)) in own.iter().zip(&expected).enumerate() {
            let error = (result - exact)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(error < 2e-5, "{activation:?}, gate of {gate_width}: result {n} is off by {error:e}");
        }
        Ok(())
    }

    #[test]
    fn cuda_gate_of_attention_output_matches_separate_operations() -> Result<()> {
        for gate in [GateActivation::Sigmoid, GateActivation::Softplus, GateActivation::Silu] {
            for width in [1, 70] {
                compare(width, gate.kernel(), |gates, values| gate.gate(values, gates))?;
            }
        }
        Ok(())
    }

    #[test]
    fn cuda_gate_of_feed_forward_layer_matches_separate_operations() -> Result<()> {
        let functions = [
            (Activation::Relu, Function::Relu),
            (Activation::Gelu, Function::Gelu),
            (Activation::GeluTanh, Function::NewGelu),
        ];
        for (activation, function) in functions {
            compare(70, activation, |gates, values| gates.contiguous()?.apply(&function)?.mul(values))?;
        }
        Ok(())
    }

    #[test]
    fn cuda_gate_of_another_shape_or_dtype_is_not_planned() -> Result<()> {
        let values = Tensor::zeros((2, 3, 8), DType::F32, &Device::Cpu)?;
        assert!(CudaGate::plan(&values, &values, Activation::Silu).is_some());
        assert!(CudaGate::plan(&values.narrow(D::Minus1, 0, 2)?, &values, Activation::Silu).is_none());
        assert!(CudaGate::plan(&values.to_dtype(DType::F16)?, &values, Activation::Silu).is_none());
        without_programs("no memory", || {
            assert!(CudaGate::plan(&values, &values, Activation::Silu).is_none(), "a kernel that does not compile");
        });
        Ok(())
    }
}
