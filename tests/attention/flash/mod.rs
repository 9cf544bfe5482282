//! The fused CPU kernel against the oracle, on every tier.

// What the tests stand on: random calls of a kernel's sizes.
pub mod draw;
pub mod fused;

mod empty;
mod extremes;
mod grid;
mod invariance;
mod numbers;
