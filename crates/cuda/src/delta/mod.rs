//! The gated delta rule.

mod arguments;
mod backward;
mod call;
mod forward;
mod specialization;

pub(crate) use specialization::{entries, program_of_options};

pub use call::{CudaDeltaCall, CudaDeltaGradients, DeltaKernel, DeltaResults};
