//! The layer against itself in plain loops, for everything that a config can say.

use candle_attention::GateActivation::{Sigmoid, Softplus};
use candle_attention::QkNormKind::{Layer, LayerNoBias, Rms, RmsNoWeight, RmsPlusOne};
use candle_attention::QkNormScope::{PerHead, PerHeadWeights, Projection};
use candle_attention::{
    AlibiConfig, AttentionInput, AttentionMask, Backend, ContextNorm, GatePlace, GateScope, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, OutputGate, QkNorm, QueryScaling, RelativeBiasConfig, RopeConfig, RopeStyle,
    SdpaOptions, StatisticsOptions, scaled_dot_product_attention,
};
use candle_core::{DType, Device, ModuleT, Result, Tensor, Var};
use candle_nn::VarBuilder;

use crate::array::{Array, Random};
use crate::by_hand::{Input, Numbers, forward, parameters, tensors};
use crate::call::{Outcome, attention_mask, compare};
use crate::common::{assert_close, values};
use crate::oracle::{Alignment, Lens, Mask, Part};
use crate::statistics;

crate::on_each_device!(
    every_config_gives_the_numbers_of_plain_loops,
    one_product_for_all_gives_the_bits_of_three,
    a_function_in_the_place_of_attention_gets_its_arguments,
    a_prefix_of_the_call_lifts_the_layers_own_causal_constraint,
    dropout_happens_in_training_only,
);

