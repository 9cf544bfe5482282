//! The computation of a packed linear layer.

use std::ops::Range;

use candle_attention_cuda::LinearParameters;
use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::Linear;

use super::cuda::{CudaRows, RowsEpilogue};
use super::gpu_codes::affine_of_codes;
use super::matrix::{as_matrix, contiguous};
use super::product::{Factor, ProductEpilogue, cuda_activation, kernel_activation, plain, product};
use super::{OP, PackedLinear, Weight};
use crate::base::{Dim, Expect, check_memory, is_addressable, part};

impl PackedLinear {
    /// Computes some of the outputs, from (.., in) to (.., `columns.len()`), on the CPU kernels with the bits that
    /// [`forward`](Module::forward) returns. Several projections of one input can share a weight in this way.
    ///
    /// # Errors
    /// As [`forward`](Module::forward), and for columns beyond the width of the output.
    pub fn forward_columns(&self, xs: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        self.product(xs, columns, None)
    }

    /// Computes [`forward`](Module::forward) plus a residual (.., out) of the output's dtype. The residual is added
    /// before the sum is rounded. Both inputs may be tracked for gradients.
    ///
    /// # Errors
    /// As [`forward`](Module::forward), and for a residual of another shape, dtype or device than the output's.
    pub fn forward_with_residual(&self, xs: &Tensor, residual: &Tensor) -> Result<Tensor> {
        self.product(xs, 0..self.out_dim(), Some(residual))
    }

    /// Checks that the columns exist, that the input fits the weight, and that the output can be allocated.
    pub(super) fn check(&self, xs: &Tensor, columns: &Range<usize>) -> Result<()> {
        if columns.start > columns.end || columns.end > self.out_dim() {
            bail!("[{OP}] columns are {columns:?}, expected a range within 0..{}", self.out_dim())
        }
        let input = Expect::one(OP, "input", xs).shape(&[Dim::Any(".."), Dim::Is(self.in_dim())])?;
        match self.dtype() {
            DType::F32 | DType::BF16 | DType::F16 if self.is_quantized => {
                input.dtype_of(&[DType::F32, DType::BF16, DType::F16], " with a quantised weight")?;
            }
            dtype @ (DType::BF16 | DType::F16) => {
                input.dtype_of(&[dtype, DType::F32], format_args!(" with a weight in {dtype:?}"))?;
            }
            dtype => {
                input.dtype(dtype, "the weight's")?;
            }
        }
        input.same_device("the weight", self.device())?;
        if !is_addressable(xs.dims()) {
            bail!("[{OP}] input has shape {:?}, which is too large to address", xs.dims())
        }
        let rows: usize = xs.dims()[..xs.rank() - 1].iter().product();
        check_memory(OP, format_args!("an output of {rows} rows of {}", columns.len()), &[rows, columns.len()])
    }

    /// Computes some of the outputs, plus a residual (.., `columns.len()`) if there is one.
    ///
    /// # Errors
    /// As [`forward_columns`](Self::forward_columns) and [`forward_with_residual`](Self::forward_with_residual).
    pub fn product(&self, xs: &Tensor, columns: Range<usize>, residual: Option<&Tensor>) -> Result<Tensor> {
        self.check(xs, &columns)?;
        if let Some(residual) = residual {
            let expected = [&xs.dims()[..xs.rank() - 1], &[columns.len()]].concat();
            let expect = Expect::one(OP, "residual", residual).sizes(&expected)?;
            expect.dtype(xs.dtype(), "the input's")?.same_device("the input", xs.device())?;
        }
        let is_tracked = xs.track_op() || residual.is_some_and(Tensor::track_op);
        if let Weight::Packed(weight) = &self.weight
            && !is_tracked
        {
            let activation = self.activation.map(kernel_activation).transpose()?;
            let factor = Factor::Packed { weight: weight.clone(), columns };
            let epilogue = ProductEpilogue { activation, residual, up: None };
            return product(&self.in_order(xs)?, factor, self.bias.as_ref(), epilogue);
        }
        if xs.device().is_cuda()
            && let Some(call) = self.cuda_rows(xs, columns.clone(), residual)
        {
            return call.run();
        }
        if xs.device().is_metal()
            && let Some(ys) = self.metal_rows(xs, columns.clone(), residual)
        {
            return ys;
        }
        let mut ys = self.affine(xs, columns)?;
        if let Some(activation) = self.activation {
            ys = activation.forward(&ys)?;
        }
        match residual {
            Some(residual) => ys + residual,
            None => Ok(ys),
        }
    }

