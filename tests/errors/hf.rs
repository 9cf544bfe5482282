//! Hugging Face configurations that say nothing, contradict themselves, or name what is not supported.

use candle_attention::hf;
use candle_core::Error;
use serde_json::{Value, json};

use crate::*;

/// Fields of the config.json of an architecture.
const LAYERS: &str = r#"
gpt2 {"n_embd": null}
gpt2 {"n_head": 0}
bert {"num_attention_heads": 1.5}
opt {"hidden_size": "768"}
opt {"enable_bias": "yes"}
gpt2 {"attn_pdrop": true}
gpt2 {"hidden_size": []}
bert {"num_hidden_layers": 1}
swin {"depths": [1]}
swin {"depths": [1, 1], "num_heads": [3]}
gpt2 {"head_dim": 32}
bert {"num_key_value_heads": 4}
gpt_bigcode {"num_key_value_heads": 12}
bert {"position_embedding_type": "relative_key"}
opt {"per_layer_config": {"first": {}}}
opt {"per_layer_config": [{}]}
gemma3n_text {"num_kv_shared_layers": 35}
llama {"rope_scaling": {"type": "ntk", "factor": 2.0}}
mistral {"rope_scaling": {"type": "linear"}}
llama {"rope_parameters": {"rope_type": "llama3", "factor": null}}
qwen2 {"rope_parameters": "linear"}
phi3 {"rope_scaling": {"type": "su", "short_factor": 1.0}}
phi3 {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}
phi3 {"rope_scaling": {"type": "linear", "factor": 2.0}}
qwen3 {"rope_parameters": {"full_attention": {"rope_type": "default"}}}
gemma3_text {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
gemma3_text {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"full_attention": {}}}
gemma3_text {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}
gemma3_text {"attn_logit_softcapping": 50.0}
gemma3 {"text_config": {"model_type": "llama"}}
mpt {"attn_config": {"alibi_bias_max": 6}}
mpt {"attn_config": {"qk_ln": true}}
mpt {"no_bias": false}
modernbert {"local_attention": 128, "sliding_window": 128}
t5 {"is_decoder": true}
llama {"partial_rotary_factor": 0.5}
phi {"partial_rotary_factor": 0}
gpt_neox {"rotary_pct": 1.5}
gemma2 {"layer_types": ["full_attention", "chunked_attention"]}
gpt_oss {"layer_types": ["full_attention"]}
smollm3 {"layer_types": ["full_attention", "sliding_attention"]}
qwen2 {"layer_types": ["full_attention", "sliding_attention"]}
gemma {"use_bidirectional_attention": true}
smollm3 {"no_rope_layers": [1, 2]}
cohere2 {"head_dim": 64}
falcon {"multi_query": false, "num_kv_heads": 8}
nomic_bert {"rotary_scaling_factor": 2}
nomic_bert {"rotary_emb_fraction": 0.5}
bert {"hidden_size": 10, "num_attention_heads": 4}
gpt2 {"attn_pdrop": 2}
rwkv {"hidden_size": 8}
Qwen-2 {}
mvp {"use_prompt": true}
gpt_neo {"attention_layers": ["local", "sparse"], "num_layers": 2}
gpt_neo {"attention_types": [[["local"], 1], [["global"], 0]], "num_layers": 2}
gpt_neo {"attention_types": [["local", 1]]}
deepseek_v2 {}
llava {"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model"}}
"#;

/// The same of latent attention.
const LATENT: &str = r#"
deepseek_v3 {"num_attention_heads": 4, "num_key_value_heads": 2}
deepseek_v3 {"qk_rope_head_dim": 32, "head_dim": 64}
deepseek_v3 {"qk_head_dim": 128}
deepseek_v3 {"kv_lora_rank": null}
deepseek_v3 {"q_lora_rank": 0}
deepseek_v3 {"rope_interleave": "no"}
deepseek_v3 {"partial_rotary_factor": 0.5}
deepseek_v3 {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}
deepseek_v3 {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}
deepseek_v3 {"per_layer_config": {"first": {}}}
deepseek_v3 {"num_hidden_layers": 1}
deepseek_v2 {"rope_interleave": false}
deepseek_v2 {"attention_dropout": 2}
llama {}
"#;

