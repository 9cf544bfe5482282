//! Adapters that are trained and saved.

use candle_attention::peft::{Adapter, AdapterBias, AdapterConfig};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, variables_without_gradient};
use candle_core::{DType, Result, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};

use crate::common::{assert_near, bits, recorded, values};
use crate::{Case, DEVICE, TOLERANCE, in_training, trainable, variable};

/// Compares the gradients of a loss with PEFT's, by name: low-rank matrices, biases, saved modules.
#[test]
fn lora_gradients_match_peft() -> Result<()> {
    for case in Case::all() {
        let i = case.layers() - 1;
        let (vars, layer) = trainable(&case, i)?;
        let loss = layer.forward(case.golden(&format!("layer{i}.in")))?.sqr()?.sum_all()?;
        let gradients = loss.backward()?;
        let mut compared = 0;
        for (name, expected) in &case.model.golden {
            let Some(name) = name.strip_prefix("grad.") else { continue };
            let gradient = gradients.get(variable(&vars, name).as_tensor()).expect("a gradient");
            if values(expected).iter().any(|number| number.abs() > 1e-4) {
                assert_near(gradient, expected, 3e-5, &format!("{}, {name}", case.model.name));
            }
            compared += 1;
        }
        assert!(compared > 1, "{}", case.model.name);
    }
    Ok(())
}

/// Checks that no variable but the adapter's is made, and that training changes the output and not the base.
#[test]
fn lora_training_lowers_loss_and_leaves_base_weights() -> Result<()> {
    let case = Case::named("plain");
    let xs = case.golden("layer0.in");
    let base = case.base(0)?;
    let before = base.forward(xs)?;
    let target = xs.roll(1, 1)?;
    let vars = VarMap::new();
    let config = AdapterConfig::new(4, 8.0, ["q_proj", "k_proj", "v_proj", "o_proj"])?;
    let adapter = Adapter::new(config, &vars, DType::F32, &DEVICE);
    let layer = adapter.load_onto(&base, WeightLayout::Canonical, "model.layers.0.self_attn")?;
    assert_eq!(vars.all_vars().len(), 8);
    assert_near(&layer.forward(xs)?, &before, 1e-6, "B is zero at first");
    let loss = |one: &MultiHeadAttention| (one.forward_with(in_training(xs))? - &target)?.sqr()?.mean_all();
    let first = loss(&layer)?.to_scalar::<f32>()?;
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.02, weight_decay: 0.0, ..Default::default() })?;
    for _ in 0..20 {
        let gradients = loss(&layer)?.backward()?;
        assert!(variables_without_gradient(&gradients, &vars).is_empty());
        optimizer.step(&gradients)?;
    }
    assert!(loss(&layer)?.to_scalar::<f32>()? < 0.9 * first);
    assert_eq!(bits(&layer.unload_adapter()?.forward(xs)?), bits(&before));
    let merged = layer.merge_adapter()?;
    assert!(layer.forward(xs)?.track_op() && !merged.forward(xs)?.track_op());
    assert!(!layer.freeze()?.forward(xs)?.track_op());
    assert_near(&merged.forward(xs)?, &layer.forward(xs)?, TOLERANCE, "merged");
    Ok(())
}

/// Checks a layer of one token whose attention output is its input, with a zero output projection. An adapter of
/// identities on the output projection returns the input after dropout.
#[test]
fn lora_dropout_happens_in_training_alone() -> Result<()> {
    let width = 64;
    let identity = Tensor::eye(width, DType::F32, &DEVICE)?;
    let zeros = identity.zeros_like()?;
    let named = |name: &str, weight: &Tensor| (format!("{name}.weight"), weight.clone());
    let weights =
        [named("q_proj", &zeros), named("k_proj", &zeros), named("v_proj", &identity), named("o_proj", &zeros)];
    let vb = VarBuilder::from_tensors(weights.into(), DType::F32, &DEVICE);
    let base = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(width, 4), vb)?;
    let config = AdapterConfig::new(width, width as f64, ["o_proj"])?.with_dropout(0.25)?;
    let prefix = "base_model.model.attn.o_proj";
    let matrices = [named(&format!("{prefix}.lora_A"), &identity), named(&format!("{prefix}.lora_B"), &identity)];
    let adapter = Adapter::from_builder(config, VarBuilder::from_tensors(matrices.into(), DType::F32, &DEVICE));
    let layer = adapter.load_onto(&base, WeightLayout::Canonical, "attn")?;
    let xs = Tensor::ones((50, 1, width), DType::F32, &DEVICE)?;
    assert!(values(&layer.forward(&xs)?).iter().all(|&y| y == 1.0));
    let ys = values(&layer.forward_with(in_training(&xs))?);
    assert!(ys.iter().all(|&y| y == 0.0 || (y - 4.0 / 3.0).abs() < 1e-6));
    // The standard deviation of the share is 0.0077.
    let share = ys.iter().filter(|&&y| y == 0.0).count() as f64 / ys.len() as f64;
    assert!((share - 0.25).abs() < 0.06, "{share}");
    Ok(())
}

