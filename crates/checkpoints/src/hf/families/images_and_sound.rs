//! Encoders of images and sound, and of texts in the same models.

use super::{Bias, Family, Heads, Mask, NamedAttention, Number, Scale, Sizes, rms_per_head};
use super::{ENCODER, LLAMA, HEADS, HIDDEN, LAYERS, QKV, TEXT_MODEL};
use crate::hf::fields::Aliases;
use crate::hf::positions::{Cosine, Positions};
use crate::hf::rope::rope;
use crate::hf::rules;
use crate::hf::shapes;
use crate::hf::windows::{self, Stages, Widths, Window};
use candle_attention_core::WeightLayout;
use candle_attention_core::weights::{PackedNaming, QkvOrder};

/// The images of a model of texts and images, by themselves, and below a model of text.
pub(super) const IMAGES: &[&str] = &[
    "vision_model.",
    "",
    "vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.vision_tower.vision_model.",
];
const QKV_PROJECTION: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProjection, QkvOrder::ByPart);

const BLOCKS: &str = "encoder.layer.{}.attention";

const VIT: Family = ENCODER.of("vit").at(&["vit.", ""], BLOCKS, WeightLayout::Vit)
    .dropout(Number("attention_probs_dropout_prob", 0.0)).bias(Bias::OutAndQkvIf("qkv_bias", true));
/// The encoder of CLIP's images, and of most models after it.
pub(super) const CLIP_IMAGES: Family = ENCODER.of("clip_vision_model")
    .at(IMAGES, "encoder.layers.{}.self_attn", WeightLayout::Opt);
const CLIP_TEXTS: Family = ENCODER.of("clip_text_model").layers(12).width(512).query_heads(8)
    .at(TEXT_MODEL, "encoder.layers.{}.self_attn", WeightLayout::Opt).mask(Mask::Causal);
const SIGLIP_TEXTS: Family = CLIP_TEXTS.of("siglip_text_model").layers(12).width(768).query_heads(12)
    .mask(Mask::Encoder);
const BLIP_2: Family = ENCODER.of("blip_2_vision_model").layers(39).width(1408).query_heads(16)
    .at(IMAGES, "encoder.layers.{}.self_attn", QKV_PROJECTION).bias(Bias::OutAndQkvIf("qkv_bias", true));
const WAV2VEC2: Family = ENCODER.of("wav2vec2")
    .at(&["wav2vec2.", ""], "encoder.layers.{}.attention", WeightLayout::Opt).dropout(Number("attention_dropout", 0.1));
/// Whisper's encoder inside of another model.
pub(super) const WHISPER: Family = ENCODER.layers(32).width(1280).query_heads(20)
    .at(AUDIO, "layers.{}.self_attn", WeightLayout::Opt)
    .bias(Bias::AllButKey);

const VOXTRAL_ALIASES: Aliases = &[("d_model", HIDDEN), ("encoder_layers", LAYERS), ("encoder_attention_heads", HEADS)];
pub(super) const AUDIO: &[&str] = &["audio_tower.", "", "model.audio_tower."];
/// The images of Kosmos 2.5, and without a scale the images of Pix2Struct.
const KOSMOS_2_5_IMAGES: Family = ENCODER.of("kosmos_2_5_vision_model").layers(18).width(1536).query_heads(24)
    .bias(Bias::None)
    .heads(Heads::Grouped(None, Some(64)))
    .at(&["vision_model.encoder.", "encoder.encoder.", "encoder."], "layer.{}.attention", WeightLayout::Pix2Struct);
const QWEN_AUDIO: &[&str] = &["audio_tower.", "thinker.audio_tower.", "model.audio_tower.", ""];
const BEIT: Family = VIT.of("beit").below(&["beit.", ""]).bias(Bias::AllButKey)
    .only(&[("use_relative_position_bias", "false"), ("use_shared_relative_position_bias", "false")]);
const QFORMER_PREFIXES: &[&str] = &["qformer.", "model.qformer.", ""];
const QFORMER_CROSS: Family = ENCODER.at(QFORMER_PREFIXES, "encoder.layer.{}.crossattention", WeightLayout::Vit)
    .rules(&[shapes::qformer_cross]);
