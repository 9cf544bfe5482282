//! PyTorch's seeded initialisation, drawn through the layers.

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{AdditiveAttention, AdditiveAttentionConfig, MultiHeadAttention, WeightLayout};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::common::{Golden, models, systems};
use crate::{CPU, assert_same_tensors};

/// SHA-256 of the elements in row-major order as little-endian f32.
fn sha256(tensor: &Tensor) -> Result<String> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes)?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The parameters of a system, in the order in which it draws them.
fn draw(config: &Value, vb: VarBuilder) -> Result<Vec<(String, Tensor)>> {
    let embedding = |table: &Value| {
        let size = |key: &str| table[key].as_u64().expect("a size") as usize;
        let cfg = EmbeddingConfig::new(size("vocab_size"), size("embed_dim"));
        EmbeddingLayer::new(&cfg, vb.clone()).map(|layer| ("embedding.weight".to_string(), layer.embeddings().clone()))
    };
    match config["layout"].as_str().expect("a layout") {
        "embedding" => embedding(&config["layer"]).map(|table| vec![table]),
        "additive" => {
            let cfg: AdditiveAttentionConfig = serde_json::from_value(config["layer"].clone()).expect("a config");
            AdditiveAttention::new(&cfg, vb.clone())?;
            let names = config["parameters"].as_object().expect("parameters").keys();
            names.map(|name| Ok((name.clone(), vb.get_unchecked(name)?))).collect()
        }
        layout => {
            let layout: WeightLayout = layout.parse()?;
            let cfg = serde_json::from_value(config["layer"].clone()).expect("a config");
            // Systems that start from ids draw their embedding first.
            let table = Some(&config["embedding"]).filter(|table| table.is_object()).map(embedding).transpose()?;
            let layer = MultiHeadAttention::load(&cfg, layout, vb.clone())?.state_dict(layout)?;
            Ok(table.into_iter().chain(layer).collect())
        }
    }
}

#[test]
fn every_seeded_system_is_drawn_to_the_bit() -> Result<()> {
    let mut drawn = Vec::new();
    for name in systems() {
        let config = Golden::open_config(&name);
        let (Some(_), Some(seed)) = (config.get("draw_order"), config["manual_seed"].as_u64()) else { continue };
        let got = draw(&config, TorchSeed::new(seed).var_builder(DType::F32, &CPU))?;
        for (parameter, facts) in config["parameters"].as_object().expect("parameters") {
            let (_, tensor) =
                got.iter().find(|(name, _)| name == parameter).unwrap_or_else(|| panic!("{name} has no {parameter}"));
            assert_eq!(serde_json::json!(tensor.dims()), facts["shape"], "{name}, {parameter}");
            assert_eq!(sha256(tensor)?, facts["sha256_f32_le"], "{name}, {parameter}");
        }
        let file = models().join(&name).join("model.safetensors");
        if file.exists() {
            assert_same_tensors(&got, &candle_core::safetensors::load(file, &CPU)?, &name);
        }
        drawn.push(name);
    }
    assert!(drawn.len() >= 23, "{drawn:?}");
    Ok(())
}
