//! The names of attention modules in checkpoints.

use candle_attention::{AttentionInput, hf};
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;

use crate::common::{error_text, values};
use crate::golden::forward;
use crate::{DEVICE, Model, Tensors, all_models};

/// Models below a head, which is the first part of every name.
const HEADS: &str = "bert bloom deepseek_v2_lite deepseek_v3 distilbert falcon_grouped gemma3 gpt2 gpt_bigcode \
    gpt_neox gpt_oss gptj llama modernbert mpt opt phi phi3 roberta";

fn renamed(model: &Model, rename: impl Fn(&str) -> String) -> Model {
    let weights = model.weights.iter().map(|(name, tensor)| (rename(name), tensor.clone()));
    Model { weights: weights.collect(), ..model.clone() }
}

/// Checks that a layer with other names has equal outputs.
#[track_caller]
fn assert_same(model: &Model, layer: usize, other: &Model) {
    let xs = &model.golden[&format!("layer{layer}.in")];
    let run = |either: &Model| values(&forward(either, layer, AttentionInput::new(xs)).expect("its names are known"));
    assert_eq!(run(model), run(other), "{}", model.name);
}

#[test]
fn hf_models_with_and_without_head_have_equal_layers() {
    for name in HEADS.split(' ') {
        let model = Model::named(name);
        let bare = |full: &str| full.split_once('.').expect("below a head").1.to_string();
        assert_same(&model, 0, &renamed(&model, bare));
    }
    // T5's classifiers have a name before all others, and a bias in the first layer.
    let model = Model::named("t5");
    assert_same(&model, 1, &renamed(&model, |name| format!("transformer.{name}")));
}

#[test]
fn hf_sinks_of_another_name_load_below_a_prefix() -> Result<()> {
    let model = Model::named("flint");
    let below = renamed(&model, |name| format!("part.{name}"));
    let xs = &model.golden["layer0.in"];
    let expected = values(&forward(&model, 0, AttentionInput::new(xs))?);
    let layer = hf::load_attention(&model.config, 0, below.vb().pp("part"))?;
    assert_eq!(values(&layer.forward(xs)?), expected);
    Ok(())
}

/// Checks the prefixes that the text model of Gemma 3 has in models that read images too.
#[test]
fn hf_gemma3_text_of_image_models_has_equal_layers() {
    let texts: Vec<_> = all_models().into_iter().filter(|model| model.model_type() == "gemma3_text").collect();
    assert!(!texts.is_empty());
    for model in &texts {
        for prefix in ["model.language_model.", "language_model.model.", "language_model."] {
            let mut other = renamed(model, |name| name.replacen("model.", prefix, 1));
            other.config = json!({"model_type": "gemma3", "text_config": model.config});
            (0..model.layers()).for_each(|layer| assert_same(model, layer, &other));
        }
    }
}

/// Checks Nomic's published names, and the names of transformers' module.
#[test]
fn hf_former_and_present_names_have_equal_layers() -> Result<()> {
    let model = Model::named("nomic_bert");
    let mut own = Model { weights: Tensors::new(), ..model.clone() };
    let packed = &model.weights["encoder.layers.0.attn.Wqkv.weight"];
    for (i, part) in packed.chunk(3, 0)?.into_iter().enumerate() {
        own.weights.insert(format!("nomic_bert.layers.0.self_attn.{}_proj.weight", ["q", "k", "v"][i]), part);
    }
    let out = &model.weights["encoder.layers.0.attn.out_proj.weight"];
    own.weights.insert("nomic_bert.layers.0.self_attn.o_proj.weight".to_string(), out.clone());
    assert_same(&model, 0, &own);

    // RF-DETR's names before transformers 5.18.
    let detr = Model::named("rf_detr_dinov2");
    let former = renamed(&detr, |name| {
        name.replace("attention.o_proj", "attention.output.dense")
            .replace("q_proj", "attention.query")
            .replace("k_proj", "attention.key")
            .replace("v_proj", "attention.value")
    });
    assert_same(&detr, 0, &former);
    Ok(())
}

/// Checks a bias of VideoMAE's keys, which some versions of transformers add, and which adds the same to all scores of
/// a query. If the config says that there are no biases, one is an error.
#[test]
fn hf_videomae_key_bias_changes_nothing() -> Result<()> {
    let videomae = Model::named("videomae");
    let attention = "videomae.encoder.layer.0.attention.attention";
    let mut model = renamed(&videomae, |name| name.replace("q_bias", "query.bias").replace("v_bias", "value.bias"));
    model.weights.insert(format!("{attention}.key.bias"), Tensor::arange(-16f32, 16., &DEVICE)?.affine(0.1, 0.)?);
    let ys = hf::load_attention(&model.config, 0, model.vb())?.forward(&model.golden["layer0.in"])?;
    model.assert_close(&ys, &model.golden["layer0.out"], "with a bias of keys");

    model.config["qv_bias"] = json!(false);
    let error = error_text(hf::load_attention(&model.config, 0, model.vb()));
    assert!(error.contains("query.bias is in the file, but the config says there is no such bias"), "{error}");
    Ok(())
}

#[test]
fn hf_new_variables_have_names_of_checkpoint() -> Result<()> {
    let variables = VarMap::new();
    let config = json!({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2});
    hf::load_attention(&config, 1, VarBuilder::from_varmap(&variables, DType::F32, &DEVICE))?;
    let names =
        variables.data().lock().expect("no panic before").keys().cloned().collect::<std::collections::BTreeSet<_>>();
    let expected = ["output.dense", "self.key", "self.query", "self.value"];
    let expected = expected
        .iter()
        .flat_map(|name| ["bias", "weight"].map(|kind| format!("bert.encoder.layer.1.attention.{name}.{kind}")));
    assert_eq!(names, expected.collect());
    Ok(())
}