const QFORMER: Family = ENCODER.of("blip_2_qformer").at(QFORMER_PREFIXES, BLOCKS, WeightLayout::Vit)
    .dropout(Number("attention_probs_dropout_prob", 0.1)).cross(&QFORMER_CROSS);

const MIMI: Family = ENCODER.of("mimi_encoder").layers(8).width(512).query_heads(8).grouped(8, 64)
    .below(&["encoder_transformer.", ""])
        .bias(Bias::AllIf("attention_bias", false)).rope(rope(10_000.0, 8000)).window(Window::All(Some(250)))
        .mask(Mask::Causal);

/// The decoder of ViT-MAE, with the names as published and as transformers 5 saves them.
const VIT_MAE_DECODER: Family = VIT
    .layers_from("decoder_num_hidden_layers").width_from("decoder_hidden_size")
    .query_heads_from("decoder_num_attention_heads").usual_names(false)
    .at(&["decoder."], "decoder_layers.{}.attention", WeightLayout::Vit)
    .or_at(&["decoder."], "decoder_encoder.layer.{}.attention", WeightLayout::Vit);

const MLLAMA: Family = ENCODER.of("mllama_vision_model").layers(32).width(1280).query_heads(16)
    .query_heads_from("attention_heads").bias(Bias::None);
const MLLAMA_PREFIXES: &[&str] = &["model.vision_model.", "vision_model.", ""];
const VIDEOPRISM: Family = ENCODER.of("videoprism_vision_model").bias(Bias::OutAndQkvIf("qkv_bias", true))
    .dropout(Number("attention_probs_dropout_prob", 0.0)).rules(&[rules::softcapped]);
const VIDEOPRISM_PREFIXES: &[&str] = &["vision_model.", "backbone.", ""];
const QKV_PROJ_OUT_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProjOutProj, QkvOrder::ByPart);
/// Meta's encoders of sound and video.
const PERCEPTION: Family = LLAMA.layers(6).width(1792).query_heads(14).head_dim(128)
    .rope(rope(20_000.0, 10_000).interleaved()).qk_norm(rms_per_head(1e-5)).mask(Mask::Encoder);

