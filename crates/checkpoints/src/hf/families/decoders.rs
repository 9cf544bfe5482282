//! Decoders of text.

use super::{Bias, Family, Heads, Mask, NamedAttention, Number, Scale};
use super::{DECODER, LLAMA, MODEL, MODERNBERT_ROPE, MODERNBERT_WINDOWED_ROPE, PATTERN, QKV_PROJ, WQKV};
use super::{layer_norm, rms_per_head};
use crate::hf::compressed::CompressedKeys;
use crate::hf::latent::{FamilyIndexer, IndexerLayers, Latent, LatentRotation, Windowed};
use crate::hf::layer_kinds;
use crate::hf::linear::Linear;
use crate::hf::names::{ModuleNames, at};
use crate::hf::rope::{Ntk, Rope, Rotated, rope};
use crate::hf::rules::{self, GATE, GATE_IN_QUERY, GATE_OF_HEADS};
use crate::hf::shapes;
use crate::hf::windows::{self, Pattern::*, Window};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_modules::norm::{QkNormKind, QkNormScope};
use candle_attention_core::{IndexerQueries, RopeStyle, WeightLayout};

/// The parameters of rotary positions that a class of transformers has by default.
const APERTUS_ROPE: &str = r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 8192}"#;
const CWM_ROPE: &str = r#"{"rope_type": "llama3", "factor": 16, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 8192}"#;
const GPT_OSS_ROPE: &str = r#"{"rope_type": "yarn", "factor": 32, "truncate": false,
    "original_max_position_embeddings": 4096}"#;
const HIGGS_AUDIO_ROPE: &str = r#"{"rope_type": "llama3", "factor": 32, "low_freq_factor": 0.125,
    "high_freq_factor": 0.5, "original_max_position_embeddings": 1024}"#;

const MISTRAL: Family = DECODER.of("mistral").kv_heads(8).rope(rope(10_000.0, 131_072)).window(Window::All(Some(4096)));
const QWEN2: Family = DECODER.of("qwen2").kv_heads(32).bias(Bias::Qkv).rope(rope(10_000.0, 32_768))
    .window(Window::From(28));
const COHERE: Family = LLAMA.of("cohere").layers(40).width(8192).query_heads(64)
    .rope(rope(500_000.0, 8192).interleaved())
    .qk_norm(layer_norm(QkNormKind::LayerNoBias, QkNormScope::PerHeadWeights).flag("use_qk_norm"));
const GLM: Family = DECODER.of("glm").layers(40).width(4096).query_heads(32).grouped(2, 128)
    .bias(Bias::QkvIf("attention_bias", true))
    .rope(rope(10_000.0, 131_072).partial(0.5).interleaved());
const COHERE2: Family = Family { qk_norm: None, ..COHERE }.of("cohere2").head_dim_follows(true)
    .rope(rope(10_000.0, 8192).interleaved().layers(Rotated::Windowed))
    .window(Window::Layers(ButLastBy(PATTERN, 4), Some(4096)));
const GRANITE: Family = LLAMA.of("granite").scale(Scale::Field(Number("attention_multiplier", 1.0)));
const OLMO2: Family = LLAMA.of("olmo2").qk_norm(rms_per_head(1e-5).scope(QkNormScope::Projection));
const QWEN3: Family = QWEN2.of("qwen3").grouped(32, 128).bias(Bias::AllIf("attention_bias", false))
    .qk_norm(rms_per_head(1e-6));
const EXAONE4: Family = DECODER.of("exaone4").rope(rope(10_000.0, 2048).layers(Rotated::WindowedIfAny))
    .qk_norm(rms_per_head(1e-5)).window(Window::By(windows::exaone));
const HUNYUAN: Family = LLAMA.of("hunyuan_v1_dense").rope(rope(10_000.0, 2048).ntk(Ntk::Alpha))
    .qk_norm(rms_per_head(1e-5)).rules(&[rules::norm_after_rotary]);
const ATT_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::AttProj, QkvOrder::ByPart);
const ERNIE: Rope = rope(500_000.0, 131_072).interleaved();
const GRANITE_SWA: Family = GRANITE.of("granitemoe_swa").window(Window::Layers(ButFirstOf(4), Some(128))).sinks(true);
/// LFM2, some of whose layers are convolutions.
const LFM2: Family = DECODER.of("lfm2").layers(32).width(2560).query_heads(32).kv_heads(8)
    .at(MODEL, "layers.{}.self_attn", WeightLayout::Opt).rope(rope(1e6, 128_000))
    .qk_norm(rms_per_head(1e-5).eps(Number("norm_eps", 1e-5))).window(Window::Layers(NoLayer, None));
/// Kyutai's decoder of sound.
const KYUTAI: Family = DECODER.of("kyutai_speech_to_text").layers(48).width(2048).query_heads(32)
    .at(MODEL, "layers.{}.self_attn", WeightLayout::Moshi).rope(rope(10_000.0, 750)).window(Window::All(Some(375)));
