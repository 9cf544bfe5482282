//! Rotary positions on several axes: decoders of text in models of images and videos, and encoders of images.

use super::{Bias, Family, Number, Scale};
use super::images_and_sound::{CLIP_IMAGES, IMAGES};
use super::{DECODER, ENCODER, LLAMA, QKV, rms_per_head};
use crate::hf::linear::Linear;
use crate::hf::rope::{Axes, Rope, rope};
use crate::hf::rules::{self, GATE_IN_QUERY};
use crate::hf::shapes;
use crate::hf::windows::{self, Window};
use candle_attention_core::{RopeAxisLayout, WeightLayout};
use candle_attention_modules::norm::QkNormKind;

/// Sets the axes time, height and width, one section after the other.
const fn qwen2_vl(rope: Rope) -> Rope {
    rope.axes(Axes(RopeAxisLayout::Sections, &[16, 24, 24]))
}

/// Sets the axes time, height and width, interleaved.
const fn qwen3_vl(rope: Rope) -> Rope {
    rope.axes(Axes(RopeAxisLayout::Interleaved, &[24, 20, 20]))
}

const fn glm4v(rope: Rope) -> Rope {
    rope.axes(Axes(RopeAxisLayout::Sections, &[8, 12, 12]))
}

/// Rows and columns of an image, for halves of each head.
const fn image(theta: f64) -> Rope {
    rope(theta, 1).axes(Axes(RopeAxisLayout::Axial, &[]))
}

const PIXTRAL: &[&str] = &["vision_tower.", "", "model.vision_tower.", "vision_encoder."];
const SAM3: &[&str] = &["detector_model.vision_encoder.backbone.", "vision_encoder.backbone.", "backbone.", ""];

const VISUAL: &[&str] = &["model.visual.", "visual.", "", "thinker.visual."];

const QWEN2_VL: Family = DECODER.of("qwen2_vl_text").layers(80).width(8192).query_heads(64).kv_heads(8)
    .head_dim_follows(true)
    .bias(Bias::Qkv).rope(qwen2_vl(rope(1e6, 32_768))).window(Window::From(80));
const QWEN3_VL: Family = LLAMA.of("qwen3_vl_text").layers(32).width(4096).query_heads(32).grouped(32, 128)
    .rope(qwen3_vl(rope(500_000.0, 128_000))).qk_norm(rms_per_head(1e-6));
const QWEN3_5: Family = QWEN3_VL.of("qwen3_5_text").layers(32).width(4096).query_heads(16).grouped(4, 256)
    .rope(rope(10_000.0, 32_768).partial(0.25).axes(Axes(RopeAxisLayout::Interleaved, &[11, 11, 10])))
    .qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsPlusOne)).linear(Linear::QWEN3_5)
    .gate(GATE_IN_QUERY);
const QWEN3_5_MOE: Family = QWEN3_5.of("qwen3_5_moe_text").layers(40).width(2048).query_heads(16).grouped(2, 256);
const QWEN4: Family = QWEN3_5_MOE.of("qwen4_exp_text")
    .rope(rope(10_000.0, 32_768).partial(1.0).axes(Axes(RopeAxisLayout::Interleaved, &[11, 11, 10])))
    .linear(Linear::QWEN4).rules(&[rules::qwen4_indexer]);
const GLM4V: Family = DECODER.of("glm4v_text").layers(40).width(4096).query_heads(32).kv_heads(2)
    .head_dim_follows(true).bias(Bias::Qkv)
    .rope(glm4v(rope(10_000.0, 32_768).partial(1.0).interleaved()));
const QWEN3_VL_IMAGES: Family = ENCODER.of("qwen3_vl_vision").layers(27).width(1152).query_heads(16)
    .layers_from("depth").width_from("hidden_size").query_heads_from("num_heads").at(VISUAL, "blocks.{}.attn", QKV)
    .dropout(Number("attention_dropout", 0.0)).rope(image(10_000.0));
const GLM4V_IMAGES: Family = QWEN3_VL_IMAGES.of("glm4v_vision").layers(24).width(1536).query_heads(12)
    .bias(Bias::QkvIf("attention_bias", false));
const GLM_OCR_IMAGES: Family = GLM4V_IMAGES.of("glm_ocr_vision").layers(24).width(1024).query_heads(16)
    .bias(Bias::AllIf("attention_bias", true)).qk_norm(rms_per_head(1e-5));

/// SigLIP's encoder of images with rotary positions.
const SIGLIP_ON_AXES: Family = CLIP_IMAGES.of("paddleocr_vl_vision").layers(27).width(1152).query_heads(16)
    .below(&["model.visual.vision_model.", "visual.vision_model.", "model.vision_model.", "vision_model.", ""])
    .rope(image(10_000.0));
