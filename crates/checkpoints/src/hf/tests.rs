//! Rules that rows of the table name, in models that `tests/hf` does not have.

use candle_attention_core::RopeScaling;
use serde_json::{Value, json};

use super::{attention_config, cross_attention_config, decoder_attention_config};

/// Returns the windows of the first layers: a number, `-` for all keys, `x` for a layer without softmax attention.
fn windows(model_type: &str, mut config: Value) -> String {
    config["model_type"] = json!(model_type);
    let layers = (0..8).map(|layer| match attention_config(&config, layer) {
        Ok(cfg) => cfg
            .window()
            .or(cfg.local_window().map(|window| window.left))
            .map_or("-".into(), |window| window.to_string()),
        Err(_) => "x".into(),
    });
    layers.collect::<Vec<_>>().join(" ")
}

#[test]
fn window_rules_of_families_match_transformers() {
    let used = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 6});
    for (model_type, config, expected) in [
        ("llama", json!({"sliding_window": 9}), "- - - - - - - -"),
        ("mistral", json!({}), "4096 4096 4096 4096 4096 4096 4096 4096"),
        ("mixtral", json!({}), "- - - - - - - -"),
        ("mellum", json!({}), "- - - - - - - -"),
        ("gpt_oss", json!({}), "128 - 128 - 128 - 128 -"),
        ("cwm", json!({}), "- 8192 8192 8192 - 8192 8192 8192"),
        ("olmo3", json!({}), "4096 4096 4096 - 4096 4096 4096 -"),
        ("cohere2", json!({}), "4096 4096 4096 - 4096 4096 4096 -"),
        ("cohere2", json!({"sliding_window_pattern": 2}), "4096 - 4096 - 4096 - 4096 -"),
        ("gemma4_text", json!({"num_hidden_layers": 8}), "512 512 512 512 512 - 512 -"),
        ("qwen2", used.clone(), "- - - - - - 9 9"),
        ("qwen2", json!({"sliding_window": 9}), "- - - - - - - -"),
        ("dots1", json!({"max_window_layers": 6}), "- - - - - - 4096 4096"),
        ("exaone4", json!({}), "4096 4096 4096 - 4096 4096 4096 -"),
        ("exaone4", json!({"sliding_window": null}), "- - - - - - - -"),
        ("ministral", json!({"sliding_window": 9}), "9 9 9 9 9 9 9 9"),
        ("qwen3_moe", used.clone(), "9 9 9 9 9 9 9 9"),
        ("smollm3", used.clone(), "- - - 9 - - - 9"),
        ("muse_glimmer_text", json!({"num_hidden_layers": 8}), "2048 2048 2048 - 2048 2048 2048 -"),
        ("modernbert", json!({}), "- 64 64 - 64 64 - 64"),
        ("gpt_neo", json!({}), "- 256 - 256 - 256 - 256"),
        ("gpt_neo", json!({"attention_layers": ["local", "local", "global"]}), "256 256 - x x x x x"),
        ("qwen3_next", json!({}), "x x x - x x x -"),
        ("minimax", json!({"sliding_window": 9}), "9 x 9 x 9 x 9 x"),
        ("lfm3", json!({}), "x x - x 256 x - x"),
        ("granitemoehybrid", json!({"layer_types": ["mamba", "attention"]}), "x - x x x x x x"),
        ("bamba", json!({"attn_layer_indices": [2, 5]}), "x x - x x - x x"),
        ("jamba", json!({}), "x x x x - x x x"),
        ("nemotron_h", json!({"num_hidden_layers": 8, "hybrid_override_pattern": "M*M*-*MM"}), "x - x - x - x x"),
        ("recurrent_gemma", json!({}), "x x 2048 x x 2048 x x"),
    ] {
        assert_eq!(windows(model_type, config.clone()), expected, "{model_type} {config}");
    }
}

