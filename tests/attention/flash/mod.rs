//! The fused CPU kernel, on every instruction set, at the sizes that its tiles and vectors leave over.

mod extremes;
mod grid;
mod invariance;
