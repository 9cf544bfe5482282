//! Rotary positions on several axes: decoders of text beside images and videos, and encoders of images.

use candle_core::Result;

use super::{DECODER, ENCODER, rms_norm};
use crate::hf::family::{Bias, Family, Heads, ModuleNames, Norm, Rotary, at};
use crate::hf::fields::Fields;
use crate::hf::rope::{Rope, rope};
use crate::hf::rules::{qwen_window_from, softmax_each};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{
    GateActivation, GatePlace, GateScope, OutputGate, QkNormKind, QkNormScope, RopeAxisLayout, WeightLayout,
};

const QKV: WeightLayout = WeightLayout::Packed(PackedNaming::Qkv, QkvOrder::ByPart);

/// Time, height and width, section after section.
const fn qwen2_vl(rope: Rope) -> Rotary {
    Rotary::All(rope.on_axes(RopeAxisLayout::Sections, &[16, 24, 24]))
}

/// The same in turns.
const fn qwen3_vl(rope: Rope) -> Rotary {
    Rotary::All(rope.on_axes(RopeAxisLayout::Interleaved, &[24, 20, 20]))
}

const fn glm4v(rope: Rope) -> Rotary {
    Rotary::All(rope.on_axes(RopeAxisLayout::Sections, &[8, 12, 12]))
}

/// Rows and columns of an image, for halves of each head.
const fn image(theta: f64) -> Rotary {
    Rotary::All(rope(theta, 1).on_axes(RopeAxisLayout::Axial, &[]))
}

const SAM3: &[&str] = &["detector_model.vision_encoder.backbone.", "vision_encoder.backbone.", "backbone.", ""];

/// Vision towers of Qwen's kind.
const fn blocks(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "blocks.{}.attn", QKV)
}

const VISUAL: &[&str] = &["model.visual.", "visual.", "", "thinker.visual."];

#[rustfmt::skip]
const QWEN2_VL: Family = Family {
    model_type: "qwen2_vl_text", sizes: [80, 8192, 64], heads: Heads::Grouped(Some(8), None), head_dim_follows: true,
    bias: Bias::Qkv, rope: qwen2_vl(rope(1e6, 32_768)), window: |fields, layer| qwen_window_from(fields, layer, 80),
    ..DECODER
};
#[rustfmt::skip]
const QWEN3_VL: Family = Family {
    model_type: "qwen3_vl_text", sizes: [32, 4096, 32], heads: Heads::Grouped(Some(32), Some(128)),
    bias: Bias::AllIf("attention_bias", false), rope: qwen3_vl(rope(500_000.0, 128_000)),
    qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)), ..DECODER
};
#[rustfmt::skip]
const QWEN3_5: Family = Family {
    model_type: "qwen3_5_text", sizes: [32, 4096, 16], heads: Heads::Grouped(Some(4), Some(256)),
    rope: Rotary::All(
        rope(10_000.0, 32_768).partial("partial_rotary_factor", 0.25)
            .on_axes(RopeAxisLayout::Interleaved, &[11, 11, 10]),
    ),
    qk_norm: Some(Norm { kind: QkNormKind::RmsPlusOne, ..rms_norm(QkNormScope::PerHead, 1e-6) }),
    window: |fields, layer| softmax_each(fields, layer, 4),
    adjust: |_, _, cfg| Ok(cfg.with_output_gate(OutputGate {
        activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place: GatePlace::Query,
    })),
    ..QWEN3_VL
};
#[rustfmt::skip]
const GLM4V: Family = Family {
    model_type: "glm4v_text", sizes: [40, 4096, 32], heads: Heads::Grouped(Some(2), None), head_dim_follows: true,
    bias: Bias::Qkv, rope: glm4v(rope(10_000.0, 32_768).partial("partial_rotary_factor", 1.0).interleaved()), ..DECODER
};
#[rustfmt::skip]
const QWEN3_VL_IMAGES: Family = Family {
    model_type: "qwen3_vl_vision", sizes: [27, 1152, 16], names: ["depth", "hidden_size", "num_heads"],
    modules: &[blocks(VISUAL)], dropout: ("attention_dropout", 0.0), rope: image(10_000.0), ..ENCODER
};
#[rustfmt::skip]
const GLM4V_IMAGES: Family = Family {
    model_type: "glm4v_vision", sizes: [24, 1536, 12], bias: Bias::QkvIf("attention_bias", false), ..QWEN3_VL_IMAGES
};
#[rustfmt::skip]
const GLM_OCR_IMAGES: Family = Family {
    model_type: "glm_ocr_vision", sizes: [24, 1024, 16], bias: Bias::AllIf("attention_bias", true),
    qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-5)), ..GLM4V_IMAGES
};

fn qkvo_bias(
    fields: &Fields,
    cfg: candle_attention_core::MultiHeadAttentionConfig,
) -> Result<candle_attention_core::MultiHeadAttentionConfig> {
    Ok(cfg
        .with_q_bias(fields.flag("query_bias", true)?)
        .with_k_bias(fields.flag("key_bias", false)?)
        .with_v_bias(fields.flag("value_bias", true)?)
        .with_out_bias(fields.flag("proj_bias", true)?))
}

