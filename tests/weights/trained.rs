//! Training follows PyTorch (`trained.py`).

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::{AttentionInput, Backend, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor, Var, safetensors};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD, VarBuilder};

use crate::common::{assert_close, recorded};
use crate::{DEVICE, wave};

const E: usize = 16;
const STEPS: usize = 20;

/// Returns a layer over variables that are initialised like PyTorch's.
fn seeded(cfg: &MultiHeadAttentionConfig) -> Result<(HashMap<String, Var>, MultiHeadAttention)> {
    let seed = TorchSeed::new(7);
    let start =
        MultiHeadAttention::new(cfg, seed.var_builder(DType::F32, &DEVICE))?.state_dict(WeightLayout::Canonical)?;
    let vars: HashMap<_, _> =
        start.into_iter().map(|(name, tensor)| Ok((name, Var::from_tensor(&tensor)?))).collect::<Result<_>>()?;
    let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    let layer = MultiHeadAttention::new(cfg, VarBuilder::from_tensors(tensors, DType::F32, &DEVICE))?;
    Ok((vars, layer))
}

fn follows_torch(name: &str, make: impl Fn(Vec<Var>) -> Result<Box<dyn FnMut(&Tensor) -> Result<()>>>) -> Result<()> {
    let expected = safetensors::load(recorded("weights/trained.safetensors"), &DEVICE)?;
    let xs = wave(0.61, (2, 9, E))?;
    let target = wave(0.37, (2, 9, E))?;
    for backend in [Backend::Auto, Backend::Reference] {
        let (vars, layer) = seeded(&MultiHeadAttentionConfig::new(E, 4).with_causal(true))?;
        let mut step = make(vars.values().cloned().collect())?;
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let ys = layer.forward_with(AttentionInput::new(&xs).with_backend(backend))?;
            let loss = (ys - &target)?.sqr()?.mean_all()?;
            losses.push(loss.to_scalar::<f32>()?);
            step(&loss)?;
        }
        assert!(losses[STEPS - 1] < 0.99 * losses[0], "{name}: {losses:?}");
        let what = format!("{name}, {backend:?}");
        assert_close(&Tensor::new(losses, &DEVICE)?, &expected[&format!("{name}.losses")], 1e-5, &what);
        for (parameter, var) in &vars {
            assert_close(var, &expected[&format!("{name}.{parameter}")], 1e-5, &format!("{what}: {parameter}"));
        }
    }
    Ok(())
}

#[test]
fn twenty_training_steps_match_pytorch() -> Result<()> {
    follows_torch("adamw", |vars| {
        let mut optimizer = AdamW::new(vars, ParamsAdamW { lr: 1e-2, weight_decay: 0.01, ..Default::default() })?;
        Ok(Box::new(move |loss| optimizer.backward_step(loss)))
    })?;
    follows_torch("sgd", |vars| {
        let mut optimizer = SGD::new(vars, 1.0)?;
        Ok(Box::new(move |loss| optimizer.backward_step(loss)))
    })
}
