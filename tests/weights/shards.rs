//! Checkpoints in several files, and below prefixes.

use std::collections::HashMap;
use std::path::Path;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};

use crate::{CPU, bits, invented};

fn cfg() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 2).with_bias(true)
}

/// A checkpoint of three layers whose tensors are dealt out to three files in turn, with an index.
fn write(folder: &Path) -> Result<Vec<(String, Tensor)>> {
    let layer = invented(&cfg(), WeightLayout::Canonical)?.state_dict(WeightLayout::Canonical)?;
    let named = |i: usize| {
        layer
            .iter()
            .map(move |(name, tensor)| (format!("model.layers.{i}.self_attn.{name}"), (tensor * (i + 1) as f64)))
    };
    let tensors = (0..3).flat_map(named).map(|(name, tensor)| Ok((name, tensor?))).collect::<Result<Vec<_>>>()?;
    let mut weight_map = serde_json::Map::new();
    for shard in 0..3 {
        let file = format!("model-0000{}-of-00003.safetensors", shard + 1);
        let of_shard: HashMap<_, _> = tensors.iter().skip(shard).step_by(3).cloned().collect();
        weight_map.extend(of_shard.keys().map(|name| (name.clone(), file.clone().into())));
        candle_core::safetensors::save(&of_shard, folder.join(file))?;
    }
    let index = serde_json::json!({ "metadata": { "total_size": 0 }, "weight_map": weight_map });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
    Ok(tensors)
}

#[test]
fn shards_are_one_checkpoint_whatever_their_order() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let tensors = write(folder.path())?;
    let checkpoint = Checkpoint::open(folder.path())?;
    let mut names: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.dims())).collect();
    names.sort();
    assert_eq!(checkpoint.shapes().collect::<Vec<_>>(), names);
    let prefixes = ["model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.2.self_attn"];
    assert_eq!(checkpoint.attention_layers(), prefixes);

    let whole = weights::open(folder.path(), DType::F32, &CPU)?;
    for prefix in prefixes {
        let (vb, layout) = (whole.pp(prefix), checkpoint.detect(prefix)?);
        assert_eq!(WeightLayout::detect(&vb)?, layout);
        let read = MultiHeadAttention::load(&checkpoint.infer_config(prefix, layout, Some(2))?, layout, vb)?;
        let of_layer = tensors
            .iter()
            .filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?[1..].to_string(), tensor.clone())));
        let expected = crate::load(&cfg(), layout, &of_layer.collect::<Vec<_>>())?;
        assert_eq!(bits(&read)?, bits(&expected)?, "{prefix}");
    }

    let file = |i: usize| folder.path().join(format!("model-0000{i}-of-00003.safetensors"));
    assert_eq!(Checkpoint::from_files(&[file(3), file(1), file(2)])?.shapes().collect::<Vec<_>>(), names);
    // A whole file beside an index is the checkpoint.
    std::fs::copy(file(1), folder.path().join("model.safetensors"))?;
    assert!(Checkpoint::open(folder.path())?.shapes().count() < names.len());
    Ok(())
}
