//! Layers and adapters of different dtypes: training, gradients, saving, merging.

use std::collections::HashMap;

use candle_attention::peft::{Adapter, AdapterBias, AdapterConfig};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use proptest::prelude::*;
use serde_json::json;

use crate::common::property::for_all;
use crate::common::{assert_near, relative_error, skips_device, values};
use crate::{DEVICE, drawn, in_training, variable};

const MODULE: &str = "model.layers.3.self_attn";
const FLOATS: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];

/// An adapter of a layer with biases.
#[derive(Debug, Clone)]
struct Draw {
    layer: DType,
    adapter: DType,
    layout: WeightLayout,
    rank: usize,
    /// Whether all biases are trained, or only the biases of adapted modules.
    all_biases: bool,
    /// The number of modules, from the first on, that are saved instead of adapted.
    saved: usize,
    seed: u64,
}

impl Draw {
    fn any() -> impl Strategy<Value = Self> {
        let layouts = [WeightLayout::Canonical, WeightLayout::Conv1d, "packed:qkv_proj".parse().expect("a layout")];
        let options = (prop::sample::select(layouts.to_vec()), 1..4usize, any::<bool>(), 0..2usize, any::<u64>());
        options.prop_map(|(layout, rank, all_biases, saved, seed)| Self {
            layer: DType::F32,
            adapter: DType::F32,
            layout,
            rank,
            all_biases,
            saved,
            seed,
        })
    }

    fn config(&self) -> MultiHeadAttentionConfig {
        MultiHeadAttentionConfig::new(16, 4).with_bias(true).with_causal(true)
    }

    /// Returns the layer without the adapter, in a dtype.
    fn base(&self, dtype: DType) -> Result<MultiHeadAttention> {
        let vars = VarMap::new();
        MultiHeadAttention::load(&self.config(), self.layout, VarBuilder::from_varmap(&vars, DType::F64, &DEVICE))?;
        let mut tensors = HashMap::new();
        for (n, (name, var)) in sorted(&vars).into_iter().enumerate() {
            let values = drawn(self.seed.wrapping_add(n as u64), var.dims(), 0.3)?;
            // The same numbers in each dtype.
            tensors.insert(name, values.to_dtype(DType::BF16)?.to_dtype(dtype)?);
        }
        MultiHeadAttention::load(&self.config(), self.layout, VarBuilder::from_tensors(tensors, dtype, &DEVICE))
    }

    fn options(&self) -> Result<AdapterConfig> {
        let base = self.base(DType::F32)?;
        let names = module_names(&base, self.layout)?;
        let (saved, targets) = names.split_at(self.saved);
        let bias = if self.all_biases { AdapterBias::All } else { AdapterBias::LoraOnly };
        let mut json = AdapterConfig::new(self.rank, 4.0, targets)?.with_bias(bias)?.to_json();
        json["modules_to_save"] = json!(saved);
        AdapterConfig::from_json(&json)
    }

    /// Returns the variables of a new adapter with numbers that are the same in each dtype, and the layer with it.
    fn with_drawn_variables(&self) -> Result<(VarMap, MultiHeadAttention)> {
        let vars = VarMap::new();
        let adapter = Adapter::new(self.options()?, &vars, self.adapter, &DEVICE);
        let adapted = adapter.load_onto(&self.base(self.layer)?, self.layout, MODULE)?;
        for (n, (name, tensor)) in sorted(&vars).into_iter().enumerate() {
            let numbers = drawn(self.seed.wrapping_mul(3).wrapping_add(n as u64), tensor.dims(), 0.3)?;
            variable(&vars, &name).set(&numbers.to_dtype(DType::BF16)?.to_dtype(self.adapter)?)?;
        }
        Ok((vars, adapted))
    }

    fn tolerance(&self) -> f64 {
        match (self.layer, self.adapter) {
            (DType::BF16, _) | (_, DType::BF16) => 0.06,
            (DType::F16, _) | (_, DType::F16) => 0.01,
            _ => 1e-5,
        }
    }

    fn input(&self) -> Result<Tensor> {
        drawn(self.seed ^ 1, &[2, 5, 16], 1.0)?.to_dtype(DType::BF16)?.to_dtype(self.layer)
    }
}