/// One config for each thing that a config can say, and some that say several.
pub fn configs() -> Vec<(&'static str, Config)> {
    let (plain, grouped) = (|| Config::new(12, 4), || Config::new(12, 4).with_num_kv_heads(2));
    let norm = |kind, scope| plain().with_causal(true).with_qk_norm(QkNorm { kind, scope, eps: 1e-5 });
    let of_context = |kind| ContextNorm { kind, eps: 1e-5 };
    let gate = |activation, scope, place| OutputGate { activation, scope, place };
    let (own, biased) = (GatePlace::Own { bias: false }, GatePlace::Own { bias: true });
    let scaled = |first| QueryScaling { beta: 0.7, interval: 2, first };
    let interleaved = || RopeConfig::new(100.0).with_style(RopeStyle::Interleaved).with_rotary_dim(4);
    let slopes = AlibiConfig::Slopes(vec![0.5, 0.0, -0.25, 2.0]);
    let all = Config::new(10, 6).with_num_kv_heads(3).with_head_dim(4).with_value_head_dim(3).with_out_dim(11);
    let all = all.with_bias(true).with_causal(true).with_window(3).with_softcap(2.0).with_scale(0.8).with_sinks(true);
    let all = all.with_qk_norm(QkNorm { kind: Rms, scope: PerHead, eps: 1e-6 });
    vec![
        ("plain", plain()),
        ("one head", Config::new(5, 1)),
        ("grouped", grouped()),
        ("one key head", plain().with_num_kv_heads(1)),
        ("biases", plain().with_bias(true)),
        ("query bias", plain().with_q_bias(true)),
        ("key bias", plain().with_k_bias(true)),
        ("value bias", plain().with_v_bias(true)),
        ("out bias", plain().with_out_bias(true)),
        ("no out projection", grouped().with_out_proj(false).with_qkv_bias(true)),
        ("head_dim", grouped().with_head_dim(5)),
        ("value_head_dim", grouped().with_value_head_dim(7)),
        ("value_head_dim without out projection", plain().with_value_head_dim(2).with_out_proj(false)),
        ("out_dim", plain().with_out_dim(8).with_bias(true)),
        ("causal", plain().with_causal(true)),
        ("window", plain().with_window(2)),
        ("causal window", grouped().with_causal(true).with_window(2)),
        ("softcap", plain().with_softcap(0.7)),
        ("scale", plain().with_scale(-1.3)),
        ("sinks", grouped().with_sinks(true).with_causal(true)),
        ("rms norm of heads", norm(Rms, PerHead)),
        ("rms norm of projections", norm(Rms, Projection).with_num_kv_heads(2)),
        ("layer norm of heads", norm(Layer, PerHead).with_num_kv_heads(2)),
        ("layer norm of projections", norm(Layer, Projection)),
        ("norm of heads, 1 + weight", norm(RmsPlusOne, PerHead)),
        ("norm of projections, 1 + weight", norm(RmsPlusOne, Projection)),
        ("layer norm without bias", norm(LayerNoBias, PerHead)),
        ("a layer norm for each head", norm(LayerNoBias, PerHeadWeights).with_num_kv_heads(2)),
        ("a biased layer norm for each head", norm(Layer, PerHeadWeights).with_num_kv_heads(1)),
        ("norm without a weight", norm(RmsNoWeight, PerHead)),
        ("norm of projections without a weight", norm(RmsNoWeight, Projection)),
        ("norm of values", grouped().with_value_head_dim(5).with_value_norm(1e-5).with_v_bias(true)),
        ("norm of the context", grouped().with_value_head_dim(5).with_context_norm(of_context(Rms))),
        ("clip", plain().with_bias(true).with_clip_qkv(0.4)),
        ("clip after a norm", norm(Rms, Projection).with_clip_qkv(0.3)),
        ("clip before a norm", norm(Rms, PerHead).with_clip_qkv(0.3)),
        ("clip and a learned key", plain().with_bias_kv(true).with_clip_qkv(0.3)),
        ("band", grouped().with_band(1, 2)),
        ("causal band", plain().with_causal(true).with_band(2, 9).with_window(2)),
        ("chunk", grouped().with_chunk(2)),
        ("causal chunk", plain().with_causal(true).with_chunk(3)),
        ("alibi", Config::new(12, 6).with_causal(true).with_alibi(AlibiConfig::Standard)),
        ("alibi on both sides", Config::new(12, 3).with_alibi(AlibiConfig::BiasMax(3.0))),
        ("alibi in a window", grouped().with_alibi(slopes).with_window(2)),
        ("alibi of Falcon", Config::new(12, 6).with_causal(true).with_alibi(AlibiConfig::Falcon)),
        ("alibi of Falcon, scaled", grouped().with_alibi(AlibiConfig::Falcon).with_scale(0.9).with_softcap(2.0)),
        ("rope", grouped().with_head_dim(6).with_causal(true).with_rope(RopeConfig::new(10_000.0))),
        ("rope of pairs", plain().with_head_dim(6).with_rope(interleaved())),
        ("rope before norms", norm(Rms, PerHead).with_head_dim(4).with_rope(interleaved()).with_norm_after_rope(true)),
        ("rope after norms", norm(Rms, PerHead).with_head_dim(4).with_rope(interleaved())),
        ("scaled queries", grouped().with_causal(true).with_query_scaling(scaled(0))),
        ("rope and scaled queries", plain().with_head_dim(6).with_rope(interleaved()).with_query_scaling(scaled(1))),
        ("gate", grouped().with_output_gate(gate(Sigmoid, GateScope::PerEntry, own))),
        ("gate of heads", plain().with_value_head_dim(5).with_output_gate(gate(Softplus, GateScope::PerHead, biased))),
        (
            "layer norm of a gated context",
            plain().with_context_norm(of_context(Layer)).with_output_gate(gate(Sigmoid, GateScope::PerEntry, biased)),
        ),
        ("gate beside the query", {
            let gate = gate(Sigmoid, GateScope::PerEntry, GatePlace::Query);
            grouped().with_value_head_dim(5).with_bias(true).with_output_gate(gate)
        }),
        ("gate of heads beside the query", {
            plain().with_out_proj(false).with_output_gate(gate(Softplus, GateScope::PerHead, GatePlace::Query))
        }),
        ("gate, cross", {
            let gate = gate(Softplus, GateScope::PerEntry, own);
            plain().with_key_size(7).with_value_size(5).with_output_gate(gate)
        }),
        ("learned key", grouped().with_bias_kv(true)),
        ("key of zeros", grouped().with_add_zero_attn(true).with_bias(true).with_softcap(3.0)),
        ("learned key and one of zeros", plain().with_bias_kv(true).with_add_zero_attn(true)),
        ("learned key, causal", plain().with_bias_kv(true).with_causal(true).with_value_head_dim(5)),
        ("cross", plain().with_key_size(7).with_value_size(5).with_bias(true)),
        ("cross with keys' width", grouped().with_key_size(7)),
        ("cross with values' width", plain().with_value_size(9).with_bias_kv(true)),
        ("all at once", all.with_rope(RopeConfig::new(5_000.0).with_rotary_dim(2))),
    ]
}

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

