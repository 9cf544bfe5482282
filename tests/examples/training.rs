//! Training of the examples' models: a decoder's losses equal those that `tests/causal_lm/training.py` computes with
//! transformers, and gradients reach every variable.

use candle_attention::variables_without_gradient;
use candle_core::{Device, Result, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, loss};

use crate::common::{Decoded, assert_close, max_error, recorded_tensors, variables};
use crate::decoder::CausalLm;
use crate::process::Checkpoint;
use crate::{encoder, images};

/// Trains whole blocks: norms, attention of every kind and MLPs, gated and plain, with the embedding and the head.
#[test]
fn training_steps_match_transformers_and_move_every_variable() -> Result<()> {
    let histories = recorded_tensors("causal_lm/training.safetensors")?;
    assert_eq!(histories.len(), 8);
    for (model, expected) in histories {
        let checkpoint = Checkpoint::of("causal_lm", &model);
        let (vars, vb) = variables(&checkpoint.path.join("model.safetensors"))?;
        let lm = CausalLm::load(&checkpoint.config(), vb, |_, _| {})?;

        let ids = Tensor::new(Decoded::of(&checkpoint.path)?.ids, &Device::Cpu)?;
        let (b, t) = ids.dims2()?;
        let positions: Vec<usize> = (0..b).flat_map(|_| 0..t).collect();
        let targets = ids.narrow(1, 1, t - 1)?.flatten_all()?;
        let params = ParamsAdamW { lr: 1e-2, weight_decay: 0.0, ..Default::default() };
        let mut optimizer = AdamW::new(vars.all_vars(), params)?;
        let mut losses = Vec::new();
        for _ in 0..expected.elem_count() {
            let xs = lm.embed(&ids, &positions, t)?;
            let hidden = lm.through_blocks(xs, |_, attention, input| attention.forward(input))?;
            let logits = lm.logits(&hidden)?.narrow(1, 0, t - 1)?.flatten_to(1)?;
            let loss = loss::cross_entropy(&logits, &targets)?;
            losses.push(loss.to_scalar::<f32>()?);
            let gradients = loss.backward()?;
            assert_eq!(variables_without_gradient(&gradients, &vars), [""; 0], "{model}");
            optimizer.step(&gradients)?;
        }
        assert_close(&Tensor::new(losses, &Device::Cpu)?, &expected, 1e-5, &model);
        let before = checkpoint.tensors("model.safetensors");
        for (name, var) in vars.data().lock().expect("one thread").iter() {
            assert!(max_error(var, &before[name]) > 0.0, "{model}: {name} has not moved");
        }
    }
    Ok(())
}

#[test]
fn training_of_encoders_gives_every_variable_a_gradient() -> Result<()> {
    // Parameters after the vectors, or for other tasks.
    let others = ["pooler", "mask_token", "text", "logit_scale"];
    for checkpoint in ["sentence_embedding", "image_embedding"].into_iter().flat_map(Checkpoint::all) {
        let (vars, vb) = variables(&checkpoint.path.join("model.safetensors"))?;
        let config = checkpoint.config();
        let vectors = if checkpoint.example == "sentence_embedding" {
            encoder::Encoder::load(&config, vb, |_, _| {})?.forward(&[&[5, 6, 7], &[8, 9]])?
        } else {
            let side = if config["model_type"] == "dinov2" { 40 } else { 24 };
            let pixels = Tensor::randn(0f32, 1., (3, side, side), &Device::Cpu)?;
            images::Encoder::load(&config, vb, |_, _| {})?.forward(&pixels, 0)?.embedding
        };
        let mut missing = variables_without_gradient(&vectors.sqr()?.sum_all()?.backward()?, &vars);
        missing.retain(|name| !others.iter().any(|part| name.contains(part)));
        assert_eq!(missing, [""; 0], "{checkpoint}");
    }
    Ok(())
}