pub(super) const ROWS: &[Family] = &[
    CLIP_TEXTS.of("aimv2_text_model").layers(12).width(768).query_heads(6)
        .at(TEXT_MODEL, "encoder.layers.{}.attention", WeightLayout::Opt).bias(Bias::AllIf("qkv_bias", false)),
    ENCODER.of("aimv2_vision_model").layers(24).width(1024).query_heads(8)
        .at(IMAGES, "encoder.layers.{}.attention", WeightLayout::Opt)
        .bias(Bias::AllIf("qkv_bias", false)),
    CLIP_IMAGES.of("altclip_vision_model"),
    VIT.of("audio-spectrogram-transformer").below(&["audio_spectrogram_transformer.", ""]),
    WHISPER.of("audioflamingo3_encoder").aliases(VOXTRAL_ALIASES),
    BEIT,
    QFORMER,
    BLIP_2,
    BLIP_2.of("blip_vision_model").layers(12).width(768).query_heads(12).bias(Bias::All),
    CLIP_IMAGES.of("chinese_clip_vision_model"),
    CLIP_TEXTS,
    CLIP_IMAGES,
    CLIP_TEXTS.of("clipseg_text_model"),
    CLIP_IMAGES.of("clipseg_vision_model"),
    WAV2VEC2.of("data2vec-audio").below(&["data2vec_audio.", ""]),
    BEIT.of("data2vec-vision").below(&["data2vec_vision.", ""]),
    ENCODER.of("cosmos3_edge_vision").layers(27).width(1152).query_heads(16)
        .at(&["model.visual.", "visual.", ""], "encoder.layers.{}.self_attn", WeightLayout::Opt),
    VIT.of("deit").below(&["deit.", ""]),
    ENCODER.of("dia_encoder").layers(12).width(1024).query_heads(16).grouped(16, 128).bias(Bias::None)
        .at(&["model.encoder.", "encoder.", ""], "layers.{}.self_attention", WeightLayout::Canonical)
        .rope(rope(10_000.0, 1024)).scale(Scale::Fixed(1.0)),
    VIT.of("dinov2").below(&["dinov2.", ""]),
    VIT.of("dinov2_with_registers").below(&["dinov2_with_registers.", ""]),
    VIT.of("dpt").below(&["dpt.", ""]),
    // The masks of its last layers are the caller's.
    ENCODER.of("eomt").layers(24).width(1024).query_heads(16)
        .at(&[""], "layers.{}.attention", WeightLayout::Opt),
    VIT.of("flava_image_model").below(&["flava.image_model.", "image_model.", ""]),
    VIT.of("flava_multimodal_model").layers(6).width(768).query_heads(12)
        .below(&["flava.multimodal_model.", "multimodal_model.", ""]),
    VIT.of("flava_text_model").below(&["flava.text_model.", "text_model.", ""]),
    CLIP_IMAGES.of("git_vision_model").below(&["git.image_encoder.vision_model.", "vision_model.", ""]),
    ENCODER.of("glm_image_vision").layers_from("depth").width_from("hidden_size").query_heads_from("num_heads")
        .layers(40).width(1536).query_heads(16)
        .at(&["model.visual.", "visual.", ""], "blocks.{}.attn", QKV).bias(Bias::AllIf("attention_bias", true)),
    WHISPER.of("glmasr_encoder").kv_heads(20).at(AUDIO, "layers.{}.self_attn", WeightLayout::Canonical)
        .rope(rope(10_000.0, 1500).partial(0.5)),
    CLIP_IMAGES.of("granite_docling_vision"),
    CLIP_TEXTS.of("groupvit_text_model").layers(12).width(256).query_heads(4),
    ENCODER.of("hunyuan_vl_vision").layers(27).width(1152).query_heads(16)
        .at(&["model.vision_tower.", "model.visual.", "vit.", ""], "layers.{}.self_attn", WeightLayout::Canonical),
    WAV2VEC2.of("hubert").below(&["hubert.", ""]),
    // Queries are latents, keys are the images and the latents.
    ENCODER.of("idefics2_perceiver").layers_from("resampler_depth").query_heads_from("resampler_n_heads").layers(3)
        .width(4096).query_heads(16).aliases(&[("resampler_head_dim", "head_dim")])
        .heads(Heads::Grouped(Some(4), Some(96))).bias(Bias::None)
        .at(&["model.connector.perceiver_resampler.", "connector.perceiver_resampler.", "perceiver_resampler.", ""],
            "layers.{}.self_attn", WeightLayout::Canonical),
    CLIP_IMAGES.of("idefics2_vision"),
    CLIP_IMAGES.of("idefics3_vision").layers(12).width(1152).query_heads(16),
    VIT.of("ijepa").below(&["ijepa.", ""]),
    QFORMER.of("instructblip_qformer"),
    BLIP_2.of("instructblip_vision_model"),
    BLIP_2.of("instructblipvideo_vision_model"),
    QFORMER.of("instructblipvideo_qformer"),
    ENCODER.of("internvl_vision").layers(24).width(1024).query_heads(16)
        .at(IMAGES, "encoder.layer.{}.attention", WeightLayout::InternVl)
        .bias(Bias::OutAndQkvIf("attention_bias", false)).only(&[("use_qk_norm", "false")]),
    ENCODER.of("janus_vision_model").layers(24).width(1024).query_heads(16)
        .at(IMAGES, "encoder.layers.{}.self_attn", WeightLayout::InternVl)
        .bias(Bias::OutAndQkvIf("attention_bias", true)).only(&[("use_qk_norm", "false")]),
    KOSMOS_2_5_IMAGES,
    CLIP_IMAGES.of("kosmos_2_vision_model").layers(24).width(1024).query_heads(16)
        .below(&["vision_model.model.", "model.", ""]),
    ENCODER.of("lasr_encoder").layers(17).width(512).query_heads(8).bias(Bias::AllIf("attention_bias", false))
        .below(&["encoder.", ""])
        .dropout(Number("attention_dropout", 0.1)).rope(rope(10_000.0, 10_000)),
    MIMI.of("mimi_decoder").below(&["decoder_transformer.", ""]),
    MIMI,
    CLIP_IMAGES.of("minicpm_ocr_vision"),
    CLIP_IMAGES.of("minicpmv4_6_vision"),
    CLIP_IMAGES.of("minicpmv4_7_vision"),
    CLIP_TEXTS.of("metaclip_2_text_model"),
    CLIP_IMAGES.of("metaclip_2_vision_model"),
    ENCODER.of("mgp-str").at(&["mgp_str.", ""], "encoder.blocks.{}.attn", QKV)
        .bias(Bias::OutAndQkvIf("qkv_bias", true)).dropout(Number("attn_drop_rate", 0.0)),
    ENCODER.of("moonshine_streaming_encoder").layers(6).width(320).query_heads(8).kv_heads(8)
        .at(&["model.encoder.", "encoder.", ""], "layers.{}.self_attn", WeightLayout::Canonical)
        .bias(Bias::AllIf("attention_bias", false)).rules(&[rules::moonshine_windows]),
    // The mask of padded patches is the caller's.
    MLLAMA.at(MLLAMA_PREFIXES, "transformer.layers.{}.self_attn", WeightLayout::Canonical).named(&[NamedAttention {
        name: "global_transformer",
        family: MLLAMA.layers_from("num_global_layers").layers(8)
            .at(MLLAMA_PREFIXES, "global_transformer.layers.{}.self_attn", WeightLayout::Canonical),
    }]),
    // Pools patches: the query is their mean.
    ENCODER.of("molmo2_adapter").width(1152).query_heads(16).grouped(16, 72).once(true)
        .bias(Bias::AllIf("attention_bias", true)).rules(&[shapes::several_layers])
        .at(&["model.vision_backbone.", "vision_backbone.", "model.adapter.", "adapter.", ""], "image_pooling_2d",
            WeightLayout::Canonical),
    WHISPER.of("moss_transcribe_diarize_audio").layers(24).width(1024).query_heads(16).aliases(VOXTRAL_ALIASES),
    ENCODER.of("molmo2_vision").layers(25).width(1152).query_heads(16).grouped(16, 72)
        .bias(Bias::AllIf("attention_bias", true))
        .at(&["model.vision_backbone.image_vit.", "vision_backbone.image_vit.", "image_vit.", ""], "layers.{}.self_attn",
            WeightLayout::Canonical),
    ENCODER.of("ovis2_vision").layers(24).width(1024).query_heads(8).bias(Bias::AllIf("qkv_bias", false))
        .at(&["model.vision_tower.transformer.", "vision_tower.transformer.", "transformer.", ""],
            "encoder.layers.{}.attention", WeightLayout::Opt),
    CLIP_TEXTS.of("owlv2_text_model"),
    CLIP_IMAGES.of("owlv2_vision_model"),
    CLIP_TEXTS.of("owlvit_text_model"),
    CLIP_IMAGES.of("owlvit_vision_model"),
    PERCEPTION.of("pe_audio_encoder").below(&["audio_model.audio_encoder.", "audio_encoder.", ""]),
    PERCEPTION.of("pe_audio_video_encoder").below(&["audio_video_encoder.", ""]),
    PERCEPTION.of("pe_video_encoder").below(&["video_model.video_encoder.", "video_encoder.", ""]),
    CLIP_IMAGES.of("phi4_multimodal_vision").layers(27).width(1152).query_heads(16)
        .below(&["model.embed_tokens_extend.image_embed.img_processor.", ""]),
    KOSMOS_2_5_IMAGES.of("pix2struct_vision_model").layers(12).width(768).query_heads(12).heads(Heads::Equal)
        .scale(Scale::Fixed(1.0)).dropout(Number("attention_dropout", 0.0)).rules(&[shapes::t5_heads]),
    // Each variable is a row of a batch.
    ENCODER.of("patchtst").layers_from(LAYERS).width_from("d_model").query_heads_from(HEADS).layers(3).width(128)
        .query_heads(4).bias(Bias::AllIf("bias", true))
        .at(&["model.encoder.", "encoder."], "layers.{}.self_attn", WeightLayout::Opt)
        .only(&[("channel_attention", "false")]),
    VIT.of("pixio").layers(32).width(1280).query_heads(16).below(&["pixio.", ""]),
    MIMI.of("pocket_tts_audio_tokenizer_decoder").layers(2).width(512).query_heads(8).kv_heads(8)
        .below(&["decoder_transformer.", ""]),
    MIMI.of("pocket_tts_audio_tokenizer_encoder").layers(2).width(512).query_heads(8).kv_heads(8),
    ENCODER.of("qianfan_ocr_vision").layers(24).width(1024).query_heads(16)
        .at(IMAGES, "layers.{}.attention", WeightLayout::InternVl)
        .bias(Bias::OutAndQkvIf("attention_bias", true)).only(&[("use_qk_norm", "false")]),
    WHISPER.of("qwen2_5_omni_audio_encoder").aliases(VOXTRAL_ALIASES).below(QWEN_AUDIO),
    WHISPER.of("qwen2_audio_encoder").layers_from("encoder_layers").width_from("d_model")
        .query_heads_from("encoder_attention_heads"),
    WHISPER.of("qwen3_asr_encoder").layers(24).width(1024).query_heads(16).aliases(VOXTRAL_ALIASES).below(QWEN_AUDIO)
        .bias(Bias::All),
    WHISPER.of("qwen3_omni_moe_audio_encoder").aliases(VOXTRAL_ALIASES).below(QWEN_AUDIO).bias(Bias::All),
    ENCODER.of("radio").layers(32).width(1280).query_heads(16).at(&["radio_model.model.", ""], "blocks.{}.attn", QKV)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).bias(Bias::OutAndQkvIf("qkv_bias", true)),
    // The names since transformers 5.18, and those before.
    VIT.of("rf_detr_dinov2").at(&[""], "encoder.layer.{}.attention", WeightLayout::Canonical)
        .or_at(&[""], BLOCKS, WeightLayout::Vit),
    // The first layer and the last are convolutions.
    SIGLIP_TEXTS.of("sam3_lite_text_text_model").layers(12).width(512).query_heads(8)
        .at(&["text_encoder.", "detector_model.text_encoder.", ""], "layers.{}.self_attn", WeightLayout::Opt)
        .window(Window::By(windows::between_convolutions)),
    WAV2VEC2.of("sew").below(&["sew.", ""]),
    SIGLIP_TEXTS.of("siglip2_text_model"),
    CLIP_IMAGES.of("siglip2_vision_model"),
    SIGLIP_TEXTS,
    CLIP_IMAGES.of("siglip_vision_model"),
    CLIP_IMAGES.of("smolvlm_vision").layers(12).width(1152).query_heads(16),
    ENCODER.of("tipsv2_text_model").at(&["text_encoder.", ""], "transformer.resblocks.{}.attn", WeightLayout::Torch)
        .mask(Mask::Encoder),
    ENCODER.of("tipsv2_vision_model").at(&["vision_encoder.", ""], "blocks.{}.attn", QKV)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).bias(Bias::OutAndQkvIf("qkv_bias", true)),
    // As published, and by the names of transformers' own module.
    CLIP_IMAGES.of("unlimited_ocr_vision_encoder").layers(24).width(1024).query_heads(16)
        .at(&["model.vision_model.", "vision_model.", ""], "transformer.layers.{}.self_attn", QKV_PROJ_OUT_PROJ)
        .or_at(&["model.vision_tower.vision_encoder.", "vision_encoder.", ""], "encoder.layers.{}.self_attn",
            WeightLayout::Opt),
    WAV2VEC2.of("unispeech").below(&["unispeech.", ""]),
    WAV2VEC2.of("unispeech-sat").below(&["unispeech_sat.", ""]),
    ENCODER.of("videomt").layers(24).width(1024).query_heads(16).at(&[""], "layers.{}.attention", WeightLayout::Opt),
    ENCODER.of("videoprism_text_model").at(TEXT_MODEL, "layers.{}.attention", WeightLayout::Canonical)
        .dropout(Number("attention_probs_dropout_prob", 0.0)).bias(Bias::AllIf("qkv_bias", true)).mask(Mask::Causal)
        .rules(&[rules::softcapped]),
    // In some versions of transformers before 5.18 the keys have a bias too.
    VIT.of("videomae").below(&["videomae.", ""]).aliases(&[("qkv_bias", "qv_bias")])
        .bias(Bias::OutAndQvIf("qv_bias", true)).key_bias("attention.key.bias"),
    VIDEOPRISM.at(VIDEOPRISM_PREFIXES, "spatial_layers.{}.attention", WeightLayout::Canonical)
        .layers_from("num_spatial_layers").named(&[NamedAttention {
            name: "temporal_layers",
            family: VIDEOPRISM.at(VIDEOPRISM_PREFIXES, "temporal_layers.{}.attention", WeightLayout::Canonical)
                .layers_from("num_temporal_layers").layers(4),
        }]),
    VIT.of("vilt").below(&["vilt.", ""]),
    VIT,
    VIT.of("vit_mae").decoder(&VIT_MAE_DECODER)
        .default_decoder_sizes(Sizes { layers: 8, embed_dim: 512, num_heads: 16 }),
    VIT.of("vit_msn").below(&["vit.", ""]),
    VIT.of("vitpose_backbone").below(&["backbone.", ""]),
    VIT.of("vivit").below(&["vivit.", ""]),
    WHISPER.of("voxtral_encoder").aliases(VOXTRAL_ALIASES),
    WHISPER.of("voxtral_realtime_encoder").layers(32).width(1280).query_heads(32).aliases(VOXTRAL_ALIASES).head_dim(64)
        .at(AUDIO, "layers.{}.self_attn", WeightLayout::Canonical).rope(rope(10_000.0, 1500))
        .window(Window::All(Some(750))).mask(Mask::Causal),
    WAV2VEC2,
    // Over the frames of a video, and from the texts to it.
    ENCODER.of("xclip").section("vision_config").layers_from("mit_num_hidden_layers").width_from("mit_hidden_size")
        .query_heads_from("mit_num_attention_heads").usual_names(false).layers(1).width(512).query_heads(8)
        .at(&[""], "mit.encoder.layers.{}.self_attn", WeightLayout::Opt).named(&[NamedAttention {
            name: "prompts_generator",
            family: ENCODER.layers_from("prompt_layers").width_from("projection_dim")
                .query_heads_from("prompt_num_attention_heads").usual_names(false).layers(2).width(512).query_heads(8)
                .dropout(Number("prompt_attention_dropout", 0.0)).bias(Bias::Out)
                .at(&[""], "prompts_generator.decoder.{}.cross_attn", WeightLayout::Kimi),
        }]),
    CLIP_TEXTS.of("xclip_text_model"),
    CLIP_IMAGES.of("xclip_vision_model").named(&[NamedAttention {
        name: "message_attn",
        family: CLIP_IMAGES.at(IMAGES, "encoder.layers.{}.message_attn", WeightLayout::Opt),
    }]),
    VIT.of("yolos").below(&["vit.", ""]),
];

