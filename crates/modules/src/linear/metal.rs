//! Linear layers with few rows by their Metal kernel. Nothing is tracked for gradients.

use std::ops::Range;

use candle_attention_cuda::{LinearParameters, LinearRowsCall};
use candle_attention_metal::MetalRows;
use candle_core::{DType, Device, Result, Tensor};

use super::PackedLinear;
use super::cuda::{ElementRows, RowsEpilogue, compare_rows};
use super::gpu_codes::codes_on_metal;
use super::product::cuda_activation;
use crate::base::first_use::{ComparedResult, FirstUseCase};
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
        let epilogue = RowsEpilogue { activation, residual };
        if let Some(linear) = self.coded_linear(columns.clone(), xs.dtype()) {
            return codes_on_metal(&self.in_order(xs).ok()?, linear, None, epilogue);
        }
        rows_on_metal(xs, self.cuda_parameters(columns)?, None, epilogue)
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

/// Computes layers of one row and of several by the kernel and by the CPU, of widths that are and are not a multiple of
/// 16 bytes.
fn linear_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let mut compared = Vec::new();
    for (rows, inputs) in [(1, 1056), (3, 264), (8, 75)] {
        let by_kernel = |call: LinearRowsCall| MetalRows::Linear(call.into()).forward();
        compared.extend(compare_rows(rows, inputs, device, dtype, by_kernel)?);
    }
    Ok(compared)
}
