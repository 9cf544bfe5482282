//! Latent attention to the keys that an indexer chooses, in calls with a cache and with padding.

use candle_attention::{
    AttentionCache, AttentionInput, AttentionMask, Backend, IndexerConfig, MultiHeadLatentAttention, PackedSequences,
    hf,
};
use candle_core::{DType, Result, Tensor};

use crate::Model;

/// The models whose indexers choose 4 of the keys of each query.
const MODELS: [&str; 2] = ["deepseek_v32", "glm_moe_dsa"];

/// A layer, and inputs (2, T, E) with the outputs of transformers.
struct Recorded {
    model: Model,
    layer: MultiHeadLatentAttention,
    xs: Tensor,
    ys: Tensor,
}

fn recorded() -> Result<Vec<Recorded>> {
    let mut all = Vec::new();
    for name in MODELS {
        let model = Model::named(name);
        let layer = hf::load_latent_attention(&model.config, 0, model.vb())?;
        assert_eq!(layer.config().indexer().map(|indexer| indexer.top_k), Some(4));
        let (xs, ys) = (model.golden["layer0.in"].clone(), model.golden["layer0.out"].clone());
        all.push(Recorded { model, layer, xs, ys });
    }
    Ok(all)
}

#[test]
fn indexer_with_cache_in_chunks_matches_transformers() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        for own in [layer.clone(), layer.freeze()?] {
            for chunk in [1, 3, 8] {
                let mut cache = AttentionCache::default();
                for start in (0..t).step_by(chunk) {
                    let n = chunk.min(t - start);
                    let part = xs.narrow(1, start, n)?;
                    let found = own.forward_with(AttentionInput::new(&part).with_cache(&mut cache))?;
                    model.assert_close(&found, &ys.narrow(1, start, n)?, &format!("chunks of {chunk} from {start}"));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn indexer_with_masks_for_each_head_matches_transformers() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let (t, h) = (xs.dim(1)?, layer.config().num_heads());
        let ones = Tensor::ones((1, h, t, t), DType::U8, xs.device())?;
        let zeros = ones.to_dtype(xs.dtype())?.affine(0.0, 0.0)?;
        for mask in [AttentionMask::none().with_bool_mask(&ones), AttentionMask::none().with_bias(&zeros)] {
            let found = layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))?;
            model.assert_close(&found, &ys, "a mask for each head");
        }
    }
    Ok(())
}

#[test]
fn indexer_with_left_padding_matches_sequences_alone() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        let padding = 5;
        let starts = [0, padding];
        // The second sequence without its last tokens, after padding.
        let second = xs.narrow(0, 1, 1)?;
        let padded = Tensor::cat(&[&second.narrow(1, 2, padding)?, &second.narrow(1, 0, t - padding)?], 1)?;
        let batch = Tensor::cat(&[&xs.narrow(0, 0, 1)?, &padded], 0)?;
        let check = |found: &Tensor, name: &str| -> Result<()> {
            model.assert_close(&found.narrow(0, 0, 1)?, &ys.narrow(0, 0, 1)?, name);
            let own = found.narrow(0, 1, 1)?.narrow(1, padding, t - padding)?;
            model.assert_close(&own, &ys.narrow(0, 1, 1)?.narrow(1, 0, t - padding)?, name);
            Ok(())
        };
        for backend in [Backend::Auto, Backend::Reference] {
            let mask = AttentionMask::none().with_starts(starts.to_vec());
            let input = || AttentionInput::new(&batch).with_backend(backend);
            check(&layer.forward_with(input().with_mask(&mask))?, "without a cache")?;
            let mut cache = AttentionCache::default();
            check(&layer.forward_with(input().with_starts(&starts).with_cache(&mut cache))?, "with a cache")?;
        }
        // The same prompt, and then token by token.
        let prompt = batch.narrow(1, 0, padding + 2)?;
        let mut cache = AttentionCache::default();
        let input = AttentionInput::new(&prompt).with_starts(&starts).with_cache(&mut cache);
        let mut parts = vec![layer.forward_with(input)?];
        for token in padding + 2..t {
            let step = batch.narrow(1, token, 1)?;
            parts.push(layer.forward_with(AttentionInput::new(&step).with_cache(&mut cache))?);
        }
        check(&Tensor::cat(&parts, 1)?, "token by token")?;
    }
    Ok(())
}

#[test]
fn indexer_of_other_sizes_or_inputs_is_an_error() -> Result<()> {
    let Recorded { model, layer, xs, .. } = recorded()?.remove(1);
    let error = |name: &str, value: serde_json::Value| {
        let mut config = model.config.clone();
        config[name] = value;
        hf::latent_attention_config(&config, 0).expect_err("another config").to_string()
    };
    let indexer = layer.config().indexer().map(|own| IndexerConfig { top_k: 0, ..own });
    let none = layer.config().clone().with_indexer(indexer).validate().expect_err("no keys").to_string();
    assert!(none.contains("the indexer's top_k is 0, expected at least 1"), "{none}");
    assert!(error("index_head_dim", 2.into()).contains("head_dim is 2, expected at least the rope_head_dim of 4"));
    assert!(error("q_lora_rank", serde_json::Value::Null).contains("has an indexer and no q_lora_rank"));
    let shared = error("indexer_types", serde_json::json!(["shared"]));
    assert!(shared.contains("attends to the keys that an earlier layer chose"), "{shared}");

    let total = xs.dim(1)?;
    let packed = PackedSequences::from_lens(&[total], &[total])?;
    let rows = xs.get(0)?;
    let found = layer.forward_with(AttentionInput::new(&rows).with_packed(&packed));
    let text = found.expect_err("packed sequences").to_string();
    assert!(text.contains("packed sequences were given to a layer with an indexer"), "{text}");
    Ok(())
}
