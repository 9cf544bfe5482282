//! Configs whose numbers do not fit together, and configs in JSON.

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, QkNorm, QkNormKind, QkNormScope, WeightLayout};
use candle_core::{DType, Result};
use candle_nn::VarBuilder;

use crate::{CPU, Misuse, check};

fn cfg() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 4)
}

fn norm(eps: f64) -> QkNorm {
    QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps }
}

fn json(text: &str) -> Result<()> {
    serde_json::from_str::<MultiHeadAttentionConfig>(text).map(drop).map_err(candle_core::Error::wrap)
}

const ROWS: &[Misuse] = &[
    (
        "inputs of no width",
        || MultiHeadAttentionConfig::new(0, 4).validate(),
        "[multi_head_attention] embed_dim is 0, expected at least 1",
    ),
    (
        "no heads",
        || MultiHeadAttentionConfig::new(8, 0).validate(),
        "[multi_head_attention] num_heads is 0, expected at least 1",
    ),
    (
        "no key heads",
        || cfg().with_num_kv_heads(0).validate(),
        "[multi_head_attention] num_kv_heads is 0, expected at least 1",
    ),
    (
        "heads of no width",
        || cfg().with_head_dim(0).validate(),
        "[multi_head_attention] head_dim is 0, expected at least 1",
    ),
    (
        "values of no width",
        || cfg().with_value_head_dim(0).validate(),
        "[multi_head_attention] value_head_dim is 0, expected at least 1",
    ),
    (
        "outputs of no width",
        || cfg().with_out_dim(0).validate(),
        "[multi_head_attention] out_dim is 0, expected at least 1",
    ),
    (
        "keys of no width",
        || cfg().with_key_size(0).validate(),
        "[multi_head_attention] key_size is 0, expected at least 1",
    ),
    (
        "value inputs of no width",
        || cfg().with_value_size(0).validate(),
        "[multi_head_attention] value_size is 0, expected at least 1",
    ),
    (
        "no positions",
        || cfg().with_context_length(0).validate(),
        "[multi_head_attention] context_length is 0, expected at least 1",
    ),
    (
        "a window of no keys",
        || cfg().with_window(0).validate(),
        "[multi_head_attention] window is 0, expected at least 1",
    ),
    (
        "an overflown width",
        || MultiHeadAttentionConfig::new(usize::MAX, 1).validate(),
        "[multi_head_attention] embed_dim is 18446744073709551615, expected at most 4294967295",
    ),
    (
        "heads beyond counting",
        || cfg().with_head_dim(u32::MAX as usize).validate(),
        "[multi_head_attention] num_heads 4 times head_dim 4294967295 is more than 4294967295",
    ),
    (
        "value heads beyond counting",
        || cfg().with_value_head_dim(1 << 31).validate(),
        "[multi_head_attention] num_heads 4 times value_head_dim 2147483648 is more than 4294967295",
    ),
    (
        "key heads that do not divide",
        || cfg().with_num_kv_heads(3).validate(),
        "[multi_head_attention] num_kv_heads is 3, which does not divide num_heads 4",
    ),
    (
        "more key heads than heads",
        || cfg().with_num_kv_heads(8).validate(),
        "[multi_head_attention] num_kv_heads is 8, which does not divide num_heads 4",
    ),
    (
        "heads that do not divide the width",
        || MultiHeadAttentionConfig::new(10, 4).validate(),
        "[multi_head_attention] num_heads is 4, which does not divide embed_dim 10; give head_dim",
    ),
    (
        "heads that do not divide the output",
        || cfg().with_out_dim(6).validate(),
        "[multi_head_attention] num_heads is 4, which does not divide out_dim 6; give head_dim",
    ),
    (
        "more heads than width",
        || MultiHeadAttentionConfig::new(2, 4).validate(),
        "[multi_head_attention] num_heads is 4, which does not divide embed_dim 2; give head_dim",
    ),
    (
        "an output width that the heads do not give",
        || cfg().with_out_proj(false).with_out_dim(12).with_head_dim(2).validate(),
        "[multi_head_attention] out_dim is 12, but without an output projection the 4 heads of width 2 give 8",
    ),
    (
        "an output bias without an output projection",
        || cfg().with_out_proj(false).with_bias(true).validate(),
        "[multi_head_attention] out_bias is set, but there is no output projection",
    ),
    (
        "dropout in percent",
        || cfg().with_dropout(10.0).validate(),
        "[multi_head_attention] dropout is 10, expected a probability from 0 to 1",
    ),
    (
        "dropout that is no number",
        || cfg().with_dropout(f64::NAN).validate(),
        "[multi_head_attention] dropout is NaN, expected a probability from 0 to 1",
    ),
    (
        "a softcap of zero",
        || cfg().with_softcap(0.0).validate(),
        "[multi_head_attention] softcap is 0, expected a finite number above zero",
    ),
    (
        "an infinite softcap",
        || cfg().with_softcap(f64::INFINITY).validate(),
        "[multi_head_attention] softcap is inf, expected a finite number above zero",
    ),
    (
        "a scale that is no number",
        || cfg().with_scale(f64::NAN).validate(),
        "[multi_head_attention] scale is NaN, expected a finite number",
    ),
    (
        "a norm of learned keys",
        || cfg().with_bias_kv(true).with_qk_norm(norm(1e-6)).validate(),
        "[multi_head_attention] bias_kv and qk_norm are both set, but no norm is defined for a learned key",
    ),
    (
        "an eps below zero",
        || cfg().with_qk_norm(norm(-1e-6)).validate(),
        "[multi_head_attention] qk_norm has eps -0.000001, expected a finite number of zero or more",
    ),
    (
        "an eps that f32 does not hold",
        || cfg().with_qk_norm(norm(f64::MAX)).validate(),
        "[multi_head_attention] qk_norm has eps 17976…, expected a finite number of zero or more",
    ),
    (
        "an unknown field in JSON",
        || json(r#"{"embed_dim": 8, "num_heads": 4, "num_attention_heads": 4}"#),
        "unknown field `num_attention_heads`, expected one of `embed_dim`, `num_heads`, `num_kv_heads`, …",
    ),
    (
        "a field in JSON twice",
        || json(r#"{"embed_dim": 8, "num_heads": 4, "num_heads": 2}"#),
        "duplicate field `num_heads` at line 1 column …",
    ),
    ("a field in JSON left out", || json(r#"{"embed_dim": 8}"#), "missing field `num_heads` at line 1 column …"),
    (
        "a negative size in JSON",
        || json(r#"{"embed_dim": -8, "num_heads": 4}"#),
        "invalid value: integer `-8`, expected usize at line 1 column …",
    ),
    (
        "a broken size in JSON",
        || json(r#"{"embed_dim": 8.5, "num_heads": 4}"#),
        "invalid type: floating point `8.5`, expected usize at line 1 column …",
    ),
    (
        "an unknown norm in JSON",
        || json(r#"{"embed_dim": 8, "num_heads": 4, "qk_norm": {"kind": "l2", "scope": "per_head", "eps": 0}}"#),
        "unknown variant `l2`, expected `rms` or `layer` at line 1 column …",
    ),
    (
        "an unknown field of a norm in JSON",
        || {
            json(
                r#"{"embed_dim": 8, "num_heads": 4, "qk_norm": {"kind": "rms", "scope": "per_head", "eps": 0, "bias": true}}"#,
            )
        },
        "unknown field `bias`, expected one of `kind`, `scope`, `eps` at line 1 column …",
    ),
];

#[test]
fn every_rule_of_a_config_names_what_breaks_it() {
    check(ROWS);
}

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
