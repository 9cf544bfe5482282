//! Where candle-transformers 0.11.1 is not what transformers is. Ours has transformers' logits there, those of
//! `tests/causal_lm/models`; theirs are those of ours with what they pass over taken from the config, which shows that
//! it is that and nothing else. A test that fails because they have become right is to move to `equal.rs`.

use std::path::Path;

use candle_core::{Device, Result, Tensor};
use serde_json::{Value, json};

use crate::common::{assert_near, error_text, relative_error};
use crate::decoders::{logits, ours, theirs};
use crate::equal::gemma3;
use crate::{Weights, builder, ids, told, weights};

/// A model with transformers' logits (B, T, V).
struct Golden {
    json: Value,
    weights: Weights,
    ids: Tensor,
    logits: Tensor,
}

impl Golden {
    fn open(model: &str) -> Result<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/causal_lm/models").join(model);
        let json = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let mut golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu)?;
        let mut take = |name: &str| golden.remove(name).expect(name);
        Ok(Self {
            json: serde_json::from_str(&json).expect("JSON"),
            weights: candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?,
            ids: take("ids"),
            logits: take("logits"),
        })
    }

    fn len(&self) -> Result<usize> {
        self.ids.dim(1)
    }

    /// The logits (B, T, V), each the last of a prompt by itself.
    fn of_prompts(&self, of: impl Fn(&[usize]) -> Result<Vec<Tensor>>) -> Result<Tensor> {
        let last = (1..=self.len()?).map(|len| Ok(of(&[len])?.remove(0)));
        Tensor::stack(&last.collect::<Result<Vec<_>>>()?, 1)
    }

    /// The same, of one token after the other.
    fn of_tokens(&self, of: impl Fn(&[usize]) -> Result<Vec<Tensor>>) -> Result<Tensor> {
        Tensor::stack(&of(&vec![1; self.len()?])?, 1)
    }

    fn ours(&self, json: &Value) -> impl Fn(&[usize]) -> Result<Vec<Tensor>> {
        |calls| logits(&mut ours(json, &self.weights)?, &self.ids, calls)
    }

    fn theirs(&self, json: &Value) -> impl Fn(&[usize]) -> Result<Vec<Tensor>> {
        |calls| logits(&mut theirs(json, builder(&self.weights))?, &self.ids, calls)
    }
}

#[track_caller]
fn assert_equal(found: &Tensor, expected: &Tensor, what: &str) {
    assert_near(found, expected, 1e-5, what);
}

/// Off by this part of the largest, as measured; a change of what they compute changes it.
#[track_caller]
fn assert_off(found: &Tensor, expected: &Tensor, part: f64) {
    let gap = relative_error(found, expected);
    assert!((gap - part).abs() < 0.01, "off by {gap:.2} of the largest, and was by {part}");
}

/// Mistral in theirs lets a query of a prompt see one key more than the window, and tokens one by one see all keys.
#[test]
fn mistral_window() -> Result<()> {
    let golden = Golden::open("mistral")?;
    let json = told(&golden.json, json!({"rope_parameters": null, "rope_theta": 1e4}));
    assert_equal(&golden.of_prompts(golden.ours(&json))?, &golden.logits, "our prompts");
    assert_equal(&golden.of_tokens(golden.ours(&json))?, &golden.logits, "our tokens");

    let prompts = golden.of_prompts(golden.theirs(&json))?;
    let tokens = golden.of_tokens(golden.theirs(&json))?;
    assert_off(&prompts, &golden.logits, 0.67);
    assert_off(&tokens, &golden.logits, 0.71);
    let longer = told(&json, json!({"sliding_window": 5}));
    assert_equal(&prompts, &golden.of_prompts(golden.ours(&longer))?, "their prompts, of a window of 5");
    let full = told(&json, json!({"sliding_window": null}));
    assert_equal(&tokens, &golden.of_tokens(golden.ours(&full))?, "their tokens, of no window");
    Ok(())
}

/// Gemma 3 in theirs divides scores by the root of the head's width, not of `query_pre_attn_scalar` (the 27B has 168
/// and heads of 128), has no `rope_scaling` (from 4B on, positions of full layers are divided by 8), and lets a query
/// of a prompt see one key more than the window. Tokens one by one see as many as they should, so that the two
/// contradict each other.
#[test]
fn gemma3_scales_and_window() -> Result<()> {
    let golden = Golden::open("gemma3_scaled")?;
    let options = json!({
        "rope_parameters": null, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    });
    let json = told(&golden.json, options);
    assert_equal(&golden.of_prompts(golden.ours(&json))?, &golden.logits, "our prompts");
    assert_equal(&golden.of_tokens(golden.ours(&json))?, &golden.logits, "our tokens");

    let prompts = golden.of_prompts(golden.theirs(&json))?;
    let tokens = golden.of_tokens(golden.theirs(&json))?;
    assert_off(&prompts, &golden.logits, 0.33);
    assert_off(&tokens, &golden.logits, 0.22);
    let scales = told(&json, json!({"query_pre_attn_scalar": 6, "rope_scaling": null}));
    assert_equal(&tokens, &golden.of_tokens(golden.ours(&scales))?, "their tokens, of a window of 4");
    let longer = told(&scales, json!({"sliding_window": 5}));
    assert_equal(&prompts, &golden.of_prompts(golden.ours(&longer))?, "their prompts, of a window of 5");
    assert_off(&prompts, &golden.of_prompts(golden.ours(&scales))?, 0.32);
    Ok(())
}

