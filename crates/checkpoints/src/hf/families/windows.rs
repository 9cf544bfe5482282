//! Encoders of images whose attention is between the patches of a window, and by their places in it.

use candle_core::Result;

use super::ENCODER;
use crate::hf::family::{Bias, Family, ModuleNames, at};
use crate::hf::fields::Fields;
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{ContentPositions, MultiHeadAttentionConfig, WeightLayout};

const QKV: WeightLayout = WeightLayout::Packed(PackedNaming::Qkv, QkvOrder::ByPart);

/// SAM's names below a prefix.
const fn sam(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "layers.{}.attn", QKV)
}

/// Relative positions in a window of so many patches a side, or in the whole image.
fn in_grid(
    fields: &Fields,
    window: Option<usize>,
    image: [usize; 2],
    cfg: MultiHeadAttentionConfig,
) -> Result<MultiHeadAttentionConfig> {
    let (image, patch) = (fields.pair("image_size", image)?, fields.pair("patch_size", [16; 2])?);
    let [height, width] = match window {
        Some(window) => [window; 2],
        None => [image[0] / patch[0], image[1] / patch[1]],
    };
    Ok(cfg.with_content_positions(ContentPositions::Grid { height, width }))
}

/// Most layers see windows.
fn in_sam(
    fields: &Fields,
    layer: usize,
    image: usize,
    cfg: MultiHeadAttentionConfig,
) -> Result<MultiHeadAttentionConfig> {
    let sees_all = fields.get_or("global_attn_indexes", vec![2, 5, 8, 11])?.contains(&layer);
    let window = if sees_all { None } else { Some(fields.get_or("window_size", 14)?) };
    if fields.flag("use_rel_pos", true)? { in_grid(fields, window, [image; 2], cfg) } else { Ok(cfg) }
}

#[rustfmt::skip]
const SAM: Family = Family {
    model_type: "sam_vision_model",
    modules: &[sam(&["vision_encoder.", "sam.vision_encoder.", ""])],
    bias: Bias::OutAndQkvIf("qkv_bias", true), dropout: ("attention_dropout", 0.0),
    adjust: |fields, layer, cfg| in_sam(fields, layer, 1024, cfg), ..ENCODER
};

#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "deepseek_ocr2_sam_vision_model",
        modules: &[sam(&["model.vision_tower.sam_encoder.", "vision_tower.sam_encoder.", "sam_encoder.", ""])], ..SAM
    },
    Family {
        model_type: "got_ocr2_vision",
        modules: &[sam(&["model.vision_tower.", "vision_tower.", ""])], ..SAM
    },
    Family {
        model_type: "pp_formulanet_vision",
        modules: &[sam(&["model.encoder.vision_tower.", "encoder.vision_tower.", "vision_tower.", ""])],
        adjust: |fields, layer, cfg| in_sam(fields, layer, 512, cfg), ..SAM
    },
    Family {
        model_type: "sam_hq_vision_model", modules: &[sam(&["vision_encoder.", "sam_hq.vision_encoder.", ""])], ..SAM
    },
    SAM,
    Family {
        model_type: "seggpt", sizes: [24, 1024, 16], dropout: ("attention_probs_dropout_prob", 0.0),
        modules: &[at(&["model.", ""], "encoder.layers.{}.attention", QKV)],
        adjust: |fields, _, cfg| match fields.flag("use_relative_position_embeddings", true)? {
            true => in_grid(fields, None, [896, 448], cfg),
            false => Ok(cfg),
        },
        ..SAM
    },
    Family {
        model_type: "slanext_vision",
        modules: &[sam(&["backbone.vision_tower.", "vision_tower.", ""])],
        adjust: |fields, layer, cfg| in_sam(fields, layer, 512, cfg), ..SAM
    },
    Family {
        model_type: "unlimited_ocr_sam_vision_model",
        modules: &[
            at(&["model.sam_model.", "sam_model.", ""], "blocks.{}.attn", QKV),
            sam(&["model.vision_tower.sam_encoder.", "vision_tower.sam_encoder.", ""]),
        ],
        ..SAM
    },
    Family {
        model_type: "vitdet", dropout: ("attention_probs_dropout_prob", 0.0),
        modules: &[at(&["vitdet.", "model.backbone.", "backbone.", ""], "encoder.layer.{}.attention", QKV)],
        adjust: |fields, layer, cfg| {
            let in_window = fields.get_or("window_block_indices", Vec::<usize>::new())?.contains(&layer);
            let window = if in_window { Some(fields.required("window_size")?) } else { None };
            match fields.flag("use_relative_position_embeddings", false)? {
                true => in_grid(fields, window, [224; 2], cfg),
                false => Ok(cfg),
            }
        },
        ..SAM
    },
];
