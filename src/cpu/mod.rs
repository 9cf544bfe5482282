//! What the CPU kernels stand on: the instruction sets and which of them a call uses.

pub(crate) mod arch;
mod element;
mod kernel;
mod scratch;
#[cfg(test)]
mod tests;
mod threads;
mod tier;
mod vector;

pub(crate) use element::{Element, load_first, store_first};
pub(crate) use kernel::{Job, Kernel, MOST_COLUMNS, Product};
pub(crate) use scratch::Scratch;
pub(crate) use threads::{for_each_task, threads};
pub use tier::Tier;
pub(crate) use vector::{Vector, tanh};