const SAM: Family = ENCODER.of("sam_vision_model")
    .at(&["vision_encoder.", "sam.vision_encoder.", ""], "layers.{}.attn", QKV)
    .bias(Bias::OutAndQkvIf("qkv_bias", true)).dropout(Number("attention_dropout", 0.0))
    .positions(Positions::Grid { image: 1024 });

pub(super) const IN_WINDOWS: &[Family] =
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
            .layers(24).width(1024).query_heads(16)
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

const STAGES: Stages = Stages { depths: &[2, 2, 6, 2], heads: &[3, 6, 12, 24], widths: Widths::Doubled };
const STAGES_OF_SWIN2SR: Stages = Stages { depths: &[6; 6], heads: &[6; 6], widths: Widths::Equal };
const SWIN_BLOCKS: &str = "encoder.layers.{}.blocks.{}.attention";

const SWIN: Family = ENCODER.of("swin").at(&["swin.", ""], SWIN_BLOCKS, WeightLayout::Bert)
    .or_at(&["swin.", ""], SWIN_BLOCKS, WeightLayout::Canonical).layers_from("depths").width_from("embed_dim")
    .query_heads_from("num_heads")
    .usual_names(false).layers(0).width(96).query_heads(0).stages(STAGES).bias(Bias::OutAndQkvIf("qkv_bias", true))
    .dropout(Number("attention_probs_dropout_prob", 0.0)).positions(Positions::Table(7));

