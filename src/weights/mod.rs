//! Attention weights under the names that other libraries give them.
//!
//! A [`WeightLayout`] says how a checkpoint names, packs and transposes the four projections. The loader turns any of
//! them into the same four linear layers, so that a model reads one kind of layer whatever its file looks like:
//!
//! ```no_run
//! use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights};
//! use candle_core::{DType, Device};
//! # fn main() -> candle_core::Result<()> {
//! let vb = weights::open("model.safetensors", DType::F32, &Device::Cpu)?.pp("encoder.attn");
//! let layout = WeightLayout::detect(&vb)?;
//! let cfg = MultiHeadAttentionConfig::new(768, 12).with_bias(true);
//! let mha = MultiHeadAttention::load(&cfg, layout, vb)?;
//! # Ok(()) }
//! ```

mod checkpoint;
mod detect;
mod layout;
mod load;
mod pickle;
mod pth;
mod safetensors;
mod source;
mod stored;
mod tensors;

pub use checkpoint::{Checkpoint, open, open_mmaped};
pub use layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};

#[cfg(feature = "hub")]
pub(crate) use self::safetensors::ShardIndex;
pub(crate) use load::{Linears, LoadedProjections, ProjectionRows, load_projections, state_dict};
pub(crate) use source::{LINEAR_WEIGHT, Part, Source, has, linear_bias, root, whole};
pub(crate) use tensors::projection_shapes;
