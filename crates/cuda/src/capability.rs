//! What a device offers to a kernel.

use std::fmt;

/// A compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// The major version: 9 for Hopper.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The limits of a device on which the choice of kernels depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The compute capability.
    pub capability: Capability,
    /// The number of multiprocessors.
    pub multiprocessors: usize,
    /// The bytes of shared memory that a block can have.
    pub shared_bytes: usize,
}
