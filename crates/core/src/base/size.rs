//! Checks that a tensor's size can be addressed and allocated and that sizes fit together, and views of empty tensors.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

/// From how many bytes on the allocator is asked before Candle is: smaller requests are not refused in practice.
const LARGE: u64 = 1 << 32;

/// Whether the bytes of a tensor of these dimensions can be addressed.
///
/// A dimension of 0 counts as 1: Candle computes strides and the shapes of views from products of some of the
/// dimensions, which overflow next to a 0 too.
pub fn is_addressable(dims: &[usize]) -> bool {
    // The largest element has eight bytes.
    let most = isize::MAX as usize / 8;
    let product = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)));
    product.is_some_and(|product| product <= most)
}

/// Whether a tensor of these dimensions can be allocated. Candle aborts the program where the allocator refuses; this
/// asks the allocator first, for one byte an element.
pub fn fits_in_memory(dims: &[usize]) -> bool {
    is_addressable(dims)
        && match dims.iter().product::<usize>() {
            count if (count as u64) < LARGE => true,
            count => Vec::<u8>::new().try_reserve_exact(count).is_ok(),
        }
}

/// A vector of as many elements as the dimensions have, all `value`; `None` where it cannot be allocated.
pub fn filled<T: Clone>(dims: &[usize], value: T) -> Option<Vec<T>> {
    if !is_addressable(dims) {
        return None;
    }
    let count = dims.iter().product();
    let mut values = Vec::new();
    values.try_reserve_exact(count).ok()?;
    values.resize(count, value);
    Some(values)
}

/// That keys and values, (B, T_kv, ..) each, have the queries' batch size `b` and one length; without queries, one
/// batch size.
pub(crate) fn check_keys_and_values(op: &str, b: Option<usize>, keys: &Tensor, values: &Tensor) -> Result<()> {
    let ([b_k, t_k], [b_v, t_v]) = ([keys.dim(0)?, keys.dim(1)?], [values.dim(0)?, values.dim(1)?]);
    if let Some(b) = b.filter(|&b| b != b_k) {
        let repeat =
            if b_k == 1 { format!("; `repeat(({b}, 1, 1))` gives one sequence to all") } else { String::new() };
        bail!("[{op}] keys {:?} have batch size {b_k}, expected the queries' {b}{repeat}", keys.dims())
    }
    if b_v != b_k {
        bail!("[{op}] values {:?} have batch size {b_v}, expected the keys' {b_k}", values.dims())
    }
    if t_v != t_k {
        bail!("[{op}] values {:?} have length {t_v}, expected a value for each of {t_k} keys", values.dims())
    }
    Ok(())
}

/// `tensor.narrow` along a dimension, which an empty tensor allows too: a view of one may start past the end of its
/// buffer, where Candle's copies panic, so that it becomes a new tensor.
pub(crate) fn part(tensor: &Tensor, dim: usize, range: Range<usize>) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return tensor.narrow(dim, range.start, range.len());
    }
    let mut dims = tensor.dims().to_vec();
    dims[dim] = range.len();
    Tensor::zeros(dims, tensor.dtype(), tensor.device())
}