fn sorted(vars: &VarMap) -> Vec<(String, Tensor)> {
    let all = vars.data().lock().expect("one thread");
    let mut named: Vec<_> = all.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    named.sort_by(|one, other| one.0.cmp(&other.0));
    named
}

fn sum_of_squares(layer: &MultiHeadAttention, xs: &Tensor) -> Result<Tensor> {
    layer.forward(xs)?.to_dtype(DType::F64)?.sqr()?.sum_all()
}

/// Returns the names of the linear layers of a layer.
fn module_names(layer: &MultiHeadAttention, layout: WeightLayout) -> Result<Vec<String>> {
    let named = layer.state_dict(layout)?;
    Ok(named.iter().filter_map(|(name, _)| name.strip_suffix(".weight")).map(str::to_string).collect())
}

/// Runs a check for each two dtypes of layer and adapter, with other options for each.
fn for_all_dtypes(check: impl Fn(Draw) -> Result<()>) {
    if skips_device("Metal has no f64") {
        return;
    }
    let count = FLOATS.len();
    for_all(1, prop::collection::vec(Draw::any(), count * count), |draws| {
        for (n, draw) in draws.into_iter().enumerate() {
            check(Draw { layer: FLOATS[n / count], adapter: FLOATS[n % count], ..draw })?;
        }
        Ok(())
    });
}

/// Checks that training changes the output of layer and adapter of any dtypes, and that saved, merged and unmerged
/// layers have that output.
#[test]
fn lora_of_any_dtypes_trains_and_is_saved_and_merged() {
    for_all_dtypes(|draw| {
        let base = draw.base(draw.layer)?;
        let vars = VarMap::new();
        let adapter = Adapter::new(draw.options()?, &vars, draw.adapter, &DEVICE);
        let layer = adapter.load_onto(&base, draw.layout, MODULE)?;
        let xs = draw.input()?;
        let target = (drawn(draw.seed ^ 2, &[2, 5, 16], 1.0)? * 0.5)?;
        let before = base.forward(&xs)?;
        assert_near(&layer.forward(&xs)?, &before, draw.tolerance(), "the layer at first");
        let loss = || -> Result<Tensor> {
            (layer.forward_with(in_training(&xs))?.to_dtype(DType::F64)? - &target)?.sqr()?.mean_all()
        };
        let first = loss()?.to_scalar::<f64>()?;
        let parameters = ParamsAdamW { lr: 0.02, weight_decay: 0.0, eps: 1e-3, ..Default::default() };
        let mut optimizer = AdamW::new(vars.all_vars(), parameters)?;
        for _ in 0..12 {
            optimizer.backward_step(&loss()?)?;
        }
        let last = loss()?.to_scalar::<f64>()?;
        assert!(last < 0.9 * first, "{draw:?}: {first} to {last}");
        let trained = layer.forward(&xs)?;
        assert!(relative_error(&trained, &before) > 0.05, "{draw:?}");
        assert_eq!(trained.dtype(), draw.layer);

        let merged = layer.merge_adapter()?;
        assert!(!merged.forward(&xs)?.track_op());
        let folder = tempfile::tempdir()?;
        adapter.save(folder.path())?;
        let opened = Adapter::open(folder.path(), draw.adapter, &DEVICE)?;
        let again = opened.load_onto(&base, draw.layout, MODULE)?;
        opened.check_all_used()?;
        for (other, what) in [
            (&again, "opened"),
            (&again.merge_adapter()?, "opened and merged"),
            (&merged, "merged"),
            (&merged.unmerge_adapter()?, "unmerged"),
            (&layer.freeze()?, "frozen"),
            (&layer.merge_and_unload()?, "merged and unloaded"),
        ] {
            assert_near(&other.forward(&xs)?, &trained, draw.tolerance(), &format!("{draw:?}, {what}"));
        }
        assert_near(&layer.unload_adapter()?.forward(&xs)?, &before, 0.0, "without the adapter");

        // Merged layers keep their values in further training.
        let kept = merged.forward(&xs)?;
        optimizer.backward_step(&loss()?)?;
        assert_near(&merged.forward(&xs)?, &kept, 0.0, "the merged layer after a step");
        Ok(())
    });
}