const DINOV3: Family = ENCODER.of("dinov3_vit").layers(12).width(384).query_heads(6).rope(image(100.0))
    .bias(Bias::Each(&[("query_bias", true), ("key_bias", false), ("value_bias", true), ("proj_bias", true)]));
/// Layers without the prefix of an encoder.
const TOWER: Family = ENCODER.at(IMAGES, "layers.{}.self_attn", WeightLayout::Opt).rope(image(10_000.0));
const MUSE: Family = TOWER.of("muse_glimmer_vision").layers(50).width(1536).query_heads(16)
    .at(IMAGES, "layers.{}.attn", WeightLayout::Kimi);

/// Rotary positions on several axes: decoders of text in models of images and videos, and encoders of images.
pub(super) const ROWS: &[Family] = &[
    QWEN3_VL_IMAGES.of("cohere_compass_vision"),
    Family { qk_norm: None, ..QWEN3_VL }.of("cosmos3_edge_text").layers(28).width(2048).query_heads(16).grouped(8, 128)
        .rope(qwen3_vl(rope(1e8, 131_072))),
    // As published, and as transformers 5 saves it.
    DINOV3.at(&["dinov3_vit.", "", "model."], "layer.{}.attention", WeightLayout::Canonical)
        .or_at(&["dinov3_vit.model.", "dinov3_vit.", ""], "model.layer.{}.attention", WeightLayout::Canonical),
    // Queries, a class token and registers are at 0, before the patches. The masks of its last layers are the caller's.
    DINOV3.of("eomt_dinov3").layers(24).width(1024).query_heads(16)
        .at(&[""], "layers.{}.attention", WeightLayout::Canonical),
    QWEN3_VL_IMAGES.of("exaone4_5_vision").layers(32).width(3584).query_heads(16).kv_heads(8).head_dim_follows(true),
    QWEN3_VL_IMAGES.of("ernie4_5_vl_moe_vision").layers(32).width(1280).query_heads(16)
        .at(&["model.vision_tower.", "vision_tower.", "model.visual.", "visual.", ""], "blocks.{}.attn", QKV),
    // Columns, then rows.
    ENCODER.of("gemma4_vision").layers(16).width(768).query_heads(12).grouped(12, 64).bias(Bias::None)
        .at(&["model.vision_tower.", "vision_tower.", ""], "encoder.layers.{}.self_attn", WeightLayout::Moshi)
        .rope(rope(100.0, 1).axes(Axes(RopeAxisLayout::AxialParts, &[]))).qk_norm(rms_per_head(1e-6)).value_norm(true)
        .scale(Scale::Fixed(1.0)).only(&[("use_clipped_linears", "false")]),
    GLM4V.of("glm4v_moe_text").layers(46).width(4096).query_heads(96).kv_heads(8).head_dim_follows(false)
        .bias(Bias::QkvIf("attention_bias", true)).rope(glm4v(rope(10_000.0, 65_536).partial(0.5))),
    GLM4V,
    GLM4V_IMAGES.of("glm4v_moe_vision"),
    GLM4V_IMAGES,
    GLM_OCR_IMAGES,
    GLM_OCR_IMAGES.of("glm5_next_vision"),
    GLM4V.of("glm_image_text").bias(Bias::QkvIf("attention_bias", true))
        .rope(glm4v(rope(10_000.0, 131_072).partial(1.0))),
    GLM4V.of("glm_ocr_text").layers(16).width(1024).query_heads(16).kv_heads(8).head_dim_follows(false)
        .bias(Bias::None),
    // Columns, then rows; a class token is at (0, 0).
    TOWER.of("inkling2_vision").layers(23).width(1024).query_heads(16).rope(image(10_000.0).interleaved()),
    // Columns, then rows.
    MUSE.of("kimi_k25_vision").layers(27).width(1152).query_heads(16)
        .rope(rope(10_000.0, 1).axes(Axes(RopeAxisLayout::AxialTurns, &[]))),
    // Some of its layers are convolutions.
    TOWER.of("lfm3_vl_vision").layers(14).width(1024).query_heads(16).kv_heads(8).head_dim_follows(true)
        .bias(Bias::None)
        .rope(image(1e6)).qk_norm(rms_per_head(1e-5).eps(Number("norm_eps", 1e-5)))
        .window(Window::By(windows::lfm3_images)),
    // Columns, then rows, which count from 1; a class token is at (0, 0).
    TOWER.of("llama4_vision_model").layers(34).width(768).query_heads(16)
        .at(&["vision_model.model.", "vision_model.", ""], "layers.{}.self_attn", WeightLayout::Canonical)
        .or_at(&["vision_model.", ""], "model.layers.{}.self_attn", WeightLayout::Canonical)
        .rope(image(10_000.0).interleaved()),
    // Time, height and width.
    TOWER.of("minimax_m3_vl_vision").layers(32).width(1280).query_heads(16).rules(&[rules::thirds_of_heads]),
    // Columns, then rows, which count from 1.
    MUSE,
    MUSE.of("muse_spark_vision"),
    QWEN2_VL.of("paddleocr_vl_text").layers(18).width(1024).query_heads(16).grouped(2, 128).head_dim_follows(false)
        .bias(Bias::AllIf("use_bias", false)).rope(qwen2_vl(rope(500_000.0, 131_072))).window(Window::None),
    ENCODER.of("pixtral").layers(24).width(1024).query_heads(16).bias(Bias::None)
        .at(PIXTRAL, "transformer.layers.{}.attention", WeightLayout::Canonical)
        .rope(rope(10_000.0, 1).axes(Axes(RopeAxisLayout::AxialInterleaved, &[]))),
    SIGLIP_ON_AXES,
    QWEN2_VL.of("qwen2_5_omni_text").layers(28).width(3584).query_heads(28).kv_heads(4)
        .below(&["thinker.model.", "model.", ""])
        .window(Window::From(28)),
    QWEN2_VL.of("qwen2_5_omni_talker").layers(28).width(3584).query_heads(28).grouped(4, 128).head_dim_follows(false)
        .below(&["talker.model.", "model.", ""]).window(Window::From(28)),
    QWEN3_VL_IMAGES.of("qwen2_5_omni_vision_encoder").layers(32).width(3584).query_heads(16)
        .at(VISUAL, "blocks.{}.attn", WeightLayout::QwenOmni),
    QWEN3_VL_IMAGES.of("qwen2_5_vl_vision").layers(32).width(3584).query_heads(16),
    // As published, the config of the model has the fields of the text.
    QWEN2_VL.of("qwen2_5_vl").section("text_config"),
    QWEN2_VL.of("qwen2_5_vl_text"),
    QWEN2_VL.of("qwen2_vl").section("text_config"),
    QWEN2_VL,
    // `hidden_size` is the width of the texts.
    QWEN3_VL_IMAGES.of("qwen2_vl_vision").layers_from("depth").width_from("embed_dim").query_heads_from("num_heads")
        .usual_names(false)
        .layers(32).width(1280).query_heads(16),
    QWEN3_5.of("qwen3_5").section("text_config"),
    QWEN3_5_MOE.of("qwen3_5_moe").section("text_config"),
    QWEN3_5_MOE,
    QWEN3_VL_IMAGES.of("qwen3_5_moe_vision"),
    QWEN3_5,
    QWEN3_VL_IMAGES.of("qwen3_5_vision"),
    QWEN3_VL.of("qwen3_omni_moe_text").layers(28).width(2048).query_heads(28).kv_heads(4)
        .below(&["thinker.model.", "model.", ""])
        .rope(qwen3_vl(rope(1e6, 32_768))),
    QWEN3_VL_IMAGES.of("qwen3_omni_moe_vision_encoder"),
    QWEN3_VL.of("qwen3_vl_moe_text").layers(24).width(2048).query_heads(16).kv_heads(16),
    QWEN3_VL_IMAGES.of("qwen3_vl_moe_vision"),
    QWEN3_VL,
    QWEN3_VL_IMAGES,
    QWEN4,
    QWEN3_VL_IMAGES.of("qwen4_exp_vision"),
    ENCODER.of("sam3_vit_model").layers(32).width(1024).query_heads(16)
        .at(SAM3, "layers.{}.attention", WeightLayout::Canonical)
        .rope(rope(10_000.0, 1).axes(Axes(RopeAxisLayout::Axial, &[])).interleaved()),
    // As published, and by the names of transformers' own module.
    DINOV3.of("sapiens2").layers(24).width(1024).query_heads(16)
        .at(&["", "backbone."], "blocks.{}.attn", WeightLayout::Sapiens)
        .or_at(&["model.model.", "model.", "backbone.model.", ""], "layer.{}.attention", WeightLayout::Canonical)
        .bias(Bias::Each(&[("query_bias", true), ("key_bias", true), ("value_bias", true), ("proj_bias", true)]))
        .rules(&[shapes::sapiens]),
    // Columns, then rows.
    TOWER.of("step3p5_vision").layers(47).width(1536).query_heads(16).rope(image(10_000.0).interleaved())
        .at(&["vision_model.", "model.vision_model.", ""], "transformer.resblocks.{}.attn", WeightLayout::Torch),
    SIGLIP_ON_AXES.of("video_llama_3_vision").layers(12).width(768).query_heads(12).below(IMAGES),
];
