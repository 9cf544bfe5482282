//! The folders of models/: what is read from them is written as it stood, and found under its prefix.

use std::collections::HashMap;

use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights};
use candle_core::{DType, Result, Tensor};

use crate::common::{Golden, error_text, models, systems};
use crate::{DEVICE, assert_same_tensors, invented};

/// A folder with a layer in one of the layouts: name, config of the folder, config of the layer, layout.
type Folder = (String, serde_json::Value, MultiHeadAttentionConfig, WeightLayout);

fn folders() -> Vec<Folder> {
    let of = |name: String| {
        let config = Golden::open_config(&name);
        let layout = config["layout"].as_str()?.parse().ok()?;
        let layer = serde_json::from_value(config["layer"].clone()).expect("`layer` is a config");
        Some((name, config, layer, layout))
    };
    let folders: Vec<_> = systems().into_iter().filter_map(of).collect();
    assert!(folders.len() >= 29, "{} folders", folders.len());
    folders
}

/// Checks that the layout is detected from the file alone, or refused if two readings remain and no config.json is next
/// to it; and that configs are inferred, layers loaded, and files saved as they were.
#[test]
fn model_folders_are_detected_inferred_and_saved_unchanged() -> Result<()> {
    let mut compared = 0;
    for (name, config, cfg, layout) in folders() {
        let file = models().join(&name).join("model.safetensors");
        if !file.is_file() {
            continue;
        }
        // Without the tensors of an embedding before the layer.
        let mut expected = candle_core::safetensors::load(&file, &DEVICE)?;
        expected.retain(|tensor, _| !tensor.starts_with("embedding."));
        let checkpoint = Checkpoint::open(&file)?;
        let vb = weights::open(&file, DType::F32, &DEVICE)?;
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
        let sizes = |own: &MultiHeadAttentionConfig| {
            let widths = [own.embed_dim(), own.kdim(), own.vdim(), own.out_dim()];
            let heads = [own.num_heads(), own.num_kv_heads(), own.head_dim(), own.value_head_dim()];
            let biases = [own.q_bias(), own.k_bias(), own.v_bias(), own.out_bias(), own.bias_kv()];
            (widths, heads, biases, own.out_proj())
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

/// Lists eleven layers in every layout in one file. Their layouts are detected, or refused with both candidates named.
#[test]
fn attention_layers_are_listed_in_order_of_their_numbers() -> Result<()> {
    let zeros = |shape| Tensor::zeros(shape, DType::F32, &DEVICE);
    let mut tensors = HashMap::from([("model.embed_tokens.weight".to_string(), zeros((7, 4))?)]);
    let mut expected = Vec::new();
    // Raw weights that are not square are read as (in, out), rows by part but under two names, and weights (out, in).
    let is_another = |text: String| {
        let by_head = ["query_key_value:by-head", "c_attn:by-head"].iter().any(|name| text.ends_with(name));
        let is_named = ["stacked-raw-transposed", "in-out"].iter().any(|name| text.starts_with(name));
        is_named || text.ends_with("by-head") && !by_head
    };
    let layouts = WeightLayout::all().into_iter().filter(|layout| !is_another(layout.to_string()));
    for (n, layout) in layouts.enumerate() {
        let is_stack = matches!(layout, WeightLayout::StackedHeads(..));
        let layer = invented(&MultiHeadAttentionConfig::new(4, 2).with_out_proj(!is_stack), layout)?;
        let inner = ["attn", "layer.0.SelfAttention", "1", "0.fn"][n % 4];
        let layer = layer.state_dict(layout)?;
        let prefixes: Vec<_> = (0..11).map(|i| format!("model{n}.layers.{i}.{inner}")).collect();
        for (i, prefix) in prefixes.iter().enumerate() {
            tensors.extend(layer.iter().map(|(name, tensor)| (format!("{prefix}.{name}"), tensor.clone())));
            tensors.insert(format!("model{n}.layers.{i}.mlp.up_proj.weight"), zeros((4, 4))?);
        }
        expected.push((layout, prefixes));
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let found = checkpoint.attention_layers();
    let mut told = 0;
    assert_eq!(found.len(), 11 * expected.len());
    for (n, (layout, prefixes)) in expected.iter().enumerate() {
        let own = found.iter().filter(|prefix| prefix.starts_with(&format!("model{n}.")));
        assert_eq!(own.collect::<Vec<_>>(), prefixes.iter().collect::<Vec<_>>());
        match checkpoint.detect(&prefixes[10]) {
            Ok(detected) => {
                assert_eq!(detected, *layout);
                told += 1;
            }
            Err(error) => assert!(error.to_string().contains(&format!("`{layout}`")), "{error}"),
        }
    }
    assert_eq!((told, expected.len()), (60, 74));
    Ok(())
}
