//! Positions cut into calls in any way give the numbers of one call.

use candle_attention::{
    AlibiConfig, AttentionCache, AttentionCacheConfig, AttentionMask, Backend, GateActivation, GatePlace, GateScope,
    MultiHeadAttentionConfig as Config, OutputGate, QkNorm, QkNormKind, QkNormScope, QueryScaling, RopeConfig,
    RopeScaling, RopeStyle,
};
use candle_core::{DType, Device, Result};

use crate::array::Random;
use crate::compare::{Masks, Run, layer, tokens, tolerance, tolerance_of};
use crate::plan::{Plan, cases};

const EMBED_DIM: usize = 12;

fn base() -> Config {
    Config::new(EMBED_DIM, 4).with_causal(true)
}

fn gate(place: GatePlace) -> OutputGate {
    OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place }
}

/// Layers, and the caches that serve them.
fn setups() -> Vec<(&'static str, Config, AttentionCacheConfig)> {
    let growing = || AttentionCacheConfig::new().with_capacity(4);
    let sliding = |window: usize| AttentionCacheConfig::new().with_window(window);
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    let rope = |scaling| RopeConfig::new(100.0).with_scaling(scaling);
    let linear = rope(RopeScaling::Linear { factor: 3.0 });
    let paired = rope(RopeScaling::None).with_style(RopeStyle::Interleaved);
    let llama3 =
        rope(RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 32 });
    let yarn = rope(RopeScaling::Yarn {
        factor: 4.0,
        original_context: 8,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    });
    let wide = || base().with_head_dim(8).with_num_kv_heads(2);
    vec![
        ("growing", base(), growing()),
        ("growing from nothing", base(), growing().with_capacity(0)),
        ("preallocated", base(), growing().with_capacity(120).with_growth(false)),
        ("default", base(), AttentionCacheConfig::default()),
        ("grouped", base().with_num_kv_heads(2), growing()),
        ("one key head, wide values", base().with_num_kv_heads(1).with_head_dim(5).with_value_head_dim(7), growing()),
        ("biases, norms and softcap", base().with_bias(true).with_qk_norm(norm).with_softcap(2.0), growing()),
        ("a gate", base().with_output_gate(gate(GatePlace::Query)), growing()),
        ("scaled queries", base().with_query_scaling(QueryScaling { beta: 0.5, interval: 3, first: 1 }), growing()),
        ("norms of values", base().with_value_norm(1e-5), growing()),
        ("chunks", base().with_chunk(3), growing()),
        ("clip", base().with_clip_qkv(0.4), growing()),
        ("alibi", base().with_alibi(AlibiConfig::Standard), growing()),
        ("alibi, not causal", Config::new(EMBED_DIM, 4).with_alibi(AlibiConfig::Standard), growing()),
        ("alibi, sliding", base().with_alibi(AlibiConfig::Standard).with_window(4), sliding(4)),
        ("alibi of Falcon", base().with_alibi(AlibiConfig::Falcon), growing()),
        ("alibi of Falcon, sliding", base().with_alibi(AlibiConfig::Falcon).with_window(4), sliding(4)),
        ("band", base().with_band(2, 0), growing()),
        ("sinks", base().with_sinks(true), growing()),
        ("linear rotary positions", wide().with_rope(linear.with_rotary_dim(4)), growing()),
        ("rotary pairs and norms", wide().with_rope(paired).with_qk_norm(norm), growing()),
        ("rotary positions as in Llama 3", wide().with_rope(llama3).with_window(4), sliding(4)),
        ("yarn", wide().with_rope(yarn).with_sinks(true), growing()),
        ("window", base().with_window(3), growing()),
        ("window of one", base().with_window(1), growing()),
        ("sliding", base().with_window(4), sliding(4)),
        ("sliding by one", base().with_window(1), sliding(1)),
        ("sliding further than the layer", base().with_window(3), sliding(6)),
        ("sliding, one slot for each key", base().with_window(5), sliding(5).with_capacity(5).with_growth(false)),
        ("sliding in a larger capacity", base().with_window(3).with_sinks(true), sliding(3).with_capacity(16)),
        ("8 bits", base().with_num_kv_heads(2), growing().with_q8()),
        ("8 bits, preallocated", base().with_sinks(true), growing().with_capacity(120).with_growth(false).with_q8()),
        ("8 bits, sliding", base().with_window(4).with_sinks(true), sliding(4).with_q8()),
        ("8 bits, alibi", base().with_alibi(AlibiConfig::Standard).with_value_head_dim(5), growing().with_q8()),
        ("8 bits, rotary", wide().with_rope(rope(RopeScaling::None)).with_softcap(2.0), growing().with_q8()),
        ("for the layer", base().with_window(2), AttentionCacheConfig::for_layer(&base().with_window(2))),
    ]
}