pub fn layer(cfg: &Config, dtype: DType, device: &Device) -> Result<MultiHeadAttention> {
    let parameters = tensors(&parameters(cfg, 3), dtype, device)?;
    MultiHeadAttention::new(cfg, VarBuilder::from_tensors(parameters, dtype, device))
}

/// The same parameters as variables.
fn variables(cfg: &Config, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let variable = |(name, tensor): (String, Tensor)| Ok((name, Var::from_tensor(&tensor)?.into_inner()));
    let variables = tensors(&parameters(cfg, 3), dtype, device)?.into_iter().map(variable);
    Ok(VarBuilder::from_tensors(variables.collect::<Result<_>>()?, dtype, device))
}

/// Self-attention where keys and values have the queries' width and length, cross-attention elsewhere: to one sequence
/// of keys and values if there are more of them than queries.
pub fn input(cfg: &Config, [b, t_q, t_kv]: [usize; 3], mask: Vec<Mask>) -> Input {
    let mut random = Random::new(17);
    let queries = Numbers::random(&[b, t_q, cfg.embed_dim()], &mut random);
    if is_self(cfg, t_q, t_kv) {
        return Input { keys: queries.clone(), values: queries.clone(), queries, mask };
    }
    let keys = Numbers::random(&[b, t_kv, cfg.key_size()], &mut random);
    let values = if t_kv > t_q && cfg.key_size() == cfg.value_size() {
        keys.clone()
    } else {
        Numbers::random(&[b, t_kv, cfg.value_size()], &mut random)
    };
    Input { queries, keys, values, mask }
}

pub fn is_self(cfg: &Config, t_q: usize, t_kv: usize) -> bool {
    t_q == t_kv && [cfg.key_size(), cfg.value_size()] == [cfg.embed_dim(); 2]
}

fn call_masks([b, t_q, t_kv]: [usize; 3], h: usize) -> Vec<Vec<Mask>> {
    let mut random = Random::new(23);
    let free = |parts| Mask { alignment: Alignment::Free, parts };
    let lens = Lens::PerSequence((0..b).map(|n| t_kv.saturating_sub(n)).collect());
    let table = Lens::PerQuery((0..b).map(|b| (0..t_q).map(|i| (b + i) % (t_kv + 1)).collect()).collect());
    let keep = Array::new(&[b, h, t_q, t_kv]).filled(|| f64::from(u8::from(random.chance(0.6))));
    // Numbers that f32 cannot hold, so that a detour through it shows in f64.
    let bias = Array::new(&[h, t_q, t_kv]).filled(|| random.between(-1.0, 1.0));
    vec![
        vec![],
        vec![free(vec![Part::ValidLens(lens)])],
        vec![free(vec![Part::ValidLens(table)])],
        vec![Mask { alignment: Alignment::UpperLeft, parts: vec![Part::Window(2)] }],
        vec![free(vec![Part::Keep(keep)]), free(vec![Part::Bias(bias), Part::Band(1, 2)])],
    ]
}

