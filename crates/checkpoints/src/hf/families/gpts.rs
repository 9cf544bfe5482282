//! Decoders of text whose names are their own, GPT-2's or OPT's.

use super::{Bias, DECODER, Family, HIDDEN, Heads, MODEL, Mask, Number, Scale, WQKV, layer_norm};
use crate::hf::names::LAYERS;
use crate::hf::rope::{Rotated, rope};
use crate::hf::rules;
use crate::hf::windows::{self, Window};
use candle_attention_core::WeightLayout;
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_modules::norm::{QkNormKind, QkNormScope};

const TRANSFORMER: &[&str] = &["transformer.", ""];
const QUERY_KEY_VALUE: WeightLayout = WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead);
const C_ATTN: WeightLayout = WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead);
const CANARY_PREFIXES: &[&str] = &["model.decoder.", "decoder.", ""];
const MUSICGEN_PREFIXES: &[&str] = &["decoder.model.decoder.", "model.decoder.", "decoder.", ""];
/// GPT-2's names of sizes. The names of newer families are aliases.
const GPT: Family = DECODER.names(["n_layer", "n_embd", "n_head"]).sizes([12, 768, 12]).heads(Heads::Equal)
    .dropout(Number("attn_pdrop", 0.1)).bias(Bias::All);
const GPT2: Family = GPT.of("gpt2").at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d).rules(&[rules::gpt2_scale]);
const MUSICGEN: Family = DECODER.of("musicgen_decoder").sizes([24, 1024, 16]).heads(Heads::Equal)
    .at(MUSICGEN_PREFIXES, "layers.{}.self_attn", WeightLayout::Opt);

const COHERE_ASR_PREFIXES: &[&str] = &["model.transf_decoder._decoder.", "transf_decoder._decoder."];
/// Its decoder.
const COHERE_ASR: Family = DECODER.of("cohere_asr").sizes([8, 1024, 8]).bias(Bias::AllIf("attention_bias", true))
    .at(COHERE_ASR_PREFIXES, "layers.{}.first_sub_layer", WeightLayout::Nemo);

const KOSMOS_2_5: Family = DECODER.of("kosmos_2_5_text_model").names(["layers", "embed_dim", "attention_heads"])
    .sizes([24, 1536, 16]).heads(Heads::Equal).bias(Bias::All)
    .at(&["text_model.model.", "model.", ""], "layers.{}.self_attn", WeightLayout::Opt);

const DIA_PREFIXES: &[&str] = &["model.decoder.", "decoder.", ""];
const DIA: Family = DECODER.of("dia_decoder").sizes([18, 2048, 16]).grouped(4, 128)
    .at(DIA_PREFIXES, "layers.{}.self_attention", WeightLayout::Canonical).rope(rope(10_000.0, 3072))
    .scale(Scale::Fixed(1.0));
/// It has its own numbers of heads.
const DIA_CROSS: Family = DECODER.names([LAYERS, HIDDEN, "cross_num_attention_heads"]).sizes([18, 2048, 16])
    .usual_names(false).heads(Heads::By(rules::dia_key_heads))
    .at(DIA_PREFIXES, "layers.{}.cross_attention", WeightLayout::Canonical).mask(Mask::Encoder)
    .scale(Scale::Fixed(1.0)).rules(&[rules::dia_cross]);

const CANARY: Family = DECODER.of("canary_decoder").sizes([8, 1024, 8]).below(CANARY_PREFIXES)
    .bias(Bias::AllIf("attention_bias", true));

