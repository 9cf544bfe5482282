//! Encoders of images, of sound, and of the texts beside them.

use super::{ENCODER, HEADS, HIDDEN, LAYERS, TEXT_MODEL};
use crate::hf::family::{Bias, Family, Heads, Mask, ModuleNames, Rotary, at};
use crate::hf::fields::Aliases;
use crate::hf::rope::rope;
use crate::hf::rules::softcapped;
use candle_attention_core::WeightLayout;
use candle_attention_core::weights::{PackedNaming, QkvOrder};

/// The images of a model of texts and images, by themselves, and below a model of text.
const IMAGES: &[&str] = &[
    "vision_model.",
    "",
    "vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.vision_tower.vision_model.",
];
const QKV: WeightLayout = WeightLayout::Packed(PackedNaming::Qkv, QkvOrder::ByPart);
const QKV_PROJECTION: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProjection, QkvOrder::ByPart);

/// ViT's names below a prefix.
const fn vit(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "encoder.layer.{}.attention", WeightLayout::Vit)
}

#[rustfmt::skip]
const VIT: Family = Family {
    model_type: "vit", modules: &[vit(&["vit.", ""])], dropout: ("attention_probs_dropout_prob", 0.0),
    bias: Bias::OutAndQkvIf("qkv_bias", true), ..ENCODER
};
/// CLIP's images, and those of most models after it.
#[rustfmt::skip]
const CLIP_IMAGES: Family = Family {
    model_type: "clip_vision_model", modules: &[at(IMAGES, "encoder.layers.{}.self_attn", WeightLayout::Opt)], ..ENCODER
};
#[rustfmt::skip]
const CLIP_TEXTS: Family = Family {
    model_type: "clip_text_model", sizes: [12, 512, 8],
    modules: &[at(TEXT_MODEL, "encoder.layers.{}.self_attn", WeightLayout::Opt)], mask: Mask::Causal, ..ENCODER
};
#[rustfmt::skip]
const SIGLIP_TEXTS: Family =
    Family { model_type: "siglip_text_model", sizes: [12, 768, 12], mask: Mask::Encoder, ..CLIP_TEXTS };
#[rustfmt::skip]
const BLIP_2: Family = Family {
    model_type: "blip_2_vision_model", sizes: [39, 1408, 16],
    modules: &[at(IMAGES, "encoder.layers.{}.self_attn", QKV_PROJECTION)],
    bias: Bias::OutAndQkvIf("qkv_bias", true), ..ENCODER
};
#[rustfmt::skip]
const WAV2VEC2: Family = Family {
    model_type: "wav2vec2", modules: &[wav2vec2(&["wav2vec2.", ""])], dropout: ("attention_dropout", 0.1), ..ENCODER
};
/// Whisper's encoder inside of another model.
#[rustfmt::skip]
const WHISPER: Family = Family {
    sizes: [32, 1280, 20],
    modules: &[at(AUDIO, "layers.{}.self_attn", WeightLayout::Opt)],
    bias: Bias::AllButKey, ..ENCODER
};

const VOXTRAL_ALIASES: Aliases = &[("d_model", HIDDEN), ("encoder_layers", LAYERS), ("encoder_attention_heads", HEADS)];
const AUDIO: &[&str] = &["audio_tower.", "", "model.audio_tower."];
#[rustfmt::skip]
const BEIT: Family = Family {
    model_type: "beit", modules: &[vit(&["beit.", ""])], bias: Bias::AllButKey,
    only: &[("use_relative_position_bias", "false"), ("use_shared_relative_position_bias", "false")], ..VIT
};
const QFORMER_PREFIXES: &[&str] = &["qformer.", "model.qformer.", ""];
#[rustfmt::skip]
const QFORMER: Family = Family {
    model_type: "blip_2_qformer", modules: &[vit(QFORMER_PREFIXES)], dropout: ("attention_probs_dropout_prob", 0.1),
    cross: Some(&Family {
        model_type: "blip_2_qformer",
        modules: &[at(QFORMER_PREFIXES, "encoder.layer.{}.crossattention", WeightLayout::Vit)],
        dropout: ("attention_probs_dropout_prob", 0.1),
        adjust: |fields, layer, cfg| {
            let every = fields.get_or("cross_attention_frequency", 2)?;
            if !layer.is_multiple_of(every) {
                return fields.fail(format!("layer {layer} has no cross-attention, one layer in {every} has"));
            }
            let width = fields.get_or("encoder_hidden_size", 1408)?;
            Ok(cfg.with_key_size(width).with_value_size(width))
        },
        ..ENCODER
    }),
    ..ENCODER
};

