//! The cases in which candle-transformers 0.11.1 differs from transformers. This crate's model has the logits of
//! transformers that `tests/causal_lm/models` has. candle-transformers ignores some options of the config: without
//! these options, this crate's model has the logits of candle-transformers, so the options are the only difference. If
//! a test fails because candle-transformers was corrected, it moves to `equal.rs`.

use candle_core::{Device, Result, Tensor};
use serde_json::{Value, json};

use crate::common::{Decoded, Model, assert_near, error_text, recorded, relative_error};
use crate::decoders::{Decoder, candle_transformers, logits, this_crate};
use crate::equal::gemma3;
use crate::{builder, ids, weights, with_options};

/// Opens a model of `tests/causal_lm`, and transformers' results for two texts.
fn open(name: &str) -> Result<(Model, Decoded)> {
    let folder = recorded("causal_lm/models").join(name);
    Ok((Model::open(&folder), Decoded::of(&folder)?))
}

/// The order in which tokens go through a model.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// A prompt for each token, which is its last.
    Prompts,
    /// The tokens one by one.
    OneByOne,
}

/// Returns the logits (B, T, V) of all tokens.
fn all_logits(order: Order, tokens: &[Vec<u32>], decoder: impl Fn() -> Result<Decoder>) -> Result<Tensor> {
    let ids = Tensor::new(tokens.to_vec(), &Device::Cpu)?;
    let t = tokens[0].len();
    let steps = match order {
        Order::Prompts => {
            let prompts = (1..=t).map(|len| Ok(logits(&mut decoder()?, &ids, &[len])?.remove(0)));
            prompts.collect::<Result<Vec<_>>>()?
        }
        Order::OneByOne => logits(&mut decoder()?, &ids, &vec![1; t])?,
    };
    Tensor::stack(&steps, 1)
}

/// A difference of candle-transformers in one order of the tokens.
struct Difference {
    order: Order,
    /// Its error, relative to the largest logit.
    error: f64,
    /// The options that it ignores, with values that have the same effect.
    ignored: Value,
}

/// A model whose logits are wrong in candle-transformers.
struct Case {
    model: &'static str,
    /// Options that candle-transformers reads under other names.
    options: Value,
    differences: [Difference; 2],
}

#[test]
fn candle_transformers_matches_this_crate_without_the_options_that_it_ignores() -> Result<()> {
    let longrope = |rest: Value| with_options(&json!({"type": "longrope"}), rest);
    let multiplied = json!({
        "short_factor": [1.0 / 1.1, 1.0 / 1.5], "long_factor": [1.0, 1.0], "attention_factor": 1.0,
    });
    let phi3 = json!({"sliding_window": null, "rope_scaling": longrope(multiplied)});
    let cases = [
        // A query of a prompt attends to one key more than the window, and tokens one by one attend to all keys.
        Case {
            model: "mistral",
            options: json!({"rope_parameters": null, "rope_theta": 1e4}),
            differences: [
                Difference { order: Order::Prompts, error: 0.67, ignored: json!({"sliding_window": 5}) },
                Difference { order: Order::OneByOne, error: 0.71, ignored: json!({"sliding_window": null}) },
            ],
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
            differences: [
                Difference {
                    order: Order::Prompts,
                    error: 0.33,
                    ignored: json!({"query_pre_attn_scalar": 6, "rope_scaling": null, "sliding_window": 5}),
                },
                Difference {
                    order: Order::OneByOne,
                    error: 0.22,
                    ignored: json!({"query_pre_attn_scalar": 6, "rope_scaling": null}),
                },
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
            differences: [
                Difference { order: Order::Prompts, error: 0.90, ignored: phi3.clone() },
                Difference { order: Order::OneByOne, error: 0.90, ignored: phi3 },
            ],
        },
    ];
    for Case { model, options, differences } in cases {
        let (Model { config, weights, .. }, golden) = open(model)?;
        let whole = with_options(&config, options);
        for Difference { order, error, ignored } in differences {
            let own = all_logits(order, &golden.ids, || this_crate(&whole, &weights))?;
            assert_near(&own, &golden.logits, 1e-5, &format!("{model}, {order:?}"));
            let found = all_logits(order, &golden.ids, || candle_transformers(&whole, builder(&weights)))?;
            // Measured errors, which change if their computation changes.
            let gap = relative_error(&found, &golden.logits);
            assert!((gap - error).abs() < 0.01, "{model}, {order:?}: off by {gap:.2} of the largest, was by {error}");
            let rest = with_options(&whole, ignored);
            let without = all_logits(order, &golden.ids, || this_crate(&rest, &weights))?;
            assert_near(&found, &without, 1e-5, &format!("{model}, {order:?}, candle-transformers"));
        }
    }
    Ok(())
}

/// Calls that candle-transformers rejects, by the number of tokens of each, and its error.
#[test]
fn calls_that_candle_transformers_rejects_are_computed_by_this_crate() -> Result<()> {
    let (model, _) = open("gemma3_text")?;
    let several = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2});
    let bigcode = json!({
        "model_type": "gpt_bigcode", "vocab_size": 61, "n_embd": 32, "n_inner": 40, "n_layer": 2, "n_head": 4,
        "n_positions": 48, "multi_query": false,
    });
    let random = |json: &Value| weights(|vb| candle_transformers(json, vb));
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
        (with_options(&model.config, several), model.weights, &[9], "slice-set only supports contiguous tensors"),
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
        let rejected = logits(&mut candle_transformers(&json, builder(&weights))?, &ids, calls);
        assert_eq!(error_text(rejected), message, "{json}");
        let pieces = logits(&mut this_crate(&json, &weights)?, &ids, &[4, 5])?;
        let whole = logits(&mut this_crate(&json, &weights)?, &ids, &[9])?;
        assert_near(&pieces[1], &whole[0], 1e-5, &format!("{json} in pieces"));
    }
    Ok(())
}