/// Checks that trained biases and saved modules begin with the values of the layer.
#[test]
fn lora_with_new_biases_and_modules_begins_as_the_layer() -> Result<()> {
    let case = Case::named("bias_all");
    let xs = case.golden("layer0.in");
    let mut json = AdapterConfig::new(2, 4.0, ["q_proj"])?.with_bias(AdapterBias::All)?.to_json();
    json["modules_to_save"] = serde_json::json!(["v_proj"]);
    let vars = VarMap::new();
    let adapter = Adapter::new(AdapterConfig::from_json(&json)?, &vars, DType::F32, &DEVICE);
    let base = case.base(0)?;
    let layer = adapter.load_onto(&base, WeightLayout::Canonical, "model.layers.0.self_attn")?;
    assert_near(&layer.forward(xs)?, &base.forward(xs)?, 1e-6, "as the layer");
    let mut names: Vec<_> = vars.data().lock().expect("one thread").keys().cloned().collect();
    names.sort();
    let of_layer = |name: &str| format!("base_model.model.model.layers.0.self_attn.{name}");
    let expected = [
        "k_proj.bias",
        "o_proj.bias",
        "q_proj.base_layer.bias",
        "q_proj.lora_A.weight",
        "q_proj.lora_B.weight",
        "v_proj.bias",
        "v_proj.weight",
    ];
    assert_eq!(names, expected.map(of_layer));
    let gradients = layer.forward_with(in_training(xs))?.sqr()?.sum_all()?.backward()?;
    // A gets no gradient but zeros while B is zero; zeros are a gradient.
    assert!(variables_without_gradient(&gradients, &vars).is_empty());
    Ok(())
}

/// Fills a tensor with numbers that are equal on every machine.
fn numbered(dims: &[usize], start: usize) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    let numbers = (0..count).map(|i| ((i * 7 + start * 13) % 31) as f32 / 32.0 - 0.5);
    Tensor::from_iter(numbers, &DEVICE)?.reshape(dims)
}

/// Compares with the bytes of `saved/`, which `make.py` loads with PEFT, and with the outputs that PEFT computed.
#[test]
fn lora_saved_adapter_has_the_bytes_that_peft_read() -> Result<()> {
    let case = Case::named("plain");
    let kept = recorded("peft/saved");
    let vars = VarMap::new();
    let config =
        AdapterConfig::new(3, 6.0, ["q_proj", "v_proj", "o_proj"])?.with_rslora(true)?.with_base_model("plain")?;
    let adapter = Adapter::new(config, &vars, DType::F32, &DEVICE);
    let mut layers = Vec::new();
    for i in 0..case.layers() {
        layers.push(adapter.load_attention(&case.model.config, i, case.vb())?);
    }
    let mut names: Vec<_> = vars.data().lock().expect("one thread").keys().cloned().collect();
    names.sort();
    for (n, name) in names.iter().enumerate() {
        let var = variable(&vars, name);
        var.set(&numbered(var.dims(), n)?)?;
    }
    let folder = tempfile::tempdir()?;
    let written = if std::env::var_os("UPDATE_EXPECT").is_some() { kept.clone() } else { folder.path().join("new") };
    adapter.save(&written)?;
    for file in ["adapter_model.safetensors", "adapter_config.json"] {
        assert_eq!(std::fs::read(written.join(file))?, std::fs::read(kept.join(file))?, "{file}");
    }
    let golden = candle_core::safetensors::load(kept.join("golden.safetensors"), &DEVICE)?;
    let opened = Adapter::open(&written, DType::F32, &DEVICE)?;
    for (i, layer) in layers.iter().enumerate() {
        let xs = &golden[&format!("layer{i}.in")];
        let expected = &golden[&format!("layer{i}.out")];
        assert_near(&layer.forward(xs)?, expected, TOLERANCE, "the layer that was saved");
        let again = opened.load_attention(&case.model.config, i, case.vb())?;
        assert_near(&again.forward(xs)?, expected, TOLERANCE, "the layer that was opened");
    }
    Ok(())
}

/// Checks that an adapter that was opened and saved has the tensors of its file, under the same names.
#[test]
fn lora_opened_and_saved_has_equal_tensors() -> Result<()> {
    for case in Case::all() {
        let vars = VarMap::new();
        let adapter = Adapter::open_trainable(&case.folder, &vars, DType::F32, &DEVICE)?;
        for i in 0..case.layers() {
            adapter.load_attention(&case.model.config, i, case.vb())?;
        }
        let folder = tempfile::tempdir()?;
        adapter.save(folder.path())?;
        let load =
            |path: &std::path::Path| candle_core::safetensors::load(path.join("adapter_model.safetensors"), &DEVICE);
        let (saved, original) = (load(folder.path())?, load(&case.folder)?);
        let mut names: Vec<_> = saved.keys().collect();
        let mut expected: Vec<_> = original.keys().collect();
        names.sort();
        expected.sort();
        assert_eq!(names, expected, "{}", case.model.name);
        assert!(original.iter().all(|(name, tensor)| bits(tensor) == bits(&saved[name])));
        let config = |path: &std::path::Path| -> serde_json::Value {
            crate::common::read_json(path.join("adapter_config.json"))
        };
        assert_eq!(config(folder.path()), config(&case.folder));
    }
    Ok(())
}
