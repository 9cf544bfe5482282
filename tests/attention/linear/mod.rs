//! [`PackedLinear`](candle_attention::PackedLinear) against plain loops in f64, on every instruction set that this
//! processor has.

// What the tests stand on: random cases, and the comparison on every instruction set.
pub mod case;

mod candle;
mod followed;
mod gradients;
mod grid;
mod isolation;
mod quantized;