/// The bytes of BLT. Their window is a field of the whole model's config, and the caller's.
const BLT: Family = DECODER.head_dim_follows(true).dropout(Number("dropout", 0.0));
const IDEFICS: Family = LLAMA.of("idefics").heads(Heads::Equal).dropout(Number("dropout", 0.0)).bias(Bias::None);
/// The decoders besides the Gemmas, in alphabetical order.
pub(super) const ROWS: &[Family] = &[
    LLAMA.of("apertus").rope(rope(12e6, 65_536).default_parameters(APERTUS_ROPE)).qk_norm(rms_per_head(1e-5)),
    LLAMA.of("arcee").layers(32).width(2560).query_heads(32).rope(rope(10_000.0, 4096)),
    LLAMA.of("aria_text"),
    LLAMA.of("bitnet").layers(30).width(2560).query_heads(20).kv_heads(5).rope(rope(500_000.0, 2048))
        .rules(&[rules::rms_of_output]),
    DECODER.of("blt_global_transformer").layers(25).width(2048).query_heads(16).head_dim_follows(true)
        .below(&["model.global_transformer.", "global_transformer.", ""]).dropout(Number("dropout", 0.0))
        .rope(rope(500_000.0, 4096).interleaved()),
    BLT.of("blt_local_decoder").layers(9).width(1024).query_heads(16).rope(rope(500_000.0, 24_576).interleaved())
        .below(&["model.local_decoder.", "local_decoder.", ""]),
    BLT.of("blt_local_encoder").layers(1).width(1024).query_heads(16).rope(rope(500_000.0, 24_576).interleaved())
        .below(&["model.local_encoder.", "local_encoder.", ""]),
    BLT.of("blt_patcher").layers(14).width(768).query_heads(12).below(&["model.patcher.", "patcher.", ""])
        .rope(rope(10_000.0, 8192).interleaved()).window(Window::All(Some(512))),
    LLAMA.of("chameleon").kv_heads(32).head_dim_follows(true).rope(rope(10_000.0, 4096))
        .qk_norm(layer_norm(QkNormKind::Layer, QkNormScope::PerHeadWeights)),
    COHERE,
    COHERE2,
    COHERE2.of("cohere2_moe").head_dim(128).head_dim_follows(false),
    LLAMA.of("csm").layers(16).width(2048).query_heads(32).kv_heads(8).below(&["backbone_model.", ""])
        .rope(rope(500_000.0, 2048)),
    LLAMA.of("csm_depth_decoder_model").layers(4).width(1024).query_heads(8).kv_heads(2)
        .below(&["model.", "depth_decoder.model.", ""])
        .rope(rope(500_000.0, 33)),
    DECODER.of("cwm").layers(64).width(6144).query_heads(48).grouped(8, 128)
        .rope(rope(1e6, 131_072).default_parameters(CWM_ROPE))
        .window(Window::Layers(ButFirstOf(4), Some(8192))),
    DECODER.of("dbrx").layers_from("n_layers").width_from("d_model").query_heads_from("n_heads").layers(24).width(2048)
        .query_heads(16).head_dim_follows(true)
        .at(&["transformer.", ""], "blocks.{}.norm_attn_norm.attn", WQKV).heads(Heads::By(shapes::dbrx_key_heads))
        .rope(rope(10_000.0, 2048)).rules(&[rules::dbrx]),
    // The mask, all patches before causal queries, is the caller's.
    QWEN2.of("deepseek_ocr2_encoder").mask(Mask::Encoder)
        .below(&["model.vision_tower.vision_encoder.", "vision_tower.vision_encoder.", "vision_encoder.", ""]),
    LLAMA.of("deepseek_ocr2_text").head_dim_follows(true).below(&["model.language_model.", "language_model.", ""]),
    LLAMA.of("dots1").layers(62).width(4608).query_heads(32).qk_norm(rms_per_head(1e-6))
        .window(Window::By(windows::dots)),
    LLAMA.of("emu3_text_model").kv_heads(8).bias(Bias::None)
        .below(&["model.", "text_model.model.", "model.text_model.", ""]).dropout(Number("attention_dropout", 0.1))
        .rope(rope(1e6, 9216)),
    DECODER.of("ernie4_5").layers(18).width(1024).query_heads(16).grouped(2, 128).bias(Bias::AllIf("use_bias", false))
        .rope(ERNIE),
    DECODER.of("ernie4_5_moe").layers(28).width(2560).query_heads(20).kv_heads(4).bias(Bias::AllIf("use_bias", false))
        .rope(ERNIE),
    EXAONE4,
    EXAONE4.of("exaone_moe"),
    // Each layer has a state space model too.
    LLAMA.of("falcon_h1").kv_heads(8).rope(rope(10_000.0, 8192))
        .scale(Scale::UsualTimes(Number("key_multiplier", 1.0))),
    // Layers without a window have no positions.
    LLAMA.of("flint").layers(49).width(2048).query_heads(32).grouped(4, 128)
        .rope(rope(10_000.0, 262_144).layers(Rotated::Windowed))
        .qk_norm(rms_per_head(1e-6)).window(Window::By(windows::flint)).sinks(true)
        .sinks_name("softmax_offset"),
    LLAMA.of("flex_olmo").qk_norm(rms_per_head(1e-6).scope(QkNormScope::Projection)).rope(rope(500_000.0, 4096)),
    GLM,
    GLM.of("glm4"),
    DECODER.of("glm4_moe").layers(46).width(4096).query_heads(96).kv_heads(8).bias(Bias::QkvIf("attention_bias", false))
        .rope(rope(10_000.0, 131_072).partial(0.5)).qk_norm(rms_per_head(1e-5).flag("use_qk_norm")),
    DECODER.of("gpt_oss").layers(36).width(2880).query_heads(64).grouped(8, 64)
        .bias(Bias::AllIf("attention_bias", true))
        .rope(rope(150_000.0, 131_072).default_parameters(GPT_OSS_ROPE)).window(Window::Layers(FirstOf(2), Some(128)))
        .sinks(true),
    GRANITE,
    GRANITE.of("granite4_vision_text"),
    GRANITE.of("granite_docling_text").layers(28).width(1024).query_heads(16).kv_heads(4).rope(rope(10_000.0, 32_768))
        .scale(Scale::Field(Number("attention_multiplier", 0.015625))),
    GRANITE_SWA.of("granite_swa").layers(24).width(2560).query_heads(20).kv_heads(4).rope(rope(10_000.0, 8192)),
    GRANITE.of("granitemoe"),
    GRANITE_SWA,
    GRANITE.of("granitemoeshared"),
    DECODER.of("helium").layers(24).width(2560).query_heads(20).grouped(20, 128)
        .bias(Bias::QkvIf("attention_bias", false))
        .rope(rope(100_000.0, 4096).interleaved()),
    LLAMA.of("higgs_audio_v2").layers(28).width(3072).query_heads(24).grouped(8, 128)
        .rope(rope(500_000.0, 2048).default_parameters(HIGGS_AUDIO_ROPE)),
    HUNYUAN,
    HUNYUAN.of("hunyuan_v1_moe"),
    LLAMA.of("hy_v3").layers(80).width(4096).query_heads(64).grouped(8, 128).rope(rope(11_158_840.0, 131_072))
        .qk_norm(rms_per_head(1e-5)),
    LLAMA.of("hyperclovax").scale(Scale::UsualOr("attention_multiplier")),
    IDEFICS.named(&[NamedAttention {
        name: "cross_attn",
        family: Family { rope: None, ..IDEFICS }.mask(Mask::Encoder)
            .at(MODEL, "gated_cross_attn_layers.{}.cross_attn", WeightLayout::Canonical)
            .only(&[("qk_layer_norms", "false")]).rules(&[shapes::idefics_cross]),
    }]),
    DECODER.of("jais2").layers(32).width(3328).query_heads(26).head_dim(128).bias(Bias::AllIf("attention_bias", true))
        .rope(rope(10_000.0, 8192)),
    EXAONE4.of("kolibri1").layers(50).width(2560).query_heads(48).grouped(4, 128).qk_norm(rms_per_head(1e-6))
        .rope(rope(10_000.0, 2048).layers(Rotated::WindowedIfAny)).window(Window::Layers(ButLastOf(5), Some(513))),
    LFM2,
    LFM2.of("lfm2_moe").layers(32).width(2048).query_heads(32),
    LLAMA,
    LLAMA.of("mellum").layers(28).width(2304).query_heads(32).grouped(4, 128).rope(rope(500_000.0, 131_072))
        .windowed_rope(rope(10_000.0, 131_072)).qk_norm(rms_per_head(1e-6)).window(Window::Layers(NoLayer, Some(1024))),
    DECODER.of("minimax").kv_heads(8).rope(rope(1e6, 131_072)).window(Window::By(windows::minimax)),
    DECODER.of("minimax_m2").layers(62).width(3072).query_heads(48).grouped(8, 128)
        .rope(rope(5e6, 196_608).partial(1.0))
        .qk_norm(rms_per_head(1e-6).scope(QkNormScope::Projection)).rules(&[rules::minimax_rotary]),
    DECODER.of("minimax_m3_vl_text").layers(60).width(6144).query_heads(64).grouped(4, 128)
        .rope(rope(5e6, 524_288).partial(1.0)).qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsPlusOne))
        .rules(&[rules::minimax_indexer]),
    MISTRAL.of("ministral").window(Window::By(windows::ministral)),
    MISTRAL,
    MISTRAL.of("mixtral").rope(rope(1_000_000.0, 131_072)).window(Window::All(None)),
    DECODER.of("mllama_text_model").layers(40).width(4096).query_heads(32).kv_heads(8).rope(rope(500_000.0, 131_072)),
    LLAMA.of("modernbert-decoder").layers(22).width(768).query_heads(12).heads(Heads::Equal)
        .at(MODEL, "layers.{}.attn", WeightLayout::ModernBertDecoder).rope(MODERNBERT_ROPE)
        .windowed_rope(MODERNBERT_WINDOWED_ROPE).window(Window::By(windows::modernbert)),
    DECODER.of("molmo2_text").layers(36).width(4096).query_heads(32).grouped(8, 128)
        .aliases(&[("qkv_bias", "attention_bias"), ("layer_norm_eps", "rms_norm_eps")])
        .at(&["model.transformer.", "transformer."], "blocks.{}.self_attn", ATT_PROJ)
        .or_at(MODEL, "layers.{}.self_attn", ATT_PROJ).bias(Bias::QkvIf("attention_bias", false))
        .rope(rope(10_000.0, 36_864)).qk_norm(rms_per_head(1e-6)).only(&[("qk_norm_type", "\"qwen3\"")])
        .rules(&[rules::molmo_scaling]),
    KYUTAI,
    // transformers 5 reads it for caches and forgets it in the mask of a prompt.
    KYUTAI.of("moshi").layers(32).width(4096).query_heads(32)
        .at(&["model.", "decoder.model.", ""], "layers.{}.self_attn", WeightLayout::Moshi)
        .rope(rope(10_000.0, 3000)).window(Window::All(Some(3000))),
    LLAMA.of("nanochat").layers(12).width(768).query_heads(6).rope(rope(10_000.0, 2048).reversed(true))
        .qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsNoWeight)).rules(&[rules::norm_after_rotary]),
    LLAMA.of("nemotron").layers(32).width(6144).query_heads(48).rope(rope(10_000.0, 4096).partial(0.5)),
    LLAMA.of("olmo").rules(&[rules::clipped]),
    OLMO2,
    DECODER.of("openai_privacy_filter").layers(8).width(640).query_heads(14).grouped(2, 64)
        .bias(Bias::AllIf("attention_bias", true))
        .rope(rope(150_000.0, 131_072).interleaved().default_parameters(GPT_OSS_ROPE)).mask(Mask::Encoder)
        .window(Window::All(Some(128))).sinks(true),
    // transformers before 5.13 writes one object for layers of all kinds.
    OLMO2.of("olmo3").rope(rope(500_000.0, 2048).one_for_all(true))
        .windowed_rope(rope(500_000.0, 2048).one_for_all(true)).window(Window::Layers(ButLastOf(4), Some(4096))),
    // Most of its layers are recurrences.
    OLMO2.of("olmo_hybrid").layers(32).width(3840).query_heads(30)
        .qk_norm(rms_per_head(1e-6).scope(QkNormScope::Projection))
        .rope(rope(10_000.0, 65_536).layers(Rotated::If(rules::has_theta))).linear(Linear::OLMO),
    OLMO2.of("olmoe").layers(16).width(2048).query_heads(16).rope(rope(10_000.0, 4096)).rules(&[rules::clipped]),
    DECODER.of("phi3").layers(32).width(3072).query_heads(32).at(MODEL, "layers.{}.self_attn", QKV_PROJ)
        .rope(rope(10_000.0, 4096).partial(1.0).long_rope_only(true)).window(Window::All(None)),
    DECODER.of("phi4_multimodal").layers(32).width(3072).query_heads(32).kv_heads(8)
        .at(MODEL, "layers.{}.self_attn", QKV_PROJ)
        .rope(rope(10_000.0, 4096).partial(1.0).long_rope_only(true)).window(Window::All(None)),
    LLAMA.of("phimoe").kv_heads(8).rope(rope(1e6, 131_072)).window(Window::All(None)).rules(&[rules::no_scaling]),
    QWEN2,
    QWEN2.of("qwen2_moe").layers(24).width(2048).query_heads(16).kv_heads(16).bias(Bias::QkvIf("qkv_bias", true)),
    QWEN3,
    QWEN3.of("qwen3_moe").layers(24).width(2048).query_heads(32).kv_heads(4).window(Window::By(windows::qwen3_moe)),
    QWEN3.of("qwen3_omni_moe_talker_code_predictor").layers(5).width(1024).query_heads(16)
        .below(&["model.", "talker.code_predictor.model.", "code_predictor.model.", ""]).grouped(8, 128),
    DECODER.of("seed_oss").layers(64).width(4096).query_heads(80).grouped(8, 128)
        .bias(Bias::QkvIf("attention_bias", true))
        .dropout(Number("attention_dropout", 0.1)).rope(rope(10_000.0, 524_288)).rules(&[rules::out_bias]),
    LLAMA.of("smollm3").layers(36).width(2048).query_heads(16).kv_heads(4)
        .rope(rope(2_000_000.0, 32_768).layers(Rotated::If(layer_kinds::alternates_rotary)))
        .window(Window::By(windows::smollm3)),
    DECODER.of("solar_open").layers(48).width(4096).query_heads(64).grouped(8, 128)
        .bias(Bias::QkvIf("attention_bias", false))
        .rope(rope(1e6, 131_072)),
    DECODER.of("stablelm").layers(32).width(2560).query_heads(32).kv_heads(32).head_dim_follows(true)
        .bias(Bias::QkvIf("use_qkv_bias", false)).rope(rope(10_000.0, 4096).partial(0.25))
        .qk_norm(layer_norm(QkNormKind::LayerNoBias, QkNormScope::PerHeadWeights).flag("qk_layernorm")),
    MISTRAL.of("voxtral_realtime_text").below(&["language_model.model.", "model.language_model.", "model.", ""]),
    DECODER.of("starcoder2").layers(30).width(3072).query_heads(24).kv_heads(2).bias(Bias::AllIf("use_bias", true))
        .rope(rope(10_000.0, 4096)).window(Window::All(None)),
];

