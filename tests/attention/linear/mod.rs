//! [`PackedLinear`](candle_attention::PackedLinear) against plain loops in f64, on every tier that this processor has.

// What the tests stand on: random cases, and the comparison on every tier.
pub mod case;

mod candle;
mod followed;
mod gradients;
mod grid;
mod isolation;
mod quantized;
