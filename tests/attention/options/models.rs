//! Attention modules of whole models.

use candle_attention::{
    AlibiConfig, AttentionInput, Backend, MultiHeadAttention, MultiHeadAttentionConfig as Config, QkNorm, QkNormKind,
    QkNormScope, RelativeBiasConfig, RopeConfig,
};
use candle_core::Result;

use super::{builder, numbers};
use crate::common::{assert_close, values};

fn check(name: &str, cfg: &Config) -> Result<()> {
    let numbers = numbers(&format!("{name}."));
    let layer = MultiHeadAttention::new(cfg, builder(numbers.clone()))?;
    let largest = values(&numbers["out"]).into_iter().map(f64::abs).fold(0.0, f64::max);
    for backend in [Backend::Auto, Backend::Reference] {
        let ys = layer.forward_with(AttentionInput::new(&numbers["in"]).with_backend(backend))?;
        assert_close(&ys, &numbers["out"], 1e-5 * largest, &format!("{name}, {backend:?}"));
    }
    Ok(())
}

#[test]
fn norms_after_rotation_are_those_of_hunyuan() -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-5 };
    let cfg = Config::new(24, 6).with_num_kv_heads(3).with_causal(true).with_rope(RopeConfig::new(10_000.0));
    check("hunyuan", &cfg.with_qk_norm(norm).with_norm_after_rope(true))
}

#[test]
fn clipped_projections_are_those_of_olmo() -> Result<()> {
    let cfg = Config::new(24, 6).with_num_kv_heads(3).with_causal(true).with_rope(RopeConfig::new(10_000.0));
    check("olmo", &cfg.with_clip_qkv(0.4))
}

/// Six heads, with an exponent of its own.
#[test]
fn slopes_and_clip_are_those_of_mpt() -> Result<()> {
    check("mpt", &Config::new(24, 6).with_causal(true).with_clip_qkv(0.6).with_alibi(AlibiConfig::BiasMax(3.0)))
}

/// Six heads, over positions that bf16 rounds.
#[test]
fn rounded_biases_are_those_of_falcon() -> Result<()> {
    check("falcon", &Config::new(12, 6).with_causal(true).with_alibi(AlibiConfig::Falcon))
}

#[test]
fn options_survive_json() -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::RmsPlusOne, scope: QkNormScope::PerHeadWeights, eps: 1e-6 };
    let cfg = Config::new(24, 3)
        .with_qk_norm(norm)
        .with_rope(RopeConfig::new(10_000.0))
        .with_norm_after_rope(true)
        .with_clip_qkv(0.1)
        .with_band(3, 4)
        .with_alibi(AlibiConfig::Slopes(vec![0.1, 0.2, 0.3]))
        .with_relative_bias(RelativeBiasConfig::new(false).with_num_buckets(6));
    let text = serde_json::to_string(&cfg).map_err(candle_core::Error::wrap)?;
    assert_eq!(serde_json::from_str::<Config>(&text).map_err(candle_core::Error::wrap)?, cfg);
    let short =
        r#"{"embed_dim": 24, "num_heads": 3, "alibi": {"bias_max": 4}, "relative_bias": {"bidirectional": true}}"#;
    let expected = Config::new(24, 3).with_alibi(AlibiConfig::BiasMax(4.0));
    let expected = expected.with_relative_bias(RelativeBiasConfig::new(true));
    assert_eq!(serde_json::from_str::<Config>(short).map_err(candle_core::Error::wrap)?, expected);
    Ok(())
}
