//! What a number that somebody sets is expected to be. Each error names the operation and the number.

use std::fmt::Debug;

use candle_core::{Result, bail};

/// From 1 to `u32::MAX`, so that the product of two sizes fits a tensor's shape.
pub(crate) fn size(op: &str, name: &str, size: impl Into<Option<usize>>) -> Result<()> {
    let size = size.into();
    check(op, name, size, |size| size > 0, "at least 1")?;
    check(op, name, size, |size| size <= u32::MAX as usize, &format!("at most {}", u32::MAX))
}

/// From 0 to 1.
pub(crate) fn probability(op: &str, name: &str, p: f64) -> Result<()> {
    check(op, name, Some(p), |p| (0.0..=1.0).contains(&p), "a probability from 0 to 1")
}

pub(crate) fn finite(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    check(op, name, number.into(), f64::is_finite, "a finite number")
}

/// Finite and above zero.
pub(crate) fn above_zero(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    check(op, name, number.into(), |number| number.is_finite() && number > 0.0, "a finite number above zero")
}

/// What a norm adds to a mean square or a variance in f32: finite there, zero or more.
pub(crate) fn epsilon(op: &str, name: &str, eps: impl Into<Option<f64>>) -> Result<()> {
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
