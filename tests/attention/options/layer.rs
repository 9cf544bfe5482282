//! The path that a layer's call takes.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, EmptyRows,
    MultiHeadAttentionConfig as Config, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, Plan,
};
use candle_core::{DType, Result};
use candle_nn::{VarBuilder, VarMap};

use crate::common::error_text;
use crate::seeded::layer;
use crate::tensors::{CPU, builder, named, random};

fn assert_plan(plan: &Plan, backend: Backend, why: &str) {
    assert_eq!(plan.backend, backend, "{plan}");
    assert!(plan.reason.contains(why), "{plan}: expected {why:?}");
}

#[test]
fn a_plan_names_the_path_of_a_call_and_why() -> Result<()> {
    let (cfg, xs) = (Config::new(12, 4).with_causal(true), random((2, 5, 12))?);
    let (plain, dropped) = (layer(&cfg, DType::F32, &CPU)?, layer(&cfg.clone().with_dropout(0.5), DType::F32, &CPU)?);
    let (memory, input) = (plain.project_memory(&xs, &xs)?, || AttentionInput::new(&xs));
    let uniform = AttentionMask::none().with_empty_rows(EmptyRows::Uniform);
    for (layer, input, backend, why) in [
        (&plain, input(), Backend::Fused, "the CPU kernel"),
        (&plain, input().with_key_value(&xs, &xs), Backend::Fused, "the CPU kernel"),
        (&plain, input().with_memory(&memory), Backend::Fused, "the CPU kernel"),
        (&plain, input().with_backend(Backend::Reference), Backend::Reference, "asked for"),
        (&plain, input().with_mask(&uniform), Backend::Reference, "see nothing"),
        (&dropped, input(), Backend::Fused, "the CPU kernel"),
        (&dropped, input().with_train(true), Backend::Fused, "the CPU kernel"),
    ] {
        assert_plan(&layer.plan(&input)?, backend, why);
    }
    let (wide, in_f64) = (xs.to_dtype(DType::F64)?, layer(&cfg, DType::F64, &CPU)?);
    assert_plan(&in_f64.plan(&AttentionInput::new(&wide))?, Backend::Reference, "F64");
    let fused = || AttentionInput::new(&wide).with_backend(Backend::Fused);
    assert!(error_text(in_f64.plan(&fused())).contains("no fused path"));
    assert!(error_text(in_f64.forward_with(fused())).contains("no fused path"));
    assert!(error_text(plain.plan(&AttentionInput::new(&wide))).contains("queries have dtype F64"));
    Ok(())
}

/// With a cache, whose sequences it leaves as they are.
#[test]
fn a_plan_leaves_a_cache_as_it_is() -> Result<()> {
    let cfg = Config::new(12, 4).with_causal(true);
    let of_heads = layer(&cfg, DType::F32, &CPU)?;
    let cfg = MultiHeadLatentAttentionConfig::new(12, 2).with_kv_lora_rank(6).with_rope_head_dim(4);
    let variables = VarMap::new();
    MultiHeadLatentAttention::new(&cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    let plain = named(&variables).into_iter().map(|(name, var)| (name, var.as_detached_tensor())).collect();
    let latents = MultiHeadLatentAttention::new(&cfg, builder(plain))?;
    let xs = random((2, 5, 12))?;
    for config in [AttentionCacheConfig::new(), AttentionCacheConfig::new().with_q8()] {
        let caches = &mut [AttentionCache::new(&config)?, AttentionCache::new(&config)?];
        for (n, cache) in caches.iter_mut().enumerate() {
            for t in [5, 1, 2] {
                let xs = xs.narrow(1, 0, t)?;
                let before = cache.lens();
                let input = AttentionInput::new(&xs).with_cache(cache);
                let plan = if n == 0 { of_heads.plan(&input)? } else { latents.plan(&input)? };
                assert_plan(&plan, Backend::Fused, "the CPU kernel");
                assert_eq!(cache.lens(), before);
                let input = AttentionInput::new(&xs).with_cache(cache);
                if n == 0 {
                    of_heads.forward_with(input)?
                } else {
                    latents.forward_with(input)?
                };
            }
            assert_eq!(cache.lens(), [8, 8]);
        }
    }
    Ok(())
}
