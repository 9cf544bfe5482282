//! What a number that somebody sets is expected to be. Each error names the operation and the number.

use candle_core::{Result, bail};

/// From 1 to `u32::MAX`, so that the product of two sizes fits a tensor's shape.
pub(crate) fn size(op: &str, name: &str, size: impl Into<Option<usize>>) -> Result<()> {
    match size.into() {
        Some(0) => bail!("[{op}] {name} is 0, expected at least 1"),
        Some(size) if size > u32::MAX as usize => bail!("[{op}] {name} is {size}, expected at most {}", u32::MAX),
        _ => Ok(()),
    }
}

/// From 0 to 1.
pub(crate) fn probability(op: &str, name: &str, p: f64) -> Result<()> {
    if !(0.0..=1.0).contains(&p) {
        bail!("[{op}] {name} is {p}, expected a probability from 0 to 1")
    }
    Ok(())
}

pub(crate) fn finite(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    match number.into() {
        Some(number) if !number.is_finite() => bail!("[{op}] {name} is {number}, expected a finite number"),
        _ => Ok(()),
    }
}

/// Finite and above zero.
pub(crate) fn above_zero(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    match number.into() {
        Some(number) if !(number.is_finite() && number > 0.0) => {
            bail!("[{op}] {name} is {number}, expected a finite number above zero")
        }
        _ => Ok(()),
    }
}

/// What a norm adds to a mean square or a variance in f32: finite there, zero or more.
pub(crate) fn epsilon(op: &str, name: &str, eps: impl Into<Option<f64>>) -> Result<()> {
    match eps.into() {
        Some(eps) if !is_epsilon(eps) => bail!("[{op}] {name} is {eps}, expected a finite number of zero or more"),
        _ => Ok(()),
    }
}

/// The [`epsilon`] of a norm that has other options too.
pub(crate) fn epsilon_of(op: &str, norm: &str, eps: Option<f64>) -> Result<()> {
    match eps {
        Some(eps) if !is_epsilon(eps) => bail!("[{op}] {norm} has eps {eps}, expected a finite number of zero or more"),
        _ => Ok(()),
    }
}

fn is_epsilon(eps: f64) -> bool {
    (eps as f32).is_finite() && eps >= 0.0
}
