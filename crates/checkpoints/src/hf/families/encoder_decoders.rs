//! Models with an encoder and a decoder, and decoders that attend to the outputs of an encoder that is not theirs. The
//! row is the encoder's self-attention; those of its decoder have its sizes.

use super::{DECODER, DECODER_LAYERS, ENCODER};
use crate::hf::family::{Bias, Family, Heads, Mask, Number, Scale, SharedPlace};
use crate::hf::positions::Positions;
use crate::hf::rope::rope;
use crate::hf::rules;
use candle_attention_core::WeightLayout;

/// With a head, and without.
const BASE: &[&str] = &["model.", ""];
/// With its decoder or by itself, and below a classifier.
const T5_PREFIXES: &[&str] = &["", "transformer."];
const TROCR: &[&str] = &["model.", "decoder.model.", ""];
const PP_FORMULANET: &[&str] = &["model.decoder.", "decoder.", "head.decoder.", ""];
const DROPOUT: Number = Number("attention_dropout", 0.1);

const BART: Family = ENCODER.names(["encoder_layers", "d_model", "encoder_attention_heads"])
    .at(BASE, "encoder.layers.{}.self_attn", WeightLayout::Opt).decoder(&BART_DECODER).cross(&BART_CROSS);
const BART_DECODER: Family = ENCODER.names(["decoder_layers", "d_model", "decoder_attention_heads"]).usual_names(false)
    .aliases(&[("hidden_size", "d_model")]).at(BASE, "decoder.layers.{}.self_attn", WeightLayout::Opt)
    .mask(Mask::Causal);
const BART_CROSS: Family = BART_DECODER.at(BASE, "decoder.layers.{}.encoder_attn", WeightLayout::Opt)
    .mask(Mask::Encoder);
/// Queries of the decoder see each other. Positions are added to the inputs of queries and keys, and not of values.
const DETR: Family = BART.decoder(&BART_DECODER.mask(Mask::Encoder));

const MOONSHINE: Family = ENCODER.of("moonshine").sizes([6, 288, 8])
    .names(["encoder_num_hidden_layers", "hidden_size", "encoder_num_attention_heads"]).usual_names(false)
    .at(BASE, "encoder.layers.{}.self_attn", WeightLayout::Canonical).heads(Heads::Same("encoder_num_key_value_heads"))
    .bias(Bias::QkvIf("attention_bias", false)).rope(rope(10_000.0, 512).partial(0.9).interleaved());
const MOONSHINE_DECODER: Family = MOONSHINE
    .names(["decoder_num_hidden_layers", "hidden_size", "decoder_num_attention_heads"])
    .at(BASE, "decoder.layers.{}.self_attn", WeightLayout::Canonical).heads(Heads::Same("decoder_num_key_value_heads"))
    .mask(Mask::Causal);
const MOONSHINE_CROSS: Family = Family { rope: None, ..MOONSHINE_DECODER }
    .at(BASE, "decoder.layers.{}.encoder_attn", WeightLayout::Canonical).mask(Mask::Encoder);

const T5: Family = DECODER.names(["num_layers", "d_model", "num_heads"]).aliases(&[("head_dim", "d_kv")])
    .at(T5_PREFIXES, "encoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)
    .heads(Heads::Same("num_key_value_heads")).dropout(Number("dropout_rate", 0.1)).mask(Mask::Encoder)
    .scale(Scale::Fixed(1.0)).positions(Positions::Relative { bidirectional: true }).only(&[("is_decoder", "false")])
    .rules(&[rules::t5_heads]).decoder(&T5_DECODER).cross(&T5_CROSS);
const T5_CROSS: Family = DECODER.names([DECODER_LAYERS, "d_model", "num_heads"]).usual_names(false)
    .aliases(&[("head_dim", "d_kv"), ("hidden_size", "d_model"), ("num_attention_heads", "num_heads")])
    .at(T5_PREFIXES, "decoder.block.{}.layer.1.EncDecAttention", WeightLayout::T5)
    .heads(Heads::Same("num_key_value_heads")).mask(Mask::Encoder).scale(Scale::Fixed(1.0))
    .only(&[("is_decoder", "false")]).rules(&[rules::t5_heads]);
const T5_DECODER: Family = T5_CROSS.at(T5_PREFIXES, "decoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)
    .mask(Mask::Causal).positions(Positions::Relative { bidirectional: false });

/// Its prompts are keys of its own.
const NO_PROMPT: &[(&str, &str)] = &[("use_prompt", "false")];

pub(super) const ROWS: &[Family] = &[
    BART.of("bart").sizes([12, 1024, 16]),
    BART.of("blenderbot").sizes([2, 2560, 32]).decoder_sizes([24, 2560, 32]),
    BART.of("blenderbot-small").sizes([8, 512, 16]),
    DETR.of("detr").sizes([6, 256, 8]),
    BART.of("fsmt").sizes([12, 1024, 16]),
    BART.of("m2m_100").sizes([12, 1024, 16]).dropout(DROPOUT),
    BART.of("marian").sizes([12, 1024, 16]),
    BART.of("mbart").sizes([12, 1024, 16]),
    MOONSHINE.decoder(&MOONSHINE_DECODER).cross(&MOONSHINE_CROSS),
    T5.of("mt5").sizes([8, 512, 6]),
    BART.of("mvp").sizes([12, 1024, 16]).only(NO_PROMPT).decoder(&BART_DECODER.only(NO_PROMPT))
        .cross(&BART_CROSS.only(NO_PROMPT)),
    BART.of("nllb-moe").sizes([12, 1024, 16]).dropout(DROPOUT)
        .cross(&BART_CROSS.at(BASE, "decoder.layers.{}.cross_attention", WeightLayout::Opt)),
    BART.of("pegasus").sizes([12, 1024, 16]),
    BART.of("plbart").sizes([6, 768, 12]).dropout(DROPOUT),
    T5.of("pop2piano").sizes([6, 512, 8]),
    BART_DECODER.of("pp_formulanet_text").sizes([8, 512, 16])
        .at(PP_FORMULANET, "layers.{}.self_attn", WeightLayout::Opt)
        .cross(&BART_CROSS.at(PP_FORMULANET, "layers.{}.encoder_attn", WeightLayout::Opt)),
    BART.of("speech_to_text").sizes([12, 256, 4]).decoder_sizes([6, 256, 4]),
    T5.of("switch_transformers").sizes([12, 768, 12]),
    T5.of("t5").sizes([6, 512, 8]),
    DETR.of("table-transformer").sizes([6, 256, 8]),
    BART_DECODER.of("trocr").sizes([12, 1024, 16]).usual_names(true).aliases(&[]).below(TROCR)
        .cross(&BART_CROSS.usual_names(true).aliases(&[]).below(TROCR).rules(&[rules::trocr_cross])),
    T5.of("umt5").sizes([8, 512, 6]).shared_place(SharedPlace::EachLayer)
        .decoder(&T5_DECODER.shared_place(SharedPlace::EachLayer)),
    BART.of("whisper").sizes([4, 384, 6]).bias(Bias::AllButKey).decoder(&BART_DECODER.bias(Bias::AllButKey))
        .cross(&BART_CROSS.bias(Bias::AllButKey)),
];
