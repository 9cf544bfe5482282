//! PyTorch's seeded initialisation, drawn through the layer.

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{AdditiveAttention, AdditiveAttentionConfig, MultiHeadAttention};
use candle_core::{DType, Result, Tensor};
use sha2::{Digest, Sha256};

use crate::common::models;
use crate::folders::{folders, layer_tensors};
use crate::{CPU, assert_same_tensors};

/// SHA-256 of the elements in row-major order as little-endian f32.
fn sha256(tensor: &Tensor) -> Result<String> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes)?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}

#[test]
fn every_seeded_folder_is_drawn_to_the_bit() -> Result<()> {
    let mut drawn = Vec::new();
    for (name, config, cfg, layout) in folders() {
        let Some(seed) = config["manual_seed"].as_u64() else { continue };
        let vb = TorchSeed::new(seed).var_builder(DType::F32, &CPU);
        // Systems that start from ids draw their embedding first.
        let mut got = Vec::new();
        if let Some(table) = config["embedding"].as_object() {
            let size = |key: &str| table[key].as_u64().expect("a size") as usize;
            let embedding =
                EmbeddingLayer::new(&EmbeddingConfig::new(size("vocab_size"), size("embed_dim")), vb.clone())?;
            got.push(("embedding.weight".to_string(), embedding.embeddings().clone()));
        }
        got.extend(MultiHeadAttention::load(&cfg, layout, vb)?.state_dict(layout)?);
        for (parameter, facts) in config["parameters"].as_object().expect("parameters") {
            let (_, tensor) =
                got.iter().find(|(name, _)| name == parameter).unwrap_or_else(|| panic!("{name} has no {parameter}"));
            assert_eq!(serde_json::json!(tensor.dims()), facts["shape"], "{name}, {parameter}");
            assert_eq!(sha256(tensor)?, facts["sha256_f32_le"], "{name}, {parameter}");
        }
        if let Some(expected) = layer_tensors(&name)? {
            let layer: Vec<_> = got.into_iter().filter(|(name, _)| name != "embedding.weight").collect();
            assert_same_tensors(&layer, &expected, &name);
        }
        drawn.push(name);
    }
    println!("{} folders: {}", drawn.len(), drawn.join(", "));
    assert!(
        drawn.iter().any(|name| name == "torch_mha") && drawn.iter().any(|name| name == "frontend_1536"),
        "{drawn:?}"
    );
    assert!(drawn.len() >= 15, "{drawn:?}");
    Ok(())
}

#[test]
fn additive_attention_is_drawn_to_the_bit() -> Result<()> {
    let text = std::fs::read_to_string(models().join("d2l_additive/config.json"))?;
    let config: serde_json::Value = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
    let Some(seed) = config["manual_seed"].as_u64() else { panic!("d2l_additive has a seed") };
    let cfg: AdditiveAttentionConfig =
        serde_json::from_value(config["layer"].clone()).map_err(candle_core::Error::wrap)?;
    let vb = TorchSeed::new(seed).var_builder(DType::F32, &CPU);
    AdditiveAttention::new(&cfg, vb.clone())?;
    let expected: HashMap<_, _> =
        candle_core::safetensors::load(models().join("d2l_additive/model.safetensors"), &CPU)?;
    let got = expected.keys().map(|name| Ok((name.clone(), vb.get_unchecked(name)?))).collect::<Result<Vec<_>>>()?;
    assert_same_tensors(&got, &expected, "d2l_additive");
    Ok(())
}
