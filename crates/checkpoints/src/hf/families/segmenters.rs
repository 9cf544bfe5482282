//! Decoders and encoders of masks and boxes: SAM's. Positions are added to the inputs of queries and keys, and not of
//! values, and a layer attends from one input to another.

use super::{ENCODER, Family, NamedAttention, Rule};
use crate::hf::shapes;
use candle_attention_core::WeightLayout;

const MASK_DECODER: &[&str] = &["mask_decoder.", "tracker_model.mask_decoder.", ""];
const SELF: &str = "transformer.layers.{}.self_attn";
const TO_IMAGE: &str = "transformer.layers.{}.cross_attn_token_to_image";
const TO_TOKENS: &str = "transformer.layers.{}.cross_attn_image_to_token";
const FINAL: &str = "transformer.final_attn_token_to_image";

/// Returns the row of one attention of a decoder of masks.
const fn of_masks(path: &'static str, layout: WeightLayout) -> Family {
    ENCODER.layers(2).width(256).query_heads(8).at(MASK_DECODER, path, layout).section("mask_decoder_config")
}

/// Returns the attention of a decoder of masks from one input to another. `of_layers` narrows that of its layers.
const fn cross_of_masks(layout: WeightLayout, of_layers: &'static [Rule]) -> [NamedAttention; 3] {
    [
        NamedAttention {
            name: "cross_attn_token_to_image", family: of_masks(TO_IMAGE, layout).rules(of_layers),
        },
        NamedAttention {
            name: "cross_attn_image_to_token", family: of_masks(TO_TOKENS, layout).rules(of_layers),
        },
        NamedAttention {
            name: "final_attn_token_to_image",
            family: of_masks(FINAL, layout).rules(&[shapes::narrowed_width]).once(true),
        },
    ]
}

/// Half of the width is projected in each layer, and by a field in the last attention.
const SAM: Family = of_masks(SELF, WeightLayout::Opt).named(&SAM_CROSS);
const SAM_CROSS: [NamedAttention; 3] = cross_of_masks(WeightLayout::Opt, &[shapes::half_width]);
const SAM2: Family = of_masks(SELF, WeightLayout::Canonical).named(&SAM2_CROSS);
const SAM2_CROSS: [NamedAttention; 3] = cross_of_masks(WeightLayout::Canonical, &[shapes::narrowed_width]);

/// Returns the row of one attention of SAM 3.
const fn of_sam3(prefixes: &'static [&'static str], path: &'static str) -> Family {
    ENCODER.layers_from("num_layers").width(256).query_heads(8).at(prefixes, path, WeightLayout::Canonical)
}

const GEOMETRY: &[&str] = &["geometry_encoder.", "detector_model.geometry_encoder.", ""];
const SAM3_GEOMETRY: Family = of_sam3(GEOMETRY, "layers.{}.self_attn").layers(3).section("geometry_encoder_config")
    .named(&[NamedAttention {
        name: "cross_attn",
        family: of_sam3(GEOMETRY, "layers.{}.cross_attn").layers(3).section("geometry_encoder_config"),
    }]);
const DETR_ENCODER: &[&str] = &["detr_encoder.", "detector_model.detr_encoder.", ""];
const SAM3_ENCODER: Family = of_sam3(DETR_ENCODER, "layers.{}.self_attn").layers(6)
    .named(&[NamedAttention { name: "cross_attn", family: of_sam3(DETR_ENCODER, "layers.{}.cross_attn").layers(6) }]);
const DETR_DECODER: &[&str] = &["detr_decoder.", "detector_model.detr_decoder.", ""];
/// The scores of boxes and images have a bias by the place of the box, which the caller passes as a mask.
const SAM3_DECODER: Family = of_sam3(DETR_DECODER, "layers.{}.self_attn").layers(6).named(&[
    NamedAttention { name: "text_cross_attn", family: of_sam3(DETR_DECODER, "layers.{}.text_cross_attn").layers(6) },
    NamedAttention {
        name: "vision_cross_attn", family: of_sam3(DETR_DECODER, "layers.{}.vision_cross_attn").layers(6),
    },
]);
const SAM3_MASKS: Family = of_sam3(&["mask_decoder.", "detector_model.mask_decoder.", ""], "prompt_cross_attn")
    .once(true);

/// The decoders and encoders, in alphabetical order.
pub(super) const ROWS: &[Family] = &[
    SAM2.of("edgetam_mask_decoder"),
    SAM2.of("edgetam_video_mask_decoder"),
    SAM.of("sam"),
    SAM2.of("sam2"),
    SAM2.of("sam2_mask_decoder"),
    SAM2.of("sam2_video_mask_decoder"),
    SAM3_GEOMETRY.of("sam3"),
    SAM3_DECODER.of("sam3_detr_decoder"),
    SAM3_ENCODER.of("sam3_detr_encoder"),
    SAM3_GEOMETRY.of("sam3_geometry_encoder"),
    SAM3_GEOMETRY.of("sam3_lite_text"),
    SAM3_DECODER.of("sam3_lite_text_detr_decoder"),
    SAM3_ENCODER.of("sam3_lite_text_detr_encoder"),
    SAM3_GEOMETRY.of("sam3_lite_text_geometry_encoder"),
    SAM3_MASKS.of("sam3_lite_text_mask_decoder"),
    SAM3_MASKS.of("sam3_mask_decoder"),
    SAM2.of("sam3_tracker"),
    SAM2.of("sam3_tracker_mask_decoder"),
    SAM2.of("sam3_tracker_video_mask_decoder"),
    SAM.of("sam_hq"),
    SAM.of("sam_hq_mask_decoder"),
    SAM.of("sam_mask_decoder"),
];
