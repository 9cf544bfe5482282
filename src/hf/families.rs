//! The table of model families. One that needs nothing new is one row: its fields and defaults are those of its
//! configuration class in transformers, and a column that a row leaves out is as in the row it extends.

use super::family::{Bias, Family, Heads, Mask, ModuleNames, Norm, Rotary, at};
use super::fields::Aliases;
use super::rope::rope;
use super::rules::{
    all_but_each, deepseek, falcon_key_heads, gpt_oss_scaling, modernbert_side, mpt, qwen_window, sliding,
    smollm3_rotates,
};
use crate::weights::{PackedNaming, QkvOrder};
use crate::{AlibiConfig, QkNormKind, QkNormScope, RelativeBiasConfig, RopeConfig, RopeStyle, WeightLayout};

const LAYERS: &str = "num_hidden_layers";
pub(super) const HIDDEN: &str = "hidden_size";
pub(super) const HEADS: &str = "num_attention_heads";
/// The usual names of the number of layers, of `embed_dim` and of `num_heads`.
pub(super) const SIZE_NAMES: [&str; 3] = [LAYERS, HIDDEN, HEADS];

const MODEL: &[&str] = &["model.", ""];
const TRANSFORMER: &[&str] = &["transformer.", ""];
/// As transformers saves Gemma 3, as it was published, and without a head.
const BELOW_IMAGES: &[&str] = &["model.language_model.", "language_model.model.", "language_model."];
const NOMIC: &[&str] = &["nomic_bert.", "bert.", ""];
const QUERY_KEY_VALUE: WeightLayout = WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead);
const C_ATTN: WeightLayout = WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead);
const QKV_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProj, QkvOrder::ByPart);
const WQKV: WeightLayout = WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart);
const WQKV_WO: WeightLayout = WeightLayout::Packed(PackedNaming::WqkvWo, QkvOrder::ByPart);

/// Grouped heads without positions or biases, causal: what most decoders begin with.
#[rustfmt::skip]
const DECODER: Family = Family {
    model_type: "", names: SIZE_NAMES, sizes: [32, 4096, 32], aliases: &[], section: None,
    modules: &[at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)],
    heads: Heads::Grouped(None, None), head_dim_follows: false, dropout: ("attention_dropout", 0.0), bias: Bias::None,
    rope: Rotary::None, qk_norm: None, window: |_, _| Ok(None), mask: Mask::Causal, scale: None, only: &[],
    adjust: |_, _, cfg| Ok(cfg), latent: None,
};
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
const GEMMA: Family = Family {
    model_type: "gemma", sizes: [28, 3072, 16], heads: Heads::Grouped(Some(16), Some(256)),
    rope: Rotary::All(rope(10_000.0, 8192)),
    // What it does depends on the implementation of attention that transformers uses: some keep the causal mask.
    only: &[("use_bidirectional_attention", "false")], ..LLAMA
};
#[rustfmt::skip]
const GEMMA2: Family = Family {
    model_type: "gemma2", sizes: [26, 2304, 8], heads: Heads::Grouped(Some(4), Some(256)),
    window: |fields, layer| sliding(fields, layer, layer.is_multiple_of(2), Some(4096)),
    scale: Some(("query_pre_attn_scalar", 256.0, -0.5)),
    adjust: |fields, _, cfg| {
        let softcap = fields.nullable("attn_logit_softcapping", Some(50.0))?;
        Ok(softcap.map_or(cfg.clone(), |softcap| cfg.with_softcap(softcap)))
    },
    ..GEMMA
};
#[rustfmt::skip]
const GEMMA3_TEXT: Family = Family {
    model_type: "gemma3_text",
    rope: Rotary::ByKind {
        windowed: rope(10_000.0, 131_072).theta_from("rope_local_base_freq"), full: rope(1e6, 131_072),
        scales_windowed: false,
    },
    qk_norm: Some(Norm { kind: QkNormKind::RmsPlusOne, ..rms_norm(QkNormScope::PerHead, 1e-6) }),
    window: |fields, layer| all_but_each(fields, layer, 6), mask: Mask::CausalOrBidirectional,
    only: &[("model_type", "\"gemma3_text\""), ("attn_logit_softcapping", "null")],
    adjust: |_, _, cfg| Ok(cfg), ..GEMMA2
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
/// GPT-2's names of its sizes, with those of newer families as aliases.
#[rustfmt::skip]
const GPT: Family = Family {
    names: ["n_layer", "n_embd", "n_head"], sizes: [12, 768, 12], heads: Heads::Equal, dropout: ("attn_pdrop", 0.1),
    bias: Bias::All, ..DECODER
};
#[rustfmt::skip]
const BERT: Family = Family {
    model_type: "bert", sizes: [12, 768, 12], heads: Heads::Equal, bias: Bias::All,
    modules: &[at(&["bert.", ""], "encoder.layer.{}.attention", WeightLayout::Bert)],
    dropout: ("attention_probs_dropout_prob", 0.1), mask: Mask::CausalIf("is_decoder"),
    // Relative positions between queries and keys, which older versions of transformers had.
    only: &[("position_embedding_type", "\"absolute\"")], ..DECODER
};
#[rustfmt::skip]
const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    // Latent attention names its parameters itself, and those of queries differ between checkpoints.
    modules: &[ModuleNames {
        parameter: Some("kv_a_proj_with_mqa.weight"), ..at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)
    }],
    latent: Some(|fields| {
        fields.only("rope_interleave", true)?;
        deepseek(fields, [4096, 32], rope(10_000.0, 2048).interleaved())
    }),
    ..DECODER
};
/// The names of the published checkpoints, which are older than the family in transformers.
#[rustfmt::skip]
const NOMIC_ALIASES: Aliases = &[
    ("n_layer", LAYERS), ("n_embd", HIDDEN), ("n_head", HEADS), ("n_positions", "max_position_embeddings"),
    ("attn_pdrop", "attention_probs_dropout_prob"), ("rotary_emb_base", "rope_theta"),
];

