//! The attention of Hugging Face checkpoints, against transformers: `make.py` makes the numbers.

#[path = "../common/mod.rs"]
mod common;

mod compressed;
mod gguf;
mod gguf_forms;
mod gguf_fuzz;
mod gguf_metadata;
mod gguf_models;
mod gguf_parts;
mod gguf_types;
mod golden;
mod indexers;
mod integers;
mod linear;
mod mlx;
mod names;
mod variants;

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

use common::{DEVICE, Model, assert_near, recorded};

/// The largest error, as a part of the largest number.
const TOLERANCE: f64 = 1e-5;

/// The architectures whose attention is latent.
const LATENT: &[&str] = &[
    "axk2",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots3_note_text",
    "glm5_next_text",
    "glm_moe_dsa",
    "hy_v4",
    "longcat_flash",
    "mistral_large4_text",
];

type Tensors = HashMap<String, Tensor>;

impl Model {
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
    VarBuilder::from_tensors(tensors, DType::F32, &DEVICE)
}

/// Returns the folder of models, or the one that `CANDLE_ATTENTION_HF_MODELS` names.
fn models() -> PathBuf {
    match std::env::var_os("CANDLE_ATTENTION_HF_MODELS") {
        Some(folder) => folder.into(),
        None => recorded("hf/models"),
    }
}

fn all_models() -> Vec<Model> {
    Model::all(&models())
}
