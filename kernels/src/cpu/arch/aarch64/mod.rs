//! Arm's 64-bit instruction set.

pub(crate) mod neon;
pub(crate) mod neonbf16;
mod tile;
