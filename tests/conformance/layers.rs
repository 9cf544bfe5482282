//! Layers of other libraries (`crates/compare/conformance/layers.py`), each loaded from the file of its library.

use std::collections::HashMap;

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{
    AttentionCache, AttentionInput, Backend, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout,
};
use candle_core::{DType, Device, Result, Tensor};
use serde::Deserialize;

use crate::common::{assert_close, assert_near, read_json, recorded};

const LIBRARIES: [&str; 6] = ["flax", "keras", "mlx", "torchtune", "tutorial", "x_transformers"];

#[derive(Deserialize)]
struct Library {
    layers: Vec<Layer>,
}

/// A layer below a prefix of its library's file.
#[derive(Deserialize)]
struct Layer {
    name: String,
    prefix: String,
    layout: String,
    config: MultiHeadAttentionConfig,
    inputs: Vec<String>,
}

/// A layer as it was loaded, with its inputs and the output of its library.
struct Loaded {
    layer: Layer,
    layout: WeightLayout,
    checkpoint: Checkpoint,
    mha: MultiHeadAttention,
    numbers: HashMap<String, Tensor>,
}

impl Loaded {
    fn number(&self, part: &str) -> &Tensor {
        &self.numbers[&format!("{}.{part}", self.layer.name)]
    }

    fn input(&self) -> AttentionInput<'_> {
        let input = AttentionInput::new(self.number("queries"));
        if self.layer.inputs.len() == 1 {
            return input;
        }
        input.with_key_value(self.number("keys"), self.number("values"))
    }
}

fn loaded_layers() -> Result<Vec<Loaded>> {
    let mut all = Vec::new();
    for name in LIBRARIES {
        let folder = recorded("conformance/layers");
        let file = folder.join(format!("{name}.safetensors"));
        let numbers = candle_core::safetensors::load(folder.join(format!("{name}.numbers.safetensors")), &Device::Cpu)?;
        let library: Library = read_json(folder.join(format!("{name}.json")));
        for layer in library.layers {
            let layout: WeightLayout = layer.layout.parse()?;
            let vb = weights::open(&file, DType::F32, &Device::Cpu)?.pp(&layer.prefix);
            assert_eq!(WeightLayout::detect(&vb)?, layout, "{}", layer.name);
            let mha = MultiHeadAttention::load(&layer.config, layout, vb)?;
            let checkpoint = Checkpoint::open(&file)?;
            all.push(Loaded { layer, layout, checkpoint, mha, numbers: numbers.clone() });
        }
    }
    Ok(all)
}

#[test]
fn layers_of_other_libraries_match_their_outputs() -> Result<()> {
    let all = loaded_layers()?;
    assert!(all.len() >= 15);
    for loaded in &all {
        let name = &loaded.layer.name;
        let expected = loaded.number("output");
        for backend in [Backend::Reference, Backend::Fused] {
            let found = loaded.mha.forward_with(loaded.input().with_backend(backend))?;
            assert_near(&found, expected, 1e-5, &format!("{name} by {backend:?}"));
        }
        let with_weights = loaded.mha.forward_with_weights(loaded.input())?;
        assert_near(&with_weights.output, expected, 1e-5, name);
        let columns = loaded.number(if loaded.layer.inputs.len() == 1 { "queries" } else { "keys" }).dim(1)?;
        assert_eq!(with_weights.weights.dim(3)?, columns + loaded.layer.config.num_mem_kv(), "{name}");
    }
    Ok(())
}

#[test]
fn layers_of_other_libraries_are_found_and_inferred() -> Result<()> {
    for Loaded { layer, layout, checkpoint, mha, .. } in &loaded_layers()? {
        let name = &layer.name;
        assert!(checkpoint.attention_layers().contains(&layer.prefix), "{name}");
        assert_eq!(checkpoint.detect(&layer.prefix)?, *layout, "{name}");
        if layer.config.qk_norm().is_some() {
            let inferred = checkpoint.infer_config(&layer.prefix, *layout, Some(layer.config.num_heads()));
            assert!(inferred.expect_err("shapes do not tell the norm").to_string().contains("normalises"), "{name}");
            continue;
        }
        let inferred = checkpoint.infer_config(&layer.prefix, *layout, Some(layer.config.num_heads()))?;
        let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?.pp(&layer.prefix);
        let again = MultiHeadAttention::load(&inferred, *layout, vb)?;
        assert_eq!(again.state_dict(*layout)?.len(), inferred_count(mha, *layout, &inferred)?, "{name}");
        // A buffer tells the tutorial's mask.
        assert_eq!(inferred.context_length(), layer.config.context_length(), "{name}");
    }
    Ok(())
}

/// Returns the number of tensors of a layer; without its mask buffers, if the inferred config has no mask.
fn inferred_count(
    mha: &MultiHeadAttention,
    layout: WeightLayout,
    inferred: &MultiHeadAttentionConfig,
) -> Result<usize> {
    let named = mha.state_dict(layout)?;
    Ok(named.iter().filter(|(name, _)| inferred.causal() || !name.ends_with("tril")).count())
}

/// Saves each layer in its own layout and compares names, shapes and numbers with its library's file.
#[test]
fn layers_of_other_libraries_are_saved_as_they_were() -> Result<()> {
    for Loaded { layer, layout, checkpoint, mha, .. } in &loaded_layers()? {
        let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?.pp(&layer.prefix);
        let saved = mha.state_dict(*layout)?;
        let below = format!("{}.", layer.prefix);
        let in_file = checkpoint.shapes().filter(|(name, _)| name.starts_with(&below)).count();
        assert_eq!(saved.len(), in_file, "{}", layer.name);
        for (name, tensor) in saved {
            assert_close(&tensor, &vb.get(tensor.dims(), &name)?, 0.0, &format!("{} {name}", layer.name));
        }
    }
    Ok(())
}

/// Compares one token at a time and pieces of a sequence with the library's output for the whole sequence.
#[test]
fn layers_of_other_libraries_with_cache_match_their_outputs() -> Result<()> {
    let mut compared = 0;
    for loaded in &loaded_layers()? {
        if !loaded.layer.config.causal() {
            continue;
        }
        let queries = loaded.number("queries");
        for pieces in [&[1, 1, 1, 1, 1, 1][..], &[4, 2], &[2, 1, 3]] {
            let mut cache = AttentionCache::default();
            let mut outputs = Vec::new();
            let mut start = 0;
            for &len in pieces {
                let piece = queries.narrow(1, start, len)?;
                outputs.push(loaded.mha.forward_with(AttentionInput::new(&piece).with_cache(&mut cache))?);
                start += len;
            }
            let expected = loaded.number("output").narrow(1, 0, start)?;
            assert_near(&Tensor::cat(&outputs, 1)?, &expected, 1e-5, &format!("{} {pieces:?}", loaded.layer.name));
        }
        compared += 1;
    }
    assert!(compared >= 8, "{compared}");
    Ok(())
}