fn run(cfg: &Config, sizes: [usize; 3], masks: Vec<Mask>, dtype: DType, device: &Device) -> Result<Outcome> {
    let [b, t_q, t_kv] = sizes;
    let h = cfg.num_heads();
    let layer = layer(cfg, dtype, device)?;
    let by_hand = input(cfg, sizes, masks);
    let expected = forward(cfg, &parameters(cfg, 3), &by_hand);
    let [xs, keys, vs] = [&by_hand.queries, &by_hand.keys, &by_hand.values].map(|x| x.tensor(dtype, device));
    let (xs, keys, vs) = (xs?, keys?, vs?);
    let mask = attention_mask(&by_hand.mask, device, |_, _, bias| bias.tensor(dtype, device))?;
    let shared = (&by_hand.keys.shape, &by_hand.keys.data) == (&by_hand.values.shape, &by_hand.values.data);
    let vs = if shared { keys.clone() } else { vs };
    let call = || {
        let own = AttentionInput::new(&xs).with_mask(&mask);
        if is_self(cfg, t_q, t_kv) { own } else { own.with_key_value(&keys, &vs) }
    };
    let output = layer.forward_with_weights(call())?;
    let ys = layer.forward_with(call())?;
    let columns = t_kv + usize::from(cfg.bias_kv()) + usize::from(cfg.add_zero_attn());
    let largest = expected.ys.iter().fold(1.0, |most: f64, y| most.max(y.abs()));
    let most = |_| tolerance(dtype) * largest;
    let compared = [
        compare("forward_with", &ys, (&[b, t_q, cfg.out_dim()], dtype), &expected.ys, most),
        compare("forward_with_weights", &output.output, (&[b, t_q, cfg.out_dim()], dtype), &expected.ys, most),
        compare("weights", &output.weights, (&[b, h, t_q, columns], dtype), &expected.weights, most),
    ];
    if by_hand.mask.is_empty() || dtype == DType::F32 {
        // The memory lies in other strides, and the kernel may add in another order.
        let memory = layer.project_memory(&keys, &vs)?;
        let of_memory = layer.forward_with_weights(AttentionInput::new(&xs).with_memory(&memory).with_mask(&mask))?;
        assert_close(&of_memory.output, &ys, most(0) / 10.0, "a memory");
        assert_close(&of_memory.weights, &output.weights, tolerance(dtype) / 10.0, "weights of a memory");
    }
    if by_hand.mask.is_empty() {
        // A residual is added as its caller would, by variables too.
        let residual = ys.ones_like()?;
        for layer in [&layer, &MultiHeadAttention::new(cfg, variables(cfg, dtype, device)?)?] {
            let added = layer.forward_with(call().with_residual(&residual))?;
            assert_close(&added, &(&ys + &residual)?, 2.0 * most(0), "a residual");
        }
    }
    if by_hand.mask.is_empty() && b * t_q * t_kv > 0 && [DType::F32, DType::F64].contains(&dtype) {
        let (beside, found) = layer.forward_with_statistics(call(), &StatisticsOptions::default())?;
        assert_close(&beside, &ys, most(0), "beside statistics");
        statistics::assert_of(&found, &output.weights, 5.0 * tolerance(dtype), "statistics")?;
    }
    if is_self(cfg, t_q, t_kv) && by_hand.mask.is_empty() {
        for own in [layer.forward(&xs)?, layer.forward_t(&xs, false)?] {
            assert_close(&own, &ys, 0.0, "forward is forward_with no mask");
        }
    }
    if b == 1 {
        let [xs, keys, vs] = [&xs, &keys, &vs].map(|x| x.squeeze(0));
        let (xs, keys, vs) = (xs?, keys?, vs?);
        let own = || AttentionInput::new(&xs).with_mask(&mask);
        let memory = layer.project_memory(&keys, &vs)?;
        let plain = if is_self(cfg, t_q, t_kv) { own() } else { own().with_key_value(&keys, &vs) };
        for single in [plain, own().with_memory(&memory)] {
            let single = layer.forward_with_weights(single)?;
            assert_close(&single.output, &ys.squeeze(0)?, tolerance(dtype), "two dimensions are one sequence");
            assert_close(&single.weights, &output.weights.squeeze(0)?, tolerance(dtype), "weights of two dimensions");
        }
    }
    Ok(compared.into_iter().collect())
}

