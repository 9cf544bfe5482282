//! Decoders of text whose names are their own, GPT-2's or OPT's.

use super::{Bias, DECODER, Family, HIDDEN, Heads, MODEL, Mask, Number, Scale, WQKV, layer_norm};
use crate::hf::names::LAYERS;
use crate::hf::rope::{Rotated, rope};
use crate::hf::rules;
use crate::hf::shapes;
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
const GPT: Family = DECODER.layers_from("n_layer").width_from("n_embd").query_heads_from("n_head").layers(12)
    .width(768).query_heads(12).heads(Heads::Equal)
    .dropout(Number("attn_pdrop", 0.1)).bias(Bias::All);
const GPT2: Family = GPT.of("gpt2").at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d).rules(&[rules::gpt2_scale]);
const MUSICGEN: Family = DECODER.of("musicgen_decoder").layers(24).width(1024).query_heads(16).heads(Heads::Equal)
    .at(MUSICGEN_PREFIXES, "layers.{}.self_attn", WeightLayout::Opt);

const COHERE_ASR_PREFIXES: &[&str] = &["model.transf_decoder._decoder.", "transf_decoder._decoder."];
/// The decoder of Cohere ASR.
const COHERE_ASR: Family = DECODER.of("cohere_asr").layers(8).width(1024).query_heads(8)
    .bias(Bias::AllIf("attention_bias", true))
    .at(COHERE_ASR_PREFIXES, "layers.{}.first_sub_layer", WeightLayout::Nemo);

const KOSMOS_2_5: Family = DECODER.of("kosmos_2_5_text_model").layers_from("layers").width_from("embed_dim")
    .query_heads_from("attention_heads")
    .layers(24).width(1536).query_heads(16).heads(Heads::Equal).bias(Bias::All)
    .at(&["text_model.model.", "model.", ""], "layers.{}.self_attn", WeightLayout::Opt);

const DIA_PREFIXES: &[&str] = &["model.decoder.", "decoder.", ""];
const DIA: Family = DECODER.of("dia_decoder").layers(18).width(2048).query_heads(16).grouped(4, 128)
    .at(DIA_PREFIXES, "layers.{}.self_attention", WeightLayout::Canonical).rope(rope(10_000.0, 3072))
    .scale(Scale::Fixed(1.0));
/// The cross-attention of Dia, which has other numbers of heads than its self-attention.
const DIA_CROSS: Family = DECODER.layers_from(LAYERS).width_from(HIDDEN).query_heads_from("cross_num_attention_heads")
    .layers(18).width(2048).query_heads(16)
    .usual_names(false).heads(Heads::By(shapes::dia_key_heads))
    .at(DIA_PREFIXES, "layers.{}.cross_attention", WeightLayout::Canonical).mask(Mask::Encoder)
    .scale(Scale::Fixed(1.0)).rules(&[shapes::dia_cross]);

const CANARY: Family = DECODER.of("canary_decoder").layers(8).width(1024).query_heads(8).below(CANARY_PREFIXES)
    .bias(Bias::AllIf("attention_bias", true));

