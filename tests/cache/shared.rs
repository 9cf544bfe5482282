//! Layers that read keys and values of an earlier one, in its cache and in a memory.

use std::collections::HashMap;

use crate::layers::{assert_holds, of};
use crate::program::{EMBED_DIM, Setup, tolerance};
use crate::*;

const T: usize = 23;

fn base() -> Config {
    Config::new(EMBED_DIM, 4).with_num_kv_heads(2).with_head_dim(6).with_causal(true)
}

fn normed() -> Config {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    base().with_qk_norm(norm).with_rope(RopeConfig::new(100.0)).with_scale(1.0)
}

/// Builds the layer that projects keys and values, and the layer that reads them.
fn layers(cfg: &Config, dtype: DType) -> Result<[MultiHeadAttention; 2]> {
    let later = cfg.clone().with_kv_sharing(KvSharing::EarlierLayer);
    let cfg = if cfg.qk_norm().is_some() { cfg.clone().with_value_norm(1e-6) } else { cfg.clone() };
    let layer = |own: &Config, seed| {
        let layer = MultiHeadAttention::new(own, TorchSeed::new(seed).var_builder(dtype, &DEVICE))?;
        with_bias(layer, dtype, &DEVICE)
    };
    Ok([layer(&cfg, 3)?, layer(&later, 4)?])
}

/// Compares outputs after any program of calls and edits.
#[test]
fn shared_cache_of_earlier_layer_matches_memory() -> Result<()> {
    let place = GateLayout::Separate { bias: true };
    let gate = OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerHead, layout: place };
    let growing = AttentionCacheConfig::new;
    let buckets = RelativeBiasConfig::new(true).with_num_buckets(8);
    let none = AttentionMask::none();
    let sliding = AttentionCacheConfig::new().with_window(5).with_shared(true);
    for (cfg, cache, gives_positions) in [
        (base(), growing(), false),
        (base().with_alibi(AlibiConfig::Falcon), growing(), true),
        (base().with_relative_bias(buckets.with_max_distance(9)), growing(), true),
        (normed(), growing(), false),
        (normed(), growing().with_q8(), false),
        (normed().with_window(5).with_output_gate(gate), sliding, false),
    ] {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            if dtype == DType::F64 && DEVICE.is_metal() {
                continue;
            }
            let [earlier, later] = &layers(&cfg, dtype)?;
            let setup = of(later, (cfg.window(), &cache), &none, &DEVICE);
            let setup = Setup { earlier: Some(earlier), dtype, gives_positions, ..setup };
            assert_holds(setup, 12, 6, tolerance(dtype, &cache), &format!("{dtype:?}, {cfg:?}, {cache:?}"));
        }
    }
    Ok(())
}

/// Checks too that a sliding cache that is not shared drops keys to which the first queries of a long call attend.
#[test]
fn shared_cache_with_window_accepts_long_calls() -> Result<()> {
    let cfg = normed().with_window(5);
    let [earlier, later] = layers(&cfg, DType::F32)?;
    let xs = wave(1, T, EMBED_DIM, 0.0)?;
    let others = wave(1, T, EMBED_DIM, 9.0)?;
    let call = |cache: &mut AttentionCache, start: usize, t: usize| {
        earlier.forward_with(AttentionInput::new(&part(&xs, start, t)?).with_cache(cache))?;
        later.forward_with(AttentionInput::new(&part(&others, start, t)?).with_shared_cache(cache))
    };
    let own = AttentionCacheConfig::for_layer(&cfg);
    let error = error_text(call(&mut AttentionCache::new(&own)?, 0, T));
    assert!(error.contains("expected a shorter window in the mask, or a longer one in the cache"), "{error}");
    let mut shared = AttentionCache::new(&own.clone().with_shared(true))?;
    let expected = call(&mut shared, 0, T)?;
    assert_eq!(shared.capacity(), T);
    for n in 0..40 {
        call(&mut shared, n % T, 1)?;
    }
    assert_eq!(shared.capacity(), 10);
    let mut cache = AttentionCache::new(&own)?;
    let mut at = 0;
    for t in [5, 5, 1, 5, 5, 2] {
        assert_close(&call(&mut cache, at, t)?, &part(&expected, at, t)?, 1e-5, "calls of no more than a window");
        at += t;
    }
    Ok(())
}

/// Builds a layer with a module for queries alone, such as a quantised layer.
#[test]
fn shared_cache_with_query_module_alone_matches_layer() -> Result<()> {
    let [earlier, later] = layers(&base(), DType::F32)?;
    let weights: HashMap<_, _> = later.state_dict(WeightLayout::Canonical)?.into_iter().collect();
    let linear = |name: &str| Linear::new(weights[&format!("{name}.weight")].clone(), None);
    let modules = ProjectionModules::of_query(linear("q_proj")).with_output(linear("o_proj"));
    let vb = VarBuilder::zeros(DType::F32, &DEVICE);
    let of_modules = MultiHeadAttention::from_modules(later.config(), modules, vb)?;
    let mut cache = AttentionCache::default();
    let xs = wave(2, T, EMBED_DIM, 0.0)?;
    earlier.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    let call = |layer: &MultiHeadAttention| layer.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache));
    assert_close(&call(&of_modules)?, &call(&later)?, 1e-5, "modules");
    Ok(())
}

#[test]
fn keys_as_values_are_taken_before_norms_and_rope() -> Result<()> {
    let cfg = normed().with_value_norm(1e-6).with_qkv_bias(true);
    let one = MultiHeadAttention::new(
        &cfg.clone().with_kv_sharing(KvSharing::KeysAsValues),
        TorchSeed::new(3).var_builder(DType::F32, &DEVICE),
    )?;
    let mut weights: HashMap<_, _> = one.state_dict(WeightLayout::Canonical)?.into_iter().collect();
    assert!(weights.keys().all(|name| !name.starts_with("v_proj")), "{:?}", weights.keys());
    let builder = |tensors: &HashMap<_, _>| VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE);
    let again = MultiHeadAttention::new(one.config(), builder(&weights))?;
    for name in ["weight", "bias"] {
        weights.insert(format!("v_proj.{name}"), weights[&format!("k_proj.{name}")].clone());
    }
    let two = MultiHeadAttention::new(&cfg, builder(&weights))?;
    let xs = wave(2, T, EMBED_DIM, 0.0)?;
    let expected = two.forward(&xs)?;
    let mask = AttentionMask::none().with_valid_lens(vec![T, 9]);
    for layer in [&one, &again, &one.freeze()?] {
        assert_close(&layer.forward(&xs)?, &expected, 1e-6, "one projection");
        let memory = layer.project_memory(&xs, &xs)?;
        let of_memory = layer.forward_with(AttentionInput::new(&xs).with_memory(&memory).with_mask(&mask))?;
        assert_close(&of_memory, &two.forward_with(AttentionInput::new(&xs).with_mask(&mask))?, 1e-6, "a memory");
        let found = in_calls(layer, &mut AttentionCache::default(), &xs, &[20, 1, 2])?;
        assert_close(&found, &expected, 1e-5, "a cache");
    }
    Ok(())
}