/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family { model_type: "cohere_compass_vision", ..QWEN3_VL_IMAGES },
    Family {
        model_type: "cosmos3_edge_text", sizes: [28, 2048, 16], heads: Heads::Grouped(Some(8), Some(128)),
        rope: qwen3_vl(rope(1e8, 131_072)), qk_norm: None, ..QWEN3_VL
    },
    Family {
        model_type: "dinov3_vit", sizes: [12, 384, 6],
        // As published, and as transformers 5 saves it.
        modules: &[
            at(&["dinov3_vit.", "", "model."], "layer.{}.attention", WeightLayout::Canonical),
            at(&["dinov3_vit.model.", "dinov3_vit.", ""], "model.layer.{}.attention", WeightLayout::Canonical),
        ],
        rope: image(100.0), adjust: |fields, _, cfg| qkvo_bias(fields, cfg), ..ENCODER
    },
    Family {
        model_type: "glm4v_moe_text", sizes: [46, 4096, 96], heads: Heads::Grouped(Some(8), None),
        head_dim_follows: false, bias: Bias::QkvIf("attention_bias", true),
        rope: glm4v(rope(10_000.0, 65_536).partial("partial_rotary_factor", 0.5)), ..GLM4V
    },
    GLM4V,
    Family { model_type: "glm4v_moe_vision", ..GLM4V_IMAGES },
    GLM4V_IMAGES,
    GLM_OCR_IMAGES,
    Family { model_type: "glm5_next_vision", ..GLM_OCR_IMAGES },
    Family {
        model_type: "glm_image_text", bias: Bias::QkvIf("attention_bias", true),
        rope: glm4v(rope(10_000.0, 131_072).partial("partial_rotary_factor", 1.0)), ..GLM4V
    },
    Family {
        model_type: "glm_ocr_text", sizes: [16, 1024, 16], heads: Heads::Grouped(Some(8), None),
        head_dim_follows: false, bias: Bias::None, ..GLM4V
    },
    Family {
        model_type: "paddleocr_vl_text", sizes: [18, 1024, 16], heads: Heads::Grouped(Some(2), Some(128)),
        head_dim_follows: false, bias: Bias::AllIf("use_bias", false), rope: qwen2_vl(rope(500_000.0, 131_072)),
        window: |_, _| Ok(None), ..QWEN2_VL
    },
    Family {
        model_type: "pixtral", sizes: [24, 1024, 16], bias: Bias::None,
        modules: &[at(
            &["vision_tower.", "", "model.vision_tower.", "vision_encoder."], "transformer.layers.{}.attention",
            WeightLayout::Canonical,
        )],
        rope: Rotary::All(rope(10_000.0, 1).on_axes(RopeAxisLayout::AxialDealt, &[])), ..ENCODER
    },
    Family {
        model_type: "qwen2_5_omni_text", sizes: [28, 3584, 28], heads: Heads::Grouped(Some(4), None),
        modules: &[at(&["thinker.model.", "model.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        window: |fields, layer| qwen_window_from(fields, layer, 28), ..QWEN2_VL
    },
    // As published, the text's fields are those of the whole.
    Family { model_type: "qwen2_5_vl", section: Some("text_config"), ..QWEN2_VL },
    Family { model_type: "qwen2_5_vl_text", ..QWEN2_VL },
    Family { model_type: "qwen2_vl", section: Some("text_config"), ..QWEN2_VL },
    QWEN2_VL,
    Family { model_type: "qwen3_5_moe_text", sizes: [40, 2048, 16], heads: Heads::Grouped(Some(2), Some(256)), ..QWEN3_5 },
    Family { model_type: "qwen3_5_moe_vision", ..QWEN3_VL_IMAGES },
    QWEN3_5,
    Family { model_type: "qwen3_5_vision", ..QWEN3_VL_IMAGES },
    Family {
        model_type: "qwen3_omni_moe_text", sizes: [28, 2048, 28], heads: Heads::Grouped(Some(4), None),
        modules: &[at(&["thinker.model.", "model.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        rope: qwen3_vl(rope(1e6, 32_768)), ..QWEN3_VL
    },
    Family { model_type: "qwen3_omni_moe_vision_encoder", ..QWEN3_VL_IMAGES },
    Family { model_type: "qwen3_vl_moe_text", sizes: [24, 2048, 16], heads: Heads::Grouped(Some(16), None), ..QWEN3_VL },
    Family { model_type: "qwen3_vl_moe_vision", ..QWEN3_VL_IMAGES },
    QWEN3_VL,
    QWEN3_VL_IMAGES,
    Family { model_type: "qwen4_exp_vision", ..QWEN3_VL_IMAGES },
    Family {
        model_type: "sam3_vit_model", sizes: [32, 1024, 16],
        modules: &[at(SAM3, "layers.{}.attention", WeightLayout::Canonical)],
        rope: Rotary::All(rope(10_000.0, 1).on_axes(RopeAxisLayout::Axial, &[]).interleaved()), ..ENCODER
    },
];