/// The difference between one plan with a cache and one call without.
fn difference(
    (cfg, cache): (&Config, &AttentionCacheConfig),
    plan: &Plan,
    dtype: DType,
    (seed, backend): (u64, Backend),
    device: &Device,
) -> Result<f64> {
    let layer = layer(cfg, dtype, device)?;
    let random = &mut Random::new(seed);
    let tokens: Result<Vec<_>> =
        plan.lens().into_iter().map(|t| tokens(random, (t, cfg.embed_dim()), dtype, device)).collect();
    let none = |_| Ok(AttentionMask::none());
    // A layer that is not causal sees what was there at the end of each call.
    let there = |b| {
        let mask = AttentionMask::none();
        Ok(if cfg.causal() { mask } else { mask.with_valid_lens(vec![plan.ends(b)]) })
    };
    let masks = Masks { of_call: &none, of_sequence: &there };
    let run = Run { layer: &layer, plan, tokens: &tokens?, masks, backend };
    run.difference(&mut AttentionCache::new(cache)?)
}

fn random_plans(ragged: bool, count: u64, device: &Device) {
    for (name, cfg, cache) in setups() {
        for seed in 0..cases(count) {
            let plan = Plan::random(&mut Random::new(seed), ragged);
            let backend = if seed % 4 == 3 { Backend::Reference } else { Backend::Auto };
            let found = difference((&cfg, &cache), &plan, DType::F32, (seed, backend), device);
            let found = found.unwrap_or_else(|error| panic!("{name}, seed {seed}, {plan:?}: {error}"));
            assert!(found <= tolerance_of(DType::F32, &cache), "{name}, seed {seed}, {plan:?}: off by {found:e}");
        }
    }
}

fn batches_of_one_length_give_the_numbers_of_one_call(device: &Device) {
    random_plans(false, 30, device);
}

fn ragged_batches_give_the_numbers_of_each_sequence_by_itself(device: &Device) {
    random_plans(true, 60, device);
}

crate::on_each_device!(
    batches_of_one_length_give_the_numbers_of_one_call,
    ragged_batches_give_the_numbers_of_each_sequence_by_itself,
);

#[test]
fn every_dtype_is_kept_in_every_other() -> Result<()> {
    let dtypes = [DType::F64, DType::F32, DType::F16, DType::BF16];
    let plans = [Plan::even(2, &[7, 1, 1, 4, 1]), Plan::ragged(&[&[5, 2, 0], &[1, 1, 1], &[2, 0, 3], &[1, 1, 1]])];
    for of_layer in dtypes {
        for kept in dtypes {
            for plan in &plans {
                for cfg in [base().with_num_kv_heads(2), base().with_window(3)] {
                    let cache = AttentionCacheConfig::for_layer(&cfg).with_dtype(kept);
                    let found = difference((&cfg, &cache), plan, of_layer, (1, Backend::Auto), &Device::Cpu)?;
                    let most = tolerance(of_layer).max(tolerance(kept));
                    assert!(found <= most, "{of_layer:?} kept in {kept:?}, {plan:?}: off by {found:e}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_dtype_is_kept_in_8_bits() -> Result<()> {
    let cfg = base().with_num_kv_heads(2);
    let cache = AttentionCacheConfig::new().with_q8();
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for plan in [Plan::even(2, &[7, 1, 1, 4, 1]), Plan::ragged(&[&[5, 2, 0], &[1, 1, 1], &[2, 0, 3]])] {
            let found = difference((&cfg, &cache), &plan, dtype, (1, Backend::Auto), &Device::Cpu)?;
            assert!(found <= tolerance_of(dtype, &cache), "{dtype:?}, {plan:?}: off by {found:e}");
        }
    }
    Ok(())
}

#[test]
fn a_layer_that_is_not_causal_sees_what_is_there() -> Result<()> {
    for cfg in [Config::new(EMBED_DIM, 3), Config::new(EMBED_DIM, 4).with_window(3)] {
        for seed in 0..cases(60) {
            let plan = Plan::random(&mut Random::new(seed), seed % 2 == 0);
            let cache = AttentionCacheConfig::new();
            let found = difference((&cfg, &cache), &plan, DType::F32, (seed, Backend::Auto), &Device::Cpu)?;
            assert!(found <= tolerance(DType::F32), "seed {seed}, {plan:?}: off by {found:e}");
        }
    }
    Ok(())
}

/// Long enough that the fused kernel cuts the keys into parts, and that buffers grow many times and slide often.
#[test]
fn long_sequences_give_the_numbers_of_one_call() -> Result<()> {
    let decode = |prompt: &[usize], single: usize| [prompt, &vec![1; single]].concat();
    let full = base().with_num_kv_heads(2);
    let growing = AttentionCacheConfig::new().with_capacity(16);
    for (cfg, cache) in [
        (full.clone(), growing.clone()),
        (full.clone(), growing.clone().with_q8()),
        (full.clone().with_sinks(true).with_window(700), growing.clone().with_q8()),
        (full.clone().with_window(100), AttentionCacheConfig::new().with_window(100)),
        (full.clone().with_window(1100), AttentionCacheConfig::new().with_window(1100)),
        (full.with_window(1100), AttentionCacheConfig::new().with_window(1100).with_q8()),
    ] {
        for plan in [Plan::even(1, &decode(&[1500, 700], 40)), Plan::even(2, &decode(&[90], 300))] {
            let found = difference((&cfg, &cache), &plan, DType::F32, (2, Backend::Auto), &Device::Cpu)?;
            assert!(found <= tolerance_of(DType::F32, &cache), "{cfg:?}: off by {found:e}");
        }
    }
    Ok(())
}
