//! Linear layers with few rows by their Metal kernel. Nothing is tracked for gradients.

use std::ops::Range;

use candle_attention_cuda::{Activation, LinearParameters, LinearRowsCall};
use candle_attention_metal::MetalRows;
use candle_core::{DType, Device, Result, Tensor};

use super::PackedLinear;
use super::cuda::{ElementRows, RowsEpilogue};
use super::product::cuda_activation;
use crate::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use crate::metal_rows::run_checked;

/// The case of linear layers of few rows.
pub(crate) const METAL_LINEAR_CASE: FirstUseCase =
    FirstUseCase { operation: "linear layer of few rows on Metal", is_new: true, run: linear_case };

impl PackedLinear {
    /// Returns some of the outputs for few rows; `None` if no kernel computes them.
    pub(super) fn metal_rows(
        &self,
        xs: &Tensor,
        columns: Range<usize>,
        residual: Option<&Tensor>,
    ) -> Option<Result<Tensor>> {
        let activation = match self.activation {
            Some(activation) => Some(cuda_activation(activation)?),
            None => None,
        };
        rows_on_metal(xs, self.cuda_parameters(columns)?, None, RowsEpilogue { activation, residual })
    }
}

/// Returns the outputs (.., out) of a layer for few rows, and for another layer whose outputs multiply the activated
/// outputs; `None` if no kernel computes them.
pub(super) fn rows_on_metal(
    xs: &Tensor,
    linear: LinearParameters,
    up: Option<LinearParameters>,
    epilogue: RowsEpilogue,
) -> Option<Result<Tensor>> {
    let ElementRows { call, shape } = ElementRows::new(xs, linear, up, epilogue)?;
    let outputs = run_checked(&MetalRows::Linear(call.into()), &METAL_LINEAR_CASE, xs)?;
    Some(outputs.and_then(|rows| rows.reshape(shape)))
}

/// Computes a layer with bias, activation and residual, and a gated one, by the kernel and by the CPU: one row and
/// several, of widths that are and are not a multiple of 16 bytes.
fn linear_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let mut compared = Vec::new();
    for (rows, inputs) in [(1, 1056), (3, 264), (8, 75)] {
        let outputs = 37;
        let numbers = |dims: &[usize], seed: u64| case_numbers(dims, seed, dtype);
        let xs = numbers(&[rows, inputs], 1)?;
        let weight = numbers(&[outputs, inputs], 2)?;
        let bias = numbers(&[outputs], 3)?;
        let up_weight = numbers(&[outputs, inputs], 4)?;
        let residual = numbers(&[rows, outputs], 5)?;
        let own = |tensor: &Tensor| tensor.to_device(device);
        let linear = LinearParameters { weight: own(&weight)?, bias: Some(own(&bias)?) };
        let up = LinearParameters { weight: own(&up_weight)?, bias: None };
        let output = |call: LinearRowsCall| MetalRows::Linear(call.into()).forward();
        let plain = LinearRowsCall {
            xs: own(&xs)?,
            linear: linear.clone(),
            activation: Some(Activation::Gelu),
            up: None,
            residual: Some(own(&residual)?),
        };
        let gated =
            LinearRowsCall { xs: own(&xs)?, linear, activation: Some(Activation::Silu), up: Some(up), residual: None };
        let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64);
        let product = wide(&xs)?.matmul(&wide(&weight)?.t()?)?.broadcast_add(&wide(&bias)?)?;
        let factors = wide(&xs)?.matmul(&wide(&up_weight)?.t()?)?;
        compared.push(ComparedResult {
            name: "the output",
            found: output(plain)?,
            expected: product.gelu_erf()?.add(&wide(&residual)?)?,
        });
        compared.push(ComparedResult {
            name: "the gated output",
            found: output(gated)?,
            expected: product.silu()?.mul(&factors)?,
        });
    }
    Ok(compared)
}
