//! DeepSeek, whose attention is latent: decoding, names and misuse. `golden` has its numbers in one call.

use candle_attention::{AttentionCache, AttentionInput, Backend, hf};
use candle_core::{Result, Tensor};

use crate::common::relative_error;
use crate::golden::{TOLERANCE, models_of};
use crate::{LATENT, Model};

/// Token by token, beside what the cache holds of latents.
#[test]
fn latents_in_a_cache_give_the_same() -> Result<()> {
    for model in LATENT.iter().flat_map(|model_type| models_of(model_type)) {
        let layer = hf::load_latent_attention(&model.config, 0, model.vb())?;
        let (xs, expected) = (&model.golden["layer0.in"], &model.golden["layer0.out"]);
        let t = xs.dim(1)?;
        for (prompt, chunk) in [(0, 1), (1, 1), (t - 1, 1), (3, 2), (t, 1)] {
            for backend in [Backend::Fused, Backend::Reference] {
                let mut cache = AttentionCache::default();
                let (mut at, mut parts) = (0, Vec::new());
                while at < t {
                    let len = if at == 0 && prompt > 0 { prompt } else { chunk.min(t - at) };
                    let part = xs.narrow(1, at, len)?;
                    let input = AttentionInput::new(&part).with_cache(&mut cache).with_backend(backend);
                    parts.push(layer.forward_with(input)?);
                    at += len;
                }
                let error = relative_error(&Tensor::cat(&parts, 1)?, expected);
                let name = &model.name;
                assert!(error <= TOLERANCE, "{name}, {prompt} and then {chunk} by {backend:?}: off by {error:e}");
            }
        }
    }
    Ok(())
}

/// Kimi K2's config.json has a name of its own, which transformers reads as DeepSeek V3.
#[test]
fn kimi_k2_is_deepseek_v3() -> Result<()> {
    let Model { mut config, .. } = Model::named("deepseek_v3");
    let expected = hf::latent_attention_config(&config, 0)?;
    config["model_type"] = "kimi_k2".into();
    assert_eq!(hf::latent_attention_config(&config, 0)?, expected);
    Ok(())
}
