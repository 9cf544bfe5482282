//! Decoders of text whose context passes a gate, or whose queries are scaled by position.

use candle_core::Result;

use super::{DECODER, LAYERS, rms_norm};
use crate::hf::family::{Bias, Family, Heads, Norm, Rotary};
use crate::hf::fields::Fields;
use crate::hf::rope::rope;
use crate::hf::rules::{llama4, ministral3_scaling, query_scaling, sliding, smollm3_rotates, softmax_each};
use candle_attention_core::{GateActivation, GatePlace, GateScope, OutputGate, QkNormKind, QkNormScope, RopeScaling};

const IN_QUERY: OutputGate =
    OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place: GatePlace::Query };
const OWN: OutputGate = OutputGate { place: GatePlace::Own { bias: false }, ..IN_QUERY };

/// Llama's biases, and heads whose width is a field.
#[rustfmt::skip]
const GATED: Family = Family { bias: Bias::AllIf("attention_bias", false), ..DECODER };
#[rustfmt::skip]
const QWEN3_NEXT: Family = Family {
    model_type: "qwen3_next", sizes: [48, 2048, 16], heads: Heads::Grouped(Some(2), Some(256)),
    rope: Rotary::All(rope(10_000.0, 32_768).partial("partial_rotary_factor", 0.25)),
    qk_norm: Some(Norm { kind: QkNormKind::RmsPlusOne, ..rms_norm(QkNormScope::PerHead, 1e-6) }),
    window: |fields, layer| softmax_each(fields, layer, 4),
    adjust: |_, _, cfg| Ok(cfg.with_output_gate(IN_QUERY)), ..GATED
};

/// Layers that see all keys have no positions: every fourth, counted from the last.
fn muse_glimmer_is_full(fields: &Fields, layer: usize) -> Result<bool> {
    Ok((fields.get_or(LAYERS, 52)? - 1).abs_diff(layer).is_multiple_of(4))
}

