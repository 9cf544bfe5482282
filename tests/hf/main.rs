//! The attention of Hugging Face checkpoints, against transformers: `make.py` makes the numbers.

#[path = "../common/mod.rs"]
mod common;

mod gguf;
mod golden;
mod integers;
mod linear;
mod names;
mod variants;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use serde_json::Value;

use common::assert_near;

const CPU: Device = Device::Cpu;

/// The largest error, as a part of the largest number.
const TOLERANCE: f64 = 1e-5;

/// The architectures whose attention is latent.
const LATENT: &[&str] = &["deepseek_v2", "deepseek_v3"];

type Tensors = HashMap<String, Tensor>;

/// A folder of `tests/hf/models`.
struct Model {
    name: String,
    config: Value,
    weights: Tensors,
    golden: Tensors,
}

impl Model {
    fn open(folder: &Path) -> Self {
        let tensors = |file| candle_core::safetensors::load(folder.join(file), &CPU).expect("the folder has tensors");
        let name = folder.file_name().expect("a folder has a name").to_string_lossy().into_owned();
        let config = std::fs::read_to_string(folder.join("config.json")).expect("the folder has a config");
        let config = serde_json::from_str(&config).expect("the config is JSON");
        Self { name, config, weights: tensors("model.safetensors"), golden: tensors("golden.safetensors") }
    }

    fn named(name: &str) -> Self {
        Self::open(&models().join(name))
    }

    fn model_type(&self) -> &str {
        self.config["model_type"].as_str().expect("a config names its architecture")
    }

    fn layers(&self) -> usize {
        (0..).take_while(|i| self.golden.contains_key(&format!("layer{i}.in"))).count()
    }

    fn vb(&self) -> VarBuilder<'static> {
        builder(self.weights.clone())
    }

    #[track_caller]
    fn assert_close(&self, ys: &Tensor, expected: &Tensor, what: &str) {
        assert_near(ys, expected, TOLERANCE, &format!("{}, {what}", self.name));
    }
}

fn builder(tensors: Tensors) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

/// `CANDLE_ATTENTION_HF_MODELS` names another folder of models in the same form.
fn models() -> PathBuf {
    match std::env::var_os("CANDLE_ATTENTION_HF_MODELS") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/models"),
    }
}

fn all_models() -> Vec<Model> {
    models_in(&models())
}

fn models_in(folder: &Path) -> Vec<Model> {
    let folders = std::fs::read_dir(folder).expect("the folder of models is there");
    let mut folders: Vec<_> = folders.map(|entry| entry.expect("it can be listed").path()).collect();
    folders.sort();
    folders.iter().map(|folder| Model::open(folder)).collect()
}
