//! Latent attention: positions cut into calls in any way give the numbers of one call, over a cache of latents.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend,
    MultiHeadLatentAttentionConfig as Config, RopeConfig, RopeScaling,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::array::Random;
use crate::common::{error_text, values};
use crate::compare::{Layer, Masks, Run, tolerance_of};
use crate::latent_layers::{CPU, config, draw, layer, parameters};
use crate::plan::{Plan, cases};

/// Kinds of caches, and the window of those that slide.
fn caches() -> Vec<(AttentionCacheConfig, Option<usize>)> {
    let new = AttentionCacheConfig::new;
    vec![
        (new().with_capacity(2), None),
        (new().with_capacity(0), None),
        (new().with_capacity(120).with_growth(false), None),
        (new().with_window(4), Some(4)),
        (new().with_dtype(DType::BF16), None),
        (new().with_dtype(DType::F64), None),
        (new().with_capacity(2).with_q8(), None),
        (new().with_window(4).with_q8(), Some(4)),
    ]
}

/// The difference between the calls of a plan and one call, both under a mask.
fn difference(
    (layer, cache): (&dyn Layer, &AttentionCacheConfig),
    plan: &Plan,
    tokens: &[Tensor],
    (mask, backend): (&AttentionMask, Backend),
) -> Result<f64> {
    let same = |_| Ok(mask.clone());
    let masks = Masks { of_call: &same, of_sequence: &same };
    let mut cache = AttentionCache::new(cache)?;
    let found = Run { layer, plan, tokens, masks, backend }.difference(&mut cache)?;
    assert_eq!(cache.lens(), plan.lens());
    Ok(found)
}

fn draw_tokens(random: &mut Random, plan: &Plan, width: usize, dtype: DType) -> Result<Vec<Tensor>> {
    plan.lens().into_iter().map(|len| draw(random, &[len, width], dtype)).collect()
}

#[test]
fn calls_with_a_cache_give_the_numbers_of_one_call() -> Result<()> {
    let random = &mut Random::new(11);
    for case in 0..cases(60) {
        let cfg = config(random);
        let parameters = parameters(&cfg, random);
        let plan = Plan::random(random, case % 2 == 1);
        for dtype in [DType::F32, DType::F64] {
            let layer = layer(&cfg, &parameters, dtype, &CPU)?;
            let tokens = draw_tokens(random, &plan, cfg.embed_dim(), dtype)?;
            for (cache, window) in caches() {
                let mask = window.map_or(AttentionMask::none(), |window| AttentionMask::causal().with_window(window));
                for backend in [Backend::Auto, Backend::Reference] {
                    let off = difference((&layer, &cache), &plan, &tokens, (&mask, backend))?;
                    let most = if cache.q8() { 4e-2 } else { tolerance_of(dtype, &cache) };
                    assert!(off <= most, "case {case}, {cache:?}, {dtype:?}, {backend:?}: off by {off:e}");
                }
            }
        }
    }
    Ok(())
}

/// Nothing of a head is kept, and nothing twice.
#[test]
fn a_cache_holds_a_latent_and_a_key_for_each_token() -> Result<()> {
    let random = &mut Random::new(12);
    let cfg = Config::new(8, 4).with_kv_lora_rank(10).with_rope_head_dim(6);
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32, &CPU)?;
    let xs = Tensor::stack(&[draw(random, &[3, 8], DType::F32)?, Tensor::zeros((3, 8), DType::F32, &CPU)?], 0)?;
    for (config, bytes) in [
        (AttentionCacheConfig::new(), 16 * 4),
        (AttentionCacheConfig::new().with_dtype(DType::BF16), 16 * 2),
        (AttentionCacheConfig::new().with_q8(), 16 + 4),
    ] {
        let mut cache = AttentionCache::new(&config.with_capacity(32))?;
        layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
        assert_eq!((cache.capacity(), cache.memory()), (32, 2 * 32 * bytes));
    }
    Ok(())
}

crate::on_each_device!(long_calls_and_short_ones_go_on_from_each_other);

/// A long prompt behind another one, and then single tokens: each the other way.
fn long_calls_and_short_ones_go_on_from_each_other(device: &Device) -> Result<()> {
    let random = &mut Random::new(13);
    let cfg = Config::new(16, 3)
        .with_q_lora_rank(8)
        .with_kv_lora_rank(48)
        .with_nope_head_dim(16)
        .with_rope_head_dim(8)
        .with_value_head_dim(16);
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32, device)?;
    let plan = Plan::even(2, &[100, 1, 1, 90, 1, 7, 1]);
    let tokens = draw_tokens(random, &plan, 16, DType::F32)?;
    let tokens: Vec<_> = tokens.iter().map(|xs| xs.to_device(device)).collect::<Result<_>>()?;
    let fused = if device.is_cpu() { Backend::Fused } else { Backend::Auto };
    for backend in [fused, Backend::Reference] {
        let growing = AttentionCacheConfig::new();
        let off = difference((&layer, &growing), &plan, &tokens, (&AttentionMask::none(), backend))?;
        assert!(off <= 1e-5, "{backend:?}: off by {off:e}");
    }
    Ok(())
}

/// Scalings that a cache has to count positions for.
#[test]
fn scaled_rotary_positions_go_on_in_a_cache() -> Result<()> {
    let random = &mut Random::new(14);
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 8,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: Some(0.7),
        mscale_all_dim: Some(0.9),
        truncate: true,
    };
    let cfg = Config::new(8, 2).with_kv_lora_rank(6).with_rope_head_dim(8);
    let cfg = cfg.with_rope(RopeConfig::new(50.0).with_scaling(scaling));
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32, &CPU)?;
    let plan = Plan::ragged(&[&[5, 3], &[1, 1], &[0, 4], &[1, 1]]);
    let tokens = draw_tokens(random, &plan, 8, DType::F32)?;
    let growing = AttentionCacheConfig::new();
    let off = difference((&layer, &growing), &plan, &tokens, (&AttentionMask::none(), Backend::Auto))?;
    assert!(off <= 1e-5, "off by {off:e}");
    Ok(())
}

#[test]
fn a_call_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
    let random = &mut Random::new(15);
    let cfg = Config::new(4, 2).with_kv_lora_rank(3).with_rope_head_dim(2);
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32, &CPU)?;
    let xs = draw(random, &[3, 4], DType::F32)?;
    let mut caches = [AttentionCache::default(), AttentionCache::default()];
    for cache in &mut caches {
        layer.forward_with(AttentionInput::new(&xs).with_cache(cache))?;
    }
    let wrong = AttentionMask::none().with_valid_lens(vec![1, 2]);
    let failed = layer.forward_with(AttentionInput::new(&xs).with_mask(&wrong).with_cache(&mut caches[0]));
    assert!(error_text(failed).starts_with("[attention_mask]"));
    assert_eq!(caches[0].lens(), [3]);
    let [first, second] = caches.each_mut().map(|cache| layer.forward_with(AttentionInput::new(&xs).with_cache(cache)));
    assert_eq!(values(&first?), values(&second?));
    Ok(())
}