/// wav2vec 2.0's names below a prefix.
const fn wav2vec2(prefixes: &'static [&'static str]) -> ModuleNames {
    at(prefixes, "encoder.layers.{}.attention", WeightLayout::Opt)
}

#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "aimv2_text_model", sizes: [12, 768, 6],
        modules: &[at(TEXT_MODEL, "encoder.layers.{}.attention", WeightLayout::Opt)],
        bias: Bias::AllIf("qkv_bias", false), ..CLIP_TEXTS
    },
    Family {
        model_type: "aimv2_vision_model", sizes: [24, 1024, 8],
        modules: &[at(IMAGES, "encoder.layers.{}.attention", WeightLayout::Opt)],
        bias: Bias::AllIf("qkv_bias", false), ..ENCODER
    },
    Family { model_type: "altclip_vision_model", ..CLIP_IMAGES },
    Family {
        model_type: "audio-spectrogram-transformer", modules: &[vit(&["audio_spectrogram_transformer.", ""])], ..VIT
    },
    Family { model_type: "audioflamingo3_encoder", aliases: VOXTRAL_ALIASES, ..WHISPER },
    BEIT,
    QFORMER,
    BLIP_2,
    Family { model_type: "blip_vision_model", sizes: [12, 768, 12], bias: Bias::All, ..BLIP_2 },
    Family { model_type: "chinese_clip_vision_model", ..CLIP_IMAGES },
    CLIP_TEXTS,
    CLIP_IMAGES,
    Family { model_type: "clipseg_text_model", ..CLIP_TEXTS },
    Family { model_type: "clipseg_vision_model", ..CLIP_IMAGES },
    Family { model_type: "data2vec-audio", modules: &[wav2vec2(&["data2vec_audio.", ""])], ..WAV2VEC2 },
    Family { model_type: "data2vec-vision", modules: &[vit(&["data2vec_vision.", ""])], ..BEIT },
    Family { model_type: "deit", modules: &[vit(&["deit.", ""])], ..VIT },
    Family {
        model_type: "dia_encoder", sizes: [12, 1024, 16], heads: Heads::Grouped(Some(16), Some(128)), bias: Bias::None,
        modules: &[at(
            &["model.encoder.", "encoder.", ""], "layers.{}.self_attention", WeightLayout::Canonical,
        )],
        rope: Rotary::All(rope(10_000.0, 1024)), adjust: |_, _, cfg| Ok(cfg.with_scale(1.0)), ..ENCODER
    },
    Family { model_type: "dinov2", modules: &[vit(&["dinov2.", ""])], ..VIT },
    Family { model_type: "dinov2_with_registers", modules: &[vit(&["dinov2_with_registers.", ""])], ..VIT },
    Family { model_type: "dpt", modules: &[vit(&["dpt.", ""])], ..VIT },
    Family { model_type: "flava_image_model", modules: &[vit(&["flava.image_model.", "image_model.", ""])], ..VIT },
    Family {
        model_type: "flava_multimodal_model", sizes: [6, 768, 12],
        modules: &[vit(&["flava.multimodal_model.", "multimodal_model.", ""])], ..VIT
    },
    Family { model_type: "flava_text_model", modules: &[vit(&["flava.text_model.", "text_model.", ""])], ..VIT },
    Family {
        model_type: "git_vision_model",
        modules: &[at(
            &["git.image_encoder.vision_model.", "vision_model.", ""], "encoder.layers.{}.self_attn", WeightLayout::Opt,
        )],
        ..CLIP_IMAGES
    },
    Family {
        model_type: "glmasr_encoder", heads: Heads::Grouped(Some(20), None),
        modules: &[at(AUDIO, "layers.{}.self_attn", WeightLayout::Canonical)],
        rope: Rotary::All(rope(10_000.0, 1500).partial("partial_rotary_factor", 0.5)), ..WHISPER
    },
    Family { model_type: "granite_docling_vision", ..CLIP_IMAGES },
    Family { model_type: "groupvit_text_model", sizes: [12, 256, 4], ..CLIP_TEXTS },
    Family { model_type: "hubert", modules: &[wav2vec2(&["hubert.", ""])], ..WAV2VEC2 },
    Family { model_type: "idefics2_vision", ..CLIP_IMAGES },
    Family { model_type: "idefics3_vision", sizes: [12, 1152, 16], ..CLIP_IMAGES },
    Family { model_type: "ijepa", modules: &[vit(&["ijepa.", ""])], ..VIT },
    Family { model_type: "instructblip_qformer", ..QFORMER },
    Family { model_type: "instructblip_vision_model", ..BLIP_2 },
    Family { model_type: "instructblipvideo_vision_model", ..BLIP_2 },
    Family { model_type: "instructblipvideo_qformer", ..QFORMER },
    Family {
        model_type: "internvl_vision", sizes: [24, 1024, 16],
        modules: &[at(IMAGES, "encoder.layer.{}.attention", WeightLayout::InternVl)],
        bias: Bias::OutAndQkvIf("attention_bias", false), only: &[("use_qk_norm", "false")], ..ENCODER
    },
    Family {
        model_type: "janus_vision_model", sizes: [24, 1024, 16],
        modules: &[at(IMAGES, "encoder.layers.{}.self_attn", WeightLayout::InternVl)],
        bias: Bias::OutAndQkvIf("attention_bias", true), only: &[("use_qk_norm", "false")], ..ENCODER
    },
    Family {
        model_type: "kosmos_2_vision_model", sizes: [24, 1024, 16],
        modules: &[at(&["vision_model.model.", "model.", ""], "encoder.layers.{}.self_attn", WeightLayout::Opt)],
        ..CLIP_IMAGES
    },
    Family {
        model_type: "lasr_encoder", sizes: [17, 512, 8], bias: Bias::AllIf("attention_bias", false),
        modules: &[at(&["encoder.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        dropout: ("attention_dropout", 0.1), rope: Rotary::All(rope(10_000.0, 10_000)), ..ENCODER
    },
    Family {
        model_type: "mimi_encoder", sizes: [8, 512, 8], heads: Heads::Grouped(Some(8), Some(64)),
        modules: &[at(&["encoder_transformer.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        bias: Bias::AllIf("attention_bias", false), rope: Rotary::All(rope(10_000.0, 8000)),
        window: |fields, _| fields.nullable("sliding_window", Some(250)), mask: Mask::Causal, ..ENCODER
    },
    Family { model_type: "metaclip_2_text_model", ..CLIP_TEXTS },
    Family { model_type: "metaclip_2_vision_model", ..CLIP_IMAGES },
    Family {
        model_type: "mgp-str", modules: &[at(&["mgp_str.", ""], "encoder.blocks.{}.attn", QKV)],
        bias: Bias::OutAndQkvIf("qkv_bias", true), dropout: ("attn_drop_rate", 0.0), ..ENCODER
    },
    Family {
        model_type: "moss_transcribe_diarize_audio", sizes: [24, 1024, 16], aliases: VOXTRAL_ALIASES, ..WHISPER
    },
    Family { model_type: "owlv2_text_model", ..CLIP_TEXTS },
    Family { model_type: "owlv2_vision_model", ..CLIP_IMAGES },
    Family { model_type: "owlvit_text_model", ..CLIP_TEXTS },
    Family { model_type: "owlvit_vision_model", ..CLIP_IMAGES },
    Family {
        model_type: "phi4_multimodal_vision", sizes: [27, 1152, 16],
        modules: &[at(
            &["model.embed_tokens_extend.image_embed.img_processor.", ""], "encoder.layers.{}.self_attn",
            WeightLayout::Opt,
        )],
        ..CLIP_IMAGES
    },
    Family { model_type: "pixio", sizes: [32, 1280, 16], modules: &[vit(&["pixio.", ""])], ..VIT },
    Family {
        model_type: "qianfan_ocr_vision", sizes: [24, 1024, 16],
        modules: &[at(IMAGES, "layers.{}.attention", WeightLayout::InternVl)],
        bias: Bias::OutAndQkvIf("attention_bias", true), only: &[("use_qk_norm", "false")], ..ENCODER
    },
    Family {
        model_type: "qwen2_audio_encoder", names: ["encoder_layers", "d_model", "encoder_attention_heads"], ..WHISPER
    },
    Family {
        model_type: "radio", sizes: [32, 1280, 16], modules: &[at(&["radio_model.model.", ""], "blocks.{}.attn", QKV)],
        dropout: ("attention_probs_dropout_prob", 0.0), bias: Bias::OutAndQkvIf("qkv_bias", true), ..ENCODER
    },
    Family {
        // The names since transformers 5.18, and those before.
        model_type: "rf_detr_dinov2",
        modules: &[at(&[""], "encoder.layer.{}.attention", WeightLayout::Canonical), vit(&[""])], ..VIT
    },
    Family { model_type: "sew", modules: &[wav2vec2(&["sew.", ""])], ..WAV2VEC2 },
    Family { model_type: "siglip2_text_model", ..SIGLIP_TEXTS },
    Family { model_type: "siglip2_vision_model", ..CLIP_IMAGES },
    SIGLIP_TEXTS,
    Family { model_type: "siglip_vision_model", ..CLIP_IMAGES },
    Family { model_type: "smolvlm_vision", sizes: [12, 1152, 16], ..CLIP_IMAGES },
    Family {
        model_type: "tipsv2_text_model",
        modules: &[at(
            &["text_encoder.", ""], "transformer.resblocks.{}.attn", WeightLayout::Torch,
        )],
        mask: Mask::Encoder, ..ENCODER
    },
    Family {
        model_type: "tipsv2_vision_model", modules: &[at(&["vision_encoder.", ""], "blocks.{}.attn", QKV)],
        dropout: ("attention_probs_dropout_prob", 0.0), bias: Bias::OutAndQkvIf("qkv_bias", true), ..ENCODER
    },
    Family { model_type: "unispeech", modules: &[wav2vec2(&["unispeech.", ""])], ..WAV2VEC2 },
    Family { model_type: "unispeech-sat", modules: &[wav2vec2(&["unispeech_sat.", ""])], ..WAV2VEC2 },
    Family {
        model_type: "videomt", sizes: [24, 1024, 16],
        modules: &[at(&[""], "layers.{}.attention", WeightLayout::Opt)], ..ENCODER
    },
    Family {
        model_type: "videoprism_text_model", modules: &[at(TEXT_MODEL, "layers.{}.attention", WeightLayout::Canonical)],
        dropout: ("attention_probs_dropout_prob", 0.0), bias: Bias::AllIf("qkv_bias", true), mask: Mask::Causal,
        adjust: |fields, _, cfg| softcapped(fields, cfg), ..ENCODER
    },
    Family {
        model_type: "videomae", modules: &[vit(&["videomae.", ""])], aliases: &[("qkv_bias", "qv_bias")],
        bias: Bias::OutAndQkvIf("qv_bias", true), adjust: |_, _, cfg| Ok(cfg.with_k_bias(false)),
        // Some versions of transformers before 5.18 give the keys a bias too.
        key_bias: Some("attention.key.bias"), ..VIT
    },
    Family { model_type: "vilt", modules: &[vit(&["vilt.", ""])], ..VIT },
    VIT,
    Family {
        model_type: "vit_mae",
        decoder: Some(&Family {
            model_type: "vit_mae",
            names: ["decoder_num_hidden_layers", "decoder_hidden_size", "decoder_num_attention_heads"],
            usual_names: false, sizes: [8, 512, 16],
            // As published, and as transformers 5 saves it.
            modules: &[
                at(&["decoder."], "decoder_layers.{}.attention", WeightLayout::Vit),
                at(&["decoder."], "decoder_encoder.layer.{}.attention", WeightLayout::Vit),
            ],
            ..VIT
        }),
        ..VIT
    },
    Family { model_type: "vit_msn", modules: &[vit(&["vit.", ""])], ..VIT },
    Family { model_type: "vivit", modules: &[vit(&["vivit.", ""])], ..VIT },
    Family {
        model_type: "voxtral_encoder",
        aliases: VOXTRAL_ALIASES, ..WHISPER
    },
    Family {
        model_type: "voxtral_realtime_encoder", sizes: [32, 1280, 32], aliases: VOXTRAL_ALIASES,
        heads: Heads::Grouped(None, Some(64)), modules: &[at(AUDIO, "layers.{}.self_attn", WeightLayout::Canonical)],
        rope: Rotary::All(rope(10_000.0, 1500)), window: |fields, _| fields.nullable("sliding_window", Some(750)),
        mask: Mask::Causal, ..WHISPER
    },
    WAV2VEC2,
    Family { model_type: "xclip_text_model", ..CLIP_TEXTS },
    Family { model_type: "yolos", modules: &[vit(&["vit.", ""])], ..VIT },
];
