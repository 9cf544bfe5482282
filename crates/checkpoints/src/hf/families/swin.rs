//! Encoders of images and spectrograms in windows, with a table of biases or cosine scores, whose layers stand in
//! stages.

use candle_core::Result;

use super::ENCODER;
use crate::hf::family::{Bias, Family, ModuleNames, Stages, at};
use crate::hf::fields::Fields;
use candle_attention_core::{ContentPositions, MultiHeadAttentionConfig, WeightLayout};

/// The names below a prefix.
const fn blocks(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "encoder.layers.{}.blocks.{}.attention", WeightLayout::Bert)
}

const STAGES: Stages = Stages { depths: &[2, 2, 6, 2], heads: &[3, 6, 12, 24], widens: true };
const STAGES_OF_SWIN2SR: Stages = Stages { depths: &[6; 6], heads: &[6; 6], widens: false };

fn in_window(fields: &Fields, default: usize, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    let window = fields.get_or("window_size", default)?;
    Ok(cfg.with_content_positions(ContentPositions::Window { height: window, width: window }))
}

/// A window is no larger than the image of its stage, as if both had as many columns as rows; `sizes` are the defaults
/// of the image, of a patch and of a window, and of the window of the training of each stage.
fn by_cosines(
    fields: &Fields,
    stage: usize,
    sizes: [usize; 3],
    trained: usize,
    cfg: MultiHeadAttentionConfig,
) -> Result<MultiHeadAttentionConfig> {
    let [image, patch, window] = sizes;
    let [[rows, _], [patch, _]] = [fields.pair("image_size", [image; 2])?, fields.pair("patch_size", [patch; 2])?];
    let rows = u32::try_from(stage).ok().and_then(|stage| (rows / patch).checked_shr(stage)).unwrap_or(0);
    let window = fields.get_or("window_size", window)?.min(rows);
    let trained = (trained > 0).then_some([trained; 2]);
    let positions = ContentPositions::CosineWindow { height: window, width: window, trained };
    Ok(cfg.with_k_bias(false).with_content_positions(positions))
}

#[rustfmt::skip]
const SWIN: Family = Family {
    model_type: "swin",
    modules: &[
        blocks(&["swin.", ""]),
        at(&["swin.", ""], "encoder.layers.{}.blocks.{}.attention", WeightLayout::Canonical),
    ],
    names: ["depths", "embed_dim", "num_heads"], usual_names: false, sizes: [0, 96, 0], stages: Some(STAGES),
    bias: Bias::OutAndQkvIf("qkv_bias", true), dropout: ("attention_probs_dropout_prob", 0.0),
    adjust: |fields, _, cfg| in_window(fields, 7, cfg), ..ENCODER
};

#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "clap_audio_model", names: ["depths", "patch_embeds_hidden_size", "num_attention_heads"],
        modules: &[at(
            &["audio_model.audio_encoder.", "audio_encoder.", ""], "layers.{}.blocks.{}.attention", WeightLayout::Bert,
        )],
        stages: Some(Stages { heads: &[4, 8, 16, 32], ..STAGES }),
        adjust: |fields, _, cfg| in_window(fields, 8, cfg), ..SWIN
    },
    Family { model_type: "donut-swin", modules: &[blocks(&["encoder.", "donut.", ""])], ..SWIN },
    Family { model_type: "maskformer-swin", modules: &[blocks(&["model.", ""])], ..SWIN },
    SWIN,
    Family {
        model_type: "swin2sr", sizes: [0, 180, 0], stages: Some(STAGES_OF_SWIN2SR),
        modules: &[at(&["swin2sr.", ""], "encoder.stages.{}.layers.{}.attention", WeightLayout::Bert)],
        adjust: |fields, _, cfg| by_cosines(fields, 0, [64, 1, 8], 0, cfg), ..SWIN
    },
    Family {
        model_type: "swinv2", modules: &[blocks(&["swinv2.", ""])],
        adjust: |fields, layer, cfg| {
            let [stage, _] = STAGES.place(fields, layer)?;
            let trained = fields.get_or("pretrained_window_sizes", vec![0; 4])?;
            by_cosines(fields, stage, [224, 4, 7], trained.get(stage).copied().unwrap_or(0), cfg)
        },
        ..SWIN
    },
];
