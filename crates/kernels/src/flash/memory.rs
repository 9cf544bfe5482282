//! Memory for results.

use crate::cpu::Unwritten;
use crate::error::Error;

/// Returns zeros for a result with this name and shape.
pub(super) fn zeros<T: Copy + Default>(name: &str, shape: &[usize]) -> Result<Vec<T>, Error> {
    let mut zeros = unwritten(name, shape)?;
    zeros.clear();
    // SAFETY: every element was cleared.
    Ok(unsafe { zeros.into_vec() })
}

/// Returns uninitialised memory for a result with this name and shape.
pub(super) fn unwritten<T>(name: &str, shape: &[usize]) -> Result<Unwritten<T>, Error> {
    Unwritten::new(shape).ok_or_else(|| Error::Memory(format!("{name} of {shape:?}")))
}

/// Returns the error of a call whose tasks find no memory.
pub(super) fn no_scratch_memory() -> Error {
    Error::Memory("a scratch buffer of attention".into())
}