/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "afmoe", sizes: [32, 2048, 16], heads: Heads::Grouped(None, Some(128)),
        rope: Rotary::Windowed(rope(10_000.0, 16_384)), qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-5)),
        window: |fields, layer| {
            let n = fields.get_or("global_attn_every_n_layers", 4)?;
            sliding(fields, layer, !(layer + 1).is_multiple_of(n), Some(1024))
        },
        adjust: |_, _, cfg| Ok(cfg.with_output_gate(OWN)), ..GATED
    },
    Family {
        model_type: "laguna", sizes: [40, 2048, 48], heads: Heads::Grouped(Some(8), Some(128)),
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 131_072).partial("partial_rotary_factor", 1.0),
            full: rope(500_000.0, 131_072).partial("partial_rotary_factor", 0.5), scales_windowed: false,
        },
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)),
        window: |fields, layer| sliding(fields, layer, false, Some(512)),
        adjust: |fields, layer, cfg| {
            let per_head = fields.get("gating").is_none_or(|gating| *gating == true || *gating == "per-head");
            let scope = if per_head { GateScope::PerHead } else { GateScope::PerEntry };
            let gate = OutputGate { activation: GateActivation::Softplus, scope, ..OWN };
            let heads = match fields.of_layer("num_attention_heads_per_layer", layer)? {
                None => cfg.num_heads(),
                Some(heads) => match heads.as_u64().and_then(|heads| usize::try_from(heads).ok()) {
                    Some(heads) => heads,
                    None => return fields.fail(format!("layer {layer} has {heads} heads, expected a whole number")),
                },
            };
            let key_heads = cfg.num_kv_heads();
            Ok(cfg.with_heads(heads, key_heads).with_output_gate(gate))
        },
        ..GATED
    },
    // Most of its layers are convolutions.
    Family {
        model_type: "lfm3", sizes: [24, 2048, 16], heads: Heads::Grouped(Some(4), Some(128)),
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 128_000),
            full: rope(1e6, 128_000)
                .scaled_unless_given(|_| Ok(RopeScaling::Proportional { factor: 1.0, proportion: 0.5 })),
            scales_windowed: false,
        },
        qk_norm: Some(Norm { eps: ("norm_eps", 1e-5), ..rms_norm(QkNormScope::PerHead, 1e-5) }),
        window: |fields, layer| {
            if fields.get("layer_types").is_none() && (!layer.is_multiple_of(2) || layer == 0) {
                return fields.fail(format!("layer {layer} has conv, expected softmax attention"));
            }
            sliding(fields, layer, layer.is_multiple_of(4), Some(256))
        },
        adjust: |fields, _, cfg| Ok(match fields.flag("use_attention_gate", true)? {
            true => cfg.with_output_gate(OutputGate { scope: GateScope::PerHead, ..OWN }),
            false => cfg,
        }),
        ..GATED
    },
    Family {
        model_type: "llama4_text", sizes: [48, 5120, 40], heads: Heads::Grouped(Some(8), Some(128)),
        rope: Rotary::If(smollm3_rotates, rope(500_000.0, 131_072).interleaved()), adjust: llama4, ..GATED
    },
    Family {
        model_type: "ministral3", sizes: [34, 4096, 32], heads: Heads::Grouped(Some(8), Some(128)), bias: Bias::None,
        rope: Rotary::All(rope(1e6, 262_144).scaled_unless_given(ministral3_scaling)),
        window: |fields, _| fields.nullable("sliding_window", None), adjust: query_scaling, ..DECODER
    },
    Family {
        model_type: "muse_glimmer_text", sizes: [52, 6656, 32], heads: Heads::Grouped(Some(2), Some(128)),
        rope: Rotary::If(|fields, layer| Ok(match fields.of_layer("layer_rope_theta", layer)? {
            Some(theta) => theta.as_f64() != Some(0.0),
            None => !muse_glimmer_is_full(fields, layer)?,
        }), rope(10_000.0, 131_072)),
        qk_norm: Some(Norm { kind: QkNormKind::RmsNoWeight, ..rms_norm(QkNormScope::PerHead, 1e-5) }),
        window: |fields, layer| sliding(fields, layer, !muse_glimmer_is_full(fields, layer)?, Some(2048)),
        adjust: |fields, _, cfg| {
            let scale = fields.get_or("qk_scale_factor", 3.87)? / (cfg.head_dim() as f64).sqrt();
            Ok(cfg.with_scale(scale).with_output_gate(OWN))
        },
        ..GATED
    },
    QWEN3_NEXT,
    Family {
        model_type: "step3p5", sizes: [45, 4096, 64], heads: Heads::Grouped(Some(8), Some(128)),
        aliases: &[("num_attention_groups", "num_key_value_heads")],
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 128_000).partial("partial_rotary_factor", 1.0),
            full: rope(10_000.0, 128_000).partial("partial_rotary_factor", 1.0), scales_windowed: false,
        },
        qk_norm: Some(Norm { kind: QkNormKind::RmsPlusOne, ..rms_norm(QkNormScope::PerHead, 1e-5) }),
        window: |fields, layer| sliding(fields, layer, false, None),
        // As published, several of its fields are lists or stand in these.
        only: &[("attention_other_setting", "null"), ("partial_rotary_factors", "null"), ("gating", "true")],
        adjust: |fields, _, cfg| {
            let width = fields.optional("query_pre_attn_scalar")?.unwrap_or(cfg.head_dim() as f64);
            let gate = OutputGate { scope: GateScope::PerHead, ..OWN };
            let other = fields.optional("num_sliding_attention_heads")?;
            let cfg = cfg.with_scale(width.powf(-0.5)).with_output_gate(gate);
            Ok(match other.filter(|_| cfg.window().is_some() && !fields.has("per_layer_config")) {
                Some(heads) => {
                    let key_heads = cfg.num_kv_heads();
                    cfg.with_heads(heads, key_heads)
                }
                None => cfg,
            })
        },
        ..GATED
    },
];
