//! The property over layers, caches, dtypes and masks.

use crate::program::{EMBED_DIM, Program, Setup, cases, difference, tolerance};
use crate::*;

fn base() -> Config {
    Config::new(EMBED_DIM, 4).with_causal(true)
}

fn grouped() -> Config {
    base().with_num_kv_heads(2)
}

fn growing() -> AttentionCacheConfig {
    AttentionCacheConfig::new().with_capacity(4)
}

fn sliding(window: usize) -> AttentionCacheConfig {
    AttentionCacheConfig::new().with_window(window)
}

fn yarn(mscale: Option<f64>) -> RopeScaling {
    RopeScaling::Yarn {
        factor: 4.0,
        original_context: 8,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale,
        mscale_all_dim: mscale.map(|scale| scale + 0.2),
        truncate: true,
    }
}

pub fn assert_holds(setup: Setup, steps: usize, seeds: u64, most: f64, what: &str) {
    for seed in 0..cases(seeds) {
        let found = Program::run(setup, steps, seed).unwrap_or_else(|error| panic!("{what}, seed {seed}: {error}"));
        assert!(found <= most, "{what}, seed {seed}: off by {found:e}");
    }
}

/// Returns the setup of a program for a layer with or without a window, and its cache.
pub fn of<'a>(
    layer: &'a dyn Layer,
    (seen, cache): (Option<usize>, &'a AttentionCacheConfig),
    mask: &'a AttentionMask,
    device: &'a Device,
) -> Setup<'a> {
    let back = cache.window().zip(seen).map(|(held, seen)| held - seen);
    let dtype = DType::F32;
    Setup { layer, earlier: None, cache, dtype, device, mask, back, gives_positions: false, draws_masks: false }
}

/// Layers, and the caches that they are called with.
type Layers = Vec<(Config, AttentionCacheConfig)>;

fn wide() -> Config {
    grouped().with_head_dim(8)
}

fn fixed() -> AttentionCacheConfig {
    AttentionCacheConfig::new().with_capacity(400).with_growth(false)
}

fn scaled_rope(scaling: RopeScaling) -> RopeConfig {
    RopeConfig::new(100.0).with_scaling(scaling)
}

/// Checks that sequences continued through a cache have the outputs of one call.
fn check_layers(layers: Layers, gives_positions: bool, device: &Device) -> Result<()> {
    let none = AttentionMask::none();
    for (cfg, cache) in layers {
        let layer = layer_on(&cfg, DType::F32, device)?;
        let setup = Setup { gives_positions, ..of(&layer, (cfg.window(), &cache), &none, device) };
        assert_holds(setup, 12, 12, tolerance(DType::F32, &cache), &format!("{cfg:?}, {cache:?}"));
    }
    Ok(())
}

/// Includes layers that are not causal, which attend to every key that is stored.
fn layers_with_cache_match_one_call(device: &Device) -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    let layout = GateLayout::FusedWithQuery;
    let gate = OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::Elementwise, layout };
    let layers = vec![
        (base(), growing()),
        (base(), growing().with_capacity(0)),
        (base(), fixed()),
        (base(), AttentionCacheConfig::default()),
        (base().with_bias(true).with_qk_norm(norm), growing()),
        (base().with_output_gate(gate), growing()),
        (base().with_attention_temperature(AttentionTemperature { beta: 0.5, interval: 3, first: 1 }), growing()),
        (base().with_value_norm(1e-5), growing()),
        (base().with_chunk(3), growing()),
        (base().with_clip_qkv(0.4), growing()),
        (Config::new(EMBED_DIM, 3), growing()),
        (Config::new(EMBED_DIM, 4).with_window(3), growing()),
    ];
    check_layers(layers, false, device)
}

fn gqa_with_cache_matches_one_call(device: &Device) -> Result<()> {
    let layers = vec![
        (grouped(), growing()),
        (base().with_num_kv_heads(1).with_head_dim(5).with_value_head_dim(7), growing()),
        (grouped(), growing().with_q8()),
        (grouped(), growing().with_e4m3()),
    ];
    check_layers(layers, false, device)
}

fn softcap_with_cache_matches_one_call(device: &Device) -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    let layers = vec![
        (base().with_bias(true).with_qk_norm(norm).with_softcap(2.0), growing()),
        (wide().with_rope(scaled_rope(RopeScaling::None)).with_softcap(2.0), growing().with_q8()),
    ];
    check_layers(layers, false, device)
}

