//! Layers that read keys and values of an earlier one, in its cache and in a memory.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AlibiConfig, AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, GateActivation,
    GatePlace, GateScope, KvSource, MultiHeadAttention, MultiHeadAttentionConfig as Config, OutputGate,
    ProjectionModules, QkNorm, QkNormKind, QkNormScope, RelativeBias, RelativeBiasConfig, RopeConfig,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text};

const CPU: Device = Device::Cpu;
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

fn xs(b: usize, t: usize, first: f32) -> Result<Tensor> {
    let data: Vec<f32> = (0..b * t * 8).map(|n| (n as f32 * 0.7 + first).sin()).collect();
    Tensor::from_vec(data, (b, t, 8), &CPU)
}

fn part(xs: &Tensor, start: usize, t: usize) -> Result<Tensor> {
    xs.narrow(1, start, t)?.force_contiguous()
}

/// What the later layer gives in calls of so many tokens, after each of the earlier one with the same.
fn in_calls(
    layers: &[MultiHeadAttention; 2],
    inputs: [&Tensor; 2],
    cfg: &AttentionCacheConfig,
    pieces: &[usize],
    backend: Backend,
) -> Result<Tensor> {
    let mut cache = AttentionCache::new(cfg)?;
    let (mut start, mut outputs) = (0, Vec::new());
    for &t in pieces {
        let [earlier, later] = inputs.map(|xs| part(xs, start, t));
        layers[0].forward_with(AttentionInput::new(&earlier?).with_cache(&mut cache))?;
        let later = later?;
        let input = || AttentionInput::new(&later).with_shared_cache(&cache).with_backend(backend);
        outputs.push(layers[1].forward_with(input())?);
        let weighed = layers[1].forward_with_weights(input())?;
        assert_close(&weighed.output, outputs.last().expect("one"), 1e-2, "beside the weights");
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
            let (earlier, later) = (xs(2, T, 0.0)?.to_dtype(dtype)?, xs(2, T, 9.0)?.to_dtype(dtype)?);
            let memory = layers[0].project_memory(&earlier, &earlier)?;
            let expected = layers[1].forward_with(AttentionInput::new(&later).with_memory(&memory))?;
            // The memory is also the earlier layer's own.
            let own = layers[0].forward_with(AttentionInput::new(&earlier).with_memory(&memory))?;
            assert_close(&own, &layers[0].forward(&earlier)?, tolerance, "the earlier layer");
            let sliding = AttentionCacheConfig::for_layer(&cfg).with_shared(true);
            for pieces in [&[T][..], &[19, 1, 1, 1, 1], &[2, 5, 9, 1, 6], &[1; T]] {
                for backend in [Backend::Auto, Backend::Reference] {
                    let found = in_calls(&layers, [&earlier, &later], &sliding, pieces, backend)?;
                    assert_close(&found, &expected, tolerance, &format!("{cfg:?}, {dtype:?}, {pieces:?}, {backend:?}"));
                }
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
    let (earlier, later) = (xs(2, 6, 0.0)?, xs(2, 6, 9.0)?);
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
    let (earlier, later) = (xs(2, T, 0.0)?, xs(2, T, 9.0)?);
    let plain = in_calls(&layers, [&earlier, &later], &AttentionCacheConfig::new(), &[T], Backend::Auto)?;
    let q8 = AttentionCacheConfig::new().with_q8();
    let found = in_calls(&layers, [&earlier, &later], &q8, &[20, 1, 2], Backend::Auto)?;
    assert_close(&found, &plain, 2e-2, "8 bits");

    // The second sequence by itself, and with padding before it or behind it.
    let alone = in_calls(
        &layers,
        [&part(&earlier.narrow(0, 1, 1)?, 0, 9)?, &part(&later.narrow(0, 1, 1)?, 0, 9)?],
        &AttentionCacheConfig::new(),
        &[8, 1],
        Backend::Auto,
    )?;
    let mut cache = AttentionCache::default();
    let lens = [12, 8];
    let (first, second) = (part(&earlier, 0, 12)?, part(&later, 0, 12)?);
    layers[0].forward_with(AttentionInput::new(&first).with_cache(&mut cache).with_valid_lens(&lens))?;
    let ys = layers[1].forward_with(AttentionInput::new(&second).with_shared_cache(&cache).with_valid_lens(&lens))?;
    assert_close(&part(&ys.narrow(0, 1, 1)?, 0, 8)?, &part(&alone, 0, 8)?, 1e-5, "padding behind");
    // The next token of both sequences; that of the second stands at 8.
    let starts = [0, 4];
    let shifted =
        |xs: &Tensor| Tensor::cat(&[part(xs, 0, 5)?, part(xs, 4, 4)?], 1)?.narrow(1, 4, 5)?.force_contiguous();
    let (first, second) = (shifted(&earlier)?, shifted(&later)?);
    layers[0].forward_with(AttentionInput::new(&first).with_cache(&mut cache).with_starts(&starts))?;
    let ys = layers[1].forward_with(AttentionInput::new(&second).with_shared_cache(&cache).with_starts(&starts))?;
    let token = [&earlier, &later].map(|xs| part(&xs.narrow(0, 1, 1)?, 7, 1));
    let [first, second] = token;
    let mut own = AttentionCache::default();
    let all = part(&earlier.narrow(0, 1, 1)?, 0, 8)?;
    layers[0].forward_with(AttentionInput::new(&all).with_cache(&mut own))?;
    layers[0].forward_with(AttentionInput::new(&first?).with_cache(&mut own))?;
    let expected = layers[1].forward_with(AttentionInput::new(&second?).with_shared_cache(&own))?;
    assert_close(&ys.narrow(0, 1, 1)?.narrow(1, 4, 1)?, &expected, 1e-5, "padding before");
    Ok(())
}

/// A sliding cache that is not shared drops what the first queries of a long call see.
#[test]
fn long_calls_take_a_shared_cache() -> Result<()> {
    let cfg = normed().with_window(5);
    let layers = layers(&cfg, DType::F32)?;
    let (earlier, later) = (xs(1, T, 0.0)?, xs(1, T, 9.0)?);
    let call = |cfg: &AttentionCacheConfig, pieces: &[usize]| {
        in_calls(&layers, [&earlier, &later], cfg, pieces, Backend::Auto)
    };
    let own = AttentionCacheConfig::for_layer(&cfg);
    let error = error_text(call(&own, &[T]));
    assert!(error.contains("expected a shorter window in the mask, or a longer one in the cache"), "{error}");
    let expected = call(&own.clone().with_shared(true), &[T])?;
    assert_close(&call(&own, &[5, 5, 1, 5, 5, 2])?, &expected, 1e-5, "calls of no more than a window");

    let mut cache = AttentionCache::new(&own.with_shared(true))?;
    layers[0].forward_with(AttentionInput::new(&earlier).with_cache(&mut cache))?;
    let after_prompt = cache.capacity();
    for n in 0..40 {
        let token = xs(1, 1, n as f32)?;
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
    let weights: std::collections::HashMap<_, _> =
        later.state_dict(candle_attention::WeightLayout::Canonical)?.into_iter().collect();
    let linear = |name: &str| candle_nn::Linear::new(weights[&format!("{name}.weight")].clone(), None);
    let modules = ProjectionModules::of_query(linear("q_proj")).with_output(linear("o_proj"));
    let vb = VarBuilder::zeros(DType::F32, &CPU);
    let of_modules = MultiHeadAttention::from_modules(later.config(), modules, vb)?;
    let mut cache = AttentionCache::default();
    let xs = xs(2, T, 0.0)?;
    earlier.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    let call = |layer: &MultiHeadAttention| layer.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache));
    assert_close(&call(&of_modules)?, &call(&later)?, 1e-5, "modules");
    Ok(())
}

/// The earlier layer's cache is written to before the gradients are computed.
#[test]
fn gradients_do_not_see_later_calls() -> Result<()> {
    let vars = VarMap::new();
    let cfg = base().with_kv_source(KvSource::EarlierLayer);
    let later = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    let earlier = MultiHeadAttention::new(&base(), TorchSeed::new(3).var_builder(DType::F32, &CPU))?;
    let xs = xs(2, 7, 0.0)?;
    let mut gradients = Vec::new();
    for goes_on in [false, true] {
        let mut cache = AttentionCache::default();
        earlier.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
        let loss = later.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache))?.sqr()?.sum_all()?;
        if goes_on {
            cache.reset();
            earlier.forward_with(AttentionInput::new(&(&xs * 3.0)?).with_cache(&mut cache))?;
        }
        gradients.push(loss.backward()?);
    }
    for (name, var) in vars.data().lock().expect("one thread").iter() {
        let of = |n: usize| gradients[n].get(var).cloned().expect("a gradient");
        assert_close(&of(1), &of(0), 0.0, name);
    }
    Ok(())
}

