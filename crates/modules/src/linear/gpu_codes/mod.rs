//! Linear layers whose weights are codes on a GPU. Few rows are multiplied with the codes as they are. Many rows are
//! multiplied by Candle with the numbers of the weight, a panel of outputs at a time.

mod first_use;
mod metal;

use std::ops::Range;

use candle_attention_cuda::{
    CodedLinear, CodedNumbers, CodedValues, CodedWeight, DequantizeCall, HostCodes, LinearCodesCall, is_available,
};
use candle_attention_metal::MetalRows;
use candle_core::{DType, Device, Result, Shape, Tensor};

pub(crate) use first_use::{CODES_CASE, METAL_CODES_CASE};
pub(super) use metal::codes_on_metal;

use super::cuda::{CudaRows, FewRows, RowsEpilogue, RowsKernel, is_constant};
use super::matrix::contiguous;
use super::{OP, PackedLinear, Weight};
use crate::base::first_use::KERNEL_DTYPES;
use crate::base::{CodeValues, Dim, Expect, Float8, GroupNumbers, QuantizedWeight, check_memory, copied_to, record};
use candle_attention_kernels::linear::WeightShape;

/// The largest panel of numbers that products of many rows dequantise, in bytes. It is freed in the order of the
/// device's work, so that the next panel takes the same memory.
const PANEL_BYTES: usize = 64 << 20;

impl PackedLinear {
    /// Packs a quantised weight on a device, with `bias` (out,) in a floating-point dtype there. The layer has the
    /// dtype `dtype`.
    ///
    /// On a CPU, this is [`from_quantized`](Self::from_quantized). On CUDA and Metal the codes are stored as they are,
    /// for inputs in f32, bf16 and f16. One kernel multiplies at most eight rows with the codes: the
    /// [dequantised](QuantizedWeight::dequantize) numbers and the sums are in f32. For more rows, and for gradients of
    /// the input, the numbers are rounded to the input's dtype, at most 64 MiB of them at a time, and Candle multiplies
    /// them. With a bias that is tracked for gradients, and where the kernels of the device are not available, the
    /// weight is dequantised.
    ///
    /// # Errors
    /// For a weight whose parts do not fit each other, a bias of another shape or dtype or on another device, and if
    /// memory is short.
    pub fn from_quantized_on(
        weight: &QuantizedWeight,
        bias: Option<&Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let is_tracked = bias.is_some_and(Tensor::track_op);
        let is_empty = weight.outputs == 0 || weight.inputs == 0;
        if matches!(dtype, DType::F32 | DType::BF16 | DType::F16) && Self::multiplies_codes_on(device) {
            if device.is_cpu() {
                return Ok(Self::from_quantized(weight, bias)?.with_dtype(dtype));
            }
            if !is_tracked && !is_empty {
                let codes = coded_weight(weight, device)?;
                if !device.is_metal() || metal::kernels_compile(&codes) {
                    return Self::with_codes(codes, weight.input_order.as_deref(), bias, dtype);
                }
            }
        }
        let &QuantizedWeight { outputs, inputs, .. } = weight;
        check_memory(OP, format_args!("a weight of shape {:?}", (outputs, inputs)), &[outputs, inputs])?;
        Self::new(&weight.dequantize()?.to_dtype(dtype)?.to_device(device)?, bias)
    }

    /// Returns whether products on a device read the codes of quantised weights: on a CPU, and on CUDA and Metal where
    /// kernels are available.
    pub fn multiplies_codes_on(device: &Device) -> bool {
        match device {
            Device::Cpu => true,
            Device::Cuda(_) => Self::has_kernels_of_codes(device),
            Device::Metal(_) => metal::has_kernels_of_codes(device),
        }
    }

    /// Returns whether a device has CUDA kernels that read codes, and they passed their check if nobody has run them
    /// there. Layers of codes are checked for all dtypes, since the inputs are not known when a weight is loaded.
    fn has_kernels_of_codes(device: &Device) -> bool {
        is_available(device).is_ok() && KERNEL_DTYPES.into_iter().all(|dtype| CODES_CASE.check(device, dtype).is_ok())
    }

    /// Creates a layer of codes on a device whose kernels read them, whose columns have an order of the inputs.
    fn with_codes(
        codes: CodedWeight,
        input_order: Option<&[u32]>,
        bias: Option<&Tensor>,
        dtype: DType,
    ) -> Result<Self> {
        let (outputs, inputs, device) = (codes.outputs(), codes.inputs(), &codes.device().clone());
        if let Some(bias) = bias {
            let expect = Expect::one(OP, "bias", bias).shape(&[Dim::Is(outputs)])?;
            expect.float("")?.same_device("the quantised weight", device)?;
        }
        let own = Weight::Codes(codes.into());
        let linear = Self::from_checked(own, bias, WeightShape { outputs, inputs }, dtype, device)?;
        let input_order = match input_order {
            Some(order) => Some(Tensor::new(order, device)?),
            None => None,
        };
        Ok(Self { is_quantized: true, linear_dtype: dtype, input_order, ..linear })
    }