/// A second prompt, or a second piece of one, that goes beyond Gemma 3's window is an error in theirs: their mask has a
/// column for each position, and their cache gives the keys of the window alone.
#[test]
fn gemma3_pieces_beyond_the_window() -> Result<()> {
    let json = gemma3(6);
    let weights = weights(|vb| theirs(&json, vb))?;
    let ids = ids(1, 9, 61)?;
    let refused = logits(&mut theirs(&json, builder(&weights))?, &ids, &[4, 5]);
    assert_eq!(error_text(refused), "shape mismatch in broadcast_add, lhs: [1, 4, 5, 6], rhs: [1, 1, 5, 9]");
    let pieces = logits(&mut ours(&json, &weights)?, &ids, &[4, 5])?;
    let whole = logits(&mut ours(&json, &weights)?, &ids, &[9])?;
    assert_equal(&pieces[1], &whole[0], "ours in pieces");
    Ok(())
}

/// Gemma 3 of more than one key head, from 4B on, takes no prompt in theirs: values go to the cache as a view that it
/// refuses (https://github.com/huggingface/candle/pull/3902). So the other tests of it have one.
#[test]
fn gemma3_of_several_key_heads() -> Result<()> {
    let golden = Golden::open("gemma3_text")?;
    let json = told(&golden.json, json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}));
    let refused = golden.of_prompts(golden.theirs(&json));
    assert_eq!(error_text(refused), "slice-set only supports contiguous tensors");
    assert_equal(&golden.of_prompts(golden.ours(&json))?, &golden.logits, "our prompts");
    Ok(())
}

/// Phi 3 in theirs has no window (https://github.com/huggingface/candle/issues/3698). Its longrope scaling multiplies
/// the frequencies by what transformers divides them by, and has no factor on cosines and sines.
#[test]
fn phi3_window_and_longrope() -> Result<()> {
    let golden = Golden::open("phi3_scaled")?;
    let scaling = json!({"type": "longrope", "short_factor": [1.1, 1.5], "long_factor": [2.0, 3.5]});
    let json = told(&golden.json, json!({"rope_parameters": null, "rope_theta": 1e4, "rope_scaling": scaling}));
    assert_equal(&golden.of_prompts(golden.ours(&json))?, &golden.logits, "our prompts");
    assert_equal(&golden.of_tokens(golden.ours(&json))?, &golden.logits, "our tokens");

    let prompts = golden.of_prompts(golden.theirs(&json))?;
    assert_off(&prompts, &golden.logits, 0.90);
    let full = told(&json, json!({"sliding_window": null}));
    assert_off(&prompts, &golden.of_prompts(golden.ours(&full))?, 0.80);
    let scaling = json!({
        "type": "longrope", "short_factor": [1.0 / 1.1, 1.0 / 1.5], "long_factor": [1.0, 1.0], "attention_factor": 1.0,
    });
    let multiplied = told(&full, json!({"rope_scaling": scaling}));
    assert_equal(&prompts, &golden.of_prompts(golden.ours(&multiplied))?, "their prompts");
    assert_equal(&golden.of_tokens(golden.theirs(&json))?, &prompts, "their tokens");
    Ok(())
}

/// GPT BigCode with a key head for each query head loads in theirs and fails at its first call: it takes the width for
/// the number of heads. `tests/hf` compares our attention of it with transformers'.
#[test]
fn gpt_bigcode_of_every_head() -> Result<()> {
    let json = json!({
        "model_type": "gpt_bigcode", "vocab_size": 61, "n_embd": 32, "n_inner": 40, "n_layer": 2, "n_head": 4,
        "n_positions": 48, "multi_query": false,
    });
    let weights = weights(|vb| theirs(&json, vb))?;
    let ids = ids(1, 9, 61)?;
    let refused = logits(&mut theirs(&json, builder(&weights))?, &ids, &[9]);
    assert_eq!(
        error_text(refused),
        "Shape mismatch, got buffer of size 864 which is compatible with shape [1, 9, 32, 24]"
    );
    let whole = logits(&mut ours(&json, &weights)?, &ids, &[9])?;
    let pieces = logits(&mut ours(&json, &weights)?, &ids, &[4, 5])?;
    assert_equal(&pieces[1], &whole[0], "ours in pieces");
    Ok(())
}
