//! Decoders of text whose names are their own, GPT-2's or OPT's.

use super::{DECODER, HIDDEN, MODEL, WQKV, layer_norm};
use crate::hf::family::{Bias, Family, Heads, Mask, Rotary, at};
use crate::hf::rope::rope;
use crate::hf::rules::{falcon_key_heads, gpt_neo_window, mpt};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{AlibiConfig, ContextNorm, QkNormKind, QkNormScope, RopeConfig, RopeStyle, WeightLayout};

const TRANSFORMER: &[&str] = &["transformer.", ""];
const QUERY_KEY_VALUE: WeightLayout = WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead);
const C_ATTN: WeightLayout = WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead);
const CANARY: &[&str] = &["model.decoder.", "decoder.", ""];
const MUSICGEN_PREFIXES: &[&str] = &["decoder.model.decoder.", "model.decoder.", "decoder.", ""];
/// GPT-2's names of its sizes, with those of newer families as aliases.
#[rustfmt::skip]
const GPT: Family = Family {
    names: ["n_layer", "n_embd", "n_head"], sizes: [12, 768, 12], heads: Heads::Equal, dropout: ("attn_pdrop", 0.1),
    bias: Bias::All, ..DECODER
};
#[rustfmt::skip]
const GPT2: Family = Family {
    model_type: "gpt2", modules: &[at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d)],
    adjust: |fields, layer, cfg| {
        let width = if fields.flag("scale_attn_weights", true)? { (cfg.head_dim() as f64).sqrt() } else { 1.0 };
        let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
        let depth = if by_layer { layer as f64 + 1.0 } else { 1.0 };
        Ok(if width == 1.0 || by_layer { cfg.with_scale(1.0 / (width * depth)) } else { cfg })
    },
    ..GPT
};
#[rustfmt::skip]
const MUSICGEN: Family = Family {
    model_type: "musicgen_decoder", sizes: [24, 1024, 16], heads: Heads::Equal,
    modules: &[at(MUSICGEN_PREFIXES, "layers.{}.self_attn", WeightLayout::Opt)],
    cross: Some(&Family {
        model_type: "musicgen_decoder", sizes: [24, 1024, 16], heads: Heads::Equal, mask: Mask::Encoder,
        modules: &[at(MUSICGEN_PREFIXES, "layers.{}.encoder_attn", WeightLayout::Opt)], ..DECODER
    }),
    ..DECODER
};

const COHERE_ASR_PREFIXES: &[&str] = &["model.transf_decoder._decoder.", "transf_decoder._decoder."];
/// Its decoder.
#[rustfmt::skip]
const COHERE_ASR: Family = Family {
    model_type: "cohere_asr", sizes: [8, 1024, 8], bias: Bias::AllIf("attention_bias", true),
    modules: &[at(COHERE_ASR_PREFIXES, "layers.{}.first_sub_layer", WeightLayout::Nemo)],
    cross: Some(&Family {
        model_type: "cohere_asr", sizes: [8, 1024, 8], bias: Bias::AllIf("attention_bias", true), mask: Mask::Encoder,
        modules: &[at(COHERE_ASR_PREFIXES, "layers.{}.second_sub_layer", WeightLayout::Nemo)], ..DECODER
    }),
    ..DECODER
};

#[rustfmt::skip]
const KOSMOS_2_5: Family = Family {
    model_type: "kosmos_2_5_text_model", names: ["layers", "embed_dim", "attention_heads"], sizes: [24, 1536, 16],
    heads: Heads::Equal, bias: Bias::All,
    modules: &[at(&["text_model.model.", "model.", ""], "layers.{}.self_attn", WeightLayout::Opt)], ..DECODER
};

