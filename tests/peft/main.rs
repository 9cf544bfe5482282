//! LoRA adapters in PEFT's files, against PEFT: `make.py` makes the numbers.

#[path = "../common/mod.rs"]
mod common;

mod dtypes;
mod errors;
mod fit;
mod generation;
mod models;
mod names;
mod quantized;
mod several;
mod training;

use std::collections::HashMap;
use std::path::PathBuf;

use candle_attention::peft::{Adapter, AdapterConfig};
use candle_attention::{AttentionInput, MultiHeadAttention, hf};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use common::{DEVICE, Model, assert_near, bits, listed, recorded};

/// The largest error, as a part of the largest number.
const TOLERANCE: f64 = 1e-5;

/// A model with an adapter.
struct Case {
    folder: PathBuf,
    model: Model,
}

impl Case {
    fn named(name: &str) -> Self {
        Self::open(recorded("peft/cases").join(name))
    }

    fn all() -> Vec<Self> {
        listed(recorded("peft/cases")).into_iter().map(Self::open).collect()
    }

    fn open(folder: PathBuf) -> Self {
        Self { model: Model::open(&folder), folder }
    }

    fn layers(&self) -> usize {
        (0..).take_while(|i| self.model.golden.contains_key(&format!("layer{i}.in"))).count()
    }

    /// Returns a builder of the model's weights, without the adapter.
    fn vb(&self) -> VarBuilder<'static> {
        VarBuilder::from_tensors(self.model.weights.clone(), DType::F32, &DEVICE)
    }

    fn adapter(&self) -> Result<Adapter> {
        Adapter::open(&self.folder, DType::F32, &DEVICE)
    }

    fn base(&self, layer: usize) -> Result<MultiHeadAttention> {
        hf::load_attention(&self.model.config, layer, self.vb())
    }

    fn adapted(&self, layer: usize) -> Result<MultiHeadAttention> {
        self.adapter()?.load_attention(&self.model.config, layer, self.vb())
    }

    fn golden(&self, name: &str) -> &Tensor {
        &self.model.golden[name]
    }

    /// Checks the outputs of a layer against recorded numbers.
    #[track_caller]
    fn assert_outputs(&self, layer: &MultiHeadAttention, i: usize, which: &str) {
        let ys = layer.forward(self.golden(&format!("layer{i}.in"))).expect("an output");
        assert_near(
            &ys,
            self.golden(&format!("layer{i}.{which}")),
            TOLERANCE,
            &format!("{}, {which}", self.model.name),
        );
    }
}

#[test]
fn lora_of_every_case_matches_peft_merged_and_unmerged() -> Result<()> {
    let mut adapted_layers = 0;
    for case in Case::all() {
        for i in 0..case.layers() {
            let layer = case.adapted(i)?;
            case.assert_outputs(&layer, i, "out");
            case.assert_outputs(&layer.freeze()?, i, "out");
            if case.model.golden.contains_key(&format!("layer{i}.base")) {
                case.assert_outputs(&layer.unload_adapter()?, i, "base");
            }
            if !layer.has_adapter() {
                assert_eq!((case.model.name.as_str(), i), ("one_layer", 0));
                continue;
            }
            adapted_layers += 1;
            let merged = layer.merge_adapter()?;
            case.assert_outputs(&merged, i, "merged");
            case.assert_outputs(&layer.merge_and_unload()?, i, "merged");
            assert!(merged.has_adapter() && !layer.merge_and_unload()?.has_adapter());
        }
    }
    assert!(adapted_layers > 15, "{adapted_layers}");
    Ok(())
}

#[test]
fn lora_unmerged_has_the_bits_of_before() -> Result<()> {
    for case in Case::all() {
        let i = case.layers() - 1;
        let xs = case.golden(&format!("layer{i}.in"));
        let layer = case.adapted(i)?;
        let merged = layer.merge_adapter()?;
        assert_eq!(bits(&merged.unmerge_adapter()?.forward(xs)?), bits(&layer.forward(xs)?), "{}", case.model.name);
        assert_eq!(bits(&merged.unload_adapter()?.forward(xs)?), bits(&case.base(i)?.forward(xs)?));
        assert_eq!(bits(&merged.merge_adapter()?.forward(xs)?), bits(&merged.forward(xs)?));
    }
    Ok(())
}

#[test]
fn lora_merged_weights_are_saved_in_any_layout() -> Result<()> {
    use candle_attention::WeightLayout;
    let case = Case::named("fused_by_part");
    let xs = case.golden("layer0.in");
    let merged = case.adapted(0)?.merge_and_unload()?;
    let tensors = merged.state_dict(WeightLayout::Canonical)?.into_iter().collect();
    let loaded = MultiHeadAttention::new(merged.config(), VarBuilder::from_tensors(tensors, DType::F32, &DEVICE))?;
    assert_near(&loaded.forward(xs)?, case.golden("layer0.merged"), TOLERANCE, "saved and loaded");
    Ok(())
}

/// Checks a builder of merged weights, which reads any layer.
#[test]
fn lora_merged_builder_matches_peft() -> Result<()> {
    for case in Case::all() {
        let vb = case.adapter()?.merged_builder(case.vb());
        for i in 0..case.layers() {
            case.assert_outputs(&hf::load_attention(&case.model.config, i, vb.clone())?, i, "merged");
        }
    }
    Ok(())
}

