#![doc = include_str!("guide.md")]

mod adapter;
mod adapters;
mod config;
mod file;
mod fit;
mod load;
mod merged;
mod names;
mod targets;
mod tensors;

pub use adapter::Adapter;
pub use adapters::Adapters;
pub use config::{AdapterBias, AdapterConfig};

/// The operation that errors name.
const OP: &str = "peft";
