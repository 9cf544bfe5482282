//! Decoders, called as a program calls them: however the tokens of two texts come, the logits are transformers'.

use std::collections::HashMap;

use candle_attention::AttentionCacheConfig;
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;

use crate::common::{Decoded, assert_near, bits, error_text};
use crate::decoder::CausalLm;
use crate::decoder::attention::{Cache, Input};
use crate::encoder::Encoder;
use crate::process::Checkpoint;

fn load(checkpoint: &Checkpoint) -> Result<CausalLm> {
    let tensors = checkpoint.tensors("model.safetensors");
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    CausalLm::load(&checkpoint.config(), vb, |_, _| {})
}

/// Calls decoders with pieces of any length; and with another number of tokens of both texts in each call, with
/// padding.
#[test]
fn decoders_called_in_pieces_match_logits_of_transformers() -> Result<()> {
    for checkpoint in Checkpoint::all("causal_lm") {
        let model = load(&checkpoint)?;
        let golden = Decoded::of(&checkpoint.path)?;
        let t = golden.ids[0].len();
        let pieces = |most: usize| (0..t).step_by(most).map(|at| [most.min(t - at); 2]).collect::<Vec<_>>();
        let uneven = vec![[5, 1], [0, 3], [2, 4], [1, 0], [3, 3]];
        for calls in [1, 2, 5, 65].map(pieces).into_iter().chain([uneven]) {
            let mut caches = model.caches(|config| config)?;
            let mut before = [0; 2];
            for lens in &calls {
                let row = |text: usize| {
                    // Padding is another token than the one that is next.
                    let mut row = golden.ids[text][before[text]..][..lens[text]].to_vec();
                    row.resize(lens[0].max(lens[1]), 36);
                    row
                };
                let ids = Tensor::new(vec![row(0), row(1)], &Device::Cpu)?;
                let padded = (lens[0] != lens[1]).then_some(&lens[..]);
                let logits = model.logits(&model.forward(&ids, padded, &mut caches)?)?;
                for (text, &len) in lens.iter().enumerate().filter(|&(_, &len)| len > 0) {
                    let expected = golden.logits.i((text, before[text]..before[text] + len))?;
                    let what = format!("{checkpoint}, text {text} in calls of {calls:?}");
                    assert_near(&logits.i((text, ..len))?, &expected, 3e-5, &what);
                    before[text] += len;
                }
                assert!(caches.iter().all(|cache| cache.lens() == before), "{checkpoint}");
            }
        }
    }
    Ok(())
}

/// Checks that its size does not depend on the length of the text.
#[test]
fn linear_attention_state_does_not_grow() -> Result<()> {
    let model = load(&Checkpoint::of("causal_lm", "qwen3_5_text"))?;
    let ids = Tensor::zeros((1, 300), DType::U32, &Device::Cpu)?;
    let held = |t: usize| -> Result<Vec<usize>> {
        let mut caches = model.caches(|config| config)?;
        model.forward(&ids.narrow(1, 0, t)?, None, &mut caches)?;
        Ok(caches.iter().map(Cache::memory).collect())
    };
    let few = held(1)?;
    let many = held(300)?;
    assert_eq!(few[..3], many[..3]);
    assert!(few[3] < many[3], "{few:?}, {many:?}");
    Ok(())
}

#[test]
fn linear_attention_layer_rejects_input_and_cache_of_softmax() -> Result<()> {
    let model = load(&Checkpoint::of("causal_lm", "qwen3_next"))?;
    let xs = Tensor::zeros((1, 2, 16), DType::F32, &Device::Cpu)?;
    let refused = model.through_blocks(xs, |_, attention, input| attention.forward(Input::Softmax(input.softmax()?)));
    assert_eq!(error_text(refused), "[causal_lm] a layer has linear attention, expected softmax attention in all");
    let mut caches = model.caches(|config| config)?;
    caches.reverse();
    let ids = Tensor::zeros((1, 2), DType::U32, &Device::Cpu)?;
    let error = error_text(model.forward(&ids, None, &mut caches));
    assert!(error.contains("a layer of linear attention got the cache of another kind of attention"), "{error}");
    Ok(())
}