/// The parameters of rotary positions that its class in transformers has by default.
const MINISTRAL_3_ROPE: &str = r#"{"rope_type": "yarn", "factor": 16, "mscale": 1, "mscale_all_dim": 1,
    "original_max_position_embeddings": 16384}"#;

const QWEN3_NEXT: Family = LLAMA.of("qwen3_next").layers(48).width(2048).query_heads(16).grouped(2, 256)
    .rope(rope(10_000.0, 32_768).partial(0.25)).qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsPlusOne))
    .linear(Linear::QWEN3_NEXT).gate(GATE_IN_QUERY);

/// Decoders of text whose context passes a gate, or whose queries are scaled by position.
pub(super) const GATED: &[Family] = &[
    LLAMA.of("afmoe").layers(32).width(2048).query_heads(16).head_dim(128)
        .rope(rope(10_000.0, 16_384).layers(Rotated::Windowed))
        .qk_norm(rms_per_head(1e-5)).window(Window::Layers(ButLastBy("global_attn_every_n_layers", 4), Some(1024)))
        .gate(GATE),
    LLAMA.of("laguna").layers(40).width(2048).query_heads(48).grouped(8, 128)
        .rope(rope(500_000.0, 131_072).partial(0.5))
        .windowed_rope(rope(10_000.0, 131_072).partial(1.0)).qk_norm(rms_per_head(1e-6))
        .window(Window::Layers(NoLayer, Some(512))).rules(&[shapes::laguna]),
    // Most of its layers are convolutions.
    LLAMA.of("lfm3").layers(24).width(2048).query_heads(16).grouped(4, 128)
        .rope(rope(1e6, 128_000).default_parameters(r#"{"rope_type": "proportional", "partial_rotary_factor": 0.5}"#))
        .windowed_rope(rope(10_000.0, 128_000)).qk_norm(rms_per_head(1e-5).eps(Number("norm_eps", 1e-5)))
        .window(Window::By(windows::lfm3)).rules(&[rules::gate_if_flag]),
    LLAMA.of("llama4_text").layers(48).width(5120).query_heads(40).grouped(8, 128)
        .rope(rope(500_000.0, 131_072).interleaved().layers(Rotated::If(layer_kinds::alternates_rotary)))
        .rules(&[rules::llama4]),
    LLAMA.of("ministral3").layers(34).width(4096).query_heads(32).grouped(8, 128).bias(Bias::None)
        .rope(rope(1e6, 262_144).default_parameters(MINISTRAL_3_ROPE)).window(Window::All(None))
        .rules(&[rules::attention_temperature]),
    LLAMA.of("muse_glimmer_text").layers(52).width(6656).query_heads(32).grouped(2, 128)
        .rope(rope(10_000.0, 131_072).layers(Rotated::If(rules::muse_rotary)))
        .qk_norm(rms_per_head(1e-5).kind(QkNormKind::RmsNoWeight)).window(Window::By(windows::muse_glimmer))
        .gate(GATE).scale(Scale::UsualTimes(Number("qk_scale_factor", 3.87))),
    QWEN3_NEXT,
    // As published, several of its fields are lists or entries of lists.
    LLAMA.of("step3p5").layers(45).width(4096).query_heads(64).grouped(8, 128)
        .aliases(&[("num_attention_groups", "num_key_value_heads")]).rope(rope(10_000.0, 128_000).partial(1.0))
        .windowed_rope(rope(10_000.0, 128_000).partial(1.0))
        .qk_norm(rms_per_head(1e-5).kind(QkNormKind::RmsPlusOne)).window(Window::Layers(NoLayer, None))
        .only(&[("attention_other_setting", "null"), ("partial_rotary_factors", "null"), ("gating", "true")])
        .gate(GATE_OF_HEADS).rules(&[shapes::step3p5]),
];

/// Decoders of text in which few layers have softmax attention, and the others are recurrences.
pub(super) const HYBRID: &[Family] = &[
    LLAMA.of("bamba").kv_heads(8).rope(rope(10_000.0, 262_144).partial(0.5)).window(Window::By(windows::bamba)),
    LLAMA.of("granitemoehybrid")
        .rope(rope(10_000.0, 2048).layers(Rotated::IfText("position_embedding_type", "rope")))
        .window(Window::By(windows::granite_hybrid)).scale(Scale::Field(Number("attention_multiplier", 1.0))),
    DECODER.of("jamba").kv_heads(8).window(Window::By(windows::jamba)),
    // The layers of experts and of other feed-forward networks count too.
    DECODER.of("nemotron_h").layers(4).width(4096).query_heads(32).grouped(8, 128)
        .at(&["model.", "backbone.", ""], "layers.{}.mixer", WeightLayout::Canonical)
        .bias(Bias::AllIf("attention_bias", false)).aliases(&[("layer_types", "layers_block_type")])
        .window(Window::By(windows::nemotron_h)),
    DECODER.of("recurrent_gemma").layers(26).width(2560).query_heads(10).head_dim_follows(true)
        .bias(Bias::OutAndQkvIf("attention_bias", false))
        .at(MODEL, "layers.{}.temporal_block", WeightLayout::Canonical).rope(rope(10_000.0, 8192).partial(0.5))
        .window(Window::By(windows::recurrent_gemma)),
];

/// The names of latent attention, whose parameters of queries differ between checkpoints.
const NAMES: ModuleNames = ModuleNames {
    parameter: Some("kv_a_proj_with_mqa.weight"),
    ..at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)
};
/// The names of Mistral Large 4 as it is published.
const MISTRAL_NAMES: ModuleNames = ModuleNames {
    parameter: Some("wkv_a_with_mqa.weight"),
    ..at(MODEL, "layers.{}.attention", WeightLayout::Canonical)
};
const DEEPSEEK_V2: Family = DECODER.of("deepseek_v2").modules([Some(NAMES), None]).latent(Latent::DEEPSEEK)
    .rope(rope(10_000.0, 2048).interleaved()).only(&[("rope_interleave", "true")]);
const DEEPSEEK_V3: Family = DEEPSEEK_V2.of("deepseek_v3").layers(61).width(7168).query_heads(128).rope(by_flag(4096))
    .only(&[]);

/// Neighbours, or halves by `rope_interleave`.
const fn by_flag(context: usize) -> Rope {
    rope(10_000.0, context).interleaving_flag("rope_interleave")
}

const GLM4_LITE: Latent =
    Latent { q_lora_rank: Some(768), nope_head_dim: 192, value_head_dim: Some(256), ..Latent::DEEPSEEK };
const MINICPM3: Latent = Latent {
    q_lora_rank: Some(768), kv_lora_rank: 256, nope_head_dim: 64, rope_head_dim: 32, value_head_dim: None,
    ..Latent::DEEPSEEK
};
const DEEPSEEK_V32: Latent = Latent { indexer: Some(FamilyIndexer::DEEPSEEK), ..Latent::DEEPSEEK };
const GLM5_INDEXER: FamilyIndexer =
    FamilyIndexer { num_heads: 32, rope_style: RopeStyle::Interleaved, ..FamilyIndexer::DEEPSEEK };
const GLM5: Latent = Latent {
    q_lora_rank: Some(2048), nope_head_dim: 192, value_head_dim: Some(256), indexer: Some(GLM5_INDEXER),
    ..Latent::DEEPSEEK
};
/// Without rotary positions, and with scores of pools of keys.
const GLM5_NEXT: Latent = Latent {
    nope_head_dim: 256, rope_head_dim: 0, value_head_dim: Some(256), rotates: LatentRotation::None,
    norm_eps: Some(1e-5), indexer: Some(FamilyIndexer { pool: Some(16), ..GLM5_INDEXER }),
    ..Latent::DEEPSEEK
};
const KIMI_LINEAR: Latent = Latent { q_lora_rank: None, rotates: LatentRotation::None, ..Latent::DEEPSEEK };
const BAILING: Latent = Latent { q_lora_rank: None, gate: Some(GATE_OF_HEADS), ..Latent::DEEPSEEK };
const BAILING_NAMES: ModuleNames = ModuleNames { path: "layers.{}.attention", ..NAMES };
const LONGCAT_NAMES: ModuleNames = ModuleNames { path: "layers.{}.self_attn.{}", ..NAMES };
const AXK2: Latent = Latent {
    q_lora_rank: Some(384), kv_lora_rank: 128, nope_head_dim: 64, rope_head_dim: 32, value_head_dim: Some(64),
    gate: Some(GATE_IN_QUERY), indexer: Some(FamilyIndexer { num_heads: 16, ..FamilyIndexer::DEEPSEEK }),
    ..Latent::DEEPSEEK
};
const HY_V4: Latent = Latent {
    nope_head_dim: 192, value_head_dim: Some(256), gate: Some(GATE), sinks: true,
    indexer: Some(FamilyIndexer {
        num_heads: 16, rotates_last: true, norm_eps: Some(1e-5), layers: IndexerLayers::EveryFourth,
        ..FamilyIndexer::DEEPSEEK
    }),
    ..Latent::DEEPSEEK
};
const MISTRAL_LARGE_4: Latent = Latent {
    q_lora_rank: None, nope_head_dim: 64, rotates: LatentRotation::If(layer_kinds::alternates_rotary),
    norm_eps: Some(1e-5), learned_temperature: true, learned_frequencies: true,
    indexer: Some(FamilyIndexer { queries: IndexerQueries::NormalizedInput, ..GLM5_INDEXER }),
    ..Latent::DEEPSEEK
};
/// The parameters of rotary positions that its class in transformers has by default.
const MISTRAL_LARGE_4_ROPE: &str = r#"{"rope_type": "yarn", "factor": 2048, "attention_factor": 1,
    "original_max_position_embeddings": 512}"#;
