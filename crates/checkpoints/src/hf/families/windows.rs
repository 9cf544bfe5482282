//! Encoders of images whose attention is between the patches of a window, and by their places in it.

use super::{ENCODER, QKV};
use crate::hf::family::{Bias, Family, Number};
use crate::hf::positions::Positions;

const SAM: Family = ENCODER.of("sam_vision_model")
    .at(&["vision_encoder.", "sam.vision_encoder.", ""], "layers.{}.attn", QKV)
    .bias(Bias::OutAndQkvIf("qkv_bias", true)).dropout(Number("attention_dropout", 0.0))
    .positions(Positions::Grid { image: 1024 });

pub(super) const ROWS: &[Family] =
    &[
        SAM.of("deepseek_ocr2_sam_vision_model").below(&[
            "model.vision_tower.sam_encoder.",
            "vision_tower.sam_encoder.",
            "sam_encoder.",
            "",
        ]),
        SAM.of("got_ocr2_vision").below(&["model.vision_tower.", "vision_tower.", ""]),
        SAM.of("pp_formulanet_vision")
            .below(&["model.encoder.vision_tower.", "encoder.vision_tower.", "vision_tower.", ""])
            .positions(Positions::Grid { image: 512 }),
        SAM.of("sam_hq_vision_model").below(&["vision_encoder.", "sam_hq.vision_encoder.", ""]),
        SAM,
        SAM.of("seggpt")
            .sizes([24, 1024, 16])
            .dropout(Number("attention_probs_dropout_prob", 0.0))
            .at(&["model.", ""], "encoder.layers.{}.attention", QKV)
            .positions(Positions::SegGpt),
        SAM.of("slanext_vision")
            .below(&["backbone.vision_tower.", "vision_tower.", ""])
            .positions(Positions::Grid { image: 512 }),
        SAM.of("unlimited_ocr_sam_vision_model")
            .at(&["model.sam_model.", "sam_model.", ""], "blocks.{}.attn", QKV)
            .or_at(&["model.vision_tower.sam_encoder.", "vision_tower.sam_encoder.", ""], "layers.{}.attn", QKV),
        SAM.of("vitdet")
            .dropout(Number("attention_probs_dropout_prob", 0.0))
            .at(&["vitdet.", "model.backbone.", "backbone.", ""], "encoder.layer.{}.attention", QKV)
            .positions(Positions::VitDet),
    ];
