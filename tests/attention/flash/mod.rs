//! The fused CPU kernel against the oracle, on every tier.

pub mod fused;

mod empty;
mod extremes;
mod grid;
mod invariance;
mod numbers;
