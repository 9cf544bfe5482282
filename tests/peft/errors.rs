//! Errors of adapters that cannot be loaded.

use std::collections::HashMap;
use std::sync::Arc;

use candle_attention::peft::{Adapter, AdapterConfig};
use candle_attention::{Projection, WeightLayout};
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::{Value, json};

use crate::common::error_text;
use crate::{Case, DEVICE};

const MODULE: &str = "model.layers.0.self_attn";

fn config_error(change: &Value) -> String {
    let mut json = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]});
    for (name, value) in change.as_object().expect("an object") {
        json[name] = value.clone();
    }
    error_text(AdapterConfig::from_json(&json))
}

#[test]
fn adapter_config_that_is_not_supported_is_an_error_that_names_the_option() {
    for (change, expected) in [
        (json!({"peft_type": "IA3"}), "[peft] peft_type is \"IA3\", expected \"LORA\""),
        (json!({"peft_type": null}), "[peft] peft_type is null, expected \"LORA\""),
        (json!({"use_dora": true}), "[peft] use_dora is true, which is not supported, expected LoRA without it"),
        (json!({"lora_bias": true}), "[peft] lora_bias is true, which is not supported, expected LoRA without it"),
        (
            json!({"trainable_token_indices": [3, 5]}),
            "[peft] trainable_token_indices is [3,5], which is not supported, expected LoRA without it",
        ),
        (
            json!({"init_lora_weights": "pissa"}),
            "[peft] init_lora_weights is \"pissa\", which changes the weights of the model too, expected an adapter of \
             unchanged weights (PEFT's `path_initial_model_for_weight_conversion` saves one)",
        ),
        (
            json!({"target_modules": null}),
            "[peft] target_modules is null, expected names of modules or a regular expression",
        ),
        (
            json!({"target_modules": []}),
            "[peft] target_modules is empty, expected names of modules or a regular expression",
        ),
        (json!({"r": 0}), "[peft] r is 0, expected at least 1"),
        (json!({"lora_dropout": 1.0}), "[peft] lora_dropout is 1, expected at least 0 and less than 1"),
        (
            json!({"bias": "some"}),
            "[peft] adapter_config: unknown variant `some`, expected one of `none`, `all`, `lora_only`",
        ),
    ] {
        assert_eq!(config_error(&change), expected);
    }
    assert!(config_error(&json!({"rank_pattern": {"(?=q)": 2}})).starts_with("[peft] the regular expression"));
}

#[test]
fn adapter_config_with_large_alpha_keeps_its_number() -> Result<()> {
    assert_eq!(AdapterConfig::new(1, 1e300, ["q_proj"])?.scaling("q_proj")?, 1e300);
    Ok(())
}

#[test]
fn adapter_that_does_not_fit_is_an_error_with_names_and_shapes() -> Result<()> {
    let case = Case::named("plain");
    let base = case.base(0)?;
    let mut tensors = candle_core::safetensors::load(case.folder.join("adapter_model.safetensors"), &DEVICE)?;
    let load = |config: AdapterConfig, file: &HashMap<String, Tensor>, module: &str| {
        let adapter = Adapter::from_builder(config, VarBuilder::from_tensors(file.clone(), DType::F32, &DEVICE));
        error_text(adapter.load_onto(&base, WeightLayout::Canonical, module))
    };
    let config = |r, targets: &[&str]| AdapterConfig::new(r, 8.0, targets.iter().copied());
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    assert_eq!(
        load(config(2, &["q_proj", "v_proj"])?, &tensors, MODULE),
        format!("[peft] {name} has shape [4, 16], expected [2, 16] (layout PEFT)")
    );
    assert_eq!(
        load(config(4, &["q_proj", "v_proj"])?, &tensors, "model.layers.5.self_attn"),
        format!("[peft] {} is missing, expected shape [4, 16] (layout PEFT)", name.replace(".0.", ".5."))
    );
    assert_eq!(
        load(config(4, &["v_proj"])?, &tensors, MODULE),
        format!("[peft] {name} is in the file, but target_modules does not name model.layers.0.self_attn.q_proj")
    );
    tensors.clear();
    assert_eq!(
        load(config(4, &["query"])?, &tensors, MODULE),
        "[peft] target_modules is [\"query\"], none of which is in \"model.layers.0.self_attn\" with q_proj, k_proj, \
         v_proj, o_proj (layout canonical)"
    );
    let adapter = Adapter::new(config(4, &["q_proj"])?, &VarMap::new(), DType::F32, &DEVICE);
    assert_eq!(
        error_text(adapter.load_onto(&base, "raw:canonical".parse()?, MODULE)),
        "[multi_head_attention] q_proj of the layout raw:canonical is no linear layer, which adapters change"
    );
    assert_eq!(
        error_text(adapter.save("unused")),
        "[peft] there are no variables of an adapter yet, expected a layer that the adapter was loaded onto"
    );
    assert_eq!(
        error_text(case.adapter()?.save("unused")),
        "[peft] the adapter was opened without variables and is unchanged, expected one over a `VarMap`"
    );
    Ok(())
}

/// Checks the calls that need the weights of an adapted layer.
#[test]
fn adapted_layer_asked_for_weights_returns_error_with_call() -> Result<()> {
    let case = Case::named("plain");
    let layer = case.adapted(0)?;
    let expected = "[multi_head_attention] the layer has an adapter, expected `merge_and_unload` for its weights with \
                    the adapter, or `unload_adapter` for those without it; `peft::Adapter::save` writes the adapter \
                    alone";
    for adapted in [&layer, &layer.freeze()?, &layer.merge_adapter()?] {
        assert_eq!(error_text(adapted.projections()), expected);
        assert_eq!(error_text(adapted.state_dict(WeightLayout::Canonical)), expected);
        assert_eq!(error_text(adapted.save("unused", WeightLayout::Canonical)), expected);
    }
    assert_eq!(error_text(case.base(0)?.merge_adapter()), "[multi_head_attention] there is no adapter to merge");
    let scaled = |own: candle_attention::ProjectionModule| -> Result<candle_attention::ProjectionModule> {
        Ok(Arc::new(move |xs: &Tensor| own.forward(xs)? * 2.0))
    };
    for adapted in [layer.merge_adapter()?, layer] {
        assert_eq!(
            error_text(adapted.map_projection(Projection::Query, scaled)),
            "[multi_head_attention] the layer has an adapter, expected modules around its projections before the \
             adapter is loaded"
        );
    }
    Ok(())
}
