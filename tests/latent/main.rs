//! Multi-head latent attention: the numbers of plain loops, and gradients. `tests/cache` has its caches, and `tests/hf`
//! compares the layers of real architectures with transformers.

#[path = "../attention/by_hand.rs"]
#[allow(dead_code, reason = "a part is for the other layer")]
mod by_hand;
#[path = "../common/mod.rs"]
mod common;
use attention_oracle::{array, attention as oracle};

// What the tests stand on: random layers, and the same in plain loops.
mod layers;
mod plain_loops;

mod gradients;
mod numbers;
