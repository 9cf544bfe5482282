//! What a number that somebody sets is expected to be, and which sizes can be addressed and allocated. Each error
//! names the operation and the number.

use std::fmt::Debug;

use candle_core::{Result, bail};

/// From 1 to `u32::MAX`, so that the product of two sizes fits a tensor's shape.
pub fn size(op: &str, name: &str, size: impl Into<Option<usize>>) -> Result<()> {
    let size = size.into();
    check(op, name, size, |size| size > 0, "at least 1")?;
    check(op, name, size, |size| size <= u32::MAX as usize, &format!("at most {}", u32::MAX))
}

/// From 0 to 1.
pub fn probability(op: &str, name: &str, p: f64) -> Result<()> {
    check(op, name, Some(p), |p| (0.0..=1.0).contains(&p), "a probability from 0 to 1")
}

/// Neither infinite nor NaN.
pub fn finite(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    check(op, name, number.into(), f64::is_finite, "a finite number")
}

/// Finite and above zero.
pub fn above_zero(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    check(op, name, number.into(), |number| number.is_finite() && number > 0.0, "a finite number above zero")
}

/// What a norm adds to a mean square or a variance in f32: finite there, zero or more.
pub fn epsilon(op: &str, name: &str, eps: impl Into<Option<f64>>) -> Result<()> {
    let is_right = |eps| (eps as f32).is_finite() && eps >= 0.0;
    check(op, name, eps.into(), is_right, "a finite number of zero or more")
}

fn check<T: Copy + Debug>(
    op: &str,
    name: &str,
    number: Option<T>,
    is_right: impl Fn(T) -> bool,
    expected: &str,
) -> Result<()> {
    match number.filter(|&number| !is_right(number)) {
        Some(number) => bail!("[{op}] {name} is {number:?}, expected {expected}"),
        None => Ok(()),
    }
}

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
