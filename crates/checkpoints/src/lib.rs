//! Checkpoints of every kind for `candle-attention`: files of weights, GGUF, and layers of Hugging Face models by name.
//!
//! - [`files`]: safetensors and files of `torch.save`, whole or in shards, as one of Candle's builders.
//! - [`gguf`]: layers of GGUF files, with their weights in the types that they are stored in.
//! - [`hf`]: the config and the layer of a model, by its config.json.
//! - [`peft`]: LoRA adapters in PEFT's files.
//! - `hub` (feature `hub`): files of the Hugging Face hub.
//!
//! The layer itself is in `candle-attention-core`. Models use the package `candle-attention`, which re-exports these
//! items as `weights`, `gguf`, `hf`, `peft` and `hub`.

pub mod files;
pub mod gguf;
pub mod hf;
#[cfg(feature = "hub")]
pub mod hub;
pub mod peft;
