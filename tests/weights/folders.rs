//! The folders of models/: what is read from them is written as it stood, and found under its prefix.

use std::collections::{BTreeSet, HashMap};

use candle_attention::weights::{Checkpoint, Naming, Orientation, QkvOrder, Storage};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights};
use candle_core::{DType, Result, Tensor};

use crate::common::{error_text, models};
use crate::{CPU, assert_same_tensors, invented};

/// A folder with a layer in one of the layouts: name, config of the folder, config of the layer, layout.
pub type Folder = (String, serde_json::Value, MultiHeadAttentionConfig, WeightLayout);

pub fn folders() -> Vec<Folder> {
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(models()).expect("models/ can be listed") {
        let path = entry.expect("models/ can be listed").path();
        let Ok(text) = std::fs::read_to_string(path.join("config.json")) else { continue };
        let config: serde_json::Value = serde_json::from_str(&text).expect("the config is JSON");
        let Some(Ok(layout)) = config["layout"].as_str().map(str::parse) else { continue };
        let layer = serde_json::from_value(config["layer"].clone()).expect("`layer` is a config");
        let name = path.file_name().and_then(|name| name.to_str()).expect("a plain name").to_string();
        folders.push((name, config, layer, layout));
    }
    folders.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(folders.len() >= 29, "{} folders", folders.len());
    folders
}

/// The tensors of a folder's layer, without those of the embedding in front of it.
pub fn layer_tensors(name: &str) -> Result<Option<HashMap<String, Tensor>>> {
    let file = models().join(name).join("model.safetensors");
    if !file.is_file() {
        return Ok(None);
    }
    let tensors = candle_core::safetensors::load(file, &CPU)?;
    Ok(Some(tensors.into_iter().filter(|(name, _)| !name.starts_with("embedding.")).collect()))
}

/// Found from the file alone, or refused where two readings remain and no config.json is next to it; inferred, loaded,
/// and written as it stood.
#[test]
fn every_folder_is_detected_inferred_and_written_as_it_was_read() -> Result<()> {
    let mut compared = 0;
    for (name, config, cfg, layout) in folders() {
        let Some(expected) = layer_tensors(&name)? else { continue };
        let file = models().join(&name).join("model.safetensors");
        let (checkpoint, vb) = (Checkpoint::open(&file)?, weights::open(&file, DType::F32, &CPU)?);
        assert_eq!(checkpoint.attention_layers(), [""], "{name}");
        let found = WeightLayout::detect(&vb);
        if ["packed_by_head", "packed_by_group", "raw_square"].contains(&name.as_str()) {
            let text = error_text(found);
            assert!(text.contains(&format!("`{layout}`")) && text.contains(" or as `"), "{name}: {text}");
        } else {
            assert_eq!(found?, layout, "{name}");
        }
        assert_eq!(checkpoint.detect("")?, layout, "{name}");
        let inferred = checkpoint.infer_config("", layout, Some(cfg.num_heads()))?;
        let sizes = |cfg: &MultiHeadAttentionConfig| {
            let widths = [cfg.embed_dim(), cfg.key_size(), cfg.value_size(), cfg.out_dim()];
            let heads = [cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim()];
            (widths, heads, cfg.qkv_bias(), cfg.out_proj(), cfg.out_bias(), cfg.bias_kv())
        };
        assert_eq!(sizes(&inferred), sizes(&cfg), "{name}");
        if config["parameters"].get("mask").is_some() {
            assert_eq!((inferred.causal(), inferred.context_length()), (true, cfg.context_length()), "{name}");
        }
        let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
        assert_same_tensors(&layer.state_dict(layout)?, &expected, &name);
        compared += 1;
    }
    assert!(compared >= 28, "{compared} folders");
    Ok(())
}

/// Twelve layers of every kind in one file, one of each kind at a prefix of its own.
#[test]
fn attention_layers_are_found_in_their_natural_order() -> Result<()> {
    let mha = MultiHeadAttentionConfig::new(4, 2);
    let stack = mha.clone().with_out_proj(false);
    let kinds: [(&str, &str, WeightLayout); 22] = [
        ("model.layers", "self_attn", WeightLayout::Canonical),
        ("bert.encoder.layer", "attention", WeightLayout::Bert),
        ("distilbert.transformer.layer", "attention", WeightLayout::DistilBert),
        ("model.decoder.layers", "self_attn", WeightLayout::Opt),
        ("phi2", "self_attn", WeightLayout::Phi),
        ("encoder.block", "layer.0.SelfAttention", WeightLayout::T5),
        ("h", "attn", WeightLayout::Conv1d),
        ("blocks", "att", WeightLayout::StackedHeads(Naming::Book, Storage::Linear)),
        ("raw", "att", WeightLayout::StackedHeads(Naming::Short, Storage::Raw(Orientation::InOut))),
        ("transformer.encoder.layers", "self_attn", WeightLayout::Torch),
        ("plain", "attention", WeightLayout::Raw(Naming::D2l, Orientation::InOut)),
        ("gpt_neox.layers", "attention", "packed:query_key_value:by-head".parse()?),
        ("phi", "self_attn", "packed:qkv_proj".parse()?),
        ("vit.encoder.layer", "attention", WeightLayout::Vit),
        ("layers", "attention", WeightLayout::Meta),
        ("unet.blocks", "attn1", WeightLayout::Diffusers),
        ("attn_layers", "1", WeightLayout::XTransformers),
        ("module.blocks", "attn", WeightLayout::MinGpt),
        ("_orig_mod.blocks", "attn", "packed:qkv".parse()?),
        ("simple_vit", "0", "packed:to_qkv".parse()?),
        ("vit_pytorch", "0.fn", "packed:to_qkv-to_out.0".parse()?),
        ("modern.layers", "attn", "packed:Wqkv-Wo".parse()?),
    ];
    let mut tensors =
        HashMap::from([("model.embed_tokens.weight".to_string(), Tensor::zeros((7, 4), DType::F32, &CPU)?)]);
    let mut expected = Vec::new();
    for (outer, inner, layout) in kinds {
        let cfg = if matches!(layout, WeightLayout::StackedHeads(..)) { &stack } else { &mha };
        let layer = invented(cfg, layout)?.state_dict(layout)?;
        for i in 0..12 {
            let prefix = format!("{outer}.{i}.{inner}");
            tensors.extend(layer.iter().map(|(name, tensor)| (format!("{prefix}.{name}"), tensor.clone())));
            tensors.insert(format!("{outer}.{i}.mlp.up_proj.weight"), Tensor::zeros((4, 4), DType::F32, &CPU)?);
            expected.push((outer, i, prefix));
        }
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let found = checkpoint.attention_layers();

    assert_eq!(found.len(), expected.len());
    let in_found: BTreeSet<_> = found.iter().map(String::as_str).collect();
    assert_eq!(in_found, expected.iter().map(|(_, _, prefix)| prefix.as_str()).collect());
    for (outer, _, layout) in kinds {
        let of_kind: Vec<_> = found.iter().filter(|prefix| prefix.starts_with(&format!("{outer}."))).collect();
        let in_order: Vec<_> = expected.iter().filter(|(o, ..)| *o == outer).map(|(_, _, prefix)| prefix).collect();
        assert_eq!(of_kind, in_order);
        let last = checkpoint.detect(in_order[11]);
        match layout {
            WeightLayout::Raw(..) | WeightLayout::Packed(_, QkvOrder::ByHead) => {
                assert!(last.is_err(), "{layout} is ambiguous")
            }
            _ => assert_eq!(last?, layout),
        }
    }
    Ok(())
}
