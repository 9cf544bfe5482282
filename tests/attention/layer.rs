//! Layers against themselves in plain loops, for everything that a config can say.

use crate::layer_kind::LayerKind;
use crate::recipe::Kind::{Bias, BoolMask, LocalWindow, UpperLeft, ValidLens, ValidLensPerQuery, Window};
use crate::registry::{Feature, configs, latent_of};
use crate::seeded::layer;
use crate::statistics;
use crate::*;

crate::on_each_device!(
    custom_attention_function_receives_arguments_of_layer,
    prefix_of_call_relaxes_causal_mask_of_layer,
    dropout_of_layer_applies_in_training_only,
);

test_each_feature_on_each_device!(
    matches_plain_loops:
    layer_with_heads_biases_and_widths_matches_plain_loops => Plain,
    layer_with_gqa_matches_plain_loops => Gqa,
    layer_with_causal_mask_matches_plain_loops => Causal,
    layer_with_window_matches_plain_loops => Window,
    layer_with_softcap_matches_plain_loops => Softcap,
    layer_with_sinks_matches_plain_loops => Sinks,
    layer_with_norms_matches_plain_loops => Norms,
    layer_with_clip_matches_plain_loops => Clip,
    layer_with_alibi_matches_plain_loops => Alibi,
    layer_with_rope_matches_plain_loops => Rope,
    layer_with_gate_matches_plain_loops => Gate,
    layer_with_learned_keys_matches_plain_loops => LearnedKeys,
    layer_with_cross_attention_matches_plain_loops => Cross,
    layer_with_all_options_matches_plain_loops => AllAtOnce,
    latent_attention_matches_plain_loops => Latent,
);

fn dtypes(device: &Device) -> &'static [DType] {
    if device.is_metal() { &[DType::F32] } else { &[DType::F64, DType::F32] }
}

/// Sums of a few dozen products of numbers up to 1, through three matrices; in half precision parameters are rounded
/// too.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        DType::F16 => 0.03,
        _ => 0.25,
    }
}

fn call_masks([b, t_q, t_kv]: [usize; 3], h: usize) -> [Vec<Mask>; 5] {
    let dims = Dims { b, h, h_kv: h, t_q, t_kv, d: 1, d_v: 1 };
    let kinds = [
        vec![],
        vec![vec![ValidLens]],
        vec![vec![ValidLensPerQuery]],
        vec![vec![UpperLeft, Window]],
        vec![vec![BoolMask(MaskShape::Whole)], vec![Bias(MaskShape::Head), LocalWindow]],
    ];
    // The numbers are not exact in f32, so that a conversion to f32 shows in f64.
    kinds.map(|kinds| Recipe { seed: 23, ..Recipe::plain(dims, kinds, DType::F64) }.case().masks)
}

fn run(kind: &LayerKind, sizes: [usize; 3], masks: Vec<Mask>, (dtype, device): (DType, &Device)) -> Result<()> {
    let [b, t_q, t_kv] = sizes;
    let h = kind.num_heads();
    let [.., out_dim] = kind.widths();
    let parameters = kind.parameters(3);
    let by_hand = kind.input(sizes, masks);
    let layer = kind.of_parameters(&parameters, dtype, device)?;
    let expected = kind.by_hand(&parameters, &by_hand);
    let [xs, keys, vs] = [&by_hand.queries, &by_hand.keys, &by_hand.values].map(|x| x.tensor(dtype, device));
    let xs = xs?;
    let keys = keys?;
    let vs = vs?;
    let mask = attention_mask(&by_hand.mask, device, |_, _, bias| bias.tensor(dtype, device))?;
    let shared = (by_hand.keys.width(), &by_hand.keys.data) == (by_hand.values.width(), &by_hand.values.data);
    let vs = if shared { keys.clone() } else { vs };
    let is_self = kind.is_self(t_q, t_kv);
    let is_plain = by_hand.mask.is_empty();
    let call = || {
        let own = AttentionInput::new(&xs).with_mask(&mask);
        if is_self { own } else { own.with_key_value(&keys, &vs) }
    };
    let output = layer.run_with_weights(call())?;
    let ys = layer.run(call())?;
    let largest = expected.ys.iter().fold(1.0, |most: f64, y| most.max(y.abs()));
    let most = |_| tolerance(dtype) * largest;
    for (what, found) in [
        ("the output", &ys),
        ("that beside weights", &output.output),
        ("the reference path", &layer.run(call().with_backend(Backend::Reference))?),
    ] {
        compare(what, found, (&[b, t_q, out_dim], dtype), &expected.ys, most)?;
    }
    compare("weights", &output.weights, (&[b, h, t_q, t_kv + kind.more_keys()], dtype), &expected.weights, most)?;
    // Two dimensions are one sequence. A memory has other strides, so the kernel may add in another order.
    for rank in if b == 1 { 2..=3 } else { 3..=3 } {
        let of_rank = |x: &Tensor| if rank == 2 { x.squeeze(0) } else { Ok(x.clone()) };
        let xs = of_rank(&xs)?;
        let keys = of_rank(&keys)?;
        let vs = of_rank(&vs)?;
        let own = || AttentionInput::new(&xs).with_mask(&mask);
        let memory = layer.as_multi_head().map(|layer| layer.project_memory(&keys, &vs)).transpose()?;
        let plain = if is_self { own() } else { own().with_key_value(&keys, &vs) };
        for input in std::iter::once(plain).chain(memory.as_ref().map(|memory| own().with_memory(memory))) {
            let found = layer.run_with_weights(input)?;
            assert_close(&found.output, &of_rank(&ys)?, most(0) / 10.0, "other dimensions, or a memory");
            assert_close(&found.weights, &of_rank(&output.weights)?, tolerance(dtype) / 10.0, "weights of those");
        }
    }
    if is_plain {
        // A residual is added as its caller would, by variables too.
        let residual = ys.ones_like()?;
        let mut variable = |_: &str, tensor: Tensor| Ok(Var::from_tensor(&tensor)?.into_inner());
        for each in [&layer, &kind.of_leaves(&parameters, dtype, device, &mut variable)?] {
            let added = each.run(call().with_residual(&residual))?;
            assert_close(&added, &(&ys + &residual)?, 2.0 * most(0), "a residual");
        }
    }
    if is_plain && b * t_q * t_kv > 0 && [DType::F32, DType::F64].contains(&dtype) {
        let (beside, found) = layer.run_with_statistics(call(), &StatisticsOptions::default())?;
        assert_close(&beside, &ys, most(0), "beside statistics");
        statistics::assert_of(&found, &output.weights, 5.0 * tolerance(dtype), "statistics")?;
    }
    if is_self && is_plain {
        for own in [layer.run(AttentionInput::new(&xs))?, layer.forward_t(&xs, false)?] {
            assert_close(&own, &ys, 0.0, "no mask is a mask of nothing");
        }
    }
    Ok(())
}