#[test]
fn rules_of_families_match_transformers() -> candle_core::Result<()> {
    let dbrx = json!({"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 5e5, "attn_pdrop": 0.25});
    for (config, layer, expected) in [
        (json!({"model_type": "dbrx", "attn_config": dbrx}), 0, "num_kv_heads: Some(4)"),
        (json!({"model_type": "dbrx", "attn_config": dbrx}), 0, "clip_qkv: Some(8.0)"),
        (json!({"model_type": "dbrx", "attn_config": dbrx}), 0, "base: 500000.0"),
        (json!({"model_type": "dbrx", "attn_config": dbrx}), 0, "dropout: 0.25"),
        (json!({"model_type": "falcon_h1", "head_dim": 64, "key_multiplier": 2}), 0, "scale: Some(0.25)"),
        (json!({"model_type": "hyperclovax", "head_dim": 64}), 0, "scale: Some(0.125)"),
        (json!({"model_type": "hyperclovax", "attention_multiplier": 0.5}), 0, "scale: Some(0.5)"),
        (json!({"model_type": "muse_glimmer_text", "head_dim": 64, "qk_scale_factor": 4}), 0, "scale: Some(0.5)"),
        (json!({"model_type": "muse_glimmer_text", "num_hidden_layers": 8}), 3, "rope: None"),
        (json!({"model_type": "minimax_m2", "rotary_dim": 64}), 0, "rotary_dim: Some(64)"),
        (json!({"model_type": "phimoe", "rope_scaling": {"type": "linear", "factor": 2}}), 0, "own kind of scaling"),
        (json!({"model_type": "esm", "position_embedding_type": "relative_key"}), 0, "expected \"absolute\""),
        (json!({"model_type": "lfm3"}), 2, "scope: PerHead"),
        (json!({"model_type": "lfm3", "use_attention_gate": false}), 2, "output_gate: None"),
        (json!({"model_type": "step3p5", "query_pre_attn_scalar": 64, "head_dim": 32}), 0, "scale: Some(0.125)"),
        (json!({"model_type": "embedding_gemma2_text"}), 5, "head_dim: Some(512)"),
        (json!({"model_type": "embedding_gemma2_text"}), 5, "num_kv_heads: Some(1)"),
        (json!({"model_type": "diffusion_gemma_text"}), 5, "kv_sharing: KeysAsValues"),
        (json!({"model_type": "gemma4_text", "num_kv_shared_layers": null}), 0, "kv_sharing: None"),
        (json!({"model_type": "gemma4_text", "attention_k_eq_v": true}), 5, "kv_sharing: KeysAsValues"),
        (json!({"model_type": "seed_oss", "attention_out_bias": true}), 0, "out_bias: true"),
        (json!({"model_type": "mobilebert"}), 0, "vdim: Some(512)"),
    ] {
        let found = match attention_config(&config, layer) {
            Ok(cfg) => format!("{cfg:?}"),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{config}: {found}");
    }
    let molmo = json!({"rope_type": "linear", "factor": 2});
    let molmo = json!({"model_type": "molmo2_text", "rope_parameters": molmo, "rope_scaling_layers": [1]});
    assert!(attention_config(&molmo, 0).is_err() && attention_config(&molmo, 1).is_ok());

    let cross = cross_attention_config(&json!({"model_type": "blip_2_qformer", "encoder_hidden_size": 96}), 2)?;
    assert_eq!((cross.kdim(), cross.vdim()), (96, 96));
    assert!(cross_attention_config(&json!({"model_type": "blip_2_qformer"}), 1).is_err());
    let trocr = json!({"model_type": "trocr", "cross_attention_hidden_size": 96});
    assert_eq!(cross_attention_config(&trocr, 0)?.kdim(), 96);
    let speech = json!({"model_type": "fastspeech2_conformer", "decoder_attention_dropout_rate": 0.5});
    assert_eq!(decoder_attention_config(&speech, 0)?.dropout(), 0.5);
    Ok(())
}

#[test]
fn ntk_scaling_of_published_embedders_matches_definition() {
    // GTE divides frequencies of a larger base once more.
    let gte = json!({"model_type": "gte", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 20_000.0,
        "rope_scaling": {"type": "ntk", "factor": 8.0}});
    let cfg = attention_config(&gte, 0).expect("a config");
    let rope = cfg.rope().expect("rotary positions");
    let RopeScaling::Linear { factor } = rope.scaling() else { panic!("scaling is {:?}", rope.scaling()) };
    for pair in 0..8 {
        let expected = 1.0 / (20_000f64 * 8.0).powf(f64::from(pair) * 2.0 / 16.0) / 8f64.powf(2.0 / 16.0);
        let found = rope.base().powf(-f64::from(pair) * 2.0 / 16.0) / factor;
        assert!((found - expected).abs() <= 1e-12 * expected, "pair {pair}: {found} and {expected}");
    }
    // Nomic's own field is what transformers calls dynamic.
    let own = json!({"model_type": "nomic_bert", "rotary_scaling_factor": 2, "max_trained_positions": 1024});
    let theirs = json!({"model_type": "nomic_bert", "max_position_embeddings": 1024,
        "rope_scaling": {"type": "dynamic", "factor": 2.0}});
    let [own, theirs] = [own, theirs].map(|config| attention_config(&config, 0).expect("a config"));
    assert_eq!(own.rope(), theirs.rope());
    assert!(matches!(own.rope().expect("rotary positions").scaling(), RopeScaling::Dynamic { .. }));
}