/// Keys and values are made of a coarser grid, which the caller makes of the input.
const REDUCED: Family = ENCODER.of("segformer").layers_from("depths").width_from("hidden_sizes")
    .query_heads_from("num_attention_heads").usual_names(false).layers(0).width(0).query_heads(0)
    .dropout(Number("attention_probs_dropout_prob", 0.0)).of_caller("sr").stages(REDUCED_STAGES);
const REDUCED_STAGES: Stages =
    Stages { depths: &[2; 4], heads: &[1, 2, 5, 8], widths: Widths::Each(&[32, 64, 160, 256]) };
const PVT_STAGES: Stages = Stages { widths: Widths::Each(&[64, 128, 320, 512]), ..REDUCED_STAGES };

/// Encoders of images and spectrograms in stages: in windows, with a table of biases or cosine scores, or with keys and
/// values of a coarser grid.
pub(super) const IN_STAGES: &[Family] = &[
    SWIN.of("clap_audio_model").layers_from("depths").width_from("patch_embeds_hidden_size")
        .query_heads_from("num_attention_heads")
        .at(&["audio_model.audio_encoder.", "audio_encoder.", ""], "layers.{}.blocks.{}.attention", WeightLayout::Bert)
        .stages(Stages { heads: &[4, 8, 16, 32], ..STAGES }).positions(Positions::Table(8)),
    SWIN.of("donut-swin").at(&["encoder.", "donut.", ""], SWIN_BLOCKS, WeightLayout::Bert),
    // In windows that the caller makes.
    REDUCED.of("florence_vision").width_from("embed_dim").query_heads_from("num_heads").stages(Stages {
        depths: &[1, 1, 9, 1], heads: &[4, 8, 16, 32], widths: Widths::Each(&[128, 256, 512, 1024]),
    })
        .at(&["model.vision_tower.", "vision_tower.", ""], "blocks.{}.{}.spatial_block.window_attn", QKV)
        .bias(Bias::OutAndQkvIf("qkv_bias", true)),
    REDUCED.of("glpn").at(&["glpn.", ""], "encoder.block.{}.{}.attention", WeightLayout::Bert),
    SWIN.of("maskformer-swin").at(&["model.", ""], SWIN_BLOCKS, WeightLayout::Bert),
    REDUCED.of("pvt").at(&["pvt.", ""], "encoder.block.{}.{}.attention", WeightLayout::Bert).stages(PVT_STAGES)
        .bias(Bias::OutAndQkvIf("qkv_bias", true)),
    REDUCED.of("pvt_v2").at(&["pvt_v2.", ""], "encoder.layers.{}.blocks.{}.attention", WeightLayout::MinGpt)
        .bias(Bias::OutAndQkvIf("qkv_bias", true)),
    // As published, and by the names of transformers' own module.
    REDUCED.at(&["segformer.", ""], "encoder.block.{}.{}.attention", WeightLayout::Bert)
        .or_at(&["segformer.", ""], "stages.{}.blocks.{}.attention", WeightLayout::Canonical),
    SWIN,
    SWIN.of("swin2sr").layers(0).width(180).query_heads(0).stages(STAGES_OF_SWIN2SR)
        .at(&["swin2sr.", ""], "encoder.stages.{}.layers.{}.attention", WeightLayout::Bert)
        .positions(Positions::Cosine(Cosine { image: 64, patch: 1, window: 8, stages: None })),
    SWIN.of("swinv2").at(&["swinv2.", ""], SWIN_BLOCKS, WeightLayout::Bert)
        .positions(Positions::Cosine(Cosine { image: 224, patch: 4, window: 7, stages: Some(STAGES) })),
];
