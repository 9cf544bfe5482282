//! Decoders of text in which few layers have softmax attention, and the others are recurrences.

use super::{DECODER, LLAMA, MODEL};
use crate::hf::family::{Bias, Family, Number, Scale};
use crate::hf::rope::{Rotated, rope};
use crate::hf::windows::{self, Window};
use candle_attention_core::WeightLayout;

/// In alphabetical order.
pub(super) const ROWS: &[Family] = &[
    LLAMA.of("bamba").kv_heads(8).rope(rope(10_000.0, 262_144).partial(0.5)).window(Window::By(windows::bamba)),
    LLAMA.of("granitemoehybrid")
        .rope(rope(10_000.0, 2048).layers(Rotated::IfText("position_embedding_type", "rope")))
        .window(Window::By(windows::granite_hybrid)).scale(Scale::Field(Number("attention_multiplier", 1.0))),
    DECODER.of("jamba").kv_heads(8).window(Window::By(windows::jamba)),
    // The layers of experts and of other feed-forward networks count too.
    DECODER.of("nemotron_h").sizes([4, 4096, 32]).grouped(8, 128)
        .at(&["model.", "backbone.", ""], "layers.{}.mixer", WeightLayout::Canonical)
        .bias(Bias::AllIf("attention_bias", false)).aliases(&[("layer_types", "layers_block_type")])
        .window(Window::By(windows::nemotron_h)),
    DECODER.of("recurrent_gemma").sizes([26, 2560, 10]).head_dim_follows(true)
        .bias(Bias::OutAndQkvIf("attention_bias", false))
        .at(MODEL, "layers.{}.temporal_block", WeightLayout::Canonical).rope(rope(10_000.0, 8192).partial(0.5))
        .window(Window::By(windows::recurrent_gemma)),
];
