//! [`PackedLinear`](candle_attention::PackedLinear) against plain loops in f64, on every instruction set that this
//! processor has.

// Shared by the tests: random cases, and the comparison on every instruction set.
pub mod case;

mod candle;
mod codes;
mod followed;
mod gradients;
mod grid;
mod isolation;
mod quantized;