/// In alphabetical order.
#[rustfmt::skip]
pub(super) const FAMILIES: &[Family] = &[
    BERT,
    Family {
        model_type: "bloom", names: ["n_layer", HIDDEN, "n_head"], sizes: [2, 64, 8], aliases: &[("n_embed", HIDDEN)],
        modules: &[at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE)], heads: Heads::Equal, bias: Bias::All,
        adjust: |_, _, cfg| Ok(cfg.with_alibi(AlibiConfig::Standard)), ..DECODER
    },
    COHERE,
    Family {
        model_type: "cohere2", head_dim_follows: true, rope: Rotary::Windowed(rope(10_000.0, 8192).interleaved()),
        qk_norm: None, window: |fields, layer| all_but_each(fields, layer, 4), ..COHERE
    },
    DEEPSEEK_V2,
    Family {
        model_type: "deepseek_v3", sizes: [61, 7168, 128],
        latent: Some(|fields| {
            let half = rope(10_000.0, 4096);
            deepseek(fields, [7168, 128], if fields.flag("rope_interleave", true)? { half.interleaved() } else { half })
        }),
        ..DEEPSEEK_V2
    },
    Family {
        model_type: "distilbert", names: ["n_layers", "dim", "n_heads"], sizes: [6, 768, 12],
        modules: &[at(&["distilbert.", ""], "transformer.layer.{}.attention", WeightLayout::DistilBert)],
        dropout: ("attention_dropout", 0.1), mask: Mask::Encoder, only: &[], ..BERT
    },
    Family {
        model_type: "falcon", sizes: [32, 4544, 71], aliases: &[("n_embed", HIDDEN)],
        modules: &[at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE)],
        heads: Heads::Computed(falcon_key_heads), head_dim_follows: true, bias: Bias::AllIf("bias", false),
        rope: Rotary::If(|fields, _| Ok(!fields.flag("alibi", false)?), rope(10_000.0, 2048)),
        adjust: |fields, _, cfg| {
            Ok(if fields.flag("alibi", false)? { cfg.with_alibi(AlibiConfig::Falcon) } else { cfg })
        },
        ..DECODER
    },
    GEMMA,
    GEMMA2,
    Family {
        model_type: "gemma3", section: Some("text_config"),
        modules: &[at(BELOW_IMAGES, "layers.{}.self_attn", WeightLayout::Canonical)], ..GEMMA3_TEXT
    },
    GEMMA3_TEXT,
    GLM,
    Family { model_type: "glm4", ..GLM },
    Family {
        model_type: "gpt2", modules: &[at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d)],
        adjust: |fields, layer, cfg| {
            let width = if fields.flag("scale_attn_weights", true)? { (cfg.head_dim() as f64).sqrt() } else { 1.0 };
            let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
            let depth = if by_layer { layer as f64 + 1.0 } else { 1.0 };
            Ok(if width == 1.0 || by_layer { cfg.with_scale(1.0 / (width * depth)) } else { cfg })
        },
        ..GPT
    },
    Family {
        model_type: "gpt_bigcode", modules: &[at(TRANSFORMER, "h.{}.attn", C_ATTN)],
        heads: Heads::Computed(|fields, num_heads| {
            let key_heads = if fields.flag("multi_query", true)? { 1 } else { num_heads };
            fields.agrees("num_key_value_heads", key_heads)?;
            Ok(key_heads)
        }),
        adjust: |fields, _, cfg| Ok(if fields.flag("scale_attn_weights", true)? { cfg } else { cfg.with_scale(1.0) }),
        ..GPT
    },
    Family {
        model_type: "gpt_neox", sizes: [44, 6144, 64], heads: Heads::Equal,
        modules: &[at(&["gpt_neox.", ""], "layers.{}.attention", QUERY_KEY_VALUE)],
        bias: Bias::AllIf("attention_bias", true),
        rope: Rotary::All(rope(10_000.0, 2048).theta_from("rotary_emb_base").partial("rotary_pct", 0.25)), ..DECODER
    },
    Family {
        model_type: "gpt_oss", sizes: [36, 2880, 64], heads: Heads::Grouped(Some(8), Some(64)),
        bias: Bias::AllIf("attention_bias", true),
        rope: Rotary::All(rope(150_000.0, 131_072).scaled_unless_given(gpt_oss_scaling)),
        window: |fields, layer| sliding(fields, layer, layer.is_multiple_of(2), Some(128)),
        adjust: |_, _, cfg| Ok(cfg.with_sinks(true)), ..DECODER
    },
    Family {
        model_type: "gptj", sizes: [28, 4096, 16], modules: &[at(TRANSFORMER, "h.{}.attn", WeightLayout::Opt)],
        bias: Bias::None, dropout: ("attn_pdrop", 0.0),
        adjust: |fields, _, cfg| {
            let rope = RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved);
            Ok(cfg.with_rope(rope.with_rotary_dim(fields.get_or("rotary_dim", 64)?)))
        },
        ..GPT
    },
    Family { model_type: "granite", scale: Some(("attention_multiplier", 1.0, 1.0)), ..LLAMA },
    LLAMA,
    MISTRAL,
    Family {
        model_type: "mixtral", rope: Rotary::All(rope(1_000_000.0, 131_072)),
        window: |fields, _| fields.nullable("sliding_window", None), ..MISTRAL
    },
    Family {
        model_type: "modernbert", sizes: [22, 768, 12], modules: &[at(MODEL, "layers.{}.attn", WQKV_WO)],
        bias: Bias::AllIf("attention_bias", false), dropout: ("attention_dropout", 0.0),
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 8192).theta_from("local_rope_theta"),
            full: rope(160_000.0, 8192).theta_from("global_rope_theta"),
            scales_windowed: true,
        },
        window: modernbert_side, mask: Mask::Encoder, only: &[], ..BERT
    },
    Family {
        model_type: "mpt", names: ["n_layers", "d_model", "n_heads"], sizes: [24, 2048, 16],
        modules: &[at(TRANSFORMER, "blocks.{}.attn", WQKV)],
        heads: Heads::Equal, only: &[("no_bias", "true")],
        adjust: |fields, _, cfg| mpt(&fields.section("attn_config")?, cfg), ..DECODER
    },
    Family {
        model_type: "nomic_bert", aliases: NOMIC_ALIASES,
        // As published, and by the names of transformers' own module.
        modules: &[
            at(NOMIC, "encoder.layers.{}.attn", WQKV), at(NOMIC, "layers.{}.self_attn", WeightLayout::Canonical),
        ],
        heads: Heads::Grouped(None, None), bias: Bias::None, dropout: ("attention_probs_dropout_prob", 0.0),
        rope: Rotary::All(rope(1000.0, 2048)), mask: Mask::Encoder,
        only: &[
            ("causal", "false"), ("qkv_proj_bias", "false"),
            ("rotary_emb_interleaved", "false"), ("rotary_emb_fraction", "1"),
            ("rotary_emb_scale_base", "null"), ("rotary_scaling_factor", "null"),
        ],
        adjust: |fields, _, cfg| fields.agrees("num_key_value_heads", cfg.num_heads()).map(|()| cfg), ..BERT
    },
    Family { model_type: "olmo2", qk_norm: Some(rms_norm(QkNormScope::Projection, 1e-5)), ..LLAMA },
    Family {
        model_type: "opt", sizes: [12, 768, 12], heads: Heads::Equal,
        modules: &[at(MODEL, "decoder.layers.{}.self_attn", WeightLayout::Opt)],
        bias: Bias::AllIf("enable_bias", true), ..DECODER
    },
    Family {
        model_type: "phi", sizes: [24, 2048, 32], bias: Bias::All,
        modules: &[at(MODEL, "layers.{}.self_attn", WeightLayout::Phi)],
        rope: Rotary::All(rope(10_000.0, 2048).partial("partial_rotary_factor", 0.5)),
        qk_norm: Some(layer_norm(Some("qk_layernorm"), QkNormKind::Layer, QkNormScope::PerHead)),
        ..DECODER
    },
    Family {
        model_type: "phi3", sizes: [32, 3072, 32], modules: &[at(MODEL, "layers.{}.self_attn", QKV_PROJ)],
        rope: Rotary::All(rope(10_000.0, 4096).partial("partial_rotary_factor", 1.0).long_rope_only()),
        window: |fields, _| fields.nullable("sliding_window", None), ..DECODER
    },
    QWEN2,
    Family {
        model_type: "qwen3", heads: Heads::Grouped(Some(32), Some(128)), bias: Bias::AllIf("attention_bias", false),
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)), ..QWEN2
    },
    Family {
        model_type: "roberta",
        modules: &[at(&["roberta.", ""], "encoder.layer.{}.attention", WeightLayout::Bert)], ..BERT
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
    Family {
        model_type: "t5", names: ["num_layers", "d_model", "num_heads"], sizes: [6, 512, 8],
        aliases: &[("head_dim", "d_kv")],
        // With its decoder or by itself, and below a classifier.
        modules: &[at(&["", "transformer."], "encoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)],
        heads: Heads::Computed(|fields, num_heads| {
            fields.agrees("num_key_value_heads", num_heads)?;
            Ok(num_heads)
        }),
        dropout: ("dropout_rate", 0.1), mask: Mask::Encoder, only: &[("is_decoder", "false")],
        adjust: |fields, _, cfg| {
            let buckets = RelativeBiasConfig::new(true)
                .with_num_buckets(fields.get_or("relative_attention_num_buckets", 32)?)
                .with_max_distance(fields.get_or("relative_attention_max_distance", 128)?);
            Ok(cfg.with_head_dim(fields.get_or("d_kv", 64)?).with_scale(1.0).with_relative_bias(buckets))
        },
        ..DECODER
    },
];

const fn rms_norm(scope: QkNormScope, eps: f64) -> Norm {
    Norm { flag: None, kind: QkNormKind::Rms, scope, eps: ("rms_norm_eps", eps) }
}

const fn layer_norm(flag: Option<&'static str>, kind: QkNormKind, scope: QkNormScope) -> Norm {
    Norm { flag, kind, scope, eps: ("layer_norm_eps", 1e-5) }
}