fn every_config_gives_the_numbers_of_plain_loops(device: &Device) {
    let (mut calls, mut disagree) = (0, 0);
    for (name, cfg) in configs() {
        for dtype in [DType::F16, DType::BF16].into_iter().filter(|_| device.is_cpu()) {
            let outcome = run(&cfg, [2, 4, 4], vec![], dtype, device).expect(name);
            outcome.unwrap_or_else(|difference| panic!("{name} in {dtype:?}: {difference}"));
        }
        for sizes in [
            [2, 4, 4],
            [1, 3, 6],
            [2, 5, 3],
            [1, 1, 1],
            [1, 4, 4],
            [0, 3, 3],
            [2, 0, 0],
            [0, 0, 0],
            [2, 0, 3],
            [2, 3, 0],
        ] {
            for (n, masks) in call_masks(sizes, cfg.num_heads()).into_iter().enumerate() {
                for &dtype in dtypes(device) {
                    let outcome = run(&cfg, sizes, masks.clone(), dtype, device);
                    let what = format!("{name}, sizes {sizes:?}, mask {n}, {dtype:?}");
                    match outcome {
                        Ok(Ok(())) => calls += 1,
                        Ok(Err(difference)) => panic!("{what}: {difference}"),
                        // The call's mask counts from elsewhere than the layer's, and ALiBi has no position to count
                        // from.
                        Err(error) if name.starts_with("alibi") && error.to_string().contains("ALiBi counts") => {
                            disagree += 1
                        }
                        Err(error) => panic!("{what}: {error}"),
                    }
                }
            }
        }
    }
    assert!(calls >= 1000 && disagree < 40, "{calls} {disagree}");
}

/// And what is left out of one has its default.
#[test]
fn configs_survive_json() {
    let relative = Config::new(24, 3).with_relative_bias(RelativeBiasConfig::new(false).with_num_buckets(6));
    for (name, cfg) in configs().into_iter().chain([("relative bias", relative)]) {
        let text = serde_json::to_string(&cfg).expect("a config is plain data");
        assert_eq!(serde_json::from_str::<Config>(&text).expect("the same"), cfg, "{name}");
    }
    let short =
        r#"{"embed_dim": 24, "num_heads": 3, "alibi": {"bias_max": 4}, "relative_bias": {"bidirectional": true}}"#;
    let expected = Config::new(24, 3).with_alibi(AlibiConfig::BiasMax(4.0));
    let expected = expected.with_relative_bias(RelativeBiasConfig::new(true));
    assert_eq!(serde_json::from_str::<Config>(short).expect("the rest has defaults"), expected);
}

/// Inputs that are one tensor are projected at once, equal copies of it apart. Sums of small whole numbers are exact in
/// any order, and so the products are the same to the bit, in every dtype.
fn one_product_for_all_gives_the_bits_of_three(device: &Device) -> Result<()> {
    let grouped = || Config::new(12, 4).with_num_kv_heads(2).with_causal(true);
    for cfg in [
        Config::new(12, 4),
        grouped().with_qkv_bias(true),
        grouped().with_k_bias(true).with_value_head_dim(5),
        grouped().with_v_bias(true).with_sinks(true).with_head_dim(5),
        grouped().with_qk_norm(QkNorm { kind: Rms, scope: Projection, eps: 1e-5 }),
        grouped().with_bias_kv(true).with_out_proj(false),
    ] {
        for &dtype in crate::recipe::dtypes(device) {
            let whole = |tensor: &Tensor| (tensor * 3.0)?.round();
            let mut weights = tensors(&parameters(&cfg, 3), dtype, device)?;
            for (_, tensor) in weights.iter_mut().filter(|(name, _)| !name.starts_with("o_proj")) {
                *tensor = whole(tensor)?;
            }
            let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(weights, dtype, device))?;
            for [b, t] in [[2, 4], [1, 1], [3, 1], [1, 6], [2, 17]] {
                let xs = whole(&Tensor::randn(0f32, 1., (b, t, 12), device)?.to_dtype(dtype)?)?;
                let (keys, vs) = (xs.force_contiguous()?, xs.force_contiguous()?);
                let one = || AttentionInput::new(&xs).with_backend(Backend::Reference);
                let expected = layer.forward_with_weights(one().with_key_value(&keys, &vs))?;
                for input in [one(), one().with_key_value(&keys, &keys)] {
                    let (output, what) = (layer.forward_with_weights(input)?, format!("{cfg:?}, {b} × {t}, {dtype:?}"));
                    assert_close(&output.weights, &expected.weights, 0.0, &what);
                    assert_close(&output.output, &expected.output, 0.0, &what);
                }
            }
        }
    }
    Ok(())
}

