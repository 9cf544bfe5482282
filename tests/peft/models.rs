//! Adapters on all linear layers of the attention of the models in `tests/hf/models`, against merged weights.

use std::collections::{BTreeMap, HashMap};

use candle_attention::peft::{Adapter, AdapterConfig};
use candle_attention::{ContentPositions, MultiHeadAttention, hf, variables_without_gradient};
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;

use crate::common::{Model, assert_near, listed, recorded, relative_error};
use crate::{DEVICE, drawn, in_folder};

/// Parts of the names of matrices that are no linear layers.
const OTHER_MATRICES: [&str; 4] = ["embedding", "relative_attention_bias", "norm", "encoder_attn"];

/// The linear layers of the attention of a model, with matrices for each.
pub struct Drawn {
    /// The adapter's file.
    pub file: HashMap<String, Tensor>,
    /// The weights of the model with the updates.
    pub merged: HashMap<String, Tensor>,
}

impl Drawn {
    pub fn new(model: &Model, seed: u64, scaling: f64) -> Result<Self> {
        let is_conv1d = model.config["model_type"] == "gpt2";
        let mut drawn_model = Self { file: HashMap::new(), merged: model.weights.clone() };
        // In the order of the names, so that each run draws the same numbers.
        let weights: BTreeMap<_, _> = model.weights.iter().collect();
        for (n, (name, weight)) in weights.into_iter().enumerate() {
            let Some(module) = name.strip_suffix(".weight").filter(|_| weight.rank() == 2) else { continue };
            if OTHER_MATRICES.iter().any(|part| name.contains(part)) || is_of_refused_indexer(model, name) {
                continue;
            }
            let weight = if is_conv1d { weight.t()? } else { weight.clone() };
            let (outputs, inputs) = weight.dims2()?;
            let seed = seed.wrapping_mul(997).wrapping_add(n as u64);
            let a = drawn(seed, &[2, inputs], 0.4)?.to_dtype(DType::F32)?;
            let b = drawn(seed ^ 77, &[outputs, 2], 0.4)?.to_dtype(DType::F32)?;
            let merged = (&weight.to_dtype(DType::F32)? + (b.matmul(&a)? * scaling)?)?;
            drawn_model.merged.insert(name.clone(), if is_conv1d { merged.t()?.contiguous()? } else { merged });
            for (matrix, values) in [("lora_A", a), ("lora_B", b)] {
                drawn_model.file.insert(format!("base_model.model.{module}.{matrix}.weight"), values);
            }
        }
        Ok(drawn_model)
    }
}

/// Returns whether a parameter is of the indexer of a `MultiHeadAttention`, which an adapter does not change.
fn is_of_refused_indexer(model: &Model, name: &str) -> bool {
    name.contains(".indexer.") && hf::attention_config(&model.config, 0).is_ok()
}

/// Returns an input of a layer, with the tokens that it needs.
pub fn input(layer: &MultiHeadAttention) -> Result<Tensor> {
    let t = match layer.config().content_positions() {
        Some(
            &(ContentPositions::Grid { height, width }
            | ContentPositions::Window { height, width }
            | ContentPositions::CosineWindow { height, width, .. }),
        ) => height * width,
        _ => 5,
    };
    drawn(5, &[1, t, layer.config().embed_dim()], 1.0)?.to_dtype(DType::F32)
}