/// Checks gradients of variables in the dtype of the adapter: against finite differences in f64, and with a layer of
/// another dtype against the gradients in f64.
#[test]
fn lora_gradients_of_any_dtypes_match_finite_differences() {
    for_all_dtypes(|draw| {
        let xs = draw.input()?;
        let (vars, layer) = draw.with_drawn_variables()?;
        let gradients = sum_of_squares(&layer, &xs)?.backward()?;
        let exact_draw = Draw { layer: DType::F64, adapter: DType::F64, ..draw.clone() };
        let (exact_vars, exact_layer) = exact_draw.with_drawn_variables()?;
        let exact_xs = xs.to_dtype(DType::F64)?;
        let exact_gradients = sum_of_squares(&exact_layer, &exact_xs)?.backward()?;
        for (n, (name, tensor)) in sorted(&vars).into_iter().enumerate() {
            let exact = variable(&exact_vars, &name);
            let expected = exact_gradients.get(exact.as_tensor()).expect("a gradient");
            let found = gradients.get(&tensor).unwrap_or_else(|| panic!("{draw:?}: {name} has no gradient"));
            assert_eq!(found.dtype(), draw.adapter);
            let largest = values(expected).into_iter().fold(0.0, |most: f64, number| most.max(number.abs()));
            // The gradient of a key's bias is zero.
            if largest > 1e-9 {
                assert_near(found, expected, draw.tolerance(), &format!("{draw:?}, {name}"));
            }
            // One entry of each variable by finite differences.
            let entry = (draw.seed as usize).wrapping_add(n) % exact.elem_count();
            let at = |change: f64| -> Result<f64> {
                let mut moved = values(exact.as_tensor());
                moved[entry] += change;
                let kept = exact.as_detached_tensor().copy()?;
                exact.set(&Tensor::from_vec(moved, exact.dims(), &DEVICE)?)?;
                let value = sum_of_squares(&exact_layer, &exact_xs)?.to_scalar::<f64>()?;
                exact.set(&kept)?;
                Ok(value)
            };
            let difference = (at(1e-5)? - at(-1e-5)?) / 2e-5;
            let gradient = values(expected)[entry];
            assert!((difference - gradient).abs() < 1e-5 * (1.0 + largest), "{name}: {difference} and {gradient}");
        }
        Ok(())
    });
}

/// Checks a layer whose own weights are variables too, in one packed weight: both follow training.
#[test]
fn lora_with_biases_on_trained_weights_follows_both() -> Result<()> {
    if skips_device("Metal has no f64") {
        return Ok(());
    }
    let layout: WeightLayout = "packed:qkv_proj".parse()?;
    let cfg = MultiHeadAttentionConfig::new(16, 4).with_bias(true);
    let own_vars = VarMap::new();
    let base = MultiHeadAttention::load(&cfg, layout, VarBuilder::from_varmap(&own_vars, DType::F32, &DEVICE))?;
    let vars = VarMap::new();
    let config = AdapterConfig::new(2, 4.0, ["o_proj"])?.with_bias(AdapterBias::All)?;
    let layer = Adapter::new(config, &vars, DType::F64, &DEVICE).load_onto(&base, layout, MODULE)?;
    let xs = drawn(3, &[1, 4, 16], 1.0)?.to_dtype(DType::F32)?;
    for (of, name) in [
        (&own_vars, "qkv_proj.weight".to_string()),
        (&vars, format!("base_model.model.{MODULE}.qkv_proj.bias")),
        (&vars, format!("base_model.model.{MODULE}.o_proj.base_layer.bias")),
    ] {
        let before = layer.forward(&xs)?;
        let var = variable(of, &name);
        assert!(before.sqr()?.sum_all()?.backward()?.get(var.as_tensor()).is_some(), "{name} has no gradient");
        var.set(&(var.as_tensor() + drawn(4, var.dims(), 1.0)?.to_dtype(var.dtype())?)?)?;
        assert!(relative_error(&layer.forward(&xs)?, &before) > 0.01, "{name}");
    }
    Ok(())
}
