//! Where a checkpoint keeps its attention.

use candle_attention::hf;
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;

use crate::common::{error_text, relative_error, values};
use crate::golden::TOLERANCE;
use crate::{CPU, Model, Tensors, builder};

/// Models below a head, which is the first part of every name.
#[rustfmt::skip]
const HEADS: [&str; 17] = [
    "bert", "bloom", "distilbert", "falcon_grouped", "gemma3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj",
    "llama", "modernbert", "mpt", "opt", "phi", "phi3", "roberta",
];

pub fn renamed(tensors: &Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    tensors.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect()
}

#[test]
fn models_with_and_without_a_head_give_the_same_layer() -> Result<()> {
    for name in HEADS {
        let model = Model::named(name);
        let bare = renamed(&model.weights, |name| name.split_once('.').expect("below a head").1.to_string());
        let xs = &model.golden["layer0.in"];
        let [with_head, without] = [model.weights.clone(), bare]
            .map(|weights| hf::load_attention(&model.config, 0, builder(weights))?.forward(xs));
        assert_eq!(values(&with_head?), values(&without?), "{name}");
    }
    Ok(())
}

/// Nomic's published names, and those of transformers' own module.
#[test]
fn both_names_of_a_layer_give_the_same() -> Result<()> {
    let model = Model::named("nomic_bert");
    let mut own = Tensors::new();
    let packed = &model.weights["encoder.layers.0.attn.Wqkv.weight"];
    for (i, part) in packed.chunk(3, 0)?.into_iter().enumerate() {
        own.insert(format!("nomic_bert.layers.0.self_attn.{}_proj.weight", ["q", "k", "v"][i]), part);
    }
    let out = &model.weights["encoder.layers.0.attn.out_proj.weight"];
    own.insert("nomic_bert.layers.0.self_attn.o_proj.weight".to_string(), out.clone());
    let xs = &model.golden["layer0.in"];
    let [published, own] =
        [model.weights.clone(), own].map(|weights| hf::load_attention(&model.config, 0, builder(weights))?.forward(xs));
    assert_eq!(values(&published?), values(&own?));
    Ok(())
}

/// RF-DETR's names before transformers 5.18, and those since.
#[test]
fn both_names_of_rf_detrs_layers_give_the_same() -> Result<()> {
    let model = Model::named("rf_detr_dinov2");
    let former = renamed(&model.weights, |name| {
        let of_out = name.replace("attention.o_proj", "attention.output.dense");
        let names = [("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")];
        names.iter().fold(of_out, |name, (new, old)| name.replace(new, &format!("attention.{old}")))
    });
    let xs = &model.golden["layer0.in"];
    let [new, former] = [model.weights.clone(), former]
        .map(|weights| hf::load_attention(&model.config, 0, builder(weights))?.forward(xs));
    assert_eq!(values(&new?), values(&former?));
    Ok(())
}

/// Some versions of transformers give VideoMAE's keys a bias, which adds the same to all scores of a query. Without
/// biases in the config there may be none.
#[test]
fn a_bias_of_videomaes_keys_changes_nothing() -> Result<()> {
    let mut model = Model::named("videomae");
    let attention = "videomae.encoder.layer.0.attention.attention";
    let names = [("q_bias", "query.bias"), ("v_bias", "value.bias")];
    let mut weights = renamed(&model.weights, |name| names.iter().fold(name.to_string(), |n, (a, b)| n.replace(a, b)));
    weights.insert(format!("{attention}.key.bias"), Tensor::arange(-16f32, 16., &CPU)?.affine(0.1, 0.)?);
    let ys = hf::load_attention(&model.config, 0, builder(weights.clone()))?.forward(&model.golden["layer0.in"])?;
    assert!(relative_error(&ys, &model.golden["layer0.out"]) <= TOLERANCE);

    model.config["qv_bias"] = json!(false);
    let error = error_text(hf::load_attention(&model.config, 0, builder(weights)));
    assert!(error.contains("query.bias is in the file, but the config says there is no such bias"), "{error}");
    Ok(())
}

#[test]
fn a_model_begins_with_fresh_variables_under_the_same_names() -> Result<()> {
    let variables = VarMap::new();
    let config = json!({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2});
    hf::load_attention(&config, 1, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    let names =
        variables.data().lock().expect("no panic before").keys().cloned().collect::<std::collections::BTreeSet<_>>();
    let expected = ["output.dense", "self.key", "self.query", "self.value"];
    let expected = expected
        .iter()
        .flat_map(|name| ["bias", "weight"].map(|kind| format!("bert.encoder.layer.1.attention.{name}.{kind}")));
    assert_eq!(names, expected.collect());
    Ok(())
}

/// T5's classifiers have a name before all others.
#[test]
fn a_relative_bias_is_found_where_its_layers_are() -> Result<()> {
    let model = Model::named("t5");
    let below = renamed(&model.weights, |name| format!("transformer.{name}"));
    let xs = &model.golden["layer1.in"];
    let [by_itself, below] = [model.weights.clone(), below]
        .map(|weights| hf::load_attention(&model.config, 1, builder(weights))?.forward(xs));
    assert_eq!(values(&by_itself?), values(&below?));
    Ok(())
}

#[test]
fn a_missing_relative_bias_is_named() {
    let mut model = Model::named("t5");
    model.weights.remove("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
    let expected = "[relative_bias] encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight is missing, \
                    expected shape [8, 4] (layout t5)";
    assert_eq!(error_text(hf::load_attention(&model.config, 1, model.vb())), expected);
    assert_eq!(error_text(hf::load_relative_bias(&model.config, model.vb())), expected);
}

#[test]
fn a_missing_tensor_is_named_where_it_belongs() {
    let mut model = Model::named("opt");
    model.weights.remove("model.decoder.layers.0.self_attn.k_proj.bias");
    assert_eq!(
        error_text(hf::load_attention(&model.config, 0, model.vb())),
        "[multi_head_attention] model.decoder.layers.0.self_attn.k_proj.bias is missing, expected shape [32] (layout opt)"
    );
}