/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "biogpt", sizes: [24, 1024, 16], heads: Heads::Equal, bias: Bias::All,
        modules: &[at(&["biogpt.", ""], "layers.{}.self_attn", WeightLayout::Opt)],
        dropout: ("attention_probs_dropout_prob", 0.1), ..DECODER
    },
    Family {
        model_type: "bloom", names: ["n_layer", HIDDEN, "n_head"], sizes: [2, 64, 8], aliases: &[("n_embed", HIDDEN)],
        modules: &[at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE)], heads: Heads::Equal, bias: Bias::All,
        adjust: |_, _, cfg| Ok(cfg.with_alibi(AlibiConfig::Standard)), ..DECODER
    },
    Family {
        model_type: "canary_decoder", sizes: [8, 1024, 8],
        modules: &[at(CANARY, "layers.{}.self_attn", WeightLayout::Canonical)],
        bias: Bias::AllIf("attention_bias", true),
        cross: Some(&Family {
            model_type: "canary_decoder", sizes: [8, 1024, 8],
            modules: &[at(CANARY, "layers.{}.encoder_attn", WeightLayout::Canonical)],
            bias: Bias::AllIf("attention_bias", true), mask: Mask::Encoder, ..DECODER
        }),
        ..DECODER
    },
    COHERE_ASR,
    Family {
        model_type: "ctrl", sizes: [48, 1280, 16], dropout: ("attention_dropout", 0.0),
        modules: &[at(TRANSFORMER, "h.{}.multi_head_attention", WeightLayout::Ctrl)], ..GPT
    },
    Family {
        model_type: "decision_transformer", names: ["n_layer", HIDDEN, "n_head"], sizes: [3, 128, 1],
        modules: &[at(&["encoder.", ""], "h.{}.attn", WeightLayout::Conv1d)], ..GPT2
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
    GPT2,
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
        model_type: "gpt_neo", names: ["num_layers", HIDDEN, "num_heads"], sizes: [24, 2048, 16], heads: Heads::Equal,
        modules: &[at(TRANSFORMER, "h.{}.attn.attention", WeightLayout::Opt)], window: gpt_neo_window,
        adjust: |_, _, cfg| Ok(cfg.with_out_bias(true).with_scale(1.0)), ..DECODER
    },
    Family {
        model_type: "gpt_neox", sizes: [44, 6144, 64], heads: Heads::Equal,
        modules: &[at(&["gpt_neox.", ""], "layers.{}.attention", QUERY_KEY_VALUE)],
        bias: Bias::AllIf("attention_bias", true),
        rope: Rotary::All(rope(10_000.0, 2048).theta_from("rotary_emb_base").partial("rotary_pct", 0.25)), ..DECODER
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
    Family {
        model_type: "gpt_neox_japanese", sizes: [32, 2560, 32], heads: Heads::Equal,
        modules: &[at(&["gpt_neox_japanese.", ""], "layers.{}.attention", QUERY_KEY_VALUE)],
        dropout: ("attention_dropout", 0.1),
        rope: Rotary::All(rope(10_000.0, 2048).theta_from("rotary_emb_base").partial("rotary_pct", 1.0)), ..DECODER
    },
    Family { model_type: "imagegpt", sizes: [24, 512, 8], ..GPT2 },
    Family {
        model_type: "kosmos_2_text_model", sizes: [24, 2048, 32], dropout: ("attention_dropout", 0.1),
        adjust: |fields, _, cfg| {
            let eps = fields.get_or("layer_norm_eps", 1e-5)?;
            Ok(cfg.with_context_norm(ContextNorm { kind: QkNormKind::Layer, eps }))
        },
        ..KOSMOS_2_5
    },
    KOSMOS_2_5,
    Family {
        model_type: "mpt", names: ["n_layers", "d_model", "n_heads"], sizes: [24, 2048, 16],
        modules: &[at(TRANSFORMER, "blocks.{}.attn", WQKV)],
        heads: Heads::Equal, only: &[("no_bias", "true")],
        adjust: |fields, _, cfg| mpt(&fields.section("attn_config")?, cfg), ..DECODER
    },
    MUSICGEN,
    Family { model_type: "musicgen_melody_decoder", cross: None, ..MUSICGEN },
    Family {
        model_type: "openai-gpt", modules: &[at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d)], ..GPT
    },
    Family {
        model_type: "opt", sizes: [12, 768, 12], heads: Heads::Equal,
        modules: &[at(MODEL, "decoder.layers.{}.self_attn", WeightLayout::Opt)],
        bias: Bias::AllIf("enable_bias", true), ..DECODER
    },
    Family {
        model_type: "persimmon", sizes: [36, 4096, 64], heads: Heads::Equal, bias: Bias::All,
        modules: &[at(MODEL, "layers.{}.self_attn", QUERY_KEY_VALUE)],
        rope: Rotary::All(rope(10_000.0, 16_384).partial("partial_rotary_factor", 0.5)),
        qk_norm: Some(layer_norm(None, QkNormKind::Layer, QkNormScope::PerHead)), only: &[("qk_layernorm", "true")],
        ..DECODER
    },
    Family {
        model_type: "phi", sizes: [24, 2048, 32], bias: Bias::All,
        modules: &[at(MODEL, "layers.{}.self_attn", WeightLayout::Phi)],
        rope: Rotary::All(rope(10_000.0, 2048).partial("partial_rotary_factor", 0.5)),
        qk_norm: Some(layer_norm(Some("qk_layernorm"), QkNormKind::Layer, QkNormScope::PerHead)),
        ..DECODER
    },
    Family {
        model_type: "xglm", names: ["num_layers", "d_model", "attention_heads"], sizes: [24, 1024, 16],
        heads: Heads::Equal, bias: Bias::All, modules: &[at(MODEL, "layers.{}.self_attn", WeightLayout::Opt)],
        dropout: ("attention_dropout", 0.1), ..DECODER
    },
];
