//! Adapters over weights of codes (QLoRA), compared with the same adapters over the dequantised weights.

use std::collections::HashMap;

use candle_attention::peft::{Adapter, AdapterConfig};
use candle_attention::{MultiHeadAttention, WeightLayout, hf, variables_without_gradient, weights};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};

use crate::common::{assert_near, bits, recorded};
use crate::{DEVICE, TOLERANCE, in_training, variable};

const LAYER: &str = "model.layers.0.self_attn";
const PROJECTIONS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

/// Opens the weights of a small layer in 4 bits.
fn quantized_builder() -> Result<VarBuilder<'static>> {
    weights::open(recorded("weights/quantized/mlx_4_bits"), DType::F32, &DEVICE)
}

fn config() -> Result<serde_json::Value> {
    let text = std::fs::read(recorded("weights/quantized/mlx_4_bits/config.json"))?;
    let mut config: serde_json::Value = serde_json::from_slice(&text).expect("a config");
    config.as_object_mut().expect("an object").retain(|key, _| !key.starts_with("quantization"));
    Ok(config)
}

/// Returns a builder of the dequantised weights.
fn dequantized_builder() -> Result<VarBuilder<'static>> {
    let codes = quantized_builder()?;
    let mut tensors = HashMap::new();
    for projection in PROJECTIONS {
        let name = format!("{LAYER}.{projection}.weight");
        tensors.insert(name.clone(), codes.get_unchecked(&name)?);
    }
    Ok(VarBuilder::from_tensors(tensors, DType::F32, &DEVICE))
}

fn input() -> Result<Tensor> {
    let numbers = (0..2 * 5 * 64).map(|n| ((n * 37 % 101) as f32 - 50.0) / 50.0);
    Tensor::from_iter(numbers, &DEVICE)?.reshape((2, 5, 64))
}

/// A layer with a new adapter of all projections, whose matrices have the same numbers for any layer.
struct Adapted {
    layer: MultiHeadAttention,
    vars: VarMap,
    adapter: Adapter,
}

impl Adapted {
    fn new(base: &MultiHeadAttention) -> Result<Self> {
        let vars = VarMap::new();
        let adapter = Adapter::new(AdapterConfig::new(3, 6.0, PROJECTIONS)?, &vars, DType::F32, &DEVICE);
        let layer = adapter.load_onto(base, WeightLayout::Canonical, LAYER)?;
        for (n, name) in names(&vars).iter().enumerate() {
            let var = variable(&vars, name);
            let count = var.elem_count();
            let numbers = (0..count).map(|i| ((i * 7 + n * 13) % 31) as f32 / 62.0 - 0.25);
            var.set(&Tensor::from_iter(numbers, &DEVICE)?.reshape(var.dims())?)?;
        }
        Ok(Self { layer, vars, adapter })
    }
}

/// Returns the names of the variables in alphabetical order.
fn names(vars: &VarMap) -> Vec<String> {
    let mut names: Vec<_> = vars.data().lock().expect("one thread").keys().cloned().collect();
    names.sort();
    names
}

#[test]
fn lora_over_codes_has_gradients_of_dequantised_weights() -> Result<()> {
    let config = config()?;
    let quantized = hf::load_attention(&config, 0, quantized_builder()?)?;
    // Metal has no products of codes.
    assert!(DEVICE.is_metal() || format!("{quantized:?}").contains("codes of 4 bits"));
    let both = [quantized, hf::load_attention(&config, 0, dequantized_builder()?)?];
    let mut found = Vec::new();
    for base in &both {
        let Adapted { layer, vars, .. } = Adapted::new(base)?;
        let xs = Var::from_tensor(&input()?)?;
        let ys = layer.forward_with(in_training(&xs))?;
        let gradients = ys.sqr()?.sum_all()?.backward()?;
        assert!(variables_without_gradient(&gradients, &vars).is_empty());
        let mut own = vec![ys, gradients.get(&xs).expect("a gradient of the input").clone()];
        for name in names(&vars) {
            own.push(gradients.get(variable(&vars, &name).as_tensor()).expect("a gradient").clone());
        }
        found.push(own);
    }
    // The output, the input and the two matrices of each projection.
    assert_eq!(found[0].len(), 2 + 2 * PROJECTIONS.len());
    for (codes, numbers) in found[0].iter().zip(&found[1]) {
        assert_near(codes, numbers, 1e-6, "codes and numbers");
    }
    Ok(())
}

#[test]
fn lora_training_over_codes_lowers_loss_and_merges() -> Result<()> {
    let base = hf::load_attention(&config()?, 0, quantized_builder()?)?;
    let xs = input()?;
    let target = xs.roll(1, 1)?;
    let before = base.forward(&xs)?;
    let Adapted { layer, vars, adapter } = Adapted::new(&base)?;
    let loss = |one: &MultiHeadAttention| (one.forward_with(in_training(&xs))? - &target)?.sqr()?.mean_all();
    let first = loss(&layer)?.to_scalar::<f32>()?;
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.02, weight_decay: 0.0, ..Default::default() })?;
    for _ in 0..20 {
        optimizer.backward_step(&loss(&layer)?)?;
    }
    assert!(loss(&layer)?.to_scalar::<f32>()? < 0.9 * first);
    // The codes are as before.
    assert_eq!(bits(&layer.unload_adapter()?.forward(&xs)?), bits(&before));
    let trained = layer.forward(&xs)?;
    let merged = layer.merge_and_unload()?;
    assert!(!format!("{merged:?}").contains("codes of"));
    assert_near(&merged.forward(&xs)?, &trained, TOLERANCE, "merged");
    // A file of the adapter merges into weights that are read from the codes.
    let folder = tempfile::tempdir()?;
    adapter.save(folder.path().join("adapter"))?;
    let opened = Adapter::open(folder.path().join("adapter"), DType::F32, &DEVICE)?;
    let read = hf::load_attention(&config()?, 0, opened.merged_builder(quantized_builder()?))?;
    assert_near(&read.forward(&xs)?, &trained, TOLERANCE, "merged when read");
    let beside = opened.load_attention(&config()?, 0, quantized_builder()?)?;
    assert!(DEVICE.is_metal() || format!("{beside:?}").contains("codes of 4 bits"));
    assert_near(&beside.forward(&xs)?, &trained, TOLERANCE, "beside the codes");
    Ok(())
}
