//! Whole models of candle-transformers and the models of `examples/` on this crate's layer, with one set of random
//! weights. `differs.rs` has the cases in which candle-transformers differs from transformers: each test there
//! fails once they agree.

#[path = "../../../../tests/common/mod.rs"]
mod common;
mod decoders;
mod differs;
mod encoder;
mod equal;
#[path = "../../../../examples/causal_lm/model.rs"]
mod our_decoder;
#[path = "../../../../examples/sentence_embedding/model.rs"]
mod our_encoder;

use std::collections::HashMap;

use candle_attention::TorchSeed;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::Value;

type Weights = HashMap<String, Tensor>;

/// Draws weights under the names and in the shapes that a model reads. All entries are random, so that norms and biases
/// matter too.
fn weights<M>(load: impl FnOnce(VarBuilder) -> Result<M>) -> Result<Weights> {
    let requested = VarMap::new();
    load(VarBuilder::from_varmap(&requested, DType::F32, &Device::Cpu))?;
    let variables = requested.data().lock().expect("no other thread has it");
    let mut shapes: Vec<_> = variables.iter().map(|(name, var)| (name.clone(), var.shape().clone())).collect();
    shapes.sort_by(|(a, _), (b, _)| a.cmp(b));
    let seed = TorchSeed::new(5);
    shapes.into_iter().map(|(name, shape)| Ok((name, (seed.randn(shape)? * 0.4)?))).collect()
}

fn builder(weights: &Weights) -> VarBuilder<'static> {
    VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu)
}

/// Returns a config with some options changed.
fn with_options(json: &Value, options: Value) -> Value {
    let mut changed = json.clone();
    for (name, value) in options.as_object().expect("options are an object") {
        changed[name] = value.clone();
    }
    changed
}

/// Returns token ids (B, T), different ones in each sequence.
fn ids(b: usize, t: usize, vocab: u32) -> Result<Tensor> {
    let ids = (0..(b * t) as u32).map(|i| (i * 29 + i / t as u32 * 7 + 3) % vocab).collect();
    Tensor::from_vec(ids, (b, t), &Device::Cpu)
}