fn matches_plain_loops(feature: Feature, device: &Device) -> Result<()> {
    for (m, (name, kind)) in feature.configs().into_iter().enumerate() {
        let mut calls = 0;
        for dtype in [DType::F16, DType::BF16].into_iter().filter(|_| device.is_cpu()) {
            run(&kind, [2, 4, 4], vec![], (dtype, device))
                .map_err(|error| error.context(format!("{name}, {dtype:?}")))?;
        }
        let square = [[2, 4, 4], [1, 1, 1], [1, 4, 4], [0, 3, 3], [2, 0, 0], [0, 0, 0]];
        let cross = [[1, 3, 6], [2, 5, 3], [2, 0, 3], [2, 3, 0]];
        let cross = cross.into_iter().filter(|_| matches!(kind, LayerKind::MultiHead(_)));
        for (s, sizes) in square.into_iter().chain(cross).enumerate() {
            // Every mask where lengths are the same and where they differ, and none and another for each other size.
            let is_every = [square[0], [1, 3, 6]].contains(&sizes);
            let numbered = call_masks(sizes, kind.num_heads()).into_iter().enumerate();
            for (n, masks) in numbered.filter(|(n, _)| is_every || *n == 0 || *n == 1 + (m + s) % 4) {
                for &dtype in dtypes(device) {
                    match run(&kind, sizes, masks.clone(), (dtype, device)) {
                        Ok(()) => calls += 1,
                        // The call's mask counts from another position than the layer's, and ALiBi needs one position.
                        Err(error) if feature == Feature::Alibi && error.to_string().contains("ALiBi counts") => {}
                        Err(error) => bail!("{name}, sizes {sizes:?}, mask {n}, {dtype:?}: {error}"),
                    }
                }
            }
        }
        assert!(calls >= 12 * dtypes(device).len(), "{name}: {calls} calls");
    }
    Ok(())
}

/// Draws empty batches and sequences too.
#[test]
fn latent_attention_with_random_configs_matches_plain_loops() -> Result<()> {
    let random = &mut Random::new(1);
    for case in 0..90 {
        let causal = random.chance(0.8);
        let embed_dim = 1 + random.up_to(11);
        let kind = LayerKind::Latent(latent_of(embed_dim, random).with_causal(causal));
        let b = random.up_to(3);
        let t = random.up_to(9);
        let lens = Lens::PerSequence((0..b).map(|_| random.up_to(t)).collect());
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let masks = vec![Mask::of(Part::ValidLens(lens.clone()))];
            let outcome = run(&kind, [b, t, t], masks, (dtype, &CPU));
            outcome.map_err(|error| error.context(format!("case {case} in {dtype:?}: {kind:?}")))?;
        }
    }
    Ok(())
}

