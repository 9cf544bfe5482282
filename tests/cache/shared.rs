//! Layers that read keys and values of an earlier one, in its cache and in a memory.

use std::collections::HashMap;

use crate::*;

const T: usize = 23;

fn base() -> Config {
    Config::new(8, 4).with_num_kv_heads(2).with_head_dim(6).with_causal(true)
}

fn normed() -> Config {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    base().with_qk_norm(norm).with_rope(RopeConfig::new(100.0)).with_scale(1.0)
}

/// The layer that makes keys and values, and the one that reads them.
fn layers(cfg: &Config, dtype: DType) -> Result<[MultiHeadAttention; 2]> {
    let later = cfg.clone().with_kv_source(KvSource::EarlierLayer);
    let cfg = if cfg.qk_norm().is_some() { cfg.clone().with_value_norm(1e-6) } else { cfg.clone() };
    Ok([
        MultiHeadAttention::new(&cfg, TorchSeed::new(3).var_builder(dtype, &CPU))?,
        MultiHeadAttention::new(&later, TorchSeed::new(4).var_builder(dtype, &CPU))?,
    ])
}

/// What the later layer gives in calls of so many tokens, after each of the earlier one with the same.
fn in_calls_of_both(
    layers: &[MultiHeadAttention; 2],
    [earlier, later]: [&Tensor; 2],
    cfg: &AttentionCacheConfig,
    pieces: &[usize],
) -> Result<Tensor> {
    let mut cache = AttentionCache::new(cfg)?;
    let (mut start, mut outputs) = (0, Vec::new());
    for &t in pieces {
        layers[0].forward_with(AttentionInput::new(&part(earlier, start, t)?).with_cache(&mut cache))?;
        let later = part(later, start, t)?;
        let input = || AttentionInput::new(&later).with_shared_cache(&cache);
        let ys = layers[1].forward_with(input())?;
        assert_close(&layers[1].forward_with(input().with_backend(Backend::Reference))?, &ys, 1e-2, "the reference");
        assert_close(&layers[1].forward_with_weights(input())?.output, &ys, 1e-2, "beside the weights");
        outputs.push(ys);
        start += t;
    }
    Tensor::cat(&outputs, 1)
}

#[test]
fn a_cache_gives_the_numbers_of_a_memory() -> Result<()> {
    let place = GatePlace::Own { bias: true };
    let gate = OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerHead, place };
    for cfg in
        [base(), base().with_alibi(AlibiConfig::Falcon), normed(), normed().with_window(5).with_output_gate(gate)]
    {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-14), (DType::BF16, 2e-2)] {
            let layers = layers(&cfg, dtype)?;
            let [earlier, later] = [0.0, 9.0].map(|first| wave(2, T, 8, first).and_then(|xs| xs.to_dtype(dtype)));
            let (earlier, later) = (earlier?, later?);
            let memory = layers[0].project_memory(&earlier, &earlier)?;
            let expected = layers[1].forward_with(AttentionInput::new(&later).with_memory(&memory))?;
            // The memory is also the earlier layer's own.
            let own = layers[0].forward_with(AttentionInput::new(&earlier).with_memory(&memory))?;
            assert_close(&own, &layers[0].forward(&earlier)?, tolerance, "the earlier layer");
            let sliding = AttentionCacheConfig::for_layer(&cfg).with_shared(true);
            for pieces in [&[T][..], &[19, 1, 1, 1, 1], &[2, 5, 9, 1, 6], &[1; T]] {
                let found = in_calls_of_both(&layers, [&earlier, &later], &sliding, pieces)?;
                assert_close(&found, &expected, tolerance, &format!("{cfg:?}, {dtype:?}, {pieces:?}"));
            }
        }
    }
    Ok(())
}
/// Keys stand where the earlier layer's calls put them, whether the later layer's calls say so or not.
#[test]
fn keys_keep_the_positions_of_the_earlier_layer() -> Result<()> {
    let buckets = RelativeBiasConfig::new(true).with_num_buckets(8).with_max_distance(9);
    let bias = RelativeBias::new(&buckets, 4, TorchSeed::new(5).var_builder(DType::F32, &CPU))?;
    let relative = layers(&base().with_relative_bias(buckets), DType::F32)?;
    let relative = relative.map(|layer| layer.with_relative_bias(bias.clone()).expect("the bias of the config"));
    let falcon = layers(&base().with_alibi(AlibiConfig::Falcon), DType::F32)?;
    let (earlier, later) = (wave(2, 6, 8, 0.0)?, wave(2, 6, 8, 9.0)?);
    let positions = Tensor::new(&[[4u32, 0, 9, 9, 1, 70], [40, 41, 42, 43, 44, 45]], &CPU)?;
    for (layers, says) in [(&relative, false), (&relative, true), (&falcon, false), (&falcon, true)] {
        let memory = layers[0].project_memory(&earlier, &earlier)?;
        let input = AttentionInput::new(&later).with_memory(&memory).with_key_positions(&positions);
        let expected = layers[1].forward_with(if says { input.with_positions(&positions) } else { input })?;
        let (mut cache, mut outputs) = (AttentionCache::default(), Vec::new());
        for (start, t) in [(0, 3), (3, 1), (4, 2)] {
            let (earlier, later, own) =
                (part(&earlier, start, t)?, part(&later, start, t)?, part(&positions, start, t)?);
            layers[0].forward_with(AttentionInput::new(&earlier).with_cache(&mut cache).with_positions(&own))?;
            let input = AttentionInput::new(&later).with_shared_cache(&cache);
            outputs.push(layers[1].forward_with(if says { input.with_positions(&own) } else { input })?);
        }
        assert_close(&Tensor::cat(&outputs, 1)?, &expected, 1e-5, &format!("said: {says}"));
    }
    Ok(())
}