    /// Returns the inputs (.., in) in the order of the weight's columns.
    pub(super) fn in_order(&self, xs: &Tensor) -> Result<Tensor> {
        match &self.input_order {
            Some(order) if xs.elem_count() > 0 => contiguous("input", xs)?.index_select(order, xs.rank() - 1),
            _ => Ok(xs.clone()),
        }
    }

    /// Returns some of the outputs for few rows by a CUDA kernel; `None` if the kernel does not support them.
    pub(super) fn cuda_rows(&self, xs: &Tensor, columns: Range<usize>, residual: Option<&Tensor>) -> Option<CudaRows> {
        let activation = match self.activation {
            Some(activation) => Some(cuda_activation(activation)?),
            None => None,
        };
        let epilogue = RowsEpilogue { activation, residual };
        if let Some(linear) = self.coded_linear(columns.clone(), xs.dtype()) {
            return CudaRows::plan_codes(&self.in_order(xs).ok()?, linear, None, epilogue);
        }
        CudaRows::plan(xs, self.cuda_parameters(columns)?, None, epilogue)
    }

    /// Returns the rows of weight and bias that belong to some of the outputs; `None` unless Candle multiplies the
    /// weight.
    pub(super) fn cuda_parameters(&self, columns: Range<usize>) -> Option<LinearParameters> {
        let Weight::Plain(weight) = &self.weight else { return None };
        let bias = match &self.bias {
            Some(bias) => Some(bias.narrow(0, columns.start, columns.len()).ok()?),
            None => None,
        };
        Some(LinearParameters { weight: weight.narrow(0, columns.start, columns.len()).ok()?, bias })
    }

    /// Computes `x Wᵀ + b` of some of the outputs, without the activation.
    pub(super) fn affine(&self, xs: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len())?.to_dtype(xs.dtype());
        let bias = match &self.bias {
            Some(bias) if !self.is_packed() => Some(contiguous("bias", &own(bias)?)?),
            _ => None,
        };
        match &self.weight {
            Weight::Packed(weight) => {
                let factor = Factor::Packed { weight: weight.clone(), columns };
                product(&self.in_order(xs)?, factor, self.bias.as_ref(), ProductEpilogue::default())
            }
            Weight::Tracked { weight, instruction_set } => {
                let weight = as_matrix("weight", &own(weight)?)?;
                let factor = Factor::Matrix { weight, instruction_set: *instruction_set };
                product(xs, factor, bias.as_ref(), ProductEpilogue::default())
            }
            Weight::Codes(weight) => affine_of_codes(&self.in_order(xs)?, weight.rows(columns)?, bias.as_ref()),
            // Candle's quantised product has no gradient and needs a matrix that is not empty.
            Weight::Quantized { matmul, .. } if !xs.track_op() && xs.elem_count() > 0 => {
                let mut rows = contiguous("input", xs)?.reshape(((), self.in_dim()))?;
                if xs.device().is_metal() && rows.layout().start_offset() > 0 {
                    // The product of several rows begins with the first number of the buffer there.
                    rows = rows.force_contiguous()?;
                }
                let all = matmul.forward(&rows)?.reshape([&xs.dims()[..xs.rank() - 1], &[self.out_dim()]].concat())?;
                let ys = part(&all, xs.rank() - 1, columns.clone())?;
                match bias {
                    Some(bias) => ys.broadcast_add(&bias),
                    None => Ok(ys),
                }
            }
            Weight::Quantized { .. } | Weight::Plain(_) => {
                plain(&Linear::new(own(self.to_linear()?.weight())?, bias), xs)
            }
        }
    }
}

/// Maps (.., in) to (.., out) in the input's dtype: the weight's, f32 with a weight in half precision, or any of f32,
/// bf16 and f16 with a quantised weight that is packed.
impl Module for PackedLinear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_columns(xs, 0..self.out_dim())
    }
}
