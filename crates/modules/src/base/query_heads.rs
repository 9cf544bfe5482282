//! The order of query heads in a checkpoint.

use candle_core::{Result, Tensor};

/// The order in which a checkpoint stores the query heads of a layer with fewer key heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryHeadOrder {
    /// Query head h reads key head h / (H / H_kv), as in this crate: heads that share a key head are neighbours.
    Grouped,
    /// Query head h reads key head h % `num_kv_heads`.
    Cyclic {
        /// The number H of query heads.
        num_heads: usize,
        /// The number H_kv of key heads.
        num_kv_heads: usize,
    },
}

impl QueryHeadOrder {
    /// Returns the heads along a dimension of a stored tensor in this crate's order.
    ///
    /// # Errors
    /// If the tensor cannot be copied.
    pub fn reorder_to_grouped(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        match self {
            Self::Grouped => Ok(tensor.clone()),
            Self::Cyclic { num_heads, num_kv_heads } => {
                swap_blocks(tensor, dim, num_heads / num_kv_heads, num_kv_heads)
            }
        }
    }

    /// Returns the heads along a dimension, which are in this crate's order, in the order of the checkpoint.
    ///
    /// # Errors
    /// If the tensor cannot be copied.
    pub fn reorder_from_grouped(self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        match self {
            Self::Grouped => Ok(tensor.clone()),
            Self::Cyclic { num_heads, num_kv_heads } => {
                swap_blocks(tensor, dim, num_kv_heads, num_heads / num_kv_heads)
            }
        }
    }
}

/// Divides a dimension into (outer, inner, rest), and returns it as (inner, outer, rest).
fn swap_blocks(tensor: &Tensor, dim: usize, outer: usize, inner: usize) -> Result<Tensor> {
    let dims = tensor.dims();
    let divided = [&dims[..dim], &[outer, inner, dims[dim] / (outer * inner)], &dims[dim + 1..]].concat();
    tensor.reshape(divided)?.transpose(dim, dim + 1)?.contiguous()?.reshape(dims)
}
