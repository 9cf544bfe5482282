//! Hugging Face configurations that say nothing, contradict themselves, or name what is not supported.

use std::collections::HashMap;

use candle_attention::hf;
use candle_core::{DType, Result};
use candle_nn::VarBuilder;
use serde_json::{Value, json};

use crate::{CPU, Case};

/// Layer 1 of an architecture with these fields.
fn layer(model_type: &str, mut fields: Value) -> Result<()> {
    fields["model_type"] = json!(model_type);
    hf::attention_config(&fields, 1).map(drop)
}

pub const CASES: &[Case] = cases! {
    "a size of none" => layer("gpt2", json!({"n_embd": null})),
    "no heads" => layer("gpt2", json!({"n_head": 0})),
    "half a head" => layer("bert", json!({"num_attention_heads": 1.5})),
    "a size as text" => layer("opt", json!({"hidden_size": "768"})),
    "a flag as text" => layer("opt", json!({"enable_bias": "yes"})),
    "a number as a flag" => layer("gpt2", json!({"attn_pdrop": true})),
    "an alias of the wrong type" => layer("gpt2", json!({"hidden_size": []})),
    "too few layers" => layer("bert", json!({"num_hidden_layers": 1})),
    "no layer in any stage" => layer("swin", json!({"depths": [1]})),
    "no heads in a stage" => layer("swin", json!({"depths": [1, 1], "num_heads": [3]})),
    "heads of another width" => layer("gpt2", json!({"head_dim": 32})),
    "fewer key heads" => layer("bert", json!({"num_key_value_heads": 4})),
    "more key heads" => layer("gpt_bigcode", json!({"num_key_value_heads": 12})),
    "relative positions" => layer("bert", json!({"position_embedding_type": "relative_key"})),
    "a config for no layer" => layer("opt", json!({"per_layer_config": {"first": {}}})),
    "a list of configs for layers" => layer("opt", json!({"per_layer_config": [{}]})),
    "keys of no earlier layer" => layer("gemma3n_text", json!({"num_kv_shared_layers": 35})),
    "a scaling that is not known" => layer("llama", json!({"rope_scaling": {"type": "ntk", "factor": 2.0}})),
    "a scaling without its factor" => layer("mistral", json!({"rope_scaling": {"type": "linear"}})),
    "a scaling by null" => layer("llama", json!({"rope_parameters": {"rope_type": "llama3", "factor": null}})),
    "a scaling as text" => layer("qwen2", json!({"rope_parameters": "linear"})),
    "a list of a number" => layer("phi3", json!({"rope_scaling": {"type": "su", "short_factor": 1.0}})),
    "a list that is not there" => layer("phi3", json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}})),
    "another scaling than the architecture has" =>
        layer("phi3", json!({"rope_scaling": {"type": "linear", "factor": 2.0}})),
    "a rope for each kind of layer" =>
        layer("qwen3", json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}})),
    "a rope for all kinds of layers" =>
        layer("gemma3_text", json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0}})),
    "two ropes" => {
        layer(
            "gemma3_text",
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"full_attention": {}}}),
        )
    },
    "a wrong rope of one kind of layer" =>
        layer("gemma3_text", json!({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}})),
    "a softcap that is not applied" => layer("gemma3_text", json!({"attn_logit_softcapping": 50.0})),
    "text of another model" => layer("gemma3", json!({"text_config": {"model_type": "llama"}})),
    "slopes that transformers does not have" => layer("mpt", json!({"attn_config": {"alibi_bias_max": 6}})),
    "norms that transformers does not have" => layer("mpt", json!({"attn_config": {"qk_ln": true}})),
    "biases that transformers does not have" => layer("mpt", json!({"no_bias": false})),
    "two windows" => layer("modernbert", json!({"local_attention": 128, "sliding_window": 128})),
    "a decoder" => layer("t5", json!({"is_decoder": true})),
    "part of heads" => layer("llama", json!({"partial_rotary_factor": 0.5})),
    "no part of heads" => layer("phi", json!({"partial_rotary_factor": 0})),
    "more than heads" => layer("gpt_neox", json!({"rotary_pct": 1.5})),
    "a kind of layer that is not known" =>
        layer("gemma2", json!({"layer_types": ["full_attention", "chunked_attention"]})),
    "too few kinds of layers" => layer("gpt_oss", json!({"layer_types": ["full_attention"]})),
    "no window" => layer("smollm3", json!({"layer_types": ["full_attention", "sliding_attention"]})),
    "a window that is not used" => layer("qwen2", json!({"layer_types": ["full_attention", "sliding_attention"]})),
    "a mask that depends on the implementation" => layer("gemma", json!({"use_bidirectional_attention": true})),
    "neither with positions nor without" => layer("smollm3", json!({"no_rope_layers": [1, 2]})),
    "heads of a width that is not read" => layer("cohere2", json!({"head_dim": 64})),
    "key heads that are not read" => layer("falcon", json!({"multi_query": false, "num_kv_heads": 8})),
    "a scaling of its own" => layer("nomic_bert", json!({"rotary_scaling_factor": 2})),
    "part of heads by another name" => layer("nomic_bert", json!({"rotary_emb_fraction": 0.5})),
    "heads that do not divide the width" => layer("bert", json!({"hidden_size": 10, "num_attention_heads": 4})),
    "dropout of two" => layer("gpt2", json!({"attn_pdrop": 2})),
    "a list" => hf::attention_config(&json!(["llama"]), 0),
    "an architecture that is not known" => layer("rwkv", json!({"hidden_size": 8})),
    "an architecture that is nearly known" => layer("Qwen-2", json!({})),
    "an architecture of parts that are known" => hf::attention_config(
        &json!({
            "model_type": "llava", "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model"}
        }),
        0,
    ),
    "no decoder" => hf::decoder_attention_config(&json!({"model_type": "bert"}), 0),
    "no attention to an encoder" => hf::load_cross_attention(&json!({"model_type": "llama"}), 0, nothing()),
    "a decoder that is shorter than the encoder" =>
        hf::decoder_attention_config(&json!({"model_type": "marian", "encoder_layers": 6, "decoder_layers": 2}), 2),
    "a relative bias for each layer" => hf::load_relative_bias(&json!({"model_type": "umt5"}), nothing()),
    "prompts of its own" => layer("mvp", json!({"use_prompt": true})),
    "a layer without cross-attention" => hf::cross_attention_config(&json!({"model_type": "blip_2_qformer"}), 1),
    "a kind of attention that is not known" =>
        layer("gpt_neo", json!({"attention_layers": ["local", "sparse"], "num_layers": 2})),
    "fewer kinds of layers than there are" =>
        layer("gpt_neo", json!({"attention_types": [[["local"], 1], [["global"], 0]], "num_layers": 2})),
    "kinds of layers that are none" => layer("gpt_neo", json!({"attention_types": [["local", 1]]})),
    "a number for an architecture" => hf::attention_config(&json!({"model_type": 3}), 0),
    "no architecture" => hf::attention_config(&json!({"hidden_size": 8}), 0),
    "latent attention" => layer("deepseek_v2", json!({})),
    "latent attention that is loaded" => load("deepseek_v3", json!({})),
    "quantised weights" => load("opt", json!({"quantization_config": {"quant_method": "gptq", "bits": 4}})),
    "nothing in the checkpoint" => load("opt", json!({})),
    "no relative bias" => hf::load_relative_bias(&json!({"model_type": "opt"}), nothing()),
};

