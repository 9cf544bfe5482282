//! The gated delta rule.

mod arguments;
mod backward;
mod call;
mod forward;
mod specialization;

pub(crate) use specialization::element_code;

pub use call::{DeltaCall, DeltaGradients, DeltaKernel, DeltaResults};