/// Checks that an adapter changes each linear layer of attention, with the projections of positions by content, for
/// both values of `fan_in_fan_out`.
#[test]
fn lora_on_all_linear_layers_of_each_model_matches_merged_weights() -> Result<()> {
    let mut compared = 0;
    let mut compared_latent = 0;
    for (seed, folder) in listed(recorded("hf/models")).into_iter().enumerate() {
        let model = Model::open(&folder);
        let drawn_model = Drawn::new(&model, seed as u64, 1.5)?;
        let mut json = AdapterConfig::new(2, 3.0, ["q"])?.to_json();
        json["target_modules"] = json!("all-linear");
        json["fan_in_fan_out"] = json!(seed % 2 == 0);
        let adapter_folder = in_folder(&json, &drawn_model.file)?;
        let adapter = Adapter::open(adapter_folder.path(), DType::F32, &DEVICE)?;
        let builder =
            |tensors: &HashMap<String, Tensor>| VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE);
        let mut layer = 0;
        while let Ok(expected) = hf::load_attention(&model.config, layer, builder(&drawn_model.merged)) {
            let what = format!("{}, layer {layer}", model.name);
            let found = adapter
                .load_attention(&model.config, layer, builder(&model.weights))
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let merged = hf::load_attention(&model.config, layer, adapter.merged_builder(builder(&model.weights)))?;
            let xs = input(&expected)?;
            layer += 1;
            // A layer that reads the keys of an earlier layer needs a cache.
            let Ok(ys) = expected.forward(&xs) else { continue };
            assert_near(&found.forward(&xs)?, &ys, 2e-5, &what);
            assert_near(&found.merge_adapter()?.forward(&xs)?, &ys, 2e-5, &what);
            assert_near(&merged.forward(&xs)?, &ys, 2e-5, &what);
            let base = found.unload_adapter()?.forward(&xs)?;
            assert!(relative_error(&base, &ys) > 1e-3, "{what}");
            compared += 1;
        }
        if layer > 0 {
            continue;
        }
        let latent = |index: usize, vb: VarBuilder| hf::load_latent_attention(&model.config, index, vb);
        while let Ok(expected) = latent(layer, builder(&drawn_model.merged)) {
            let found = latent(layer, adapter.merged_builder(builder(&model.weights)))?;
            let width = model.config["hidden_size"].as_u64().expect("a width") as usize;
            let xs = drawn(5, &[1, 5, width], 1.0)?.to_dtype(DType::F32)?;
            layer += 1;
            // A layer that shares the choice of an earlier layer needs it.
            let Ok(ys) = expected.forward(&xs) else { continue };
            assert_near(&found.forward(&xs)?, &ys, 2e-5, &model.name);
            compared_latent += 1;
        }
        if layer > 0 {
            adapter.check_all_used()?;
        }
    }
    assert!(compared > 110 && compared_latent > 3, "{compared} and {compared_latent}");
    Ok(())
}

/// Checks dropout before the projection of positions, which a model computes in training alone, and new variables for
/// the projection in another dtype.
#[test]
fn lora_on_projections_of_positions_has_gradients_and_dropout_in_training_alone() -> Result<()> {
    for (name, targets) in [
        ("deberta_v2_distances", ["pos_key_proj", "pos_query_proj"].as_slice()),
        ("wav2vec2_conformer", &["linear_pos"]),
        ("swinv2", &["continuous_position_bias_mlp.0"]),
    ] {
        let model = Model::open(&recorded("hf/models").join(name));
        let mut file = Drawn::new(&model, 3, 2.0)?.file;
        file.retain(|tensor, _| targets.iter().any(|target| tensor.contains(&format!(".{target}."))));
        let config = AdapterConfig::new(2, 4.0, targets.iter().copied())?.with_dropout(0.5)?;
        let vb = VarBuilder::from_tensors(model.weights.clone(), DType::F32, &DEVICE);
        let vars = VarMap::new();
        // Metal has no f64.
        let dtype = if DEVICE.is_metal() { DType::F32 } else { DType::F64 };
        let new = Adapter::new(config.clone(), &vars, dtype, &DEVICE).load_attention(&model.config, 0, vb.clone())?;
        assert_eq!(vars.all_vars().len(), 2 * targets.len(), "{name}");
        let gradients = new.forward(&input(&new)?)?.sqr()?.sum_all()?.backward()?;
        assert!(variables_without_gradient(&gradients, &vars).is_empty(), "{name}");
        let adapter = Adapter::from_builder(config, VarBuilder::from_tensors(file, DType::F32, &DEVICE));
        let layer = adapter.load_attention(&model.config, 0, vb)?;
        let xs = input(&layer)?;
        let train = || layer.forward_with(crate::in_training(&xs));
        let before = layer.forward(&xs)?;
        let dropped = train()?;
        assert!(relative_error(&dropped, &before) > 1e-4, "{name}");
        assert!(relative_error(&train()?, &dropped) > 1e-4, "{name}");
        assert_near(&layer.forward(&xs)?, &before, 0.0, name);
    }
    Ok(())
}

