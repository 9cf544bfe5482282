//! Decoders, called as a program calls them: however the tokens of two texts come, the logits are transformers'.

use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;

use crate::common::{Decoded, assert_near, error_text};
use crate::decoder::CausalLm;
use crate::decoder::attention::{Cache, Input};
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
    assert!(error.contains("a layer of linear attention got the cache of softmax attention"), "{error}");
    Ok(())
}
