//! Decoders of text whose context passes a gate, or whose queries are scaled by position.

use super::{LLAMA, rms_per_head};
use crate::hf::family::{Bias, Family, Number, Scale};
use crate::hf::rope::{Rotated, rope};
use crate::hf::rules::{self, GATE, GATE_IN_QUERY, GATE_OF_HEADS};
use crate::hf::windows::{self, Pattern::*, Window};
use candle_attention_core::QkNormKind;

/// The parameters of rotary positions that its class in transformers has by default.
const MINISTRAL_3_ROPE: &str = r#"{"rope_type": "yarn", "factor": 16, "mscale": 1, "mscale_all_dim": 1,
    "original_max_position_embeddings": 16384}"#;

const QWEN3_NEXT: Family = LLAMA.of("qwen3_next").sizes([48, 2048, 16]).grouped(2, 256)
    .rope(rope(10_000.0, 32_768).partial(0.25)).qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsPlusOne))
    .window(Window::By(windows::softmax_last_of_four)).gate(GATE_IN_QUERY);

/// In alphabetical order.
pub(super) const ROWS: &[Family] = &[
    LLAMA.of("afmoe").sizes([32, 2048, 16]).head_dim(128).rope(rope(10_000.0, 16_384).layers(Rotated::Windowed))
        .qk_norm(rms_per_head(1e-5)).window(Window::Layers(ButLastBy("global_attn_every_n_layers", 4), Some(1024)))
        .gate(GATE),
    LLAMA.of("laguna").sizes([40, 2048, 48]).grouped(8, 128).rope(rope(500_000.0, 131_072).partial(0.5))
        .windowed_rope(rope(10_000.0, 131_072).partial(1.0)).qk_norm(rms_per_head(1e-6))
        .window(Window::Layers(NoLayer, Some(512))).rules(&[rules::laguna]),
    // Most of its layers are convolutions.
    LLAMA.of("lfm3").sizes([24, 2048, 16]).grouped(4, 128)
        .rope(rope(1e6, 128_000).default_parameters(r#"{"rope_type": "proportional", "partial_rotary_factor": 0.5}"#))
        .windowed_rope(rope(10_000.0, 128_000)).qk_norm(rms_per_head(1e-5).eps(Number("norm_eps", 1e-5)))
        .window(Window::By(windows::lfm3)).rules(&[rules::gate_if_flag]),
    LLAMA.of("llama4_text").sizes([48, 5120, 40]).grouped(8, 128)
        .rope(rope(500_000.0, 131_072).interleaved().layers(Rotated::If(rules::alternates_rotary)))
        .rules(&[rules::llama4]),
    LLAMA.of("ministral3").sizes([34, 4096, 32]).grouped(8, 128).bias(Bias::None)
        .rope(rope(1e6, 262_144).default_parameters(MINISTRAL_3_ROPE)).window(Window::All(None))
        .rules(&[rules::query_scaling]),
    LLAMA.of("muse_glimmer_text").sizes([52, 6656, 32]).grouped(2, 128)
        .rope(rope(10_000.0, 131_072).layers(Rotated::If(rules::muse_rotary)))
        .qk_norm(rms_per_head(1e-5).kind(QkNormKind::RmsNoWeight)).window(Window::By(windows::muse_glimmer))
        .gate(GATE).scale(Scale::UsualTimes(Number("qk_scale_factor", 3.87))),
    QWEN3_NEXT,
    // As published, several of its fields are lists or stand in these.
    LLAMA.of("step3p5").sizes([45, 4096, 64]).grouped(8, 128)
        .aliases(&[("num_attention_groups", "num_key_value_heads")]).rope(rope(10_000.0, 128_000).partial(1.0))
        .windowed_rope(rope(10_000.0, 128_000).partial(1.0))
        .qk_norm(rms_per_head(1e-5).kind(QkNormKind::RmsPlusOne)).window(Window::Layers(NoLayer, None))
        .only(&[("attention_other_setting", "null"), ("partial_rotary_factors", "null"), ("gating", "true")])
        .gate(GATE_OF_HEADS).rules(&[rules::step3p5]),
];