/// Checks copies of whole attention modules, with norms, biases, sinks and the parameters of positions.
#[test]
fn lora_saved_attention_modules_of_each_model_match_their_weights() -> Result<()> {
    let mut compared = 0;
    for folder in listed(recorded("hf/models")) {
        let model = Model::open(&folder);
        let mut file = HashMap::new();
        let mut merged = model.weights.clone();
        // In the order of the names, so that each run draws the same numbers.
        let weights: BTreeMap<_, _> = model.weights.iter().collect();
        for (n, (name, weight)) in weights.into_iter().enumerate() {
            let is_shared = ["relative_attention_bias", "rel_embeddings", "encoder.LayerNorm"];
            let is_attention = ["attn", "attention"].iter().any(|part| name.to_lowercase().contains(part));
            if !is_attention || is_of_refused_indexer(&model, name) || is_shared.iter().any(|part| name.contains(part))
            {
                continue;
            }
            let change = drawn(n as u64, weight.dims(), 0.2)?.to_dtype(DType::F32)?;
            let changed = (&weight.to_dtype(DType::F32)? + change)?;
            merged.insert(name.clone(), changed.clone());
            file.insert(format!("base_model.model.{name}"), changed);
        }
        let mut json = AdapterConfig::new(2, 3.0, ["nothing"])?.to_json();
        json["modules_to_save"] = json!(["attn", "attention", "Attention", "attentions.0", "attentions.1"]);
        let adapter_folder = in_folder(&json, &file)?;
        let adapter = Adapter::open(adapter_folder.path(), DType::F32, &DEVICE)?;
        let builder =
            |tensors: &HashMap<String, Tensor>| VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE);
        let mut layer = 0;
        while let Ok(expected) = hf::load_attention(&model.config, layer, builder(&merged)) {
            let what = format!("{}, layer {layer}", model.name);
            let found = adapter
                .load_attention(&model.config, layer, builder(&model.weights))
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            let xs = input(&expected)?;
            layer += 1;
            let Ok(ys) = expected.forward(&xs) else { continue };
            assert_near(&found.forward(&xs)?, &ys, 2e-5, &what);
            assert_near(&found.merge_and_unload()?.forward(&xs)?, &ys, 2e-5, &what);
            assert!(relative_error(&found.unload_adapter()?.forward(&xs)?, &ys) > 1e-3, "{what}");
            compared += 1;
        }
        // `load_attention` loads the encoder of a model that has a decoder too, no latent attention, no attention
        // besides the self-attention of a layer, and no convolution before it (SegFormer's, with its norm).
        let unused = adapter.unused_tensors()?;
        let is_other = |name: &String| {
            ["decoder.", ".cross_attn.", ".self.sr.", ".self.layer_norm."].iter().any(|part| name.contains(part))
        };
        assert!(layer == 0 || unused.iter().all(is_other), "{}: {unused:?}", model.name);
    }
    assert!(compared > 110, "{compared}");
    Ok(())
}

/// Checks that an adapter with an indexer is refused, and that `merged_builder` returns the indexer.
#[test]
fn lora_with_saved_indexer_is_an_error_that_names_merged_builder() -> Result<()> {
    let model = Model::open(&recorded("hf/models").join("minimax_m3"));
    let name = "layers.1.self_attn.indexer.k_norm.weight";
    let changed = (&model.weights[name] + 1.0)?;
    let mut json = AdapterConfig::new(2, 3.0, ["nothing"])?.to_json();
    json["modules_to_save"] = json!(["self_attn"]);
    let mut file = HashMap::new();
    for (parameter, weight) in &model.weights {
        if parameter.starts_with("layers.1.self_attn.") {
            file.insert(format!("base_model.model.{parameter}"), weight.clone());
        }
    }
    file.insert(format!("base_model.model.{name}"), changed.clone());
    let folder = in_folder(&json, &file)?;
    let adapter = Adapter::open(folder.path(), DType::F32, &DEVICE)?;
    let builder = || VarBuilder::from_tensors(model.weights.clone(), DType::F32, &DEVICE);
    let error = adapter.load_attention(&model.config, 1, builder()).expect_err("the indexer would be lost").to_string();
    assert!(error.contains("of the layer's indexer") && error.contains("merged_builder"), "{error}");
    let merged = adapter.merged_builder(builder()).get(changed.dims(), name)?;
    assert_near(&merged, &changed, 0.0, name);
    Ok(())
}
