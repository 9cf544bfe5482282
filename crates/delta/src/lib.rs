#![doc = include_str!("../README.md")]

mod net;
mod rule;

pub use net::{DeltaCache, DeltaInput, DeltaLayout, DeltaPool, GatedDeltaNet, GatedDeltaNetConfig};
pub use rule::{DeltaOptions, gated_delta_rule, gated_delta_rule_varlen};

/// Internals that other packages of the workspace use. They are not covered by semantic versioning.
#[doc(hidden)]
pub mod internal {
    pub use crate::net::{CONVOLUTION_CASE, DeltaWeights, GATES_CASE};
    pub use crate::rule::{DELTA_BACKWARD_CASE, DELTA_CASE};
}
