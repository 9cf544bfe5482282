//! Products and numbers of codes by the Metal kernels.

use candle_attention_cuda::{CodedLinear, CodedWeight, DequantizeCall};
use candle_attention_metal::{MetalRows, first_use, is_available};
use candle_core::{Device, Result, Tensor};

use super::first_use::METAL_CODES_CASE;
use super::{CodedRows, RowsEpilogue};
use crate::base::first_use::KERNEL_DTYPES;
use crate::metal_rows::run_checked;

/// Returns whether a device has Metal kernels that read codes, and they passed their check. Layers of codes are checked
/// for all dtypes, since the inputs are not known when a weight is loaded.
pub(super) fn has_kernels_of_codes(device: &Device) -> bool {
    let passes = |dtype| METAL_CODES_CASE.check_by(first_use(device), device, dtype).is_ok();
    is_available(device).is_ok() && KERNEL_DTYPES.into_iter().all(passes)
}

/// Returns whether the kernel that computes the numbers of a weight compiles for its format, for all dtypes of inputs.
pub(super) fn kernels_compile(weight: &CodedWeight) -> bool {
    KERNEL_DTYPES
        .into_iter()
        .all(|dtype| MetalRows::Dequantize(DequantizeCall { weight: weight.clone(), dtype }).prepare().is_ok())
}

/// Returns the outputs (.., out) of a layer of codes for few rows in the order of its columns, and for another layer
/// whose outputs multiply the activated outputs; `None` if no kernel computes them.
pub(in crate::linear) fn codes_on_metal(
    xs: &Tensor,
    linear: CodedLinear,
    up: Option<CodedLinear>,
    epilogue: RowsEpilogue,
) -> Option<Result<Tensor>> {
    let CodedRows { call, shape } = CodedRows::new(xs, linear, up, epilogue)?;
    let rows = MetalRows::Codes(call.into());
    // The case of the first use runs other formats: a kernel may not compile for this one.
    rows.prepare().ok()?;
    let outputs = run_checked(&rows, &METAL_CODES_CASE, xs)?;
    Some(outputs.and_then(|own| own.reshape(shape)))
}
