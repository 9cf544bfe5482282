//! Why a call was not computed.

use std::fmt;

use crate::cpu::{InstructionSet, UnsupportedInstructionSet};

/// Why a call was not computed. Nothing was written then.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The instruction set that the call named cannot be had.
    InstructionSet(UnsupportedInstructionSet),
    /// Sizes that do not fit each other: what was expected and what was found.
    Shape(String),
    /// There is no memory for what is named.
    Memory(String),
    /// A number beyond those that the kernel computes rightly with: the number and the bound.
    Range(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InstructionSet(error) => error.fmt(f),
            Self::Shape(message) | Self::Range(message) => f.write_str(message),
            Self::Memory(what) => write!(f, "{what} does not fit in memory"),
        }
    }
}

impl std::error::Error for Error {}

/// That the processor has the instruction set.
pub(crate) fn check_instruction_set(instruction_set: InstructionSet) -> Result<(), Error> {
    if instruction_set.is_available() {
        Ok(())
    } else {
        Err(Error::InstructionSet(UnsupportedInstructionSet::Unavailable(instruction_set)))
    }
}

/// That a slice has one element for each of what is counted.
pub(crate) fn check_len(what: &str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Shape(format!("{what} has {found} elements, expected {expected}")))
}
