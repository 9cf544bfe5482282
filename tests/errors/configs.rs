//! Configs whose numbers do not fit together, and configs in JSON.

use candle_attention::{
    AlibiConfig, ContextNorm, KvSource, MultiHeadAttention, MultiHeadAttentionConfig, QkNorm, QkNormKind, QkNormScope,
    QueryScaling, RelativeBiasConfig, RopeConfig, RopeScaling, WeightLayout,
};
use candle_core::{DType, Result};
use candle_nn::VarBuilder;

use crate::{CPU, Case};

fn cfg() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 4)
}

fn norm(eps: f64) -> QkNorm {
    QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps }
}

/// Heads of 4 with this scaling.
fn scaled(scaling: RopeScaling) -> Result<()> {
    cfg().with_head_dim(4).with_rope(RopeConfig::new(10_000.0).with_scaling(scaling)).validate()
}

fn scaled_queries(beta: f64, interval: usize) -> MultiHeadAttentionConfig {
    cfg().with_query_scaling(QueryScaling { beta, interval, first: 0 })
}

fn json(text: &str) -> Result<()> {
    serde_json::from_str::<MultiHeadAttentionConfig>(text).map(drop).map_err(candle_core::Error::wrap)
}

/// Keys and values of an earlier layer.
fn earlier(cfg: MultiHeadAttentionConfig) -> Result<()> {
    cfg.with_kv_source(KvSource::EarlierLayer).validate()
}

fn keys_as_values(cfg: MultiHeadAttentionConfig) -> Result<()> {
    cfg.with_kv_source(KvSource::KeysAsValues).validate()
}

