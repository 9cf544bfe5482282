//! The fused CPU kernel against the oracle of plain f64 loops, on every tier that this processor has, as a sceptic would
//! test it. Tiers that it lacks are named as skipped.
//!
//! Properties draw a fixed number of random cases from a fixed seed. `PROPTEST_CASES` sets another number for every
//! property, and `PROPTEST_RNG_SEED` another seed; a failure prints both, and the smallest case that still fails. A long
//! run:
//!
//! ```text
//! PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test --test flash grid
//! ```
//!
//! `precision.json` holds PyTorch's errors; `python tests/flash/precision.py` makes it.

#[path = "../sdpa/array.rs"]
mod array;
#[path = "../sdpa/check.rs"]
#[allow(dead_code, reason = "a part is for weights and gradients")]
mod check;
#[path = "../common/mod.rs"]
mod common;
#[path = "../sdpa/oracle.rs"]
mod oracle;
#[path = "../sdpa/recipe.rs"]
#[allow(dead_code, reason = "a part is for other sizes")]
mod recipe;

// What the tests stand on: random cases of a kernel's sizes, and the comparison on every tier.
mod draw;
mod fused;

mod empty;
mod environment;
mod extremes;
mod grid;
mod invariance;
mod isolation;
mod merge;
mod numbers;
mod planned;
mod precision;
mod threads;
