//! Checkpoints in several files, and below prefixes.

use std::collections::HashMap;
use std::path::Path;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result};

use crate::common::{assert_close, listed, models, recorded};
use crate::{DEVICE, invented};

/// Writes an index of the files of a folder, and checks that the folder has all of their tensors, in any order.
fn assert_joined(folder: &Path, index: &str) -> Result<Checkpoint> {
    let files = listed(folder);
    let mut weight_map = serde_json::Map::new();
    let mut expected = Vec::new();
    for file in &files {
        let shard = Checkpoint::open(file)?;
        let vb = weights::open(file, DType::F32, &DEVICE)?;
        for (name, shape) in shard.shapes() {
            weight_map.insert(name.into(), file.file_name().expect("a name").to_string_lossy().into());
            expected.push((name.to_string(), vb.get(shape, name)?));
        }
    }
    expected.sort_by(|(one, _), (other, _)| one.cmp(other));
    let index = folder.join(index);
    std::fs::write(&index, serde_json::json!({"metadata": {"total_size": 0}, "weight_map": weight_map}).to_string())?;
    let in_reverse = files.iter().rev().collect::<Vec<_>>();
    for checkpoint in [Checkpoint::from_files(&in_reverse)?, Checkpoint::open(&index)?, Checkpoint::open(folder)?] {
        let shapes: Vec<_> = expected.iter().map(|(name, tensor)| (name.as_str(), tensor.dims())).collect();
        assert_eq!(checkpoint.shapes().collect::<Vec<_>>(), shapes);
        for vb in [checkpoint.var_builder(DType::F32, &DEVICE)?, weights::open(folder, DType::F32, &DEVICE)?] {
            for (name, tensor) in &expected {
                assert_close(&vb.get(tensor.dims(), name)?, tensor, 0.0, name);
            }
        }
    }
    Checkpoint::open(folder)
}

/// Spreads the tensors of three layers over three files.
#[test]
fn sharded_safetensors_match_one_checkpoint() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let layout = WeightLayout::Canonical;
    let layer = invented(&MultiHeadAttentionConfig::new(8, 2).with_bias(true), layout)?;
    let mut shards = [(); 3].map(|()| HashMap::new());
    for (i, (name, tensor)) in layer.state_dict(layout)?.iter().enumerate() {
        for index in 0..3 {
            let name = format!("model.layers.{index}.self_attn.{name}");
            shards[(8 * index + i) % 3].insert(name, (tensor * (index + 1) as f64)?);
        }
    }
    let file = |i: usize| folder.path().join(format!("model-0000{i}-of-00003.safetensors"));
    shards.iter().zip(1..).try_for_each(|(shard, i)| candle_core::safetensors::save(shard, file(i)))?;
    let checkpoint = assert_joined(folder.path(), "model.safetensors.index.json")?;
    assert_eq!(checkpoint.attention_layers(), [0, 1, 2].map(|i| format!("model.layers.{i}.self_attn")));
    // A whole file next to an index is the checkpoint.
    std::fs::copy(file(1), folder.path().join("model.safetensors"))?;
    assert_eq!(Checkpoint::open(folder.path())?.shapes().count(), shards[0].len());
    Ok(())
}

#[test]
fn sharded_pth_files_match_one_checkpoint() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [one, other] = ["pytorch_model-00001-of-00002.bin", "b.bin"].map(|name| folder.path().join(name));
    std::fs::copy(models().join("book_mha/model.pth"), &one)?;
    std::fs::copy(recorded("data/nested.pth"), other)?;
    assert_joined(folder.path(), "pytorch_model.bin.index.json")?;
    // The path of an index selects it, also if other files are next to it.
    std::fs::rename(one, folder.path().join("model.safetensors"))?;
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map": {"W_query.weight": "model.safetensors"}}"#)?;
    assert_eq!(Checkpoint::open(&index)?.detect("")?, WeightLayout::Book);
    Ok(())
}
