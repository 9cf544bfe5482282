//! Values times an activated gate by CUDA kernels, as an operation in Candle's graph.

use candle_attention_cuda::{Activation, GateCall, GateGradients};
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::base::first_use::{
    ComparedResult, FirstUseCase, ResultWithGradients, case_numbers, variables_in, variables_on,
};
use crate::base::record;
use crate::base::rowwise::{with_contiguous_rows, with_four_dimensions};

/// The case of values times activated gates.
pub(crate) const GATE_CASE: FirstUseCase = FirstUseCase { operation: "gate", is_new: false, run: gate_case };

/// Values times an activated gate that the kernels support, in the form that they read.
pub(crate) struct CudaGate {
    /// (.., D) or (.., 1), with contiguous rows.
    gates: Tensor,
    /// (.., D), with contiguous rows.
    values: Tensor,
    kernels: GateCall,
}

impl CudaGate {
    /// Returns `activation(gates) · values` of at most four dimensions; `None` if the kernels do not support it. The
    /// gates have the shape of the values, or the last dimension 1.
    pub fn plan(gates: &Tensor, values: &Tensor, activation: Activation) -> Option<Self> {
        let call = Self::unchecked(gates, values, activation).ok()?;
        GATE_CASE.check(values.device(), values.dtype()).ok()?;
        Some(call)
    }

    /// Returns the product as [`plan`](Self::plan) does, whether or not the kernels passed their check.
    fn unchecked(gates: &Tensor, values: &Tensor, activation: Activation) -> Result<Self> {
        check_shapes(gates, values)?;
        let gates = with_contiguous_rows(gates)?;
        let values = with_contiguous_rows(values)?;
        let kernels = gate_call(&gates, &values, activation)?;
        kernels.plan()?;
        Ok(Self { gates, values, kernels })
    }

    /// Returns the product, contiguous, in the shape of the values.
    pub fn run(self) -> Result<Tensor> {
        let Self { gates, values, kernels } = self;
        let output = kernels.forward()?;
        let shape = values.shape().clone();
        let gate_shape = gates.shape().clone();
        record("gate", &[Some(&gates), Some(&values)], output, values.shape(), move |_, gradient| {
            let gradient = with_four_dimensions(&with_contiguous_rows(gradient)?)?;
            let found: GateGradients = kernels.backward(&gradient)?;
            Ok(vec![Some(found.gates.reshape(&gate_shape)?), Some(found.values.reshape(&shape)?)])
        })
    }
}

/// Checks that kernels multiply values by gates of these shapes and dtypes: the gates have the shape of the values, of
/// at most four dimensions, or the last dimension 1.
///
/// # Errors
/// If they do not.
pub(crate) fn check_shapes(gates: &Tensor, values: &Tensor) -> Result<()> {
    let fits = match (values.dims().split_last(), gates.dims().split_last()) {
        (Some((last, others)), Some((gate_last, gate_others))) => {
            others == gate_others && [1, *last].contains(gate_last)
        }
        _ => false,
    };
    if !fits || gates.dtype() != values.dtype() || values.rank() > 4 {
        bail!("no kernel multiplies {values:?} by {gates:?}")
    }
    Ok(())
}

/// Returns the call of the kernels for gates and values of at most four dimensions, whose rows are contiguous.
pub(crate) fn gate_call(gates: &Tensor, values: &Tensor, activation: Activation) -> Result<GateCall> {
    Ok(GateCall {
        gates: with_four_dimensions(&gates.detach())?,
        values: with_four_dimensions(&values.detach())?,
        activation,
    })
}

/// Computes values times activated gates with all gradients by the kernels and by the CPU.
fn gate_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let inputs = [case_numbers(&[2, 3, 3, 80], 1, dtype)?, case_numbers(&[2, 3, 3, 80], 2, dtype)?];
    let own = variables_on(device, &inputs)?;
    let other = variables_in(DType::F32, &inputs)?;
    let found = CudaGate::unchecked(&own[0], &own[1], Activation::Silu)?.run()?;
    let expected = other[0].silu()?.mul(&other[1])?;
    let names = ["the gradient of the gates", "the gradient of the values"];
    ResultWithGradients { names: &names, found: &own, expected: &other }.compare(&found, &expected)
}
