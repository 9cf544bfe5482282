//! Options of the layer, against transformers: `make.py` writes the numbers.

mod absent;
mod content;
mod models;
mod modules;
mod norms;
mod relative;
mod trained;

use crate::by_hand::{parameters, tensors};
use crate::*;

/// Returns the tensors whose names begin with a prefix, without the prefix.
fn numbers(prefix: &str) -> Tensors {
    let all = recorded_tensors("attention/options/numbers.safetensors").expect("the numbers are there");
    let own = all.into_iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor)));
    let own: Tensors = own.collect();
    assert!(!own.is_empty(), "there are no numbers of {prefix}");
    own
}

/// Draws random numbers for every parameter of a layer.
fn weights(cfg: &Config) -> Result<Tensors> {
    tensors(&parameters(cfg, 3), DType::F32, &CPU)
}
