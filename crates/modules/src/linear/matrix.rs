//! Tensors as the matrices that the kernels read.

use std::ops::Deref;

use candle_core::{Layout, Result, Storage, Tensor, bail};

use super::OP;
use crate::base::check_memory;
use crate::base::rowwise::{Read, TensorElement};
use candle_attention_kernels::linear::Matrix;

/// The number of rows from which a transposed left factor is read in place: the lanes of the widest vector. Fewer rows
/// would be gathered one by one in each task.
const TRANSPOSED_ROWS: usize = 16;

/// Returns a tensor (.., columns) as a matrix in place, if its rows are evenly spaced and either the rows or the
/// columns are contiguous. An empty tensor is always a matrix.
fn matrix<'a, E>(data: &'a [E], layout: &Layout) -> Option<Matrix<'a, E>> {
    let (&columns, lead) = layout.dims().split_last()?;
    let column_stride = layout.stride()[lead.len()];
    let data = &data[layout.start_offset().min(data.len())..];
    let rows: usize = lead.iter().product();
    let by_rows = |stride| Matrix { data, rows, columns, stride, is_transposed: false };
    if layout.shape().elem_count() == 0 {
        return Some(by_rows(0));
    }
    let row_stride = even_stride(lead, layout.stride())?;
    if column_stride == 1 || columns == 1 {
        return Some(by_rows(row_stride));
    }
    if row_stride == 1 || rows == 1 {
        return Some(Matrix { stride: column_stride, is_transposed: true, ..by_rows(0) });
    }
    None
}

/// Returns the distance of the rows of all leading dimensions, if it is the same everywhere; 0 for a single row.
fn even_stride(lead: &[usize], strides: &[usize]) -> Option<usize> {
    // The innermost dimension so far of more than one entry: the rows that it spans, and their distance.
    let mut inner: Option<(usize, usize)> = None;
    let mut row_stride = 0;
    for (&dim, &stride) in lead.iter().zip(strides).rev() {
        if dim == 1 {
            continue;
        }
        match inner {
            None => row_stride = stride,
            Some((inner_dim, inner_stride)) if stride == inner_dim * inner_stride => {}
            Some(_) => return None,
        }
        inner = Some((dim, stride));
    }
    Some(row_stride)
}

/// Returns the matrix that a tensor is in memory.
///
/// # Errors
/// If the tensor is not a matrix in place; see [`as_matrix`].
pub(super) fn matrix_of<'a, E: TensorElement>(
    own: &'a Read<'_, impl Deref<Target = Storage>>,
) -> Result<Matrix<'a, E>> {
    match matrix(own.elements()?, own.layout) {
        Some(matrix) => Ok(matrix),
        None => bail!("[{OP}] rows of strides {:?} are not contiguous and evenly spaced", own.layout.stride()),
    }
}

/// Returns the tensor, or a contiguous copy if it is not a matrix in place.
pub(super) fn as_matrix(what: &str, xs: &Tensor) -> Result<Tensor> {
    if matrix::<()>(&[], xs.layout()).is_some() { Ok(xs.clone()) } else { contiguous(what, xs) }
}

/// Returns the tensor, or a contiguous copy if it is not a matrix that is read fast as the left factor of a product.
pub(super) fn as_left_factor(what: &str, xs: &Tensor) -> Result<Tensor> {
    match matrix::<()>(&[], xs.layout()) {
        Some(matrix) if !matrix.is_transposed || matrix.rows >= TRANSPOSED_ROWS => Ok(xs.clone()),
        _ => contiguous(what, xs),
    }
}

/// Returns the tensor, or a contiguous copy, after checking that the copy can be allocated: Candle ends the program
/// otherwise. An empty view is returned as it is, since it may begin past the end of its buffer.
pub(super) fn contiguous(what: &str, tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() == 0 {
        return Ok(tensor.clone());
    }
    if !tensor.is_contiguous() {
        check_memory(OP, format_args!("a contiguous copy of the {what} of shape {:?}", tensor.dims()), tensor.dims())?;
    }
    tensor.contiguous()
}
