//! Norms by their Metal kernels: a norm alone, and a norm times an activated gate. Nothing is tracked for gradients.

use candle_attention_metal::MetalRows;
use candle_core::{DType, Device, Result, Tensor};

use super::cuda::{gated_norm_call, norm_call};
use super::passes::RowNorm;
use super::rows::Affine;
use crate::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use crate::base::rowwise::with_contiguous_rows;
use crate::gate::GateActivation;
use crate::metal_rows::run_checked;

/// The case of norms, with rows that a simdgroup computes and wider ones.
pub(crate) const METAL_NORM_CASE: FirstUseCase =
    FirstUseCase { operation: "norm on Metal", is_new: true, run: norm_case };

/// The case of norms times activated gates.
pub(crate) const METAL_GATED_NORM_CASE: FirstUseCase =
    FirstUseCase { operation: "gated norm on Metal", is_new: true, run: gated_norm_case };

/// Returns the norm of rows (D,), (T, D), (B, T, D) or (B, T, H, D), contiguous, in the shape of the rows; `None` if no
/// kernel computes it.
pub(super) fn norm_on_metal(norm: RowNorm, xs: &Tensor, affine: &Affine) -> Option<Result<Tensor>> {
    let is_tracked = [Some(xs), Some(&affine.weight), affine.bias.as_ref()].into_iter().flatten().any(Tensor::track_op);
    if is_tracked || affine.weight.dtype() != DType::F32 {
        return None;
    }
    let normed = run_checked(&metal_call(norm, xs, affine).ok()?, &METAL_NORM_CASE, xs)?;
    Some(normed.and_then(|rows| rows.reshape(xs.shape())))
}

fn metal_call(norm: RowNorm, xs: &Tensor, affine: &Affine) -> Result<MetalRows> {
    norm_call(norm, &with_contiguous_rows(xs)?, affine).map(MetalRows::Norm)
}

/// Returns the norm of rows (B, T, H, D) times an activated gate, contiguous; `None` if no kernel computes it. `weight`
/// is (D,), contiguous.
pub(super) fn gated_norm_on_metal(
    norm: RowNorm,
    xs: &Tensor,
    weight: &Tensor,
    gate: &Tensor,
    activation: GateActivation,
) -> Option<Result<Tensor>> {
    if norm.subtracts_mean || weight.dtype() != DType::F32 || [xs, weight, gate].into_iter().any(Tensor::track_op) {
        return None;
    }
    run_checked(&gated_call(norm, xs, weight, gate, activation).ok()?, &METAL_GATED_NORM_CASE, xs)
}

fn gated_call(
    norm: RowNorm,
    xs: &Tensor,
    weight: &Tensor,
    gate: &Tensor,
    activation: GateActivation,
) -> Result<MetalRows> {
    let call = gated_norm_call(norm, &with_contiguous_rows(xs)?, weight, &with_contiguous_rows(gate)?, activation);
    Ok(MetalRows::GatedNorm(call))
}

/// Computes norms times gates of each activation, by the kernel and by the CPU.
fn gated_norm_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let norm = RowNorm { subtracts_mean: false, eps: 1e-5 };
    let mut compared = Vec::new();
    for (name, width, activation) in
        [("the norm times SiLU", 80, GateActivation::Silu), ("the norm times a sigmoid", 128, GateActivation::Sigmoid)]
    {
        let xs = case_numbers(&[2, 3, 3, width], 1, dtype)?;
        let weight = case_numbers(&[width], 2, DType::F32)?;
        let gate = case_numbers(&[2, 3, 3, width], 3, dtype)?;
        let own = |tensor: &Tensor| tensor.to_device(device);
        let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32);
        let found = gated_call(norm, &own(&xs)?, &own(&weight)?, &own(&gate)?, activation)?.forward()?;
        let expected = norm.apply_gated(&wide(&xs)?, &weight, &wide(&gate)?, activation)?;
        compared.push(ComparedResult { name, found, expected });
    }
    Ok(compared)
}

/// Computes norms with and without a mean by the kernel and by the CPU.
fn norm_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let mut compared = Vec::new();
    for (name, width, subtracts_mean, has_bias) in
        [("the norm of short rows", 80, true, true), ("the norm of long rows", 640, false, false)]
    {
        let norm = RowNorm { subtracts_mean, eps: 1e-5 };
        let xs = case_numbers(&[2, 3, 3, width], 1, dtype)?;
        let (weight, bias) = (case_numbers(&[width], 2, DType::F32)?, case_numbers(&[width], 3, DType::F32)?);
        let affine = |on: &Device| -> Result<Affine> {
            let own_bias = has_bias.then(|| bias.to_device(on)).transpose()?;
            Ok(Affine { weight: weight.to_device(on)?, bias: own_bias })
        };
        let found = metal_call(norm, &xs.to_device(device)?, &affine(device)?)?.forward()?;
        let expected = norm.apply(&xs.to_dtype(DType::F32)?, &affine(&Device::Cpu)?)?;
        compared.push(ComparedResult { name, found, expected });
    }
    Ok(compared)
}
