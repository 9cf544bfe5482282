//! The fused CPU kernel on every instruction set, at sizes that are no multiples of its tiles and vectors.

mod extremes;
mod grid;
mod invariance;