    /// Returns the rows of codes and bias that belong to some of the outputs, for inputs in a dtype; `None` unless the
    /// weight is codes on a GPU.
    pub(super) fn coded_linear(&self, columns: Range<usize>, dtype: DType) -> Option<CodedLinear> {
        let Weight::Codes(weight) = &self.weight else { return None };
        let bias = match &self.bias {
            Some(bias) => Some(bias.narrow(0, columns.start, columns.len()).ok()?.to_dtype(dtype).ok()?),
            None => None,
        };
        let bias = match bias {
            Some(bias) => Some(contiguous("bias", &bias).ok()?),
            None => None,
        };
        Some(CodedLinear { weight: weight.rows(columns).ok()?, bias })
    }
}

/// The call of a linear layer of few rows with weights of codes, and the shape of its outputs.
struct CodedRows {
    call: LinearCodesCall,
    /// (.., out).
    shape: Shape,
}

impl CodedRows {
    /// Returns the layer for inputs (.., in) that fit the weight and are in the order of its columns; `None` for many
    /// rows, and if gradients are tracked.
    fn new(xs: &Tensor, linear: CodedLinear, up: Option<CodedLinear>, epilogue: RowsEpilogue) -> Option<Self> {
        let RowsEpilogue { activation, residual } = epilogue;
        let (outputs, width) = (linear.weight.outputs(), linear.weight.inputs());
        let rows = xs.elem_count().checked_div(width)?;
        if rows > LinearCodesCall::MAX_ROWS || xs.track_op() {
            return None;
        }
        if linear.bias.iter().chain(residual).any(|tensor| !is_constant(tensor, xs.dtype())) {
            return None;
        }
        let FewRows { xs, residual, shape } = FewRows::new(xs, residual, outputs)?;
        Some(Self { call: LinearCodesCall { xs, linear, activation, up, residual }, shape })
    }
}

impl CudaRows {
    /// Returns the layer for inputs (.., in) that fit the weight and are in the order of its columns; `None` if the
    /// kernel does not support it, as for many rows, or if gradients are tracked.
    pub(super) fn plan_codes(
        xs: &Tensor,
        linear: CodedLinear,
        up: Option<CodedLinear>,
        epilogue: RowsEpilogue,
    ) -> Option<Self> {
        let CodedRows { call: kernel, shape } = CodedRows::new(xs, linear, up, epilogue)?;
        kernel.plan().ok()?;
        Some(Self { kernel: RowsKernel::Codes(kernel.into()), shape })
    }
}

/// Computes `xs weightᵀ + bias` of inputs (.., in) in the order of the weight's columns, with gradients of both.
pub(super) fn affine_of_codes(xs: &Tensor, weight: CodedWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    affine_in_panels(xs, weight, bias, PANEL_BYTES)
}

/// Computes [`affine_of_codes`] with panels of numbers of up to `panel_bytes`, or one output.
fn affine_in_panels(xs: &Tensor, weight: CodedWeight, bias: Option<&Tensor>, panel_bytes: usize) -> Result<Tensor> {
    let (outputs, inputs) = (weight.outputs(), weight.inputs());
    let shape = [&xs.dims()[..xs.rank() - 1], &[outputs]].concat();
    if xs.elem_count() == 0 || outputs == 0 {
        let zeros = Tensor::zeros(shape, xs.dtype(), xs.device())?;
        return match bias {
            Some(bias) => zeros.broadcast_add(bias),
            None => Ok(zeros),
        };
    }
    let rows = contiguous("input", &xs.detach())?.reshape(((), inputs))?;
    let mut parts = Vec::new();
    for panel in panels(&weight, xs.dtype(), panel_bytes) {
        parts.push(rows.matmul(&dequantized(&weight.rows(panel)?, xs.dtype())?.t()?)?);
    }
    let product = Tensor::cat(&parts, 1)?;
    let product = match bias {
        Some(bias) => product.broadcast_add(&bias.detach())?,
        None => product,
    };
    let bias_is_tracked = bias.is_some_and(Tensor::track_op);
    if !xs.track_op() && !bias_is_tracked {
        return product.reshape(shape);
    }
    let numbers = {
        let (storage, layout) = product.storage_and_layout();
        storage.try_clone(layout)?
    };
    let input_dims = xs.dims().to_vec();
    let xs_is_tracked = xs.track_op();
    record(OP, &[Some(xs), bias], numbers, shape, move |_, gradient| {
        let of_outputs = contiguous("gradient", gradient)?.reshape(((), outputs))?;
        let of_xs = match xs_is_tracked {
            true => Some(gradient_of_inputs(&of_outputs, &weight, panel_bytes)?.reshape(input_dims.as_slice())?),
            false => None,
        };
        let of_bias = if bias_is_tracked { Some(of_outputs.sum(0)?) } else { None };
        Ok(vec![of_xs, of_bias])
    })
}