#[test]
fn eight_bits_and_padding_are_those_of_the_earlier_layer() -> Result<()> {
    let layers = layers(&normed(), DType::F32)?;
    let (earlier, later) = (wave(2, T, 8, 0.0)?, wave(2, T, 8, 9.0)?);
    let plain = in_calls_of_both(&layers, [&earlier, &later], &AttentionCacheConfig::new(), &[T])?;
    let q8 = AttentionCacheConfig::new().with_q8();
    assert_close(&in_calls_of_both(&layers, [&earlier, &later], &q8, &[20, 1, 2])?, &plain, 2e-2, "8 bits");

    // The second sequence has padding behind its first 8 tokens, and then before the next one.
    let mut cache = AttentionCache::default();
    let lens = [12, 8];
    let (first, second) = (part(&earlier, 0, 12)?, part(&later, 0, 12)?);
    layers[0].forward_with(AttentionInput::new(&first).with_cache(&mut cache).with_valid_lens(&lens))?;
    let ys = layers[1].forward_with(AttentionInput::new(&second).with_shared_cache(&cache).with_valid_lens(&lens))?;
    let of_second = |xs: &Tensor, start, t| part(&xs.narrow(0, 1, 1)?, start, t);
    assert_close(&of_second(&ys, 0, 8)?, &of_second(&plain, 0, 8)?, 1e-5, "padding behind");
    let starts = [0, 4];
    let (first, second) = (part(&earlier, 4, 5)?, part(&later, 4, 5)?);
    layers[0].forward_with(AttentionInput::new(&first).with_cache(&mut cache).with_starts(&starts))?;
    let ys = layers[1].forward_with(AttentionInput::new(&second).with_shared_cache(&cache).with_starts(&starts))?;
    assert_close(&of_second(&ys, 4, 1)?, &of_second(&plain, 8, 1)?, 1e-5, "padding before");
    Ok(())
}