/// Decoders whose names are their own, GPT-2's or OPT's, in alphabetical order.
pub(super) const ROWS: &[Family] = &[
    DECODER.of("biogpt").sizes([24, 1024, 16]).heads(Heads::Equal).bias(Bias::All)
        .at(&["biogpt.", ""], "layers.{}.self_attn", WeightLayout::Opt)
        .dropout(Number("attention_probs_dropout_prob", 0.1)),
    DECODER.of("bloom").names(["n_layer", HIDDEN, "n_head"]).sizes([2, 64, 8]).aliases(&[("n_embed", HIDDEN)])
        .at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE).heads(Heads::Equal).bias(Bias::All)
        .rules(&[rules::alibi]),
    DECODER.of("clvp_decoder").sizes([30, 1024, 16]).heads(Heads::Equal)
        .at(&["model.decoder.", "speech_decoder_model.model.decoder.", "decoder.", ""], "layers.{}.attn", WeightLayout::Opt)
        .bias(Bias::OutAndQkvIf("use_attention_bias", true)).dropout(Number("attention_dropout", 0.1)),
    CANARY.cross(&CANARY.at(CANARY_PREFIXES, "layers.{}.encoder_attn", WeightLayout::Canonical).mask(Mask::Encoder)),
    COHERE_ASR.cross(
        &COHERE_ASR.at(COHERE_ASR_PREFIXES, "layers.{}.second_sub_layer", WeightLayout::Nemo).mask(Mask::Encoder),
    ),
    GPT.of("ctrl").sizes([48, 1280, 16]).dropout(Number("attention_dropout", 0.0))
        .at(TRANSFORMER, "h.{}.multi_head_attention", WeightLayout::Ctrl),
    GPT2.of("decision_transformer").names(["n_layer", HIDDEN, "n_head"]).sizes([3, 128, 1])
        .at(&["encoder.", ""], "h.{}.attn", WeightLayout::Conv1d),
    DIA.cross(&DIA_CROSS),
    DECODER.of("falcon").sizes([32, 4544, 71]).aliases(&[("n_embed", HIDDEN)])
        .at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE).heads(Heads::By(rules::falcon_key_heads))
        .head_dim_follows(true).bias(Bias::AllIf("bias", false))
        .rope(rope(10_000.0, 2048).layers(Rotated::If(rules::has_no_alibi))).rules(&[rules::alibi_if_flag]),
    GPT2,
    GPT.of("gpt_bigcode").at(TRANSFORMER, "h.{}.attn", C_ATTN).heads(Heads::By(rules::bigcode_key_heads))
        .rules(&[rules::bigcode_scale]),
    DECODER.of("gpt_neo").names(["num_layers", HIDDEN, "num_heads"]).sizes([24, 2048, 16]).heads(Heads::Equal)
        .at(TRANSFORMER, "h.{}.attn.attention", WeightLayout::Opt).window(Window::By(windows::gpt_neo)).bias(Bias::Out)
        .scale(Scale::Fixed(1.0)),
    DECODER.of("gpt_neox").sizes([44, 6144, 64]).heads(Heads::Equal)
        .at(&["gpt_neox.", ""], "layers.{}.attention", QUERY_KEY_VALUE).bias(Bias::AllIf("attention_bias", true))
        .rope(rope(10_000.0, 2048).theta(Number("rotary_emb_base", 10_000.0)).part(Number("rotary_pct", 0.25))),
    GPT.of("gptj").sizes([28, 4096, 16]).at(TRANSFORMER, "h.{}.attn", WeightLayout::Opt).bias(Bias::None)
        .dropout(Number("attn_pdrop", 0.0)).rules(&[rules::gptj_rotary]),
    DECODER.of("gpt_neox_japanese").sizes([32, 2560, 32]).heads(Heads::Equal)
        .at(&["gpt_neox_japanese.", ""], "layers.{}.attention", QUERY_KEY_VALUE)
        .dropout(Number("attention_dropout", 0.1))
        .rope(rope(10_000.0, 2048).theta(Number("rotary_emb_base", 10_000.0)).part(Number("rotary_pct", 1.0))),
    GPT2.of("imagegpt").sizes([24, 512, 8]),
    KOSMOS_2_5.of("kosmos_2_text_model").sizes([24, 2048, 32]).dropout(Number("attention_dropout", 0.1))
        .rules(&[rules::layer_norm_of_output]),
    KOSMOS_2_5,
    DECODER.of("mpt").names(["n_layers", "d_model", "n_heads"]).sizes([24, 2048, 16])
        .at(TRANSFORMER, "blocks.{}.attn", WQKV).heads(Heads::Equal).only(&[("no_bias", "true")]).rules(&[rules::mpt]),
    MUSICGEN.cross(&MUSICGEN.at(MUSICGEN_PREFIXES, "layers.{}.encoder_attn", WeightLayout::Opt).mask(Mask::Encoder)),
    MUSICGEN.of("musicgen_melody_decoder"),
    GPT.of("openai-gpt").at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d),
    DECODER.of("opt").sizes([12, 768, 12]).heads(Heads::Equal)
        .at(MODEL, "decoder.layers.{}.self_attn", WeightLayout::Opt).bias(Bias::AllIf("enable_bias", true)),
    DECODER.of("persimmon").sizes([36, 4096, 64]).heads(Heads::Equal).bias(Bias::All)
        .at(MODEL, "layers.{}.self_attn", QUERY_KEY_VALUE).rope(rope(10_000.0, 16_384).partial(0.5))
        .qk_norm(layer_norm(QkNormKind::Layer, QkNormScope::PerHead)).only(&[("qk_layernorm", "true")]),
    DECODER.of("phi").sizes([24, 2048, 32]).bias(Bias::All).at(MODEL, "layers.{}.self_attn", WeightLayout::Phi)
        .rope(rope(10_000.0, 2048).partial(0.5))
        .qk_norm(layer_norm(QkNormKind::Layer, QkNormScope::PerHead).flag("qk_layernorm")),
    DECODER.of("xglm").names(["num_layers", "d_model", "attention_heads"]).sizes([24, 1024, 16]).heads(Heads::Equal)
        .bias(Bias::All).at(MODEL, "layers.{}.self_attn", WeightLayout::Opt).dropout(Number("attention_dropout", 0.1)),
];
