//! A layer with a cache gives the numbers of the layer without one, however its positions are cut into calls; what the
//! cache holds is where it was written, and stays as it was where a call fails.
//!
//! Random plans come from fixed seeds; `CACHE_CASES` sets another number of them for every test.

#[path = "../attention/by_hand.rs"]
#[allow(dead_code, reason = "only its parameters are needed")]
mod by_hand;
#[path = "../common/mod.rs"]
mod common;
#[path = "../latent/layers.rs"]
mod latent_layers;
use attention_oracle::{array, attention as oracle};

// What the tests stand on: positions cut into calls, and the comparison with the layer without a cache.
mod compare;
mod plan;

mod buffers;
mod calls;
mod edit;
mod latent;
mod masks;
mod memory;
mod misuse;
mod rotary;
mod shared;
mod warnings;