/// The same of linear attention.
const LINEAR: &str = r#"
llama {}
deepseek_v3 {}
qwen3_next {"layer_types": ["linear_attention", "full_attention"]}
qwen3_next {"layer_types": ["linear_attention"]}
qwen3_next {"layer_types": ["linear_attention", "conv"]}
qwen3_next {"full_attention_interval": 2}
qwen3_next {"full_attention_interval": 0}
qwen3_next {"hidden_act": "gelu"}
qwen3_next {"linear_num_value_heads": null}
qwen3_next {"linear_num_key_heads": 5}
qwen3_next {"linear_conv_kernel_dim": 1}
qwen4_exp_text {"output_gate_type": "relu"}
olmo_hybrid {"linear_key_head_dim": "wide"}
olmo_hybrid {"hidden_size": 1}
kimi_linear {"linear_attn_config": [4]}
kimi_linear {"linear_attn_config": {"full_attn_layers": [2]}}
kimi_linear {"linear_attn_config": {"full_attn_layers": "2"}}
kimi_linear {"linear_attn_config": {"num_heads": 0}}
bailing_hybrid {"kda_lower_bound": 1}
bailing_hybrid {"layer_group_size": 2}
glm5_next_text {"linear_attn_config": {"gate_lower_bound": "low"}}
"#;

fn config(model_type: &str) -> Value {
    json!({"model_type": model_type})
}

fn quantised(model_type: &str, method: Value) -> Value {
    json!({"model_type": model_type, "quantization_config": method})
}

fn nothing() -> VarBuilder<'static> {
    weights_of(&[])
}

/// What layer 1 of each of these is refused for.
fn refused<T>(configs: &str, read: fn(&Value, usize) -> Result<T>) -> Vec<Case> {
    let refused = |line: &str| {
        let (model_type, fields) = line.split_once(' ').expect("an architecture and its fields");
        let mut fields: Value = serde_json::from_str(fields).map_err(Error::wrap)?;
        fields["model_type"] = json!(model_type);
        read(&fields, 1).map(drop)
    };
    configs.trim().lines().map(|line| case(line, || refused(line))).collect()
}

#[test]
fn layers() {
    let whole = cases! {
        "a list" => hf::attention_config(&json!(["llama"]), 0),
        "a number for an architecture" => hf::attention_config(&json!({"model_type": 3}), 0),
        "no architecture" => hf::attention_config(&json!({"hidden_size": 8}), 0),
        "no decoder" => hf::decoder_attention_config(&config("bert"), 0),
        "no attention to an encoder" => hf::load_cross_attention(&config("llama"), 0, nothing()),
        "a decoder that is shorter than the encoder" => hf::decoder_attention_config(
            &json!({"model_type": "marian", "encoder_layers": 6, "decoder_layers": 2}), 2),
        "a layer without cross-attention" => hf::cross_attention_config(&config("blip_2_qformer"), 1),
        "a relative bias for each layer" => hf::load_relative_bias(&config("umt5"), nothing()),
        "no relative bias" => hf::load_relative_bias(&config("opt"), nothing()),
        "latent attention that is loaded" => hf::load_attention(&config("deepseek_v3"), 3, nothing()),
        "nothing in the checkpoint" => hf::load_attention(&config("opt"), 3, nothing()),
        "quantised weights" =>
            hf::load_attention(&quantised("opt", json!({"quant_method": "gptq", "bits": 4})), 3, nothing()),
    };
    assert_reviewed("hf", &[refused(LAYERS, hf::attention_config), whole]);
}

#[test]
fn linear_layers() {
    let loaded = cases! {
        "linear attention that is loaded as softmax attention" =>
            hf::load_attention(&config("qwen3_next"), 0, nothing()),
        "linear attention that is loaded as latent attention" =>
            hf::load_latent_attention(&config("kimi_linear"), 0, nothing()),
        "softmax attention of another kind" => hf::load_attention(&config("bailing_hybrid"), 5, nothing()),
        "softmax attention that is loaded as linear" =>
            hf::load_linear_attention(&config("qwen3_next"), 3, nothing()),
        "nothing in the checkpoint" => hf::load_linear_attention(&config("olmo_hybrid"), 0, nothing()),
        "quantised weights" => {
            let config = quantised("qwen3_next", json!({"quant_method": "gptq", "bits": 4}));
            hf::load_linear_attention(&config, 0, nothing())
        },
    };
    assert_reviewed("hf_linear", &[refused(LINEAR, hf::linear_attention_config), loaded]);
}

#[test]
fn latent_layers() {
    let load = |config: Value| hf::load_latent_attention(&config, 3, nothing());
    let loaded = cases! {
        "attention that is not latent and is loaded" => load(config("llama")),
        "nothing in the checkpoint" => load(config("deepseek_v2")),
        "quantised weights" => load(quantised("deepseek_v3", json!({"quant_method": "awq"}))),
    };
    assert_reviewed("hf_latent", &[refused(LATENT, hf::latent_attention_config), loaded]);
}