/// Layers with a window, and the others without their indexer.
const DOTS3_SHAPE: Latent = Latent {
    q_lora_rank: Some(1024), norm_eps: Some(1e-5), gate: Some(GATE_OF_HEADS), scales_latents: true,
    shared_key_norm: true, head_dim_is_rotated: false,
    ..Latent::DEEPSEEK
};
const DOTS3: Latent = Latent {
    windowed: Some(&DOTS3_WINDOWED),
    indexer: Some(FamilyIndexer {
        rope_style: RopeStyle::Interleaved, layers: IndexerLayers::If(layer_kinds::dots3_has_indexer),
        ..FamilyIndexer::DEEPSEEK
    }),
    ..DOTS3_SHAPE
};
const DOTS3_WINDOWED: Windowed = Windowed {
    kind: layer_kinds::dots3, num_heads: 64,
    latent: Latent { kv_lora_rank: 1024, nope_head_dim: 192, ..DOTS3_SHAPE },
};
const DOTS3_ROPE: Rope = rope(80_000_000.0, 524_288).interleaved().one_for_all(true).shares_scaling(true)
    .rotates_whole(true);

/// Latent attention: DeepSeek's, and the same attention in other models.
pub(super) const LATENT: &[Family] = &[
    DEEPSEEK_V2.of("axk2").layers(48).width(2048).query_heads(32).rope(rope(10_000.0, 131_072).interleaved())
        .latent(AXK2).only(&[]),
    DEEPSEEK_V3.of("axk1").layers(61).width(7168).query_heads(64).rope(by_flag(32_768)),
    // Most of its layers are recurrences.
    DEEPSEEK_V3.of("bailing_hybrid").modules([Some(BAILING_NAMES), Some(NAMES)]).layers(42).width(2560).query_heads(32)
        .rope(rope(6_000_000.0, 262_144).interleaved()).linear(Linear::BAILING).latent(BAILING),
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V2.of("deepseek_v32").layers(61).width(7168).query_heads(128).rope(rope(10_000.0, 163_840).interleaved())
        .latent(DEEPSEEK_V32),
    DEEPSEEK_V2.of("glm_moe_dsa").layers(78).width(6144).query_heads(64).rope(rope(10_000.0, 202_752).interleaved())
        .latent(GLM5),
    DEEPSEEK_V3.of("glm4_moe_lite").layers(47).width(2048).query_heads(20).rope(by_flag(202_752))
        .latent(GLM4_LITE),
    DEEPSEEK_V3.of("dots3_note_text").layers(46).width(5120).query_heads(128).window(Window::By(windows::dots3))
        .rope(DOTS3_ROPE).windowed_rope(DOTS3_ROPE.theta(Number("swa_rope_theta", 50_000.0))).latent(DOTS3),
    // Most of its layers are recurrences.
    DEEPSEEK_V3.of("glm5_next_text").layers(45).width(4096).query_heads(64).linear(Linear::GLM5).latent(GLM5_NEXT)
        .only(&[("index_kpool_always_select_tail", "true")]),
    DEEPSEEK_V3.of("hy_v4").layers(34).width(2816).query_heads(32).rope(rope(10_000.0, 262_144)).latent(HY_V4),
    // As it is published; transformers loads it as DeepSeek V3.
    DEEPSEEK_V3.of("kimi_k2").has_default_sizes(false),
    DEEPSEEK_V3.of("kimi_linear").layers(27).width(2304).query_heads(32).latent(KIMI_LINEAR).linear(Linear::KIMI)
        .only(&[("mla_use_nope", "true")]),
    DEEPSEEK_V3.of("longcat_flash").modules([Some(LONGCAT_NAMES), None]).layers_from("num_layers").layers(28)
        .attentions_of_layer(2).width(6144).query_heads(64).rope(rope(10_000_000.0, 131_072).interleaved())
        .latent(Latent { scales_latents: true, ..Latent::DEEPSEEK }),
    DEEPSEEK_V3.of("mistral_large4_text").layers(72).width(6144).query_heads(64)
        .modules([Some(NAMES), Some(MISTRAL_NAMES)])
        .rope(rope(10_000.0, 1_048_576).interleaved().default_parameters(MISTRAL_LARGE_4_ROPE)).latent(MISTRAL_LARGE_4),
    DEEPSEEK_V3.of("minicpm3").layers(62).width(2560).query_heads(40).rope(rope(10_000.0, 32_768)).latent(MINICPM3),
    DEEPSEEK_V3.of("youtu").layers(32).width(2048).query_heads(16).rope(by_flag(131_072)),
];

