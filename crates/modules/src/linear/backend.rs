//! A linear layer on the product of Candle's backends, as one operation in Candle's graph.
//!
//! Candle's own layer is four operations: transposing the weight, reshaping the input, the product, and reshaping the
//! output. A backward pass adds the gradient of each to zeros, which takes longer on a GPU than the products do.

use candle_core::backend::BackendStorage;
use candle_core::op::Add;
use candle_core::{Error, Layout, Result, Storage, Tensor};

use super::OP;
use super::matrix::contiguous;
use crate::base::record;

/// Computes `xs weightᵀ + bias` of inputs (.., in), a weight (out, in) and a bias (out,) on the CPU or on CUDA, none of
/// them empty.
pub(super) fn affine(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let shape = [&xs.dims()[..xs.rank() - 1], &[outputs]].concat();
    let rows = contiguous("input", &xs.detach())?.reshape(((), inputs))?;
    let weight_rows = weight.detach();
    let numbers = product(&rows, &weight_rows, bias)?;
    let input_dims = xs.dims().to_vec();
    let [xs_is_tracked, weight_is_tracked] = [xs, weight].map(Tensor::track_op);
    let bias_is_tracked = bias.is_some_and(Tensor::track_op);
    record(OP, &[Some(xs), Some(weight), bias], numbers, shape, move |_, gradient| {
        let of_outputs = contiguous("gradient", gradient)?.reshape(((), outputs))?;
        let mut gradients = vec![None, None, None];
        if xs_is_tracked {
            gradients[0] = Some(of_outputs.matmul(&weight_rows)?.reshape(input_dims.as_slice())?);
        }
        if weight_is_tracked {
            gradients[1] = Some(of_outputs.t()?.matmul(&rows)?);
        }
        if bias_is_tracked {
            gradients[2] = Some(of_outputs.sum(0)?);
        }
        Ok(gradients)
    })
}

/// Computes the numbers of `rows weightᵀ + bias`.
fn product(rows: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Storage> {
    let transposed = weight.t()?;
    let (left, left_layout) = rows.storage_and_layout();
    let (right, right_layout) = transposed.storage_and_layout();
    let (m, k) = rows.dims2()?;
    let n = weight.dim(0)?;
    let sizes = (1, m, n, k);
    let product = match (&*left, &*right) {
        (Storage::Cpu(left), Storage::Cpu(right)) => {
            Storage::Cpu(left.matmul(right, sizes, left_layout, right_layout)?)
        }
        (Storage::Cuda(left), Storage::Cuda(right)) => {
            Storage::Cuda(left.matmul(right, sizes, left_layout, right_layout)?)
        }
        _ => return Err(other_devices()),
    };
    let Some(bias) = bias else { return Ok(product) };
    let bias_of_rows = bias.broadcast_as((m, n))?;
    let (added, added_layout) = bias_of_rows.storage_and_layout();
    let layout = Layout::contiguous((m, n));
    match (&product, &*added) {
        (Storage::Cpu(product), Storage::Cpu(added)) => {
            Ok(Storage::Cpu(product.binary_impl::<Add>(added, &layout, added_layout)?))
        }
        (Storage::Cuda(product), Storage::Cuda(added)) => {
            Ok(Storage::Cuda(product.binary_impl::<Add>(added, &layout, added_layout)?))
        }
        _ => Err(other_devices()),
    }
}

fn other_devices() -> Error {
    Error::msg(format!("[{OP}] the input, the weight and the bias are on different devices"))
}
