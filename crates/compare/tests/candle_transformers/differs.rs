//! The cases in which candle-transformers 0.11.1 differs from transformers. Our model has transformers' logits there,
//! those of `tests/causal_lm/models`. Theirs has the logits of our model without the options that theirs ignores, which
//! shows that these options are the only difference. If a test fails because candle-transformers was corrected, it
//! moves to `equal.rs`.

use candle_core::{Device, Result, Tensor};
use serde_json::{Value, json};

use crate::common::{Decoded, Model, assert_near, error_text, recorded, relative_error};
use crate::decoders::{Decoder, logits, ours, theirs};
use crate::equal::gemma3;
use crate::{builder, ids, told, weights};

/// Opens a model of `tests/causal_lm`, and transformers' results for two texts.
fn open(name: &str) -> Result<(Model, Decoded)> {
    let folder = recorded("causal_lm/models").join(name);
    Ok((Model::open(&folder), Decoded::of(&folder)?))
}

/// Returns the logits (B, T, V) of prompts, each token being the last of a prompt, and those of the tokens one by one.
fn both(ids: &[Vec<u32>], decoder: impl Fn() -> Result<Decoder>) -> Result<[Tensor; 2]> {
    let (ids, t) = (Tensor::new(ids.to_vec(), &Device::Cpu)?, ids[0].len());
    let prompts = (1..=t).map(|len| Ok(logits(&mut decoder()?, &ids, &[len])?.remove(0)));
    let tokens = logits(&mut decoder()?, &ids, &vec![1; t])?;
    Ok([Tensor::stack(&prompts.collect::<Result<Vec<_>>>()?, 1)?, Tensor::stack(&tokens, 1)?])
}

/// A model of which theirs has other logits, and the options with which ours has the same.
struct Case {
    model: &'static str,
    /// Options that theirs reads under other names.
    options: Value,
    /// The error of theirs: with prompts, and with tokens one by one.
    off: [f64; 2],
    /// The options that theirs ignores: with prompts, and with tokens one by one.
    passed_over: [Value; 2],
}

#[test]
fn theirs_are_ours_without_what_they_pass_over() -> Result<()> {
    let longrope = |rest: Value| told(&json!({"type": "longrope"}), rest);
    let multiplied = json!({
        "short_factor": [1.0 / 1.1, 1.0 / 1.5], "long_factor": [1.0, 1.0], "attention_factor": 1.0,
    });
    let phi3 = json!({"sliding_window": null, "rope_scaling": longrope(multiplied)});
    let cases = [
        // A query of a prompt attends to one key more than the window, and tokens one by one attend to all keys.
        Case {
            model: "mistral",
            options: json!({"rope_parameters": null, "rope_theta": 1e4}),
            off: [0.67, 0.71],
            passed_over: [json!({"sliding_window": 5}), json!({"sliding_window": null})],
        },
        // Scores are divided by the root of the head dimension, not of `query_pre_attn_scalar` (the 27B has 168 and
        // heads of 128), there is no `rope_scaling` (from 4B on, positions of full layers are divided by 8), and a
        // query of a prompt attends to one key more than the window. Tokens one by one attend to the right number of
        // keys, so that the two contradict each other.
        Case {
            model: "gemma3_scaled",
            options: json!({
                "rope_parameters": null, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            }),
            off: [0.33, 0.22],
            passed_over: [
                json!({"query_pre_attn_scalar": 6, "rope_scaling": null, "sliding_window": 5}),
                json!({"query_pre_attn_scalar": 6, "rope_scaling": null}),
            ],
        },
        // There is no window (https://github.com/huggingface/candle/issues/3698). Longrope scaling multiplies the
        // frequencies by the factors that transformers divides by, and has no factor on cosines and sines.
        Case {
            model: "phi3_scaled",
            options: json!({
                "rope_parameters": null, "rope_theta": 1e4,
                "rope_scaling": longrope(json!({"short_factor": [1.1, 1.5], "long_factor": [2.0, 3.5]})),
            }),
            off: [0.90, 0.90],
            passed_over: [phi3.clone(), phi3],
        },
    ];
    for Case { model, options, off, passed_over } in cases {
        let (Model { config, weights, .. }, golden) = open(model)?;
        let json = told(&config, options);
        let found = both(&golden.ids, || theirs(&json, builder(&weights)))?;
        let own = both(&golden.ids, || ours(&json, &weights))?;
        for (i, way) in ["prompts", "tokens one by one"].into_iter().enumerate() {
            assert_near(&own[i], &golden.logits, 1e-5, &format!("{model}, {way}"));
            // Measured errors, which change if their computation changes.
            let gap = relative_error(&found[i], &golden.logits);
            assert!((gap - off[i]).abs() < 0.01, "{model}, {way}: off by {gap:.2} of the largest, was by {}", off[i]);
            let json = told(&json, passed_over[i].clone());
            let without = both(&golden.ids, || ours(&json, &weights))?;
            assert_near(&found[i], &without[i], 1e-5, &format!("{model}, {way}, theirs"));
        }
    }
    Ok(())
}

/// Calls that theirs refuses, by the number of tokens of each, and its error.
#[test]
fn what_theirs_refuses_ours_computes() -> Result<()> {
    let (model, _) = open("gemma3_text")?;
    let several = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2});
    let bigcode = json!({
        "model_type": "gpt_bigcode", "vocab_size": 61, "n_embd": 32, "n_inner": 40, "n_layer": 2, "n_head": 4,
        "n_positions": 48, "multi_query": false,
    });
    let random = |json: &Value| weights(|vb| theirs(json, vb));
    for (json, weights, calls, message) in [
        // A second prompt, or a second piece of one, that exceeds Gemma 3's window: their mask has a column for each
        // position, and their cache returns the keys of the window alone.
        (
            gemma3(6),
            random(&gemma3(6))?,
            &[4, 5][..],
            "shape mismatch in broadcast_add, lhs: [1, 4, 5, 6], rhs: [1, 1, 5, 9]",
        ),
        // Gemma 3 with more than one key head, from 4B on, takes no prompt: values go to the cache as a view that it
        // refuses (https://github.com/huggingface/candle/pull/3902). Therefore the other cases have one key head.
        (told(&model.config, several), model.weights, &[9], "slice-set only supports contiguous tensors"),
        // GPT BigCode with a key head for each query head loads, and fails at its first call: it takes the width for
        // the number of heads. `tests/hf` compares our attention of it with transformers'.
        (
            bigcode.clone(),
            random(&bigcode)?,
            &[9],
            "Shape mismatch, got buffer of size 864 which is compatible with shape [1, 9, 32, 24]",
        ),
    ] {
        let ids = ids(1, 9, 37)?;
        let refused = logits(&mut theirs(&json, builder(&weights))?, &ids, calls);
        assert_eq!(error_text(refused), message, "{json}");
        let [pieces, whole] = [&[4, 5][..], &[9]].map(|calls| logits(&mut ours(&json, &weights)?, &ids, calls));
        assert_near(&pieces?[1], &whole?[0], 1e-5, &format!("{json}, ours in pieces"));
    }
    Ok(())
}