fn alibi_with_cache_matches_one_call(device: &Device) -> Result<()> {
    let layers = vec![
        (base().with_alibi(AlibiConfig::Standard), growing()),
        (Config::new(EMBED_DIM, 4).with_alibi(AlibiConfig::Standard), growing()),
        (base().with_alibi(AlibiConfig::Standard).with_window(4), sliding(4)),
        (base().with_alibi(AlibiConfig::Standard).with_value_head_dim(5), growing().with_q8()),
    ];
    check_layers(layers, false, device)?;
    let of_falcon = vec![
        (base().with_alibi(AlibiConfig::Falcon), growing()),
        (base().with_alibi(AlibiConfig::Falcon).with_window(3), sliding(5)),
    ];
    check_layers(of_falcon, true, device)
}

fn sinks_with_cache_match_one_call(device: &Device) -> Result<()> {
    let layers = vec![
        (grouped().with_sinks(true).with_value_head_dim(3), fixed()),
        (base().with_window(3).with_sinks(true), sliding(3).with_capacity(16)),
        (base().with_sinks(true), fixed().with_q8()),
        (base().with_window(4).with_sinks(true), sliding(4).with_q8()),
    ];
    check_layers(layers, false, device)
}

fn rope_with_cache_matches_one_call(device: &Device) -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    let linear = scaled_rope(RopeScaling::Linear { factor: 3.0 }).with_rotary_dim(4);
    let interleaved = scaled_rope(RopeScaling::None).with_style(RopeStyle::Interleaved);
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 32 };
    let layers = vec![
        (wide().with_rope(linear), growing()),
        (wide().with_rope(interleaved).with_qk_norm(norm), growing()),
        (wide().with_rope(scaled_rope(llama3)).with_window(4), sliding(4)),
        (wide().with_rope(scaled_rope(yarn(None))).with_sinks(true), growing()),
        (wide().with_window(3).with_rope(scaled_rope(RopeScaling::None)), sliding(5)),
        (wide().with_window(3).with_rope(scaled_rope(RopeScaling::None)), sliding(5).with_q8()),
    ];
    check_layers(layers, false, device)?;
    check_layers(vec![(base().with_head_dim(4).with_rope(RopeConfig::new(100.0)), growing())], true, device)
}

fn window_with_cache_matches_one_call(device: &Device) -> Result<()> {
    let layers = vec![
        (base().with_local_window(2, 0), growing()),
        (base().with_window(3), growing()),
        (base().with_window(1), growing()),
        (base().with_window(4), sliding(4)),
        (base().with_window(1), sliding(1)),
        (base().with_window(3), sliding(6)),
        (base().with_window(5), sliding(5).with_capacity(5).with_growth(false)),
        (base().with_window(1), sliding(3).with_capacity(16)),
        (base().with_window(2), AttentionCacheConfig::for_layer(&base().with_window(2))),
    ];
    check_layers(layers, false, device)
}

fn relative_bias_with_cache_matches_one_call(device: &Device) -> Result<()> {
    let buckets = |both| RelativeBiasConfig::new(both).with_num_buckets(8).with_max_distance(9);
    let relative = || base().with_relative_bias(buckets(true));
    let layers = vec![
        (relative(), growing()),
        (base().with_relative_bias(buckets(false)), growing()),
        (relative().with_head_dim(4).with_rope(RopeConfig::new(100.0)), growing().with_q8()),
        (relative().with_window(3), sliding(5)),
    ];
    check_layers(layers, true, device)
}

fn masks_with_cache_count_positions_of_each_sequence(device: &Device) {
    let none = AttentionMask::none();
    for (cfg, cache) in [
        (base(), growing()),
        (Config::new(EMBED_DIM, 2), AttentionCacheConfig::new()),
        (base(), AttentionCacheConfig::new().with_q8()),
        (base().with_window(3), sliding(3)),
        (base().with_window(3), sliding(3).with_q8()),
        (base().with_window(5), sliding(5).with_capacity(5).with_growth(false)),
    ] {
        let layer = layer_on(&cfg, DType::F32, device).expect("the config fits");
        let setup = Setup { draws_masks: true, ..of(&layer, (cfg.window(), &cache), &none, device) };
        assert_holds(setup, 8, 40, tolerance(DType::F32, &cache), &format!("{cfg:?}, {cache:?}"));
    }
}

