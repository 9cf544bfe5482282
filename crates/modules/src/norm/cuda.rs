//! Norms by their CUDA kernels, as operations in Candle's graph: a norm alone, and a norm times an activated gate.

use candle_attention_cuda::{GatedNormCall, GatedNormGradients, NormCall, NormGradients, NormParameterGradients};
use candle_core::{Result, Tensor};

use super::passes::RowNorm;
use super::rows::Affine;
use crate::base::record;
use crate::base::rowwise::{with_contiguous_rows, with_four_dimensions};
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
            activation: activation.kernel(),
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

/// A norm that the kernels support, in the form that they read.
pub(super) struct CudaNorm {
    /// (.., D), with contiguous rows.
    xs: Tensor,
    affine: Affine,
    kernels: NormCall,
}

impl CudaNorm {
    /// Returns the norm of rows (D,), (T, D), (B, T, D) or (B, T, H, D); `None` if the kernels do not support it.
    pub fn plan(norm: RowNorm, xs: &Tensor, affine: &Affine) -> Option<Self> {
        let xs = with_contiguous_rows(xs).ok()?;
        let kernels = NormCall {
            xs: with_four_dimensions(&xs.detach()).ok()?,
            weight: affine.weight.detach(),
            bias: affine.bias.as_ref().map(Tensor::detach),
            subtracts_mean: norm.subtracts_mean,
            eps: norm.eps.into(),
        };
        kernels.plan().ok()?;
        Some(Self { xs, affine: affine.clone(), kernels })
    }

    /// Returns the output, contiguous, in the shape of the rows.
    pub fn run(self) -> Result<Tensor> {
        let Self { xs, affine: Affine { weight, bias }, kernels } = self;
        let output = kernels.forward()?;
        let is_tracked = weight.track_op() || bias.as_ref().is_some_and(Tensor::track_op);
        let wanted = if is_tracked { NormParameterGradients::All } else { NormParameterGradients::None };
        let shape = xs.shape().clone();
        record("norm", &[Some(&xs), Some(&weight), bias.as_ref()], output, xs.shape(), move |_, gradient| {
            let gradient = with_four_dimensions(&with_contiguous_rows(gradient)?)?;
            let found: NormGradients = kernels.backward(&gradient, wanted)?;
            Ok(vec![Some(found.xs.reshape(&shape)?), found.weight, found.bias])
        })
    }
}