/// Computes the gradient of inputs (rows, in) from the gradient of the outputs (rows, out).
fn gradient_of_inputs(of_outputs: &Tensor, weight: &CodedWeight, panel_bytes: usize) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for panel in panels(weight, of_outputs.dtype(), panel_bytes) {
        let numbers = dequantized(&weight.rows(panel.clone())?, of_outputs.dtype())?;
        let part = of_outputs.narrow(1, panel.start, panel.len())?.contiguous()?.matmul(&numbers)?;
        sum = Some(match sum {
            Some(sum) => (sum + part)?,
            None => part,
        });
    }
    match sum {
        Some(sum) => Ok(sum),
        None => Tensor::zeros((of_outputs.dim(0)?, weight.inputs()), of_outputs.dtype(), of_outputs.device()),
    }
}

/// Returns the numbers of a weight (out, in) in a dtype, rounded once.
pub(super) fn dequantized(weight: &CodedWeight, dtype: DType) -> Result<Tensor> {
    check_memory(
        OP,
        format_args!("the numbers of {} outputs", weight.outputs()),
        &[weight.outputs(), weight.inputs()],
    )?;
    let call = DequantizeCall { weight: weight.clone(), dtype };
    match weight.device() {
        Device::Metal(_) => MetalRows::Dequantize(call).forward(),
        Device::Cpu | Device::Cuda(_) => call.forward(),
    }
}

/// Returns ranges of outputs whose numbers take up to `panel_bytes`, or of one output.
fn panels(weight: &CodedWeight, dtype: DType, panel_bytes: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let outputs = weight.outputs();
    let rows = (panel_bytes / (weight.inputs() * dtype.size_in_bytes())).max(1);
    (0..outputs).step_by(rows).map(move |first| first..outputs.min(first + rows))
}

/// Copies a weight to a device, in the order in which its kernels read codes.
fn coded_weight(weight: &QuantizedWeight, device: &Device) -> Result<CodedWeight> {
    let &QuantizedWeight { outputs, inputs, bits, group, .. } = weight;
    // A group of 0 columns is an error of the weight.
    let groups = inputs.checked_div(group).unwrap_or(0);
    let numbers = |of_groups: &GroupNumbers| coded_numbers(of_groups, outputs, groups, device);
    let values = match &weight.values {
        CodeValues::Signed => CodedValues::Signed,
        CodeValues::Zeros(zeros) => CodedValues::Zeros(numbers(zeros)?),
        CodeValues::Minimums(minimums) => CodedValues::Minimums(numbers(minimums)?),
        CodeValues::Table(table) => CodedValues::Table(Tensor::new(table, device)?),
        CodeValues::Float8(Float8::E4M3) => CodedValues::E4M3,
        CodeValues::Float8(Float8::E5M2) => CodedValues::E5M2,
    };
    let codes = HostCodes { codes: &weight.codes, outputs, inputs, bits };
    CodedWeight::new(codes, group, values, numbers(&weight.scales)?)
}

fn coded_numbers(numbers: &GroupNumbers, outputs: usize, groups: usize, device: &Device) -> Result<CodedNumbers> {
    let shape = (outputs, groups);
    Ok(match numbers {
        GroupNumbers::F16(numbers) => CodedNumbers::Floats(copied_to(device, numbers.clone(), shape)?),
        GroupNumbers::BF16(numbers) => CodedNumbers::Floats(copied_to(device, numbers.clone(), shape)?),
        GroupNumbers::F32(numbers) => CodedNumbers::Floats(copied_to(device, numbers.clone(), shape)?),
        GroupNumbers::Whole(numbers) => CodedNumbers::Whole(copied_to(device, numbers.clone(), shape)?),
        GroupNumbers::Bytes { bytes, table } => CodedNumbers::Bytes {
            bytes: copied_to(device, bytes.clone(), shape)?,
            table: copied_to(device, table.clone(), table.len())?,
        },
        GroupNumbers::Nested { numbers, middle, factors, groups_of_factor } => CodedNumbers::Nested {
            numbers: copied_to(device, numbers.clone(), shape)?,
            factors: copied_to(device, factors.clone(), (outputs, groups.checked_div(*groups_of_factor).unwrap_or(0)))?,
            middle: *middle,
        },
    })
}

#[cfg(test)]
mod tests;