fn latent_attention_with_cache_matches_one_call(device: &Device) {
    let none = AttentionMask::none();
    let windowed = AttentionMask::causal().with_window(4);
    for seed in 0..cases(14) {
        let random = &mut Random::new(seed);
        let cfg = latent_of(EMBED_DIM, random);
        for (cache, dtype) in [
            (growing(), DType::F32),
            (growing().with_capacity(0), DType::F64),
            (growing().with_capacity(400).with_growth(false), DType::F32),
            (growing().with_dtype(DType::BF16), DType::F32),
            (growing().with_dtype(DType::F64), DType::F32),
            (growing().with_q8(), DType::F32),
            (sliding(6), DType::F64),
            (sliding(4).with_q8(), DType::F32),
        ] {
            if device.is_metal() && [Some(dtype), cache.dtype()].contains(&Some(DType::F64)) {
                continue;
            }
            let layer = latents(cfg.clone(), dtype, device).expect("the config fits");
            let mask = if cache.window().is_some() { &windowed } else { &none };
            let setup = of(&*layer, (Some(4), &cache), mask, device);
            let setup = Setup { dtype, gives_positions: seed % 2 == 0, ..setup };
            // A random layer's scale of the scores can be large, which makes more of what 8 bits lose.
            let most = if cache.q8() { 8e-2 } else { tolerance(dtype, &cache) };
            assert_holds(setup, 12, 2, most, &format!("{cfg:?}, {cache:?}"));
        }
    }
}

crate::on_each_device!(
    layers_with_cache_match_one_call,
    gqa_with_cache_matches_one_call,
    softcap_with_cache_matches_one_call,
    alibi_with_cache_matches_one_call,
    sinks_with_cache_match_one_call,
    rope_with_cache_matches_one_call,
    window_with_cache_matches_one_call,
    relative_bias_with_cache_matches_one_call,
    masks_with_cache_count_positions_of_each_sequence,
    latent_attention_with_cache_matches_one_call,
    long_sequences_with_cache_match_one_call,
);

#[test]
fn cache_of_every_dtype_matches_one_call() -> Result<()> {
    let dtypes = recipe::dtypes(&DEVICE);
    let none = AttentionMask::none();
    for &dtype in dtypes {
        for cfg in [grouped(), base().with_window(3)] {
            let layer = layer_on(&cfg, dtype, &DEVICE)?;
            let kept = dtypes.iter().map(|&kept| AttentionCacheConfig::for_layer(&cfg).with_dtype(kept));
            for cache in kept.chain([AttentionCacheConfig::for_layer(&cfg).with_q8()]) {
                let setup = Setup { dtype, ..of(&layer, (cfg.window(), &cache), &none, &DEVICE) };
                assert_holds(setup, 8, 3, tolerance(dtype, &cache), &format!("{dtype:?}, {cfg:?}, {cache:?}"));
            }
        }
    }
    Ok(())
}

/// Runs sequences that are long enough that the fused kernel splits the keys, that buffers grow many times, and that
/// windows slide often. Long calls attend to latents in one way and short calls in another, so both follow each other.
fn long_sequences_with_cache_match_one_call(device: &Device) -> Result<()> {
    let growing = || AttentionCacheConfig::new().with_capacity(16);
    let latent = LatentConfig::new(EMBED_DIM, 3).with_q_lora_rank(8).with_kv_lora_rank(48).with_nope_head_dim(16);
    let latent = latent.with_rope_head_dim(8).with_value_head_dim(16);
    let rope = RopeConfig::new(50.0).with_scaling(yarn(Some(0.7)));
    for (kind, cache) in [
        (LayerKind::MultiHead(grouped()), growing()),
        (LayerKind::MultiHead(grouped()), growing().with_q8()),
        (LayerKind::MultiHead(grouped().with_sinks(true).with_window(500)), growing().with_q8()),
        (LayerKind::MultiHead(grouped().with_window(100)), sliding(100)),
        (LayerKind::MultiHead(grouped().with_window(600)), sliding(600)),
        (LayerKind::MultiHead(grouped().with_window(600)), sliding(600).with_q8()),
        (LayerKind::Latent(latent.clone()), growing()),
        (LayerKind::Latent(latent.with_rope(rope)), growing()),
    ] {
        let layer = kind.of_parameters(&kind.parameters(3), DType::F32, device)?;
        for (b, prompt, single) in [(1, &[900, 400][..], 40), (2, &[90], 300), (2, &[100, 1, 1, 90, 1, 7], 1)] {
            let pieces = [prompt, &vec![1; single]].concat();
            let xs = wave(b, pieces.iter().sum(), EMBED_DIM, 0.0)?.to_device(&Device::Cpu)?.to_device(device)?;
            let ys = in_calls(&*layer, &mut AttentionCache::new(&cache)?, &xs, &pieces)?;
            let expected = layer.run(AttentionInput::new(&xs).with_backend(Backend::Reference))?;
            let off = difference(&ys, &expected);
            assert!(off <= tolerance(DType::F32, &cache), "{kind:?}, {cache:?}, {pieces:?}: off by {off:e}");
        }
    }
    Ok(())
}