fn nothing() -> VarBuilder<'static> {
    VarBuilder::from_tensors(HashMap::new(), DType::F32, &CPU)
}

/// Layer 3 of an architecture with these fields, from a checkpoint without tensors.
fn load(model_type: &str, mut fields: Value) -> Result<()> {
    fields["model_type"] = json!(model_type);
    hf::load_attention(&fields, 3, nothing()).map(drop)
}

/// The same of latent attention.
fn latent(model_type: &str, mut fields: Value) -> Result<()> {
    fields["model_type"] = json!(model_type);
    hf::latent_attention_config(&fields, 1).map(drop)
}

pub const LATENT: &[Case] = cases! {
    "key heads" => latent("deepseek_v3", json!({"num_attention_heads": 4, "num_key_value_heads": 2})),
    "a width of heads" => latent("deepseek_v3", json!({"qk_rope_head_dim": 32, "head_dim": 64})),
    "both widths" => latent("deepseek_v3", json!({"qk_head_dim": 128})),
    "no latent" => latent("deepseek_v3", json!({"kv_lora_rank": null})),
    "no width" => latent("deepseek_v3", json!({"q_lora_rank": 0})),
    "a flag as text" => latent("deepseek_v3", json!({"rope_interleave": "no"})),
    "part of the part that rotates" => latent("deepseek_v3", json!({"partial_rotary_factor": 0.5})),
    "scores corrected without yarn" =>
        latent("deepseek_v3", json!({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}})),
    "a scaling without its factor" =>
        latent("deepseek_v3", json!({"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}})),
    "a config for no layer" => latent("deepseek_v3", json!({"per_layer_config": {"first": {}}})),
    "too few layers" => latent("deepseek_v3", json!({"num_hidden_layers": 1})),
    "halves" => latent("deepseek_v2", json!({"rope_interleave": false})),
    "dropout of two" => latent("deepseek_v2", json!({"attention_dropout": 2})),
    "attention that is not latent" => latent("llama", json!({})),
    "attention that is not latent and is loaded" => load_latent("llama", json!({})),
    "quantised weights" => load_latent("deepseek_v3", json!({"quantization_config": {"quant_method": "awq"}})),
    "nothing in the checkpoint" => load_latent("deepseek_v2", json!({})),
};

fn load_latent(model_type: &str, mut fields: Value) -> Result<()> {
    fields["model_type"] = json!(model_type);
    hf::load_latent_attention(&fields, 3, nothing()).map(drop)
}
