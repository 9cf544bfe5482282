//! The reference path against an oracle of plain loops, as a sceptic would test it.
//!
//! Properties draw a fixed number of random cases from a fixed seed. `PROPTEST_CASES` sets another number for every
//! property, and `PROPTEST_RNG_SEED` another seed; a failure prints both, and the smallest case that still fails:
//!
//! ```text
//! PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test --test sdpa
//! ```

#[path = "../common/mod.rs"]
mod common;

// What the tests stand on: numbers, the oracle, random cases, the comparison, and the layer in plain loops.
mod array;
mod by_hand;
mod check;
mod oracle;
mod recipe;

mod calls;
mod dropout;
mod gradients;
mod isolation;
mod joint;
mod layer;
mod layer_gradients;
mod masks;
mod merge;
mod planned;
mod varlen;
