//! Decoders of text.

use super::{DECODER, MODEL, MODERNBERT_ROPE, QKV_PROJ, WQKV, layer_norm, rms_norm};
use crate::hf::family::{Bias, Family, Heads, Norm, Rotary, at};
use crate::hf::rope::{Rope, rope};
use crate::hf::rules::{
    all_but_each, clipped, exaone_rotates, exaone_window, gpt_oss_scaling, kolibri_window, llama3, modernbert_side,
    qwen_window, sliding, smollm3_rotates, softmax_each,
};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{ContextNorm, QkNormKind, QkNormScope, RopeConfig, RopeScaling, WeightLayout};

#[rustfmt::skip]
const LLAMA: Family = Family {
    model_type: "llama", bias: Bias::AllIf("attention_bias", false), rope: Rotary::All(rope(10_000.0, 2048)),
    ..DECODER
};
#[rustfmt::skip]
const MISTRAL: Family = Family {
    model_type: "mistral", heads: Heads::Grouped(Some(8), None), rope: Rotary::All(rope(10_000.0, 131_072)),
    window: |fields, _| fields.nullable("sliding_window", Some(4096)), ..DECODER
};
#[rustfmt::skip]
const QWEN2: Family = Family {
    model_type: "qwen2", heads: Heads::Grouped(Some(32), None), bias: Bias::Qkv,
    rope: Rotary::All(rope(10_000.0, 32_768)), window: qwen_window, ..DECODER
};
#[rustfmt::skip]
const COHERE: Family = Family {
    model_type: "cohere", sizes: [40, 8192, 64], rope: Rotary::All(rope(500_000.0, 8192).interleaved()),
    qk_norm: Some(layer_norm(Some("use_qk_norm"), QkNormKind::LayerNoBias, QkNormScope::PerHeadWeights)),
    ..LLAMA
};
#[rustfmt::skip]
const GLM: Family = Family {
    model_type: "glm", sizes: [40, 4096, 32], heads: Heads::Grouped(Some(2), Some(128)),
    bias: Bias::QkvIf("attention_bias", true),
    rope: Rotary::All(rope(10_000.0, 131_072).partial("partial_rotary_factor", 0.5).interleaved()), ..DECODER
};
#[rustfmt::skip]
const COHERE2: Family = Family {
    model_type: "cohere2", head_dim_follows: true, rope: Rotary::Windowed(rope(10_000.0, 8192).interleaved()),
    qk_norm: None, window: |fields, layer| all_but_each(fields, layer, 4), ..COHERE
};
#[rustfmt::skip]
const GRANITE: Family = Family { model_type: "granite", scale: Some(("attention_multiplier", 1.0, 1.0)), ..LLAMA };
#[rustfmt::skip]
const OLMO2: Family = Family { model_type: "olmo2", qk_norm: Some(rms_norm(QkNormScope::Projection, 1e-5)), ..LLAMA };
#[rustfmt::skip]
const QWEN3: Family = Family {
    model_type: "qwen3", heads: Heads::Grouped(Some(32), Some(128)), bias: Bias::AllIf("attention_bias", false),
    qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)), ..QWEN2
};
#[rustfmt::skip]
const EXAONE4: Family = Family {
    model_type: "exaone4", rope: Rotary::If(exaone_rotates, rope(10_000.0, 2048)),
    qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-5)), window: exaone_window, ..DECODER
};
#[rustfmt::skip]
const HUNYUAN: Family = Family {
    model_type: "hunyuan_v1_dense", qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-5)),
    adjust: |fields, _, cfg| {
        // A factor of the base, which depends on the head.
        for name in ["rope_scaling", "rope_parameters"] {
            fields.section(name)?.only("alpha", 0)?;
        }
        Ok(cfg.with_norm_after_rope(true))
    },
    ..LLAMA
};
const ATT_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::AttProj, QkvOrder::ByPart);
/// Half of each pair of neighbours.
const ERNIE: Rope = rope(500_000.0, 131_072).interleaved();
#[rustfmt::skip]
const GRANITE_SWA: Family = Family {
    model_type: "granitemoe_swa",
    window: |fields, layer| sliding(fields, layer, !layer.is_multiple_of(4), Some(128)),
    adjust: |_, _, cfg| Ok(cfg.with_sinks(true)), ..GRANITE
};
/// Some of its layers are convolutions.
#[rustfmt::skip]
const LFM2: Family = Family {
    model_type: "lfm2", sizes: [32, 2560, 32], heads: Heads::Grouped(Some(8), None),
    modules: &[at(MODEL, "layers.{}.self_attn", WeightLayout::Opt)], rope: Rotary::All(rope(1e6, 128_000)),
    qk_norm: Some(Norm { eps: ("norm_eps", 1e-5), ..rms_norm(QkNormScope::PerHead, 1e-5) }),
    window: |fields, layer| sliding(fields, layer, false, None), ..DECODER
};
/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "apertus",
        rope: Rotary::All(rope(12e6, 65_536).scaled_unless_given(|_| Ok(llama3(8.0, [1.0, 4.0], 8192)))),
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-5)), ..LLAMA
    },
    Family { model_type: "arcee", sizes: [32, 2560, 32], rope: Rotary::All(rope(10_000.0, 4096)), ..LLAMA },
    Family { model_type: "aria_text", ..LLAMA },
    Family {
        model_type: "bitnet", sizes: [30, 2560, 20], heads: Heads::Grouped(Some(5), None),
        rope: Rotary::All(rope(500_000.0, 2048)),
        adjust: |fields, _, cfg| {
            let eps = fields.get_or("rms_norm_eps", 1e-5)?;
            Ok(cfg.with_context_norm(ContextNorm { kind: QkNormKind::Rms, eps }))
        },
        ..LLAMA
    },
    Family {
        model_type: "chameleon", heads: Heads::Grouped(Some(32), None), head_dim_follows: true,
        rope: Rotary::All(rope(10_000.0, 4096)),
        qk_norm: Some(layer_norm(None, QkNormKind::Layer, QkNormScope::PerHeadWeights)), ..LLAMA
    },
    COHERE,
    COHERE2,
    Family {
        model_type: "cohere2_moe", heads: Heads::Grouped(None, Some(128)), head_dim_follows: false, ..COHERE2
    },
    Family {
        model_type: "csm_depth_decoder_model", sizes: [4, 1024, 8], heads: Heads::Grouped(Some(2), None),
        modules: &[at(&["model.", "depth_decoder.model.", ""], "layers.{}.self_attn", WeightLayout::Canonical)],
        rope: Rotary::All(rope(500_000.0, 33)), ..LLAMA
    },
    Family {
        model_type: "cwm", sizes: [64, 6144, 48], heads: Heads::Grouped(Some(8), Some(128)),
        rope: Rotary::All(rope(1e6, 131_072).scaled_unless_given(|_| Ok(llama3(16.0, [1.0, 4.0], 8192)))),
        window: |fields, layer| sliding(fields, layer, !layer.is_multiple_of(4), Some(8192)), ..DECODER
    },
    Family {
        model_type: "dbrx", names: ["n_layers", "d_model", "n_heads"], sizes: [24, 2048, 16], head_dim_follows: true,
        modules: &[at(&["transformer.", ""], "blocks.{}.norm_attn_norm.attn", WQKV)],
        heads: Heads::Computed(|fields, _| fields.section("attn_config")?.get_or("kv_n_heads", 1)),
        rope: Rotary::All(rope(10_000.0, 2048)),
        adjust: |fields, _, cfg| {
            let own = fields.section("attn_config")?;
            let cfg = cfg.with_dropout(own.optional("attn_pdrop")?.unwrap_or(0.0));
            // As published, the base stands there.
            let cfg = match (fields.object("rope_parameters")?, own.optional("rope_theta")?) {
                (None, Some(base)) => cfg.with_rope(RopeConfig::new(base)),
                _ => cfg,
            };
            clipped(&own, cfg)
        },
        ..DECODER
    },
    Family {
        model_type: "dots1", sizes: [62, 4608, 32], qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)),
        window: |fields, layer| {
            let given = fields.nullable("sliding_window", Some(4096))?.is_some();
            sliding(fields, layer, given && layer >= fields.get_or("max_window_layers", 62)?, Some(4096))
        },
        ..LLAMA
    },
    Family {
        model_type: "emu3_text_model", heads: Heads::Grouped(Some(8), None), bias: Bias::None,
        modules: &[at(
            &["model.", "text_model.model.", "model.text_model.", ""], "layers.{}.self_attn", WeightLayout::Canonical,
        )],
        dropout: ("attention_dropout", 0.1), rope: Rotary::All(rope(1e6, 9216)), ..LLAMA
    },
    Family {
        model_type: "ernie4_5", sizes: [18, 1024, 16], heads: Heads::Grouped(Some(2), Some(128)),
        bias: Bias::AllIf("use_bias", false), rope: Rotary::All(ERNIE), ..DECODER
    },
    Family {
        model_type: "ernie4_5_moe", sizes: [28, 2560, 20], heads: Heads::Grouped(Some(4), None),
        bias: Bias::AllIf("use_bias", false), rope: Rotary::All(ERNIE), ..DECODER
    },
    EXAONE4,
    Family { model_type: "exaone_moe", ..EXAONE4 },
    // Beside a state space model in each layer.
    Family {
        model_type: "falcon_h1", heads: Heads::Grouped(Some(8), None), rope: Rotary::All(rope(10_000.0, 8192)),
        adjust: |fields, _, cfg| {
            let scale = fields.optional("key_multiplier")?.unwrap_or(1.0) / (cfg.head_dim() as f64).sqrt();
            Ok(cfg.with_scale(scale))
        },
        ..LLAMA
    },
    Family {
        model_type: "flex_olmo", qk_norm: Some(rms_norm(QkNormScope::Projection, 1e-6)),
        rope: Rotary::All(rope(500_000.0, 4096)), ..LLAMA
    },
    GLM,
    Family { model_type: "glm4", ..GLM },
    Family {
        model_type: "glm4_moe", sizes: [46, 4096, 96], heads: Heads::Grouped(Some(8), None),
        bias: Bias::QkvIf("attention_bias", false),
        rope: Rotary::All(rope(10_000.0, 131_072).partial("partial_rotary_factor", 0.5)),
        qk_norm: Some(Norm { flag: Some("use_qk_norm"), ..rms_norm(QkNormScope::PerHead, 1e-5) }), ..DECODER
    },
    Family {
        model_type: "gpt_oss", sizes: [36, 2880, 64], heads: Heads::Grouped(Some(8), Some(64)),
        bias: Bias::AllIf("attention_bias", true),
        rope: Rotary::All(rope(150_000.0, 131_072).scaled_unless_given(gpt_oss_scaling)),
        window: |fields, layer| sliding(fields, layer, layer.is_multiple_of(2), Some(128)),
        adjust: |_, _, cfg| Ok(cfg.with_sinks(true)), ..DECODER
    },
    GRANITE,
    Family { model_type: "granite4_vision_text", ..GRANITE },
    Family {
        model_type: "granite_docling_text", sizes: [28, 1024, 16], heads: Heads::Grouped(Some(4), None),
        rope: Rotary::All(rope(10_000.0, 32_768)), scale: Some(("attention_multiplier", 0.015625, 1.0)), ..GRANITE
    },
    Family {
        model_type: "granite_swa", sizes: [24, 2560, 20], heads: Heads::Grouped(Some(4), None),
        rope: Rotary::All(rope(10_000.0, 8192)), ..GRANITE_SWA
    },
    Family { model_type: "granitemoe", ..GRANITE },
    GRANITE_SWA,
    Family { model_type: "granitemoeshared", ..GRANITE },
    Family {
        model_type: "helium", sizes: [24, 2560, 20], heads: Heads::Grouped(Some(20), Some(128)),
        bias: Bias::QkvIf("attention_bias", false), rope: Rotary::All(rope(100_000.0, 4096).interleaved()), ..DECODER
    },
    Family {
        model_type: "higgs_audio_v2", sizes: [28, 3072, 24], heads: Heads::Grouped(Some(8), Some(128)),
        rope: Rotary::All(rope(500_000.0, 2048).scaled_unless_given(|_| Ok(llama3(32.0, [0.125, 0.5], 1024)))), ..LLAMA
    },
    HUNYUAN,
    Family { model_type: "hunyuan_v1_moe", ..HUNYUAN },
    Family {
        model_type: "hy_v3", sizes: [80, 4096, 64], heads: Heads::Grouped(Some(8), Some(128)),
        rope: Rotary::All(rope(11_158_840.0, 131_072)), qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-5)), ..LLAMA
    },
    Family {
        model_type: "hyperclovax",
        adjust: |fields, _, cfg| {
            let usual = (cfg.head_dim() as f64).powf(-0.5);
            Ok(cfg.with_scale(fields.optional("attention_multiplier")?.unwrap_or(usual)))
        },
        ..LLAMA
    },
    Family {
        model_type: "jais2", sizes: [32, 3328, 26], heads: Heads::Grouped(None, Some(128)),
        bias: Bias::AllIf("attention_bias", true), rope: Rotary::All(rope(10_000.0, 8192)), ..DECODER
    },
    Family {
        model_type: "kolibri1", sizes: [50, 2560, 48], heads: Heads::Grouped(Some(4), Some(128)),
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)),
        rope: Rotary::If(|fields, layer| {
            Ok(fields.nullable("sliding_window", Some(513))?.is_none() || kolibri_window(fields, layer)?.is_some())
        }, rope(10_000.0, 2048)),
        window: kolibri_window, ..EXAONE4
    },
    LFM2,
    Family { model_type: "lfm2_moe", sizes: [32, 2048, 32], ..LFM2 },
    LLAMA,
    Family {
        model_type: "mellum", sizes: [28, 2304, 32], heads: Heads::Grouped(Some(4), Some(128)),
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 131_072), full: rope(500_000.0, 131_072), scales_windowed: false,
        },
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)),
        window: |fields, layer| sliding(fields, layer, false, Some(1024)), ..LLAMA
    },
    Family {
        model_type: "minimax", heads: Heads::Grouped(Some(8), None), rope: Rotary::All(rope(1e6, 131_072)),
        window: |fields, layer| {
            if fields.get("layer_types").is_none() && !layer.is_multiple_of(2) {
                return fields.fail(format!("layer {layer} has linear_attention, expected softmax attention"));
            }
            sliding(fields, layer, false, None)?;
            fields.nullable("sliding_window", None)
        },
        ..DECODER
    },
    Family {
        model_type: "minimax_m2", sizes: [62, 3072, 48], heads: Heads::Grouped(Some(8), Some(128)),
        rope: Rotary::All(rope(5e6, 196_608).partial("partial_rotary_factor", 1.0)),
        qk_norm: Some(rms_norm(QkNormScope::Projection, 1e-6)),
        adjust: |fields, _, cfg| Ok(match (cfg.rope(), fields.optional("rotary_dim")?) {
            (Some(rope), Some(rotary_dim)) if rope.rotary_dim(cfg.head_dim()) == cfg.head_dim() => {
                let rope = rope.clone().with_rotary_dim(rotary_dim);
                cfg.with_rope(rope)
            }
            _ => cfg,
        }),
        ..DECODER
    },
    Family {
        model_type: "ministral",
        window: |fields, layer| {
            sliding(fields, layer, fields.nullable("sliding_window", Some(4096))?.is_some(), Some(4096))
        },
        ..MISTRAL
    },
    MISTRAL,
    Family {
        model_type: "mixtral", rope: Rotary::All(rope(1_000_000.0, 131_072)),
        window: |fields, _| fields.nullable("sliding_window", None), ..MISTRAL
    },
    Family {
        model_type: "mllama_text_model", sizes: [40, 4096, 32], heads: Heads::Grouped(Some(8), None),
        rope: Rotary::All(rope(500_000.0, 131_072)), ..DECODER
    },
    Family {
        model_type: "modernbert-decoder", sizes: [22, 768, 12], heads: Heads::Equal,
        modules: &[at(MODEL, "layers.{}.attn", WeightLayout::ModernBertDecoder)],
        rope: MODERNBERT_ROPE,
        window: modernbert_side, ..LLAMA
    },
    Family {
        model_type: "molmo2_text", sizes: [36, 4096, 32], heads: Heads::Grouped(Some(8), Some(128)),
        aliases: &[("qkv_bias", "attention_bias"), ("layer_norm_eps", "rms_norm_eps")],
        modules: &[
            at(&["model.transformer.", "transformer."], "blocks.{}.self_attn", ATT_PROJ),
            at(MODEL, "layers.{}.self_attn", ATT_PROJ),
        ],
        bias: Bias::QkvIf("attention_bias", false), rope: Rotary::All(rope(10_000.0, 36_864)),
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)), only: &[("qk_norm_type", "\"qwen3\"")],
        adjust: |fields, layer, cfg| {
            let listed = fields.optional::<Vec<usize>>("rope_scaling_layers")?;
            let is_scaled = cfg.rope().is_some_and(|rope| *rope.scaling() != RopeScaling::None);
            match listed.is_some_and(|listed| is_scaled && !listed.contains(&layer)) {
                true => fields.fail("rope_scaling_layers leaves out layers, which is not supported"),
                false => Ok(cfg),
            }
        },
        ..DECODER
    },
    Family {
        model_type: "moshi", modules: &[at(
            &["model.", "decoder.model.", ""], "layers.{}.self_attn", WeightLayout::Moshi,
        )],
        rope: Rotary::All(rope(10_000.0, 3000)),
        // transformers 5 reads it for caches and forgets it in the mask of a prompt.
        window: |fields, _| fields.nullable("sliding_window", Some(3000)), ..DECODER
    },
    Family {
        model_type: "nemotron", sizes: [32, 6144, 48], bias: Bias::AllIf("attention_bias", false),
        rope: Rotary::All(rope(10_000.0, 4096).partial("partial_rotary_factor", 0.5)), ..DECODER
    },
    Family { model_type: "olmo", adjust: |fields, _, cfg| clipped(fields, cfg), ..LLAMA },
    OLMO2,
    Family {
        model_type: "olmo3",
        // transformers before 5.13 writes one object for layers of all kinds.
        rope: Rotary::ByKind {
            windowed: rope(500_000.0, 2048).or_one_for_all(), full: rope(500_000.0, 2048).or_one_for_all(),
            scales_windowed: false,
        },
        window: |fields, layer| sliding(fields, layer, !(layer + 1).is_multiple_of(4), Some(4096)), ..OLMO2
    },
    // Most of its layers are recurrences.
    Family {
        model_type: "olmo_hybrid", sizes: [32, 3840, 30],
        qk_norm: Some(rms_norm(QkNormScope::Projection, 1e-6)),
        rope: Rotary::All(rope(10_000.0, 65_536)),
        window: |fields, layer| softmax_each(fields, layer, 4), ..OLMO2
    },
    Family {
        model_type: "olmoe", sizes: [16, 2048, 16], rope: Rotary::All(rope(10_000.0, 4096)),
        adjust: |fields, _, cfg| clipped(fields, cfg), ..OLMO2
    },
    Family {
        model_type: "phi3", sizes: [32, 3072, 32], modules: &[at(MODEL, "layers.{}.self_attn", QKV_PROJ)],
        rope: Rotary::All(rope(10_000.0, 4096).partial("partial_rotary_factor", 1.0).long_rope_only()),
        window: |fields, _| fields.nullable("sliding_window", None), ..DECODER
    },
    Family {
        model_type: "phi4_multimodal", sizes: [32, 3072, 32], heads: Heads::Grouped(Some(8), None),
        modules: &[at(MODEL, "layers.{}.self_attn", QKV_PROJ)],
        rope: Rotary::All(rope(10_000.0, 4096).partial("partial_rotary_factor", 1.0).long_rope_only()),
        window: |fields, _| fields.nullable("sliding_window", None), ..DECODER
    },
    Family {
        model_type: "phimoe", heads: Heads::Grouped(Some(8), None), rope: Rotary::All(rope(1e6, 131_072)),
        window: |fields, _| fields.nullable("sliding_window", None),
        adjust: |fields, _, cfg| match cfg.rope().is_some_and(|rope| *rope.scaling() != RopeScaling::None) {
            true => fields.fail("a scaling of rotary positions of its own kind is not supported"),
            false => Ok(cfg),
        },
        ..LLAMA
    },
    QWEN2,
    Family {
        model_type: "qwen2_moe", sizes: [24, 2048, 16], heads: Heads::Grouped(Some(16), None),
        bias: Bias::QkvIf("qkv_bias", true), ..QWEN2
    },
    QWEN3,
    Family {
        model_type: "qwen3_moe", sizes: [24, 2048, 32], heads: Heads::Grouped(Some(4), None),
        window: |fields, _| match fields.flag("use_sliding_window", false)? {
            true => fields.nullable("sliding_window", Some(4096)),
            false => Ok(None),
        },
        ..QWEN3
    },
    Family {
        model_type: "qwen3_omni_moe_talker_code_predictor", sizes: [5, 1024, 16],
        modules: &[at(
            &["model.", "talker.code_predictor.model.", "code_predictor.model.", ""], "layers.{}.self_attn",
            WeightLayout::Canonical,
        )],
        heads: Heads::Grouped(Some(8), Some(128)), ..QWEN3
    },
    Family {
        model_type: "seed_oss", sizes: [64, 4096, 80], heads: Heads::Grouped(Some(8), Some(128)),
        bias: Bias::QkvIf("attention_bias", true), dropout: ("attention_dropout", 0.1),
        rope: Rotary::All(rope(10_000.0, 524_288)),
        adjust: |fields, _, cfg| Ok(cfg.with_out_bias(fields.flag("attention_out_bias", false)?)), ..DECODER
    },
    Family {
        model_type: "smollm3", sizes: [36, 2048, 16], heads: Heads::Grouped(Some(4), None),
        rope: Rotary::If(smollm3_rotates, rope(2_000_000.0, 32_768)),
        window: |fields, layer| {
            let windows = fields.flag("use_sliding_window", false)? && fields.get("sliding_window").is_some();
            sliding(fields, layer, windows && !smollm3_rotates(fields, layer)?, None)
        },
        ..LLAMA
    },
    Family {
        model_type: "solar_open", sizes: [48, 4096, 64], heads: Heads::Grouped(Some(8), Some(128)),
        bias: Bias::QkvIf("attention_bias", false), rope: Rotary::All(rope(1e6, 131_072)), ..DECODER
    },
    Family {
        model_type: "stablelm", sizes: [32, 2560, 32], heads: Heads::Grouped(Some(32), None), head_dim_follows: true,
        bias: Bias::QkvIf("use_qkv_bias", false),
        rope: Rotary::All(rope(10_000.0, 4096).partial("partial_rotary_factor", 0.25)),
        qk_norm: Some(layer_norm(Some("qk_layernorm"), QkNormKind::LayerNoBias, QkNormScope::PerHeadWeights)),
        ..DECODER
    },
    Family {
        model_type: "starcoder2", sizes: [30, 3072, 24], heads: Heads::Grouped(Some(2), None),
        bias: Bias::AllIf("use_bias", true), rope: Rotary::All(rope(10_000.0, 4096)),
        window: |fields, _| fields.nullable("sliding_window", None), ..DECODER
    },
];
