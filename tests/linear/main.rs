//! [`PackedLinear`](candle_attention::PackedLinear) against plain loops in f64, on every tier that this processor has.
//!
//! Properties draw a fixed number of random cases from a fixed seed. `PROPTEST_CASES` sets another number for every
//! property, and `PROPTEST_RNG_SEED` another seed; a failure prints both, and the smallest case that still fails. A long
//! run:
//!
//! ```text
//! PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test --test linear grid
//! ```
//!
//! `precision.json` holds PyTorch's errors; `python tests/linear/precision.py` makes it.

#[path = "../sdpa/array.rs"]
#[allow(dead_code, reason = "a part is for masks")]
mod array;
#[path = "../common/mod.rs"]
mod common;

// What the tests stand on: random cases, and the comparison on every tier.
mod case;
mod draw;

mod builder;
mod conversion;
mod empty;
mod environment;
mod gradients;
mod grid;
mod invariance;
mod isolation;
mod precision;
mod threads;
mod views;
