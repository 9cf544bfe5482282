//! Options of the layer, against transformers: `make.py` writes the numbers.

mod content;
mod layer;
mod models;
mod modules;
mod norms;
mod relative;

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

const CPU: Device = Device::Cpu;

type Tensors = HashMap<String, Tensor>;

fn data(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/attention/options").join(file)
}

/// The tensors whose names begin so, without it.
fn numbers(prefix: &str) -> Tensors {
    let all = candle_core::safetensors::load(data("numbers.safetensors"), &CPU).expect("the numbers are there");
    let own = |(name, tensor): (String, Tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor));
    let own: Tensors = all.into_iter().filter_map(own).collect();
    assert!(!own.is_empty(), "there are no numbers of {prefix}");
    own
}

fn builder(tensors: Tensors) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}