#[test]
fn keys_are_values_before_norms_and_positions() -> Result<()> {
    let cfg = normed().with_value_norm(1e-6).with_qkv_bias(true);
    let one = MultiHeadAttention::new(
        &cfg.clone().with_kv_source(KvSource::KeysAsValues),
        TorchSeed::new(3).var_builder(DType::F32, &CPU),
    )?;
    let mut weights: std::collections::HashMap<_, _> =
        one.state_dict(candle_attention::WeightLayout::Canonical)?.into_iter().collect();
    assert!(weights.keys().all(|name| !name.starts_with("v_proj")), "{:?}", weights.keys());
    let builder = |weights: &std::collections::HashMap<String, Tensor>| {
        VarBuilder::from_tensors(weights.clone(), DType::F32, &CPU)
    };
    let again = MultiHeadAttention::new(one.config(), builder(&weights))?;
    for name in ["weight", "bias"] {
        weights.insert(format!("v_proj.{name}"), weights[&format!("k_proj.{name}")].clone());
    }
    let two = MultiHeadAttention::new(&cfg, builder(&weights))?;
    let xs = xs(2, T, 0.0)?;
    let expected = two.forward(&xs)?;
    let mask = AttentionMask::none().with_valid_lens(vec![T, 9]);
    for layer in [&one, &again, &one.freeze()?] {
        assert_close(&layer.forward(&xs)?, &expected, 1e-6, "one projection");
        let memory = layer.project_memory(&xs, &xs)?;
        let found = layer.forward_with(AttentionInput::new(&xs).with_memory(&memory).with_mask(&mask))?;
        assert_close(&found, &two.forward_with(AttentionInput::new(&xs).with_mask(&mask))?, 1e-6, "a memory");
        let mut cache = AttentionCache::default();
        let calls = [(0, 20), (20, 1), (21, 2)]
            .map(|(start, t)| layer.forward_with(AttentionInput::new(&part(&xs, start, t)?).with_cache(&mut cache)));
        let found = Tensor::cat(&calls.into_iter().collect::<Result<Vec<_>>>()?, 1)?;
        assert_close(&found, &expected, 1e-5, "a cache");
    }
    Ok(())
}
