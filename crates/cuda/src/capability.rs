//! Compute capabilities, and the limits of devices.

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

impl Limits {
    /// Returns the limits of a device with a compute capability: the shared memory of NVIDIA's table "Technical
    /// Specifications per Compute Capability", and the multiprocessors of an A100.
    pub fn of_capability(capability: Capability) -> Self {
        let Capability { major, minor } = capability;
        let kibibytes = match (major, minor) {
            (8, 0 | 7) => 163,
            (8, _) | (12.., _) => 99,
            _ => 227,
        };
        Self { capability, multiprocessors: 108, shared_bytes: kibibytes * 1024 }
    }
}
