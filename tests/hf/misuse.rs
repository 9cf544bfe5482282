//! Configurations that say nothing, contradict themselves, or ask for what is not supported.

use candle_attention::{AttentionInput, hf, weights};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::{Value, json};

use crate::common::{error_text, values};
use crate::{CPU, LATENT, Model, Tensors, builder};

/// What is wrong, the architecture, its fields, and the error after `[hf] ` and the architecture's name.
pub type Misuse = (&'static str, &'static str, fn() -> Value, &'static str);

const FIELDS: &[Misuse] = &[
    ("a size of none", "gpt2", || json!({"n_embd": null}), "n_embd is null, expected a whole number of at least 1"),
    ("no heads", "gpt2", || json!({"n_head": 0}), "n_head is 0, expected a whole number of at least 1"),
    (
        "half a head",
        "bert",
        || json!({"num_attention_heads": 1.5}),
        "num_attention_heads is 1.5, expected a whole number of at least 1",
    ),
    (
        "a size as text",
        "opt",
        || json!({"hidden_size": "768"}),
        "hidden_size is \"768\", expected a whole number of at least 1",
    ),
    ("a flag as text", "opt", || json!({"enable_bias": "yes"}), "enable_bias is \"yes\", expected true or false"),
    ("a number as a flag", "gpt2", || json!({"attn_pdrop": true}), "attn_pdrop is true, expected a number"),
    (
        "an alias of the wrong type",
        "gpt2",
        || json!({"hidden_size": []}),
        "n_embd is [], expected a whole number of at least 1",
    ),
    ("too few layers", "bert", || json!({"num_hidden_layers": 1}), "there is no layer 1, num_hidden_layers is 1"),
    (
        "heads of another width",
        "gpt2",
        || json!({"head_dim": 32}),
        "head_dim is 32, but gpt2 has 64 by its other fields",
    ),
    (
        "fewer key heads",
        "bert",
        || json!({"num_key_value_heads": 4}),
        "num_key_value_heads is 4, but bert has 12 by its other fields",
    ),
    (
        "more key heads",
        "gpt_bigcode",
        || json!({"num_key_value_heads": 12}),
        "num_key_value_heads is 12, but gpt_bigcode has 1 by its other fields",
    ),
    (
        "relative positions",
        "bert",
        || json!({"position_embedding_type": "relative_key"}),
        "position_embedding_type is \"relative_key\", which is not supported, expected \"absolute\"",
    ),
    ("a config for each layer", "opt", || json!({"per_layer_config": {"0": {}}}), "per_layer_config is not supported"),
    (
        "a scaling that is not known",
        "llama",
        || json!({"rope_scaling": {"type": "ntk", "factor": 2.0}}),
        "rope_type is \"ntk\", expected one of: default, linear, dynamic, llama3, yarn, longrope, proportional",
    ),
    (
        "a scaling without its factor",
        "mistral",
        || json!({"rope_scaling": {"type": "linear"}}),
        "rope_scaling.factor is missing, expected a number",
    ),
    (
        "a scaling by null",
        "llama",
        || json!({"rope_parameters": {"rope_type": "llama3", "factor": null}}),
        "rope_parameters.factor is null, expected a number",
    ),
    (
        "a scaling as text",
        "qwen2",
        || json!({"rope_parameters": "linear"}),
        "rope_parameters is \"linear\", expected an object",
    ),
    (
        "a list of a number",
        "phi3",
        || json!({"rope_scaling": {"type": "su", "short_factor": 1.0}}),
        "rope_scaling.short_factor is 1.0, expected a list",
    ),
    (
        "a list that is not there",
        "phi3",
        || json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}),
        "rope_scaling.long_factor is missing, expected a list of numbers",
    ),
    (
        "another scaling than the architecture has",
        "phi3",
        || json!({"rope_scaling": {"type": "linear", "factor": 2.0}}),
        "rope_type is \"linear\", expected \"default\" or \"longrope\"",
    ),
    (
        "a rope for each kind of layer",
        "qwen3",
        || json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        "rotary parameters for each kind of layer are not supported",
    ),
    (
        "a rope for all kinds of layers",
        "gemma3_text",
        || json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        "rope_parameters has no full_attention and no sliding_attention",
    ),
    (
        "two ropes",
        "gemma3_text",
        || json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"full_attention": {}}}),
        "rope_scaling and rope_parameters are both given, expected one",
    ),
    (
        "a wrong rope of one kind of layer",
        "gemma3_text",
        || json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}),
        "rope_parameters.sliding_attention.factor is missing, expected a number",
    ),
    (
        "a softcap that is not applied",
        "gemma3_text",
        || json!({"attn_logit_softcapping": 50.0}),
        "attn_logit_softcapping is 50.0, which is not supported, expected null",
    ),
    (
        "text of another model",
        "gemma3",
        || json!({"text_config": {"model_type": "llama"}}),
        "text_config.model_type is \"llama\", which is not supported, expected \"gemma3_text\"",
    ),
    (
        "slopes that transformers does not have",
        "mpt",
        || json!({"attn_config": {"alibi_bias_max": 6}}),
        "attn_config.alibi_bias_max is 6, which is not supported, expected 8",
    ),
    (
        "norms that transformers does not have",
        "mpt",
        || json!({"attn_config": {"qk_ln": true}}),
        "attn_config.qk_ln is true, which is not supported, expected false",
    ),
    (
        "biases that transformers does not have",
        "mpt",
        || json!({"no_bias": false}),
        "no_bias is false, which is not supported, expected true",
    ),
    (
        "two windows",
        "modernbert",
        || json!({"local_attention": 128, "sliding_window": 128}),
        "sliding_window is 128, but modernbert has 64 by its other fields",
    ),
    ("a decoder", "t5", || json!({"is_decoder": true}), "is_decoder is true, which is not supported, expected false"),
    (
        "part of heads",
        "llama",
        || json!({"partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5, which is not supported, expected 1",
    ),
    (
        "no part of heads",
        "phi",
        || json!({"partial_rotary_factor": 0}),
        "partial_rotary_factor is 0.0, expected a part of heads that are 64 wide",
    ),
    (
        "more than heads",
        "gpt_neox",
        || json!({"rotary_pct": 1.5}),
        "rotary_pct is 1.5, expected a part of heads that are 96 wide",
    ),
    (
        "a kind of layer that is not known",
        "gemma2",
        || json!({"layer_types": ["full_attention", "chunked_attention"]}),
        "layer_types has \"chunked_attention\" for layer 1, expected \"full_attention\" or \"sliding_attention\"",
    ),
    (
        "too few kinds of layers",
        "gpt_oss",
        || json!({"layer_types": ["full_attention"]}),
        "layer_types has 1 entries, expected one for each layer",
    ),
    (
        "no window",
        "smollm3",
        || json!({"layer_types": ["full_attention", "sliding_attention"]}),
        "a layer has sliding_attention, but sliding_window is not given",
    ),
    (
        "a window that is not used",
        "qwen2",
        || json!({"layer_types": ["full_attention", "sliding_attention"]}),
        "layer 1 has sliding_attention, but use_sliding_window is false",
    ),
    (
        "a mask that depends on the implementation",
        "gemma",
        || json!({"use_bidirectional_attention": true}),
        "use_bidirectional_attention is true, which is not supported, expected false",
    ),
    (
        "neither with positions nor without",
        "smollm3",
        || json!({"no_rope_layers": [1, 2]}),
        "no_rope_layers has 2 for layer 1, expected 0 or 1",
    ),
    (
        "heads of a width that is not read",
        "cohere2",
        || json!({"head_dim": 64}),
        "head_dim is 64, but cohere2 has 128 by its other fields",
    ),
    (
        "key heads that are not read",
        "falcon",
        || json!({"multi_query": false, "num_kv_heads": 8}),
        "num_kv_heads is 8, but falcon has 71 by its other fields",
    ),
    (
        "a scaling of its own",
        "nomic_bert",
        || json!({"rotary_scaling_factor": 2}),
        "rotary_scaling_factor is 2, which is not supported, expected null",
    ),
    (
        "part of heads by another name",
        "nomic_bert",
        || json!({"rotary_emb_fraction": 0.5}),
        "rotary_emb_fraction is 0.5, which is not supported, expected 1",
    ),
];

#[test]
fn fields_are_named_with_what_was_expected_and_found() {
    let mut otherwise = Vec::new();
    for (what, model_type, fields, expected) in FIELDS {
        let mut config = fields();
        config["model_type"] = json!(model_type);
        let (found, expected) =
            (error_text(hf::attention_config(&config, 1)), format!("[hf] {model_type}: {expected}"));
        if found != expected {
            otherwise.push(format!("{what}\n   expected: {expected}\n      found: {found}"));
        }
    }
    assert!(otherwise.is_empty(), "{} of {} rows:\n{}", otherwise.len(), FIELDS.len(), otherwise.join("\n"));
}

#[test]
fn architectures_that_are_not_known_are_told_which_are() {
    let known = hf::architectures().collect::<Vec<_>>().join(", ");
    let error = |config: Value| error_text(hf::attention_config(&config, 0));
    assert_eq!(
        error(json!({"model_type": "rwkv", "hidden_size": 8})),
        format!("[hf] unknown model_type \"rwkv\", expected one of: {known}")
    );
    assert_eq!(error(json!({"model_type": 3})), format!("[hf] unknown model_type 3, expected one of: {known}"));
    assert_eq!(
        error(json!({"hidden_size": 8})),
        format!("[hf] the config has no model_type, expected one of: {known}")
    );
    assert_eq!(error(json!(["llama"])), "[hf] the config is [\"llama\"], expected an object");
}

#[test]
fn known_architectures_stand_in_order() {
    assert!(hf::architectures().is_sorted());
}

/// What does not fit together is found by the config's own checks.
#[test]
fn numbers_that_do_not_fit_together_are_named() {
    let config = json!({"model_type": "bert", "hidden_size": 10, "num_attention_heads": 4});
    assert_eq!(
        error_text(hf::attention_config(&config, 0)),
        "[multi_head_attention] num_heads is 4, which does not divide embed_dim 10; give head_dim"
    );
    let config = json!({"model_type": "gpt2", "attn_pdrop": 2});
    assert_eq!(
        error_text(hf::attention_config(&config, 0)),
        "[multi_head_attention] dropout is 2, expected a probability from 0 to 1"
    );
}

#[test]
fn quantised_weights_are_refused() {
    let mut model = Model::named("opt");
    model.config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    assert_eq!(
        error_text(hf::load_attention(&model.config, 0, model.vb())),
        "[hf] opt: quantization_config is {\"bits\":4,\"quant_method\":\"gptq\"}, expected weights that are not quantised"
    );
    // Experts alone.
    model.config["quantization_config"] = json!({"quant_method": "mxfp4"});
    assert!(hf::load_attention(&model.config, 0, model.vb()).is_ok());
}

/// A float8 checkpoint gives the layer of its weights times their scales, or an error where a builder ignores scales.
#[test]
fn float8_weights_are_read_with_their_scales_or_refused() -> Result<()> {
    for name in ["llama", "deepseek_v3"] {
        let mut model = Model::named(name);
        model.config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        let (mut stored, mut exact) = (Tensors::new(), Tensors::new());
        for (name, tensor) in &model.weights {
            if !name.ends_with("weight") || tensor.rank() < 2 {
                stored.insert(name.clone(), tensor.clone());
                exact.insert(name.clone(), tensor.clone());
                continue;
            }
            let weight = tensor.to_dtype(DType::F8E4M3)?;
            let blocks = weight.dims().iter().map(|dim| dim.div_ceil(128)).collect::<Vec<_>>();
            exact.insert(name.clone(), (weight.to_dtype(DType::F32)? * 0.75)?);
            stored.insert(format!("{name}_scale_inv"), Tensor::full(0.75f32, blocks, &CPU)?);
            stored.insert(name.clone(), weight);
        }
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        candle_core::safetensors::save(&stored, &path)?;
        let run = |vb: VarBuilder| {
            let input = AttentionInput::new(&model.golden["layer0.in"]);
            match LATENT.contains(&model.model_type()) {
                true => hf::load_latent_attention(&model.config, 0, vb)?.forward_with(input),
                false => hf::load_attention(&model.config, 0, vb)?.forward_with(input),
            }
        };
        let found = run(weights::open(&path, DType::F32, &CPU)?)?;
        assert_eq!(values(&found), values(&run(builder(exact))?), "{name}");
        // SAFETY: nothing writes to the file after it was saved.
        let without_scales = unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::F32, &CPU)? };
        let error = error_text(run(without_scales));
        assert!(error.contains("weight_scale_inv, which this builder does not do"), "{name}: {error}");
    }
    Ok(())
}
