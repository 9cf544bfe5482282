//! Why a call was not computed.

use std::fmt;

use crate::cpu::{InstructionSet, UnsupportedInstructionSet};

/// Why a call was not computed. Nothing was written then.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The tier that the call named cannot be had.
    InstructionSet(UnsupportedInstructionSet),
    /// Sizes that do not fit each other: what was expected and what was found.
    Shape(String),
    /// There is no memory for what is named.
    Memory(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InstructionSet(error) => error.fmt(f),
            Self::Shape(message) => f.write_str(message),
            Self::Memory(what) => write!(f, "{what} does not fit in memory"),
        }
    }
}

impl std::error::Error for Error {}

/// That the processor has the tier.
pub(crate) fn check_tier(tier: InstructionSet) -> Result<(), Error> {
    if tier.is_available() { Ok(()) } else { Err(Error::InstructionSet(UnsupportedInstructionSet::Unavailable(tier))) }
}

/// That a slice has one element for each of what is counted.
pub(crate) fn check_len(what: &str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Shape(format!("{what} has {found} elements, expected {expected}")))
}