pub const CASES: &[Case] = cases! {
    "a norm of the context with an eps below zero" =>
        cfg().with_context_norm(ContextNorm { kind: QkNormKind::Rms, eps: -1e-6 }).validate(),
    "a bias of keys that are not there" => earlier(cfg().with_bias(true)),
    "a learned key beside an earlier layer's" => earlier(cfg().with_bias_kv(true)),
    "a norm of an earlier layer's values" => earlier(cfg().with_value_norm(1e-6)),
    "wider values that are keys" => keys_as_values(cfg().with_value_head_dim(3)),
    "a bias of values that are keys" => keys_as_values(cfg().with_v_bias(true)),
    "another input of values that are keys" => keys_as_values(cfg().with_value_size(6)),
    "keys as values in a packed weight" => {
        let cfg = cfg().with_kv_source(KvSource::KeysAsValues);
        let layout = "packed:qkv".parse::<WeightLayout>()?;
        MultiHeadAttention::load(&cfg, layout, VarBuilder::zeros(DType::F32, &CPU))
    },
    "inputs of no width" => MultiHeadAttentionConfig::new(0, 4).validate(),
    "no heads" => MultiHeadAttentionConfig::new(8, 0).validate(),
    "no key heads" => cfg().with_num_kv_heads(0).validate(),
    "heads of no width" => cfg().with_head_dim(0).validate(),
    "values of no width" => cfg().with_value_head_dim(0).validate(),
    "outputs of no width" => cfg().with_out_dim(0).validate(),
    "keys of no width" => cfg().with_key_size(0).validate(),
    "value inputs of no width" => cfg().with_value_size(0).validate(),
    "no positions" => cfg().with_context_length(0).validate(),
    "a window of no keys" => cfg().with_window(0).validate(),
    "a chunk of no keys" => cfg().with_chunk(0).validate(),
    "a norm of values with an eps below zero" => cfg().with_value_norm(-1e-6).validate(),
    "a norm of learned values" => cfg().with_bias_kv(true).with_value_norm(1e-6).validate(),
    "a scaling of queries that is no number" => scaled_queries(f64::NAN, 4).validate(),
    "a scaling of queries that f32 does not hold" => scaled_queries(1e60, 4).validate(),
    "a scaling of queries by no positions" => scaled_queries(0.1, 0).validate(),
    "an overflown width" => MultiHeadAttentionConfig::new(usize::MAX, 1).validate(),
    "heads beyond counting" => cfg().with_head_dim(u32::MAX as usize).validate(),
    "value heads beyond counting" => cfg().with_value_head_dim(1 << 31).validate(),
    "key heads that do not divide" => cfg().with_num_kv_heads(3).validate(),
    "more key heads than heads" => cfg().with_num_kv_heads(8).validate(),
    "heads that do not divide the width" => MultiHeadAttentionConfig::new(10, 4).validate(),
    "heads that do not divide the output" => cfg().with_out_dim(6).validate(),
    "more heads than width" => MultiHeadAttentionConfig::new(2, 4).validate(),
    "an output width that the heads do not give" =>
        cfg().with_out_proj(false).with_out_dim(12).with_head_dim(2).validate(),
    "an output bias without an output projection" => cfg().with_out_proj(false).with_bias(true).validate(),
    "dropout in percent" => cfg().with_dropout(10.0).validate(),
    "dropout that is no number" => cfg().with_dropout(f64::NAN).validate(),
    "a softcap of zero" => cfg().with_softcap(0.0).validate(),
    "an infinite softcap" => cfg().with_softcap(f64::INFINITY).validate(),
    "a scale that is no number" => cfg().with_scale(f64::NAN).validate(),
    "a norm of learned keys" => cfg().with_bias_kv(true).with_qk_norm(norm(1e-6)).validate(),
    "an eps below zero" => cfg().with_qk_norm(norm(-1e-6)).validate(),
    "an eps that f32 does not hold" => cfg().with_qk_norm(norm(f64::MAX)).validate(),
    "rotary positions of odd heads" => cfg().with_head_dim(3).with_rope(RopeConfig::new(10_000.0)).validate(),
    "rotary positions wider than heads" => cfg().with_rope(RopeConfig::new(10_000.0).with_rotary_dim(4)).validate(),
    "rotary positions of no width" => cfg().with_rope(RopeConfig::new(10_000.0).with_rotary_dim(0)).validate(),
    "a base of zero" => cfg().with_rope(RopeConfig::new(0.0)).validate(),
    "a base that is no number" => cfg().with_rope(RopeConfig::new(f64::NAN)).validate(),
    "a base that f32 does not hold" => cfg().with_rope(RopeConfig::new(1e60)).validate(),
    "a factor of zero" => scaled(RopeScaling::Linear { factor: 0.0 }),
    "a dynamic factor below one" => scaled(RopeScaling::Dynamic { factor: 0.5, original_context: 8 }),
    "dynamic scaling of one pair" => {
        let scaling = RopeScaling::Dynamic { factor: 2.0, original_context: 8 };
        cfg().with_rope(RopeConfig::new(10_000.0).with_scaling(scaling)).validate()
    },
    "no positions in training" => scaled(RopeScaling::Dynamic { factor: 2.0, original_context: 0 }),
    "bands of frequencies in each other's place" => {
        scaled(RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 1.0, original_context: 8192 })
    },
    "yarn's borders in each other's place" => {
        scaled(RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096,
            beta_fast: 1.0,
            beta_slow: 32.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        })
    },
    "a list of divisors for other heads" => {
        scaled(RopeScaling::LongRope {
            short_factor: vec![1.0; 2],
            long_factor: vec![1.0; 3],
            original_context: 4096,
            factor: None,
            attention_factor: None,
        })
    },
    "more than all pairs" => scaled(RopeScaling::Proportional { factor: 1.0, proportion: 1.5 }),
    "a part of the pairs of a part" => {
        let scaling = RopeScaling::Proportional { factor: 1.0, proportion: 0.5 };
        let rope = RopeConfig::new(10_000.0).with_rotary_dim(2).with_scaling(scaling);
        cfg().with_head_dim(4).with_rope(rope).validate()
    },
    "a position of learned keys" => cfg().with_bias_kv(true).with_rope(RopeConfig::new(10_000.0)).validate(),
    "a bound of zero" => cfg().with_clip_qkv(0.0).validate(),
    "a bound that is no number" => cfg().with_clip_qkv(f64::NAN).validate(),
    "norms after no rotation" => cfg().with_qk_norm(norm(1e-6)).with_norm_after_rope(true).validate(),
    "norms of projections after rotation" => {
        let norm = QkNorm { scope: QkNormScope::Projection, ..norm(1e-6) };
        cfg().with_rope(RopeConfig::new(1e4)).with_qk_norm(norm).with_norm_after_rope(true).validate()
    },
    "slopes of other heads" => cfg().with_alibi(AlibiConfig::Slopes(vec![0.5; 3])).validate(),
    "a slope that is no number" => cfg().with_alibi(AlibiConfig::Slopes(vec![0.5, 0.5, f32::NAN, 0.5])).validate(),
    "a largest exponent of zero" => cfg().with_alibi(AlibiConfig::BiasMax(0.0)).validate(),
    "a norm of keys of zeros" => cfg().with_add_zero_attn(true).with_qk_norm(norm(1e-6)).validate(),
    "a position of keys of zeros" => cfg().with_add_zero_attn(true).with_rope(RopeConfig::new(10_000.0)).validate(),
    "slopes of learned keys" => cfg().with_alibi(AlibiConfig::Standard).with_bias_kv(true).validate(),
    "relative positions of learned keys" =>
        cfg().with_relative_bias(RelativeBiasConfig::new(true)).with_bias_kv(true).validate(),
    "too few buckets for two directions" =>
        cfg().with_relative_bias(RelativeBiasConfig::new(true).with_num_buckets(3)).validate(),
    "too few buckets" => RelativeBiasConfig::new(false).with_num_buckets(1).validate(),
    "distances that all have buckets of their own" => RelativeBiasConfig::new(false).with_max_distance(16).validate(),
    "an unknown alibi in JSON" => json(r#"{"embed_dim": 8, "num_heads": 4, "alibi": "bloom"}"#),
    "an unknown scaling in JSON" =>
        json(r#"{"embed_dim": 8, "num_heads": 4, "rope": {"base": 1e4, "scaling": {"ntk": {"factor": 2}}}}"#),
    "an unknown field of a scaling in JSON" => {
        let scaling = r#"{"linear": {"factor": 2, "rope_type": "linear"}}"#;
        json(&format!(r#"{{"embed_dim": 8, "num_heads": 4, "rope": {{"base": 1e4, "scaling": {scaling}}}}}"#))
    },
    "an unknown field in JSON" => json(r#"{"embed_dim": 8, "num_heads": 4, "num_attention_heads": 4}"#),
    "a field in JSON twice" => json(r#"{"embed_dim": 8, "num_heads": 4, "num_heads": 2}"#),
    "a field in JSON left out" => json(r#"{"embed_dim": 8}"#),
    "a negative size in JSON" => json(r#"{"embed_dim": -8, "num_heads": 4}"#),
    "a broken size in JSON" => json(r#"{"embed_dim": 8.5, "num_heads": 4}"#),
    "an unknown field of a gate in JSON" => json(
        r#"{"embed_dim": 8, "num_heads": 4, "output_gate": {"activation": "sigmoid", "scope": "per_head", "place": "query", "bias": true}}"#,
    ),
    "an unknown norm in JSON" =>
        json(r#"{"embed_dim": 8, "num_heads": 4, "qk_norm": {"kind": "l2", "scope": "per_head", "eps": 0}}"#),
    "an unknown field of a norm in JSON" => {
        json(
            r#"{"embed_dim": 8, "num_heads": 4, "qk_norm": {"kind": "rms", "scope": "per_head", "eps": 0, "bias": true}}"#,
        )
    },
};

/// The same errors come from the constructors, in any layout.
#[test]
fn layers_validate_their_config_first() {
    let cfg = cfg().with_num_kv_heads(3);
    let expected = cfg.validate().expect_err("3 does not divide 4").to_string();
    for layout in WeightLayout::all() {
        let error = MultiHeadAttention::load(&cfg, layout, VarBuilder::zeros(DType::F32, &CPU)).expect_err("no layer");
        assert_eq!(error.to_string().lines().next(), expected.lines().next(), "{layout}");
    }
}
