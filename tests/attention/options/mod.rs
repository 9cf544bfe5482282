//! Options of the layer, against transformers: `make.py` writes the numbers.

mod content;
mod layer;
mod models;
mod modules;
mod norms;
mod relative;

use std::path::PathBuf;

use crate::tensors::{CPU, Tensors};

fn data(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/attention/options").join(file)
}

/// The tensors whose names begin so, without it.
fn numbers(prefix: &str) -> Tensors {
    let all = candle_core::safetensors::load(data("numbers.safetensors"), &CPU).expect("the numbers are there");
    let own = all.into_iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor)));
    let own: Tensors = own.collect();
    assert!(!own.is_empty(), "there are no numbers of {prefix}");
    own
}
