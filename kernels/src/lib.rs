//! Attention and packed matrix products for CPUs: slices in, slices out.

#![expect(missing_docs, reason = "written with the final surface")]

mod cpu;
pub mod flash;
pub mod linear;
mod scalar;

pub use cpu::{Element, Tier, TierError, Workers, for_each_task, reserve};
pub use scalar::Scalar;
