//! Models with an encoder and a decoder, and decoders that attend to the outputs of an encoder that is not theirs. The
//! row is the encoder's self-attention, and has two more below it.

use super::{DECODER, DECODER_LAYERS, ENCODER};
use crate::hf::family::{Bias, BiasPlace, Family, Heads, Mask, Rotary, at};
use crate::hf::fields::Fields;
use crate::hf::rope::rope;
use candle_attention_core::{MultiHeadAttentionConfig, RelativeBiasConfig, WeightLayout};
use candle_core::Result;

/// With a head, and without.
const BASE: &[&str] = &["model.", ""];
/// With its decoder or by itself, and below a classifier.
const T5_PREFIXES: &[&str] = &["", "transformer."];

#[rustfmt::skip]
const BART: Family = Family {
    names: ["encoder_layers", "d_model", "encoder_attention_heads"],
    modules: &[at(BASE, "encoder.layers.{}.self_attn", WeightLayout::Opt)], ..ENCODER
};
#[rustfmt::skip]
const BART_DECODER: Family = Family {
    names: ["decoder_layers", "d_model", "decoder_attention_heads"], usual_names: false,
    aliases: &[("hidden_size", "d_model")],
    modules: &[at(BASE, "decoder.layers.{}.self_attn", WeightLayout::Opt)], mask: Mask::Causal, ..BART
};
#[rustfmt::skip]
const BART_CROSS: Family = Family {
    modules: &[at(BASE, "decoder.layers.{}.encoder_attn", WeightLayout::Opt)], mask: Mask::Encoder, ..BART_DECODER
};
/// Queries see each other. Positions are added to the inputs of queries and keys, and not of values.
const DETR_DECODER: Family = Family { mask: Mask::Encoder, ..BART_DECODER };
#[rustfmt::skip]
const MOONSHINE: Family = Family {
    names: ["encoder_num_hidden_layers", "hidden_size", "encoder_num_attention_heads"], usual_names: false,
    modules: &[at(BASE, "encoder.layers.{}.self_attn", WeightLayout::Canonical)],
    heads: Heads::Computed(|fields, heads| fields.agrees("encoder_num_key_value_heads", heads).map(|()| heads)),
    bias: Bias::QkvIf("attention_bias", false),
    rope: Rotary::All(rope(10_000.0, 512).partial("partial_rotary_factor", 0.9).interleaved()), ..ENCODER
};
#[rustfmt::skip]
const MOONSHINE_DECODER: Family = Family {
    names: ["decoder_num_hidden_layers", "hidden_size", "decoder_num_attention_heads"],
    modules: &[at(BASE, "decoder.layers.{}.self_attn", WeightLayout::Canonical)],
    heads: Heads::Computed(|fields, heads| fields.agrees("decoder_num_key_value_heads", heads).map(|()| heads)),
    mask: Mask::Causal, ..MOONSHINE
};
#[rustfmt::skip]
const MOONSHINE_CROSS: Family = Family {
    modules: &[at(BASE, "decoder.layers.{}.encoder_attn", WeightLayout::Canonical)], mask: Mask::Encoder,
    rope: Rotary::None, ..MOONSHINE_DECODER
};
#[rustfmt::skip]
const NLLB_CROSS: Family = Family {
    modules: &[at(BASE, "decoder.layers.{}.cross_attention", WeightLayout::Opt)], ..BART_CROSS
};
/// Its prompts are keys of its own.
const NO_PROMPT: &[(&str, &str)] = &[("use_prompt", "false")];
const MVP: Family = Family { only: NO_PROMPT, ..BART };
const MVP_DECODER: Family = Family { only: NO_PROMPT, ..BART_DECODER };
const MVP_CROSS: Family = Family { only: NO_PROMPT, ..BART_CROSS };
const WHISPER: Family = Family { bias: Bias::AllButKey, ..BART };
const WHISPER_DECODER: Family = Family { bias: Bias::AllButKey, ..BART_DECODER };
const WHISPER_CROSS: Family = Family { bias: Bias::AllButKey, ..BART_CROSS };
#[rustfmt::skip]
const T5: Family = Family {
    names: ["num_layers", "d_model", "num_heads"], aliases: &[("head_dim", "d_kv")],
    modules: &[at(T5_PREFIXES, "encoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)],
    heads: Heads::Computed(|fields, num_heads| {
        fields.agrees("num_key_value_heads", num_heads)?;
        Ok(num_heads)
    }),
    mask: Mask::Encoder, only: &[("is_decoder", "false")],
    adjust: |fields, _, cfg| Ok(t5(fields, cfg)?.with_relative_bias(buckets(fields, true)?)), ..DECODER
};
#[rustfmt::skip]
const T5_DECODER: Family = Family {
    names: [DECODER_LAYERS, "d_model", "num_heads"], usual_names: false,
    aliases: &[("head_dim", "d_kv"), ("hidden_size", "d_model"), ("num_attention_heads", "num_heads")],
    modules: &[at(T5_PREFIXES, "decoder.block.{}.layer.0.SelfAttention", WeightLayout::T5)], mask: Mask::Causal,
    adjust: |fields, _, cfg| Ok(t5(fields, cfg)?.with_relative_bias(buckets(fields, false)?)), ..T5
};
#[rustfmt::skip]
const T5_CROSS: Family = Family {
    modules: &[at(T5_PREFIXES, "decoder.block.{}.layer.1.EncDecAttention", WeightLayout::T5)], mask: Mask::Encoder,
    adjust: |fields, _, cfg| t5(fields, cfg), ..T5_DECODER
};
const UMT5: Family = Family { bias_place: BiasPlace::EachLayer, ..T5 };
const UMT5_DECODER: Family = Family { bias_place: BiasPlace::EachLayer, ..T5_DECODER };
#[rustfmt::skip]
const TROCR: Family = Family {
    model_type: "trocr", sizes: [12, 1024, 16], usual_names: true, aliases: &[],
    modules: &[at(&["model.", "decoder.model.", ""], "decoder.layers.{}.self_attn", WeightLayout::Opt)],
    cross: Some(&Family {
        model_type: "trocr", sizes: [12, 1024, 16], usual_names: true, aliases: &[],
        modules: &[at(&["model.", "decoder.model.", ""], "decoder.layers.{}.encoder_attn", WeightLayout::Opt)],
        adjust: |fields, _, cfg| Ok(match fields.optional("cross_attention_hidden_size")? {
            Some(width) => cfg.with_key_size(width).with_value_size(width),
            None => cfg,
        }),
        ..BART_CROSS
    }),
    ..BART_DECODER
};

/// A model and its three kinds of attention, which extend those given, with their sizes and the dropout of their class.
macro_rules! row {
    (
        $model_type:literal, $encoder:ident $sizes:expr, $decoder:ident and $cross:ident $decoder_sizes:expr,
        $dropout:expr
    ) => {
        Family {
            model_type: $model_type,
            sizes: $sizes,
            dropout: $dropout,
            decoder: Some(&Family { model_type: $model_type, sizes: $decoder_sizes, dropout: $dropout, ..$decoder }),
            cross: Some(&Family { model_type: $model_type, sizes: $decoder_sizes, dropout: $dropout, ..$cross }),
            ..$encoder
        }
    };
}
const PP_FORMULANET: &[&str] = &["model.decoder.", "decoder.", "head.decoder.", ""];
const NO_DROPOUT: (&str, f64) = ("attention_dropout", 0.0);
const DROPOUT: (&str, f64) = ("attention_dropout", 0.1);
const T5_DROPOUT: (&str, f64) = ("dropout_rate", 0.1);

#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    row!("bart", BART [12, 1024, 16], BART_DECODER and BART_CROSS [12, 1024, 16], NO_DROPOUT),
    row!("blenderbot", BART [2, 2560, 32], BART_DECODER and BART_CROSS [24, 2560, 32], NO_DROPOUT),
    row!("blenderbot-small", BART [8, 512, 16], BART_DECODER and BART_CROSS [8, 512, 16], NO_DROPOUT),
    row!("detr", BART [6, 256, 8], DETR_DECODER and BART_CROSS [6, 256, 8], NO_DROPOUT),
    row!("fsmt", BART [12, 1024, 16], BART_DECODER and BART_CROSS [12, 1024, 16], NO_DROPOUT),
    row!("m2m_100", BART [12, 1024, 16], BART_DECODER and BART_CROSS [12, 1024, 16], DROPOUT),
    row!("marian", BART [12, 1024, 16], BART_DECODER and BART_CROSS [12, 1024, 16], NO_DROPOUT),
    row!("mbart", BART [12, 1024, 16], BART_DECODER and BART_CROSS [12, 1024, 16], NO_DROPOUT),
    row!("moonshine", MOONSHINE [6, 288, 8], MOONSHINE_DECODER and MOONSHINE_CROSS [6, 288, 8], NO_DROPOUT),
    row!("mt5", T5 [8, 512, 6], T5_DECODER and T5_CROSS [8, 512, 6], T5_DROPOUT),
    row!("mvp", MVP [12, 1024, 16], MVP_DECODER and MVP_CROSS [12, 1024, 16], NO_DROPOUT),
    row!("nllb-moe", BART [12, 1024, 16], BART_DECODER and NLLB_CROSS [12, 1024, 16], DROPOUT),
    row!("pegasus", BART [12, 1024, 16], BART_DECODER and BART_CROSS [12, 1024, 16], NO_DROPOUT),
    row!("plbart", BART [6, 768, 12], BART_DECODER and BART_CROSS [6, 768, 12], DROPOUT),
    row!("pop2piano", T5 [6, 512, 8], T5_DECODER and T5_CROSS [6, 512, 8], T5_DROPOUT),
    Family {
        model_type: "pp_formulanet_text", sizes: [8, 512, 16],
        modules: &[at(PP_FORMULANET, "layers.{}.self_attn", WeightLayout::Opt)],
        cross: Some(&Family {
            model_type: "pp_formulanet_text", sizes: [8, 512, 16],
            modules: &[at(PP_FORMULANET, "layers.{}.encoder_attn", WeightLayout::Opt)], ..BART_CROSS
        }),
        ..BART_DECODER
    },
    row!("speech_to_text", BART [12, 256, 4], BART_DECODER and BART_CROSS [6, 256, 4], NO_DROPOUT),
    row!("switch_transformers", T5 [12, 768, 12], T5_DECODER and T5_CROSS [12, 768, 12], T5_DROPOUT),
    row!("t5", T5 [6, 512, 8], T5_DECODER and T5_CROSS [6, 512, 8], T5_DROPOUT),
    row!("table-transformer", BART [6, 256, 8], DETR_DECODER and BART_CROSS [6, 256, 8], NO_DROPOUT),
    TROCR,
    row!("umt5", UMT5 [8, 512, 6], UMT5_DECODER and T5_CROSS [8, 512, 6], T5_DROPOUT),
    row!("whisper", WHISPER [4, 384, 6], WHISPER_DECODER and WHISPER_CROSS [4, 384, 6], NO_DROPOUT),
];

fn t5(fields: &Fields, cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
    Ok(cfg.with_head_dim(fields.get_or("d_kv", 64)?).with_scale(1.0))
}

fn buckets(fields: &Fields, bidirectional: bool) -> Result<RelativeBiasConfig> {
    Ok(RelativeBiasConfig::new(bidirectional)
        .with_num_buckets(fields.get_or("relative_attention_num_buckets", 32)?)
        .with_max_distance(fields.get_or("relative_attention_max_distance", 128)?))
}