fn a_function_in_the_place_of_attention_gets_its_arguments(device: &Device) -> Result<()> {
    let cfg =
        Config::new(16, 4).with_num_kv_heads(2).with_causal(true).with_rope(RopeConfig::new(100.0)).with_softcap(2.0);
    let layer = layer(&cfg, DType::F32, device)?;
    let xs = Tensor::randn(0f32, 1., (2, 5, 16), device)?;
    let mask = AttentionMask::none().with_window(2);
    let input = || AttentionInput::new(&xs).with_mask(&mask).with_residual(&xs);
    let same = layer.forward_with(input().with_function(&scaled_dot_product_attention))?;
    assert_close(&same, &layer.forward_with(input())?, 0.0, "attention itself");
    let twice = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
        scaled_dot_product_attention(q, k, v, mask, options)? * 2.0
    };
    let doubled = layer.forward_with(AttentionInput::new(&xs).with_function(&twice))?;
    assert_close(&doubled, &(layer.forward(&xs)? * 2.0)?, 1e-6, "twice the context is twice the output");
    Ok(())
}

fn a_prefix_of_the_call_lifts_the_layers_own_causal_constraint(device: &Device) -> Result<()> {
    let layer = layer(&Config::new(12, 4).with_causal(true).with_window(3), DType::F32, device)?;
    let xs = Tensor::randn(0f32, 1., (1, 4, 12), device)?;
    for mask in [AttentionMask::none(), AttentionMask::causal()] {
        let mask = mask.with_prefix(vec![2]);
        let weights = layer.forward_with_weights(AttentionInput::new(&xs).with_mask(&mask))?.weights;
        let seen: Vec<_> = values(&weights)[..16].iter().map(|&weight| u8::from(weight > 0.0)).collect();
        #[rustfmt::skip]
        assert_eq!(seen, [
            1, 1, 0, 0,
            1, 1, 0, 0,
            1, 1, 1, 0,
            0, 1, 1, 1,
        ]);
    }
    Ok(())
}

fn dropout_happens_in_training_only(device: &Device) -> Result<()> {
    let with = layer(&Config::new(12, 4).with_dropout(0.5), DType::F32, device)?;
    let without = layer(&Config::new(12, 4), DType::F32, device)?;
    let xs = Tensor::randn(0f32, 1., (2, 20, 12), device)?;
    let plain = without.forward_with_weights(&xs)?;
    assert_close(&with.forward(&xs)?, &without.forward(&xs)?, 0.0, "forward");
    assert_close(&with.forward_t(&xs, false)?, &without.forward(&xs)?, 0.0, "forward_t in evaluation");
    assert!(values(&with.forward_t(&xs, true)?) != values(&plain.output), "forward_t in training");
    let trained = with.forward_with_weights(AttentionInput::new(&xs).with_train(true))?;
    let (dropped, weights) = (values(&trained.weights), values(&plain.weights));
    let kept = dropped.iter().filter(|&&weight| weight != 0.0).count();
    assert!((1400..1800).contains(&kept), "{kept} of 3200 are kept, expected about 1600");
    for (after, before) in dropped.into_iter().zip(weights) {
        assert!(after == 0.0 || (after - 2.0 * before).abs() < 1e-6, "{before} became {after}");
    }
    let never = layer(&Config::new(12, 4).with_dropout(0.0), DType::F32, device)?;
    assert_close(&never.forward_t(&xs, true)?, &without.forward(&xs)?, 0.0, "p = 0");
    Ok(())
}
