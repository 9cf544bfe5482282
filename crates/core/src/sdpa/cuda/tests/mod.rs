//! The CUDA kernels on the emulator, which runs their source on tensors of the CPU: compared with the reference path in
//! f64, forward and backward, and with the CPU kernel. Without a C++ compiler, each test says that it is skipped.
//!
//! A specialisation of the kernels takes some seconds to compile, so that calls with score modifiers have all of them.

mod caches;
mod dropout;
mod first_use;
mod isolation;
mod large_biases;
mod lists;
mod masks;
mod modifiers;
mod packed;
mod pages;
mod plans;
mod problem;
mod strides;

pub use problem::emulator_runs;
