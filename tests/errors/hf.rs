//! Hugging Face configurations that say nothing, contradict themselves, or name what is not supported.

use candle_attention::hf;
use serde_json::json;

use crate::common::recorded;
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("hf::attention_config", |line, _| of_layer(line, |config, i| shown(hf::attention_config(config, i)))),
    ("hf::latent_attention_config", |line, _| {
        of_layer(line, |config, i| shown(hf::latent_attention_config(config, i)))
    }),
    ("hf::linear_attention_config", |line, _| {
        of_layer(line, |config, i| shown(hf::linear_attention_config(config, i)))
    }),
    ("hf::decoder_attention_config", |line, _| {
        of_layer(line, |config, i| shown(hf::decoder_attention_config(config, i)))
    }),
    ("hf::cross_attention_config", |line, _| of_layer(line, |config, i| shown(hf::cross_attention_config(config, i)))),
    ("hf::load_attention", |line, _| {
        of_layer(line, |config, i| hf::load_attention(config, i, nothing()).map(accepted))
    }),
    ("hf::load_latent_attention", |line, _| {
        of_layer(line, |config, i| hf::load_latent_attention(config, i, nothing()).map(accepted))
    }),
    ("hf::load_linear_attention", |line, _| {
        of_layer(line, |config, i| hf::load_linear_attention(config, i, nothing()).map(accepted))
    }),
    ("hf::load_cross_attention", |line, _| {
        of_layer(line, |config, i| hf::load_cross_attention(config, i, nothing()).map(accepted))
    }),
    ("hf::load_relative_bias", |line, _| {
        of_layer(line, |config, _| hf::load_relative_bias(config, nothing()).map(accepted))
    }),
    ("without a tensor", without),
    ("linear layers of the first eight", |line, _| {
        of_layer(line, |config, _| {
            Ok(format!("{:?}", (0..8).filter(|&i| hf::linear_attention_config(config, i).is_ok()).collect::<Vec<_>>()))
        })
    }),
];

fn shown(config: Result<impl std::fmt::Debug>) -> Result<String> {
    config.map(|config| format!("{config:?}"))
}

/// The layer of a line, layer 1 unless it says another: `3 opt {}` is layer 3 of a config of the architecture `opt`
/// with these fields.
fn of_layer(line: &str, read: impl Fn(&Value, usize) -> Result<String>) -> Result<String> {
    let (words, fields) = line.split_at(line.find(['{', '[']).expect("a config"));
    let mut config: Value = serde_json::from_str(fields).map_err(Error::wrap)?;
    let mut layer = 1;
    for word in words.split_whitespace() {
        match word.parse() {
            Ok(number) => layer = number,
            Err(_) => config["model_type"] = json!(word),
        }
    }
    read(&config, layer)
}

/// A layer of a folder of `tests/hf/models` without one of its tensors, as in `opt 0 k_proj.bias`.
fn without(line: &str, _: &Value) -> Result<String> {
    let [folder, layer, missing] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
    let folder = recorded("hf/models").join(folder);
    let config = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?).map_err(Error::wrap)?;
    let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &CPU)?;
    tensors.remove(missing).expect("the model has it");
    let (vb, layer) = (VarBuilder::from_tensors(tensors, DType::F32, &CPU), layer.parse().expect("a layer"));
    match hf::latent_attention_config(&config, layer) {
        Ok(_) => hf::load_latent_attention(&config, layer, vb).map(accepted),
        Err(_) => hf::load_attention(&config, layer, vb).map(accepted),
    }
}

fn nothing() -> VarBuilder<'static> {
    weights_of(&[])
}