/// A sliding cache that is not shared drops what the first queries of a long call see.
#[test]
fn long_calls_take_a_shared_cache() -> Result<()> {
    let cfg = normed().with_window(5);
    let layers = layers(&cfg, DType::F32)?;
    let (earlier, later) = (wave(1, T, 8, 0.0)?, wave(1, T, 8, 9.0)?);
    let call =
        |cfg: &AttentionCacheConfig, pieces: &[usize]| in_calls_of_both(&layers, [&earlier, &later], cfg, pieces);
    let own = AttentionCacheConfig::for_layer(&cfg);
    let error = error_text(call(&own, &[T]));
    assert!(error.contains("expected a shorter window in the mask, or a longer one in the cache"), "{error}");
    let expected = call(&own.clone().with_shared(true), &[T])?;
    assert_close(&call(&own, &[5, 5, 1, 5, 5, 2])?, &expected, 1e-5, "calls of no more than a window");

    let mut cache = AttentionCache::new(&own.with_shared(true))?;
    layers[0].forward_with(AttentionInput::new(&earlier).with_cache(&mut cache))?;
    let after_prompt = cache.capacity();
    for n in 0..40 {
        let token = wave(1, 1, 8, n as f32)?;
        layers[0].forward_with(AttentionInput::new(&token).with_cache(&mut cache))?;
        layers[1].forward_with(AttentionInput::new(&token).with_shared_cache(&cache))?;
    }
    assert!((after_prompt, cache.capacity()) == (T, 10), "{after_prompt} and then {}", cache.capacity());
    Ok(())
}

/// A quantised layer, for example, has a module for queries alone.
#[test]
fn modules_may_be_without_keys_and_values() -> Result<()> {
    let [earlier, later] = layers(&base(), DType::F32)?;
    let weights: HashMap<_, _> = later.state_dict(WeightLayout::Canonical)?.into_iter().collect();
    let linear = |name: &str| Linear::new(weights[&format!("{name}.weight")].clone(), None);
    let modules = ProjectionModules::of_query(linear("q_proj")).with_output(linear("o_proj"));
    let vb = VarBuilder::zeros(DType::F32, &CPU);
    let of_modules = MultiHeadAttention::from_modules(later.config(), modules, vb)?;
    let mut cache = AttentionCache::default();
    let xs = wave(2, T, 8, 0.0)?;
    earlier.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    let call = |layer: &MultiHeadAttention| layer.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache));
    assert_close(&call(&of_modules)?, &call(&later)?, 1e-5, "modules");
    Ok(())
}

#[test]
fn keys_are_values_before_norms_and_positions() -> Result<()> {
    let cfg = normed().with_value_norm(1e-6).with_qkv_bias(true);
    let one = MultiHeadAttention::new(
        &cfg.clone().with_kv_source(KvSource::KeysAsValues),
        TorchSeed::new(3).var_builder(DType::F32, &CPU),
    )?;
    let mut weights: HashMap<_, _> = one.state_dict(WeightLayout::Canonical)?.into_iter().collect();
    assert!(weights.keys().all(|name| !name.starts_with("v_proj")), "{:?}", weights.keys());
    let builder = |weights: &HashMap<_, _>| VarBuilder::from_tensors(weights.clone(), DType::F32, &CPU);
    let again = MultiHeadAttention::new(one.config(), builder(&weights))?;
    for name in ["weight", "bias"] {
        weights.insert(format!("v_proj.{name}"), weights[&format!("k_proj.{name}")].clone());
    }
    let two = MultiHeadAttention::new(&cfg, builder(&weights))?;
    let xs = wave(2, T, 8, 0.0)?;
    let expected = two.forward(&xs)?;
    let mask = AttentionMask::none().with_valid_lens(vec![T, 9]);
    for layer in [&one, &again, &one.freeze()?] {
        assert_close(&layer.forward(&xs)?, &expected, 1e-6, "one projection");
        let memory = layer.project_memory(&xs, &xs)?;
        let found = layer.forward_with(AttentionInput::new(&xs).with_memory(&memory).with_mask(&mask))?;
        assert_close(&found, &two.forward_with(AttentionInput::new(&xs).with_mask(&mask))?, 1e-6, "a memory");
        let found = in_calls(layer, &mut AttentionCache::default(), &xs, &[20, 1, 2])?;
        assert_close(&found, &expected, 1e-5, "a cache");
    }
    Ok(())
}