/// Attention to compressed keys.
pub(super) const COMPRESSED: &[Family] = &[
    DECODER.of("deepseek_v4").layers(43).width(4096).query_heads(64).rope(rope(10_000.0, 1_048_576).interleaved().rotates_whole(true))
        .modules([
            Some(ModuleNames { parameter: Some("wq_a.weight"), ..at(MODEL, "layers.{}.attn", WeightLayout::Canonical) }),
            Some(ModuleNames { parameter: Some("q_a_proj.weight"), ..at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical) }),
        ])
        .compressed(CompressedKeys::DEEPSEEK_V4),
];

/// The text of a model of texts and images, as transformers saves it, as Gemma 3 was published, and without a head.
const BELOW_IMAGES: &[&str] = &["model.language_model.", "language_model.model.", "language_model."];
/// Wide heads of which a quarter of the pairs rotates.
const PROPORTIONAL: Rope =
    rope(1e6, 131_072).default_parameters(r#"{"rope_type": "proportional", "partial_rotary_factor": 0.25}"#);

// What it does depends on the implementation of attention that transformers uses: some keep the causal mask.
const GEMMA: Family = LLAMA.of("gemma").layers(28).width(3072).query_heads(16).grouped(16, 256)
    .rope(rope(10_000.0, 8192))
    .only(&[("use_bidirectional_attention", "false")]);
const GEMMA2: Family = GEMMA.of("gemma2").layers(26).width(2304).query_heads(8).grouped(4, 256)
    .window(Window::Layers(FirstOf(2), Some(4096))).scale(Scale::RootOf(Number("query_pre_attn_scalar", 256.0)))
    .rules(&[rules::softcapped]);
const GEMMA3_TEXT: Family = GEMMA2.of("gemma3_text").rope(rope(1e6, 131_072))
    .windowed_rope(rope(10_000.0, 131_072).theta(Number("rope_local_base_freq", 10_000.0)))
    .qk_norm(rms_per_head(1e-6).kind(QkNormKind::RmsPlusOne))
    .window(Window::Layers(ButLastBy(PATTERN, 6), Some(4096))).mask(Mask::CausalOrBidirectional)
    .only(&[("model_type", "\"gemma3_text\""), ("attn_logit_softcapping", "null")]).rules(&[]);
const GEMMA3N: Family = LLAMA.of("gemma3n_text").layers(35).width(2048).query_heads(8).grouped(2, 256)
    .rope(rope(1e6, 32_768))
    .windowed_rope(rope(10_000.0, 32_768).theta(Number("rope_local_base_freq", 10_000.0))).qk_norm(rms_per_head(1e-6))
    .window(Window::Layers(ButLastOf(5), Some(512))).scale(Scale::Fixed(1.0)).value_norm(true).kv_shared_layers(15);
const GEMMA4: Family = GEMMA3N.of("gemma4_text").layers(30).width(2304).query_heads(8).grouped(4, 256)
    .rope(PROPORTIONAL)
    .windowed_rope(rope(10_000.0, 131_072)).window(Window::NeverLast(ButLastOf(6), 512))
    .mask(Mask::CausalOrBidirectional).kv_shared_layers(0).rules(&[shapes::gemma4_full]);
const GEMMA4_UNIFIED: Family = GEMMA4.of("gemma4_unified_text").window(Window::NeverLast(ButLastOf(6), 1024));
/// Gemma 4 without layers that share keys and values: all layers project them.
const UNSHARED: Family = Family { kv_shared_layers: None, ..GEMMA4 };

/// The text layers of the encoder of T5Gemma 2, which have windows on both sides.
const T5GEMMA2: Family = GEMMA3_TEXT.of("t5gemma2_encoder").section("text_config").mask(Mask::Encoder)
    .below(&["model.encoder.text_model.", "model.encoder.", "encoder.text_model.", "text_model.", ""])
    .rules(&[rules::half_windows]).only(&[("attn_logit_softcapping", "null")]);
/// The Gemmas and the models that are built on them, in alphabetical order.
pub(super) const GEMMAS: &[Family] = &[
    // Its encoder.
    UNSHARED.of("diffusion_gemma_text").below(&["model.encoder.language_model.", "encoder.language_model.", ""])
        .rules(&[shapes::diffusion_gemma_full]),
    UNSHARED.of("embedding_gemma2_text").layers(24).width(512).query_heads(4).grouped(2, 256).rope(rope(1e6, 262_144))
        .windowed_rope(rope(10_000.0, 262_144)).window(Window::Layers(ButLastOf(6), Some(512))).mask(Mask::Encoder)
        .rules(&[shapes::embedding_gemma_full]),
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT.of("gemma3").section("text_config").below(BELOW_IMAGES),
    GEMMA3_TEXT,
    GEMMA3N.of("gemma3n").section("text_config").below(BELOW_IMAGES),
    GEMMA3N,
    GEMMA4.of("gemma4").section("text_config").below(BELOW_IMAGES),
    GEMMA4,
    GEMMA4_UNIFIED.of("gemma4_unified").section("text_config").below(BELOW_IMAGES),
    GEMMA4_UNIFIED,
    T5GEMMA2,
    T5GEMMA2.of("t5gemma2_text"),
    GEMMA2.of("vaultgemma"),
];
