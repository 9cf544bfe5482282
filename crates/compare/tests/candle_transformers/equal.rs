//! Models that are equal on both sides: prompts of every length, prompts in pieces, and tokens one by one.

use candle_core::Result;
use serde_json::{Value, json};

use crate::common::relative_error;
use crate::decoders::{candle_transformers, logits, this_crate};
use crate::{builder, ids, weights, with_options};

const TOKENS: usize = 13;
const VOCAB: u32 = 61;

/// Returns the config of an architecture in small sizes, with the options of a case.
fn with(model_type: &str, options: Value) -> Value {
    let json = json!({
        "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": false,
    });
    with_options(&json, options)
}

/// Returns Gemma 3 with a window at every other layer.
pub fn gemma3(window: usize) -> Value {
    let options = json!({
        "head_dim": 12, "query_pre_attn_scalar": 12, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false,
        "num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window_pattern": 2, "sliding_window": window,
        "rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "tie_word_embeddings": true,
    });
    with("gemma3_text", options)
}

/// Checks that both sides agree on 1 and on 3 sequences, in one call, in pieces and token by token.
fn assert_equal(json: &Value) -> Result<()> {
    let weights = weights(|vb| candle_transformers(json, vb))?;
    let mut ways: Vec<Vec<usize>> = (1..=TOKENS).map(|prompt| vec![prompt]).collect();
    ways.extend([vec![5, 4, 3, 1], vec![6, 1, 1, 2, 1, 1, 1], vec![1; TOKENS]]);
    for b in [1, 3] {
        let ids = ids(b, TOKENS, VOCAB)?;
        for way in &ways {
            let own = logits(&mut this_crate(json, &weights)?, &ids, way)?;
            let others = logits(&mut candle_transformers(json, builder(&weights))?, &ids, way)?;
            for (call, (found, expected)) in own.iter().zip(&others).enumerate() {
                let gap = relative_error(found, expected);
                assert!(gap <= 1e-4, "{json}, {b} sequences in calls of {way:?}: off by {gap:e} in call {call}");
            }
        }
    }
    Ok(())
}

#[test]
fn decoders_match_candle_transformers() -> Result<()> {
    // Of four frequencies the first stays, the second is interpolated, and the others are divided.
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let qwen3 = json!({
        "head_dim": 12, "attention_bias": false, "use_sliding_window": false, "sliding_window": null,
        "max_window_layers": 2,
    });
    let bigcode = json!({
        "model_type": "gpt_bigcode", "vocab_size": VOCAB, "n_embd": 32, "n_inner": 40, "n_layer": 2, "n_head": 4,
        "n_positions": 48, "multi_query": true,
    });
    let cases = [
        with("llama", json!({})),
        with("llama", json!({"tie_word_embeddings": true, "num_key_value_heads": 4})),
        with("llama", json!({"rope_scaling": scaling})),
        // Batches too, whose mask was once that of the first sequence
        // (https://github.com/huggingface/candle/issues/3582).
        with("qwen3", qwen3.clone()),
        with("qwen3", with_options(&qwen3, json!({"attention_bias": true}))),
        with("mistral", json!({"sliding_window": null})),
        with("mistral", json!({"sliding_window": 16, "head_dim": 12})),
        // The texts are shorter than the window; `differs` has longer ones.
        gemma3(16),
        with("phi3", json!({})),
        with("phi3", json!({"partial_rotary_factor": 0.5})),
        bigcode,
    ];
    cases.iter().try_for_each(assert_equal)
}