#[test]
fn deepseek_v4_with_published_names_matches_logits_of_transformers() -> Result<()> {
    let checkpoint = Checkpoint::of("causal_lm", "deepseek_v4");
    let mut tensors = HashMap::new();
    for (name, tensor) in checkpoint.tensors("model.safetensors") {
        let name = name.replace("model.", "").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_");
        tensors.insert(name, tensor);
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let model = CausalLm::load(&checkpoint.config(), vb, |_, _| {})?;
    let golden = Decoded::of(&checkpoint.path)?;
    let ids = Tensor::new(golden.ids.to_vec(), &Device::Cpu)?;
    let logits = model.logits(&model.forward(&ids, None, &mut model.caches(|config| config)?)?)?;
    assert_near(&logits, &golden.logits, 3e-5, "published names");
    Ok(())
}

#[test]
fn experts_by_id_reject_tables_of_other_experts_and_calls_without_ids() -> Result<()> {
    let checkpoint = Checkpoint::of("causal_lm", "deepseek_v4");
    let table = "model.layers.0.ffn.gate.tid2eid";
    for row in [[0i64, 4], [-1, 1], [2, 2]] {
        let mut tensors = checkpoint.tensors("model.safetensors");
        tensors.insert(table.to_string(), Tensor::new(&[row], &Device::Cpu)?);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let error = error_text(CausalLm::load(&checkpoint.config(), vb, |_, _| {}));
        let expected = format!("the table of experts has {row:?} for token 0, expected different ones of 4 experts");
        assert!(error.contains(&expected), "{error}");
    }
    let model = load(&checkpoint)?;
    let xs = Tensor::zeros((1, 2, 16), DType::F32, &Device::Cpu)?;
    let error = error_text(model.through_blocks(xs, |_, attention, input| attention.forward(input)));
    assert!(error.contains("the experts of 2 tokens follow from their ids, found 0 ids"), "{error}");
    Ok(())
}

#[test]
fn hyper_connection_of_another_shape_is_an_error_that_names_it() -> Result<()> {
    let checkpoint = Checkpoint::of("causal_lm", "deepseek_v4");
    let mut config = checkpoint.config();
    config["hc_mult"] = 3.into();
    let vb = VarBuilder::from_tensors(checkpoint.tensors("model.safetensors"), DType::F32, &Device::Cpu);
    let error = error_text(CausalLm::load(&config, vb, |_, _| {}));
    assert!(error.contains("model.layers.0.hc_attn_fn has the shape [8, 32], expected [15, 48]"), "{error}");
    Ok(())
}

#[test]
fn sentence_embedding_rejects_decoder_with_several_streams() {
    let checkpoint = Checkpoint::of("causal_lm", "deepseek_v4");
    let vb = VarBuilder::from_tensors(checkpoint.tensors("model.safetensors"), DType::F32, &Device::Cpu);
    let error = error_text(Encoder::load(&checkpoint.config(), vb, |_, _| {}));
    let expected = "[encoder] model_type is \"deepseek_v4\", whose residual is several streams, expected one stream";
    assert_eq!(error, expected);
}

#[test]
fn cache_of_compressed_keys_rejects_a_dtype_codes_a_window_and_sink_tokens() -> Result<()> {
    let model = load(&Checkpoint::of("causal_lm", "deepseek_v4"))?;
    let options: [fn(AttentionCacheConfig) -> AttentionCacheConfig; 4] = [
        |config| config.with_dtype(DType::F16),
        AttentionCacheConfig::with_q8,
        |config| config.with_window(8),
        |config| config.with_sink_tokens(2),
    ];
    for option in options {
        let error = error_text(model.caches(option));
        assert!(error.starts_with("[causal_lm] a layer attends to compressed keys, expected a cache with"), "{error}");
    }
    Ok(())
}

/// Returns the logits of a text that is sequence `place` of a batch of `b`, in calls of these numbers of tokens.
fn logits_in_batch(model: &CausalLm, text: &[u32], place: usize, b: usize, calls: &[usize]) -> Result<Vec<Tensor>> {
    let mut caches = model.caches(|config| config)?;
    let mut all = Vec::new();
    let mut first = 0;
    for len in calls {
        let mut rows = Vec::new();
        for sequence in 0..b {
            let own = text[first..first + len].iter();
            // The other sequences have the tokens of the text in another order.
            let turned = (first..first + len).map(|t| text[(t * (2 * sequence + 3) + sequence) % text.len()]);
            rows.push(if sequence == place { own.copied().collect() } else { turned.collect::<Vec<_>>() });
        }
        let hidden = model.forward(&Tensor::new(rows, &Device::Cpu)?, None, &mut caches)?;
        all.push(model.logits(&hidden)?.i(place)?);
        first += len;
    }
    Ok(all)
}

/// Compares a text alone with the text in batches of 2, 9 and 33 sequences.
#[test]
fn decoders_logits_of_a_sequence_have_the_same_bits_in_every_batch() -> Result<()> {
    let mut different = Vec::new();
    for checkpoint in Checkpoint::all("causal_lm") {
        let text = &Decoded::of(&checkpoint.path)?.ids[0];
        let calls = [text.len() - 4, 1, 2, 1];
        for dtype in [DType::F32, DType::BF16] {
            let vb = VarBuilder::from_tensors(checkpoint.tensors("model.safetensors"), dtype, &Device::Cpu);
            let model = CausalLm::load(&checkpoint.config(), vb, |_, _| {})?;
            let alone = logits_in_batch(&model, text, 0, 1, &calls)?;
            for (b, place) in [(2, 1), (9, 4), (33, 0)] {
                let in_batch = logits_in_batch(&model, text, place, b, &calls)?;
                for (call, (own, expected)) in in_batch.iter().zip(&alone).enumerate() {
                    if bits(own) != bits(expected) {
                        different.push(format!("{checkpoint} in {dtype:?}, {b} sequences, call {call}"));
                    }
                }
            }
        }
    }
    assert!(different.is_empty(), "{different:#?}");
    Ok(())
}
