//! Positions cut into calls in any way give the numbers of one call.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig as Config, RopeConfig, RopeScaling,
};
use candle_core::{DType, Device, IndexOp, Result, Tensor};

use crate::array::Random;
use crate::common::{assert_close, error_text, max_error, values};
use crate::layers::{CPU, config, layer, layer_on, parameters, rows, tensor, tolerance};
use crate::plan::{Plan, cases};

/// Kinds of caches, and the window of those that slide.
fn caches() -> Vec<(&'static str, AttentionCacheConfig, Option<usize>)> {
    let new = AttentionCacheConfig::new;
    vec![
        ("growing", new().with_capacity(2), None),
        ("growing from nothing", new().with_capacity(0), None),
        ("preallocated", new().with_capacity(120).with_growth(false), None),
        ("sliding", new().with_window(4), Some(4)),
        ("bf16", new().with_dtype(DType::BF16), None),
        ("f64", new().with_dtype(DType::F64), None),
        ("8 bits", new().with_capacity(2).with_q8(), None),
        ("8 bits, sliding", new().with_window(4).with_q8(), Some(4)),
    ]
}

/// Each sequence by itself, in one call.
fn uncached(layer: &MultiHeadLatentAttention, tokens: &[Tensor], mask: &AttentionMask) -> Result<Vec<Tensor>> {
    let whole = |xs| layer.forward_with(AttentionInput::new(xs).with_mask(mask).with_backend(Backend::Reference));
    tokens.iter().map(whole).collect()
}

/// Call by call, among padding that is NaN.
fn cached(
    (layer, cache): (&MultiHeadLatentAttention, &mut AttentionCache),
    plan: &Plan,
    tokens: &[Tensor],
    (mask, backend): (&AttentionMask, Backend),
) -> Result<Vec<Tensor>> {
    let mut outputs = vec![Vec::new(); plan.b];
    for (call, before) in plan.calls.iter().zip(plan.before()) {
        let padding = |t: usize| {
            let like = &tokens[0];
            (Tensor::zeros((t, like.dim(1)?), DType::F32, like.device())? + f64::NAN)?.to_dtype(like.dtype())
        };
        let rows = tokens.iter().zip(&call.tokens).zip(&before).map(|((xs, own), &before)| {
            Tensor::cat(&[&padding(own.start)?, &xs.narrow(0, before, own.len())?, &padding(call.t - own.end)?], 0)
        });
        let xs = Tensor::stack(&rows.collect::<Result<Vec<_>>>()?, 0)?;
        let starts: Vec<_> = call.tokens.iter().map(|own| own.start).collect();
        let lens: Vec<_> = call.tokens.iter().map(|own| own.end).collect();
        let input = AttentionInput::new(&xs).with_mask(mask).with_backend(backend).with_cache(cache);
        let ys = layer.forward_with(input.with_starts(&starts).with_valid_lens(&lens))?;
        for (b, own) in call.tokens.iter().enumerate() {
            outputs[b].push(ys.i(b)?.narrow(0, own.start, own.len())?.contiguous()?);
        }
    }
    outputs.into_iter().map(|parts| Tensor::cat(&parts, 0)).collect()
}

#[test]
fn calls_beside_a_cache_give_the_numbers_of_one_call() -> Result<()> {
    let random = &mut Random::new(11);
    for case in 0..cases(60) {
        let cfg = config(random);
        let parameters = parameters(&cfg, random);
        let plan = Plan::random(random, case % 2 == 1);
        for dtype in [DType::F32, DType::F64] {
            let layer = layer(&cfg, &parameters, dtype)?;
            let tokens: Vec<_> = (plan.lens().iter())
                .map(|&len| tensor(&rows(random, len, cfg.embed_dim()), cfg.embed_dim(), dtype))
                .collect::<Result<_>>()?;
            for (name, cache_config, window) in caches() {
                let mask = window.map_or(AttentionMask::none(), |window| AttentionMask::causal().with_window(window));
                let expected = uncached(&layer, &tokens, &mask)?;
                for backend in [Backend::Auto, Backend::Reference] {
                    let cache = &mut AttentionCache::new(&cache_config)?;
                    let found = cached((&layer, &mut *cache), &plan, &tokens, (&mask, backend))?;
                    assert_eq!(cache.lens(), plan.lens());
                    let kept = if cache_config.q8() { 4e-2 } else { tolerance(cache_config.dtype().unwrap_or(dtype)) };
                    for (found, expected) in found.iter().zip(&expected) {
                        let largest = values(expected).into_iter().map(f64::abs).fold(1.0, f64::max);
                        let most = kept.max(tolerance(dtype)) * largest;
                        assert_close(found, expected, most, &format!("case {case}, {name}, {dtype:?}, {backend:?}"));
                    }
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
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32)?;
    let xs =
        Tensor::stack(&[tensor(&rows(random, 3, 8), 8, DType::F32)?, Tensor::zeros((3, 8), DType::F32, &CPU)?], 0)?;
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
fn long_calls_and_short_ones_go_on_from_each_other(device: &Device) {
    long_and_short(device).expect("no call fails");
}

fn long_and_short(device: &Device) -> Result<()> {
    let random = &mut Random::new(13);
    let cfg = Config::new(16, 3)
        .with_q_lora_rank(8)
        .with_kv_lora_rank(48)
        .with_nope_head_dim(16)
        .with_rope_head_dim(8)
        .with_value_head_dim(16);
    let parameters = parameters(&cfg, random);
    let plan = Plan::even(2, &[100, 1, 1, 90, 1, 7, 1]);
    let tokens: Vec<_> = (0..2).map(|_| tensor(&rows(random, 201, 16), 16, DType::F32)).collect::<Result<_>>()?;
    let mask = AttentionMask::none();
    let expected = uncached(&layer(&cfg, &parameters, DType::F32)?, &tokens, &mask)?;
    let layer = layer_on(&cfg, &parameters, DType::F32, device)?;
    let tokens: Vec<_> = tokens.iter().map(|xs| xs.to_device(device)).collect::<Result<_>>()?;
    let backends =
        if device.is_cpu() { [Backend::Fused, Backend::Reference] } else { [Backend::Auto, Backend::Reference] };
    for backend in backends {
        let found = cached((&layer, &mut AttentionCache::default()), &plan, &tokens, (&mask, backend))?;
        for (found, expected) in found.iter().zip(&expected) {
            let largest = values(expected).into_iter().map(f64::abs).fold(1.0, f64::max);
            assert_close(found, expected, 1e-5 * largest, &format!("{backend:?}"));
        }
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
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32)?;
    let plan = Plan::ragged(&[&[5, 3], &[1, 1], &[0, 4], &[1, 1]]);
    let tokens: Vec<_> =
        plan.lens().iter().map(|&t| tensor(&rows(random, t, 8), 8, DType::F32)).collect::<Result<_>>()?;
    let mask = AttentionMask::none();
    let expected = uncached(&layer, &tokens, &mask)?;
    let found = cached((&layer, &mut AttentionCache::default()), &plan, &tokens, (&mask, Backend::Auto))?;
    for (found, expected) in found.iter().zip(&expected) {
        let largest = values(expected).into_iter().map(f64::abs).fold(1.0, f64::max);
        assert!(max_error(found, expected) <= 1e-5 * largest);
    }
    Ok(())
}

#[test]
fn a_call_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
    let random = &mut Random::new(15);
    let cfg = Config::new(4, 2).with_kv_lora_rank(3).with_rope_head_dim(2);
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32)?;
    let xs = tensor(&rows(random, 3, 4), 4, DType::F32)?;
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
