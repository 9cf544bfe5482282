//! The fused CPU kernel against the oracle, on every tier.

pub mod fused;

mod extremes;
mod gradients;
mod grid;
mod invariance;
