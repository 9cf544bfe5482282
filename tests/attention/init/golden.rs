//! Every seeded system of `models/`, replayed draw by draw.

use std::collections::HashMap;

use candle_nn::Init;
use serde_json::Value;

use super::sha256;
use crate::*;

fn size(step: &Value, index: usize) -> usize {
    step[index].as_u64().unwrap_or_else(|| panic!("{step}: no size at {index}")) as usize
}

/// Builds the module of one entry of `draw_order`, as PyTorch's constructor draws it.
fn replay(step: &Value, vb: &VarBuilder, drawn: &mut HashMap<String, Tensor>) -> Result<()> {
    let name = step[1].as_str().unwrap_or_else(|| panic!("{step}: no name"));
    let mut keep = |name: String, tensor: &Tensor| drawn.insert(name, tensor.clone());
    match step[0].as_str() {
        Some("linear") => {
            let (inputs, outputs) = (size(step, 2), size(step, 3));
            let linear = if step[4] == true {
                candle_nn::linear(inputs, outputs, vb.pp(name))?
            } else {
                candle_nn::linear_no_bias(inputs, outputs, vb.pp(name))?
            };
            keep(format!("{name}.weight"), linear.weight());
            linear.bias().map(|bias| keep(format!("{name}.bias"), bias));
        }
        Some("embedding") => {
            let embedding = candle_nn::embedding(size(step, 2), size(step, 3), vb.pp(name))?;
            keep(format!("{name}.weight"), embedding.embeddings());
        }
        Some("rand") => {
            let hint = Init::Uniform { lo: 0.0, up: 1.0 };
            let shape = (size(step, 2), size(step, 3));
            keep(name.to_string(), &vb.get_with_hints(shape, name, hint)?);
        }
        Some("xavier") => {
            let (rows, cols) = (size(step, 2), size(step, 3));
            let up = 3f64.sqrt() * (2.0 / (rows + cols) as f64).sqrt();
            let hint = Init::Uniform { lo: -up, up };
            keep(name.to_string(), &vb.get_with_hints((rows, cols), name, hint)?);
        }
        // A parameter that exists already is set to 0 after its draw.
        Some("zeros") => {
            let zeros = Tensor::zeros(size(step, 2), DType::F32, &CPU)?;
            keep(name.to_string(), &zeros);
        }
        Some("causal_mask") => {
            let n = size(step, 2);
            let visible = Tensor::tril2(n, DType::F32, &CPU)?;
            keep(name.to_string(), &(1.0 - visible)?);
        }
        _ => panic!("unknown entry of draw_order: {step}"),
    }
    Ok(())
}

#[test]
fn every_seeded_system_has_pytorchs_parameters_bit_for_bit() -> Result<()> {
    let (mut seeded, mut compared) = (0, 0);
    for at in systems() {
        let config = Golden::open_config(&at);
        let Some(draw_order) = config["draw_order"].as_array() else { continue };
        let Some(seed) = config["manual_seed"].as_u64() else { panic!("{at}: a draw_order without a manual_seed") };
        let vb = TorchSeed::new(seed).var_builder(DType::F32, &CPU);
        let mut drawn = HashMap::new();
        for step in draw_order {
            replay(step, &vb, &mut drawn)?;
        }
        let found = |name: &str| drawn.get(name).unwrap_or_else(|| panic!("{at}: {name} is not in draw_order"));
        let before = compared;
        for (name, parameter) in config["parameters"].as_object().into_iter().flatten() {
            assert_eq!(serde_json::json!(found(name).dims()), parameter["shape"], "{at}: {name}");
            assert_eq!(sha256(found(name))?, parameter["sha256_f32_le"], "{at}: {name}");
            compared += 1;
        }
        let state_dict = models().join(&at).join("model.safetensors");
        if state_dict.exists() {
            for (name, expected) in candle_core::safetensors::load(state_dict, &CPU)? {
                assert_eq!(found(&name).dims(), expected.dims(), "{at}: {name}");
                assert_eq!(sha256(found(&name))?, sha256(&expected)?, "{at}: {name}");
                compared += 1;
            }
        }
        assert!(compared > before, "{at} has a draw_order and nothing to compare with");
        seeded += 1;
    }
    assert!(seeded >= 15, "{seeded} systems with a draw_order");
    println!("{seeded} systems, {compared} comparisons");
    Ok(())
}
