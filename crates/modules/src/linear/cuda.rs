//! Linear layers with few rows by their CUDA kernel. Nothing is tracked for gradients.

use candle_attention_cuda::{Activation, LinearCodesCall, LinearParameters, LinearRowsCall};
use candle_core::{DType, Device, Result, Shape, Tensor};

use super::OP;
use super::matrix::contiguous;
use crate::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use crate::base::record;

/// The case of linear layers of few rows with weights of elements.
pub(crate) const ROWS_CASE: FirstUseCase =
    FirstUseCase { operation: "linear layer of few rows", is_new: false, run: rows_case };

/// A linear layer of few rows that a kernel supports, in the form that it reads.
pub(super) struct CudaRows {
    pub(super) kernel: RowsKernel,
    /// (.., out).
    pub(super) shape: Shape,
}

/// The kernel of a linear layer of few rows, with its arguments.
pub(super) enum RowsKernel {
    /// With weights in the dtype of the inputs.
    Elements(Box<LinearRowsCall>),
    /// With weights of codes.
    Codes(Box<LinearCodesCall>),
}

/// The operations that follow the products in the same pass.
#[derive(Default)]
pub(super) struct RowsEpilogue<'a> {
    pub activation: Option<Activation>,
    /// The tensor (.., out) that is added.
    pub residual: Option<&'a Tensor>,
}

/// The tensors of a call in the form that the kernels read.
pub(super) struct FewRows {
    /// (rows, in), contiguous.
    pub xs: Tensor,
    /// (rows, out), contiguous.
    pub residual: Option<Tensor>,
    /// The shape of the outputs, (.., out).
    pub shape: Shape,
}

impl FewRows {
    /// Returns inputs (.., in) and a residual (.., out) as rows; `None` if a copy of them fails.
    pub fn new(xs: &Tensor, residual: Option<&Tensor>, outputs: usize) -> Option<Self> {
        let (width, outer) = xs.dims().split_last()?;
        let rows = xs.elem_count().checked_div(*width)?;
        let residual = match residual {
            Some(residual) => Some(contiguous("residual", residual).ok()?.reshape((rows, outputs)).ok()?),
            None => None,
        };
        let shape = [outer, &[outputs]].concat().into();
        Some(Self { xs: contiguous("input", xs).ok()?.reshape((rows, *width)).ok()?, residual, shape })
    }
}

/// The call of a linear layer of few rows with weights of elements, and the shape of its outputs.
pub(super) struct ElementRows {
    pub call: LinearRowsCall,
    /// (.., out).
    pub shape: Shape,
}

impl ElementRows {
    /// Returns the layer for inputs (.., in) that fit the weight, and for another one whose outputs multiply the
    /// activated outputs; `None` for many rows, other dtypes and layouts than kernels read, and tracked gradients.
    pub fn new(
        xs: &Tensor,
        linear: LinearParameters,
        up: Option<LinearParameters>,
        epilogue: RowsEpilogue,
    ) -> Option<Self> {
        let RowsEpilogue { activation, residual } = epilogue;
        let (outputs, width) = linear.weight.dims2().ok()?;
        let rows = xs.elem_count().checked_div(width)?;
        if rows > LinearRowsCall::MAX_ROWS || !has_constants(&linear, xs) {
            return None;
        }
        if up.as_ref().is_some_and(|up| !has_constants(up, xs)) {
            return None;
        }
        if xs.track_op() || residual.is_some_and(|residual| !is_constant(residual, xs.dtype())) {
            return None;
        }
        let FewRows { xs, residual, shape } = FewRows::new(xs, residual, outputs)?;
        Some(Self { call: LinearRowsCall { xs, linear, activation, up, residual }, shape })
    }
}

impl CudaRows {
    /// Returns the layer for inputs (.., in) that fit the weight, and for another one whose outputs multiply the
    /// activated outputs; `None` if the kernel does not support it, as for many rows, or if gradients are tracked.
    pub fn plan(
        xs: &Tensor,
        linear: LinearParameters,
        up: Option<LinearParameters>,
        epilogue: RowsEpilogue,
    ) -> Option<Self> {
        let ElementRows { call: kernel, shape } = ElementRows::new(xs, linear, up, epilogue)?;
        kernel.plan().ok()?;
        ROWS_CASE.check(kernel.xs.device(), kernel.xs.dtype()).ok()?;
        Some(Self { kernel: RowsKernel::Elements(kernel.into()), shape })
    }

    /// Returns the outputs (.., out).
    pub fn run(self) -> Result<Tensor> {
        let numbers = match self.kernel {
            RowsKernel::Elements(kernel) => kernel.forward()?,
            RowsKernel::Codes(kernel) => kernel.forward()?,
        };
        record(OP, &[], numbers, self.shape, |_, _| Ok(Vec::new()))
    }
}

/// Returns whether weight and bias are contiguous, in the dtype of the inputs, and not tracked for gradients.
fn has_constants(linear: &LinearParameters, xs: &Tensor) -> bool {
    let is_read = |tensor: &Tensor| tensor.is_contiguous() && is_constant(tensor, xs.dtype());
    is_read(&linear.weight) && linear.bias.as_ref().is_none_or(is_read)
}

/// Returns whether a tensor has a dtype and is not tracked for gradients.
pub(super) fn is_constant(tensor: &Tensor, dtype: DType) -> bool {
    tensor.dtype() == dtype && !tensor.track_op()
}

