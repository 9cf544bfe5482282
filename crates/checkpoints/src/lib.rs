//! Checkpoints of every kind for `candle-attention`: files of weights, GGUF, and layers of Hugging Face models by name.
//!
//! - [`files`]: safetensors and files of `torch.save`, whole or in shards, as a builder of Candle's.
//! - [`gguf`]: layers of GGUF files, with their weights in the types that they are stored in.
//! - [`hf`]: the config and the layer of a model, by its config.json.
//! - `hub` (feature `hub`): files of the Hugging Face hub.
//!
//! Below lies `candle-attention-core`, the layer itself. Models use the package `candle-attention`, which gives these
//! names as `weights`, `gguf`, `hf` and `hub`.

pub mod files;
pub mod gguf;
pub mod hf;
#[cfg(feature = "hub")]
pub mod hub;
