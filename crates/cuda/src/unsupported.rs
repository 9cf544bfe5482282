//! The reason why a call cannot run on the kernels.

use std::error::Error;
use std::fmt;

use candle_attention_device::Failure;

/// The reason why no kernel runs a call, in one sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    reason: String,
}

impl Unsupported {
    /// Creates a reason from its sentence, without a full stop.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }

    /// Returns the sentence.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Error for Unsupported {}

impl From<Failure> for Unsupported {
    fn from(failure: Failure) -> Self {
        Self::new(failure.reason)
    }
}

impl From<Unsupported> for candle_core::Error {
    fn from(unsupported: Unsupported) -> Self {
        Self::msg(unsupported.reason)
    }
}
