//! Rotary positions: angles by position, on one axis or several, and the rotation of heads.

mod angles;
mod axes;
mod config;
mod rotary;

pub use axes::{RopeAxes, RopeAxisLayout};
pub use config::{RopeConfig, RopeScaling, RopeStyle};
pub use rotary::RotaryEmbedding;

pub(crate) use angles::score_factor;
pub(crate) use axes::AxisPositions;
pub(crate) use rotary::Rotation;
