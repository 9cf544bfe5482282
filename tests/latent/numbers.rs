//! Calls without a cache.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig as Config,
    RopeConfig, RopeScaling, RotaryEmbedding,
};
use candle_core::{DType, Result, Tensor};
use candle_nn::{ModuleT, VarBuilder};

use crate::array::Random;
use crate::by_hand::{Numbers, tensors};
use crate::common::{assert_close, max_error, values};
use crate::layers::{CPU, config, draw, layer, parameters};
use crate::oracle::{Alignment, Lens, Mask, Part};
use crate::plain_loops::forward;

/// In bf16 parameters are rounded too.
fn most(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 0.1,
        DType::F32 => 1e-5,
        _ => 1e-6,
    }
}

#[test]
fn random_layers_give_the_numbers_of_plain_loops() -> Result<()> {
    let random = &mut Random::new(1);
    for case in 0..90 {
        let causal = random.chance(0.8);
        let cfg = config(random).with_causal(causal);
        let parameters = parameters(&cfg, random);
        // Nothing gives nothing.
        let (b, t) = (random.up_to(3), random.up_to(9));
        let xs = Numbers::random(&[b, t, cfg.embed_dim()], random);
        let lens: Vec<_> = (0..b).map(|_| random.up_to(t)).collect();
        let mask = AttentionMask::none().with_valid_lens(lens.clone());
        let alignment = if causal { Alignment::Causal } else { Alignment::Free };
        let by_hand = Mask::new(alignment, [Part::ValidLens(Lens::PerSequence(lens))]);
        let expected = forward(&cfg, &parameters, &xs, by_hand);
        let ys = Tensor::from_vec(expected.ys, (b, t, cfg.embed_dim()), &CPU)?;
        let weights = Tensor::from_vec(expected.weights, (b, cfg.num_heads(), t, t), &CPU)?;
        let largest = values(&ys).into_iter().map(f64::abs).fold(1.0, f64::max);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let (layer, xs) = (layer(&cfg, &parameters, dtype, &CPU)?, xs.tensor(dtype, &CPU)?);
            for backend in [Backend::Auto, Backend::Reference] {
                let input = || AttentionInput::new(&xs).with_mask(&mask).with_backend(backend);
                let (found, with_weights) = (layer.forward_with(input())?, layer.forward_with_weights(input())?);
                let what = format!("case {case}, {dtype:?}, {backend:?}");
                for found in [&found, &with_weights.output] {
                    assert_close(found, &ys, most(dtype) * largest, &what);
                }
                assert_close(&with_weights.weights, &weights, most(dtype), &what);
                if b == 1 {
                    // One sequence needs no batch.
                    let (xs, mask) = (xs.squeeze(0)?, &mask);
                    let single =
                        layer.forward_with_weights(AttentionInput::new(&xs).with_mask(mask).with_backend(backend))?;
                    assert_eq!(values(&single.output), values(&with_weights.output), "{what}");
                    assert_eq!((single.output.rank(), single.weights.dims()), (2, &[cfg.num_heads(), t, t][..]));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn layers_share_the_tables_of_their_rotary_positions() -> Result<()> {
    let random = &mut Random::new(2);
    let cfg = config(random);
    let layer = layer(&cfg, &parameters(&cfg, random), DType::F32, &CPU)?;
    let shared = layer.clone().with_rotary(RotaryEmbedding::new(cfg.rope(), cfg.rope_head_dim())?)?;
    let xs = draw(random, &[4, cfg.embed_dim()], DType::F32)?;
    assert_eq!(values(&shared.forward(&xs)?), values(&layer.forward(&xs)?));
    Ok(())
}

#[test]
fn positions_are_those_that_are_given() -> Result<()> {
    let random = &mut Random::new(4);
    let cfg = config(random);
    let parameters = parameters(&cfg, random);
    let layer = layer(&cfg, &parameters, DType::F64, &CPU)?;
    let xs = Numbers::random(&[1, 6, cfg.embed_dim()], random);
    // The first two see nothing of the others and are seen by none: the rest begins anew.
    let rest = Numbers { shape: vec![1, 4, cfg.embed_dim()], data: xs.data[2 * cfg.embed_dim()..].to_vec() };
    let expected = forward(&cfg, &parameters, &rest, Mask::new(Alignment::Causal, []));
    let expected = Tensor::from_vec(expected.ys, rest.shape, &CPU)?;
    let positions = Tensor::new(&[9u32, 9, 0, 1, 2, 3], &CPU)?;
    let (xs, mask) = (xs.tensor(DType::F64, &CPU)?, AttentionMask::none().with_starts(vec![2]));
    let ys = layer.forward_with(AttentionInput::new(&xs).with_mask(&mask).with_positions(&positions))?;
    assert_close(&ys.narrow(1, 2, 4)?, &expected, most(DType::F64), "given positions");
    Ok(())
}

/// The scale is worked out from what yarn says, unless it is given.
#[test]
fn yarn_corrects_the_scale() {
    let yarn = |mscale_all_dim| {
        RopeConfig::new(10_000.0).with_scaling(RopeScaling::Yarn {
            factor: 40.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: mscale_all_dim,
            mscale_all_dim,
            truncate: true,
        })
    };
    let cfg = Config::new(2048, 16);
    let plain = 1.0 / 192f64.sqrt();
    assert_eq!(cfg.scale(), plain);
    assert_eq!(cfg.clone().with_rope(yarn(None)).scale(), plain);
    let corrected = cfg.clone().with_rope(yarn(Some(0.707))).scale();
    assert!((corrected - plain * (0.0707 * 40f64.ln() + 1.0).powi(2)).abs() < 1e-15, "{corrected}");
    assert_eq!(cfg.with_rope(yarn(Some(0.707))).with_scale(0.5).scale(), 0.5);
}

#[test]
fn dropout_happens_in_training_alone() -> Result<()> {
    let random = &mut Random::new(6);
    let cfg = Config::new(6, 2).with_kv_lora_rank(5).with_dropout(0.5);
    let parameters = parameters(&cfg, random);
    let weights = VarBuilder::from_tensors(tensors(&parameters, DType::F32, &CPU)?, DType::F32, &CPU);
    let [dropping, plain] =
        [cfg.clone(), cfg.with_dropout(0.0)].map(|cfg| MultiHeadLatentAttention::new(&cfg, weights.clone()));
    let (dropping, plain) = (dropping?, plain?);
    let xs = draw(random, &[9, 6], DType::F32)?;
    assert_eq!(values(&dropping.forward_t(&xs, false)?), values(&plain.forward(&xs)?));
    assert!(max_error(&dropping.forward_t(&xs, true)?, &plain.forward(&xs)?) > 1e-3);
    let weights = dropping.forward_with_weights(AttentionInput::new(&xs).with_train(true))?.weights;
    assert!(values(&weights).iter().filter(|&&weight| weight == 0.0).count() > 2 * 36);
    let fused = AttentionInput::new(&xs).with_train(true).with_backend(Backend::Fused);
    assert!(plain.forward_with(fused).is_ok(), "without dropout the kernel runs in training too");
    Ok(())
}

#[test]
fn configs_survive_their_serialisation() {
    let cfg = Config::new(6, 2).with_q_lora_rank(3).with_scale(0.5).with_causal(false).with_bias(true);
    let json = serde_json::to_string(&cfg).expect("a config is plain data");
    assert_eq!(serde_json::from_str::<Config>(&json).expect("the same"), cfg);
    let least = r#"{"embed_dim": 64, "num_heads": 4, "kv_lora_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64,
        "value_head_dim": 128, "rope": {"base": 10000.0, "style": "interleaved"}}"#;
    assert_eq!(serde_json::from_str::<Config>(least).expect("the rest has defaults"), Config::new(64, 4));
}
