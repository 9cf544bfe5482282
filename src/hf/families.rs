//! The table of model families. One that needs nothing new is one row: its fields and defaults are those of its
//! configuration class in transformers, and a column that a row leaves out is as in the row it extends.

use candle_core::Result;

use super::family::{Bias, Family, Heads, Mask, Norm, Only, Rotary};
use super::fields::{Aliases, Fields};
use super::names;
use super::rope::{Rope, rope};
use crate::{
    AlibiConfig, MultiHeadAttentionConfig, MultiHeadLatentAttentionConfig, QkNormKind, QkNormScope, RelativeBiasConfig,
    RopeConfig, RopeScaling, RopeStyle,
};

const LAYERS: &str = "num_hidden_layers";
const HIDDEN: &str = "hidden_size";
const HEADS: &str = "num_attention_heads";
/// The usual names of the number of layers, of `embed_dim` and of `num_heads`.
pub(super) const SIZE_NAMES: [&str; 3] = [LAYERS, HIDDEN, HEADS];

/// Grouped heads without positions or biases, causal: what most decoders begin with.
#[rustfmt::skip]
const DECODER: Family = Family {
    model_type: "", names: SIZE_NAMES, sizes: [32, 4096, 32], aliases: &[], section: None, modules: names::LLAMA,
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
    window: |fields, _| fields.size_or_null("sliding_window", Some(4096)), ..DECODER
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
    only: &[("use_bidirectional_attention", Only::Flag(false))], ..LLAMA
};
#[rustfmt::skip]
const GEMMA2: Family = Family {
    model_type: "gemma2", sizes: [26, 2304, 8], heads: Heads::Grouped(Some(4), Some(256)),
    window: |fields, layer| sliding(fields, layer, layer.is_multiple_of(2), Some(4096)),
    scale: Some(("query_pre_attn_scalar", 256.0, -0.5)),
    adjust: |fields, _, cfg| {
        let softcap = fields.number_or_null("attn_logit_softcapping", Some(50.0))?;
        Ok(softcap.map_or(cfg.clone(), |softcap| cfg.with_softcap(softcap)))
    },
    ..GEMMA
};
#[rustfmt::skip]
const GEMMA3_TEXT: Family = Family {
    model_type: "gemma3_text",
    rope: Rotary::ByKind {
        windowed: rope(10_000.0, 131_072).theta_from("rope_local_base_freq"), full: rope(1e6, 131_072), scales_windowed: false,
    },
    qk_norm: Some(Norm { kind: QkNormKind::RmsPlusOne, ..rms_norm(QkNormScope::PerHead, 1e-6) }),
    window: |fields, layer| all_but_each(fields, layer, 6), mask: Mask::CausalOrBidirectional,
    only: &[("model_type", Only::Text("gemma3_text")), ("attn_logit_softcapping", Only::Null)],
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
    model_type: "bert", sizes: [12, 768, 12], modules: names::BERT, heads: Heads::Equal, bias: Bias::All,
    dropout: ("attention_probs_dropout_prob", 0.1), mask: Mask::CausalIf("is_decoder"),
    // Relative positions between queries and keys, which older versions of transformers had.
    only: &[("position_embedding_type", Only::Text("absolute"))], ..DECODER
};
#[rustfmt::skip]
const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2", modules: names::DEEPSEEK,
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
        modules: names::FALCON, heads: Heads::Equal, bias: Bias::All,
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
        modules: names::DISTILBERT, dropout: ("attention_dropout", 0.1), mask: Mask::Encoder, only: &[], ..BERT
    },
    Family {
        model_type: "falcon", sizes: [32, 4544, 71], aliases: &[("n_embed", HIDDEN)], modules: names::FALCON,
        heads: Heads::Computed(falcon_key_heads), head_dim_follows: true, bias: Bias::AllIf("bias", false),
        rope: Rotary::If(|fields, _| Ok(!fields.flag("alibi", false)?), rope(10_000.0, 2048)),
        adjust: |fields, _, cfg| {
            Ok(if fields.flag("alibi", false)? { cfg.with_alibi(AlibiConfig::Falcon) } else { cfg })
        },
        ..DECODER
    },
    GEMMA,
    GEMMA2,
    Family { model_type: "gemma3", section: Some("text_config"), modules: names::GEMMA3, ..GEMMA3_TEXT },
    GEMMA3_TEXT,
    GLM,
    Family { model_type: "glm4", ..GLM },
    Family {
        model_type: "gpt2", modules: names::GPT2,
        adjust: |fields, layer, cfg| {
            let width = if fields.flag("scale_attn_weights", true)? { (cfg.head_dim() as f64).sqrt() } else { 1.0 };
            let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
            let depth = if by_layer { layer as f64 + 1.0 } else { 1.0 };
            Ok(if width == 1.0 || by_layer { cfg.with_scale(1.0 / (width * depth)) } else { cfg })
        },
        ..GPT
    },
    Family {
        model_type: "gpt_bigcode", modules: names::GPT_BIGCODE,
        heads: Heads::Computed(|fields, num_heads| {
            let key_heads = if fields.flag("multi_query", true)? { 1 } else { num_heads };
            fields.agrees("num_key_value_heads", key_heads)?;
            Ok(key_heads)
        }),
        adjust: |fields, _, cfg| Ok(if fields.flag("scale_attn_weights", true)? { cfg } else { cfg.with_scale(1.0) }),
        ..GPT
    },
    Family {
        model_type: "gpt_neox", sizes: [44, 6144, 64], modules: names::GPT_NEOX, heads: Heads::Equal,
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
        model_type: "gptj", sizes: [28, 4096, 16], modules: names::GPTJ,
        bias: Bias::None, dropout: ("attn_pdrop", 0.0),
        adjust: |fields, _, cfg| {
            let rope = RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved);
            Ok(cfg.with_rope(rope.with_rotary_dim(fields.size("rotary_dim", 64)?)))
        },
        ..GPT
    },
    Family { model_type: "granite", scale: Some(("attention_multiplier", 1.0, 1.0)), ..LLAMA },
    LLAMA,
    MISTRAL,
    Family {
        model_type: "mixtral", rope: Rotary::All(rope(1_000_000.0, 131_072)),
        window: |fields, _| fields.size_or_null("sliding_window", None), ..MISTRAL
    },
    Family {
        model_type: "modernbert", sizes: [22, 768, 12], modules: names::MODERNBERT,
        bias: Bias::AllIf("attention_bias", false), dropout: ("attention_dropout", 0.0),
        rope: Rotary::ByKind {
            windowed: rope(10_000.0, 8192).theta_from("local_rope_theta"),
            full: rope(160_000.0, 8192).theta_from("global_rope_theta"),
            scales_windowed: true,
        },
        window: modernbert_side, mask: Mask::Encoder, only: &[], ..BERT
    },
    Family {
        model_type: "mpt", names: ["n_layers", "d_model", "n_heads"], sizes: [24, 2048, 16], modules: names::MPT,
        heads: Heads::Equal, only: &[("no_bias", Only::Flag(true))],
        adjust: |fields, _, cfg| mpt(&fields.section("attn_config")?, cfg), ..DECODER
    },
    Family {
        model_type: "nomic_bert", aliases: NOMIC_ALIASES, modules: names::NOMIC_BERT,
        heads: Heads::Grouped(None, None), bias: Bias::None, dropout: ("attention_probs_dropout_prob", 0.0),
        rope: Rotary::All(rope(1000.0, 2048)), mask: Mask::Encoder,
        only: &[
            ("causal", Only::Flag(false)), ("qkv_proj_bias", Only::Flag(false)),
            ("rotary_emb_interleaved", Only::Flag(false)), ("rotary_emb_fraction", Only::Number(1)),
            ("rotary_emb_scale_base", Only::Null), ("rotary_scaling_factor", Only::Null),
        ],
        adjust: |fields, _, cfg| fields.agrees("num_key_value_heads", cfg.num_heads()).map(|()| cfg), ..BERT
    },
    Family { model_type: "olmo2", qk_norm: Some(rms_norm(QkNormScope::Projection, 1e-5)), ..LLAMA },
    Family {
        model_type: "opt", sizes: [12, 768, 12], modules: names::OPT, heads: Heads::Equal,
        bias: Bias::AllIf("enable_bias", true), ..DECODER
    },
    Family {
        model_type: "phi", sizes: [24, 2048, 32], modules: names::PHI, bias: Bias::All,
        rope: Rotary::All(rope(10_000.0, 2048).partial("partial_rotary_factor", 0.5)),
        qk_norm: Some(layer_norm(Some("qk_layernorm"), QkNormKind::Layer, QkNormScope::PerHead)),
        ..DECODER
    },
    Family {
        model_type: "phi3", sizes: [32, 3072, 32], modules: names::PHI3,
        rope: Rotary::All(rope(10_000.0, 4096).partial("partial_rotary_factor", 1.0).long_rope_only()),
        window: |fields, _| fields.size_or_null("sliding_window", None), ..DECODER
    },
    QWEN2,
    Family {
        model_type: "qwen3", heads: Heads::Grouped(Some(32), Some(128)), bias: Bias::AllIf("attention_bias", false),
        qk_norm: Some(rms_norm(QkNormScope::PerHead, 1e-6)), ..QWEN2
    },
    Family { model_type: "roberta", modules: names::ROBERTA, ..BERT },
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
        window: |fields, _| fields.size_or_null("sliding_window", None), ..DECODER
    },
    Family {
        model_type: "t5", names: ["num_layers", "d_model", "num_heads"], sizes: [6, 512, 8],
        aliases: &[("head_dim", "d_kv")], modules: names::T5,
        heads: Heads::Computed(|fields, num_heads| {
            fields.agrees("num_key_value_heads", num_heads)?;
            Ok(num_heads)
        }),
        dropout: ("dropout_rate", 0.1), mask: Mask::Encoder, only: &[("is_decoder", Only::Flag(false))],
        adjust: |fields, _, cfg| {
            let buckets = RelativeBiasConfig::new(true)
                .with_num_buckets(fields.size("relative_attention_num_buckets", 32)?)
                .with_max_distance(fields.size("relative_attention_max_distance", 128)?);
            Ok(cfg.with_head_dim(fields.size("d_kv", 64)?).with_scale(1.0).with_relative_bias(buckets))
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

/// The window of a layer that has one by `layer_types`, or else by the family's own rule.
fn sliding(fields: &Fields, layer: usize, otherwise: bool, default: Option<usize>) -> Result<Option<usize>> {
    if !is_sliding(fields, layer, otherwise)? {
        return Ok(None);
    }
    match fields.size_or_null("sliding_window", default)? {
        Some(window) => Ok(Some(window)),
        None => fields.fail("a layer has sliding_attention, but sliding_window is not given"),
    }
}

fn is_sliding(fields: &Fields, layer: usize, otherwise: bool) -> Result<bool> {
    match fields.of_layer("layer_types", layer)? {
        None => Ok(otherwise),
        Some(kind) if kind == "sliding_attention" => Ok(true),
        Some(kind) if kind == "full_attention" || kind == "attention" => Ok(false),
        Some(kind) => fields.fail(format!(
            "layer_types has {kind} for layer {layer}, expected \"full_attention\" or \"sliding_attention\""
        )),
    }
}

/// Every n-th layer has no window.
fn all_but_each(fields: &Fields, layer: usize, n: usize) -> Result<Option<usize>> {
    let n = fields.size("sliding_window_pattern", n)?;
    sliding(fields, layer, !(layer + 1).is_multiple_of(n), Some(4096))
}

/// Layers from `max_window_layers` on have a window, if windows are used at all: many configurations that give a
/// `sliding_window` turn them off.
fn qwen_window(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    let used = fields.flag("use_sliding_window", false)?;
    let given = used && fields.size_or_null("sliding_window", Some(4096))?.is_some();
    // Zero is a valid number of layers here.
    let none = fields.get("max_window_layers").is_some_and(|layers| *layers == 0);
    let full = if none { 0 } else { fields.size("max_window_layers", 28)? };
    let window = sliding(fields, layer, given && layer >= full, Some(4096))?;
    if window.is_some() && !used {
        return fields.fail(format!("layer {layer} has sliding_attention, but use_sliding_window is false"));
    }
    Ok(window)
}

/// Every so many layers see all keys, the others a band of `local_attention` of them.
fn modernbert_side(fields: &Fields, layer: usize) -> Result<Option<usize>> {
    let side = fields.size("local_attention", 128)? / 2;
    fields.agrees("sliding_window", side)?;
    let interval = fields.size("global_attn_every_n_layers", 3)?;
    Ok(is_sliding(fields, layer, !layer.is_multiple_of(interval))?.then_some(side))
}

/// Every so many layers have no positions.
fn smollm3_rotates(fields: &Fields, layer: usize) -> Result<bool> {
    let interval = fields.size("no_rope_layer_interval", 4)?;
    match fields.of_layer("no_rope_layers", layer)? {
        None => Ok(!(layer + 1).is_multiple_of(interval)),
        Some(flag) if *flag == 1 || *flag == true => Ok(true),
        Some(flag) if *flag == 0 || *flag == false => Ok(false),
        Some(flag) => fields.fail(format!("no_rope_layers has {flag} for layer {layer}, expected 0 or 1")),
    }
}

/// One key head for all query heads (`multi_query`), one for each, or one for each group (`new_decoder_architecture`).
fn falcon_key_heads(fields: &Fields, num_heads: usize) -> Result<usize> {
    let grouped = fields.flag("new_decoder_architecture", false)?;
    if !grouped && fields.flag("multi_query", true)? {
        return Ok(1);
    }
    let key_heads = fields.size_or_null("num_kv_heads", None)?.unwrap_or(num_heads);
    if !grouped && key_heads != 1 {
        fields.agrees("num_kv_heads", num_heads)?;
    }
    Ok(key_heads)
}

/// `attn_config`. Options that the model's first implementation has and transformers ignores are refused.
fn mpt(attention: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    attention.only("attn_type", "multihead_attention")?;
    attention.only("alibi", true)?;
    for name in ["prefix_lm", "qk_ln", "attn_uses_sequence_id"] {
        attention.only(name, false)?;
    }
    attention.only("alibi_bias_max", 8)?;
    let mut cfg = cfg.with_alibi(AlibiConfig::Standard).with_dropout(attention.number("attn_pdrop", 0.0)?);
    // transformers treats 0 as absent.
    if let Some(clip) = attention.optional_number("clip_qkv")?.filter(|&clip| clip != 0.0) {
        cfg = cfg.with_clip_qkv(clip);
    }
    if let Some(scale) = attention.optional_number("softmax_scale")? {
        cfg = cfg.with_scale(scale);
    }
    Ok(cfg)
}

/// The scaling of the published checkpoints, for a config that gives none.
fn gpt_oss_scaling(fields: &Fields) -> Result<RopeScaling> {
    Ok(RopeScaling::Yarn {
        factor: 32.0,
        original_context: fields.optional_size("original_max_position_embeddings")?.unwrap_or(4096),
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: false,
    })
}

/// `sizes` are the defaults of `embed_dim` and `num_heads`.
fn deepseek(fields: &Fields, sizes: [usize; 2], rope: Rope) -> Result<MultiHeadLatentAttentionConfig> {
    let num_heads = fields.size(HEADS, sizes[1])?;
    let (nope, rotated) = (fields.size("qk_nope_head_dim", 128)?, fields.size("qk_rope_head_dim", 64)?);
    fields.agrees("num_key_value_heads", num_heads)?;
    fields.agrees("head_dim", rotated)?;
    fields.agrees("qk_head_dim", nope.saturating_add(rotated))?;
    let rope = rope.config(fields, rotated)?;
    if !matches!(rope.scaling(), RopeScaling::None | RopeScaling::Yarn { .. }) {
        // transformers corrects the scale of the scores with any scaling, but only models with YaRN have been checked.
        for name in ["rope_scaling", "rope_parameters"] {
            fields.section(name)?.only("mscale_all_dim", 0)?;
        }
    }
    let cfg = MultiHeadLatentAttentionConfig::new(fields.size(HIDDEN, sizes[0])?, num_heads)
        .with_kv_lora_rank(fields.size("kv_lora_rank", 512)?)
        .with_nope_head_dim(nope)
        .with_rope_head_dim(rotated)
        .with_value_head_dim(fields.size("v_head_dim", 128)?)
        .with_bias(fields.flag("attention_bias", false)?)
        .with_rope(rope)
        // transformers ignores `rms_norm_eps` in the norms of the latents.
        .with_norm_eps(1e-6)
        .with_causal(fields.flag("is_causal", true)?)
        .with_dropout(fields.optional_number("attention_dropout")?.unwrap_or(0.0));
    Ok(match fields.size_or_null("q_lora_rank", Some(1536))? {
        Some(rank) => cfg.with_q_lora_rank(rank),
        None => cfg,
    })
}
