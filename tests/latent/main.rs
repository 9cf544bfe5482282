//! Multi-head latent attention: the numbers of plain loops, whatever is cached and however positions are cut into calls.
//! `tests/hf` compares the layers of real architectures with transformers.

#[path = "../common/mod.rs"]
mod common;
#[path = "../cache/plan.rs"]
#[allow(dead_code, reason = "a part is for the tests of the cache")]
mod plan;
use attention_oracle::array;

// What the tests stand on: random layers, and the same in plain loops.
mod by_hand;
mod layers;

mod cached;
mod edit;
mod gradients;
mod numbers;
