//! The errors of a call.

use std::fmt;

use crate::cpu::{InstructionSet, UnsupportedInstructionSet};

/// The reason why a call was not computed. The call has written nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The instruction set of the call is not available.
    InstructionSet(UnsupportedInstructionSet),
    /// Sizes do not fit each other. The text says what was expected and what was found.
    Shape(String),
    /// There is no memory for the named numbers.
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

/// Checks that the processor has the instruction set.
pub(crate) fn check_instruction_set(instruction_set: InstructionSet) -> Result<(), Error> {
    instruction_set.check_available().map_err(Error::InstructionSet)
}

/// Checks the length of a slice.
pub(crate) fn check_len(what: &str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Shape(format!("{what} has {found} elements, expected {expected}")))
}
