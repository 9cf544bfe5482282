//! Everything that computes, as a sceptic would test it: the reference path and the fused kernel against an oracle of
//! plain loops, layers against themselves in plain loops, projections against f64, and options against transformers'
//! numbers. The kernels run on every tier that this processor has; tiers that it lacks are named as skipped.
//!
//! Properties draw a fixed number of random cases from a fixed seed. `PROPTEST_CASES` sets another number for every
//! property, and `PROPTEST_RNG_SEED` another seed; a failure prints both, and the smallest case that still fails. A
//! long run:
//!
//! ```text
//! PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test --test attention flash::grid
//! ```

#[path = "../common/mod.rs"]
mod common;
#[path = "../cache/seeded.rs"]
mod seeded;

// What the tests stand on: the oracle, random calls, the comparison, the layer in plain loops, and drawn tensors.
mod by_hand;
mod call;
mod recipe;
mod tensors;
use attention_oracle::{array, attention as oracle};

mod calls;
mod dropout;
mod gradients;
mod isolation;
mod layer;
mod layer_gradients;
mod layer_packed;
mod masks;
mod matrices;
mod merge;
mod norms;
mod planned;
mod statistics;
mod varlen;

// Of the kernels alone.
mod environment;
mod flash;
mod linear;
mod precision;
mod threads;

mod embedding;
mod init;
mod options;
mod rope;