/// Computes layers by the kernel and by the CPU.
fn rows_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    compare_rows(3, 264, device, dtype, |call| {
        call.plan()?;
        let shape = (call.xs.dim(0)?, call.linear.weight.dim(0)?);
        record(OP, &[], call.forward()?, shape, |_, _| Ok(Vec::new()))
    })
}

/// Computes a layer with bias, activation and residual, and a gated one, by a kernel and by the CPU.
pub(super) fn compare_rows(
    rows: usize,
    inputs: usize,
    device: &Device,
    dtype: DType,
    by_kernel: impl Fn(LinearRowsCall) -> Result<Tensor>,
) -> Result<Vec<ComparedResult>> {
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
    Ok(vec![
        ComparedResult {
            name: "the output",
            found: by_kernel(plain)?,
            expected: product.gelu_erf()?.add(&wide(&residual)?)?,
        },
        ComparedResult { name: "the gated output", found: by_kernel(gated)?, expected: product.silu()?.mul(&factors)? },
    ])
}

#[cfg(test)]
mod tests {
    use candle_attention_kernels::linear::WeightShape;
    use candle_core::{Module, Var};
    use candle_nn::{Activation as Function, Linear};

    use super::*;
    use crate::linear::{PackedGatedLinear, PackedLinear, Weight};

    /// Draws a layer with a weight that is not packed, as on CUDA.
    fn layer(outputs: usize, inputs: usize, has_bias: bool) -> Result<PackedLinear> {
        let draw = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu);
        let weight = draw(&[outputs, inputs])?;
        let bias = if has_bias { Some(draw(&[outputs])?) } else { None };
        let shape = WeightShape { outputs, inputs };
        PackedLinear::from_checked(Weight::Plain(weight), bias.as_ref(), shape, DType::F32, &Device::Cpu)
    }

    fn assert_close(found: &Tensor, expected: &Tensor) -> Result<()> {
        assert_eq!(found.dims(), expected.dims());
        let largest = expected.abs()?.max_all()?.to_scalar::<f32>()?;
        let error = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(error < 2e-6 * largest, "{error:e} of {largest}");
        Ok(())
    }

    #[test]
    fn cuda_rows_match_separate_operations() -> Result<()> {
        let linear = layer(37, 72, true)?;
        let plain: Linear = linear.to_linear()?;
        for dims in [vec![72], vec![1, 1, 72], vec![2, 3, 72], vec![8, 72]] {
            let xs = Tensor::randn(0f32, 1., dims.as_slice(), &Device::Cpu)?;
            let residual = Tensor::randn(0f32, 1., [&dims[..dims.len() - 1], &[37]].concat(), &Device::Cpu)?;
            let rows = xs.reshape(((), 72))?;
            let expected = plain.forward(&rows)?.reshape(residual.shape())?;
            let run = |added: Option<&Tensor>| -> Result<Tensor> {
                linear.cuda_rows(&xs, 0..37, added).expect("the kernel runs the call").run()
            };
            assert_close(&run(None)?, &expected)?;
            assert_close(&run(Some(&residual))?, &(expected + residual)?)?;
        }
        Ok(())
    }

    #[test]
    fn cuda_rows_of_some_columns_and_strided_input_match_separate_operations() -> Result<()> {
        let linear = layer(37, 72, true)?.with_activation(Function::Gelu)?;
        let xs = Tensor::randn(0f32, 1., (2, 72, 3), &Device::Cpu)?.transpose(1, 2)?;
        let expected = linear.to_linear()?.forward(&xs.contiguous()?)?.gelu_erf()?.narrow(2, 5, 11)?;
        let call = linear.cuda_rows(&xs, 5..16, None).expect("the kernel runs the call");
        assert_close(&call.run()?, &expected)
    }

    #[test]
    fn cuda_rows_of_gated_layer_match_separate_operations() -> Result<()> {
        for has_bias in [false, true] {
            let (gate, up) = (layer(50, 40, has_bias)?, layer(50, 40, has_bias)?);
            let xs = Tensor::randn(0f32, 1., (1, 5, 40), &Device::Cpu)?;
            let expected = (gate.to_linear()?.forward(&xs)?.silu()? * up.to_linear()?.forward(&xs)?)?;
            let gated = PackedGatedLinear::new(gate, up, Function::Silu)?;
            let call = gated.cuda_rows(&xs).expect("the kernel runs the call");
            assert_close(&call.run()?, &expected)?;
        }
        Ok(())
    }

    #[test]
    fn cuda_rows_are_planned_for_few_rows_without_gradients() -> Result<()> {
        let linear = layer(6, 16, false)?;
        let is_planned = |xs: &Tensor| linear.cuda_rows(xs, 0..6, None).is_some();
        let zeros = |rows: usize| Tensor::zeros((rows, 16), DType::F32, &Device::Cpu);
        assert!(is_planned(&zeros(1)?) && is_planned(&zeros(8)?));
        assert!(!is_planned(&zeros(9)?) && !is_planned(&zeros(0)?));
        assert!(!is_planned(&zeros(1)?.to_dtype(DType::F64)?));
        assert!(!is_planned(Var::from_tensor(&zeros(1)?)?.as_tensor()));
        let tracked = Weight::Plain(Var::zeros((6, 16), DType::F32, &Device::Cpu)?.into_inner());
        let shape = WeightShape { outputs: 6, inputs: 16 };
        let layer_of_variables = PackedLinear::from_checked(tracked, None, shape, DType::F32, &Device::Cpu)?;
        assert!(layer_of_variables.cuda_rows(&zeros(1)?, 0..6, None).is_none());
        Ok(())
    }
}