/// Decoders whose names are their own, GPT-2's or OPT's, in alphabetical order.
pub(super) const ROWS: &[Family] = &[
    DECODER.of("biogpt").layers(24).width(1024).query_heads(16).heads(Heads::Equal).bias(Bias::All)
        .at(&["biogpt.", ""], "layers.{}.self_attn", WeightLayout::Opt)
        .dropout(Number("attention_probs_dropout_prob", 0.1)),
    DECODER.of("bloom").layers_from("n_layer").width_from(HIDDEN).query_heads_from("n_head").layers(2).width(64)
        .query_heads(8).aliases(&[("n_embed", HIDDEN)])
        .at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE).heads(Heads::Equal).bias(Bias::All)
        .rules(&[rules::alibi]),
    DECODER.of("clvp_decoder").layers(30).width(1024).query_heads(16).heads(Heads::Equal)
        .at(&["model.decoder.", "speech_decoder_model.model.decoder.", "decoder.", ""], "layers.{}.attn", WeightLayout::Opt)
        .bias(Bias::OutAndQkvIf("use_attention_bias", true)).dropout(Number("attention_dropout", 0.1)),
    CANARY.cross(&CANARY.at(CANARY_PREFIXES, "layers.{}.encoder_attn", WeightLayout::Canonical).mask(Mask::Encoder)),
    COHERE_ASR.cross(
        &COHERE_ASR.at(COHERE_ASR_PREFIXES, "layers.{}.second_sub_layer", WeightLayout::Nemo).mask(Mask::Encoder),
    ),
    GPT.of("ctrl").layers(48).width(1280).query_heads(16).dropout(Number("attention_dropout", 0.0))
        .at(TRANSFORMER, "h.{}.multi_head_attention", WeightLayout::Ctrl),
    GPT2.of("decision_transformer").layers_from("n_layer").width_from(HIDDEN).query_heads_from("n_head").layers(3)
        .width(128).query_heads(1)
        .at(&["encoder.", ""], "h.{}.attn", WeightLayout::Conv1d),
    DIA.cross(&DIA_CROSS),
    DECODER.of("falcon").layers(32).width(4544).query_heads(71).aliases(&[("n_embed", HIDDEN)])
        .at(TRANSFORMER, "h.{}.self_attention", QUERY_KEY_VALUE).heads(Heads::By(shapes::falcon_key_heads))
        .head_dim_follows(true).bias(Bias::AllIf("bias", false))
        .rope(rope(10_000.0, 2048).layers(Rotated::If(rules::has_no_alibi))).rules(&[rules::alibi_if_flag]),
    GPT2,
    GPT.of("gpt_bigcode").at(TRANSFORMER, "h.{}.attn", C_ATTN).heads(Heads::By(shapes::bigcode_key_heads))
        .rules(&[rules::bigcode_scale]),
    DECODER.of("gpt_neo").layers_from("num_layers").width_from(HIDDEN).query_heads_from("num_heads").layers(24)
        .width(2048).query_heads(16).heads(Heads::Equal)
        .at(TRANSFORMER, "h.{}.attn.attention", WeightLayout::Opt).window(Window::By(windows::gpt_neo)).bias(Bias::Out)
        .scale(Scale::Fixed(1.0)),
    DECODER.of("gpt_neox").layers(44).width(6144).query_heads(64).heads(Heads::Equal)
        .at(&["gpt_neox.", ""], "layers.{}.attention", QUERY_KEY_VALUE).bias(Bias::AllIf("attention_bias", true))
        .rope(rope(10_000.0, 2048).theta(Number("rotary_emb_base", 10_000.0)).part(Number("rotary_pct", 0.25))),
    GPT.of("gptj").layers(28).width(4096).query_heads(16).at(TRANSFORMER, "h.{}.attn", WeightLayout::Opt)
        .bias(Bias::None)
        .dropout(Number("attn_pdrop", 0.0)).rules(&[rules::gptj_rotary]),
    DECODER.of("gpt_neox_japanese").layers(32).width(2560).query_heads(32).heads(Heads::Equal)
        .at(&["gpt_neox_japanese.", ""], "layers.{}.attention", QUERY_KEY_VALUE)
        .dropout(Number("attention_dropout", 0.1))
        .rope(rope(10_000.0, 2048).theta(Number("rotary_emb_base", 10_000.0)).part(Number("rotary_pct", 1.0))),
    GPT2.of("imagegpt").layers(24).width(512).query_heads(8),
    // The latents that make tokens of an image: its keys are the image and the latents.
    KOSMOS_2_5.of("kosmos-2").section("text_config").layers(24).width(2048).query_heads(32).mask(Mask::Encoder)
        .at(&["image_to_text_projection.", "model.image_to_text_projection."], "x_attn", WeightLayout::Opt).once(true)
        .dropout(Number("attention_dropout", 0.1)),
    KOSMOS_2_5.of("kosmos_2_text_model").layers(24).width(2048).query_heads(32)
        .dropout(Number("attention_dropout", 0.1))
        .rules(&[rules::layer_norm_of_output]),
    KOSMOS_2_5,
    DECODER.of("mpt").layers_from("n_layers").width_from("d_model").query_heads_from("n_heads").layers(24).width(2048)
        .query_heads(16)
        .at(TRANSFORMER, "blocks.{}.attn", WQKV).heads(Heads::Equal).only(&[("no_bias", "true")]).rules(&[rules::mpt]),
    MUSICGEN.cross(&MUSICGEN.at(MUSICGEN_PREFIXES, "layers.{}.encoder_attn", WeightLayout::Opt).mask(Mask::Encoder)),
    MUSICGEN.of("musicgen_melody_decoder"),
    GPT.of("openai-gpt").at(TRANSFORMER, "h.{}.attn", WeightLayout::Conv1d),
    DECODER.of("opt").layers(12).width(768).query_heads(12).heads(Heads::Equal)
        .at(MODEL, "decoder.layers.{}.self_attn", WeightLayout::Opt).bias(Bias::AllIf("enable_bias", true)),
    DECODER.of("persimmon").layers(36).width(4096).query_heads(64).heads(Heads::Equal).bias(Bias::All)
        .at(MODEL, "layers.{}.self_attn", QUERY_KEY_VALUE).rope(rope(10_000.0, 16_384).partial(0.5))
        .qk_norm(layer_norm(QkNormKind::Layer, QkNormScope::PerHead)).only(&[("qk_layernorm", "true")]),
    DECODER.of("phi").layers(24).width(2048).query_heads(32).bias(Bias::All)
        .at(MODEL, "layers.{}.self_attn", WeightLayout::Phi)
        .rope(rope(10_000.0, 2048).partial(0.5))
        .qk_norm(layer_norm(QkNormKind::Layer, QkNormScope::PerHead).flag("qk_layernorm")),
    DECODER.of("xglm").layers_from("num_layers").width_from("d_model").query_heads_from("attention_heads").layers(24)
        .width(1024).query_heads(16).heads(Heads::Equal)
        .bias(Bias::All).at(MODEL, "layers.{}.self_attn", WeightLayout::Opt).dropout(Number("attention_dropout", 0.1)),
];
