//! Files of weights, whatever their format.

mod checkpoint;
mod pickle;
mod pth;
mod safetensors;
mod stored;

pub use checkpoint::{Checkpoint, open, open_mmaped};

#[cfg(feature = "hub")]
pub(crate) use self::safetensors::ShardIndex;
