//! Positions: rotary embeddings of queries and keys, and biases by distance.

mod alibi;
mod angles;
mod config;
mod frequencies;
mod rope;
mod rotate;
mod t5;

pub use alibi::{AlibiConfig, alibi_slopes};
pub use config::{RopeConfig, RopeScaling, RopeStyle};
pub use rope::RotaryEmbedding;
pub use t5::{RelativeBias, RelativeBiasConfig};

pub(crate) use alibi::Alibi;
pub(crate) use frequencies::score_factor;
pub(crate) use rope::Positions;
pub(crate) use rotate::Rotation;