/// Checks too that fields that are absent have their defaults.
#[test]
fn layer_configs_round_trip_through_json() {
    let relative = Config::new(24, 3).with_relative_bias(RelativeBiasConfig::new(false).with_num_buckets(6));
    for (_, kind) in configs().into_iter().chain([("relative bias", LayerKind::MultiHead(relative))]) {
        match kind {
            LayerKind::MultiHead(cfg) => survives_json(&cfg),
            LayerKind::Latent(cfg) => survives_json(&cfg.with_scale(0.5).with_causal(false)),
        };
    }
    let short =
        r#"{"embed_dim": 24, "num_heads": 3, "alibi": {"bias_max": 4}, "relative_bias": {"bidirectional": true}}"#;
    let expected = Config::new(24, 3).with_alibi(AlibiConfig::BiasMax(4.0));
    let expected = expected.with_relative_bias(RelativeBiasConfig::new(true));
    assert_eq!(serde_json::from_str::<Config>(short).expect("the rest has defaults"), expected);
    let least = r#"{"embed_dim": 64, "num_heads": 4, "kv_lora_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64,
        "value_head_dim": 128, "rope": {"base": 10000.0, "style": "interleaved"}}"#;
    assert_eq!(serde_json::from_str::<LatentConfig>(least).expect("the rest has defaults"), LatentConfig::new(64, 4));
}

fn custom_attention_function_receives_arguments_of_layer(device: &Device) -> Result<()> {
    let cfg =
        Config::new(16, 4).with_num_kv_heads(2).with_causal(true).with_rope(RopeConfig::new(100.0)).with_softcap(2.0);
    let layer = layer(&cfg, DType::F32, device)?;
    let xs = Tensor::randn(0f32, 1., (2, 5, 16), device)?;
    let window = AttentionMask::none().with_window(2);
    let input = || AttentionInput::new(&xs).with_mask(&window).with_residual(&xs);
    let same = layer.forward_with(input().with_function(&scaled_dot_product_attention))?;
    assert_close(&same, &layer.forward_with(input())?, 0.0, "attention itself");
    let twice = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
        scaled_dot_product_attention(q, k, v, mask, options)? * 2.0
    };
    let doubled = layer.forward_with(AttentionInput::new(&xs).with_function(&twice))?;
    assert_close(&doubled, &(layer.forward(&xs)? * 2.0)?, 1e-6, "twice the context is twice the output");
    Ok(())
}

fn prefix_of_call_relaxes_causal_mask_of_layer(device: &Device) -> Result<()> {
    let layer = layer(&Config::new(12, 4).with_causal(true).with_window(3), DType::F32, device)?;
    let xs = Tensor::randn(0f32, 1., (1, 4, 12), device)?;
    for mask in [AttentionMask::none(), AttentionMask::causal()] {
        let mask = mask.with_prefix(vec![2]);
        let weights = layer.forward_with_weights(AttentionInput::new(&xs).with_mask(&mask))?.weights;
        let row = |row: &[f64]| row.iter().map(|&weight| if weight > 0.0 { '1' } else { '.' }).collect::<String>();
        let seen: Vec<_> = values(&weights)[..16].chunks(4).map(row).collect();
        assert_eq!(seen, ["11..", "11..", "111.", ".111"]);
    }
    Ok(())
}

fn dropout_of_layer_applies_in_training_only(device: &Device) -> Result<()> {
    let latent = LatentConfig::new(12, 4).with_kv_lora_rank(5).with_causal(false);
    let kinds = |p| {
        [LayerKind::MultiHead(Config::new(12, 4).with_dropout(p)), LayerKind::Latent(latent.clone().with_dropout(p))]
    };
    for (with, without) in kinds(0.5).into_iter().zip(kinds(0.0)) {
        let [with, without] = [with, without].map(|kind| kind.layer(TorchSeed::new(3).var_builder(DType::F32, device)));
        let with = with?;
        let without = without?;
        let xs = Tensor::randn(0f32, 1., (2, 20, 12), device)?;
        let plain = without.run_with_weights(AttentionInput::new(&xs))?;
        let same = [without.forward_t(&xs, true)?, with.forward_t(&xs, false)?];
        let expected = without.run(AttentionInput::new(&xs))?;
        for ys in [with.run(AttentionInput::new(&xs))?].into_iter().chain(same) {
            assert_close(&ys, &expected, 0.0, "p = 0, or no training");
        }
        assert!(max_error(&with.forward_t(&xs, true)?, &expected) > 1e-3, "in training");
        let trained = with.run_with_weights(AttentionInput::new(&xs).with_train(true))?;
        let dropped = values(&trained.weights);
        let weights = values(&plain.weights);
        let kept = dropped.iter().filter(|&&weight| weight != 0.0).count();
        assert!((1400..1800).contains(&kept), "{kept} of 3200 are kept, expected about 1600");
        for (after, before) in dropped.into_iter().zip(weights) {
            assert!(after == 0.0 || (after - 2.0 * before).abs() < 1e-6, "{before} became {after}");
        }
    }
    Ok(())
}
