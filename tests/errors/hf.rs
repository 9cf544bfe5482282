//! Hugging Face configurations that say nothing, contradict themselves, or name what is not supported.

use candle_attention::hf;
use serde_json::json;

use crate::common::recorded;
use crate::words::Fields;
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("hf::attention_config", |line, _| config(line, hf::attention_config)),
    ("hf::latent_attention_config", |line, _| config(line, hf::latent_attention_config)),
    ("hf::linear_attention_config", |line, _| config(line, hf::linear_attention_config)),
    ("hf::decoder_attention_config", |line, _| config(line, hf::decoder_attention_config)),
    ("hf::cross_attention_config", |line, _| config(line, hf::cross_attention_config)),
    ("hf::load_attention", |line, _| loaded(line, hf::load_attention)),
    ("hf::load_latent_attention", |line, _| loaded(line, hf::load_latent_attention)),
    ("hf::load_linear_attention", |line, _| loaded(line, hf::load_linear_attention)),
    ("hf::load_cross_attention", |line, _| loaded(line, hf::load_cross_attention)),
    ("hf::load_relative_bias", |line, _| loaded(line, |config, _, vb| hf::load_relative_bias(config, vb))),
    ("without a tensor", without),
    ("linear layers of the first eight", |line, _| {
        config(line, |config, _| {
            Ok((0..8).filter(|&i| hf::linear_attention_config(config, i).is_ok()).collect::<Vec<_>>())
        })
    }),
];

fn config<T: std::fmt::Debug>(line: &str, read: fn(&Value, usize) -> Result<T>) -> Result<String> {
    let (config, layer) = layer_of(line)?;
    Ok(format!("{:?}", read(&config, layer)?))
}

/// Loads a layer from a checkpoint without tensors.
fn loaded<T>(line: &str, load: fn(&Value, usize, VarBuilder) -> Result<T>) -> Result<String> {
    let (config, layer) = layer_of(line)?;
    load(&config, layer, weights_of(&[])).map(accepted)
}

/// Reads the config of a line and the layer, layer 1 by default: `3 opt {}` is layer 3 of a config of the architecture
/// `opt` with these fields.
fn layer_of(line: &str) -> Result<(Value, usize)> {
    let (words, fields) = line.split_at(line.find(['{', '[']).expect("a config"));
    let mut config: Value = serde_json::from_str(fields).map_err(Error::wrap)?;
    let mut layer = 1;
    for word in words.split_whitespace() {
        match word.parse() {
            Ok(number) => layer = number,
            Err(_) => config["model_type"] = json!(word),
        }
    }
    Ok((config, layer))
}

/// Loads a layer of a folder of `tests/hf/models` without one of its tensors, as in `opt 0 k_proj.bias`.
fn without(line: &str, _: &Fields) -> Result<String> {
    let [folder, layer, missing] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
    let folder = recorded("hf/models").join(folder);
    let config = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?).map_err(Error::wrap)?;
    let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &CPU)?;
    tensors.remove(missing).expect("the model has it");
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
    let layer = layer.parse().expect("a layer");
    match hf::latent_attention_config(&config, layer) {
        Ok(_) => hf::load_latent_attention(&config, layer, vb).map(accepted),
        Err(_) => hf::load_attention(&config, layer, vb).map(accepted),
    }
}
