//! Norms by their CUDA kernels, as operations in Candle's graph: a norm alone, and a norm times an activated gate.

use candle_attention_cuda::{GatedNormCall, GatedNormGradients, NormCall, NormGradients, NormParameterGradients};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::passes::RowNorm;
use super::rows::Affine;
use crate::base::first_use::{
    ComparedResult, FirstUseCase, ResultWithGradients, case_numbers, variables_in, variables_on,
};
use crate::base::record;
use crate::base::rowwise::{with_contiguous_rows, with_four_dimensions};
use crate::gate::GateActivation;

/// The case of norms, with rows that a warp computes and wider ones.
pub(crate) const NORM_CASE: FirstUseCase = FirstUseCase { operation: "norm", is_new: false, run: norm_case };

/// The case of norms times activated gates.
pub(crate) const GATED_NORM_CASE: FirstUseCase =
    FirstUseCase { operation: "gated norm", is_new: false, run: gated_norm_case };

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
        let call = Self::unchecked(norm, xs, weight, gate, activation).ok()?;
        GATED_NORM_CASE.check(xs.device(), xs.dtype()).ok()?;
        Some(call)
    }

    /// Returns the norm as [`plan`](Self::plan) does, whether or not the kernels passed their check.
    fn unchecked(
        norm: RowNorm,
        xs: &Tensor,
        weight: &Tensor,
        gate: &Tensor,
        activation: GateActivation,
    ) -> Result<Self> {
        let xs = with_contiguous_rows(xs)?;
        let gate = with_contiguous_rows(gate)?;
        let kernels = gated_norm_call(norm, &xs, weight, &gate, activation);
        kernels.plan()?;
        Ok(Self { xs, weight: weight.clone(), gate, kernels })
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

/// Returns the call of the kernels for rows and gates (B, T, H, D), each of which is contiguous.
pub(super) fn gated_norm_call(
    norm: RowNorm,
    xs: &Tensor,
    weight: &Tensor,
    gate: &Tensor,
    activation: GateActivation,
) -> GatedNormCall {
    GatedNormCall {
        xs: xs.detach(),
        gate: gate.detach(),
        weight: weight.detach(),
        activation: activation.kernel(),
        eps: norm.eps.into(),
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
        let call = Self::unchecked(norm, xs, affine).ok()?;
        NORM_CASE.check(xs.device(), xs.dtype()).ok()?;
        Some(call)
    }

    /// Returns the norm as [`plan`](Self::plan) does, whether or not the kernels passed their check.
    fn unchecked(norm: RowNorm, xs: &Tensor, affine: &Affine) -> Result<Self> {
        let xs = with_contiguous_rows(xs)?;
        let kernels = norm_call(norm, &xs, affine)?;
        kernels.plan()?;
        Ok(Self { xs, affine: affine.clone(), kernels })
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

/// Returns the call of the kernels for rows (D,), (T, D), (B, T, D) or (B, T, H, D), each of which is contiguous.
pub(super) fn norm_call(norm: RowNorm, xs: &Tensor, affine: &Affine) -> Result<NormCall> {
    Ok(NormCall {
        xs: with_four_dimensions(&xs.detach())?,
        weight: affine.weight.detach(),
        bias: affine.bias.as_ref().map(Tensor::detach),
        subtracts_mean: norm.subtracts_mean,
        eps: norm.eps.into(),
    })
}

/// Computes norms with all gradients by the kernels and by the CPU.
fn norm_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let norm = RowNorm { subtracts_mean: true, eps: 1e-5 };
    let affine =
        |inputs: &[Var]| Affine { weight: inputs[1].as_tensor().clone(), bias: Some(inputs[2].as_tensor().clone()) };
    let mut compared = Vec::new();
    for width in [80, 640] {
        let parameter = |seed: u64| case_numbers(&[width], seed, DType::F32);
        let inputs = [case_numbers(&[2, 3, 3, width], 1, dtype)?, parameter(2)?, parameter(3)?];
        let own = variables_on(device, &inputs)?;
        let other = variables_in(DType::F32, &inputs)?;
        let found = CudaNorm::unchecked(norm, &own[0], &affine(&own))?.run()?;
        let expected = norm.apply(&other[0], &affine(&other))?;
        let names = ["the gradient of the rows", "the gradient of the weight", "the gradient of the bias"];
        compared
            .extend(ResultWithGradients { names: &names, found: &own, expected: &other }.compare(&found, &expected)?);
    }
    Ok(compared)
}

/// Computes a norm times an activated gate with all gradients by the kernels and by the CPU.
fn gated_norm_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let norm = RowNorm { subtracts_mean: false, eps: 1e-5 };
    let rows = |seed: u64| case_numbers(&[2, 3, 3, 80], seed, dtype);
    let inputs = [rows(1)?, case_numbers(&[80], 2, DType::F32)?, rows(3)?];
    let own = variables_on(device, &inputs)?;
    let other = variables_in(DType::F32, &inputs)?;
    let found = CudaGatedNorm::unchecked(norm, &own[0], &own[1], &own[2], GateActivation::Silu)?.run()?;
    let expected = norm.apply_gated(&other[0], &other[1], &other[2], GateActivation::Silu)?;
    let names = ["the gradient of the rows", "the gradient of the weight", "the gradient of the gate"];
    ResultWithGradients { names: &names, found: &own, expected: &other }.compare(&found, &expected)
}
