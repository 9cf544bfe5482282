//! Encoders of images whose attention is between the patches of a window, and by their places in it.

use super::{ENCODER, QKV};
use crate::hf::family::{Bias, Family, Number};
use crate::hf::positions::{Cosine, Positions};
use crate::hf::stages::Stages;
use candle_attention_core::WeightLayout;

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

const STAGES: Stages = Stages { depths: &[2, 2, 6, 2], heads: &[3, 6, 12, 24], widens: true };
const STAGES_OF_SWIN2SR: Stages = Stages { depths: &[6; 6], heads: &[6; 6], widens: false };
const BLOCKS: &str = "encoder.layers.{}.blocks.{}.attention";

const SWIN: Family = ENCODER.of("swin").at(&["swin.", ""], BLOCKS, WeightLayout::Bert)
    .or_at(&["swin.", ""], BLOCKS, WeightLayout::Canonical).names(["depths", "embed_dim", "num_heads"])
    .usual_names(false).sizes([0, 96, 0]).stages(STAGES).bias(Bias::OutAndQkvIf("qkv_bias", true))
    .dropout(Number("attention_probs_dropout_prob", 0.0)).positions(Positions::Table(7));

/// Encoders of images and spectrograms in windows, with a table of biases or cosine scores, whose layers stand in
/// stages.
pub(super) const IN_STAGES: &[Family] = &[
    SWIN.of("clap_audio_model").names(["depths", "patch_embeds_hidden_size", "num_attention_heads"])
        .at(&["audio_model.audio_encoder.", "audio_encoder.", ""], "layers.{}.blocks.{}.attention", WeightLayout::Bert)
        .stages(Stages { heads: &[4, 8, 16, 32], ..STAGES }).positions(Positions::Table(8)),
    SWIN.of("donut-swin").at(&["encoder.", "donut.", ""], BLOCKS, WeightLayout::Bert),
    SWIN.of("maskformer-swin").at(&["model.", ""], BLOCKS, WeightLayout::Bert),
    SWIN,
    SWIN.of("swin2sr").sizes([0, 180, 0]).stages(STAGES_OF_SWIN2SR)
        .at(&["swin2sr.", ""], "encoder.stages.{}.layers.{}.attention", WeightLayout::Bert)
        .positions(Positions::Cosine(Cosine { image: 64, patch: 1, window: 8, stages: None })),
    SWIN.of("swinv2").at(&["swinv2.", ""], BLOCKS, WeightLayout::Bert)
        .positions(Positions::Cosine(Cosine { image: 224, patch: 4, window: 7, stages: Some(STAGES) })),
];
