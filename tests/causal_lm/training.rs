//! The example's models train as transformers' do: `training.safetensors`, by `training.py`.

use candle_attention::untrained;
use candle_core::{Device, Result, Tensor, safetensors};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, loss};

use crate::common::{assert_close, max_error, variables};
use crate::model::CausalLm;
use crate::{Golden, checkpoint, process};

/// Whole blocks: norms, attention of every kind and MLPs, gated and plain, with the embedding and the head.
#[test]
fn steps_are_those_of_transformers_and_every_variable_moves() -> Result<()> {
    let expected = safetensors::load(process::models("causal_lm").join("../training.safetensors"), &Device::Cpu)?;
    assert_eq!(expected.len(), 8);
    for (model, expected) in expected {
        let checkpoint = checkpoint(&model);
        let (vars, vb) = variables(&checkpoint.file("model.safetensors"))?;
        let lm = CausalLm::load(&checkpoint.json("config.json"), vb, |_, _| {})?;

        let ids = Tensor::new(Golden::of(&model)?.ids, &Device::Cpu)?;
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
            assert_eq!(untrained(&gradients, &vars), [""; 0], "{model}");
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
