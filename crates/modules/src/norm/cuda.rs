//! The gated norm by its CUDA kernels, as an operation in Candle's graph.

use candle_attention_cuda::{Activation, GatedNormCall, GatedNormGradients};
use candle_core::{Result, Tensor};

use super::passes::RowNorm;
use crate::base::record;
use crate::base::rowwise::with_contiguous_rows;
use crate::gate::GateActivation;

/// A norm times an activated gate that the kernels support, in the form that they read.
pub(super) struct CudaGatedNorm {
    /// (B, T, H, D), with contiguous rows.
    xs: Tensor,
    /// (D,), contiguous.
    weight: Tensor,
    /// (B, T, H, D), with contiguous rows.
    gate: Tensor,
    kernels: GatedNormCall,
}

impl CudaGatedNorm {
    /// Returns the norm of rows (B, T, H, D) times an activated gate; `None` if the kernels do not support it. `weight`
    /// is (D,), contiguous.
    pub fn plan(
        norm: RowNorm,
        xs: &Tensor,
        weight: &Tensor,
        gate: &Tensor,
        activation: GateActivation,
    ) -> Option<Self> {
        if norm.subtracts_mean {
            return None;
        }
        let xs = with_contiguous_rows(xs).ok()?;
        let gate = with_contiguous_rows(gate).ok()?;
        let kernels = GatedNormCall {
            xs: xs.detach(),
            gate: gate.detach(),
            weight: weight.detach(),
            activation: match activation {
                GateActivation::Sigmoid => Activation::Sigmoid,
                GateActivation::Softplus => Activation::Softplus,
                GateActivation::Silu => Activation::Silu,
            },
            eps: norm.eps.into(),
        };
        kernels.plan().ok()?;
        Some(Self { xs, weight: weight.clone(), gate, kernels })
    }

    /// Returns the output, contiguous.
    pub fn run(self) -> Result<Tensor> {
        let Self { xs, weight, gate, kernels } = self;
        let output = kernels.forward()?;
        let operands = [Some(&xs), Some(&weight), Some(&gate)];
        record("gated-norm", &operands, output, xs.shape(), move |_, gradient| {
            let gradients: GatedNormGradients = kernels.backward(&with_contiguous_rows(gradient)?)?;
            Ok(vec![Some(gradients.xs), Some(gradients.weight), Some(gradients.gate)])
        })
    }
}
