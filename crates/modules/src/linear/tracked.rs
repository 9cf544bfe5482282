//! Products with a weight that gets gradients, as one of Candle's custom operations.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, D, Device, Layout, Result, Shape, Tensor, WithDType, bail};

use super::OP;
use super::forward::{contiguous, kernel_error, multiply, row_stride, with_width};
use crate::base::executor;
use crate::base::rowwise::{self, Op3, Operand, Ternary, read, with_float};
use candle_attention_kernels::Tier;
use candle_attention_kernels::linear::{self, Epilogue, Matrix, Right};

/// `xs · weightᵀ + bias` of inputs (.., in), a weight (out, in) and a bias (out,) of one dtype, each of which may be
/// tracked for gradients. The weight is read as it is when the operation runs.
pub(super) fn product(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>, tier: Tier) -> Result<Tensor> {
    let (xs, weight) = (with_even_rows("input", xs)?, matrix("weight", weight)?);
    let bias = match bias {
        Some(bias) => contiguous("bias", bias)?,
        None => nothing(&xs)?,
    };
    xs.apply_op3(&weight, &bias, Op3(Project { tier }))
}

/// No bias, beside these inputs.
fn nothing(xs: &Tensor) -> Result<Tensor> {
    Tensor::zeros(0, xs.dtype(), xs.device())
}

/// Itself, or a copy whose rows are contiguous and at one distance.
pub(super) fn with_even_rows(what: &str, xs: &Tensor) -> Result<Tensor> {
    let dense = xs.elem_count() == 0 || xs.dim(D::Minus1)? == 1 || xs.stride()[xs.rank() - 1] == 1;
    if dense && row_stride(xs.layout()).is_some() { Ok(xs.clone()) } else { contiguous(what, xs) }
}

/// Itself, or a copy whose rows or columns are contiguous.
fn matrix(what: &str, tensor: &Tensor) -> Result<Tensor> {
    if view::<f32>(&[], tensor.layout()).is_some() { Ok(tensor.clone()) } else { contiguous(what, tensor) }
}

/// A matrix as it is in memory, if its rows or columns are contiguous.
fn view<'a, E>(data: &'a [E], layout: &Layout) -> Option<Matrix<'a, E>> {
    let (rows, columns) = layout.shape().dims2().ok()?;
    let data = &data[layout.start_offset().min(data.len())..];
    let &[row, column] = layout.stride() else { return None };
    match () {
        () if column == 1 || columns <= 1 => Some(Matrix { data, rows, columns, stride: row, is_transposed: false }),
        () if row == 1 || rows <= 1 => Some(Matrix { data, rows, columns, stride: column, is_transposed: true }),
        () => None,
    }
}

/// Rows of any number of dimensions as a matrix.
pub(super) fn rows_of<'a, E>(data: &'a [E], layout: &Layout) -> Result<Matrix<'a, E>> {
    let (dims, Some(stride)) = (layout.dims(), row_stride(layout)) else {
        bail!("[{OP}] rows of the input are not evenly spaced")
    };
    let (rows, columns) = (dims[..dims.len() - 1].iter().product(), dims[dims.len() - 1]);
    Ok(Matrix { data: &data[layout.start_offset().min(data.len())..], rows, columns, stride, is_transposed: false })
}

/// `xs · weightᵀ + bias`; an empty bias adds nothing.
#[derive(Clone, Copy)]
struct Project {
    tier: Tier,
}

impl Ternary for Project {
    const NAME: &'static str = OP;

    fn forward(
        &self,
        [(xs, of_xs), (weight, of_weight), (bias, of_bias)]: [Operand; 3],
    ) -> Result<(CpuStorage, Shape)> {
        let ys = with_float!(OP, xs.dtype(), |E| {
            let xs = xs.as_slice::<E>()?;
            // A matrix may be transposed.
            let left = if of_xs.dims().len() == 2 { view(xs, of_xs) } else { rows_of(xs, of_xs).ok() };
            let (Some(left), Some(weight)) = (left, view(weight.as_slice::<E>()?, of_weight)) else {
                bail!("[{OP}] the input or the weight has no contiguous lines")
            };
            let bias = rowwise::contiguous(bias.as_slice::<E>()?, of_bias)?;
            let bias: Vec<_> = bias.iter().map(|x| x.to_f64() as f32).collect();
            let bias = Some(bias.as_slice()).filter(|bias| !bias.is_empty());
            let right = Right::Matrix(weight.t(), self.tier);
            E::to_cpu_storage_owned(multiply(left, right, Epilogue { bias, ..Default::default() })?)
        });
        Ok((ys, with_width(of_xs.dims(), of_weight.dims()[0])))
    }

    /// `gradient · weight`, `gradientᵀ · xs`, and the sums of the gradient's columns.
    fn backward(&self, [xs, weight, bias]: [&Tensor; 3], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let rows = |what: &str, tensor: &Tensor| {
            let tensor = contiguous(what, &tensor.detach())?;
            let (width, lead) = (tensor.dim(D::Minus1)?, &tensor.dims()[..tensor.rank() - 1]);
            tensor.reshape((lead.iter().product::<usize>(), width))
        };
        let gradient = rows("gradient", gradient)?;
        let multiply = |left: &Tensor, right: &Tensor| left.apply_op3_no_bwd(&right.t()?, &nothing(left)?, &Op3(*self));
        let of_xs = || multiply(&gradient, &weight.detach())?.reshape(xs.dims());
        // In the order in which the weight is stored.
        let of_weight = || match weight.is_contiguous() {
            true => multiply(&gradient.t()?, &rows("input", xs)?),
            false => multiply(&rows("input", xs)?.t()?, &gradient)?.t(),
        };
        let of_bias = || column_sums(&gradient, self.tier);
        Ok([
            xs.track_op().then(of_xs).transpose()?,
            weight.track_op().then(of_weight).transpose()?,
            bias.track_op().then(of_bias).transpose()?,
        ])
    }
}

/// The sum of each column of rows (.., out), the gradient of a bias (out,).
fn column_sums(rows: &Tensor, tier: Tier) -> Result<Tensor> {
    let storage = read(rows);
    with_float!(OP, rows.dtype(), |E| {
        let rows = rows_of(storage.elements::<E>()?, storage.layout)?;
        let sums = linear::column_sums(rows, tier, executor()).map_err(kernel_error)?;
        let width = sums.len();
        Tensor::from_vec(sums, width, &Device::Cpu)
    })
}

/// The gradient of the input of a packed weight, from that of some columns of the output.
pub(super) fn packed_input_gradient(
    gradient: &Tensor,
    weight: &linear::PackedWeight,
    columns: Range<usize>,
) -> Result<Tensor> {
    let gradient = with_even_rows("gradient", gradient)?;
    let (storage, shape) = (read(&gradient), with_width(gradient.dims(), weight.inputs()));
    with_float!(OP, gradient.dtype(), |E| {
        let left = rows_of(storage.elements::<E>()?, storage.layout)?;
        let ys = multiply(left, Right::Transposed(weight, columns), Epilogue::default())?;
        Tensor::from_vec(ys, shape, &Device::Cpu)
    })
}
