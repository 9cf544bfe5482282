//! The names in PEFT's files: prefixes, the names of adapters, and the weights of a whole PEFT model.

use candle_attention::peft::Adapter;
use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, WeightLayout, hf, weights};
use candle_core::{DType, Result};
use candle_nn::VarBuilder;

use crate::common::{assert_near, error_text};
use crate::{Case, DEVICE, TOLERANCE};

/// Checks files with the prefix of the model and without, and with the name of the adapter in each name.
#[test]
fn lora_with_other_prefix_or_adapter_name_has_equal_output() -> Result<()> {
    let case = Case::named("plain");
    let file = candle_core::safetensors::load(case.folder.join("adapter_model.safetensors"), &DEVICE)?;
    let config = case.adapter()?.config().clone();
    let renames: [fn(&str) -> String; 4] = [
        |name| name.to_string(),
        |name| name.replace("base_model.model.", ""),
        |name| name.replace(".weight", ".default.weight"),
        // Trained on the model without its head.
        |name| name.replace("model.model.", "model."),
    ];
    for rename in renames {
        let renamed = file.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect();
        let adapter = Adapter::from_builder(config.clone(), VarBuilder::from_tensors(renamed, DType::F32, &DEVICE));
        case.assert_outputs(&adapter.load_attention(&case.model.config, 1, case.vb())?, 1, "out");
    }
    Ok(())
}

/// Loads the model's own weights and the adapter from the state dict of one PEFT model.
#[test]
fn peft_model_state_dict_has_base_layers_and_adapter() -> Result<()> {
    let case = Case::named("peft_model");
    let file = case.folder.join("state_dict.safetensors");
    // SAFETY: nothing writes to the file.
    let mapped = unsafe { VarBuilder::from_mmaped_safetensors(&[&file], DType::F32, &DEVICE)? };
    let adapter = case.adapter()?;
    for vb in [weights::open(&file, DType::F32, &DEVICE)?, mapped] {
        let base_vb = vb.pp("base_model.model");
        let base = hf::load_attention(&case.model.config, 0, base_vb.clone())?;
        case.assert_outputs(&base, 0, "base");
        let whole = Adapter::from_builder(adapter.config().clone(), vb.clone());
        case.assert_outputs(&whole.load_attention(&case.model.config, 0, base_vb.clone())?, 0, "out");

        let attention = base_vb.pp("model.layers.0.self_attn");
        let layout = WeightLayout::detect(&attention)?;
        assert_eq!(layout, WeightLayout::Canonical);
        case.assert_outputs(&MultiHeadAttention::load(base.config(), layout, attention)?, 0, "base");
        assert_eq!(
            error_text(hf::load_attention(&case.model.config, 0, vb.clone())).split_once("; ").expect("a hint").1,
            "its names begin with `base_model.model.`, expected the builder `vb.pp(\"base_model.model\")`"
        );
    }
    let checkpoint = Checkpoint::open(&file)?;
    let prefix = "base_model.model.model.layers.1.self_attn";
    assert_eq!(checkpoint.attention_layers(), [&prefix.replace('1', "0"), prefix]);
    assert_eq!(checkpoint.detect(prefix)?, WeightLayout::Canonical);
    assert_eq!(checkpoint.infer_config(prefix, WeightLayout::Canonical, Some(4))?.num_kv_heads(), 2);
    Ok(())
}

/// Checks a copy of a module that was trained (`modules_to_save`) in the state dict of a whole model.
#[test]
fn peft_model_with_saved_module_has_both_weights() -> Result<()> {
    let case = Case::named("modules_to_save");
    let adapter_file = candle_core::safetensors::load(case.folder.join("adapter_model.safetensors"), &DEVICE)?;
    let mut tensors = std::collections::HashMap::new();
    for (name, tensor) in &case.model.weights {
        let name = name.replace("o_proj.weight", "o_proj.original_module.weight");
        tensors.insert(format!("base_model.model.{name}"), tensor.clone());
    }
    for (name, tensor) in adapter_file {
        let name = name.replace("o_proj.weight", "o_proj.modules_to_save.default.weight");
        tensors.insert(name, tensor);
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &DEVICE);
    let adapter = Adapter::from_builder(case.adapter()?.config().clone(), vb.clone());
    let layer = adapter.load_attention(&case.model.config, 0, vb.pp("base_model.model"))?;
    case.assert_outputs(&layer, 0, "out");
    let xs = case.golden("layer0.in");
    assert_near(&layer.unload_adapter()?.forward(xs)?, &case.base(0)?.forward(xs)?, TOLERANCE, "without the adapter");
    Ok(())
}

#[test]
fn hf_layer_behind_wrapper_or_in_adapter_file_is_an_error_with_the_prefix() -> Result<()> {
    let case = Case::named("plain");
    for prefix in ["_orig_mod", "module", "module._orig_mod", "base_model.model"] {
        let wrapped = case.model.weights.iter().map(|(name, tensor)| (format!("{prefix}.{name}"), tensor.clone()));
        let vb = VarBuilder::from_tensors(wrapped.collect(), DType::F32, &DEVICE);
        assert_eq!(
            error_text(hf::load_attention(&case.model.config, 0, vb)).split_once("; ").expect("a hint").1,
            format!("its names begin with `{prefix}.`, expected the builder `vb.pp(\"{prefix}\")`")
        );
    }
    let adapter = weights::open(case.folder.join("adapter_model.safetensors"), DType::F32, &DEVICE)?;
    assert_eq!(
        error_text(hf::load_attention(&case.model.config, 0, adapter)).split_once("; ").expect("a hint").1,
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is that of an adapter of PEFT, expected the \
         checkpoint of the model that it was trained on, and `peft::Adapter` for the adapter"
    );
    Ok(())
}