/// Checks a layer of another kind: linear attention, with an adapter on its output projection.
#[test]
fn lora_merged_builder_of_linear_attention_matches_merged_weights() -> Result<()> {
    let model = Model::open(&recorded("hf/linear_models/qwen3_next"));
    let module = "layers.0.linear_attn.out_proj";
    let weight = &model.weights[&format!("{module}.weight")];
    let (outputs, inputs) = weight.dims2()?;
    let a = Tensor::randn(0f32, 0.3, (2, inputs), &DEVICE)?;
    let b = Tensor::randn(0f32, 0.3, (outputs, 2), &DEVICE)?;
    let name = |matrix: &str| format!("base_model.model.{module}.{matrix}.weight");
    let matrices = [(name("lora_A"), a.clone()), (name("lora_B"), b.clone())];
    let builder = |tensors| VarBuilder::from_tensors(tensors, DType::F32, &DEVICE);
    let adapter = Adapter::from_builder(AdapterConfig::new(2, 3.0, ["out_proj"])?, builder(matrices.into()));
    let mut merged = model.weights.clone();
    merged.insert(format!("{module}.weight"), (weight + (b.matmul(&a)? * 1.5)?)?);
    let xs = &model.golden["in"];
    let expected = hf::load_linear_attention(&model.config, 0, builder(merged))?.forward(xs)?;
    let plain = hf::load_linear_attention(&model.config, 0, builder(model.weights.clone()))?.forward(xs)?;
    let vb = adapter.merged_builder(builder(model.weights.clone()));
    let found = hf::load_linear_attention(&model.config, 0, vb)?.forward(xs)?;
    assert_near(&found, &expected, TOLERANCE, "linear attention");
    assert!(common::relative_error(&plain, &expected) > 0.01);
    Ok(())
}

#[test]
fn lora_in_float_over_half_precision_layer_is_near_peft() -> Result<()> {
    let case = Case::named("rslora");
    let halves = case.model.weights.iter().map(|(name, tensor)| Ok((name.clone(), tensor.to_dtype(DType::BF16)?)));
    let vb = VarBuilder::from_tensors(halves.collect::<Result<_>>()?, DType::BF16, &DEVICE);
    let layer = case.adapter()?.load_attention(&case.model.config, 0, vb)?;
    let xs = case.golden("layer0.in").to_dtype(DType::BF16)?;
    for either in [&layer, &layer.merge_adapter()?] {
        let ys = either.forward(&xs)?;
        assert_eq!(ys.dtype(), DType::BF16);
        assert_near(&ys, case.golden("layer0.out"), 0.03, "bf16");
    }
    Ok(())
}

/// Checks two adapters of one layer, whose updates are added up.
#[test]
fn lora_loaded_twice_adds_both_updates() -> Result<()> {
    let case = Case::named("dropout");
    let xs = case.golden("layer0.in");
    let (layout, module) = (candle_attention::WeightLayout::Canonical, "model.layers.0.self_attn");
    let once = case.adapted(0)?;
    let twice = case.adapter()?.load_onto(&once.merge_adapter()?, layout, module)?;
    // The update of the output projection is linear.
    let base = case.base(0)?.forward(xs)?;
    let expected = ((once.forward(xs)? * 2.0)? - base)?;
    assert_near(&twice.forward(xs)?, &expected, TOLERANCE, "two adapters");
    assert_near(&twice.merge_adapter()?.forward(xs)?, &expected, TOLERANCE, "two merged adapters");
    Ok(())
}

/// Returns the variables of an adapter, and the layer with it.
fn trainable(case: &Case, layer: usize) -> Result<(VarMap, MultiHeadAttention)> {
    let vars = VarMap::new();
    let adapter = Adapter::open_trainable(&case.folder, &vars, DType::F32, &DEVICE)?;
    let layer = adapter.load_attention(&case.model.config, layer, case.vb())?;
    Ok((vars, layer))
}

/// Returns a variable.
fn variable(vars: &VarMap, name: &str) -> Var {
    vars.data().lock().expect("one thread")[name].clone()
}

/// Returns an input of a call in training.
fn in_training(xs: &Tensor) -> AttentionInput<'_> {
    AttentionInput::new(xs).with_train(true)
}

/// Returns numbers between -scale and scale in f64, which depend on the seed alone; in f32 on Metal, which has no f64.
fn drawn(seed: u64, dims: &[usize], scale: f64) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let numbers = (0..dims.iter().product()).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
    });
    let numbers = Tensor::from_vec(numbers.collect::<Vec<f64>>(), dims, &Device::Cpu)?;
    if DEVICE.is_metal() { numbers.to_dtype(DType::F32)?.to_device(&DEVICE) } else { numbers.to_device(&DEVICE) }
}

/// Returns a folder with the files of an adapter.
fn in_folder(config: &serde_json::Value, tensors: &HashMap<String, Tensor>) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string())?;
    candle_core::safetensors::save(tensors, folder.path().join("adapter_model.safetensors"))?;
    Ok(folder)
}
