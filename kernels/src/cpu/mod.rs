//! What the CPU kernels stand on: the instruction sets and which of them a call uses.

pub(crate) mod arch;
mod dispatch;
mod element;
mod kernel;
mod memory;
mod scratch;
#[cfg(test)]
mod tests;
mod threads;
mod tier;
mod vector;

pub(crate) use dispatch::{ForKernel, on_kernel};
pub use element::Element;
pub(crate) use element::{MOST_LANES, load_first, store_first};
pub(crate) use kernel::{Bf16Pairs, F16Rows, Job, Kernel, MOST_COLUMNS, Narrow, Product};
pub(crate) use memory::filled;
pub use memory::reserve;
pub(crate) use scratch::Scratch;
pub use threads::{Workers, for_each_task};
pub use tier::{Tier, TierError};
pub(crate) use vector::{Vector, tanh};
